"""The offsets that each batch of a partition covers. Pure.

A batch covers r offsets, `data.records_per_batch`, if it is not cut. A cut lets a batch end earlier, so that what it
holds is learned now, and the next one begins where it ends (docs/decisions/0074). So batch j begins at

    origin + j r - (the records that the cuts of batches before j have left out)

Server, workers and ledger compute offsets here and nowhere else. On the wire a cut is (batch, records left out).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeAlias

import msgspec

Cut: TypeAlias = tuple[int, int]  # a batch, and how many records fewer than r it covers: at least 1


class Cuts:
    """The batches of one partition that are cut, from some batch on. Most jobs have none, and then all calls are short.

    Attributes:
        decided: the bounds of batches below it are decided elsewhere: whoever reads them cuts none of them.
    """

    def __init__(self, left_out: int = 0, cuts: Iterable[Cut] = (), *, decided: int = 0) -> None:
        """`cuts` come by rising batch, and cuts before all of them have left out `left_out` records. Raises ValueError
        if they do not rise, or a number is negative."""
        if left_out < 0:
            raise ValueError(f"expected 0 records left out or more, got {left_out}")
        self.decided = decided
        self._before = left_out
        self._batches: list[int] = []
        self._sums: list[int] = []  # records left out by each of these and the ones before it, `_before` included
        for batch, records in cuts:
            self.add(batch, records)

    def add(self, batch: int, records: int) -> None:
        """Batch `batch` is shorter by so many records; raises ValueError if it is not after all known cuts, or leaves
        out nothing."""
        if records < 1 or batch < 0 or (self._batches and batch <= self._batches[-1]):
            raise ValueError(f"expected a later batch, and 1 record left out or more, got {batch} and {records}")
        self._batches.append(batch)
        self._sums.append(self.total + records)

    @property
    def total(self) -> int:
        """Records that all known cuts have left out."""
        return self._sums[-1] if self._sums else self._before

    def before(self, batch: int) -> int:
        """Records that the cuts of batches below `batch` have left out."""
        if not self._batches:
            return self._before
        at = bisect_left(self._batches, batch)
        return self._sums[at - 1] if at else self._before

    def left_out_by(self, batch: int) -> int:
        """Records that the cut of this batch leaves out; 0: it is not cut."""
        return self.before(batch + 1) - self.before(batch) if self._batches else 0

    def at(self, batch: int) -> tuple[int, int]:
        """The records that cuts of batches below this one leave out, and its own: equal if two read the same batch."""
        before = self.before(batch)
        return before, self.before(batch + 1) - before

    def within(self, first: int, until: int) -> tuple[Cut, ...]:
        """The cuts of batches [first, until)."""
        if not self._batches:
            return ()
        begin, end = bisect_left(self._batches, first), bisect_left(self._batches, until)
        return tuple((batch, self.left_out_by(batch)) for batch in self._batches[begin:end])

    def next_cut(self, batch: int) -> int | None:
        """The first cut batch from `batch` on."""
        at = bisect_left(self._batches, batch)
        return self._batches[at] if at < len(self._batches) else None

    def forget_from(self, batch: int) -> None:
        """Cuts of `batch` and later ones do not count any more."""
        at = bisect_left(self._batches, batch)
        del self._batches[at:], self._sums[at:]

    def forget_below(self, batch: int) -> None:
        """Nobody asks for batches below `batch` any more."""
        if self._batches and (at := bisect_left(self._batches, batch)):
            self._before = self._sums[at - 1]
            del self._batches[:at], self._sums[:at]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets of each batch of one partition, from the first on that `cuts` knows of."""

    origin: int  # offset at which the job began
    size: int  # records per batch, at least 1
    cuts: Cuts = field(default_factory=Cuts)

    def lo(self, batch: int) -> int:
        """The first offset of a batch; of the one after the last, where the next is to begin."""
        return self.origin + batch * self.size - self.cuts.before(batch)

    def hi(self, batch: int) -> int:
        """The offset after the last one of a batch."""
        return self.lo(batch + 1)

    def span(self, batch: int) -> tuple[int, int]:
        """[lo, hi) of a batch."""
        return self.lo(batch), self.lo(batch + 1)

    def cut(self, batch: int, end: int) -> None:
        """Let a batch end at offset `end`; raises ValueError if this is not within the batch, or a cut of a later batch
        is known."""
        lo, hi = self.span(batch)
        if not lo < end < hi:
            raise ValueError(f"batch {batch} covers offsets {lo} to {hi - 1}: expected to cut within, got {end}")
        self.cuts.add(batch, hi - end)


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's batches were numbered before `doll regrid` or `doll rollback`, and how far they were learned
    (docs/decisions/0085, 0090).

    The batches of the next grid begin at `next_origins`, and are numbered from 0 again. Partitions that the grid does
    not have were added later, and begin at offset 0.

    Attributes:
        version: the last one that was made of its batches.
        origins, applied, left_out: of each partition, as in a checkpoint of that version.
        skipped: of each partition, how many records after `ends` are left out of the model; (): none.
    """

    version: int
    records_per_batch: int
    origins: tuple[int, ...]
    applied: tuple[int, ...]
    left_out: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """Per partition, the offset after the last learned record."""
        return ends_of(self.origins, self.records_per_batch, self.applied, self.left_out)

    @property
    def next_origins(self) -> tuple[int, ...]:
        """Per partition, the offset at which the next grid begins."""
        return tuple(end + records for end, records in zip_longest(self.ends, self.skipped, fillvalue=0))

    @property
    def num_records(self) -> int:
        """How many records its batches hold, with those that are skipped."""
        return sum(self.next_origins) - sum(self.origins)


def ends_of(origins: Sequence[int], size: int, applied: Sequence[int], left_out: Sequence[int] = ()) -> tuple[int, ...]:
    """Per partition, the offset at which batch `applied[n]` begins, with `size` records per batch; cuts of the batches
    before it have left out `left_out` records; (): none."""
    counts = zip_longest(origins, applied, left_out, fillvalue=0)
    return tuple(Bounds(origin, size, Cuts(cut)).lo(count) for origin, count, cut in counts)
