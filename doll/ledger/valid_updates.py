"""Valid updates: the update records that count, because no later parameter server made them void.

An update is void in three cases: a later server began again from a lower version, a rollback has abandoned the update,
or its own server was already fenced when it wrote the update. These cases are known only after the whole topic is read.
Therefore the topic is read twice: first for the server starts, then for their updates. Memory grows with the number of
servers, not with the number of updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from doll.ledger import offset_ranges
from doll.ledger.lineage import UpdatesRecord
from doll.ledger.snapshot_counts import SnapshotCounts
from doll.records.bounds import Grid
from doll.records.control import Finished, TermStarted, Update
from doll.records.rollbacks import Rollback, is_left


class DurableModel(SnapshotCounts, frozen=True, kw_only=True):
    """The content of the newest checkpoint. The model has learned the batches of earlier grids before those of its last
    grid."""

    term: int  # term of its server; 0: there is no checkpoint
    location: str = "the checkpoint store"  # folder or URL of the checkpoints, for messages
    chain: bytes = b""  # hash of its last update (`doll.records.chain`); b"": none, or of an earlier release

    @property
    def grids(self) -> tuple[Grid, ...]:
        """All grids, in chronological order. The last one is the grid of the newest checkpoint."""
        present = Grid(
            version=self.version, records_per_batch=self.records_per_batch, origins=self.origins,
            applied=self.applied, left_out=self.left_out,
        )  # fmt: skip
        return (*self.earlier_grids, present)


@dataclass(slots=True)
class ValidUpdates:
    """The updates of one generation, in log order, compared with the durable model.

    Iterate over this object once: it yields the updates that the durable model contains, by ascending version. The
    attributes below are complete after the iteration.
    """

    # The records of `updates` of one generation. They are iterated over twice, and must be the same both times.
    records: Iterable[UpdatesRecord]
    durable: DurableModel
    updates: int = 0  # number of updates that were yielded
    unsaved: int = 0  # valid updates after the durable version
    voided: int = 0  # void updates
    finished: bool = False  # the job has ended, with the durable version
    problems: list[str] = field(default_factory=list)  # contradictions, one sentence each
    _versions: list[offset_ranges.Span] = field(default_factory=list)  # versions of the updates valid so far

    def __iter__(self) -> Iterator[Update]:
        rollbacks = self.durable.rollbacks
        void_limits = _void_limits(self.records, rollbacks)
        servers, newest = 0, 0
        finished: Finished | None = None
        later_update: Update | None = None
        last_update: Update | None = None
        for record in self.records:
            if record.term < newest:  # written by a fenced server
                self.voided += isinstance(record, Update)
                continue
            match record:
                case TermStarted():
                    if record.term == newest:
                        self.problems.append(
                            f"parameter server term {newest} begins twice: two servers had the same term"
                        )
                    kept = _kept_version(record, newest, rollbacks)
                    newest, finished = record.term, None
                    servers += 1
                    is_void = void_limits[servers] < record.resumed_version
                    is_void |= is_left(rollbacks, record.term, record.resumed_version, record.grid)
                    self._check_term(record, is_void=is_void)
                    self._void_above(kept)
                case Update():
                    if record.term > newest:
                        self.problems.append(f"no record says from which version term {record.term} began")
                        newest = record.term
                    if not self._append_version(record.version):
                        last = self._versions[-1][1] - 1
                        self.problems.append(f"term {newest} records version {record.version} after version {last}")
                    elif record.version <= min(void_limits[servers], self.durable.version):
                        if later_update is None and record.term > self.durable.term:
                            later_update = record
                        last_update = record
                        yield record
                case Finished():
                    finished = record
        self._void_above(_left_from(newest, float("inf"), rollbacks))
        self._finish(finished, later_update)
        if last_update is not None and self.durable.chain and last_update.chain != self.durable.chain:
            self.problems.append(
                f"update {last_update.version} in the topic has hash {last_update.chain.hex() or 'none'}, and the "
                f"checkpoint expects {self.durable.chain.hex()}: the records of updates were changed (doll audit "
                "--independent)"
            )
        if not self.durable.term and (servers or self._versions):
            self._report_no_checkpoint(servers, finished)

    def _append_version(self, version: int) -> bool:
        """Add a version after the last version, and return True. Return False if it is not after the last version."""
        versions = self._versions
        if not versions or version > versions[-1][1]:
            versions.append((version, version + 1))
        elif version == versions[-1][1]:
            versions[-1] = (versions[-1][0], version + 1)
        else:
            return False
        return True

    def _void_above(self, version: float) -> None:
        versions = self._versions
        while versions and versions[-1][1] > version + 1:
            lo, hi = versions.pop()
            first = max(lo, int(version) + 1)
            if lo < first:
                versions.append((lo, first))
            self.voided += hi - first

    def _check_term(self, record: TermStarted, *, is_void: bool) -> None:
        """Report contradictions between a server's start and the durable model. `is_void`: True if a later server began
        at a lower version."""
        durable = self.durable
        if record.term > durable.term and record.resumed_version < durable.version:
            self.problems.append(
                f"term {record.term} began again from version {record.resumed_version}, but the newest checkpoint "
                f"is of version {durable.version}, term {durable.term}"
            )
        grids = durable.grids
        if is_left(durable.rollbacks, record.term, record.resumed_version, record.grid):
            return
        if record.grid >= len(grids):
            if not is_void:
                self.problems.append(
                    f"term {record.term} began in grid {record.grid} (doll regrid), the newest checkpoint is of grid "
                    f"{len(grids) - 1}"
                )
            return
        grid = grids[record.grid]
        is_prefix = record.origins == grid.origins[: len(record.origins)]  # partitions may have been added since
        if not is_prefix or record.records_per_batch != grid.records_per_batch:
            self.problems.append(
                f"term {record.term} began with origins {list(record.origins)} and {record.records_per_batch} records "
                f"per batch, the checkpoint has {list(grid.origins)} and {grid.records_per_batch}"
            )

    def _finish(self, finished: Finished | None, later_update: Update | None) -> None:
        durable = self.durable
        self.finished = finished is not None and finished.version == durable.version
        if durable.term and finished is not None and finished.version > durable.version:
            self.problems.append(
                f"the job ended at version {finished.version}, but the newest checkpoint is of version "
                f"{durable.version}"
            )
        counted = offset_ranges.intersect(self._versions, [(0, durable.version + 1)])
        self.updates = offset_ranges.size(counted)
        self.unsaved = offset_ranges.size(self._versions) - self.updates
        left = offset_ranges.union((rollback.to + 1, rollback.version + 1) for rollback in durable.rollbacks)
        counted = offset_ranges.union([*counted, *left])
        unrecorded = offset_ranges.subtract([(1, durable.version + 1)], counted) if durable.version else []
        for lo, hi in unrecorded:
            self.problems.append(
                f"versions {lo} to {hi - 1} are in the durable model (version {durable.version}) without an update "
                "record"
            )
        if later_update is not None:
            self.problems.append(
                f"version {later_update.version} was recorded by term {later_update.term}, but the newest checkpoint, "
                f"version {durable.version}, is of term {durable.term}"
            )

    def _report_no_checkpoint(self, servers: int, finished: Finished | None) -> None:
        """Report that there is no checkpoint. A server saves version 0 before it writes its first record, so the
        checkpoints are in another place, or lost."""
        recorded = ["the start of a parameter server" if servers == 1 else f"{servers} starts of parameter servers"]
        recorded += [f"{self.unsaved} updates"] if self.unsaved else []
        recorded += [f"the job's end at version {finished.version}"] if finished is not None else []
        self.problems.append(
            f"no checkpoint was found in {self.durable.location}, but the topic updates records "
            f"{', '.join(recorded)}: nothing that was learned can be verified. Name the run's folder (doll audit "
            "RUN, or --run-folder), or set checkpoint.folder; if the checkpoints are lost, so is the model"
        )


def _void_limits(records: Iterable[UpdatesRecord], rollbacks: Sequence[Rollback]) -> list[float]:
    """Return, by the number of earlier servers, the last version that no later server or rollback voids."""
    kept: list[float] = []
    newest = 0
    for record in records:
        if record.term < newest:
            continue
        if isinstance(record, TermStarted):
            kept.append(_kept_version(record, newest, rollbacks))
        newest = record.term
    last = _left_from(newest, float("inf"), rollbacks)
    return list(accumulate(reversed([*kept, last]), min))[::-1]


def _kept_version(record: TermStarted, newest: int, rollbacks: Sequence[Rollback]) -> float:
    """Return the last version of the earlier servers that is kept when this server starts. `newest`: the term of the
    newest earlier server."""
    return min(record.resumed_version, _left_from(newest, record.term, rollbacks))


def _left_from(newest: int, term: float, rollbacks: Sequence[Rollback]) -> float:
    """Return the lowest version that a rollback with a term between `newest` and `term` returns to, or infinity."""
    return min((item.to for item in rollbacks if newest < item.term < term), default=float("inf"))
