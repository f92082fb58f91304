"""The ledger: the proof that each sample is in the durable model exactly once, is not yet applied, or is dead-lettered.

Each offset of each partition must have exactly one state. It is not yet applied, applied in exactly one update of the
durable model, held out (`evaluation.holdout`), dead-lettered, lost, or, on request, skipped by a rollback or removed by
`doll forget`. The ledger checks this with four sources, written by different processes: the update records
(`doll.ledger.valid_updates` decides which of them count), the dead letters, the checkpoint's counts of applied batches,
and the partitions' ends.

An offset is dead only if the update that counts says so. If a worker dies before its batch is durable, the batch is
decoded and computed again, perhaps with a corrected task. A record that the earlier process refused may then be
applied. The dead letter of an applied offset is superseded.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Final, Literal, NamedTuple

from doll.ledger import offset_ranges
from doll.ledger.lineage import UpdatesRecord
from doll.ledger.offset_ranges import Span
from doll.ledger.valid_updates import DurableModel, ValidUpdates
from doll.records.bounds import Bounds, Cuts, Grid
from doll.records.control import DeadLetter, Member, Update
from doll.records.rollbacks import forgotten

_NAMED: Final = 8  # maximum number of ranges in a message; the report contains all
# Counts of a report that are sums over the partitions. Fields with ranges, each with the count that it belongs to.
_SUMS: Final = (
    "produced", "applied", "held_out", "forgotten", "pending", "dead", "gaps", "superseded", "lost", "skipped",
    "unread",
)  # fmt: skip
_RANGES: Final = {
    "missing": "missing", "twice": "twice", "gap_ranges": "gaps", "lost_ranges": "lost", "skipped_ranges": "skipped",
    "unread_ranges": "unread", "forgotten_ranges": "forgotten",
}  # fmt: skip
OffsetState = Literal["pending", "applied", "held out", "partly", "dead", "absent", "skipped", "forgotten"]


class Range(NamedTuple):
    """The offsets [lo, hi) of one partition."""

    partition: int
    lo: int
    hi: int

    def __str__(self) -> str:
        return (
            f"{self.partition}: {self.lo}" if self.hi == self.lo + 1 else f"{self.partition}: {self.lo}-{self.hi - 1}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCounts:
    """The account of one partition, in offsets. `produced` is the sum of all fields below it in this class, without
    `superseded`: `applied` already contains the offsets whose dead letters are superseded."""

    partition: int
    origin: int
    applied_until: int
    end: int
    produced: int
    applied: int
    pending: int
    dead: int
    gaps: int
    missing: int
    twice: int
    superseded: int = 0
    lost: int = 0
    skipped: int = 0
    unread: int = 0
    held_out: int = 0
    forgotten: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """The account of a job."""

    version: int  # version of the durable model, written by the parameter server of term `term`
    term: int
    updates: int  # update records that the durable model contains
    unsaved: int  # update records after the durable version
    voided: int  # void update records: their batches were lost with a server and applied again
    # Number of offsets from the first one that the job must read to the partition's end; the sum of the counts below.
    produced: int
    applied: int
    pending: int
    dead: int
    gaps: int  # offsets at which the log holds no record
    # Ranges below the end of the durable model that are in no update, or that are dead and have no dead letter.
    missing: tuple[Range, ...]
    twice: tuple[Range, ...]  # ranges that more than one update of the durable model applied
    gap_ranges: tuple[Range, ...]  # the ranges of the `gaps`
    partly_dead_samples: int  # samples refused inside packed records whose other samples were applied
    partitions: tuple[PartitionCounts, ...]
    problems: tuple[str, ...]  # other contradictions, one sentence each
    superseded: int = 0  # applied offsets that an earlier process had dead-lettered; they are in `applied`
    lost: int = 0  # offsets that were deleted from the log before they were in the durable model
    lost_ranges: tuple[Range, ...] = ()  # the ranges of these offsets
    loss_allowed: bool = False  # the job file allows losses (`data.on_data_loss: skip`)
    skipped: int = 0  # offsets that a rollback has left out of the model, as requested
    skipped_ranges: tuple[Range, ...] = ()  # the ranges of these offsets
    rollbacks: tuple[str, ...] = ()  # the rollbacks of the durable model, one sentence each
    # Offsets that the job has not read, because they were deleted before it began or after it had ended.
    unread: int = 0
    unread_ranges: tuple[Range, ...] = ()  # the ranges of these offsets
    held_out: int = 0  # offsets whose records the model has not learned, as the job file says
    forgotten: int = 0  # offsets that `doll forget` has removed from the model after they were applied
    forgotten_ranges: tuple[Range, ...] = ()  # the ranges of these offsets

    @property
    def ok(self) -> bool:
        """Whether the ledger balances."""
        return not (self.missing or self.twice or self.problems or (self.lost and not self.loss_allowed))

    def summary(self) -> str:
        """Return the result in one line."""
        gaps = f", {self.gaps} without a record" if self.gaps else ""
        lost = f", {self.lost} lost" if self.lost else ""
        lost += f", {self.unread} deleted unread" if self.unread else ""
        skipped = f", {self.skipped} skipped by doll rollback" if self.skipped else ""
        superseded = f", {self.superseded} dead letters superseded" if self.superseded else ""
        held_out = f", {self.held_out} held out" if self.held_out else ""
        held_out += f", {self.forgotten} removed by doll forget" if self.forgotten else ""
        others = f"; {len(self.problems)} other problems" if self.problems else ""
        return (
            f"audit: {self.produced} offsets produced, {self.applied} applied exactly once{held_out}, "
            f"{self.pending} not yet applied, {count(self.missing)} missing, {count(self.twice)} twice{lost}, "
            f"{self.dead} dead-lettered{superseded}{skipped}{gaps}{others}"
        )

    def violations(self) -> list[str]:
        """Return the errors of the ledger, one line each, with offsets. The list is empty if the ledger balances."""
        lines = [f"missing: {named(self.missing)}"] if self.missing else []
        lines += [f"applied twice: {named(self.twice)}"] if self.twice else []
        lines += [] if self.loss_allowed else self.losses()
        return [*lines, *self.problems]

    def losses(self) -> list[str]:
        """Return at most one line about records that were deleted before they were learned, even if this is allowed."""
        allowed = "allowed by data.on_data_loss: skip" if self.loss_allowed else "see data.on_data_loss"
        loss = f"lost: {named(self.lost_ranges)}: deleted from the log before they were learned ({allowed})"
        return [loss] if self.lost_ranges else []

    def unread_records(self) -> list[str]:
        """Return at most one line with the records that were deleted and never read."""
        where = f"deleted unread, before the job began or after it had ended: {named(self.unread_ranges)}"
        return [where] if self.unread_ranges else []

    def rolled_back(self) -> list[str]:
        """Return the rollbacks, one line each, and lines with the records that they have skipped or removed."""
        lines = [f"skipped by doll rollback: {named(self.skipped_ranges)}"] if self.skipped_ranges else []
        lines += [f"removed by doll forget: {named(self.forgotten_ranges)}"] if self.forgotten_ranges else []
        return [*self.rollbacks, *lines]

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON, with ranges as [partition, lo, hi]."""
        return {"ok": self.ok, "summary": self.summary(), **asdict(self)}


