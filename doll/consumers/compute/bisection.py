"""Bisection for the samples of a batch that cannot be learned. Pure: the caller probes parts of it.

A part that does not pass is halved until single samples are left, so that one bad sample of n costs about 2 log2(n)
probes, half of them of few samples.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

# Batches whose norms make the scale: enough for a median, few enough to follow a model that learns.
_WINDOW_BATCHES: Final = 64


class RunningMedian:
    """The median of a measure over the batches that were learned last. It is asked for with every batch."""

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """Add the measure of a batch that was learned: a finite number."""
        if len(self._values) == _WINDOW_BATCHES:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    @property
    def usual(self) -> float:
        """The median; NaN without values."""
        count = len(self._sorted)
        if not count:
            return math.nan
        middle = count // 2
        return self._sorted[middle] if count % 2 else (self._sorted[middle - 1] + self._sorted[middle]) / 2

    def unusual(self, value: float, factor: float) -> bool:
        """Whether `value` is above `factor` times the median; True without values: in the first batch of a process."""
        return not value <= factor * self.usual


def failing(part: Sequence[int], problem_of: Callable[[Sequence[int]], str]) -> dict[int, str]:
    """The samples of `part` that fail by themselves, with the reason of each. `problem_of`: the problem of a part; ""
    if it has none. A part whose halves both pass is left alone."""
    failures: dict[int, str] = {}
    waiting = [part]
    while waiting:
        here = waiting.pop()
        problem = problem_of(here) if here else ""
        if problem and len(here) == 1:
            failures[here[0]] = problem
        elif problem:
            middle = len(here) // 2
            waiting += [here[middle:], here[:middle]]
    return dict(sorted(failures.items()))


def beyond(part: Sequence[int], limit: float, norm_of: Callable[[Sequence[int]], float]) -> list[int]:
    """The samples of `part` whose own gradient is longer than `limit`. `norm_of`: norm of the sum of a part's
    gradients. A part within the limit is not searched: long gradients that cancel do no harm."""
    failures = failing(part, lambda here: "" if norm_of(here) <= limit else "beyond")
    return list(failures)


def usual_norm(norms: Sequence[float]) -> float:
    """The median, which bad samples do not move while they are a minority; 0 without norms."""
    return median(norms) if norms else 0.0


def harmful(before: float, wrong: float, after: float) -> bool:
    """Whether a step harms ordinary samples: their loss was `before` and is `after`.

    It does if the loss at least doubles, and rises by at least a quarter of what wrong targets would cost (`wrong`).
    Doubling alone means nothing if the loss is next to zero.
    """
    if not math.isfinite(after):
        return True
    return after - before > max(abs(before), 0.25 * (wrong - before))
