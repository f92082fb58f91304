"""Algorithm 1: cut one partition into batches with fixed bounds.

Batch j covers offsets [origin + j * records_per_batch, origin + (j + 1) * records_per_batch). The bounds do not
depend on when or how often records are read, so a crash and a second reading give the same batch again. (The paper
counts samples in memory: docs/theory.md, D1.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

R = TypeVar("R")

# Empty batches from which on they come out as one: it waits for a checkpoint, which is worth it for many.
MIN_RANGE: Final = 256


@dataclass(slots=True)
class RawBatch(Generic[R]):
    """The records of one batch, in offset order, not decoded yet; or `count` batches, which hold none.

    `gaps` are offset ranges [lo, hi) inside the batch in which the log holds no record (transaction markers, records
    of aborted transactions, compaction). `lost` are those whose records were deleted before they were read. `values`
    has one value for each other offset of [lo, hi).

    `leader_epoch`: nothing below `hi` in the log had a higher one when it was read; -1: not known.
    """

    number: int
    lo: int
    hi: int
    values: list[R] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    count: int = 1
    leader_epoch: int = -1

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


class Batcher(Generic[R]):
    """Collects records of one partition into batches."""

    def __init__(self, *, origin: int, records_per_batch: int, next_batch: int, align: int = 1) -> None:
        """Start at the first offset of batch `next_batch`.

        Args:
            align: `count` batches come out at once only from a multiple of it to another: whole waves.
        """
        if records_per_batch < 1:
            raise ValueError(f"expected records_per_batch >= 1, got {records_per_batch}")
        self._origin = origin
        self._size = records_per_batch
        self._align = align
        self._batch = self._open(next_batch)
        self.next_offset = self._batch.lo
        self._lost: deque[tuple[int, int]] = deque()  # ahead of `next_offset`, rising
        self._leader_epoch = -1  # of the newest record, which is behind every batch that it completes

    def mark_lost(self, lo: int, hi: int) -> None:
        """Records [lo, hi) were deleted before they were read; the next record that comes is behind them.

        What came before `lo` may still be fed.
        """
        lo = max(lo, self.next_offset, self._lost[-1][1] if self._lost else 0)
        if lo < hi:
            self._lost.append((lo, hi))

    def _open(self, number: int) -> RawBatch[R]:
        lo = self._origin + number * self._size
        return RawBatch(number, lo, lo + self._size)

    def feed(self, offsets: Sequence[int], values: Sequence[R], leader_epoch: int = -1) -> Iterator[RawBatch[R]]:
        """Take the next records of the log; yield every batch that they complete, in order.

        Offsets below the next expected one were seen before and are ignored. Skipped offsets become gaps, or lost where
        `mark_lost` named them; batches that lie wholly in these come out empty, many of them as one, so that every
        batch number appears exactly once. The time it takes grows with the number of batches and gaps, not of records.

        Args:
            offsets: rising; best a `range` where none is missing.
            values: one for each offset.
            leader_epoch: the last one's; -1: not known.
        """
        self._leader_epoch = leader_epoch
        at, end = bisect_left(offsets, self.next_offset), len(offsets)
        while at < end:
            yield from self._skip_to(offsets[at])
            until = min(end, at + self._batch.hi - self.next_offset)
            if offsets[until - 1] - offsets[at] != until - 1 - at:  # one is missing: up to the first that is
                until = _first_missing(offsets, at, until)
            self._batch.values += values[at:until]
            self.next_offset = offsets[until - 1] + 1
            at = until
            if self.next_offset == self._batch.hi:
                yield self._close()

    def skip_to(self, offset: int) -> Iterator[RawBatch[R]]:
        """No record below `offset` will come; yield every batch that this completes."""
        self._leader_epoch = -1  # a marker of a transaction may have a higher one than the last record
        yield from self._skip_to(offset)

    def _skip_to(self, offset: int) -> Iterator[RawBatch[R]]:
        while offset >= self._batch.hi:
            if self._batch.number % self._align == 0 and self.next_offset == self._batch.lo:
                empty = (offset - self._batch.lo) // self._size // self._align * self._align
                if empty >= MIN_RANGE:
                    self._batch.count = empty
                    self._batch.hi = self._batch.lo + empty * self._size
            self._gap_to(self._batch.hi)
            yield self._close()
        self._gap_to(offset)

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
        batch, self._batch = self._batch, self._open(self._batch.number + self._batch.count)
        batch.leader_epoch = self._leader_epoch
        return batch


def _first_missing(offsets: Sequence[int], at: int, until: int) -> int:
    """The first index behind `at` whose offset does not follow the one before it."""
    lo, hi = at + 1, until - 1  # the offset at `hi` is too high for its index
    while lo < hi:
        middle = (lo + hi) // 2
        if offsets[middle] - offsets[at] == middle - at:
            lo = middle + 1
        else:
            hi = middle
    return lo