def count(ranges: Sequence[Range]) -> int:
    """Return the number of offsets in disjoint `ranges`."""
    return sum(item.hi - item.lo for item in ranges)


def named(ranges: Sequence[Range]) -> str:
    """Return the first `ranges` as text for people: `partition 0: 64-127, partition 2: 7, and 3 more ranges`."""
    more = f", and {len(ranges) - _NAMED} more ranges" if len(ranges) > _NAMED else ""
    return ", ".join(f"partition {item}" for item in ranges[:_NAMED]) + more


class PartitionResult(NamedTuple):
    """The counts of a partition, and the ranges of the offsets in some of the counts, by the name of the count."""

    line: PartitionCounts
    ranges: dict[str, list[Range]]


class PartitionAccount:
    """The account of one partition, built from the updates of the durable model and the dead letters."""

    def __init__(self, partition: int, durable: DurableModel) -> None:
        self.partition = partition
        self._grids = [_PartitionGrid.from_grid(grid, partition) for grid in durable.grids]
        self._grid = 0  # the grid of the batches that are being added
        self.origin, self.until = self._grids[0].bounds.origin, self._grids[-1].until
        self._skipped = offset_ranges.union((grid.until, grid.until + grid.skipped) for grid in self._grids)
        self._forgotten = offset_ranges.union(forgotten(durable.rollbacks, partition))
        self._spans: list[Span] = []
        self._dead = array("q")
        self._gaps: list[Span] = []
        self._lost: list[Span] = []
        self._held_out = array("q")
        self._partly: list[Span] = []  # batches with partly refused records
        self._whole_letters = array("q")
        self._part_letters = array("q")

    def add_batch(self, member: Member, name: str, problems: list[str]) -> None:
        """Count one applied batch, or several batches without a record."""
        bounds = self._grids[self._grid].bounds
        if member.cut and _may_cut(bounds, member):
            bounds.cut(member.batch, member.hi)
        lo, hi = bounds.lo(member.batch), bounds.lo(member.batch + max(member.batches, 1))
        if (member.lo, member.hi) != (lo, hi) or member.batch < 0:
            problems.append(
                f"{name}: batch {member.batch} of partition {self.partition} is offsets {lo}-{hi - 1}, got "
                f"{member.lo}-{member.hi - 1}"
            )
        elif member.cut != (bounds.cuts.left_out_by(member.batch) > 0):
            problems.append(f"{name}: batch {member.batch} of partition {self.partition} is cut, or full, not both")
        points = (*member.dead, *member.held_out)
        inside = [*((offset, offset + 1) for offset in points), *member.gaps, *member.lost]
        if any(not member.lo <= a < b <= member.hi for a, b in inside):
            problems.append(f"{name}: batch {member.batch} of partition {self.partition} names offsets outside itself")
        _append(self._spans, member.lo, member.hi)
        self._dead.extend(member.dead)
        self._held_out.extend(member.held_out)
        for gap in member.gaps:
            _append(self._gaps, *gap)
        for gap in member.lost:
            _append(self._lost, *gap)
        if member.dead_samples:
            self._partly.append((member.lo, member.hi))

    def next_grid(self) -> None:
        """Switch to the next grid: all batches added from now on belong to it."""
        self._grid += 1

    def finish_updates(self) -> None:
        """Complete the account after all updates were added."""
        self._covered, self._doubled = offset_ranges.union(self._spans), offset_ranges.overlaps(self._spans)
        self._dead_spans, self._gap_spans = offset_ranges.points(self._dead), offset_ranges.union(self._gaps)
        self._lost_spans = offset_ranges.union(self._lost)
        self._partly_spans = offset_ranges.union(self._partly)
        self._held_out_spans = offset_ranges.points(self._held_out)
        self._dead, self._held_out, self._gaps, self._lost, self._spans = array("q"), array("q"), [], [], []

    def add_dead_letter(self, letter: DeadLetter) -> None:
        (self._whole_letters if letter.whole else self._part_letters).append(letter.offset)

    def offset_state(self, offset: int) -> OffsetState:
        if offset_ranges.contains(self._skipped, offset):
            return "skipped"
        if not self.origin <= offset < self.until or not offset_ranges.contains(self._covered, offset):
            return "pending"
        if offset_ranges.contains(self._dead_spans, offset):
            return "dead"
        if offset_ranges.contains(self._gap_spans, offset) or offset_ranges.contains(self._lost_spans, offset):
            return "absent"
        if offset_ranges.contains(self._held_out_spans, offset):
            return "held out"
        if offset_ranges.contains(self._forgotten, offset):
            return "forgotten"
        return "partly" if offset_ranges.contains(self._partly_spans, offset) else "applied"

    def evaluate(
        self, low: int | None, end: int, present: Iterable[Span], finished: bool, problems: list[str], first: int
    ) -> PartitionResult:
        """Assign each offset below the end of the durable model to one of missing, twice, gap, lost, dead, held out,
        forgotten and applied. Assign each later offset to lost (no longer in the log) or pending.

        Args:
            low: the first offset that the log still holds. None: unknown.
            end: one above the last offset of the log.
            present: offsets at which the log holds records although an update says that it holds none.
            finished: True: the job has ended, so records that it has not read may be deleted.
            first: the first offset that the job must read: its origin or a lower offset.
        """
        end = max(end, self.origin)
        if self.until > end:
            problems.append(
                f"partition {self.partition}: the durable model reaches offset {self.until - 1}, but the log ends at "
                f"{end}: was the topic deleted and created again?"
            )
        for grid, later in zip_longest(self._grids, self._grids[1:]):
            if (until := grid.bounds.lo(grid.applied)) != grid.until:
                problems.append(
                    f"partition {self.partition}: {grid.applied} batches end at offset {grid.until - 1} by the "
                    f"checkpoint, and at {until - 1} by the cuts of its updates"
                )
            if later is not None and later.bounds.origin != grid.until + grid.skipped:
                skipped = f", {grid.skipped} are skipped" if grid.skipped else ""
                problems.append(
                    f"partition {self.partition}: what was learned before the job was regridded ends at offset "
                    f"{grid.until - 1}{skipped}, and goes on at {later.bounds.origin}"
                )
        low, known = (self.origin, False) if low is None else (low, True)
        prefix = offset_ranges.subtract(_span(self.origin, self.until), self._skipped)
        covered, doubled = self._covered, self._doubled
        dead, gaps, lost, held_out = self._dead_spans, self._gap_spans, self._lost_spans, self._held_out_spans
        letters, present = offset_ranges.points(self._whole_letters), offset_ranges.union(present)
        unlettered, filled = offset_ranges.subtract(dead, letters), offset_ranges.intersect(gaps, present)
        applied_letters = offset_ranges.intersect(letters, offset_ranges.intersect(prefix, covered))
        superseded = offset_ranges.subtract(applied_letters, offset_ranges.union([*dead, *gaps, *lost]))
        strays = offset_ranges.subtract(letters, _span(self.origin, max(end, self.until)))
        for spans, what in (
            (offset_ranges.subtract(covered, prefix), "applied by updates, but not counted in the checkpoint"),
            (unlettered, "dead by their update, but there is no dead letter"),
            (self._unlettered_parts(), "refused in part by their update, but there is no dead letter"),
            (strays, "dead-lettered, but outside the job's part of the log"),
            (offset_ranges.intersect(offset_ranges.union([*gaps, *lost]), dead), "both dead and without a record"),
            (
                offset_ranges.intersect(offset_ranges.union([*gaps, *lost, *dead]), held_out),
                "both held out and dead or without a record",
            ),
            (
                offset_ranges.intersect(lost, _span(low, end)) if known else [],
                "deleted by their update, but still in the log",
            ),
            (filled, "without a record by their update, but the log holds records"),
        ):
            if spans:
                problems.append(f"{what}: {named(self._ranges(spans))}")
        rest = prefix
        parts = []
        absent = offset_ranges.union([*offset_ranges.subtract(prefix, covered), *unlettered, *filled])
        for kind in (absent, doubled, lost, gaps, dead, held_out, self._forgotten):
            parts.append(offset_ranges.intersect(rest, kind))
            rest = offset_ranges.subtract(rest, kind)
        missing, twice, lost, empty, dead, held_out, removed = parts
        # Not in the durable model, and not in the log any more.
        behind = _span(self.until, min(low, end))
        unread = offset_ranges.union([*_span(first, self.origin), *(behind if finished else [])])
        lost = offset_ranges.union([*lost, *([] if finished else behind)])
        places = {
            "missing": missing, "twice": twice, "gaps": empty, "lost": lost, "skipped": self._skipped, "unread": unread,
            "forgotten": removed,
        }  # fmt: skip
        line = PartitionCounts(
            partition=self.partition,
            origin=self.origin,
            applied_until=self.until,
            end=end,
            produced=max(end, self.until) - first,
            applied=offset_ranges.size(rest),
            pending=max(end - self.until, 0) - offset_ranges.size(behind),
            dead=offset_ranges.size(dead),
            held_out=offset_ranges.size(held_out),
            superseded=offset_ranges.size(superseded),
            **{name: offset_ranges.size(at) for name, at in places.items()},
        )
        return PartitionResult(line, {name: self._ranges(at) for name, at in places.items()})

    def _unlettered_parts(self) -> list[Span]:
        """Return the batches for which an update reports refused samples and no dead letter exists."""
        letters = sorted({*self._part_letters, *self._whole_letters}) if self._partly else []
        unlettered = []
        for lo, hi in self._partly:
            at = bisect_left(letters, lo)
            if at == len(letters) or letters[at] >= hi:
                unlettered.append((lo, hi))
        return offset_ranges.union(unlettered)

    def _ranges(self, spans: Iterable[Span]) -> list[Range]:
        return [Range(self.partition, lo, hi) for lo, hi in spans]


