"""The report of an audit: counts, and the ranges of offsets that do not balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

_NAMED: Final = 8  # ranges that a message names; the report holds them all


class Range(NamedTuple):
    """Offsets [lo, hi) of one partition."""

    partition: int
    lo: int
    hi: int

    def __str__(self) -> str:
        return (
            f"{self.partition}: {self.lo}" if self.hi == self.lo + 1 else f"{self.partition}: {self.lo}-{self.hi - 1}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCounts:
    """The account of one partition, in offsets; produced is the sum of the counts after it, `superseded` excepted."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """The account of a job."""

    version: int  # of the durable model, written by parameter server term `term`
    term: int
    updates: int  # update records that the durable model contains
    unsaved: int  # update records after it, not durable yet
    voided: int  # void update records: their batches were lost with a server and applied again
    produced: int  # offsets from the job's origin to the partitions' ends; the sum of the counts below
    applied: int
    pending: int
    dead: int
    gaps: int  # offsets at which the log holds no record
    # ranges below the durable model's reach that are in no update, or dead without a dead letter.
    missing: tuple[Range, ...]
    twice: tuple[Range, ...]  # ranges that more than one update of the durable model applied
    gap_ranges: tuple[Range, ...]  # where the `gaps` are
    partly_dead_samples: int  # samples refused inside packed records whose other samples were applied
    partitions: tuple[PartitionCounts, ...]
    problems: tuple[str, ...]  # what else does not fit, one sentence each
    superseded: int = 0  # applied offsets that an earlier process had dead-lettered; they are in `applied`
    lost: int = 0  # offsets that were deleted from the log before they were in the durable model
    lost_ranges: tuple[Range, ...] = ()  # where they are
    loss_allowed: bool = False  # the job file allows that (`data.on_data_loss: skip`)

    @property
    def ok(self) -> bool:
        """True where the ledger balances."""
        return not (self.missing or self.twice or self.problems or (self.lost and not self.loss_allowed))

    def summary(self) -> str:
        """The result in one line."""
        gaps = f", {self.gaps} without a record" if self.gaps else ""
        lost = f", {self.lost} lost" if self.lost else ""
        superseded = f", {self.superseded} dead letters superseded" if self.superseded else ""
        others = f"; {len(self.problems)} other problems" if self.problems else ""
        return (
            f"audit: {self.produced} offsets produced, {self.applied} applied exactly once, "
            f"{self.pending} not yet applied, {count(self.missing)} missing, {count(self.twice)} twice{lost}, "
            f"{self.dead} dead-lettered{superseded}{gaps}{others}"
        )

    def violations(self) -> list[str]:
        """What is wrong, one line each, with offsets; empty where the ledger balances."""
        lines = [f"missing: {named(self.missing)}"] if self.missing else []
        lines += [f"applied twice: {named(self.twice)}"] if self.twice else []
        lines += [] if self.loss_allowed else self.losses()
        return [*lines, *self.problems]

    def losses(self) -> list[str]:
        """What was deleted before it was learned, allowed or not, in at most one line."""
        allowed = "allowed by data.on_data_loss: skip" if self.loss_allowed else "see data.on_data_loss"
        loss = f"lost: {named(self.lost_ranges)}: deleted from the log before they were learned ({allowed})"
        return [loss] if self.lost_ranges else []

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values, for JSON; ranges are [partition, lo, hi]."""
        plain = asdict(self)
        for name in ("missing", "twice", "gap_ranges", "lost_ranges"):
            plain[name] = [list(item) for item in getattr(self, name)]
        return {"ok": self.ok, "summary": self.summary(), **plain}


def count(ranges: Sequence[Range]) -> int:
    """Number of offsets in disjoint `ranges`."""
    return sum(item.hi - item.lo for item in ranges)


def named(ranges: Sequence[Range]) -> str:
    """The first of `ranges` for people: `partition 0: 64-127, partition 2: 7, and 3 more ranges`."""
    more = f", and {len(ranges) - _NAMED} more ranges" if len(ranges) > _NAMED else ""
    return ", ".join(f"partition {item}" for item in ranges[:_NAMED]) + more
