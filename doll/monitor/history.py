"""The history of a run, folded from the `updates` topic: one row per update and per held-out evaluation.

After a restart the parameter server repeats the versions above its checkpoint: the `TermStarted` record that says so voids
the earlier rows. They stay in the tables, marked, since they did happen; no mean, rate or plot counts them. Where an
`TermStarted` record begins a new generation (`doll.ledger.generations`), what came before is of another run, and goes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from doll.monitor.loss_trend import LossTrend
from doll.monitor.prequential import Prequential
from doll.records import AnyRecord, Finished, TermStarted, Update

UPDATE_COLUMNS = (
    "time_s", "term", "version", "n_samples", "samples_total", "batches", "prequential_loss",
    "apply_s", "grant_to_update_s", "mean_compute_s", "mean_service_s",
)  # fmt: skip
EVALUATION_COLUMNS = ("time_s", "term", "version", "loss", "accuracy")


class Table:
    """Rows of numbers, kept by column; a column that a row does not name is NaN there."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns: dict[str, array[float]] = {name: array("d") for name in columns}
        self._void = array("b")

    def __len__(self) -> int:
        return len(self._void)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._columns, "void")

    def append(self, row: Mapping[str, float], *, void: bool = False) -> bool:
        """Add a row. True when it brought a column that was not there before."""
        grown = False
        for name in row:
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan]) * len(self)
                grown = True
        for name, column in self._columns.items():
            column.append(row.get(name, math.nan))
        self._void.append(void)
        return grown

    def void_above(self, version: int, below_term: int) -> int:
        """Void the rows of terms below `below_term` with versions above `version`; how many were not void before."""
        versions, terms = self._columns["version"], self._columns["term"]
        # From the end: rows at or below the version are in front of all that can be void.
        count = 0
        for row in range(len(self) - 1, -1, -1):
            if terms[row] < below_term and versions[row] > version and not self._void[row]:
                self._void[row] = 1
                count += 1
        return count

    def drop_below(self, term: int) -> bool:
        """Drop the rows of terms below `term`; whether there were any."""
        kept = [row for row, of in enumerate(self._columns["term"]) if of >= term]
        dropped = len(kept) < len(self)
        if dropped:
            self._columns = {name: array("d", [column[row] for row in kept]) for name, column in self._columns.items()}
            self._void = array("b", [self._void[row] for row in kept])
        return dropped

    def valid(self, name: str) -> npt.NDArray[np.float64]:
        """The column `name` without void rows, float64, shape (rows,)."""
        # A copy: a view would lock the arrays against growth.
        values: npt.NDArray[np.float64] = np.array(self._columns[name], dtype=np.float64)
        kept: npt.NDArray[np.float64] = values[np.array(self._void, dtype=np.int8) == 0]
        return kept

    def row(self, index: int) -> dict[str, float]:
        """One row by column name, with `void` as 0 or 1."""
        return {**{name: column[index] for name, column in self._columns.items()}, "void": float(self._void[index])}

    def last(self) -> dict[str, float] | None:
        """The newest row that is not void."""
        for index in range(len(self) - 1, -1, -1):
            if not self._void[index]:
                return self.row(index)
        return None


