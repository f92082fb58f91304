"""Prequential error: each sample is used for testing before it is used for training.

Workers compute the losses in an `Update` with the weights *before* the update learns from these samples. The running
mean of these losses therefore estimates the error on data that the model has not seen.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from doll.monitor.state.metric_window import MAX_HALF_LIVES, MetricWindow
from doll.theory.divergence import Divergence

# Updates that can be rolled back: far more than between two checkpoints. Each takes 24 bytes, plus 8 per metric.
MAX_ROLLBACK_UPDATES: Final = 100_000
# A mean over fewer updates depends too much on their samples.
_MIN_UPDATES: Final = 10


class Means(NamedTuple):
    """Weighted means over `samples` samples, NaN without samples; and the metrics of states that were merged."""

    samples: int
    loss: float
    metrics: dict[str, float]


class Prequential:
    """Running and windowed prequential means, which can be rolled back to an earlier version.

    For each of the last `MAX_ROLLBACK_UPDATES` updates, the object stores the sums over all samples so far, by column;
    the sum of a window is the difference of two such sums. One object per update would take 400 bytes more.

    Args:
        window: number of updates in the windowed mean; at least 1.
    """

    def __init__(self, window: int = 50) -> None:
        if window < 1:
            raise ValueError(f"expected a window of at least 1 update, got {window}")
        self.window = window
        self._states = MetricWindow(window)
        self._kept = max(MAX_ROLLBACK_UPDATES, window + 1)
        self._begin()

    def _begin(self) -> None:
        self._versions, self._samples = array("q", [-1]), array("q", [0])
        self._weight, self._loss = array("d", [0.0]), array("d", [0.0])
        self._metrics: dict[str, array[float]] = {}  # NaN before the first value of the metric

    def add(
        self, version: int, samples: int, loss: float, metrics: Mapping[str, float] | None = None,
        weight: float | None = None, states: Mapping[str, bytes] | None = None,
    ) -> None:  # fmt: skip
        """Add an update: means `loss` and `metrics`, and encoded `states` of metrics, over `samples` samples, measured
        before learning.

        An update without samples (all of them dead letters) counts in the window but changes no mean.

        Args:
            weight: sum of the samples' weights. None: the number of samples.
        """
        weight = max(samples, 0) if weight is None else weight
        values = dict(metrics or {}) if weight > 0 else {}
        for name in values.keys() - self._metrics.keys():
            self._metrics[name] = array("d", [math.nan]) * len(self._versions)
        for name, sums in self._metrics.items():
            before, value = sums[-1], values.get(name)
            sums.append(before if value is None else (0.0 if math.isnan(before) else before) + value * weight)
        self._states.add(version, states or {})
        self._versions.append(version)
        self._samples.append(self._samples[-1] + max(samples, 0))
        self._weight.append(self._weight[-1] + weight)
        self._loss.append(self._loss[-1] + (loss * weight if weight > 0 else 0.0))
        # Rarely, because it copies the arrays.
        if len(self._versions) > 2 * self._kept:
            self._keep(slice(len(self._versions) - self._kept, None))

    def rollback(self, version: int) -> None:
        """Delete the updates above `version`: a restarted parameter server learns their samples again."""
        self._states.rollback(version)
        keep = len(self._versions)
        while keep and self._versions[keep - 1] > version:
            keep -= 1
        if keep:
            self._keep(slice(0, keep))
        else:
            self._begin()

    def _keep(self, part: slice) -> None:
        self._versions, self._samples = self._versions[part], self._samples[part]
        self._weight, self._loss = self._weight[part], self._loss[part]
        self._metrics = {name: sums[part] for name, sums in self._metrics.items()}

    def running(self) -> Means:
        """Return the means over all samples so far."""
        means = self._since(None)
        return means._replace(metrics=means.metrics | self._states.running())

    def windowed(self) -> Means:
        """Return the means over the samples of the last `window` updates."""
        means = self._since(max(0, len(self._versions) - 1 - self.window))
        return means._replace(metrics=means.metrics | self._states.windowed())

    def faded(self, half_life: float) -> Means:
        """Return the means with the weight of each update halved in `half_life` updates.

        Source: fading factors, Gama, Sebastião and Rodrigues, On evaluating stream learning algorithms, 2013.
        """
        first = max(0, len(self._versions) - 1 - MAX_HALF_LIVES * math.ceil(half_life))
        weights = 0.5 ** (np.arange(len(self._versions) - 2 - first, -1, -1.0) / half_life)

        def total(sums: array[float] | array[int]) -> float:
            values = np.array(sums[first:], dtype=np.float64)
            values[: int(np.argmax(~np.isnan(values)))] = 0.0  # before the first value of a metric
            return float(weights @ np.diff(values))

        samples, weight = self._samples[-1] - self._samples[first], total(self._weight)
        if weight == 0:
            return Means(samples, math.nan, {})
        known = {name: total(sums) / weight for name, sums in self._metrics.items() if not math.isnan(sums[-1])}
        return Means(samples, total(self._loss) / weight, known | self._states.faded(half_life))

    def _since(self, point: int | None) -> Means:
        """Return the means since an index. None: since the beginning of the run."""
        samples = self._samples[-1] - (0 if point is None else self._samples[point])
        weight = self._weight[-1] - (0 if point is None else self._weight[point])
        if weight == 0:
            return Means(samples, float("nan"), {})

        def mean(sums: array[float]) -> float:
            before = 0.0 if point is None or math.isnan(sums[point]) else sums[point]
            return (sums[-1] - before) / weight

        known = {name: sums for name, sums in self._metrics.items() if not math.isnan(sums[-1])}
        return Means(samples, mean(self._loss), {name: mean(sums) for name, sums in known.items()})


class LossTrend:
    """The first, the best and the last windowed mean of a loss, to detect a model that has become much worse.

    Attributes:
        first, best, last: means over a window; NaN before the first window is full.
        best_version: last version of the best window; None before the first window is full.
    """

    def __init__(self, window: int = 50) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=window)
        self._divergence = Divergence()
        self.first = self.best = self.last = math.nan
        self.best_version: int | None = None

    @classmethod
    def without_windows(cls, versions: Iterable[float], losses: Iterable[float]) -> LossTrend:
        """Return the trend of losses without windows, for held-out samples, which are the same in each evaluation."""
        trend = cls(1)
        trend._divergence = Divergence(recent=1)
        for version, loss in zip(versions, losses, strict=True):
            trend._divergence.add(loss)
            trend._point(int(version), loss)
        return trend

    def add(self, version: int, weight: float, loss: float) -> None:
        """Add an update: the mean `loss` of samples whose weights add up to `weight`."""
        if weight > 0:
            self._divergence.add(loss)
            self._recent.append((weight, loss))
            if len(self._recent) >= _MIN_UPDATES:
                total = sum(part * value for part, value in self._recent)
                self._point(version, total / sum(part for part, _ in self._recent))

    def _point(self, version: int, mean: float) -> None:
        self.last = mean
        if math.isnan(self.first):
            self.first = mean
        if not mean >= self.best and math.isfinite(mean):
            self.best, self.best_version = mean, version

    @property
    def diverged(self) -> str:
        """A message on how far the loss has risen, if the model diverges by `Divergence`; otherwise ""."""
        losses = self._divergence
        if not losses.has_diverged:
            return ""
        has_best = self.best_version is not None and self.best <= losses.first
        best = f"{self.best:.4g} at version {self.best_version}" if has_best else f"{losses.first:.4g} at the start"
        return f"the model diverges: its loss has risen from {best} to {losses.now:.4g}"

    @property
    def worsened(self) -> bool:
        """Whether the loss is at least twice its best value and has lost at least half of its decrease."""
        if self.best_version is None:
            return bool(self._recent) and not math.isfinite(self.last) and not math.isnan(self.first)
        fallen = self.first - self.best if math.isfinite(self.first) else 0.0
        return not self.last - self.best <= max(abs(self.best), 0.5 * fallen)
