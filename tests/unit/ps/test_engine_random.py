"""Random interleavings of everything that can happen, for every policy: exactly once, in order, and it goes on."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import pytest
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.policies.base import BatchId, Policy, PolicyView
from doll.ps.policies.doll import Doll, RecentDoll
from doll.records.control import Join
from engine_runs import calm_steps, check_random_run, play, random_steps
from engine_world import POLICIES, World
from fuzzing import examples, seeds
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

pytestmark = pytest.mark.slow  # long random runs


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(120), deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(50, 4000))
@example(seed=3991, length=898)  # asp: a worker answers a grant that has timed out with a Nack, and gets another
@example(seed=28, length=512)  # a Nack is lost, and the grant's time limit passes
@example(seed=470, length=431)  # wsp: a grant comes behind those of the next two batches, between their computations
@example(seed=2162841446, length=282)  # wsp: a grant comes behind that of the next batch, before either is computed
@example(seed=1014, length=3218)  # doll, sets: a grant of an earlier server with the numbers of the present one
def test_every_batch_is_applied_exactly_once_whatever_happens(policy: str, seed: int, length: int) -> None:
    check_random_run(POLICIES[policy], seed, length)


class Watched(World):
    """Counts what its sets were like."""

    def __init__(self, policy: str) -> None:
        self.seen: Counter[str] = Counter()
        super().__init__(policy)

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        if isinstance(action, ev.ApplyUpdate):
            workers = [item.push.worker for item in action.sets]
            self.seen["several batches in a set"] += any(len(item.batches) > 1 for item in action.sets)
            self.seen["two sets of one worker in an update"] += len(set(workers)) < len(workers)
        elif isinstance(action, ev.FetchGradient):
            self.seen["added at once" if action.in_order else "added later"] += 1
        return super().perform(action)


class Unnumbered(Engine):
    """Does not look at the number of a machine."""

    def _on_join(self, event: Join) -> None:
        super()._on_join(structs.replace(event, incarnation=0))


def test_an_engine_that_gives_a_slot_back_to_an_older_machine_is_caught() -> None:
    def caught(seed: int) -> bool:
        world = World("doll")
        world.engine_class = Unnumbered
        world.start_server()
        try:
            play(world, random_steps(seed, 4000))
        except AssertionError as error:
            return "an older machine gets its slot back" in str(error)
        return False

    assert any(caught(seed) for seed in range(20))


def test_the_random_runs_reach_the_refusals_and_returns() -> None:
    """Otherwise the test above would prove little."""
    seen: Counter[str] = Counter()
    void = 0
    for seed in seeds(60):
        world = Watched("doll, sets" if seed % 2 else "doll")
        play(world, random_steps(seed, 4000))
        seen += world.seen
        world.settle()
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
        "refused_duplicate",
        "refused_partly",
        "refused_order",
        "grants_sent_again",
        "several batches in a set",
        "two sets of one worker in an update",
        "added at once",
        "added later",
    }
    assert expected <= set(seen), expected - set(seen)
    assert void > 0, "no update was redone after a restart of the server"


class Unbounded(RecentDoll):
    """Makes its update whatever it leaves behind."""

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return Doll.collect(self, view)


class WithoutBound(World):
    def make_policy(self) -> Policy:
        return Unbounded(2, 1)


def test_groups_of_recent_versions_wait_at_the_bound_and_without_it_are_caught() -> None:
    seen: Counter[str] = Counter()
    caught = 0
    for seed in seeds(40):
        steps = calm_steps(seed, 2000)
        world = World("doll, recent")
        play(world, steps)
        world.check_ledger()
        for update in world.updates:
            seen["older"] += any(base < update.version - 1 for _, _, base in update.members)
            seen["larger"] += len(update.members) > 2
        other = WithoutBound("doll, recent")
        play(other, steps)
        with contextlib.suppress(AssertionError):
            other.check_ledger()
            continue
        caught += 1
    assert seen["older"] > 10
    assert seen["larger"] > 0
    assert caught > 0