class History:
    """Everything a reader of the `updates` topic knows about a run. No I/O.

    Args:
        window: updates in the windowed prequential mean.
        after_term: records of terms up to this one are of earlier runs, and are passed over.
    """

    def __init__(self, window: int = 50, *, after_term: int = 0) -> None:
        self._window = window
        self._after_term = after_term
        self.generation = 0
        """The newest one; no record of an earlier one counts."""
        self.updates = Table(UPDATE_COLUMNS)
        self.evaluations = Table(EVALUATION_COLUMNS)
        self.prequential = Prequential(window)
        self.loss_trend = LossTrend(window)
        self.term = 0
        self.version = 0
        self.samples_total = 0
        self.restarts = 0
        """Terms beyond the first: starts of a parameter server that followed another one's updates."""
        self.finished: Finished | None = None
        self.first_time_s = math.nan
        self.last_time_s = math.nan

    def feed(self, record: AnyRecord) -> bool:
        """Take in one record; True when earlier rows changed (were voided, or a column was added)."""
        if isinstance(record, TermStarted | Update | Finished) and not self.is_current(record.term):
            return False
        match record:
            case TermStarted():
                return self._term_started(record)
            case Update():
                return self._update(record)
            case Finished():
                if record.term >= self.term:
                    self.finished = record
                return False
            case _:
                return False

    def evaluated(self, *, time_s: float, term: int, version: int, loss: float, accuracy: float | None) -> None:
        """A held-out evaluation. It is void from the start when its version has been taken back.

        One of another run is passed over.
        """
        if not self.is_current(term):
            return
        row = {"time_s": time_s, "term": term, "version": version, "loss": loss}
        if accuracy is not None:
            row["accuracy"] = accuracy
        self.evaluations.append(row, void=term < self.term and version > self.version)

    def is_current(self, term: int) -> bool:
        """Whether what a server of this term has written is of the run at hand."""
        return term > self._after_term and term >= self.generation

    def _begin(self, generation: int) -> bool:
        """What came before is of another run; whether rows went with it."""
        self.generation, self.loss_trend = generation, LossTrend(self.prequential.window)
        dropped = [table.drop_below(generation) for table in (self.updates, self.evaluations)]
        self.prequential = Prequential(self._window)
        self.term = self.restarts = self.version = self.samples_total = 0
        self.finished = None
        self.first_time_s = self.last_time_s = math.nan
        return any(dropped)

    def _term_started(self, record: TermStarted) -> bool:
        if record.term <= self.term:
            return False
        dropped = record.generation > self.generation and self._begin(record.generation)
        if self.term:
            self.restarts += 1
        self.term = record.term
        self.finished = None
        voided = self.updates.void_above(record.resumed_version, record.term)
        voided += self.evaluations.void_above(record.resumed_version, record.term)
        self.prequential.rollback(record.resumed_version)
        self.version = record.resumed_version
        last = self.updates.last()
        self.samples_total = int(last["samples_total"]) if last else 0
        return voided > 0 or dropped

    def _update(self, record: Update) -> bool:
        void = record.term < self.term
        service = [member.compute_s + member.fetch_s + member.store_s for member in record.members]
        row: dict[str, float] = {
            "time_s": record.time_s,
            "term": record.term,
            "version": record.version,
            "n_samples": record.n_samples,
            "samples_total": record.samples_total,
            "batches": len(record.members),
            "prequential_loss": record.loss if record.n_samples else math.nan,
            "apply_s": record.apply_s,
            "grant_to_update_s": record.grant_to_update_s,
            "mean_compute_s": mean([member.compute_s for member in record.members]),
            "mean_service_s": mean(service),
            **{f"prequential_{name}": value for name, value in record.metrics.items()},
        }
        grown = self.updates.append(row, void=void)
        if not void:
            self.version = record.version
            self.samples_total = record.samples_total
            self.prequential.add(record.version, record.n_samples, record.loss, record.metrics)
            self.loss_trend.add(record.version, record.n_samples, record.loss)
            if math.isnan(self.first_time_s):
                self.first_time_s = record.time_s
            self.last_time_s = record.time_s
        return grown

    def held_out_loss_trend(self) -> LossTrend:
        """The course of the held-out loss."""
        return LossTrend.of(self.evaluations.valid("version"), self.evaluations.valid("loss"))

    def service_s(self) -> float:
        """μ_C: mean seconds from a granted batch to its stored gradient (fetch + compute + store), over batches."""
        seconds, batches = self.updates.valid("mean_service_s"), self.updates.valid("batches")
        known = np.isfinite(seconds) & (seconds > 0)
        return float(np.average(seconds[known], weights=batches[known])) if known.any() else math.nan


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def json_safe(value: Any) -> Any:
    """`value` as JSON can say it: NaN and infinities become None, also inside containers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in value]
    return value
