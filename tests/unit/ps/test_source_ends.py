"""A source that has ended is learned to its last record, under every policy, whatever happened before."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from channel_process import POLICIES, Process
from channel_world import World, play
from doll.consumers.protocol.worker_core import Batch
from doll.ps.checkpointing import decode_snapshot
from doll.ps.engine.events import GrantsLost, TopicGrew
from doll.records.control import Alive, SourceEnded
from doll.task.batches import SampleBatch
from fuzzing import SHARE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]  # loads torch

_ROUNDS = 400


def read_to(process: Process, ends: tuple[int, ...]) -> None:
    """As far as there is room; the last batch of a partition is cut there."""
    core = process.protocol
    for number in list(core.served):
        while (served := core.served.get(number)) is not None and core.has_room:
            batch, bounds = served.next_batch, served.bounds(4)
            lo, hi = bounds.span(batch)
            if lo >= ends[number]:
                break
            if hi > ends[number]:
                assert batch >= served.cuts.decided
                bounds.cut(batch, ends[number])
                hi = ends[number]
            process.expected.read[number, batch].add((lo, hi))
            count = 0 if (number * 7 + batch) % 11 == 0 else hi - lo
            data = SimpleNamespace(
                samples=SampleBatch(np.zeros(count), np.zeros(count)), span=(number, lo, hi), offsets=range(lo, hi)
            )
            process._world.do(process, core.batch_ready(Batch(batch, data, count, 0.0, partition=number)))


def is_learned(world: World, ends: tuple[int, ...]) -> bool:
    learned = world.expected.moments[world.term, world.engine.version].ends
    return learned + (0,) * (len(ends) - len(learned)) == ends


def learn_to_the_end(world: World) -> None:
    """The source ends a few records behind what was read. Nothing fails any more, but for one restart of the server."""
    highest = [0] * world.partitions
    for (partition, _), spans in world.expected.read.items():
        highest[partition] = max(highest[partition], *(hi for _, hi in spans))
    ends = tuple(hi + world.cut_rng.randrange(9) for hi in highest)
    for process in world.live():  # links that have failed at one end: the other end notices
        if world.engine.worker(process.worker).stalled:
            world.end(process)  # its answer may be lost
        process.is_linked = process.is_linked_at_server = False
        world.handle(GrantsLost(worker=process.worker))
        if process.core is not None and not process.is_dead:
            world.do(process, process.core.resend())
    world.handle(SourceEnded(ends=ends))
    restarts = world.cut_rng.random() < 0.3
    for number in range(_ROUNDS):
        for process in world.live():
            for channel in ("late", "link", "kafka"):
                while process.to_worker[channel] and not process.is_dead:
                    world.receive(process, process.to_worker[channel].popleft())
            if process.core is not None and not process.is_dead:
                read_to(process, ends)
                world.do(process, process.core._announce_all())
                process.to_server["kafka"].append(Alive(worker=process.worker, session=process.core.session))
            while process.orders and not process.is_dead:
                world.compute(process)
            for channel in ("late", "link", "kafka"):
                while process.to_server[channel] and not process.is_dead:
                    world.handle(process.to_server[channel].popleft())  # type: ignore[arg-type]
        world.pass_time(0.6, [])
        world.handle(TopicGrew(partitions=world.partitions))
        if not world.engine.ending.ends:  # a server that was lost before it had stored it
            world.handle(SourceEnded(ends=ends))
        if restarts and number > 3 and world.saved is not None and decode_snapshot(world.saved).source_ends:
            restarts = False
            world.start_server()
        if is_learned(world, ends):
            assert world.engine.ending.num_left is None
            return
    moment, left = world.expected.moments[world.term, world.engine.version], world.engine.ending.num_left
    raise AssertionError(f"{left} batches left: the model ends at {moment.ends}, the source at {ends}")


@pytest.mark.parametrize("policy", POLICIES)
def test_all_of_a_source_is_learned(policy: str) -> None:
    for seed in range(1000 if SHARE == 1.0 else 15):
        world = play(policy, seed)
        try:
            learn_to_the_end(world)
        except Exception as exc:
            raise AssertionError(f"policy {policy!r}, seed {seed}: {type(exc).__name__}: {exc}") from exc


def test_a_move_takes_back_no_gradient_as_it_comes() -> None:
    """The server kept its values, and added them to the sum of a later group: the next update failed."""
    learn_to_the_end(play("doll, sets", 7110))
