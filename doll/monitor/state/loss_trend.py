"""The trend of a loss over a run, to detect a model that has become much worse than it was. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

# A mean over fewer updates depends too much on their samples.
_MIN_UPDATES: Final = 10


class LossTrend:
    """Windowed means of a loss: the first, the best and the last of them.

    Attributes:
        first, best, last: means over a window; NaN before the first window is full.
        best_version: the last version of the best window; None before the first window is full.
    """

    def __init__(self, window: int = 50) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=window)
        self.first = self.best = self.last = math.nan
        self.best_version: int | None = None

    @classmethod
    def of(cls, versions: Iterable[float], losses: Iterable[float]) -> LossTrend:
        """The trend of losses without windows, as of held-out samples, which are the same each time."""
        trend = cls(1)
        for version, loss in zip(versions, losses, strict=True):
            trend._point(int(version), loss)
        return trend

    def add(self, version: int, samples: int, loss: float) -> None:
        """Add an update: the mean `loss` of `samples` samples."""
        if samples > 0:
            self._recent.append((samples, loss))
            if len(self._recent) >= _MIN_UPDATES:
                total = sum(count * value for count, value in self._recent)
                self._point(version, total / sum(count for count, _ in self._recent))

    def _point(self, version: int, mean: float) -> None:
        self.last = mean
        if math.isnan(self.first):
            self.first = mean
        if not mean >= self.best and math.isfinite(mean):
            self.best, self.best_version = mean, version

    @property
    def worsened(self) -> bool:
        """Whether the loss is at least twice its best, and has lost at least half of its decrease again."""
        if self.best_version is None:
            return bool(self._recent) and not math.isfinite(self.last) and not math.isnan(self.first)
        fallen = self.first - self.best if math.isfinite(self.first) else 0.0
        return not self.last - self.best <= max(abs(self.best), 0.5 * fallen)
