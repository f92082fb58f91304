"""Random interleavings of everything that can happen to an engine, and what must hold after any of them."""

from __future__ import annotations

import random

from doll.config.policy import PolicyConfig
from doll.consumers.protocol.worker_core import Send
from doll.ps.engine.events import GrantsLost
from engine_world import World

# Faults are rarer than work, so that runs get somewhere.
_WORK = {"produce": 60, "read": 60, "send": 100, "receive": 100, "compute": 60, "checkpoint": 20, "tick": 10}
_FAULTS = (
    *("end_set", "end_set", "end_set"),
    "break_link",
    "break_link_in_part",
    "send_grants_again",
    "push_again",
    "spoil_push",
    "reorder",
    "kill_worker",
    "start_worker",
    "launch",
    "start_again",
    "kill_ps",
    "start_ps",
    "lose_blobs",
    "lose_gradient",
    "pause",
    "resume",
    "leave",
    "long_tick",
    "time_limit",
    *("lose_answer", "lose_answer", "lose_answer"),
)
_STEPS = [step for step, weight in _WORK.items() for _ in range(weight)] + list(_FAULTS)


def random_steps(seed: int, length: int) -> list[tuple[int, int]]:
    """Steps for `play`."""
    rng = random.Random(seed)
    return [(rng.randrange(10_000), rng.randrange(1000)) for _ in range(length)]


def calm_steps(seed: int, length: int) -> list[tuple[int, int]]:
    """As `random_steps`, with a tenth of the faults: more is applied in so many steps."""
    rng, num_work = random.Random(seed), sum(_WORK.values())
    return [
        (rng.randrange(num_work) if rng.random() > 0.1 else rng.randrange(len(_STEPS)), rng.randrange(1000))
        for _ in range(length)
    ]


def play(world: World, steps: list[tuple[int, int]]) -> None:
    """Move `world`; the engine's invariants are checked after every event."""
    for step, who in steps:
        worker = who % world.settings.num_workers
        live = world.processes[worker]
        process = live[who // world.settings.num_workers % len(live)] if live else None
        match _STEPS[step % len(_STEPS)]:
            case "produce":
                world.high[worker] += 1 + who % 5
            case "read" if process:
                world.read(process)
            case "send" if process:
                world.send(process)
            case "receive" if process:
                world.receive_next(process)
            case "compute" if process:
                world.compute(process)
            case "lose_gradient" if process:
                world.compute(process, blob_lost=True)
            case "end_set" if process:
                world.compute(process, end_set=True)
            case "break_link":
                world.break_link(worker)
            case "break_link_in_part":
                world.break_link(worker, lost=who)
            case "send_grants_again":
                world.handle(GrantsLost(worker=worker))
            case "push_again" if process and process.core:
                process.outbox.extend(action.record for action in process.core.resend() if isinstance(action, Send))
            case "spoil_push" if process:
                world.spoil_push(process)
            case "reorder" if process:
                world.reorder(process)
            case "checkpoint":
                world.store_checkpoint()
            case "tick":
                world.tick(0.7)
            case "long_tick":
                world.tick(31.0)
            case "time_limit":
                world.pass_time_limit()
            case "lose_answer" if process:
                world.lose_answer(process)
            case "kill_worker":
                world.kill_worker(worker)
            case "start_worker":
                world.start_process(worker)  # also beside a living one: a zombie
            case "launch":
                world.launch(worker)
            case "start_again":  # the container of a machine, perhaps one that has been replaced
                world.start_process(worker, who % (world.launched[worker] + 1))
            case "kill_ps":
                world.kill_server()
            case "start_ps":
                world.start_server()
            case "lose_blobs":
                world.lose_blobs()
            case "pause" if process:
                process.paused = True
            case "resume" if process:
                process.paused = False
            case "leave" if process:
                world.leave(process)


def check_random_run(policy: PolicyConfig, seed: int, length: int, *, world: World | None = None) -> World:
    """Every batch is applied exactly once, whatever happens, and what is left could not make another update."""
    world = World(policy) if world is None else world
    play(world, random_steps(seed, length))
    world.settle()
    world.check_ledger()
    engine = world.engine
    assert engine is not None
    bounds = [
        worker.queue.partitions[worker.number].bounds(world.settings.records_per_batch) for worker in engine.workers()
    ]
    complete = [
        batch + (high - at.lo(batch)) // at.size
        for high, at, batch in zip(world.high, bounds, engine.snapshot(world.now).applied, strict=True)
    ]
    applied = engine.snapshot(world.now).applied
    left = sum(complete) - sum(applied)
    if policy.name == "doll":
        assert left < policy.batches_per_update(world.settings.num_workers)
    elif policy.name in ("asp", "vap"):
        assert left == 0
    else:  # Liveness: with a push of every worker at hand, every other policy makes an update.
        size = policy.batches_per_push
        assert left == 0 or any(c - a < size for c, a in zip(complete, applied, strict=True)), (complete, applied)
    return world
