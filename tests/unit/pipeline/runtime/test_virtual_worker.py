"""A virtual worker's protocol under random schedules: whatever happens, minibatch p starts when p - N_m is complete, on
one version at all stages with all own steps, and each push holds the steps of its batches and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from doll.pipeline.runtime.messages import Commit
from doll.pipeline.runtime.virtual_worker import (
    MAX_WAVES_BEHIND,
    Action,
    Done,
    Missing,
    PullWeights,
    SendDown,
    StartBatch,
    Submission,
    VirtualWorkerCore,
    Void,
    WaveSplitError,
    Weights,
)
from fuzzing import seeds
from msgspec import structs
from virtual_world import World

SHAPES = [(1, 1), (2, 1), (2, 2), (3, 4), (4, 3)]


def check(seed: int, core: type[VirtualWorkerCore] = VirtualWorkerCore, **options: bool) -> Counter[str]:
    stages, in_flight = SHAPES[seed % len(SHAPES)]
    world = World(seed, stages, in_flight, core, **options)
    world.run(1500)
    world.settle()
    return world.seen


@pytest.mark.slow
def test_whatever_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in seeds(100):
        seen += check(seed)
    for what in (
        "new term", "timeout", "blob lost", "weights missing", "suspect", "dropped", "again", "left",
        "left within a wave",
    ):  # fmt: skip
        assert seen[what] >= 20, f"{what} happened {seen[what]} times"


# --- wrong variants, which the test above must see -----------------------------------------------------------------


class OneMoreInFlight(VirtualWorkerCore):
    def __init__(self, in_flight: int, wave_batches: int) -> None:
        super().__init__(in_flight + 1, wave_batches)


class PullsBeforeAdoption(VirtualWorkerCore):
    @property
    def _may_pull(self) -> bool:
        self._is_adopted = True
        return super()._may_pull


class ForgetsWhatIsIncluded(VirtualWorkerCore):
    def _start(self, submitted: Submission) -> Sequence[Action]:
        started = super()._start(submitted)
        return [
            StartBatch(structs.replace(item.message, included=0), submitted)
            for item in started
            if type(item) is StartBatch
        ]


class EndsWavesEarly(VirtualWorkerCore):
    def _take_commits(self) -> tuple[Commit, ...]:
        ends = [(item.batch + 2) % self._wave == 0 for item in self._commits]
        return tuple(
            structs.replace(item, ends_wave=early)
            for item, early in zip(super()._take_commits(), ends, strict=True)
        )  # fmt: skip


class AnswersBeforeStoring(VirtualWorkerCore):
    def _release(self) -> list[Action]:
        released: list[Action] = [*self._results]
        self._results.clear()
        return released


class KeepsVoidSteps(VirtualWorkerCore):
    def _rewind(self, batch: int) -> None:
        super()._rewind(batch)
        self._forget_from = None


class KeepsTheWeightsOfVoidSteps(VirtualWorkerCore):
    def _rewind(self, batch: int) -> None:
        base = self._base
        super()._rewind(batch)
        self._base = base


class TakesVoidOnes(VirtualWorkerCore):
    def completed(
        self, batch: int, *, scale: float, weight: float, lr_factor: float = 1.0, is_void: bool = False
    ) -> list[Action]:
        for item in self._computing:
            if item.submitted.batch == batch:
                item.is_void = False
        return super().completed(batch, scale=scale, weight=weight, lr_factor=lr_factor)


class IgnoresMinVersion(VirtualWorkerCore):
    def submit(self, submitted: Submission, weights: Weights) -> list[Action]:
        return super().submit(
            Submission(submitted.batch, submitted.term, 0, submitted.num_samples, submitted.token), weights
        )


class TakesOldTerms(VirtualWorkerCore):
    def _begin_term(self, submitted: Submission) -> None:
        known = self._base
        super()._begin_term(submitted)
        self._base = known


MUTANTS = [
    OneMoreInFlight, PullsBeforeAdoption, ForgetsWhatIsIncluded, EndsWavesEarly, AnswersBeforeStoring, KeepsVoidSteps,
    KeepsTheWeightsOfVoidSteps, TakesVoidOnes, IgnoresMinVersion, TakesOldTerms,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda item: item.__name__)
def test_a_wrong_variant_is_caught(mutant: type[VirtualWorkerCore]) -> None:
    assert is_caught(mutant)


def is_caught(core: type[VirtualWorkerCore], **options: bool) -> bool:
    for seed in seeds(60):
        try:
            check(seed, core, **options)
        except (AssertionError, ValueError, KeyError, WaveSplitError):
            return True
    return False


def test_stages_behind_one_that_fails_need_the_commits_that_came_with_the_minibatch() -> None:
    assert is_caught(VirtualWorkerCore, settles_after_failure=False)


# --- single steps --------------------------------------------------------------------------------------------------


def weights(version: int, included: int = 0, term: int = 1) -> Weights:
    return Weights(term, version, f"{term}:{version}", included)


def batch(number: int, *, term: int = 1, min_version: int = 0, num_samples: int = 8) -> Submission:
    return Submission(number, term, min_version, num_samples)


def started(actions: Sequence[Action]) -> list[int]:
    return [item.message.batch for item in actions if isinstance(item, StartBatch)]


def running(in_flight: int, batches: int, first: int = 0) -> VirtualWorkerCore:
    """On version 0, with as many batches submitted."""
    core = VirtualWorkerCore(in_flight, in_flight)
    core.submit(batch(first), weights(0, first))
    core.pulled(weights(0, first), is_there=True)
    core.adopted(0)
    for number in range(first + 1, first + batches):
        core.submit(batch(number), weights(0, first))
    return core


def complete(core: VirtualWorkerCore, *numbers: int) -> list[Action]:
    return [item for number in numbers for item in core.completed(number, scale=1.0, weight=8.0)]


def test_minibatches_must_be_complete_in_order() -> None:
    with pytest.raises(ValueError, match="in order, got 1"):
        complete(running(2, 2), 1)


def test_each_completion_starts_one_more() -> None:
    core = running(3, 6)
    assert core.num_computing == 3
    assert started(complete(core, 0)) == [3]
    assert started(complete(core, 1)) == [4]


def test_a_batch_inside_a_wave_cannot_be_computed_again_alone() -> None:
    core = running(4, 4)
    complete(core, 0, 1)
    with pytest.raises(WaveSplitError, match="expected batch 0, the first of its wave, to be computed again; got 1"):
        core.submit(batch(1), weights(0))


def test_a_process_that_begins_within_a_wave_computes_its_part_again() -> None:
    core = running(4, 2, first=6)
    complete(core, 6)
    (settle,) = (item for item in complete(core, 7) if isinstance(item, SendDown))
    assert settle.wave is not None
    assert settle.wave.until == 8
    core.stored(8)
    assert [type(item) for item in core.pushed(8)] == [Done]
    assert any(
        isinstance(item, SendDown) and item.message.forget_from == 6 for item in core.submit(batch(6), weights(0, 6))
    )


def test_a_wave_that_is_void_while_it_is_stored_is_not_answered_with_the_old_sum() -> None:
    core = running(1, 1)
    assert any(isinstance(item, SendDown) and item.message.store == 1 for item in complete(core, 0))
    actions = core.submit(batch(0), weights(0))
    assert [type(item) for item in actions if isinstance(item, Done | Void)] == [Void]
    core.pulled(weights(0), is_there=True)
    core.adopted(0)
    again = complete(core, 0)
    assert not any(isinstance(item, Done) for item in again), "it is not stored"
    actions = core.pushed(1)
    assert not any(isinstance(item, Done) for item in actions), "the other one is stored"
    assert any(isinstance(item, SendDown) and item.message.store == 1 for item in actions)
    assert [type(item) for item in core.pushed(1)] == [Done]


def test_an_empty_batch_at_the_end_of_a_wave_has_a_version_that_its_grant_allows() -> None:
    core = running(2, 1)
    complete(core, 0)
    actions = core.submit(batch(1, min_version=5, num_samples=0), weights(5, 0))
    wave = next(item.wave for item in actions if isinstance(item, SendDown))
    assert wave is not None
    assert (wave.until, wave.last.batch, wave.version) == (2, 1, 5)
    (done,) = (item for item in core.pushed(2) if isinstance(item, Done))
    assert done.version == 5


def test_batches_behind_a_missing_one_are_missing_too() -> None:
    core = VirtualWorkerCore(2, 2)
    assert core.submit(batch(0), weights(0)) == [PullWeights(weights(0))]
    core.submit(batch(1), weights(0))
    assert core.pulled(weights(0), is_there=False) == [Missing(batch(0)), Missing(batch(1))]
    assert core.submit(batch(2), weights(0)) == [Missing(batch(2))]
    assert core.submit(batch(0), weights(0)) == [PullWeights(weights(0))]


@pytest.mark.parametrize("in_flight", [1, 3])
def test_weights_too_old_to_go_on_with_are_missing_when_newer_ones_are_gone(in_flight: int) -> None:
    """Batches that are allowed on the weights in use would wait for ever: nobody would publish the others again."""
    last = (MAX_WAVES_BEHIND + 1) * in_flight
    core = running(in_flight, last)
    for number in range(last):
        for item in complete(core, number):
            if isinstance(item, SendDown) and item.wave is not None:
                core.pushed(item.wave.until)
    newer = weights(9, last)
    assert core.submit(batch(last), newer) == [PullWeights(newer)]
    assert core.pulled(newer, is_there=False) == [Missing(batch(last))]
    assert core.submit(batch(last), newer) == [PullWeights(newer)]
    assert started(core.pulled(newer, is_there=True)) == [last]


def test_what_was_not_begun_is_void_when_the_worker_leaves() -> None:
    core = running(2, 4)
    assert core.stop() == [Void(batch(2)), Void(batch(3))]
    assert core.submit(batch(4), weights(0)) == [Void(batch(4))]
    done = complete(core, 0, 1)
    assert started(done) == []


def test_the_rest_of_a_wave_holds_what_was_complete_before() -> None:
    core = running(4, 2)
    complete(core, 0)
    until, actions = core.close_wave()
    assert until == 1
    (settle,) = actions
    assert isinstance(settle, SendDown)
    assert settle.message.store == 1
    assert [item.ends_wave for item in settle.message.commits] == [False, True]
    assert core.close_wave() == (None, [])


def test_nothing_starts_while_a_minibatch_is_inspected() -> None:
    core = running(3, 1)
    core.hold()
    assert started(core.submit(batch(1), weights(0))) == []
    core.show()
    assert started(core.submit(batch(2), weights(0))) == []
    assert started(core.stored(None)) == [], "the weights were shown, and are not inspected yet"
    assert started(core.go_on()) == [1, 2]


def test_only_the_first_minibatch_in_flight_is_computed_again() -> None:
    core = running(2, 2)
    with pytest.raises(ValueError, match="expected the first minibatch in flight, got 1"):
        core.again(1, 4)
    message: Any = core.again(0, 4)
    assert (message.batch, message.num_samples, message.version) == (0, 4, 0)
