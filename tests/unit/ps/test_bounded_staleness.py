"""SSP and ESSP under random schedules, against clocks that are counted apart, and mutants that must be caught."""

from __future__ import annotations

from functools import partial

import doll.ps.engine.engine
import pytest
from clock_world import ClockWorld, announce, drive
from doll.ps.engine.engine import Engine
from doll.ps.policies.base import PolicyView, WorkerCounters
from doll.ps.policies.clocks import WaitingAtGate, WorkerClocks
from doll.ps.policies.essp import Essp, EsspPolicyConfig
from doll.ps.policies.ssp import BoundedStalenessConfig, Ssp, SspPolicyConfig
from doll.records.control import Grant, NewVersion
from engine_runs import play, random_steps
from engine_world import World
from fuzzing import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

pytestmark = pytest.mark.slow  # loads torch

CONFIGS = {"ssp": SspPolicyConfig, "essp": EsspPolicyConfig}


class Counted(ClockWorld):
    """Attributes:
    reached: how often weights were as old as they may be.
    most_under_way: the most batches of one worker that were granted and not in the model.
    """

    def __init__(self, policy: BoundedStalenessConfig, make: type[Ssp] | None = None) -> None:
        self._staleness = policy.staleness
        self.reached = self.most_under_way = 0
        super().__init__(policy, None if make is None else partial(make, policy.staleness))

    def check(self, engine: Engine, grant: Grant, seen: list[int] | None) -> None:
        clock = grant.first + self.offset(grant.worker)
        needed = clock - self._staleness
        assert self.minimum >= needed, "too far ahead of the slowest"
        under_way = grant.first + 1 - engine.worker(grant.worker).applied
        self.most_under_way = max(self.most_under_way, under_way)
        for worker in engine.workers():
            if self.is_active(worker) and seen is not None:
                has = seen[worker.number] + self.offset(worker.number)
                assert has >= needed, "the weights miss a batch that they must hold"
                self.reached += has - clock == -self._staleness


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 2**32), length=st.integers(50, 3000), staleness=st.integers(0, 4), under_way=st.integers(1, 6)
)
@example(seed=1, length=2000, staleness=0, under_way=2)
def test_no_grant_is_further_ahead_or_misses_more_than_the_staleness_allows(
    name: str, seed: int, length: int, staleness: int, under_way: int
) -> None:
    world = Counted(CONFIGS[name](staleness=staleness, under_way=under_way))
    play(world, random_steps(seed, length))
    world.settle()
    world.check_ledger()
    assert world.most_under_way <= min(under_way, staleness + 1)


@pytest.mark.parametrize("under_way", [1, 3])
def test_the_random_runs_have_as_many_batches_of_a_worker_under_way_as_they_may(under_way: int) -> None:
    """Otherwise the test above would prove little."""
    worlds = [Counted(EsspPolicyConfig(staleness=2, under_way=under_way)) for _ in range(10)]
    for seed, world in enumerate(worlds):
        play(world, random_steps(seed, 2000))
    assert max(world.most_under_way for world in worlds) == under_way


def most_named(seeds: range) -> int:
    """The most grants of one worker that keep their weights in the blob store."""
    most = 0
    for seed in seeds:
        world = World(SspPolicyConfig(staleness=5, under_way=6))
        for step in random_steps(seed, 1500):
            play(world, [step])
            standing = [worker.queue.computing_grants for worker in world.engine.workers()]
            most = max(most, *(sum(grant.names for grant in grants) for grants in standing))
    return most


def test_only_the_two_newest_grants_of_a_worker_keep_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_named(range(3)) == 2
    monkeypatch.setattr(doll.ps.engine.engine, "_NAMING_GRANTS", 6)
    assert most_named(range(3)) > 2


class GatedByTheServersCount(Ssp):
    """Uses the clock that the server has of a worker, which lags while its push is on its way, for the next batch."""

    def max_under_way(self) -> int:
        return 2

    def _needed_by(self, view: PolicyView, number: int) -> int:
        return self.needed(view.worker(number).applied, self._clocks.offset(number))


