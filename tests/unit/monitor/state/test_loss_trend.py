"""Has a run lost what it had learned?"""

from __future__ import annotations

import math

import pytest
from doll.monitor.state.prequential import LossTrend


def course(losses: list[float]) -> LossTrend:
    trend = LossTrend(window=10)
    for version, loss in enumerate(losses, 1):
        trend.add(version, 8, loss)
    return trend


FALLING = [2.0 * 0.9**i + 0.1 for i in range(60)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (FALLING, False),
        ([*FALLING, *[0.3] * 20], False),  # the stream has become harder
        ([*FALLING, *[1.5] * 20], True),
        ([*FALLING, 1e36], True),
        ([*FALLING, 1e36, *[1e36] * 30], True),
        ([*FALLING, 1e36, *[0.1] * 10], False),  # it has recovered
        ([*FALLING, math.nan], True),
        ([*FALLING, math.inf], True),
        ([1e-6 * (1 + i % 7) for i in range(40)], False),
        ([0.7] * 40 + [0.9] * 40, False),
        ([-3.0] * 30 + [-2.0] * 20, False),
        ([-3.0] * 30 + [4.0] * 20, True),
        ([0.1, 1e9], False),  # too few to tell
        ([], False),
    ],
)
def test_a_loss_far_above_its_best_is_told(losses: list[float], expected: bool) -> None:
    assert course(losses).worsened is expected


def test_the_best_window_is_named() -> None:
    trend = course([*FALLING, *[1.5] * 20])
    assert trend.best_version == 60
    assert trend.best == pytest.approx(sum(FALLING[-10:]) / 10)
    assert trend.last == 1.5


def test_updates_without_samples_say_nothing() -> None:
    trend = course([1.0] * 20)
    trend.add(21, 0, 1e36)
    assert not trend.worsened


def test_held_out_losses_need_no_window() -> None:
    assert not LossTrend.without_windows([1, 2, 3], [2.0, 0.5, 0.6]).worsened
    assert LossTrend.without_windows([1, 2, 3], [2.0, 0.5, 1.9]).worsened
    assert LossTrend.without_windows([1, 2, 3], [2.0, 0.5, math.nan]).worsened
    assert not LossTrend.without_windows([], []).worsened


def test_a_loss_far_above_its_first_and_its_best_is_a_model_that_diverges() -> None:
    diverged = course([2.0] * 10 + [1.0] * 20 + [1433.0] * 10)
    assert diverged.diverged.startswith("the model diverges: its loss has risen from 1 at version ")
    assert diverged.diverged.endswith("to 1433")
    # A model that was nearly perfect, and a stream that has changed: the loss is as at the start.
    assert not course([2.0] * 10 + [1e-4] * 20 + [3.0] * 10).diverged
    assert not course([2.0] * 3).diverged
    assert course([2.0] * 10 + [math.nan] * 10).diverged.endswith("to inf")


@pytest.mark.parametrize(
    "losses", [[1.21, 6.99, 77.1, 1.53e5, 4.34e12, 2.36e31], [2.0, 1e6, 1e6, 1e6], [1.0, *[5e3] * 60]]
)
def test_a_model_that_diverges_before_its_first_window_is_full_is_told(losses: list[float]) -> None:
    """The first ones are the losses of examples/ratings with lr: 1000."""
    assert "at the start" in course(losses).diverged


@pytest.mark.parametrize(
    "losses",
    [
        [2.0] * 20 + [1e9] + [2.0] * 8,  # an extreme sample raises the mean of its window
        [0.02, *[1.5] * 60],  # the samples of the first update were easy
        [0.0, *[1.5] * 60],
        [1.0, 900.0],
    ],
)
def test_a_few_extreme_samples_are_no_divergence(losses: list[float]) -> None:
    assert not course(losses).diverged
