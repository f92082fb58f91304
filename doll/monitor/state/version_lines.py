"""The versions that a job keeps, with the lineage, errors, cost and names of each version. Pure.

All values come from existing records: the samples of a version from its checkpoint, the errors from the records of
updates and of the evaluator, and the cost from the provisioner's decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Final

import msgspec
import numpy as np

from doll.config.fingerprint import MODEL_KEYS, differences, parse
from doll.errors import CheckpointError
from doll.ledger.snapshot_counts import SnapshotCounts
from doll.monitor.state.table_changes import TableChange
from doll.records.bounded import short
from doll.records.rollbacks import Rollback, is_left
from doll.storage.checkpoints import CheckpointHead
from doll.storage.version_marks import StoredVersion, Verdict, VersionMarks

_WINDOW: Final = 50  # updates of a prequential mean, as in other modules
_PREQUENTIAL: Final = "prequential_"

Row = Mapping[str, float]
"""A row of a `doll.monitor.state.history.MetricTable`, or of its CSV file."""


class _State(SnapshotCounts, frozen=True):
    """The fields of the engine's snapshot that users can see."""

    samples_total: int = 0
    policy: str = ""
    elapsed_s: float = 0.0
    init_from: str = ""


@dataclass(frozen=True, kw_only=True)
class VersionRecords:
    """The records of a job that concern its versions.

    Attributes:
        updates, evaluations: rows of the tables of `doll.monitor.state.history`.
        spent_usd: pairs of Unix time and the amount that the provisioner had spent until this time, in order of time.
    """

    updates: Sequence[Row] = ()
    evaluations: Sequence[Row] = ()
    spent_usd: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, kw_only=True)
