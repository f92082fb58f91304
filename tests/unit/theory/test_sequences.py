"""Confidence sequences hold at every look at once, with the stated probability, and are not much wider than others."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from doll.theory.sequences import MeanSequence, delayed_start_factor
from fuzzing import examples

STREAMS = examples(2_000)
LENGTH, FIRST = 1_000, 100
Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
DRAWS: dict[str, tuple[float, Draw]] = {
    "normal": (0.0, lambda rng, n: rng.normal(0, 1, n)),
    "uniform": (0.5, lambda rng, n: rng.random(n)),
    "skewed": (1.0, lambda rng, n: rng.exponential(1, n)),
    "clicks": (0.3, lambda rng, n: (rng.random(n) < 0.3).astype(float)),
}


def share_outside(mean: float, draw: Draw) -> float:
    """The share of streams whose interval excludes the mean at any look from `FIRST` samples on."""
    rng, outside = np.random.default_rng(5), 0
    factors = np.array([delayed_start_factor(n, FIRST) for n in range(FIRST, LENGTH + 1)])
    for _ in range(STREAMS):
        values = draw(rng, LENGTH)
        n = np.arange(1, LENGTH + 1)
        means = np.cumsum(values) / n
        deviations = np.sqrt(np.maximum(np.cumsum(values**2) / n - means**2, 0) * n / np.maximum(n - 1, 1))
        widths = factors * (deviations / np.sqrt(n))[FIRST - 1 :]
        outside += bool((np.abs(means[FIRST - 1 :] - mean) > widths).any())
    return outside / STREAMS


@pytest.mark.parametrize("name", DRAWS)
def test_the_mean_is_within_at_all_looks_with_the_stated_probability(name: str) -> None:
    share = share_outside(*DRAWS[name])
    # Means of 100 skewed samples are not quite normal.
    assert share <= 0.05 + (0.01 if name == "skewed" else 0.0) + 3 * math.sqrt(0.05 / STREAMS)


def test_looks_at_a_fixed_time_interval_exclude_the_mean_far_more_often() -> None:
    rng = np.random.default_rng(6)
    n = np.arange(1, LENGTH + 1)
    means = np.cumsum(rng.normal(0, 1, (500, LENGTH)), axis=1) / n
    assert (np.abs(means[:, FIRST - 1 :]) > 1.96 / np.sqrt(n[FIRST - 1 :])).any(axis=1).mean() > 0.15


def test_the_width_is_at_most_half_more_than_that_of_a_fixed_time() -> None:
    assert delayed_start_factor(FIRST - 1, FIRST) == math.inf
    assert delayed_start_factor(FIRST, FIRST) / 1.96 == pytest.approx(1.426, abs=0.002)
    assert delayed_start_factor(2.2 * FIRST, FIRST) / 1.96 < 1.5
    assert delayed_start_factor(10 * FIRST, FIRST) / 1.96 < 1.63


def test_samples_come_in_any_parts() -> None:
    values = np.random.default_rng(1).normal(3, 2, 500)
    whole, parts = MeanSequence(50), MeanSequence(50)
    whole.add(values)
    for part in np.array_split(values, 7):
        parts.add(part)
    parts.add(values[:0])
    assert parts.interval() == pytest.approx(whole.interval())
    width = delayed_start_factor(500, 50) * values.std(ddof=1) / math.sqrt(500)
    assert whole.interval() == pytest.approx((values.mean() - width, values.mean() + width))
    assert MeanSequence(50).interval() == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="expected at least 2 samples"):
        MeanSequence(1)
