"""VAP under random schedules and against an adversary: what a worker's weights miss, measured on the vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest
from benchmarks.paper.vap_bound import PerWorkerVap
from doll.ps.engine import events as ev
from doll.ps.policies.asp import Asp
from doll.ps.policies.base import Policy, PolicyView
from doll.ps.policies.vap import Vap, VapPolicyConfig
from doll.records.control import Grant, NewVersion, Welcome
from engine_runs import play, random_steps
from engine_world import World
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow  # loads torch

Vector = npt.NDArray[np.float64]


def random_vector(key: str) -> Vector:
    return np.random.default_rng(crc32(key.encode())).normal(size=4)


class Vectors(World):
    """Steps are vectors of their key; every grant's oldest weights are compared with the model's."""

    def __init__(
        self, v0: float, make: type[Policy] | None = None, vector: Callable[[str], Vector] = random_vector
    ) -> None:
        self._make = make
        self._vector = vector
        self.v0 = v0
        self.steps: list[tuple[int, int, int, Vector]] = []  # (term, version, worker, step)
        self.granted: set[tuple[int, int]] = set()
        self.closest = math.inf  # of any grant: bound less what is missed
        self.old_views = 0  # grants that allow a version older than the newest
        super().__init__(VapPolicyConfig(value_bound=v0))

    def make_policy(self) -> Policy:
        return super().make_policy() if self._make is None else self._make(self.v0)  # type: ignore[call-arg]

    def max_change(self, key: str) -> float:
        return float(np.abs(self._vector(key)).max())

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        if isinstance(action, ev.ApplyUpdate):
            for item in action.sets:
                if item.push.key:
                    self.steps.append((self.term, action.version, item.push.worker, self._vector(item.push.key)))
        elif isinstance(action, Grant) and (self.term, action.grant_ids[0]) not in self.granted:
            self.granted.add((self.term, action.grant_ids[0]))  # one that is sent again is as it was
            missed = np.zeros(4)
            for term, version, worker, step in self.steps:
                if term == self.term and version > action.min_version and worker != action.worker:
                    missed += step
            left = self.v0 / math.sqrt(self.engine.version + 1) - float(np.abs(missed).max())
            assert left >= -1e-9, "the weights miss more than v_t"
            self.closest = min(self.closest, left)
            self.old_views += action.min_version < action.version
        return super().perform(action)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(50, 3000), v0=st.floats(0.01, 100))
@example(seed=1, length=2000, v0=20.0)
def test_no_view_is_further_from_the_model_than_the_bound(seed: int, length: int, v0: float) -> None:
    world = Vectors(v0)
    play(world, random_steps(seed, length))
    world.settle()
    world.check_ledger()


def test_the_random_runs_come_near_the_bound() -> None:
    """Otherwise the test above would prove little."""
    worlds = [Vectors(5.0) for _ in range(20)]
    for seed, world in enumerate(worlds):
        play(world, random_steps(seed, 2000))
    assert sum(world.old_views for world in worlds) > 100
    assert min(world.closest for world in worlds) < 0.5


class Constant(Vap):
    """A bound that does not fall."""

    def bound(self, version: int) -> float:
        return self.value_bound


class OneOlder(Vap):
    def min_version(self, view: PolicyView, worker: int) -> int:
        return max(0, super().min_version(view, worker) - 1)


def same_direction(key: str) -> Vector:
    """An adversary's steps: all of them add up."""
    return np.full(4, 0.1)


@pytest.mark.parametrize("mutant", [PerWorkerVap, Constant, OneOlder])
def test_a_policy_that_allows_too_much_is_caught(mutant: type[Vap]) -> None:
    def caught(seed: int) -> bool:
        world = Vectors(1.0, mutant, same_direction)
        try:
            play(world, random_steps(seed, 2000))
        except AssertionError as error:
            return "miss more than v_t" in str(error)
        return False

    assert any(caught(seed) for seed in range(30))


def test_without_a_bound_it_is_asp_that_publishes() -> None:
    grants = 0
    for seed in range(15):
        worlds = [Recorded(math.inf, make) for make in (Vap, PublishingAsp)]
        for world in worlds:
            play(world, random_steps(seed, 1500))
        ours, theirs = (
            [action for action in world.actions if not isinstance(action, NewVersion | ev.PublishWeights)]
            for world in worlds
        )
        assert ours == theirs
        (seen, _), (expected, _) = map(views, worlds)
        assert seen == expected
        grants += len(seen)
    assert grants > 200