class _PartitionGrid(NamedTuple):
    """One grid in one partition. The cuts in `bounds` come from the updates; `until` comes from the checkpoint."""

    bounds: Bounds
    applied: int
    until: int
    skipped: int = 0

    @classmethod
    def from_grid(cls, grid: Grid, partition: int) -> _PartitionGrid:
        skipped = grid.skipped[partition] if partition < len(grid.skipped) else 0
        if partition >= len(grid.origins):  # the partition was added later, and begins at offset 0
            return cls(Bounds(0, grid.records_per_batch), 0, 0, skipped)
        origin, size, applied = grid.origins[partition], grid.records_per_batch, grid.applied[partition]
        left_out = grid.left_out[partition] if grid.left_out else 0
        return cls(Bounds(origin, size), applied, Bounds(origin, size, Cuts(left_out)).lo(applied), skipped)


def _may_cut(bounds: Bounds, member: Member) -> bool:
    """Return whether a batch can follow the earlier batches, given the cut that its update reports."""
    is_new = member.batch >= 0 and bounds.cuts.next_cut(member.batch) is None
    return is_new and bounds.lo(member.batch) < member.hi < bounds.hi(member.batch)


def _append(spans: list[Span], lo: int, hi: int) -> None:
    """Append a range, and join it with the last range if they touch. Batches come in order, so a correct history of any
    length is one range."""
    if spans and spans[-1][1] == lo < hi:
        spans[-1] = (spans[-1][0], hi)
    else:
        spans.append((lo, hi))


