"""The staleness of the weights that workers use: the histogram of the ESSP paper (Fig. 1, left). Pure.

The clock of worker p is the number of its batches in the model: a version at which this clock is k contains the batches
0 to k - 1 of p. When worker w computes its batch c with version v, every other live worker p contributes one difference

    d = (newest batch of p in version v) - c = (clock of p at version v) - 1 - c.

Under the policy bsp every difference is -1. Under a policy that lets no worker be more than s batches ahead of another,
differences are -s - 1 to s, because a worker may push batch c + s before it waits. The text of the paper defines
another difference, that of the clocks of two workers; the axis of its figure shows the one used here.

The workers of the paper always have data. Here a clock that a worker has missed is empty: it counts as a batch of no
samples (docs/decisions/0120). So a worker that joins late begins at the minimum of the other clocks, and a worker
without batches, for which the policy lets nobody wait, has at least the policy's minimum clock at each version.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Final

EXACT: Final = 128
"""The largest absolute difference that is counted exactly."""
ALL_UP_TO: Final = 16
"""Up to this number of workers, a read is by default compared with all other workers; with more, with one other."""
HISTORY: Final = 1 << 18
"""The number of changes of clocks that the meter keeps, over all workers; each takes 16 bytes."""
LEAST_HISTORY: Final = 64
"""The number of its last changes that the meter keeps of each worker, however many workers there are."""
_KEPT_BITS: Final = 5


def bucket(difference: int) -> int:
    """Return the value that stands for a difference in the histogram. For differences above `EXACT`, this value is
    nearer to 0 by at most 1/16 of the difference.

    So a histogram stays small even if workers drift far apart under a policy without a bound.

    >>> bucket(-3), bucket(128), bucket(1000), bucket(-1000)
    (-3, 128, 992, -992)
    """
    size = abs(difference)
    if size <= EXACT:
        return difference
    shift = size.bit_length() - _KEPT_BITS
    rounded = size >> shift << shift
    return rounded if difference > 0 else -rounded


class Histogram:
    """A histogram of the differences. Histograms can be added up with `merge`.

    Attributes:
        counts: number of occurrences of each difference, by its `bucket`.
        older: number of differences of versions for which the meter had no clock any more; `counts` does not include
            them.
    """

    __slots__ = ("counts", "older", "total")

    def __init__(self, counts: Mapping[int, int] | None = None, *, total: int = 0, older: int = 0) -> None:
        self.counts: dict[int, int] = dict(counts or {})
        self.total = total
        self.older = older

    def add(self, difference: int, times: int = 1) -> None:
        """Count a difference `times` times."""
        key = difference if -EXACT <= difference <= EXACT else bucket(difference)
        self.counts[key] = self.counts.get(key, 0) + times
        self.total += difference * times

    def merge(self, other: Histogram) -> None:
        """Add the counts of `other`."""
        for difference, times in other.counts.items():
            self.counts[difference] = self.counts.get(difference, 0) + times
        self.total += other.total
        self.older += other.older

    @property
    def size(self) -> int:
        """The number of counted differences."""
        return sum(self.counts.values())

    @property
    def counted_share(self) -> float:
        """The share of all differences that are counted; NaN without reads."""
        size = self.size
        return size / (size + self.older) if size + self.older else math.nan

    @property
    def mean(self) -> float:
        """The mean difference; NaN without reads."""
        size = self.size
        return self.total / size if size else math.nan

    def percentile(self, percent: float) -> float:
        """Return the smallest d such that at least `percent` % of all differences are at most d; NaN without reads.

        For 99 % of the reads, the weights are at least as new as the 1st percentile says.

        >>> Histogram({-3: 1, -1: 98, 0: 1}).percentile(1), Histogram({-3: 1, -1: 99}).percentile(50)
        (-3.0, -1.0)
        """
        needed = self.size * percent / 100.0
        seen = 0
        for difference in sorted(self.counts):
            seen += self.counts[difference]
            if seen >= needed:
                return float(difference)
        return math.nan


class StalenessMeter:
    """Tracks which batches each version contains, and counts the differences of every read.

    With at most `all_up_to` workers, a read is compared with all other workers that are live when it is reported. With
    more workers, a read is compared with one other live worker: successive reads of a worker use the others in turn.
    Every pair of workers then counts equally often, and the mean has no bias unless the speeds of the workers repeat
    with the same period. So the cost of a call does not grow with the number of live workers.

    The clock of a worker can be told at each version since its last `history / workers` changes, and at least its last
    64. Under a policy of bounded staleness, a worker's clock changes at most 2 s + 1 times after the oldest version
    that another worker may still use. Without a bound, a read is too old only if another worker has applied as many
    batches meanwhile.

    Attributes:
        histogram: histogram of all reads so far.
    """

    def __init__(
        self,
        clocks: Sequence[int],
        *,
        version: int = 0,
        history: int = HISTORY,
        warm_up: int = 0,
        all_up_to: int = ALL_UP_TO,
        is_live: Callable[[int], bool] = lambda worker: True,
        minimum_clock: Callable[[int], int] = lambda version: 0,
    ) -> None:
        """
        Args:
            clocks: number of batches of each worker in version `version`.
            history: number of changes of clocks that are kept, over all workers. 0: only reads of the newest version
                are counted, which needs no memory.
            warm_up: number of first batches of each worker that are not counted as reads.
            all_up_to: maximum number of workers with which a read is compared with all other workers.
            is_live: function that returns whether a worker is live.
            minimum_clock: function that returns the clock that every live worker has at least at a version.
        """
        self.histogram = Histogram()
        self._clocks = list(clocks)
        self._version = self._oldest = version
        self._kept = max(LEAST_HISTORY, history // max(1, len(self._clocks))) if history else 0  # changes of a worker
        self._warm_up = warm_up
        self._compares_all = len(self._clocks) <= all_up_to
        self._is_live = is_live
        self._minimum_clock = minimum_clock
        self._offsets = [0] * len(self._clocks)  # clock minus number of batches
        self._turns = list(range(len(self._clocks)))  # the other worker with which a worker's last read was compared
        self._tracks: dict[int, _Track] = {}  # of the workers whose clock has changed

    def joined(self, worker: int, clock: int | None = None, version: int = 0) -> None:
        """Record that a process of this worker begins, for the first time or again, or that its clock was raised.

        Args:
            clock: clock of the worker's next batch, as the policy counts it. None: the smallest clock of the other
                live workers, if it is larger than the worker's own clock. Every version contains the clocks between,
                which are empty.
            version: the first version that contains these clocks, if it is a later one than the newest.
        """
        own = self._clocks[worker]
        if clock is not None:
            self._set(worker, max(version, self._version), clock)
        else:
            others = (at for other, at in enumerate(self._clocks) if other != worker and self._is_live(other))
            clock = max(own, min(others, default=0))
            if clock > own:
                self._tracks.pop(worker, None)
                self._clocks[worker] = clock
        self._offsets[worker] += clock - own

    def skipped(self, worker: int, batches: int) -> None:
        """Record that the next `batches` batches of this worker are skipped."""
        self._offsets[worker] -= batches

    def read(self, worker: int, version: int, batch: int, count: int = 1) -> None:
        """Record that `worker` computes its batches `batch` to `batch + count - 1` with version `version`.

        Call this method before `applied` reports a version that contains these batches.
        """
        if batch < self._warm_up:
            return
        clock, minimum = batch + self._offsets[worker], self._minimum_clock(version)
        if self._compares_all:
            for other in range(len(self._clocks)):
                if other != worker and self._is_live(other):
                    self._compare(other, version, minimum, clock, count)
        else:
            for at in range(clock, clock + count):
                if (next_one := self._next(worker)) is not None:
                    self._compare(next_one, version, minimum, at, 1)

    def applied(self, worker: int, version: int, batches: int) -> None:
        """Record that `version` contains the first `batches` batches of this worker. Versions must not decrease."""
        self._set(worker, version, batches + self._offsets[worker])

    def _compare(self, other: int, version: int, minimum: int, clock: int, count: int) -> None:
        own = self._clock_at(other, version)
        if own is None:
            self.histogram.older += count
            return
        newest = max(own, minimum) - 1
        for at in range(clock, clock + count):
            self.histogram.add(newest - at)

    def _clock_at(self, worker: int, version: int) -> int | None:
        """Return the worker's own clock at a version; None if the version is too old."""
        if version >= self._version:
            return self._clocks[worker]
        if version < self._oldest:
            return None
        track = self._tracks.get(worker)
        return self._clocks[worker] if track is None else track.at(version)

    def _next(self, worker: int) -> int | None:
        """Return the live worker with which the next read of `worker` is compared; None if no other one is live.

        Looks at workers until one is live. The fewer are live, the fewer reads there are: all calls together cost at
        most as much as with all workers live.
        """
        for step in range(1, len(self._turns) + 1):
            other = (self._turns[worker] + step) % len(self._turns)
            if other != worker and self._is_live(other):
                self._turns[worker] = other
                return other
        return None

    def _set(self, worker: int, version: int, clock: int) -> None:
        self._version = version
        if not self._kept:
            self._oldest = version
        else:
            track = self._tracks.get(worker)
            if track is None:
                track = self._tracks[worker] = _Track(self._clocks[worker])
            track.append(version, clock, self._kept)
        self._clocks[worker] = clock


class _Track:
    """The last changes of the clock of one worker. The first entry is the clock before the first change."""

    __slots__ = ("_clocks", "_versions")

    def __init__(self, clock: int) -> None:
        self._versions = array("q", [-1])
        self._clocks = array("q", [clock])

    def append(self, version: int, clock: int, kept: int) -> None:
        """Add a change, and forget changes before the last `kept` ones."""
        self._versions.append(version)
        self._clocks.append(clock)
        if len(self._versions) > kept + kept // 4:  # rarely: the deletion moves what is kept
            del self._versions[:-kept], self._clocks[:-kept]

    def at(self, version: int) -> int | None:
        """Return the clock at a version; None if its change is forgotten."""
        at = bisect_right(self._versions, version)
        return self._clocks[at - 1] if at else None
