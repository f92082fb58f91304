"""A bisection that finds the samples of a batch that cannot be learned. Pure: the caller tests parts of the batch.

A part that fails is halved until single samples are left. One bad sample of n therefore costs about 2 log2(n) tests.
Half of these tests have few samples.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

# Number of batches for the median: enough for a median, few enough to follow a model that learns.
_WINDOW_BATCHES: Final = 64


class RunningMedian:
    """The median of a measure over the last learned batches. The measure is computed for every batch."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW_BATCHES)

    def add(self, value: float) -> None:
        """Add the measure of a learned batch: a finite number."""
        self._values.append(value)

    @property
    def usual(self) -> float:
        """The median; NaN without values."""
        return median(self._values) if self._values else math.nan

    def unusual(self, value: float, factor: float) -> bool:
        """Return whether `value` is above `factor` times the median. True without values (first batch of a process)."""
        return not value <= factor * self.usual


def failing(part: Sequence[int], problem_of: Callable[[Sequence[int]], str]) -> dict[int, str]:
    """Return the samples of `part` that fail alone, with the reason of each. `problem_of` returns the problem of a
    part, or "". If both halves of a part pass, the part is not searched further."""
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
    """Return the samples of `part` whose own gradient is longer than `limit`. `norm_of` returns the norm of the sum of
    a part's gradients. A part within the limit is not searched: long gradients that cancel each other do no harm."""
    failures = failing(part, lambda here: "" if norm_of(here) <= limit else "beyond")
    return list(failures)


def usual_norm(norms: Sequence[float]) -> float:
    """Return the median; 0 without norms. Bad samples do not change the median while they are a minority."""
    return median(norms) if norms else 0.0


def harmful(before: float, wrong: float, after: float) -> bool:
    """Return whether a step harms ordinary samples, whose mean loss is `before` and `after` the step.

    The step is harmful if two conditions hold. First, the loss at least doubles. Second, the loss rises by at least a
    quarter of the rise that wrong targets would cause (`wrong` is the loss with wrong targets). The second condition is
    needed because a loss close to zero may double without harm.
    """
    if not math.isfinite(after):
        return True
    return after - before > max(abs(before), 0.25 * (wrong - before))
