"""Algorithm 1: cut one partition into batches of offsets, and keep the batches until they are decoded. Pure.

A batch covers `records_per_batch` offsets, or fewer if it is cut (`doll.records.bounds`). After its bounds are decided,
they do not depend on when or how often records are read. A process that reads again after a crash gets the same batch.
(The paper counts samples in memory: docs/theory.md, D1.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeAlias, TypeVar

from doll.config import JobConfig
from doll.records.bounds import Bounds, Cuts
from doll.records.refusals import UnreadValue
from doll.task.records import Envelope, envelope_bytes

R = TypeVar("R")

# So many empty batches are returned as one range. The range waits for a checkpoint, which pays off only for many.
MIN_RANGE: Final = 256
Value: TypeAlias = bytes | None

MAX_WAITING_BYTES: Final = 64 << 20
_MORE_BATCHES: Final = 1024  # above a full buffer: more than the batches of a chunk without long gaps


@dataclass(slots=True)
class RawBatch(Generic[R]):
    """The undecoded records of one batch, in the order of offsets, or a range of `count` batches without any record.

    `gaps` are the offset ranges [lo, hi) inside the batch for which the log contains no record (transaction markers,
    records of aborted transactions, compaction). `lost` are the ranges of records that were deleted before they were
    read. `values` has one value for each other offset of the batch. `envelopes` has one envelope for each value, or is
    empty.

    `leader_epoch` is the highest leader epoch in the log below `hi` when the batch was read; -1: unknown.
    """

    partition: int
    number: int
    lo: int
    hi: int
    values: list[R] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    count: int = 1
    leader_epoch: int = -1
    envelopes: list[Envelope | None] = field(default_factory=list)
    times_ms: list[int] = field(default_factory=list)  # event time of each value; empty: not known

    @property
    def offsets(self) -> Sequence[int]:
        """The offset of each of `values`, valid when the batch is complete."""
        if not self.gaps and not self.lost:
            return range(self.lo, self.hi)
        offsets: list[int] = []
        at = self.lo
        for lo, hi in sorted([*self.gaps, *self.lost]):
            offsets += range(at, lo)
            at = hi
        offsets += range(at, self.hi)
        return offsets


class PartitionBatcher(Generic[R]):
    """A collector of one partition's records, which forms batches."""

    def __init__(
        self, *, origin: int, records_per_batch: int, next_batch: int, align: int = 1, partition: int = 0,
        cuts: Cuts | None = None,
    ) -> None:  # fmt: skip
        """Start at the first offset of batch `next_batch`.

        Args:
            align: a range of empty batches begins and ends at multiples of this number, so that it consists of whole
                waves.
            cuts: the known cuts; further cuts are added to this object. None: there are none yet.
        """
        if records_per_batch < 1:
            raise ValueError(f"expected records_per_batch >= 1, got {records_per_batch}")
        self._partition = partition
        self._size = records_per_batch
        self._cuts = Cuts() if cuts is None else cuts
        self._align = align
        self._batch = self._open(next_batch, Bounds(origin, records_per_batch, self._cuts).lo(next_batch))
        self.next_offset = self._batch.lo
        self._lost: deque[tuple[int, int]] = deque()  # after `next_offset`, ascending
        self._leader_epoch = -1  # leader epoch of the newest record

    def mark_lost(self, lo: int, hi: int) -> None:
        """Record that the records [lo, hi) were deleted before they were read. After this call, records before `lo` may
        still be fed, but no records between `lo` and `hi`."""
        if self._lost and lo <= self._lost[-1][1]:  # one range: a `Skip` names each
            before = self._lost.pop()
            lo, hi = before[0], max(before[1], hi)
        lo = max(lo, self.next_offset)
        if lo < hi:
            self._lost.append((lo, hi))

    def _open(self, number: int, lo: int) -> RawBatch[R]:
        return RawBatch(self._partition, number, lo, lo + self._size - self._cuts.left_out_by(number))

    @property
    def open_batch(self) -> int | None:
        """The number of the incomplete batch, if it has records and may be cut; otherwise None."""
        batch = self._batch
        return batch.number if batch.values and batch.number >= self._cuts.decided else None

    def must_flush(self, until: int) -> bool:
        """Return whether all offsets below `until` were read, some of them into an open batch that may be cut."""
        batch = self._batch
        return batch.lo < until <= self.next_offset and batch.number >= self._cuts.decided

    def cut(self, *, also_gaps: bool = False) -> RawBatch[R] | None:
        """Cut the open batch at `next_offset` and return it; None if no batch may be cut. With `also_gaps`, also cut a
        batch that covers offsets but has no record."""
        if self.open_batch is None and not (also_gaps and self.must_flush(self.next_offset)):
            return None
        self._cuts.add(self._batch.number, self._batch.hi - self.next_offset)
        self._batch.hi = self.next_offset
        return self._close()

    def feed(
        self,
        offsets: Sequence[int],
        values: Sequence[R],
        leader_epoch: int = -1,
        envelopes: Sequence[Envelope | None] = (),
        times_ms: Sequence[int] = (),
    ) -> Iterator[RawBatch[R]]:
        """Take the next records of the log, and yield each batch that they complete, in order.

        Offsets below the next expected offset were seen before and are ignored. Skipped offsets become gaps; if they
        were passed to `mark_lost`, they count as lost instead. A batch without records is yielded empty, and many such
        batches are yielded as one range. Every batch number therefore appears exactly once. The computing time depends
        on the number of batches and gaps, not on the number of records.

        Args:
            offsets: ascending offsets, preferably a `range` if none is missing.
            leader_epoch: leader epoch of the last record; -1: unknown.
            envelopes, times_ms: one for each value in every call, or none in every call.
        """
        self._leader_epoch = leader_epoch
        at, end = bisect_left(offsets, self.next_offset), len(offsets)
        while at < end:
            yield from self._skip_to(offsets[at])
            until = min(end, at + self._batch.hi - self.next_offset)
            if offsets[until - 1] - offsets[at] != until - 1 - at:  # an offset is missing: take the records before it
                until = _first_missing(offsets, at, until)
            self._batch.values += values[at:until]
            self._batch.envelopes += envelopes[at:until]
            self._batch.times_ms += times_ms[at:until]
            self.next_offset = offsets[until - 1] + 1
            at = until
            if self.next_offset == self._batch.hi:
                yield self._close()

    def skip_to(self, offset: int) -> Iterator[RawBatch[R]]:
        """Skip to `offset`, because no record below it will follow. Yield each batch that this completes."""
        self._leader_epoch = -1  # a marker of a transaction may have a higher one than the last record
        yield from self._skip_to(offset)

    def _skip_to(self, offset: int) -> Iterator[RawBatch[R]]:
        while offset >= self._batch.hi:
            if self._batch.number % self._align == 0 and self.next_offset == self._batch.lo:
                empty = self._full_batches(offset - self._batch.lo) // self._align * self._align
                if empty >= MIN_RANGE:
                    self._batch.count = empty
                    self._batch.hi = self._batch.lo + empty * self._size
            self._gap_to(self._batch.hi)
            yield self._close()
        self._gap_to(offset)

    def _full_batches(self, num_offsets: int) -> int:
        """Return how many full batches, beginning with the open batch, fit into `num_offsets` before the next cut
        batch."""
        count, first = num_offsets // self._size, self._batch.number
        next_cut = self._cuts.next_cut(first)
        return count if next_cut is None else min(count, next_cut - first)

    def _gap_to(self, offset: int) -> None:
        while self.next_offset < offset:
            while self._lost and self._lost[0][1] <= self.next_offset:
                self._lost.popleft()
            lo, hi = self._lost[0] if self._lost else (offset, offset)
            if self.next_offset < lo:
                until, kind = min(lo, offset), self._batch.gaps
            else:
                until, kind = min(hi, offset), self._batch.lost
            kind.append((self.next_offset, until))
            self.next_offset = until

    def _close(self) -> RawBatch[R]:
        batch = self._batch
        self._batch = self._open(batch.number + batch.count, batch.hi)
        batch.leader_epoch = self._leader_epoch
        return batch


