"""Random interleavings of everything that can happen, for every policy (digest 5.3, I1, I3, I4, I5, I7)."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from doll.config.policy import POLICIES as REGISTRY
from doll.ps import events as ev
from doll.ps.engine import Engine
from doll.ps.policies.doll import DollPolicyConfig
from doll.records import Join
from engine_world import POLICIES, World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

pytestmark = pytest.mark.slow  # long random runs

# Faults are rarer than work, so that runs get somewhere.
WORK = {"produce": 60, "read": 60, "send": 100, "receive": 100, "compute": 60, "checkpoint": 20, "tick": 10}
FAULTS = (
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
)
STEPS = [step for step, weight in WORK.items() for _ in range(weight)] + list(FAULTS)


def play(world: World, steps: list[tuple[int, int]]) -> None:
    for step, who in steps:
        worker = who % world.settings.num_workers
        live = world.live(worker)
        process = live[who // world.settings.num_workers % len(live)] if live else None
        match STEPS[step % len(STEPS)]:
            case "produce":
                world.high[worker] += 1 + who % 5
            case "read" if process:
                world.read(process)
            case "send" if process:
                world.send(process)
            case "receive" if process:
                world.receive(process)
            case "compute" if process:
                world.compute(process)
            case "lose_gradient" if process:
                world.compute(process, blob_lost=True)
            case "checkpoint":
                world.store_checkpoint()
            case "tick":
                world.tick(0.7)
            case "long_tick":
                world.tick(31.0)
            case "kill_worker":
                world.kill_worker(worker)
            case "start_worker":
                world.start_worker(worker)  # also beside a living one: a zombie
            case "launch":
                world.launch(worker)
            case "start_again":  # the container of a machine, perhaps one that has been replaced
                world.start_worker(worker, who % (world.launched[worker] + 1))
            case "kill_ps":
                world.kill_ps()
            case "start_ps":
                world.start_ps()
            case "lose_blobs":
                world.blobs.clear()
            case "pause" if process:
                process.paused = True
            case "resume" if process:
                process.paused = False
            case "leave" if process:
                world.leave(process)


def random_steps(seed: int, length: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randrange(10_000), rng.randrange(1000)) for _ in range(length)]


@pytest.mark.parametrize("policy", REGISTRY.names())
@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(50, 4000))
def test_every_batch_is_applied_exactly_once_whatever_happens(policy: str, seed: int, length: int) -> None:
    world = World(policy)
    play(world, random_steps(seed, length))
    world.settle()
    world.check_ledger()
    engine = world.engine
    assert engine is not None
    size = world.settings.records_per_batch
    complete = [(high - origin) // size for high, origin in zip(world.high, world.origins, strict=True)]
    applied = engine.snapshot(world.now).applied
    left = sum(complete) - sum(applied)
    # Liveness: what is left could not make another update.
    match policy:
        case "doll":
            assert 0 <= left < DollPolicyConfig.model_validate(POLICIES["doll"]).group_size
        case "asp":
            assert left == 0
        case "bsp":
            assert any(c == a for c, a in zip(complete, applied, strict=True)), (complete, applied)


class Unnumbered(Engine):
    """Does not look at the number of a machine."""

    def _on_join(self, event: Join, now: float, actions: list[ev.EngineAction]) -> None:
        super()._on_join(structs.replace(event, incarnation=0), now, actions)


def test_an_engine_that_gives_a_slot_back_to_an_older_machine_is_found_out() -> None:
    def found(seed: int) -> bool:
        world = World("doll")
        world.engine_class = Unnumbered
        world.start_ps()
        try:
            play(world, random_steps(seed, 4000))
        except AssertionError as error:
            return "an older machine gets its slot back" in str(error)
        return False

    assert any(found(seed) for seed in range(20))


def test_every_policy_is_played() -> None:
    """A policy that joins the registry joins this test."""
    assert set(POLICIES) == set(REGISTRY.names())


def test_the_random_runs_reach_the_refusals_and_returns() -> None:
    """Otherwise the test above would prove little."""
    seen: Counter[str] = Counter()
    void = 0
    for seed in range(60):
        world = World("doll")
        play(world, random_steps(seed, 4000))
        world.settle()
        assert world.engine is not None
        seen += world.engine.counters
        void += len(world.updates) - len(world.lineage())
    expected = {
        "refused_late",
        "refused_fenced",
        "refused_not_joined",
        "requeued_lease",
        "requeued_rejoin",
        "requeued_blob_lost",
        "requeued_nack_weights",
        "requeued_timeout",
        "workers_lost",
    }
    assert expected <= set(seen), expected - set(seen)
    assert void > 0, "no update was redone after a restart of the server"
