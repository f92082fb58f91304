"""The end of a source: its last records are learned in batches and groups that are not full. Pure.

After its last record, a source reports the end offset of each partition (`SourceEnded`). Workers cut the records that
they have read up to these offsets into batches. After all of these batches are announced, a group must not wait for
further batches. So policies get the number of batches that are left (`PolicyView.num_left`). If another source sends
more records later, batches and groups are filled as before (docs/decisions/0074).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Final

from doll.ps.engine.membership import Worker
from doll.ps.engine.partition_state import PartitionState
from doll.records.control import Flush, Settle

_ASK_AGAIN_S: Final = 0.5  # seconds; a worker that is computing does not answer


class Ending:
    """The offsets at which sources have ended, and the number of batches that are left before these offsets.

    Attributes:
        ends: end offset of each partition, including new partitions that the engine does not know yet; () if no source
            has ended.
        num_left: number of announced batches that are not in the model, or None if more batches may come.
    """

    def __init__(
        self, partitions: Sequence[PartitionState], records_per_batch: int, ends: tuple[int, ...] = ()
    ) -> None:
        """`partitions`: the list that all parts of the engine share; partitions may be added to it later."""
        self.ends = ends
        self.num_left: int | None = None
        self._partitions = partitions
        self._size = records_per_batch
        self._is_open = self._is_new = bool(ends)  # True while some record before the ends is not in the model
        self._behind: dict[int, int] = {}  # by worker: one of its partitions whose end is not announced
        self._asked_at_s = float("-inf")

    def end(self, ends: Sequence[int]) -> bool:
        """Note that a source has ended at the offsets `ends`. Return whether any end is later than the known one."""
        later = tuple(map(max, zip_longest(self.ends, ends, fillvalue=0)))
        if later == self.ends:
            return False
        self.ends, self._is_open, self._is_new = later, True, True
        return True

    def end_of(self, partition: int) -> int:
        """Return the offset at which this partition ended, or 0 if no end was reported."""
        return self.ends[partition] if partition < len(self.ends) else 0

    def flushes(self, workers: Sequence[Worker], term: int) -> list[Flush]:
        return [
            Flush(
                term=term, worker=worker.number,
                until={number: end for number in sorted(worker.queue.partitions) if (end := self.end_of(number))},
            )
            for worker in workers
            if worker.is_live
        ]  # fmt: skip

    def look(self, workers: Sequence[Worker], changed: Collection[int]) -> list[Worker]:
        """Update the workers whose counters have changed. Return those whose state has changed for policies.

        For each worker that is not done, this method remembers one partition with batches that are not announced yet.
        As long as that partition has such batches, the other partitions of the worker need not be checked.
        """
        if not self._is_open:
            return []
        is_new, self._is_new = self._is_new, False
        looked = workers if is_new else [workers[number] for number in changed]
        for worker in looked:
            self._look_at(worker)
        before, self.num_left = self.num_left, self._count(workers)
        turns = (before is None) != (self.num_left is None)
        met = []
        for worker in workers if turns or not self._is_open else looked:
            is_done = self._is_open and bool(worker.queue.partitions) and worker.number not in self._behind
            if is_done != worker.is_done or turns:
                worker.is_done = is_done
                met.append(worker)
        return met

    def _look_at(self, worker: Worker) -> None:
        partitions = worker.queue.partitions
        known = self._behind.get(worker.number, -1)
        if known not in partitions or self._is_reached(partitions[known]):
            known = next((number for number, item in partitions.items() if not self._is_reached(item)), -1)
        if known < 0:
            self._behind.pop(worker.number, None)
        else:
            self._behind[worker.number] = known

    def _is_reached(self, partition: PartitionState) -> bool:
        return partition.bounds(self._size).lo(partition.announced) >= self.end_of(partition.number)

    def _count(self, workers: Sequence[Worker]) -> int | None:
        """Return the number of announced batches that are not in the model; None if more may come, or none is left."""
        if self._behind or any(self.ends[len(self._partitions) :]):
            return None
        left = sum(len(worker.queue.waiting) + worker.computing + worker.held for worker in workers)
        self._is_open = left > 0
        return left or None

    def asks(self, workers: Sequence[Worker], term: int, now: float) -> list[Settle]:
        """Return requests to workers to push the batches that they keep, because no more batches will come."""
        if not self._is_open or now - self._asked_at_s < _ASK_AGAIN_S:
            return []
        self._asked_at_s = now
        return [
            Settle(term=term, worker=worker.number, session=worker.session, until=0)
            for worker in workers
            if worker.is_done and worker.is_live and worker.queue.computing_grants and not worker.queue.waiting
        ]
