"""Partitions move between workers while a job runs: whatever goes wrong meanwhile, all of them go on."""

from __future__ import annotations

import itertools
from collections import Counter
from operator import gt

import pytest
from channel_process import PLACES, POLICIES
from channel_world import World
from doll.consumers.protocol.worker_core import WorkerCore
from doll.records.control import Scale
from fuzzing import SHARE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]  # loads torch

RUNS = 300 if SHARE == 1.0 else 1
DISORDERLY_STEPS, CALM_ROUNDS = 60, 120


def calm(world: World) -> None:
    """Nothing goes wrong for a while: every process does what it can. Who has a link that has failed at the other end
    notices."""
    for process in world.live():
        if process.is_linked != process.is_linked_at_server:
            world.change_link(process)
    for _ in range(CALM_ROUNDS):
        world.now += 0.05
        for process in world.live():
            while any(process.to_worker.values()) and not process.is_dead:
                world.deliver_to_worker(process)
            core = process.core
            if core is None or process.is_dead:
                continue
            while core.has_room and core.served:
                world.do(process, core.batch_ready(process.batch()))
            while process.orders and not process.is_dead:
                world.compute(process)
            world.do(process, core.tick(world.now))
        while any(channel for process in world.live() for channel in process.to_server.values()):
            world.deliver_to_server()
        world.pass_time(0.05, world.live())


@pytest.mark.parametrize("policy", POLICIES)
def test_each_partition_goes_on_with_the_workers_that_there_are(policy: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(1, RUNS + 1):
        world = World(policy, 10_000 + seed)
        for _ in range(DISORDERLY_STEPS):
            world.step()
        workers = world.rng.randrange(1, PLACES + 1)
        released = frozenset(number for number in range(workers - 1) if world.rng.random() < 0.2)
        world.handle(Scale(workers=workers, run_id="", released=tuple(released)))
        world.partitions += seed % 3
        world.look_at_topic()
        for worker in range(PLACES):
            if not world.processes[worker]:
                world.start_process(worker)
        calm(world)
        engine = world.engine
        for _ in range(5):  # partitions move for what is unread, too, and the workers learn of it a moment later
            if not engine.moves.targets and _served(world) == _known(world):
                break
            calm(world)
        assert not engine.moves.targets, (policy, seed)
        assert (engine.moves.num_workers, engine.moves.released) == (workers, released)
        served = _served(world)
        assert sorted(itertools.chain.from_iterable(served.values())) == list(range(world.partitions))
        serving = [number for number in range(workers) if number not in released]
        assert [number for number, own in served.items() if own] == serving[: world.partitions]
        assert served == _known(world), "as the workers know it"
        before = engine.snapshot(world.now).applied
        for _ in range(5):  # a worker computes its batches in the order in which it has read them
            calm(world)
            after = engine.snapshot(world.now).applied
            if all(map(gt, after, before)):
                break
        else:
            pytest.fail(f"{policy}, seed {seed}: from {before} to {after}")
        counts += engine.counters + world.counts
    assert counts["partitions added"]
    assert counts["requeued_moved"] or RUNS < 50


def _served(world: World) -> dict[int, list[int]]:
    return {worker.number: sorted(worker.queue.partitions) for worker in world.engine.workers()}


def _known(world: World) -> dict[int, list[int]]:
    return {worker.number: sorted(_core(world, worker.number).served) for worker in world.engine.workers()}


def _core(world: World, worker: int) -> WorkerCore:
    (process,) = world.processes[worker]
    return process.protocol