class OneLooser(Ssp):
    """Lets workers be one batch further ahead."""

    def needed(self, batch: int, offset: int) -> int:
        return super().needed(batch, offset) - 1

    def min_version(self, view: PolicyView, worker: int) -> int:
        return self._clocks.version_of(min(self._needed_by(view, worker) + 1, self._clocks.minimum))


class NeverRefreshing(Ssp):
    """Lets workers compute on any weights that they have."""

    def min_version(self, view: PolicyView, worker: int) -> int:
        return 0


class OfThePast(Ssp):
    """Asks for one clock less than it must."""

    def min_version(self, view: PolicyView, worker: int) -> int:
        return self._clocks.version_of(self._needed_by(view, worker) - 1)


@pytest.mark.parametrize("mutant", [OneLooser, NeverRefreshing, OfThePast, GatedByTheServersCount])
def test_a_policy_that_allows_too_much_is_caught(mutant: type[Ssp]) -> None:
    def caught(seed: int) -> bool:
        world = Counted(SspPolicyConfig(staleness=1), mutant)
        try:
            play(world, random_steps(seed, 2000))
        except AssertionError as error:
            return "too far ahead" in str(error) or "misses a batch" in str(error) or "miss a batch" in str(error)
        return False

    assert any(caught(seed) for seed in range(30))


def test_the_random_runs_wait_at_the_gate_and_see_the_oldest_weights_that_are_allowed() -> None:
    """Otherwise the test above would prove little."""
    worlds = [Counted(SspPolicyConfig(staleness=1)) for _ in range(10)]
    for seed, world in enumerate(worlds):
        play(world, random_steps(seed, 2000))
    assert min(sum(getattr(world, name) for world in worlds) for name in ("grants", "waited", "reached")) > 20


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_worker_waits_for_the_slowest_after_so_many_batches(staleness: int) -> None:
    world = World(SspPolicyConfig(staleness=staleness), max_pending=12)
    drive(world, 3, 0, 1, 2)
    for worker in range(3):
        world.high[worker] += 40
    announce(world, 1, 2)
    drive(world, 60, 0)
    assert [worker.applied for worker in world.engine.workers()] == [staleness + 1, 0, 0]


@pytest.mark.parametrize("config", [SspPolicyConfig, EsspPolicyConfig])
def test_nobody_waits_for_a_worker_without_batches_and_it_goes_on_at_the_minimum(
    config: type[SspPolicyConfig] | type[EsspPolicyConfig],
) -> None:
    world = Counted(config(staleness=1))
    drive(world, 3, 0, 1, 2)
    world.high[0] += 20
    for _ in range(5):
        drive(world, 20, 0)
        world.store_checkpoint()
    assert [worker.applied for worker in world.engine.workers()] == [10, 0, 0]
    assert world.engine.shortfall() == 0
    world.high[1] += 12
    announce(world, 1)
    world.high[0] += 20
    drive(world, 40, 0)
    assert (world.engine.worker(0).applied, world.minimum) == (11, 9), "worker 1 has batches: it is waited for"
    for _ in range(6):
        drive(world, 20, 0, 1)
        world.store_checkpoint()
    assert [worker.applied for worker in world.engine.workers()] == [20, 6, 0]


class WaitingForAll(Ssp):
    """Waits for workers that have nothing to compute, too."""

    def _has_work(self, worker: WorkerCounters) -> bool:
        return True


def test_a_worker_without_batches_would_hold_the_others_up() -> None:
    world = World(SspPolicyConfig(staleness=1))
    world.make_policy = lambda: WaitingForAll(1)  # type: ignore[method-assign]
    world.start_server()
    drive(world, 3, 0, 1, 2)
    world.high[0] += 20
    drive(world, 60, 0)
    assert [worker.applied for worker in world.engine.workers()] == [2, 0, 0]