class VersionLine:
    """One kept version. Unknown values are NaN, None or "".

    Attributes:
        term: term of the server that saved it.
        saved_s: Unix time when it was saved.
        offsets: for each partition, the first offset of the job and the offset after the last learned one.
        policy, recipe: name of the policy, and the keys of `training` in the fingerprint.
        prequential, held_out: losses and metrics by name; prequential ones are means over the last 50 updates.
        cost_usd: cost of provisioned machines until the version was saved.
        fingerprint: fingerprint of the job file and the model.
        code: checksum of the task's source.
        verdict: verdict of the gates and the checks behind it; None: the version was not judged.
        remarks: remarks on its aliases: frozen, or moved by a person.
        notes: further remarks, one sentence each.
    """

    version: int
    term: int
    saved_s: float
    size_bytes: int
    samples: int
    offsets: tuple[tuple[int, int], ...]
    policy: str
    recipe: Mapping[str, str]
    elapsed_s: float
    prequential: Mapping[str, float]
    held_out: Mapping[str, float]
    cost_usd: float
    fingerprint: str
    code: str
    aliases: tuple[str, ...]
    is_pinned: bool
    init_from: str = ""
    grid: int = 0
    verdict: Verdict | None = None
    remarks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A short checksum of the fingerprint."""
        return sha256(self.fingerprint.encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"digest": self.digest, "verdict": msgspec.to_builtins(self.verdict)}


def version_line(
    item: StoredVersion, head: CheckpointHead, marks: VersionMarks, records: VersionRecords
) -> VersionLine:
    """Return the line of a stored checkpoint.

    Raises:
        CheckpointError: its state was written by another release.
    """
    try:
        state = msgspec.msgpack.decode(head.state, type=_State)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(
            f"version {item.version} of job {head.job!r} holds no engine state that this build reads ({short(exc)})"
        ) from exc
    fields = parse(head.fingerprint)
    updates = [row for row in records.updates if _counts(row, item, state.rollbacks)]
    until_s = next((row["time_s"] for row in reversed(updates) if row["version"] == item.version), item.saved_s)
    return VersionLine(
        version=item.version, term=item.term, saved_s=item.saved_s,
        size_bytes=item.size_bytes + sum(part.size_bytes for part in head.parts),
        samples=state.samples_total, offsets=tuple(zip(state.first_offsets, state.read_until, strict=True)),
        policy=state.policy, recipe={key: value for key, value in fields.items() if key.startswith("training.")},
        elapsed_s=state.elapsed_s, prequential=_prequential(updates), held_out=_held_out(records.evaluations, item),
        cost_usd=next((usd for time_s, usd in reversed(records.spent_usd) if time_s <= until_s), math.nan),
        fingerprint=head.fingerprint, code=head.code, aliases=tuple(marks.aliases_of(item.version)),
        verdict=marks.verdict_of(item.version), remarks=tuple(_remarks(item.version, marks)),
        is_pinned=item.version in marks.pins, init_from=state.init_from, grid=len(state.earlier_grids),
        notes=tuple(rollback.text() for rollback in state.rollbacks),
    )  # fmt: skip


def _remarks(version: int, marks: VersionMarks) -> Iterator[str]:
    for alias in marks.aliases_of(version):
        if reason := marks.reasons.get(alias):
            yield f"a person moved {alias} here: {reason}"
        if alias in marks.frozen:
            yield f"{alias} is frozen: {marks.frozen[alias] or 'no reason was given'}"


def _counts(row: Row, item: StoredVersion, rollbacks: Sequence[Rollback] = ()) -> bool:
    """Return whether a version contains an update. A void update counts if its server also saved the version."""
    term, version = row.get("term", 0), row.get("version", math.inf)
    is_void = bool(row.get("void")) and term != item.term
    return not is_void and version <= item.version and not is_left(rollbacks, int(term), int(version))


def _prequential(updates: Sequence[Row]) -> dict[str, float]:
    rows = [row for row in updates[-_WINDOW:] if row.get("weight", 0) > 0]
    names = sorted({name for row in rows for name in row if name.startswith(_PREQUENTIAL)})
    means = {}
    for name in names:
        known = [(row[name], row["weight"]) for row in rows if math.isfinite(row.get(name, math.nan))]
        if known:
            values, weights = zip(*known, strict=True)
            means[name.removeprefix(_PREQUENTIAL)] = float(np.average(values, weights=weights))
    return means


def _held_out(evaluations: Sequence[Row], item: StoredVersion) -> dict[str, float]:
    for row in reversed(evaluations):
        if row.get("version") == item.version and _counts(row, item):
            known = {name: value for name, value in row.items() if math.isfinite(value)}
            return {name: value for name, value in known.items() if name not in ("time_s", "term", "version", "void")}
    return {}


@dataclass(frozen=True, kw_only=True)
class VersionDiff:
    """The difference of two versions.

    Attributes:
        offsets: for each partition, the offsets that were learned after the earlier version, up to the later one.
        changes: changes of the job file and the model, in words; "" if there are none.
        distances: for each tensor, the norm of the difference of the weights, and the norm of the earlier weights.
        tables: for each table, the rows that differ.
    """

    a: VersionLine
    b: VersionLine
    changes: str
    distances: Mapping[str, tuple[float, float]]
    tables: Mapping[str, TableChange]

    @property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """The end offsets of the earlier and of the later version, by partition."""
        ends = [[end for _, end in line.offsets] for line in (self.a, self.b)]
        count = max(map(len, ends))
        first, last = ([*row, *[0] * (count - len(row))] for row in ends)
        return tuple(zip(first, last, strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {
            "a": self.a.to_dict(), "b": self.b.to_dict(), "samples": self.b.samples - self.a.samples,
            "offsets": self.offsets, "changes": self.changes,
            "distances": {
                name: {"change": change, "length": length} for name, (change, length) in self.distances.items()
            },
            "tables": {name: asdict(change) for name, change in self.tables.items()},
        }  # fmt: skip


def changes_between(a: VersionLine, b: VersionLine) -> str:
    """Return the differences of job file and model, in words."""
    before, now = parse(a.fingerprint), parse(b.fingerprint)
    text = differences(before, now)
    code = "" if a.code == b.code or not (a.code and b.code) else f"code of the task: expected {a.code}, got {b.code}"
    return ", ".join(part for part in (text, code) if part).replace(": expected ", " ").replace(", got ", " -> ")


def model_fields(line: VersionLine) -> dict[str, str]:
    """Return the fields of the fingerprint that concern the model."""
    return {key: value for key, value in parse(line.fingerprint).items() if key in MODEL_KEYS}
