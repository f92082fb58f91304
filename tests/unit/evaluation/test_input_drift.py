"""Planted changes of features, labels and answers are found, and a stream that stays the same raises no alarm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from doll.config.drift import InputsConfig
from doll.evaluation.input_drift import AnswerWatch, Columns, InputDrift, InputWatch, Reference, columns_of
from doll.task.batches import SampleBatch
from doll.task.trees import Ragged
from fuzzing import ALL_EXAMPLES

WINDOW = 2_000
TAKEN = 100  # samples of one call

Draw = Callable[[np.random.Generator], Any]


def normal(mean: float = 0.0, scale: float = 1.0) -> Draw:
    return lambda rng: rng.normal(mean, scale, TAKEN)


def with_missing(share: float) -> Draw:
    return lambda rng: np.where(rng.random(TAKEN) < share, np.nan, rng.normal(size=TAKEN))


def categories(*shares: float) -> Draw:
    return lambda rng: rng.choice(len(shares), TAKEN, p=shares).astype(float)


def numbers(end: int) -> Draw:
    return lambda rng: rng.integers(0, end, TAKEN).astype(float)


def played(watch: InputWatch, draw: Draw, windows: float, rng: np.random.Generator) -> list[InputDrift]:
    """The changes of a column `x` in these windows."""
    return [drift for _ in range(int(windows * WINDOW / TAKEN)) for drift in watch.add({"x": draw(rng)})]


def watch_of(**section: Any) -> InputWatch:
    return InputWatch(InputsConfig.model_validate({"window": WINDOW} | section))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (normal(), normal(0.7)),
        (normal(), normal(0.0, 2.0)),
        (normal(), lambda rng: rng.exponential(1.0, TAKEN) - 1),
        (with_missing(0.02), with_missing(0.3)),
        (categories(0.9, 0.1), categories(0.7, 0.3)),
        (categories(0.5, 0.3, 0.2), lambda rng: np.full(TAKEN, 7.0)),
        (lambda rng: np.full(TAKEN, np.nan), normal()),
        (numbers(2**62), numbers(2**61)),
    ],
    ids=["mean", "scale", "shape", "missing", "categories", "a new category", "all missing", "large numbers"],
)  # fmt: skip
def test_a_planted_change_is_found_in_two_windows(before: Draw, after: Draw) -> None:
    for seed in range(5):
        rng, watch = np.random.default_rng(seed), watch_of()
        assert played(watch, before, 10, rng) == []
        (drift,) = played(watch, after, 2, rng)
        assert drift.index > 0.2
        assert not drift.is_last
        assert played(watch, after, 8, rng) == [], "the new distribution is the reference"


def test_the_means_are_those_of_the_two_windows() -> None:
    rng, watch = np.random.default_rng(0), watch_of()
    played(watch, with_missing(0.1), 5, rng)
    (drift,) = played(watch, normal(3.0), 1, rng)
    assert (drift.before, drift.after) == (pytest.approx(0, abs=0.1), pytest.approx(3.0, abs=0.1))


def test_a_stationary_stream_raises_no_alarm() -> None:
    """10^5 samples of each of 20 columns; in `make test-all` 10^6."""
    rng, watch = np.random.default_rng(1), watch_of(window=1_000)
    draws = [normal(), with_missing(0.5), categories(0.999, 0.001), categories(*[0.05] * 20), normal(1e300, 1e290)] * 4
    for _ in range(10_000 if ALL_EXAMPLES else 1_000):
        assert watch.add({f"x[{at}]": draw(rng) for at, draw in enumerate(draws)}) == []


def test_a_column_that_changes_all_the_time_is_left_out() -> None:
    rng, watch, clock = np.random.default_rng(0), watch_of(), iter(range(10**9))
    drifts = played(watch, lambda rng: np.array([next(clock) for _ in range(TAKEN)]), 20, rng)
    assert [drift.is_last for drift in drifts] == [False, False, True]


def test_a_restart_compares_with_the_same_window() -> None:
    rng, watch = np.random.default_rng(0), watch_of()
    played(watch, normal(), 3.5, rng)
    kept = msgspec.json.encode(watch.reference)
    again = InputWatch(InputsConfig(window=WINDOW), msgspec.json.decode(kept, type=Reference))
    assert len(played(again, normal(2.0), 1, rng)) == 1


def test_columns_may_be_left_out_and_are_at_most_256() -> None:
    rng, watch = np.random.default_rng(0), watch_of(leave_out=["x", "user.age"])
    columns = {"x[0]": normal()(rng), "x[1]": normal()(rng), "user.age": normal()(rng), "xy": normal()(rng)}
    for _ in range(10 * WINDOW // TAKEN):
        watch.add(columns)
    assert watch.reference.histograms.keys() == {"xy"}
    wide = watch_of()
    for _ in range(2 * WINDOW // TAKEN):
        wide.add({f"x{at}": normal()(rng) for at in range(300)})
    assert len(wide.reference.histograms) == 256


def test_columns_are_named_after_their_place() -> None:
    x = {"age": np.arange(4.0), "image": np.ones((4, 28, 28), np.uint8), "tags": np.arange(12).reshape(4, 3)}
    columns = columns_of(SampleBatch(x, np.array([0, 1, 1, 0])))
    assert list(columns) == ["age", "image[mean]", "image[deviation]", "tags[0]", "tags[1]", "tags[2]", "y"]
    assert columns["tags[1]"].tolist() == [1, 4, 7, 10]
    assert columns["y"].tolist() == [0, 1, 1, 0]
    texts = columns_of(SampleBatch({"text": np.array(["a", "b"])}, np.zeros(2)))
    assert list(texts) == ["y"]


def test_samples_of_different_lengths_have_a_length_and_a_mean() -> None:
    columns = columns_of(SampleBatch(Ragged([np.array([1, 3]), np.array([5]), np.array([])]), np.zeros(3)))
    assert columns["x[length]"].tolist() == [2, 1, 0]
    assert columns["x[mean]"][:2].tolist() == [2, 5]
    assert math.isnan(columns["x[mean]"][2])


def test_answers_change_with_the_stream_and_not_with_the_model() -> None:
    slope = [1.0]

    def answers(samples: SampleBatch) -> Columns:
        return {"answer": slope[0] * samples.x}

    rng, watch = np.random.default_rng(0), AnswerWatch(InputsConfig(), answers)
    for _ in range(10):
        slope[0] *= 1.3  # it learns
        assert watch.compare(SampleBatch(rng.normal(size=500), np.zeros(500))) == []
    (drift,) = watch.compare(SampleBatch(rng.normal(1.0, size=500), np.zeros(500)))
    assert drift.column == "answer"
    assert drift.after == pytest.approx(slope[0], rel=0.1)
    assert watch.compare(SampleBatch(rng.normal(1.0, size=500), np.zeros(500))) == []


def test_a_model_that_is_not_there_yet_has_no_answers() -> None:
    watch = AnswerWatch(InputsConfig(), lambda samples: {})
    for _ in range(3):
        assert watch.compare(SampleBatch(np.zeros(10), np.zeros(10))) == []
