"""The clock of a spot run: it stands still until the market opens, because starting a job is not part of the market."""

from __future__ import annotations

import time
from collections.abc import Callable


class PausedClock:
    """Unix seconds that stand still until `start` is called, then advance at the pace of the real clock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._begin_s = clock()
        self._started_s: float | None = None

    def start(self, ago_s: float = 0.0) -> None:
        """Start now, or as if it had started `ago_s` seconds ago; only the first call counts."""
        if self._started_s is None:
            self._started_s = self._clock() - ago_s

    @property
    def runs(self) -> bool:
        return self._started_s is not None

    def __call__(self) -> float:
        return self.at(self._clock())

    def at(self, real_s: float) -> float:
        """What it shows at a time of the real clock, Unix seconds."""
        return self._begin_s if self._started_s is None else self._begin_s + max(0.0, real_s - self._started_s)
