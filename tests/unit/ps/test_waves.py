"""WSP under random schedules: what a batch must hold of every worker, in waves and in batches; and that it is SSP for
waves of one batch."""

from __future__ import annotations

from functools import partial

import pytest
from clock_world import ClockWorld, RecordedWorld, announce, drive
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.policies.base import PolicyView
from doll.ps.policies.ssp import SspPolicyConfig
from doll.ps.policies.wsp import Wsp, WspPolicyConfig
from doll.records.control import Grant
from engine_runs import play, random_steps
from engine_world import World
from fuzzing import examples, seeds
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wave_mutants import OneWaveLooser, Ungated

pytestmark = pytest.mark.slow  # loads torch


class Waves(ClockWorld):
    """Attributes:
    missing: the most batches of another worker that a batch was computed without, among those before its own place;
        only of grants without an offset.
    """

    def __init__(self, policy: WspPolicyConfig, make: type[Wsp] | None = None) -> None:
        self._n, self._d = policy.wave_batches, policy.clock_distance
        self.missing = 0
        make_policy = None if make is None else partial(make, self._n, self._d)
        super().__init__(policy, make_policy, unit=self._n, max_pending=12)

    def check(self, engine: Engine, grant: Grant, seen: list[int] | None) -> None:
        place = grant.first + 1 + self.offset(grant.worker) * self._n  # p = 1, 2, ...
        wave = place // self._n - 2
        needed = wave - self._d + 1 if wave >= self._d else 0
        assert self.minimum >= needed, "too far ahead of the slowest"
        if seen is None:
            return
        s_local = self._n - 1
        s_global = (self._d + 1) * self._n + s_local - 1
        for worker in engine.workers():
            if not self.is_active(worker):
                continue
            has = seen[worker.number] + self.offset(worker.number) * self._n
            assert has // self._n >= needed, "the weights miss a wave that they must hold"
            if not any(self.offsets.values()) and place > (self._d + 1) * self._n + s_local:
                assert has >= place - (s_global + 1), "the weights miss more than s_global batches"
                self.missing = max(self.missing, place - 1 - has)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(50, 3000), n=st.integers(1, 5), d=st.integers(0, 3))
@example(seed=1, length=2000, n=4, d=0)
def test_no_grant_is_further_ahead_or_misses_more_than_the_distance_allows(
    seed: int, length: int, n: int, d: int
) -> None:
    world = Waves(WspPolicyConfig(wave_batches=n, clock_distance=d))
    play(world, random_steps(seed, length))
    world.settle()
    world.check_ledger()


@pytest.mark.parametrize(("n", "d"), [(1, 0), (2, 0), (4, 0), (3, 1), (2, 2)])
def test_the_bound_s_global_is_reached(n: int, d: int) -> None:
    """Worker 0 runs as far as it may, the others give a wave at a time: s_global = (D + 1) N_m + N_m - 2."""
    world = Waves(WspPolicyConfig(wave_batches=n, clock_distance=d))
    drive(world, 3, 0, 1, 2)
    for worker in range(3):
        world.high[worker] += 200
    announce(world, 1, 2)
    for _ in range(6):
        drive(world, 8 * n, 0)
        world.store_checkpoint()
        drive(world, 3 * n, 1, 2)
        world.store_checkpoint()
    assert world.grants > 10
    assert world.missing == (d + 1) * n + (n - 1) - 1


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_waves_of_one_batch_are_ssp(staleness: int) -> None:
    """The same events get the same answers, action by action."""
    count = 0
    for seed in seeds(20):
        seen: list[list[ev.EngineAction]] = []
        for policy in (
            WspPolicyConfig(wave_batches=1, clock_distance=staleness),
            SspPolicyConfig(staleness=staleness, under_way=1),
        ):
            world = RecordedWorld(policy)
            play(world, random_steps(seed, 1500))
            seen.append(world.actions)
        assert seen[0] == seen[1]
        count += len(seen[0])
    assert count > 200


