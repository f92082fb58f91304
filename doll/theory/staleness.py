"""The staleness of the weights that workers use: the histogram of the ESSP paper (Fig. 1, left). Pure.

The clock of worker p is the number of its batches in the model: a version at which this clock is k contains the batches
0 to k - 1 of p. When worker w computes its batch c with version v, every other worker p contributes one difference

    d = (newest batch of p in version v) - c = (clock of p at version v) - 1 - c.

Under the policy bsp every difference is -1. Under a policy that lets no worker be more than s batches ahead of another,
differences are -s - 1 to s, because a worker may push batch c + s before it waits. The text of the paper defines
another difference, that of the clocks of two workers; the axis of its figure shows the one used here.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

EXACT: Final = 128
"""The largest absolute difference that is counted exactly."""
ALL_UP_TO: Final = 16
"""Up to this number of workers, a read is by default compared with all other workers; with more, with one other."""
HISTORY: Final = 1 << 15
"""The number of versions for which the meter keeps the clock of each worker."""
_KEPT_BITS: Final = 5
_TRIM_AT: Final = 64


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
        total: exact sum of the differences.
        older: number of reads of versions whose clocks the meter had already forgotten; `counts` does not include them.
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

    The cost of a call does not grow with the number of workers. With at most `all_up_to` workers, a read is compared
    with all other workers. With more workers, each read is compared with one other worker; successive reads of a worker
    use the other workers in turn. Every pair of workers then counts equally often. The mean has no bias, unless the
    speeds of the workers repeat with the same period. Workers that are inactive now, or that joined after the version
    was made, are left out, because no worker waits for them.

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
        is_active: Callable[[int], bool] = lambda worker: True,
    ) -> None:
        """
        Args:
            clocks: number of batches of each worker in version `version`.
            version: the current version.
            history: number of versions before the newest for which reads are counted. 0: only reads of the newest
                version, which needs no memory.
            warm_up: number of first batches of each worker that are not counted as reads.
            all_up_to: maximum number of workers with which a read is compared with all other workers.
            is_active: function that returns whether a worker is live.
        """
        self.histogram = Histogram()
        self._clocks = list(clocks)
        self._version = self._oldest = version
        self._history = history
        self._warm_up = warm_up
        self._compares_all = len(self._clocks) <= all_up_to
        self._is_active = is_active
        self._offsets = [0] * len(self._clocks)  # clock minus number of batches
        self._since = [version] * len(self._clocks)  # the first version in which a worker's current process counts
        self._turns = list(range(len(self._clocks)))  # the other worker with which a worker's last read was compared
        self._tracks: dict[int, _Track] = {}
        self._changes: deque[tuple[int, int]] = deque()  # (version, worker) of the entries in `_tracks`, in order

    def joined(self, worker: int, clock: int | None = None) -> None:
        """Record that a process of this worker begins, for the first time or again.

        Args:
            clock: clock of the worker's next batch, as the policy counts it. None: the smallest clock of the other
                active workers, or the worker's own if it is larger. So no worker waits for missed batches.
        """
        if clock is None:
            others = (at for other, at in enumerate(self._clocks) if other != worker and self._is_active(other))
            clock = max(self._clocks[worker], min(others, default=0))
        self._offsets[worker] += clock - self._clocks[worker]
        self._since[worker] = self._version
        self._set(worker, self._version, clock)

    def skipped(self, worker: int, batches: int) -> None:
        """Record that the next `batches` batches of this worker are skipped."""
        self._offsets[worker] -= batches

    def read(self, worker: int, version: int, batch: int, count: int = 1) -> None:
        """Record that `worker` computes its batches `batch` to `batch + count - 1` with version `version`.

        Call this method before `applied` reports a version that contains these batches.
        """
        if batch < self._warm_up:
            return
        if version < self._oldest:
            self.histogram.older += count
            return
        clock = batch + self._offsets[worker]
        if self._compares_all:
            for other in range(len(self._clocks)):
                if other != worker:
                    self._compare(other, version, clock, count)
        elif len(self._clocks) > 1:
            for at in range(clock, clock + count):
                self._compare(self._next(worker), version, at, 1)

    def applied(self, worker: int, version: int, batches: int) -> None:
        """Record that `version` contains the first `batches` batches of this worker. Versions must not decrease."""
        self._set(worker, version, batches + self._offsets[worker])

    def _compare(self, other: int, version: int, clock: int, count: int) -> None:
        if version < self._since[other] or not self._is_active(other):
            return
        if version >= self._version or (track := self._tracks.get(other)) is None:
            newest = self._clocks[other] - 1
        else:
            newest = track.at(version) - 1
        for at in range(clock, clock + count):
            self.histogram.add(newest - at)

    def _next(self, worker: int) -> int:
        other = self._turns[worker] + 1
        if other == len(self._turns):
            other = 0
        if other == worker:
            other = other + 1 if other + 1 < len(self._turns) else 0
        self._turns[worker] = other
        return other

    def _set(self, worker: int, version: int, clock: int) -> None:
        self._version = version
        oldest = version - self._history
        if self._history:
            track = self._tracks.get(worker)
            if track is None:
                track = self._tracks[worker] = _Track(self._clocks[worker])
            track.append(version, clock)
            changes = self._changes
            changes.append((version, worker))
            while changes[0][0] <= oldest:
                self._tracks[changes.popleft()[1]].forget_first()
        if oldest > self._oldest:
            self._oldest = oldest
        self._clocks[worker] = clock


class _Track:
    """The clock of one worker at each of the last versions. The first entry is the clock before these versions."""

    __slots__ = ("_clocks", "_first", "_versions")

    def __init__(self, clock: int) -> None:
        self._versions = array("q", [-1])
        self._clocks = array("q", [clock])
        self._first = 0

    def append(self, version: int, clock: int) -> None:
        self._versions.append(version)
        self._clocks.append(clock)

    def forget_first(self) -> None:
        self._first += 1
        if self._first >= _TRIM_AT and 2 * self._first >= len(self._versions):
            del self._versions[: self._first], self._clocks[: self._first]
            self._first = 0

    def at(self, version: int) -> int:
        return self._clocks[bisect_right(self._versions, version, self._first) - 1]
