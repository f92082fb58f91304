"""The rule by which a model diverges: its loss before learning is far above that of a model that has learned nothing
(ADR 125). Pure."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

# A model has diverged at this multiple of the first loss and of the lowest loss so far; or at that multiple of the
# first loss alone, because a model that diverges at once has no low loss.
_FACTOR: Final = 100.0
_FACTOR_OF_FIRST: Final = 1000.0
_RECENT: Final = 10  # losses of which the median is compared: a few extreme samples raise a mean, too
_FEWEST: Final = 3


class Divergence:
    """The losses of a model on samples that it has not learned yet.

    Attributes:
        first: the first loss; NaN before it.
        now: median of the newest losses; infinite if most of them are not finite, NaN while they are too few.
    """

    def __init__(self, first: float = math.nan, *, recent: int = _RECENT) -> None:
        """Begin. `first`: the first loss, if it is known. `recent`: number of losses in the median."""
        self.first = first
        self.now = self._lowest = math.nan
        self._fewest = min(recent, _FEWEST)
        self._recent: deque[float] = deque(maxlen=recent)

    def add(self, loss: float) -> None:
        """Add a loss: the mean over the samples of an update, or of a batch."""
        if math.isnan(self.first):
            self.first = loss
        self._recent.append(loss if math.isfinite(loss) else math.inf)
        if len(self._recent) >= self._fewest:
            self.now = median(self._recent)
            if not self.now >= self._lowest and math.isfinite(self.now):
                self._lowest = self.now

    @property
    def usual(self) -> float:
        """The larger one of the first loss and the lowest one, without signs; NaN while there are too few losses.

        Both count, because the first samples may have been easy, and the loss of a good model is near zero.
        """
        return max(abs(self.first), abs(self._lowest)) if math.isfinite(self._lowest) else math.nan

    @property
    def has_diverged(self) -> bool:
        """Whether the newest losses are far above.

        >>> good, bad = Divergence(), Divergence()
        >>> for step in range(8):
        ...     good.add(2.0 if step else 0.01)
        ...     bad.add(1.2 * 10.0**step)
        >>> good.has_diverged, bad.has_diverged
        (False, True)
        """
        at_once = _FACTOR_OF_FIRST * abs(self.first) if self.first else math.nan
        return self.now > _FACTOR * self.usual or self.now > at_once