class PublishingAsp(Asp):
    """Sends each version to all live workers, and lets them compute on any."""

    def __init__(self, v0: float) -> None:
        super().__init__()
        self._live: set[int] = set()

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        super().changed(view, workers)
        for number in workers:
            (self._live.add if view.worker(number).is_live else self._live.discard)(number)

    def min_version(self, view: PolicyView, worker: int) -> int:
        return 0

    def recipients(self, view: PolicyView) -> Collection[int]:
        return sorted(self._live)


class Recorded(Vectors):
    """Offers are recorded and not sent: a world's steps then do not depend on them."""

    def __init__(self, v0: float, make: type[Policy] | None = None) -> None:
        self.actions: list[ev.EngineAction] = []
        self.term_of: list[int] = []  # of the server of each
        super().__init__(v0, make)

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        if not isinstance(action, ev.StoreCheckpoint):
            self.actions.append(action)
            self.term_of.append(self.term)
        return None if isinstance(action, NewVersion) else super().perform(action)


def views(world: Recorded) -> tuple[list[tuple[int, int]], int]:
    """What workers that get every message at once compute on.

    Returns:
        Of each grant its worker and the version that this worker has (the rule of
        `doll.consumers.compute.gradient`); and how many offers were made.
    """
    cached, offered, processes = [-1] * 3, [-1] * 3, [""] * 3
    views: list[tuple[int, int]] = []
    seen: set[int] = set()
    offers = term = 0
    for of_term, action in zip(world.term_of, world.actions, strict=True):
        if of_term != term:  # another server
            term, cached, offered, seen = of_term, [-1] * 3, [-1] * 3, set()
        if isinstance(action, Welcome) and action.process != processes[action.worker]:
            worker = action.worker
            processes[worker], cached[worker], offered[worker] = action.process, -1, -1
        elif isinstance(action, NewVersion):
            offers += 1
            offered[action.worker] = action.version
        elif isinstance(action, Grant) and action.grant_ids[0] not in seen:
            seen.add(action.grant_ids[0])
            worker = action.worker
            if cached[worker] < max(action.min_version, offered[worker]):
                cached[worker] = max(action.version, offered[worker])
            views.append((worker, cached[worker]))
    return views, offers


class OfferedAll(Vap):
    """The paper's: every version is sent to every worker."""

    def recipients(self, view: PolicyView) -> list[int]:
        return sorted(self._live)


@pytest.mark.parametrize("v0", [math.inf, 5.0])
def test_every_worker_computes_on_the_weights_that_it_would_have_if_it_were_sent_every_version(v0: float) -> None:
    batches = offers = offers_of_all = 0
    for seed in range(10):
        worlds = [Recorded(v0, make) for make in (Vap, OfferedAll)]
        for world in worlds:
            play(world, random_steps(seed, 1500))
        (seen, some), (expected, every) = map(views, worlds)
        assert seen == expected
        batches, offers, offers_of_all = batches + len(seen), offers + some, offers_of_all + every
    assert 100 < offers < batches < offers_of_all


class NoOffers(Vap):
    def recipients(self, view: PolicyView) -> list[int]:
        return []


class OfferedOnce(Vap):
    """Offers a worker nothing behind its second grant."""

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        computing = set(self._computing)
        super().changed(view, workers)
        self._computing |= computing


@pytest.mark.parametrize("mutant", [NoOffers, OfferedOnce])
def test_a_policy_that_leaves_workers_with_old_weights_is_caught(mutant: type[Vap]) -> None:
    def caught(seed: int) -> bool:
        worlds = [Recorded(math.inf, make) for make in (mutant, OfferedAll)]
        for world in worlds:
            play(world, random_steps(seed, 1500))
        return views(worlds[0])[0] != views(worlds[1])[0]

    assert any(caught(seed) for seed in range(5))


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_that_is_none_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="value_bound"):
        VapPolicyConfig(value_bound=bound)
    with pytest.raises(ValueError, match="expected a value bound"):
        Vap(bound)