def test_the_staleness_that_is_measured_is_of_workers_that_have_batches() -> None:
    """Its bound is s + 1 also where one stream is a tenth as fast as the others."""
    rates = (100.0, 100.0, 10.0)
    settings = SimulationSettings(
        rates_per_s=rates, batch_size=10, policy=SspPolicyConfig(staleness=2), seconds=200.0, compute_s=0.05
    )
    system = System(settings, measure=True)
    system.run()
    assert system.measures is not None
    staleness = system.measures.report().staleness
    assert sum(staleness.values()) > 2_000
    assert min(staleness) >= -3
    assert max(staleness) <= 2
    learned = [worker.applied for worker in system.engine.workers()]
    assert learned[0] > 8 * learned[2] > 0


def test_a_minimum_that_jumps_starts_all_who_waited_for_less() -> None:
    """The slowest leaves: workers that wait for different clocks may go on at once."""
    world = World(SspPolicyConfig(staleness=1), workers=3, max_pending=12)
    drive(world, 3, 0, 1, 2)
    for worker in range(3):
        world.high[worker] += 40
    announce(world, 1, 2)
    (process,) = world.processes[1]
    for step in (world.receive_next, world.receive_next, world.compute, world.send, world.send):
        step(process)
    drive(world, 60, 0)
    assert [worker.applied for worker in world.engine.workers()] == [2, 1, 0]
    (process,) = world.processes[2]
    world.leave(process)
    drive(world, 20, 0, 1)
    assert all(worker.applied > 2 for worker in list(world.engine.workers())[:2])


def test_weights_that_a_grant_allows_are_used_again_and_essp_s_newer_ones_instead_of_them() -> None:
    bases = {}
    for name, config in CONFIGS.items():
        world = World(config(staleness=5), max_pending=12)
        drive(world, 3, 0, 1, 2)
        for worker in range(3):
            world.high[worker] += 12
        drive(world, 80, 0, 1, 2)
        bases[name] = [base for update in world.updates for _, _, base in update.members]
        sent = [record for channel in world.commands for record in channel if isinstance(record, NewVersion)]
        assert bool(sent) == (name == "essp")
        assert any(isinstance(record, Grant) and record.min_version < record.version for record in world.commands[0])
    assert sum(bases["essp"]) > sum(bases["ssp"])


def test_a_worker_that_comes_back_starts_at_the_minimum_and_no_lower() -> None:
    clocks = WorkerClocks(2)
    for worker in (0, 1):
        clocks.set(worker, 0, is_active=True)
    clocks.set(1, 0, is_active=False)
    clocks.set(0, 7, is_active=True)
    assert clocks.advance(version=7)
    assert (clocks.minimum, clocks.version_of(5), clocks.version_of(7)) == (7, 7, 7)
    clocks.set(1, 0, is_active=True)
    assert not clocks.advance(version=7)
    assert clocks.offset(1) == 7
    clocks.set(0, 9, is_active=True)
    clocks.set(1, 1, is_active=True)
    assert clocks.advance(version=10)
    assert (clocks.minimum, clocks.version_of(7), clocks.version_of(8)) == (8, 7, 10)
    clocks.set(0, 9, is_active=False)
    clocks.set(1, 1, is_active=False)
    assert not clocks.advance(version=10), "nobody is live: the minimum stays"
    again = WorkerClocks(2)
    again.restore(clocks.state())
    again.set(1, 1, is_active=True)
    assert (again.minimum, again.offset(1), again.version_of(8)) == (8, 7, 10)
    assert [again.minimum_at(version) for version in (0, 6, 7, 9, 10, 11)] == [0, 0, 7, 7, 8, 8]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"minimum": 1, "offsets": {}, "reached": [[0, 0]]},
        {"minimum": 0, "offsets": {"a": 1}, "reached": [[0, 0]]},
        {"minimum": 0, "offsets": {}, "reached": []},
        {"minimum": 3, "offsets": {}, "reached": [[5, 9], [3, 9]]},
        {"minimum": 0, "offsets": [], "reached": [[0, 0]]},
    ],
)
def test_a_state_of_something_else_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Essp(3).restore(state)


def test_who_waits_at_the_gate_may_change_what_it_needs() -> None:
    gate = WaitingAtGate()
    for worker, needed in ((0, 3), (1, 5), (2, 5), (1, 2), (2, None)):
        gate.set(worker, needed)
    assert gate.open(1) == []
    assert gate.open(9) == [0, 1]
    assert gate.open(9) == []
