"""The ledger: proof that every sample is in the durable model exactly once, is still to come, or is dead-lettered.

At every moment each offset of each partition is in exactly one of: not yet applied, applied in exactly one update that
the durable model contains, or dead-lettered. The ledger checks it from four things that different processes wrote: the
update records, the dead letters, the checkpoint's counts of applied batches, and the partitions' ends.

An update is void, so that its batches count as not applied, where a later parameter server began again from a version
below it, or where its own server had been fenced before it was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from doll import intervals
from doll.intervals import Span
from doll.ledger_report import LedgerReport, PartitionLine, Range, named
from doll.records import DeadLetter, Epoch, Finished, Member, Update

__all__ = ["DurableModel", "LedgerReport", "PartitionLine", "Range", "balance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableModel:
    """What the newest checkpoint says: `applied[n]` batches of partition n are in it, always the first ones."""

    ps_epoch: int
    version: int
    applied: tuple[int, ...]
    origins: tuple[int, ...]
    records_per_batch: int


def balance(
    *,
    durable: DurableModel,
    ends: Sequence[int],
    records: Iterable[Epoch | Update | Finished],
    dead_letters: Iterable[DeadLetter],
    held: Sequence[Range] = (),
) -> LedgerReport:
    """Balance the books of a job.

    Args:
        durable: from the newest checkpoint.
        ends: high watermark of each partition of the samples topic: one above its last offset.
        records: the updates topic, in log order, read after the checkpoint.
        dead_letters: the dead topic, in any order; the same letter may come twice, after a crash.
        held: ranges that do hold records although an update says that they hold none.

    Raises:
        ValueError: the arguments do not have one entry per partition.
    """
    num = len(durable.origins)
    if len(durable.applied) != num or len(ends) != num:
        raise ValueError(
            f"expected {num} partitions, got {len(durable.applied)} counts of applied batches and {len(ends)} ends"
        )
    problems: list[str] = []
    chain, redone = _valid_chain(records, durable, problems)
    counted = [update for update in chain if update.version <= durable.version]
    _check_versions(counted, durable, problems)
    books = [_Book(n, durable) for n in range(num)]
    for update in counted:
        _enter(update, books, problems)
    partly_dead: dict[tuple[int, int], int] = {}
    for letter in dead_letters:
        if not 0 <= letter.partition < num:
            problems.append(f"a dead letter names partition {letter.partition}, expected 0 to {num - 1}")
        elif letter.whole:
            books[letter.partition].letters.append(letter.offset)
        else:
            partly_dead[letter.partition, letter.offset] = letter.samples
    found = [[(item.lo, item.hi) for item in held if item.partition == n] for n in range(num)]
    closed = [book.close(ends[n], found[n], problems) for n, book in enumerate(books)]
    lines = [item.line for item in closed]
    return LedgerReport(
        version=durable.version,
        ps_epoch=durable.ps_epoch,
        updates=len(counted),
        unsaved=len(chain) - len(counted),
        redone=redone,
        produced=sum(line.produced for line in lines),
        applied=sum(line.applied for line in lines),
        pending=sum(line.pending for line in lines),
        dead=sum(line.dead for line in lines),
        gaps=sum(line.gaps for line in lines),
        missing=tuple(item for each in closed for item in each.missing),
        twice=tuple(item for each in closed for item in each.twice),
        gap_ranges=tuple(item for each in closed for item in each.gaps),
        partly_dead_samples=sum(partly_dead.values()),
        partitions=tuple(lines),
        problems=tuple(problems),
    )


def _valid_chain(
    records: Iterable[Epoch | Update | Finished], durable: DurableModel, problems: list[str]
) -> tuple[list[Update], int]:
    """The updates that no later server took back, by rising version; and how many are void."""
    chain: list[Update] = []
    redone = 0
    newest = 0
    finished: Finished | None = None
    for record in records:
        if record.ps_epoch < newest:  # written by a fenced server
            redone += isinstance(record, Update)
            continue
        match record:
            case Epoch():
                if record.ps_epoch == newest:
                    problems.append(f"parameter server epoch {newest} begins twice: two servers had the same epoch")
                _check_epoch(record, durable, problems)
                newest, finished = record.ps_epoch, None
                while chain and chain[-1].version > record.resumed_version:
                    chain.pop()
                    redone += 1
            case Update():
                if record.ps_epoch > newest:
                    problems.append(f"no record says from which version epoch {record.ps_epoch} began")
                    newest = record.ps_epoch
                if chain and record.version <= chain[-1].version:
                    problems.append(
                        f"epoch {newest} records version {record.version} after version {chain[-1].version}"
                    )
                else:
                    chain.append(record)
            case Finished():
                finished = record
    if finished is not None and finished.version > durable.version:
        problems.append(
            f"the job ended at version {finished.version}, but the newest checkpoint is of version {durable.version}"
        )
    return chain, redone


def _check_epoch(record: Epoch, durable: DurableModel, problems: list[str]) -> None:
    if record.ps_epoch > durable.ps_epoch and record.resumed_version < durable.version:
        problems.append(
            f"epoch {record.ps_epoch} began again from version {record.resumed_version}, but the newest checkpoint is "
            f"of version {durable.version}, epoch {durable.ps_epoch}"
        )
    said = (record.origins, record.records_per_batch)
    if said != (durable.origins, durable.records_per_batch):
        problems.append(
            f"epoch {record.ps_epoch} began with origins {list(said[0])} and {said[1]} records per batch, the "
            f"checkpoint has {list(durable.origins)} and {durable.records_per_batch}"
        )


def _check_versions(counted: Sequence[Update], durable: DurableModel, problems: list[str]) -> None:
    unrecorded = intervals.subtract([(1, durable.version + 1)], intervals.points(update.version for update in counted))
    for lo, hi in unrecorded if durable.version else ():
        problems.append(
            f"versions {lo} to {hi - 1} are in the durable model (version {durable.version}) without an update record"
        )
    above = [update for update in counted if update.ps_epoch > durable.ps_epoch]
    if above:
        problems.append(
            f"version {above[0].version} was recorded by epoch {above[0].ps_epoch}, but the newest checkpoint, version "
            f"{durable.version}, is of epoch {durable.ps_epoch}"
        )


def _enter(update: Update, books: Sequence[_Book], problems: list[str]) -> None:
    """Enter one update of the durable model into the books of its partitions."""
    name = f"update {update.version}"
    if update.n_samples != sum(member.n_samples for member in update.members):
        problems.append(f"{name}: its batches do not have the {update.n_samples} samples that it says")
    for member in update.members:
        if not 0 <= member.worker < len(books):
            problems.append(f"{name}: expected a worker from 0 to {len(books) - 1}, got {member.worker}")
            continue
        if member.base_version >= update.version:
            problems.append(
                f"{name}: batch {member.token} of worker {member.worker} used version {member.base_version}"
            )
        books[member.worker].enter(member, name, problems)


class _Closed(NamedTuple):
    line: PartitionLine
    missing: list[Range]
    twice: list[Range]
    gaps: list[Range]


class _Book:
    """The account of one partition: what the durable model's updates and the dead letters say."""

    def __init__(self, partition: int, durable: DurableModel) -> None:
        self.partition = partition
        self.origin = durable.origins[partition]
        self.until = self.origin + durable.applied[partition] * durable.records_per_batch
        self.letters: list[int] = []
        self._records_per_batch = durable.records_per_batch
        self._spans: list[Span] = []
        self._dead: list[int] = []
        self._gaps: list[Span] = []

    def enter(self, member: Member, name: str, problems: list[str]) -> None:
        """Count one applied batch."""
        lo = self.origin + member.token * self._records_per_batch
        hi = lo + self._records_per_batch
        if (member.lo, member.hi) != (lo, hi) or member.token < 0:
            problems.append(
                f"{name}: batch {member.token} of partition {self.partition} is offsets {lo}-{hi - 1}, got "
                f"{member.lo}-{member.hi - 1}"
            )
        inside = [*((offset, offset + 1) for offset in member.dead), *member.gaps]
        if any(not member.lo <= a < b <= member.hi for a, b in inside):
            problems.append(f"{name}: batch {member.token} of partition {self.partition} names offsets outside itself")
        # Batches come in order, so a sound history of any length is one span.
        if self._spans and self._spans[-1][1] == member.lo:
            self._spans[-1] = (self._spans[-1][0], member.hi)
        else:
            self._spans.append((member.lo, member.hi))
        self._dead.extend(member.dead)
        self._gaps.extend(member.gaps)

    def close(self, end: int, held: Iterable[Span], problems: list[str]) -> _Closed:
        """Sort every offset below the durable model's reach into exactly one of missing, twice, gap, dead, applied."""
        end = max(end, self.origin)
        if self.until > end:
            problems.append(
                f"partition {self.partition}: the durable model reaches offset {self.until - 1}, but the log ends at "
                f"{end}: was the topic deleted and created again?"
            )
        prefix = _span(self.origin, self.until)
        covered, doubled = intervals.union(self._spans), intervals.overlaps(self._spans)
        dead, letters = intervals.points(self._dead), intervals.points(self.letters)
        gaps, held = intervals.union(self._gaps), intervals.union(held)
        unlettered, filled = intervals.subtract(dead, letters), intervals.intersect(gaps, held)
        applied_letters = intervals.subtract(intervals.intersect(letters, intervals.intersect(prefix, covered)), dead)
        strays = intervals.subtract(letters, _span(self.origin, max(end, self.until)))
        for spans, what in (
            (intervals.subtract(covered, prefix), "applied by updates, but not counted in the checkpoint"),
            (unlettered, "dead by their update, but there is no dead letter"),
            (applied_letters, "dead-lettered, but applied by their update"),
            (strays, "dead-lettered, but outside the job's part of the log"),
            (intervals.intersect(gaps, dead), "dead and without a record at once"),
            (filled, "without a record by their update, but the log holds records"),
        ):
            if spans:
                problems.append(f"{what}: {named(self._ranges(spans))}")
        rest = prefix
        sorted_out = []
        lost = intervals.union([*intervals.subtract(prefix, covered), *unlettered, *filled])
        for kind in (lost, doubled, gaps, dead):
            sorted_out.append(intervals.intersect(rest, kind))
            rest = intervals.subtract(rest, kind)
        missing, twice, empty, dead = sorted_out
        line = PartitionLine(
            partition=self.partition,
            origin=self.origin,
            applied_until=self.until,
            end=end,
            produced=max(end, self.until) - self.origin,
            applied=intervals.size(rest),
            pending=max(end - self.until, 0),
            dead=intervals.size(dead),
            gaps=intervals.size(empty),
            missing=intervals.size(missing),
            twice=intervals.size(twice),
        )
        return _Closed(line, self._ranges(missing), self._ranges(twice), self._ranges(empty))

    def _ranges(self, spans: Iterable[Span]) -> list[Range]:
        return [Range(self.partition, lo, hi) for lo, hi in spans]


def _span(lo: int, hi: int) -> list[Span]:
    return [(lo, hi)] if lo < hi else []
