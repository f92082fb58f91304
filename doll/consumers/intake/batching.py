"""Algorithm 1: cut one partition into batches of offsets, and keep these until they are decoded. Pure.

A batch covers `records_per_batch` offsets, or ends earlier if it is cut (`doll.records.bounds`). Its bounds do not
depend on when or how often records are read, once they are decided: a crash and a second reading give the same batch
again. (The paper counts samples in memory: docs/theory.md, D1.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeAlias, TypeVar

from doll.config import JobConfig
from doll.records.bounds import Bounds, Cuts
from doll.records.refusals import UnreadValue
from doll.task.records import Envelope, envelope_bytes

R = TypeVar("R")

# Empty batches from which on they come out as one: it waits for a checkpoint, which is worth it for many.
MIN_RANGE: Final = 256
Value: TypeAlias = bytes | None

MAX_WAITING_BYTES: Final = 64 << 20
_MORE_BATCHES: Final = 1024  # beyond a full buffer: more than a chunk has without long holes


@dataclass(slots=True)
class RawBatch(Generic[R]):
    """The records of one batch, in offset order, not decoded yet; or `count` batches, which hold none.

    `gaps` are offset ranges [lo, hi) inside the batch in which the log holds no record (transaction markers, records
    of aborted transactions, compaction). `lost` are those whose records were deleted before they were read. `values`
    has one value for each other offset of [lo, hi), and `envelopes` one for each value, or is empty.

    `leader_epoch`: nothing below `hi` in the log had a higher one when it was read; -1: not known.
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

    @property
    def offsets(self) -> Sequence[int]:
        """The offset of each of `values`, once the batch is complete."""
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
    """Collects records of one partition into batches."""

    def __init__(
        self, *, origin: int, records_per_batch: int, next_batch: int, align: int = 1, partition: int = 0,
        cuts: Cuts | None = None,
    ) -> None:  # fmt: skip
        """Start at the first offset of batch `next_batch`.

        Args:
            partition: what its batches name.
            align: `count` batches come out at once only from a multiple of it to another: whole waves.
            cuts: those that are known, and where further ones are noted; None: there are none yet.
        """
        if records_per_batch < 1:
            raise ValueError(f"expected records_per_batch >= 1, got {records_per_batch}")
        self._partition = partition
        self._size = records_per_batch
        self._cuts = Cuts() if cuts is None else cuts
        self._align = align
        self._batch = self._open(next_batch, Bounds(origin, records_per_batch, self._cuts).lo(next_batch))
        self.next_offset = self._batch.lo
        self._lost: deque[tuple[int, int]] = deque()  # ahead of `next_offset`, rising
        self._leader_epoch = -1  # of the newest record, which is after every batch that it completes

    def mark_lost(self, lo: int, hi: int) -> None:
        """Records [lo, hi) were deleted before they were read; the next record that comes is after them.

        What came before `lo` may still be fed.
        """
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
        """The batch that has got records, is not complete and may be cut; None: there is none."""
        batch = self._batch
        return batch.number if batch.values and batch.number >= self._cuts.decided else None

    def must_flush(self, until: int) -> bool:
        """Whether all below offset `until` is read, and a part of it is in an open batch that may be cut."""
        batch = self._batch
        return batch.lo < until <= self.next_offset and batch.number >= self._cuts.decided

    def cut(self, *, also_gaps: bool = False) -> RawBatch[R] | None:
        """Close the open batch in front of `next_offset`; None: there is none that may be cut. `also_gaps`: a batch
        that has no record, but offsets without one, is cut too."""
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
    ) -> Iterator[RawBatch[R]]:
        """Take the next records of the log; yield every batch that they complete, in order.

        Offsets below the next expected one were seen before and are ignored. Skipped offsets become gaps, or lost if
        `mark_lost` named them; batches that lie wholly in these come out empty, many of them as one, so that every
        batch number appears exactly once. The time it takes grows with the number of batches and gaps, not of records.

        Args:
            offsets: rising; best a `range` if none is missing.
            values: one for each offset.
            leader_epoch: the last one's; -1: not known.
            envelopes: one for each value, of each call; or none, of no call.
        """
        self._leader_epoch = leader_epoch
        at, end = bisect_left(offsets, self.next_offset), len(offsets)
        while at < end:
            yield from self._skip_to(offsets[at])
            until = min(end, at + self._batch.hi - self.next_offset)
            if offsets[until - 1] - offsets[at] != until - 1 - at:  # one is missing: up to the first that is
                until = _first_missing(offsets, at, until)
            self._batch.values += values[at:until]
            self._batch.envelopes += envelopes[at:until]
            self.next_offset = offsets[until - 1] + 1
            at = until
            if self.next_offset == self._batch.hi:
                yield self._close()

    def skip_to(self, offset: int) -> Iterator[RawBatch[R]]:
        """Skip to `offset`: no record below it will come. Yields every batch that this completes."""
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
        """How many batches that are not cut, from the open one on, so many offsets make."""
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
    """The first index after `at` whose offset does not follow the one before it."""
    lo, hi = at + 1, until - 1  # the offset at `hi` is too high for its index
    while lo < hi:
        middle = (lo + hi) // 2
        if offsets[middle] - offsets[at] == middle - at:
            lo = middle + 1
        else:
            hi = middle
    return lo