def test_each_push_is_a_wave() -> None:
    world = World(WspPolicyConfig(wave_batches=3, clock_distance=1))
    drive(world, 3, 0, 1, 2)
    for worker in range(3):
        world.high[worker] += 24
    for _ in range(8):
        drive(world, 12, 0, 1, 2)
        world.store_checkpoint()
    sizes = [len(update.members) for update in world.updates]
    assert sizes
    assert set(sizes) == {3}
    starts = [update.members[0][1] for update in world.updates]
    assert all(start % 3 == 0 for start in starts)


def test_a_worker_that_leaves_pushes_the_part_of_its_wave_that_it_has() -> None:
    world = World(WspPolicyConfig(wave_batches=4, clock_distance=0))
    drive(world, 3, 0, 1, 2)
    world.high[0] += 8  # four batches
    announce(world, 0)
    assert world.engine.worker(0).computing == 4
    (process,) = world.processes[0]
    for _ in range(4):
        world.receive_next(process)
    world.compute(process)
    world.compute(process)
    world.leave(process)
    assert [len(update.members) for update in world.updates] == [2]
    assert world.engine.worker(0).computing == 0


def test_a_worker_that_waits_at_the_gate_with_half_a_wave_is_not_taken_for_lost() -> None:
    """No push is due: the time limit of a grant begins when the rest of the wave is granted."""
    world = World(WspPolicyConfig(wave_batches=2, clock_distance=0), max_pending=8)
    drive(world, 3, 0, 1, 2)
    world.high[0] += 16
    for worker in (1, 2):
        world.high[worker] += 4
        announce(world, worker)
    drive(world, 30, 0)
    assert world.engine.worker(0).computing == 1, "the last batch of its second wave waits"
    for _ in range(40):
        drive(world, 2, 0, 1, 2)
        world.tick(1.0)
    assert world.engine.counters["requeued"] == 0
    drive(world, 30, 0, 1, 2)
    assert world.engine.worker(0).applied >= 4


def test_a_wave_begins_with_all_of_its_batches_and_nobody_waits_for_a_worker_without_one() -> None:
    world = Waves(WspPolicyConfig(wave_batches=3, clock_distance=0))
    drive(world, 3, 0, 1, 2)
    world.high[0] += 24
    world.high[1] += 4  # two batches
    for _ in range(6):
        drive(world, 20, 0, 1)
        world.store_checkpoint()
    assert [worker.applied for worker in world.engine.workers()] == [12, 0, 0]
    assert world.engine.worker(1).computing == 0
    world.high[1] += 2
    for _ in range(3):
        drive(world, 20, 0, 1)
        world.store_checkpoint()
    assert [worker.applied for worker in world.engine.workers()] == [12, 3, 0]


def test_a_pipeline_waits_for_a_worker_that_has_begun_a_wave() -> None:
    """Its waves begin with their first batch, so that no stage is idle."""
    world = World(WspPolicyConfig(wave_batches=2, clock_distance=0, pipelined=True), max_pending=8)
    drive(world, 3, 0, 1, 2)
    world.high[0] += 40
    world.high[1] += 2
    announce(world, 1)
    for _ in range(4):
        drive(world, 20, 0, 1)
        world.store_checkpoint()
    assert world.engine.worker(0).applied == 2
    assert world.engine.worker(1).computing == 1
    world.high[1] += 2
    for _ in range(8):
        drive(world, 20, 0, 1)
        world.store_checkpoint()
    assert [worker.applied for worker in world.engine.workers()] == [20, 2, 0]


class OfThePast(Wsp):
    def min_version(self, view: PolicyView, worker: int) -> int:
        return self._clocks.version_of(self._needed_by(view, worker) - 1)


@pytest.mark.parametrize("mutant", [OneWaveLooser, Ungated, OfThePast])
def test_a_policy_that_allows_too_much_is_caught(mutant: type[Wsp]) -> None:
    def caught(seed: int) -> bool:
        world = Waves(WspPolicyConfig(wave_batches=2, clock_distance=0), mutant)
        try:
            play(world, random_steps(seed, 2000))
        except AssertionError as error:
            return "too far ahead" in str(error) or "the weights miss" in str(error)
        return False

    assert any(caught(seed) for seed in range(30))


@pytest.mark.parametrize("values", [{"wave_batches": 0}, {"wave_batches": 10**6}, {"clock_distance": -1}])
def test_numbers_out_of_range_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        WspPolicyConfig(**values)
