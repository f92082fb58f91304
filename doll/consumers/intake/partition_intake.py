"""The intake of one partition: from records to batches for the worker's core."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from doll.consumers.intake.batching import PartitionBatcher, RawBatch, Value
from doll.consumers.intake.decoding import DecodedBatch
from doll.consumers.intake.deleted_records import DeletedRecords
from doll.consumers.lifecycle.stall_watch import StallWatch

RawAndDecoded: TypeAlias = tuple[RawBatch[Value], DecodedBatch]


@dataclass(slots=True, eq=False)
class PartitionIntake:
    """One partition that a worker serves.

    Attributes:
        reading: number that the reader's deliveries for this intake have. Earlier intakes have other numbers.
        progress: (delivered, position), set by the stream: records below `delivered` were fed. The offsets from
            `delivered` to `position` have no record (for instance transaction markers).
        log_end: one above the last offset, when Kafka was last asked.
        decoded: decoded batches that wait, because earlier batches without a record wait.
        empty: the decoded form of the first of the waiting batches without a record.
        fed_at_s: time of the last records, in monotonic seconds.
    """

    number: int
    reading: int
    batcher: PartitionBatcher[Value]
    deleted_records: DeletedRecords
    watch: StallWatch
    progress: tuple[int, int] = field(init=False)
    log_end: int = 0
    decoded: deque[RawAndDecoded] = field(default_factory=deque)
    empty: DecodedBatch | None = None
    fed_at_s: float = float("-inf")
    _open_batch: int | None = None
    _open_since_s: float = 0.0

    def __post_init__(self) -> None:
        self.progress = (self.batcher.next_offset, self.batcher.next_offset)

    def open_for_s(self, now: float) -> float:
        """Return the seconds since a call of this method first saw a record in the open batch. Return 0 if the batch
        has no record or may not be cut."""
        number = self.batcher.open_batch
        if number is None or number != self._open_batch:
            self._open_batch, self._open_since_s = number, now
        return now - self._open_since_s

    @property
    def recordless_until(self) -> int | None:
        """The end of the gap that follows the fed records. None if there is no gap, or if some delivered records are
        not fed yet."""
        delivered, position = self.progress
        return position if self.batcher.next_offset == delivered < position else None
