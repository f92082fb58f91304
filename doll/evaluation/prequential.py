"""Prequential error: each sample is a test before it is a lesson (test-then-train).

The losses in an `Update` are taken by the workers at the weights *before* the update learns from those samples, so
their running mean is an honest estimate of how the model did on data it had not seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

# Updates that can be taken back: far more than lie between two checkpoints, and about 30 MB at most.
KEPT: Final = 100_000


class Means(NamedTuple):
    """Means over `samples` samples; an empty mean is NaN."""

    samples: int
    loss: float
    metrics: dict[str, float]


class _Point(NamedTuple):
    """Sums over all samples up to and with `version`: the difference of two points is a window."""

    version: int
    samples: int
    loss_sum: float
    metric_sums: tuple[tuple[str, float], ...]


_START = _Point(-1, 0, 0.0, ())


class Prequential:
    """Running and windowed prequential means, that can be taken back to an earlier version.

    Args:
        window: updates in the windowed mean; at least 1.
    """

    def __init__(self, window: int = 50) -> None:
        if window < 1:
            raise ValueError(f"expected a window of at least 1 update, got {window}")
        self.window = window
        self._points: deque[_Point] = deque([_START], maxlen=max(KEPT, window + 1))

    def add(self, version: int, samples: int, loss: float, metrics: Mapping[str, float] | None = None) -> None:
        """One update: means `loss` and `metrics` over `samples` samples, taken before learning.

        An update without samples (all of them dead letters) counts in the window but changes no mean.
        """
        last = self._points[-1]
        sums = dict(last.metric_sums)
        loss_sum = last.loss_sum
        if samples > 0:
            loss_sum += loss * samples
            for name, value in (metrics or {}).items():
                sums[name] = sums.get(name, 0.0) + value * samples
        self._points.append(_Point(version, last.samples + max(samples, 0), loss_sum, tuple(sums.items())))

    def rollback(self, version: int) -> None:
        """Forget every update above `version`: a restarted parameter server learns from those samples again."""
        while self._points and self._points[-1].version > version:
            self._points.pop()
        if not self._points:
            self._points.append(_START)

    def running(self) -> Means:
        """Means over all samples so far."""
        return _between(_START, self._points[-1])

    def windowed(self) -> Means:
        """Means over the samples of the last `window` updates."""
        return _between(self._points[max(0, len(self._points) - 1 - self.window)], self._points[-1])


def _between(before: _Point, after: _Point) -> Means:
    samples = after.samples - before.samples
    if samples == 0:
        return Means(0, float("nan"), {})
    earlier = dict(before.metric_sums)
    return Means(
        samples,
        (after.loss_sum - before.loss_sum) / samples,
        {name: (total - earlier.get(name, 0.0)) / samples for name, total in after.metric_sums},
    )