def _span(lo: int, hi: int) -> list[Span]:
    return [(lo, hi)] if lo < hi else []


class Ledger:
    """The accounts of a job, one for each partition, and the contradictions between its sources.

    The ledger keeps ranges of offsets, not records. A correct history of any length needs little memory.
    """

    def __init__(self, durable: DurableModel, records: Iterable[UpdatesRecord]) -> None:
        """Add the updates that count. `records` are the records in topic `updates` of the checkpoint's generation, in
        log order, read after the checkpoint. The method iterates over them twice. Raise ValueError if `durable` does
        not have one entry for each partition."""
        num = len(durable.origins)
        if len(durable.applied) != num:
            raise ValueError(f"expected {num} counts of applied batches, got {len(durable.applied)}")
        self._durable = durable
        self._accounts = [PartitionAccount(n, durable) for n in range(num)]
        self._partly_dead_samples = 0
        self._valid = ValidUpdates(records, durable)
        self._grid_ends = [grid.version for grid in durable.earlier_grids]
        self._update_problems: list[str] = []
        self._letter_problems: list[str] = []
        # For each partition, the newest batch whose step is incomplete, and the worker that holds the missing part.
        self._held_back: dict[int, tuple[int, int]] = {}
        for update in self._valid:
            self._add_update(update)
        for account in self._accounts:
            account.finish_updates()
        for partition, (batch, _) in sorted(self._held_back.items()):
            self._update_problems.append(
                f"batches of partition {partition} up to {batch} are in the durable model, but a part of their steps "
                "is not: expected an update that settles them before the checkpoint"
            )

    def _add_update(self, update: Update) -> None:
        while self._grid_ends and update.version > self._grid_ends[0]:
            del self._grid_ends[0]
            for account in self._accounts:
                account.next_grid()
        accounts, problems, name = self._accounts, self._update_problems, f"update {update.version}"
        if update.n_samples != sum(member.n_samples for member in update.members):
            problems.append(f"{name}: its batches do not have the {update.n_samples} samples that it says")
        for member in update.members:
            if not 0 <= member.partition < len(accounts):
                problems.append(f"{name}: expected a partition from 0 to {len(accounts) - 1}, got {member.partition}")
                continue
            if member.base_version >= update.version:
                problems.append(
                    f"{name}: batch {member.batch} of partition {member.partition} used version {member.base_version}"
                )
            self._partly_dead_samples += member.dead_samples
            if member.held_back:
                self._held_back[member.partition] = (member.batch, member.worker)
            elif self._held_back:  # when the worker pushed this batch, it held back nothing of any partition
                self._held_back = {at: item for at, item in self._held_back.items() if item[1] != member.worker}
            accounts[member.partition].add_batch(member, name, problems)
        for partition, until in update.settled:
            if self._held_back.get(partition, (until, 0))[0] < until:
                del self._held_back[partition]

    @property
    def num_partitions(self) -> int:
        return len(self._accounts)

    @property
    def origins(self) -> tuple[int, ...]:
        """The first offset of the job in each partition."""
        return tuple(account.origin for account in self._accounts)

    def add_dead_letter(self, letter: DeadLetter) -> None:
        """Add one dead letter. Letters may come in any order; after a crash, a letter may come twice."""
        if not 0 <= letter.partition < len(self._accounts):
            self._letter_problems.append(
                f"a dead letter names partition {letter.partition}, expected 0 to {len(self._accounts) - 1}"
            )
        else:
            self._accounts[letter.partition].add_dead_letter(letter)

    def offset_state(self, partition: int, offset: int) -> OffsetState:
        """Return the state of an offset in the durable model.

        Returns:
            "pending": not yet applied; "applied"; "partly": applied, in a batch with refused samples inside packed
            records; "held out": not learned; "dead": refused in the update that counts; "absent": the log held no
            record when the batch was read; "skipped": a rollback has left it out; "forgotten": `doll forget` has
            removed it.
        """
        return self._accounts[partition].offset_state(offset) if 0 <= partition < len(self._accounts) else "pending"

    def report(
        self,
        ends: Sequence[int],
        *,
        present: Sequence[Range] = (),
        lows: Sequence[int] | None = None,
        loss_allowed: bool = False,
        is_whole: bool = False,
    ) -> LedgerReport:
        """Evaluate the accounts. This method may be called again.

        Args:
            ends: for each partition of the samples topic, one above its last offset.
            present: ranges in which the log holds records although an update says that it holds none.
            lows: the first offset that each partition still holds. None: nothing was deleted. If the job has ended,
                records that it has not read may be deleted.
            loss_allowed: True: records that were deleted before they were learned are no failure.
            is_whole: True: the job must read from offset 0 on, even if the log began later when the job began.
        """
        problems = [*self._valid.problems, *self._update_problems, *self._letter_problems]
        present_spans = [
            [(item.lo, item.hi) for item in present if item.partition == n] for n in range(len(self._accounts))
        ]
        first = [None] * len(self._accounts) if lows is None else lows
        results = [
            account.evaluate(low, end, spans, self._valid.finished, problems, 0 if is_whole else account.origin)
            for account, low, end, spans in zip(self._accounts, first, ends, present_spans, strict=True)
        ]
        lines = [item.line for item in results]
        sums: dict[str, Any] = {name: sum(getattr(line, name) for line in lines) for name in _SUMS}
        ranges: dict[str, Any] = {
            field: tuple(item for result in results for item in result.ranges[name]) for field, name in _RANGES.items()
        }
        return LedgerReport(
            version=self._durable.version,
            term=self._durable.term,
            updates=self._valid.updates,
            unsaved=self._valid.unsaved,
            voided=self._valid.voided,
            loss_allowed=loss_allowed,
            rollbacks=tuple(rollback.text() for rollback in self._durable.rollbacks),
            partly_dead_samples=self._partly_dead_samples,
            partitions=tuple(lines),
            problems=tuple(problems),
            **sums,
            **ranges,
        )