def stream_buffer_records(config: JobConfig) -> int:
    """Records that may wait between Kafka and the batches."""
    return config.worker.stream_buffer_records or max(64, 4096 // config.data.samples_per_record)


def buffer_capacity(config: JobConfig) -> int:
    """Batches that may wait to be decoded before reading pauses."""
    return max(2, stream_buffer_records(config) // config.data.records_per_batch)


class BatchBuffer:
    """Cuts the records of some partitions into batches and keeps these until they are asked for, first in, first out.

    It is bounded by back-pressure, in batches and in bytes: the reader pauses when it is full, until it is half empty.
    """

    def __init__(
        self, batchers: Mapping[int, PartitionBatcher[Value]], capacity: int, max_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        """`batchers`: by partition."""
        self._batchers = dict(batchers)
        self._capacity = capacity  # batches from which on reading pauses
        self._max_bytes = max_bytes  # bytes in whole batches from which on reading pauses, too
        self._raw_batches: deque[tuple[RawBatch[Value], int]] = deque()  # with the bytes of its values
        self._waiting_bytes = 0
        # What is fed and not cut yet, each with its partition.
        self._cuts: deque[tuple[int, Iterator[RawBatch[Value]]]] = deque()

    def __len__(self) -> int:
        """Batches that are read and not taken."""
        return len(self._raw_batches)

    @property
    def is_half_empty(self) -> bool:
        """Reading should go on."""
        return (
            not self._cuts
            and len(self._raw_batches) <= self._capacity // 2
            and self._waiting_bytes <= self._max_bytes // 2
        )

    def feed(
        self,
        partition: int,
        offsets: Sequence[int],
        values: Sequence[Value],
        leader_epoch: int = -1,
        envelopes: Sequence[Envelope | None] = (),
    ) -> bool:
        """Take the next records of a partition, as `PartitionBatcher.feed`; whether the buffer is full.

        They are cut as far as there is room: records far apart make many empty batches.
        """
        return self._cut((partition, self._batchers[partition].feed(offsets, values, leader_epoch, envelopes)))

    def skip_to(self, partition: int, offset: int) -> None:
        """Skip to `offset`: no record of the partition below it is to come."""
        self._cut((partition, self._batchers[partition].skip_to(offset)))

    def close(self, partition: int, *, also_gaps: bool = False) -> bool:
        """Cut the open batch of a partition, as `PartitionBatcher.cut`; whether there is one that may be."""
        if self._cuts:
            return False  # there is no room for what comes before it
        raw = self._batchers[partition].cut(also_gaps=also_gaps)
        if raw is not None:
            self._put(raw)
        return raw is not None

    def add(self, partition: int, batcher: PartitionBatcher[Value]) -> None:
        self._batchers[partition] = batcher

    def remove(self, partition: int) -> None:
        del self._batchers[partition]
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
        """The next batch; IndexError if the buffer is empty."""
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
