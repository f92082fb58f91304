"""VAP under random schedules and against an adversary: what a view misses when its step is applied, on the vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest
from benchmarks.paper.vap_bound import PerWorkerVap
from doll.ps.engine import events as ev
from doll.ps.policies.asp import Asp
from doll.ps.policies.base import BatchId, Policy, PolicyView
from doll.ps.policies.vap import Vap, VapPolicyConfig
from engine_runs import calm_steps, play, random_steps
from engine_world import World
from fuzzing import examples, seeds
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow  # loads torch

Vector = npt.NDArray[np.float64]


def random_vector(key: str) -> Vector:
    """Some are small and some are large, so that the last one of a worker does not tell the next."""
    rng = np.random.default_rng(crc32(key.encode()))
    return rng.normal(size=4) * rng.choice((0.1, 1.0, 3.0))


def same_direction(key: str) -> Vector:
    """The adversary: nothing of what is missed cancels out."""
    return np.full(4, 0.1)


def random_size(key: str) -> Vector:
    """As `same_direction`, and some steps are as large as many others."""
    return np.full(4, np.random.default_rng(crc32(key.encode())).choice((0.1, 0.5, 2.0)))


class Vectors(World):
    """Steps are vectors of their key. What the view of each step misses when it is applied is compared with v_t."""

    def __init__(
        self, v0: float, make: type[Policy] | None = None, vector: Callable[[str], Vector] = random_vector
    ) -> None:
        self._make = make
        self._vector = vector
        self.v0 = v0
        self.steps: list[tuple[int, int, int, Vector]] = []  # (term, version, worker, step)
        self.closest = math.inf  # of any view: bound less what is missed
        self.old_views = 0  # steps applied to a version newer than their view's
        super().__init__(VapPolicyConfig(value_bound=v0))

    def make_policy(self) -> Policy:
        return super().make_policy() if self._make is None else self._make(self.v0)  # type: ignore[call-arg]

    def max_change(self, key: str) -> float:
        return float(np.abs(self._vector(key)).max())

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        if isinstance(action, ev.ApplyUpdate):
            for item in action.sets:
                if not item.push.key:
                    continue
                missed = np.zeros(4)
                for term, version, worker, step in self.steps:
                    if term == self.term and version > item.push.version and worker != item.push.worker:
                        missed += step
                left = self.v0 / math.sqrt(action.version) - float(np.abs(missed).max())
                assert left >= -1e-9, "the weights miss more than v_t"
                self.closest = min(self.closest, left)
                self.old_views += item.push.version < action.version - 1
                self.steps.append((self.term, action.version, item.push.worker, self._vector(item.push.key)))
        return super().perform(action)


@pytest.mark.parametrize("steps", [random_steps, calm_steps])
@pytest.mark.parametrize("vector", [random_vector, same_direction, random_size])
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(50, 3000), v0=st.floats(0.01, 100))
@example(seed=1, length=2000, v0=20.0)
def test_no_view_misses_more_than_the_bound_when_its_step_is_applied(
    steps: Callable[[int, int], list[tuple[int, int]]],
    vector: Callable[[str], Vector],
    seed: int,
    length: int,
    v0: float,
) -> None:
    world = Vectors(v0, vector=vector)
    play(world, steps(seed, length))
    world.settle()
    world.check_ledger()


def voided(world: World) -> int:
    return world.engine.counters["requeued_void"]


def test_the_random_runs_come_near_the_bound() -> None:
    """Otherwise the test above would prove little."""
    for vector in (random_vector, random_size):
        worlds = [Vectors(10.0, vector=vector) for _ in range(10)]
        for seed, world in enumerate(worlds):
            play(world, calm_steps(seed, 2000))
        assert sum(world.old_views for world in worlds) > 60
        assert min(world.closest for world in worlds) < 0.3
        assert sum(map(voided, worlds)) > 10


class Constant(Vap):
    """The bound does not shrink."""

    def bound(self, version: int) -> float:
        return self.value_bound


class NeverVoid(Vap):
    """Applies the steps of views that miss too much."""

    def void(self, view: PolicyView) -> Sequence[BatchId]:
        return ()


class OneTooMany(Vap):
    """Looks at the oldest view before a step is applied, and not behind it."""

    def _misses(self, number: int, behind: int | None = None) -> float:
        return super()._misses(number)

    void = NeverVoid.void


@pytest.mark.parametrize("mutant", [PerWorkerVap, Constant, NeverVoid, OneTooMany])
def test_a_policy_that_allows_too_much_is_caught(mutant: type[Vap]) -> None:
    def caught(seed: int) -> bool:
        world = Vectors(4.0, mutant, random_size)
        try:
            play(world, calm_steps(seed, 1500))
        except AssertionError as exc:
            return "miss more than" in str(exc)
        return False

    assert any(caught(seed) for seed in range(30))


class Recorded(Vectors):
    def __init__(self, v0: float, make: type[Policy]) -> None:
        self.actions: list[ev.EngineAction] = []
        super().__init__(v0, make)

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        if not isinstance(action, ev.StoreCheckpoint):
            self.actions.append(action)
        return super().perform(action)


class AspOfSteps(Asp):
    def __init__(self, v0: float) -> None:
        super().__init__()


def test_without_a_bound_it_is_asp() -> None:
    updates = 0
    for seed in seeds(15):
        worlds = [Recorded(math.inf, make) for make in (Vap, AspOfSteps)]
        for world in worlds:
            play(world, calm_steps(seed, 1500))
        assert worlds[0].actions == worlds[1].actions
        updates += sum(isinstance(action, ev.ApplyUpdate) for action in worlds[0].actions)
    assert updates > 100


class Workers(World):
    """Three workers whose steps move each number by 1, under a bound that lets a view miss one of them."""

    def __init__(self) -> None:
        super().__init__(VapPolicyConfig(value_bound=1e3), max_pending=40)
        self.start_server()
        for worker in range(3):
            self.start_process(worker)
        self.move()
        for worker in range(3):
            self.high[worker] += 40
        self.move()

    def max_change(self, key: str) -> float:
        return self.engine.policy.bound(self.engine.version + 3)  # type: ignore[attr-defined]

    def move(self, computing: tuple[int, ...] = ()) -> None:
        """Every message arrives, and the processes of these workers compute."""
        for _ in range(60):
            for process in self.live():
                self.send(process)
                self.receive_next(process)
                self.read(process)
                if process.worker in computing:
                    self.compute(process)
            self.store_checkpoint()


def test_workers_wait_for_a_slow_one_and_go_on_when_it_has_answered() -> None:
    world = Workers()
    world.move((1, 2))
    before = world.engine.version
    world.move((1, 2))
    assert world.engine.version == before, "what the first worker's view would miss"
    assert world.engine.num_held
    world.move((0, 1, 2))
    assert world.engine.version > before + 10


def test_workers_do_not_wait_for_one_that_is_gone() -> None:
    world = Workers()
    world.move((1, 2))
    before = world.engine.version
    world.kill_worker(0)
    for _ in range(6):
        world.move((1, 2))
        world.tick(1.0)
    assert world.engine.version > before + 10


def test_workers_do_not_wait_for_one_that_is_frozen_longer_than_its_time_limit() -> None:
    world = Workers()
    world.move((1, 2))
    before = world.engine.version
    for _ in range(12):
        world.move((1, 2))
        world.tick(1.0)
    assert world.engine.counters["requeued_timeout"] == 1
    assert world.engine.version > before + 10


def test_one_that_joins_gets_its_turn_and_the_step_of_one_that_is_gone_is_applied_or_computed_again() -> None:
    world = Workers()
    world.move((1, 2))
    held = [worker.number for worker in world.engine.workers() if worker.held]
    assert held
    world.kill_worker(held[0])
    world.start_process(held[0])
    for _ in range(4):
        world.move((0, 1, 2))
        world.tick(1.0)
    assert all(worker.applied > 3 for worker in world.engine.workers())


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_that_is_none_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="value_bound"):
        VapPolicyConfig(value_bound=bound)
