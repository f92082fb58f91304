"""Worker clocks for policies of bounded staleness: the progress of each active worker, and the minimum. Pure.

A worker is active while it is live and has batches that it may compute. Its clock is the number of its batches or waves
in the model, without skipped ones, plus an offset. A worker that becomes active after the others gets an offset with
which it starts at the minimum, so that nobody waits for the batches that it missed (the ESSP paper). The minimum never
decreases.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any


class WorkerClocks:
    """Clocks of the active workers. Each call takes constant time on average, whatever the number of workers.

    Attributes:
        minimum: lowest clock of all active workers. It never decreases, and stays the same while no worker is active.
    """

    def __init__(self, history: int) -> None:
        """`history`: number of clocks below the minimum that `version_of` and `minimum_at` know."""
        self.minimum = 0
        self._history = history
        self._offsets: dict[int, int] = {}  # clock - count, of the workers for which it is not 0
        self._clocks: dict[int, int] = {}  # of active workers
        self._counts: dict[int, int] = {}  # number of active workers by clock
        self._heap: list[int] = []  # the keys of `_counts`, and earlier keys
        # (clock, version at which the minimum reached it), both increasing. The last item is (minimum, ...).
        self._reached: list[tuple[int, int]] = [(0, 0)]

    def slowest(self) -> list[int]:
        """Return the active workers whose clock is the minimum. Looks at all active workers."""
        return [worker for worker, clock in self._clocks.items() if clock == self.minimum]

    def offset(self, worker: int) -> int:
        """Return the difference between the clock of this worker and the count of its batches."""
        return self._offsets.get(worker, 0)

    def shift(self, worker: int, change: int) -> None:
        self._offsets[worker] = self.offset(worker) + change

    def set(self, worker: int, count: int, *, is_active: bool) -> bool:
        """Set a worker's progress: `count` units of its work are in the model. Return whether the worker's offset has
        increased. Call `advance` afterwards."""
        before = self._clocks.get(worker)
        if not is_active:
            if before is not None:
                self._count(before, -1)
                del self._clocks[worker]
            return False
        clock = count + self.offset(worker)
        is_raised = before is None and clock < self.minimum
        if is_raised:
            clock = self.minimum
            self._offsets[worker] = clock - count
        if clock != before:
            self._clocks[worker] = clock
            self._count(clock, +1)
            if before is not None:
                self._count(before, -1)
        return is_raised

    def advance(self, version: int) -> bool:
        """Update `minimum`, and return whether it has changed. `version`: version of the current weights."""
        heap, counts = self._heap, self._counts
        while heap and heap[0] not in counts:
            heappop(heap)
        if not heap or heap[0] <= self.minimum:
            return False
        self.minimum = heap[0]
        self._reached.append((self.minimum, version))
        needless = bisect_left(self._reached, (self.minimum - self._history, 0))
        if needless > self._history:  # rarely: the deletion costs as much as the items that it removes
            del self._reached[:needless]
        return True

    def version_of(self, clock: int) -> int:
        """Return the first version with every active worker's batches below `clock`, which is at most `minimum`."""
        return self._reached[bisect_left(self._reached, (clock, 0))][1]

    def minimum_at(self, version: int) -> int:
        """Return the minimum at a version; for the current version, the minimum so far."""
        return self._reached[max(0, bisect_right(self._reached, version, key=itemgetter(1)) - 1)][0]

    def state(self) -> dict[str, Any]:
        """Return the clocks for a checkpoint: a later server has the same clocks for the same counts of batches."""
        offsets = {str(worker): offset for worker, offset in self._offsets.items()}
        return {"minimum": self.minimum, "offsets": offsets, "reached": [list(item) for item in self._reached]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises ValueError if it is not a result of the method `state`."""
        try:
            minimum = int(state["minimum"])
            reached = [(int(clock), int(version)) for clock, version in state["reached"]]
            offsets = {int(worker): int(offset) for worker, offset in state["offsets"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"expected minimum, offsets and reached, got {state!r:.200}") from exc
        if not reached or reached[-1][0] != minimum or reached != sorted(reached) or minimum < 0:
            raise ValueError(f"expected rising clocks up to the minimum {minimum}, got {reached!r:.200}")
        self.minimum, self._reached, self._offsets = minimum, reached, offsets

    def _count(self, clock: int, change: int) -> None:
        count = self._counts.get(clock, 0) + change
        if count:
            if clock not in self._counts:
                heappush(self._heap, clock)
            self._counts[clock] = count
        else:
            del self._counts[clock]


class WaitingAtGate:
    """Workers that may start after the minimum clock has reached the value that they need.

    All workers whose value is reached start at once, also if the minimum has skipped some values.
    """

    def __init__(self) -> None:
        self._needed: dict[int, int] = {}  # the minimum that each waiting worker needs
        self._workers: dict[int, set[int]] = {}  # by the minimum that they need
        self._heap: list[int] = []  # the keys of `_workers`, and earlier keys

    def __bool__(self) -> bool:
        return bool(self._needed)

    def set(self, worker: int, needed: int | None) -> None:
        """Set the minimum that a worker needs; None: it does not wait."""
        before = self._needed.get(worker)
        if before == needed:
            return
        if before is not None:
            del self._needed[worker]
            self._workers[before].discard(worker)
            if not self._workers[before]:
                del self._workers[before]
        if needed is not None:
            self._needed[worker] = needed
            if needed not in self._workers:
                heappush(self._heap, needed)
                self._workers[needed] = set()
            self._workers[needed].add(worker)

    def open(self, minimum: int) -> list[int]:
        """Return the workers that may start now, in order. They do not wait any more."""
        started: list[int] = []
        while self._heap and self._heap[0] <= minimum:
            for worker in self._workers.pop(heappop(self._heap), ()):
                del self._needed[worker]
                started.append(worker)
        return sorted(started)
