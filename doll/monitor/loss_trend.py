"""The course of a loss over a run: has it ended far above its best, so that what was learned is lost again? Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

# A mean over fewer is as good as its samples happen to be easy.
_AT_LEAST: Final = 10


class LossTrend:
    """Windowed means of a loss: the first, the best and the last of them.

    Attributes:
        first, best, last: means over a window; NaN while there is none.
        best_version: the last version of the best window; None while there is none.
    """

    def __init__(self, window: int = 50) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=window)
        self.first = self.best = self.last = math.nan
        self.best_version: int | None = None

    @classmethod
    def of(cls, versions: Iterable[float], losses: Iterable[float]) -> LossTrend:
        """The course of single losses, without windows: of held-out samples, which are the same each time."""
        course = cls(1)
        for version, loss in zip(versions, losses, strict=True):
            course._point(int(version), loss)
        return course

    def add(self, version: int, samples: int, loss: float) -> None:
        """One update: mean `loss` over `samples` samples."""
        if samples > 0:
            self._recent.append((samples, loss))
            if len(self._recent) >= _AT_LEAST:
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
        """The loss is twice its best at least, and half at least of what it had fallen by is gone."""
        if self.best_version is None:
            return bool(self._recent) and not math.isfinite(self.last) and not math.isnan(self.first)
        fallen = self.first - self.best if math.isfinite(self.first) else 0.0
        return not self.last - self.best <= max(abs(self.best), 0.5 * fallen)
