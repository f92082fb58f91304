"""Batches of a partition without records. They are skipped after all batches before them are durable. Pure.

A grant and an empty push for each of these batches would take milliseconds, so a gap of many millions of offsets would
take hours (ADR 47). `WorkerCore` has at most one range of such batches for each partition, after the partition's other
batches.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from doll.records.control import Skip

# Time without a change after which the range gives a batch: if other batches wait for a grant, which takes
# milliseconds; if no batch is held (a round of exact versions may lack one); and if all are granted (a stuck grant).
_NEXT_AFTER_S: Final = 0.2
_FIRST_AFTER_S: Final = 1.0
_STUCK_AFTER_S: Final = 10.0


class SkippedRange(NamedTuple):
    """The batches [first, until), which have no record. `gaps` and `lost` are offset ranges, as for a batch."""

    first: int
    until: int
    gaps: tuple[tuple[int, int], ...]
    lost: tuple[tuple[int, int], ...]


class SkippedBatches:
    """The range of batches without a record that a worker has read from a partition, and that are not durable yet. At
    first there is no range."""

    def __init__(self) -> None:
        self._range: SkippedRange | None = None
        self._changed_at_s = float("-inf")
        self._reported = -1

    def __bool__(self) -> bool:
        return self._range is not None

    def put(self, skipped: SkippedRange, next_batch: int) -> None:
        """Set the range. Raise ValueError if it does not begin at `next_batch`."""
        if skipped.first != next_batch:
            raise ValueError(f"expected batch {next_batch}, got {skipped.first}")
        self._range = skipped
        self._reported = -1

    def take(self, now: float, reported: int, hi: int, *, waiting: int, granted: int) -> SkippedRange | None:
        """Remove and return the first batch of the range if the job seems to wait for this worker's batches; otherwise
        None.

        The worker treats the returned batch like any other batch. This prevents a deadlock: a group with a missing
        batch would wait for the range, and the range would wait for the group.

        Args:
            reported: number of batches that the server reports as durable.
            hi: offset at which the first batch of the range ends.
            waiting: number of batches before the range that are not granted.
            granted: number of batches that are granted and not durable.
        """
        if reported != self._reported:
            self._reported, self._changed_at_s = reported, now
        after_s = _NEXT_AFTER_S if waiting else _STUCK_AFTER_S if granted else _FIRST_AFTER_S
        if self._range is None or now - self._changed_at_s < after_s:
            return None
        self._changed_at_s = now
        first, until, gaps, lost = self._range
        front = SkippedRange(first, first + 1, _below(gaps, hi), _below(lost, hi))
        self._range = SkippedRange(first + 1, until, _from(gaps, hi), _from(lost, hi)) if first + 1 < until else None
        return front

    def end(self, next_batch: int) -> int:
        """Return the batch after the range; `next_batch` without a range."""
        return next_batch if self._range is None else self._range.until

    def passed(self, durable: int, reported: int) -> int:
        """Return the number of durable batches: `durable` before the range, plus the range if it is reported as
        durable."""
        if self._range is None or reported < self._range.until:
            return durable
        until, self._range = self._range.until, None
        return until

    def record(self, worker: int, session: int, partition: int) -> Skip:
        """Return the record that reports the range to the server. There must be a range."""
        assert self._range is not None
        return Skip(worker=worker, session=session, partition=partition, **self._range._asdict())


def _below(spans: tuple[tuple[int, int], ...], offset: int) -> tuple[tuple[int, int], ...]:
    return tuple((lo, min(hi, offset)) for lo, hi in spans if lo < offset)


def _from(spans: tuple[tuple[int, int], ...], offset: int) -> tuple[tuple[int, int], ...]:
    return tuple((max(lo, offset), hi) for lo, hi in spans if hi > offset)
