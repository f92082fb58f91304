"""The intake of one partition: from records to batches that the worker's core may have."""

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
        reading: what the reader's deliveries name that are for this intake, and not for an earlier one.
        progress: (delivered, position), kept by the stream: the records below `delivered` have been fed, and from there
            to `position` there is no record (markers of transactions, for instance).
        log_end: one above the last offset, when Kafka was asked last.
        decoded: batches that the core may not have yet, after some that hold no record.
        empty: what the first of these batches without a record decodes to.
        fed_at_s: when records came last; monotonic.
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
        """The time for which the open batch has held a record, at this call; 0 if it holds none or may not be cut."""
        number = self.batcher.open_batch
        if number is None or number != self._open_batch:
            self._open_batch, self._open_since_s = number, now
        return now - self._open_since_s

    @property
    def recordless_until(self) -> int | None:
        """All delivered records are fed, and there is no record between them and this offset, which is after them."""
        delivered, position = self.progress
        return position if self.batcher.next_offset == delivered < position else None
