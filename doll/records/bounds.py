"""The offsets that each batch of a partition covers. Pure.

A batch covers r offsets (`data.records_per_batch`), unless it is cut. A cut batch ends earlier, so that its records are
learned now. The next batch begins where the cut batch ends (docs/decisions/0074). So batch j begins at offset

    origin + j * r - (number of records left out by the cuts of the batches before j)

The server, the workers and the ledger compute offsets only with this module. A control record contains a cut as the
pair (batch, number of records left out).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeAlias

import msgspec

Cut: TypeAlias = tuple[int, int]  # (batch, number of records left out: r minus the records it covers, at least 1)


class Cuts:
    """The cut batches of one partition, from some batch on. Most jobs have no cuts, and then all calls are fast.

    Attributes:
        decided: number of a batch. The bounds of all earlier batches are final, so their reader must not cut them.
    """

    def __init__(self, left_out: int = 0, cuts: Iterable[Cut] = (), *, decided: int = 0) -> None:
        """Take `cuts` in ascending order of batches; `left_out` is the number of records that all earlier cuts have
        left out. Raise ValueError if the batches do not ascend, or if a number is negative."""
        if left_out < 0:
            raise ValueError(f"expected 0 records left out or more, got {left_out}")
        self.decided = decided
        self._before = left_out
        self._batches: list[int] = []
        self._sums: list[int] = []  # for each cut: total of the records left out up to this cut, `_before` included
        for batch, records in cuts:
            self.add(batch, records)

    def add(self, batch: int, records: int) -> None:
        """Add a cut: `batch` has `records` records less than a full batch. Raise ValueError if the batch is not after
        all known cuts, or if `records` is less than 1."""
        if records < 1 or batch < 0 or (self._batches and batch <= self._batches[-1]):
            raise ValueError(f"expected a later batch, and 1 record left out or more, got {batch} and {records}")
        self._batches.append(batch)
        self._sums.append(self.total + records)

    @property
    def total(self) -> int:
        """The number of records that all known cuts have left out."""
        return self._sums[-1] if self._sums else self._before

    def before(self, batch: int) -> int:
        """Return the number of records that the cuts of batches below `batch` have left out."""
        if not self._batches:
            return self._before
        at = bisect_left(self._batches, batch)
        return self._sums[at - 1] if at else self._before

    def left_out_by(self, batch: int) -> int:
        """Return the number of records that the cut of this batch leaves out; 0 if the batch is not cut."""
        return self.before(batch + 1) - self.before(batch) if self._batches else 0

    def at(self, batch: int) -> tuple[int, int]:
        """Return two numbers of records: those left out by the cuts of batches below this one, and by the cut of this
        batch. If two processes have the same values, the batch has the same offsets in both."""
        return self.before(batch), self.left_out_by(batch)

    def within(self, first: int, until: int) -> tuple[Cut, ...]:
        """Return the cuts of batches [first, until)."""
        if not self._batches:
            return ()
        begin, end = bisect_left(self._batches, first), bisect_left(self._batches, until)
        return tuple((batch, self.left_out_by(batch)) for batch in self._batches[begin:end])

    def next_cut(self, batch: int) -> int | None:
        """Return the first cut batch from `batch` on; None if there is no such batch."""
        at = bisect_left(self._batches, batch)
        return self._batches[at] if at < len(self._batches) else None

    def forget_from(self, batch: int) -> None:
        """Remove the cuts of `batch` and of later batches."""
        at = bisect_left(self._batches, batch)
        del self._batches[at:], self._sums[at:]

    def forget_below(self, batch: int) -> None:
        """Remove the cuts of the batches below `batch`, whose bounds are not needed any more; keep their sum."""
        if self._batches and (at := bisect_left(self._batches, batch)):
            self._before = self._sums[at - 1]
            del self._batches[:at], self._sums[:at]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets of each batch of one partition, from the first batch that `cuts` knows."""

    origin: int  # offset at which the job began
    size: int  # records per batch, at least 1
    cuts: Cuts = field(default_factory=Cuts)

    def lo(self, batch: int) -> int:
        """Return the first offset of a batch. The batch may be the next one, which does not exist yet."""
        return self.origin + batch * self.size - self.cuts.before(batch)

    def hi(self, batch: int) -> int:
        """Return the offset after the last offset of a batch."""
        return self.lo(batch + 1)

    def span(self, batch: int) -> tuple[int, int]:
        """Return the range of offsets [lo, hi) of a batch."""
        return self.lo(batch), self.lo(batch + 1)

    def cut(self, batch: int, end: int) -> None:
        """Cut a batch, so that it ends before offset `end`. Raise ValueError if `end` is not inside the batch, or if a
        cut of a later batch is known."""
        lo, hi = self.span(batch)
        if not lo < end < hi:
            raise ValueError(f"batch {batch} covers offsets {lo} to {hi - 1}: expected to cut within, got {end}")
        self.cuts.add(batch, hi - end)


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier numbering of a model's batches, and the number of batches that were learned with it. The numbering
    ended with `doll regrid` or `doll rollback` (docs/decisions/0085, 0090).

    The batches of the next grid begin at `next_origins`, and are numbered from 0 again. Partitions that are missing in
    the grid were added later, and begin at offset 0.

    Attributes:
        version: the last version that contains batches of this grid.
        origins, applied, left_out: values of each partition, as in a checkpoint of that version.
        skipped: for each partition, the number of records after `ends` that are left out of the model. (): no records.
    """

    version: int
    records_per_batch: int
    origins: tuple[int, ...]
    applied: tuple[int, ...]
    left_out: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """The offset after the last learned record of each partition."""
        return ends_of(self.origins, self.records_per_batch, self.applied, self.left_out)

    @property
    def next_origins(self) -> tuple[int, ...]:
        """The offset at which the next grid begins, for each partition."""
        return tuple(end + records for end, records in zip_longest(self.ends, self.skipped, fillvalue=0))

    @property
    def num_records(self) -> int:
        """The number of records in the batches of this grid, including the skipped records."""
        return sum(self.next_origins) - sum(self.origins)


def ends_of(origins: Sequence[int], size: int, applied: Sequence[int], left_out: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the offset at which batch `applied[n]` of each partition n begins, with `size` records per batch.
    `left_out`: the number of records that cuts of the earlier batches of each partition have left out; (): no cuts."""
    counts = zip_longest(origins, applied, left_out, fillvalue=0)
    return tuple(Bounds(origin, size, Cuts(cut)).lo(count) for origin, count, cut in counts)