def _first_missing(offsets: Sequence[int], at: int, until: int) -> int:
    """Return the first index after `at` whose offset does not directly follow the offset before it."""
    lo, hi = at + 1, until - 1  # the offset at `hi` is too high for its index
    while lo < hi:
        middle = (lo + hi) // 2
        if offsets[middle] - offsets[at] == middle - at:
            lo = middle + 1
        else:
            hi = middle
    return lo


def stream_buffer_records(config: JobConfig) -> int:
    """Return how many records may wait between Kafka and the batches."""
    return config.worker.stream_buffer_records or max(64, 4096 // config.data.samples_per_record)


def buffer_capacity(config: JobConfig) -> int:
    """Return how many batches may wait to be decoded before reading pauses."""
    return max(2, stream_buffer_records(config) // config.data.records_per_batch)


class BatchBuffer:
    """A buffer that cuts the records of several partitions into batches and keeps the batches, first in, first out.

    Back-pressure limits the number of its batches and bytes: when the buffer is full, reading pauses until it is half
    empty.
    """

    def __init__(self, capacity: int, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self._capacity = capacity  # number of batches at which reading pauses
        self._max_bytes = max_bytes  # bytes of complete batches at which reading pauses, too
        self._raw_batches: deque[tuple[RawBatch[Value], int]] = deque()  # with their size in bytes
        self._waiting_bytes = 0
        # Fed records that are not cut yet, with their partition.
        self._cuts: deque[tuple[int, Iterator[RawBatch[Value]]]] = deque()

    def __len__(self) -> int:
        """Return the number of batches in the buffer."""
        return len(self._raw_batches)

    @property
    def is_half_empty(self) -> bool:
        """Whether reading should continue."""
        return (
            not self._cuts
            and len(self._raw_batches) <= self._capacity // 2
            and self._waiting_bytes <= self._max_bytes // 2
        )

    def cut(self, partition: int, batches: Iterator[RawBatch[Value]]) -> bool:
        """Take the next batches of a partition, from its batcher, and return whether the buffer is full.

        Records are cut only while there is room, because records with distant offsets make many empty batches.
        """
        return self._cut((partition, batches))

    def close(self, batcher: PartitionBatcher[Value], *, also_gaps: bool = False) -> bool:
        """Cut the open batch of a partition, like `PartitionBatcher.cut`. Return whether there was a batch to cut."""
        if self._cuts:
            return False  # there is no room for the records before it
        raw = batcher.cut(also_gaps=also_gaps)
        if raw is not None:
            self._put(raw)
        return raw is not None

    def remove(self, partition: int) -> None:
        self._cuts = deque(item for item in self._cuts if item[0] != partition)
        kept = [item for item in self._raw_batches if item[0].partition != partition]
        self._raw_batches = deque(kept)
        self._waiting_bytes = sum(num_bytes for _, num_bytes in kept)
        self._cut()

    def _cut(self, *more: tuple[int, Iterator[RawBatch[Value]]]) -> bool:
        self._cuts += more
        while self._cuts and len(self._raw_batches) < self._capacity + _MORE_BATCHES:
            raw = next(self._cuts[0][1], None)
            if raw is None:
                self._cuts.popleft()
            else:
                self._put(raw)
        return len(self._raw_batches) >= self._capacity or self._waiting_bytes >= self._max_bytes

    def take(self) -> RawBatch[Value]:
        """Return the next batch. Raise IndexError if the buffer is empty."""
        raw, num_bytes = self._raw_batches.popleft()
        self._waiting_bytes -= num_bytes
        self._cut()
        return raw

    def _put(self, raw: RawBatch[Value]) -> None:
        held = list(filter(None, raw.values))
        num_bytes = sum(map(len, held))
        if len(held) < len(raw.values):
            num_bytes += sum(len(value.head) for value in raw.values if isinstance(value, UnreadValue))
        num_bytes += sum(envelope_bytes(envelope) for envelope in raw.envelopes if envelope is not None)
        self._raw_batches.append((raw, num_bytes))
        self._waiting_bytes += num_bytes
