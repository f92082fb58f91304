"""The load of each partition: records that its worker has learned of late, and those that wait. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from doll.ps.engine.membership import Worker
from doll.ps.engine.partition_state import PartitionState

_LOOKS: Final = 6  # at the counters, in one window


class PartitionLoads:
    """The load of each partition, in records per second: what was learned of it in the last window, and what is unread
    as if it were to be learned in another window.

    So a partition that its worker keeps up with has its rate, and one that is behind has more than it gets.
    """

    def __init__(
        self, partitions: Sequence[PartitionState], owners: Sequence[Worker], *, window_s: float, records_per_batch: int
    ) -> None:
        """
        Args:
            owners: the worker that serves each partition.
            window_s: seconds above 0.
        """
        self._partitions = partitions
        self._owners = owners
        self._window_s = window_s
        self._records_per_batch = records_per_batch
        self._looks: deque[tuple[float, list[int]]] = deque()  # (when, batches of each partition in the model)

    def observe(self, now: float) -> None:
        """Look at the counters if it is time. Times do not fall."""
        looks = self._looks
        if looks and now - looks[-1][0] < self._window_s / _LOOKS:
            return
        looks.append((now, [partition.applied for partition in self._partitions]))
        while len(looks) > 2 and now - looks[1][0] >= self._window_s:
            looks.popleft()

    def loads(self, now: float) -> list[float] | None:
        """The load of each partition; None before a window has passed, and if nothing is learned and nothing waits."""
        if not self._looks or (seconds := now - self._looks[0][0]) < self._window_s:
            return None
        before = self._looks[0][1]
        added = [0] * (len(self._partitions) - len(before))  # since: partitions may become more
        counts = zip(self._partitions, [*before, *added], strict=True)
        learned = [partition.applied - count for partition, count in counts]
        unread = self._unread()
        loads = [
            self._records_per_batch * batches / seconds + records / self._window_s
            for batches, records in zip(learned, unread, strict=True)
        ]
        return loads if any(loads) else None

    def _unread(self) -> list[float]:
        """Records of each partition that are not read: as its worker says, of those with the most, and of the others
        what is left in equal parts."""
        each: dict[Worker, float] = {}
        most: dict[int, int] = {}
        for worker in dict.fromkeys(self._owners):
            own = {number: count for number, count in worker.most_unread if number in worker.queue.partitions}
            most |= own
            others = len(worker.queue.partitions) - len(own)
            each[worker] = max(0, worker.lag - sum(own.values())) / others if others else 0.0
        return [most.get(number, each[worker]) for number, worker in enumerate(self._owners)]
