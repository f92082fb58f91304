"""Confidence sequences: intervals for a mean that hold at all sample sizes at once, so one may look at any time. Pure.

A fixed-time interval of 95 % that is looked at after each sample excludes the mean sooner or later, almost surely.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np

from doll.theory.checks import Floats

_STANDARD: Final = NormalDist()


class Interval(NamedTuple):
    """The bounds of a mean."""

    low: float
    high: float


def delayed_start_factor(count: float, first: int, error: float = 0.05) -> float:
    """Return by how many standard errors the interval of a mean reaches to both sides after `count` samples, if looks
    begin at `first`; infinity before it.

    The probability that the mean is ever outside, at any of the looks, is `error` for a Brownian motion, which sums of
    many samples approach: Robbins, Statistical methods related to the law of the iterated logarithm, 1970, with a flat
    mixture; for estimated variances, Waudby-Smith et al., Time-uniform central limit theory, 2024. The factor is
    sqrt(a² + ln(count / first)), where 2 (1 - Φ(a) + a φ(a)) = error. At `first` it is 1.43 times that of a fixed-time
    interval of 95 %; it is below 1.5 times until 2.2 `first`, and 1.6 times at 10 `first`.
    """
    if count < first:
        return math.inf
    return math.sqrt(_boundary(error) ** 2 + math.log(count / first))


def _boundary(error: float) -> float:
    """Return a of `delayed_start_factor`, by bisection: the left side falls from 1 to 0."""
    low, high = 0.0, 40.0
    for _ in range(100):
        a = (low + high) / 2
        if 2 * (_STANDARD.cdf(-a) + a * _STANDARD.pdf(a)) > error:
            low = a
        else:
            high = a
    return high


class MeanSequence:
    """The mean of independent samples of any distribution with a finite variance, at any time after `first` samples.

    The intervals are asymptotic: they hold as far as the means of `first` samples are normal.
    """

    def __init__(self, first: int = 100, error: float = 0.05) -> None:
        if first < 2 or not 0 < error < 1:
            raise ValueError(f"expected at least 2 samples and an error between 0 and 1, got {first} and {error}")
        self.first, self.error = first, error
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, values: Floats) -> None:
        """Add samples, shape (n,)."""
        if not len(values):
            return
        count, mean = len(values), float(np.mean(values))
        total, difference = self.count + count, mean - self.mean
        self._squares += float(np.sum((values - mean) ** 2)) + difference**2 * self.count * count / total
        self.mean += difference * count / total
        self.count = total

    def interval(self) -> Interval:
        """Return the bounds of the mean now."""
        if self.count < self.first:
            return Interval(-math.inf, math.inf)
        deviation = math.sqrt(self._squares / (self.count - 1))
        width = delayed_start_factor(self.count, self.first, self.error) * deviation / math.sqrt(self.count)
        return Interval(self.mean - width, self.mean + width)
