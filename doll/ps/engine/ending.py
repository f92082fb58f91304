"""What is left of a source that has ended: it is learned too, in batches and groups that are not full. Pure.

A source says where the partitions ended when it had sent its last record (`SourceEnded`). Workers cut what they have
read up to there. Once all of that is announced, no batch will come that a group could wait for, and policies are told
how many are left (`PolicyView.num_left`). Another source may send more at any time: then all goes on as before
(docs/decisions/0074).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Final

from doll.ps.engine.membership import Worker
from doll.ps.engine.partition_state import Partition
from doll.records.control import Flush, Settle

_ASK_AGAIN_S: Final = 0.5  # a worker that is computing does not answer


class Ending:
    """Where sources have ended, and how many batches are left before that.

    Attributes:
        ends: of each partition, offsets; () while no source has ended.
        num_left: batches that are announced and not in the model, where no more will come; None: more may.
    """

    def __init__(self, partitions: Sequence[Partition], records_per_batch: int, ends: tuple[int, ...] = ()) -> None:
        """`partitions`: for all parts of the engine; there may be more of them later."""
        self.ends = ends
        self.num_left: int | None = None
        self._partitions = partitions
        self._size = records_per_batch
        self._is_open = bool(ends)  # something before the ends is not in the model
        self._reached: set[int] = set()  # partitions that are announced up to their ends
        self._asked_at_s = float("-inf")

    def end(self, ends: Sequence[int]) -> bool:
        """A source has ended where the partitions ended there; whether that is behind what was known."""
        known = chain(self.ends, repeat(0))
        later = tuple(max(end, before) for end, before in zip(ends[: len(self._partitions)], known, strict=False))
        later += self.ends[len(later) :]
        if later == self.ends:
            return False
        self.ends, self._is_open = later, True
        return True

    def of(self, partition: int) -> int:
        """Where this partition ended; 0: nobody has said so."""
        return self.ends[partition] if partition < len(self.ends) else 0

    def flushes(self, workers: Sequence[Worker], term: int) -> list[Flush]:
        """What the workers that are here are told."""
        return [
            Flush(
                term=term, worker=worker.number,
                until={number: end for number in sorted(worker.queue.partitions) if (end := self.of(number))},
            )
            for worker in workers
            if worker.is_live
        ]  # fmt: skip

    def look(self, workers: Sequence[Worker]) -> list[Worker]:
        """Count again; returns the workers of which a policy may think otherwise now.

        While a source has ended and not all of it is in the model, this takes time for each partition.
        """
        if not self._is_open:
            return []
        before, left = self.num_left, self._count()
        self.num_left = left
        reached = self._reached if self._is_open else set[int]()
        met = []
        for worker in workers:
            is_done = bool(worker.queue.partitions) and worker.queue.partitions.keys() <= reached
            if is_done != worker.is_done or (before is None) != (left is None):
                worker.is_done = is_done
                met.append(worker)
        return met

    def _count(self) -> int | None:
        self._is_open = False
        self._reached.clear()
        for partition in self._partitions:
            bounds, end = partition.bounds(self._size), self.of(partition.number)
            if bounds.lo(partition.announced) >= end:
                self._reached.add(partition.number)
            self._is_open |= bounds.lo(partition.applied) < end
        if not self._is_open or len(self._reached) < len(self._partitions):
            return None
        return sum(partition.announced - partition.applied for partition in self._partitions)

    def asks(self, workers: Sequence[Worker], term: int, now: float) -> list[Settle]:
        """Ask workers for what they keep for a push of more batches, now and then: these will not come."""
        if not self._is_open or now - self._asked_at_s < _ASK_AGAIN_S:
            return []
        self._asked_at_s = now
        return [
            Settle(term=term, worker=worker.number, session=worker.session, until=0)
            for worker in workers
            if worker.is_done and worker.is_live and worker.queue.computing_grants and not worker.queue.waiting
        ]
