"""The history of a run, computed from the `updates` topic: one row per update and per held-out evaluation.

After a restart, the parameter server repeats the versions above its checkpoint. Its `TermStarted` record makes their
earlier rows void: they stay in the tables, marked as void, and means, rates and plots ignore them. If a `TermStarted`
record begins a new generation (`doll.ledger.lineage`), all earlier rows belong to another run and are deleted.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from doll.ledger.lineage import Lineage, LineageChange, UpdatesRecord
from doll.metrics.states import ERROR_BOUND, STDERR
from doll.monitor.state.metric_window import split_metrics, update_values
from doll.monitor.state.prequential import LossTrend, Means, Prequential
from doll.records.control import AnyRecord, Finished, Member, TermStarted, Update

UPDATE_COLUMNS = (
    "time_s", "term", "version", "n_samples", "samples_total", "batches", "prequential_loss",
    "apply_s", "grant_to_update_s", "mean_compute_s", "mean_service_s", "weight", "records",
)  # fmt: skip
HELD_OUT_WINDOW: Final = 500  # updates with such samples: each of them may have only a few
EVALUATION_COLUMNS = ("time_s", "term", "version", "loss", "accuracy")


class MetricTable:
    """Rows of numbers, stored by column; a missing value is NaN."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns: dict[str, array[float]] = {name: array("d") for name in columns}
        self._void = array("b")

    def __len__(self) -> int:
        return len(self._void)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._columns, "void")

    def append(self, row: Mapping[str, float], *, void: bool = False) -> bool:
        """Add a row; return whether it has added a column."""
        has_new_column = False
        for name in row:
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan]) * len(self)
                has_new_column = True
        for name, column in self._columns.items():
            column.append(row.get(name, math.nan))
        self._void.append(void)
        return has_new_column

    def void_above(self, version: int, below_term: int) -> int:
        """Mark the rows of terms below `below_term` with versions above `version` as void; return their number."""
        versions, terms = self._columns["version"], self._columns["term"]
        # Search from the end, where these rows are.
        count = 0
        for row in range(len(self) - 1, -1, -1):
            if terms[row] < below_term and versions[row] > version and not self._void[row]:
                self._void[row] = 1
                count += 1
        return count

    def drop_below(self, term: int) -> bool:
        """Delete the rows of terms below `term`; return whether there were any."""
        kept = [row for row, row_term in enumerate(self._columns["term"]) if row_term >= term]
        dropped = len(kept) < len(self)
        if dropped:
            self._columns = {name: array("d", [column[row] for row in kept]) for name, column in self._columns.items()}
            self._void = array("b", [self._void[row] for row in kept])
        return dropped

    def valid(self, name: str) -> npt.NDArray[np.float64]:
        """Return the column `name` without void rows, float64, shape (rows,)."""
        # Copied: the arrays cannot grow while a view of them exists.
        values: npt.NDArray[np.float64] = np.array(self._columns[name], dtype=np.float64)
        kept: npt.NDArray[np.float64] = values[np.array(self._void, dtype=np.int8) == 0]
        return kept

    def row(self, index: int) -> dict[str, float]:
        """Return one row by column name, with `void` as 0 or 1."""
        return {**{name: column[index] for name, column in self._columns.items()}, "void": float(self._void[index])}

    def void_of(self, rows: int) -> set[tuple[int, int]]:
        """Return term and version of each void row among the last `rows` rows."""
        terms, versions = self._columns["term"], self._columns["version"]
        last = range(max(0, len(self) - rows), len(self))
        return {(int(terms[row]), int(versions[row])) for row in last if self._void[row]}

    def last(self) -> dict[str, float] | None:
        """Return the newest row that is not void; None if there is none."""
        for index in range(len(self) - 1, -1, -1):
            if not self._void[index]:
                return self.row(index)
        return None


@dataclass(frozen=True, slots=True)
class HeldOutRecords:
    """The records that a job has held out of its stream. Each sample is measured once, by the weights of the moment.

    Attributes:
        samples: number of samples that were measured: a record may have several, or none.
        metrics: loss and metrics of these samples, as far as they are known.
        window_samples, window_metrics: the same for the last `HELD_OUT_WINDOW` updates with such samples.
    """

    records: int
    samples: int
    metrics: dict[str, float]
    window_samples: int
    window_metrics: dict[str, float]

    def text(self) -> str:
        """Return the newest loss and metrics in one line."""
        values = (item for item in self.window_metrics.items() if not item[0].endswith((STDERR, ERROR_BOUND)))
        named = ", ".join(f"{name} {value:.4g}" for name, value in values)
        measured = f": {named} over the last {self.window_samples:,} samples" if named else ""
        return f"{self.records:,} records held out{measured}"


class LearnedSpan(NamedTuple):
    """A part of a run: number of updates with samples, number of samples, and seconds of learning."""

    updates: int
    samples: int
    seconds: float


class History:
    """The state of a run, computed from the records of its `updates` topic. No I/O.

    Args:
        after_term: records of terms up to this one belong to earlier runs and are ignored.
    """

    def __init__(self, *, after_term: int = 0) -> None:
        self._after_term = after_term
        self._lineage = Lineage()
        self.updates = MetricTable(UPDATE_COLUMNS)
        self.evaluations = MetricTable(EVALUATION_COLUMNS)
        self.prequential = Prequential()
        self.held_out = Prequential(HELD_OUT_WINDOW)
        self.loss_trend = LossTrend()
        self.term = 0
        self.run_id = ""
        """The run id of the newest term; see `doll.records.control.TermStarted`."""
        self.version = 0
        self.samples_total = 0
        self.restarts = 0
        """The number of terms after the first: starts of a parameter server that resumed."""
        self._kept_version = 0  # later versions of earlier servers are void
        self._left: list[tuple[int, int]] = []  # versions [lo, hi) that a rollback has undone
        self.finished: Finished | None = None
        self.first_time_s = math.nan
        self.last_time_s = math.nan

    def feed(self, record: AnyRecord) -> bool:
        """Process a record. Return whether earlier rows have changed, because they became void or got a column."""
        if not isinstance(record, UpdatesRecord) or not self.is_current(record.term):
            return False
        change = self._lineage.feed(record)
        if isinstance(record, Update):
            return self._update(record, void=change is LineageChange.FENCED)
        if change is LineageChange.FENCED:
            return False
        if isinstance(record, TermStarted):
            return self._term_started(record, is_new_run=change is LineageChange.GENERATION)
        self.finished = record
        return False

    @classmethod
    def of_rows(cls, updates: Iterable[Mapping[str, float]], evaluations: Iterable[Mapping[str, float]]) -> Self:
        """Create the history of a run that has ended, from the rows of its tables, which also have a column `void`."""
        history = cls()
        for table, rows in ((history.updates, updates), (history.evaluations, evaluations)):
            for row in rows:
                if not row.keys() >= {"time_s", "term", "version"}:
                    continue  # the incomplete last line of a killed process
                void = bool(row.get("void"))
                table.append({name: value for name, value in row.items() if name != "void"}, void=void)
                if table is history.updates and not void:
                    history._counts(row)
        return history

    def _counts(self, row: Mapping[str, float], states: Mapping[str, bytes] | None = None) -> None:
        """Count a row of `updates` that is not void, with the encoded states of its metrics."""
        version, samples = int(row["version"]), int(row.get("n_samples", 0))
        loss, weight = row.get("prequential_loss", math.nan), row.get("weight", samples)
        metrics = {
            name.removeprefix("prequential_"): value
            for name, value in row.items()
            if name.startswith("prequential_") and name != "prequential_loss"
        }
        self.version, self.samples_total = version, int(row.get("samples_total", 0))
        self.prequential.add(version, samples, loss, metrics, weight, states)
        self.loss_trend.add(version, weight, loss)
        if math.isnan(self.first_time_s):
            self.first_time_s = row["time_s"]
        self.last_time_s = row["time_s"]

    @property
    def generation(self) -> int:
        """The newest generation; records of earlier generations are ignored."""
        return self._lineage.generation

    def evaluated(
        self, *, time_s: float, term: int, version: int, loss: float, metrics: Mapping[str, float]
    ) -> bool:  # fmt: skip
        """Add a held-out evaluation. Return whether it has a new metric, which adds a column.

        The row is void if its version was rolled back. An evaluation of another run is ignored.
        """
        if not self.is_current(term):
            return False
        row = {**metrics, "time_s": time_s, "term": term, "version": version, "loss": loss}
        return self.evaluations.append(row, void=term < self.term and version > self._kept_version)

    def is_current(self, term: int) -> bool:
        """Return whether records of this term belong to the current run."""
        return term > self._after_term and self._lineage.is_current(term)

    def _begin(self) -> bool:
        """Begin a new generation; return whether rows were deleted."""
        self.loss_trend = LossTrend()
        dropped = [table.drop_below(self.generation) for table in (self.updates, self.evaluations)]
        self.prequential, self.held_out = Prequential(), Prequential(HELD_OUT_WINDOW)
        self.term = self.restarts = self.version = self.samples_total = self._kept_version = 0
        self._left.clear()
        self.finished = None
        self.first_time_s = self.last_time_s = math.nan
        return any(dropped)

    def _term_started(self, record: TermStarted, *, is_new_run: bool) -> bool:
        dropped = is_new_run and self._begin()
        if self.term:
            self.restarts += 1
        self.term, self.run_id = record.term, record.run_id
        self.finished = None
        kept = self._kept_version = record.kept_version
        voided = self.updates.void_above(kept, record.term)
        voided += self.evaluations.void_above(kept, record.term)
        self.prequential.rollback(kept)
        self.held_out.rollback(kept)
        if record.rolled_back_to >= 0:
            self._left = [(lo, hi) for lo, hi in self._left if hi <= kept] + [(kept, record.resumed_version)]
        self.version = record.resumed_version
        last = self.updates.last()
        self.samples_total = int(last["samples_total"]) if last else 0
        return voided > 0 or dropped

    def _update(self, record: Update, *, void: bool) -> bool:
        service = [member.compute_s + member.fetch_s + member.store_s for member in record.members]
        weight = record.total_weight
        numbers, states = split_metrics(record.metrics)
        row: dict[str, float] = {
            "time_s": record.time_s,
            "term": record.term,
            "version": record.version,
            "n_samples": record.n_samples,
            "samples_total": record.samples_total,
            "batches": len(record.members),
            "prequential_loss": record.loss if weight else math.nan,
            "apply_s": record.apply_s,
            "grant_to_update_s": record.grant_to_update_s,
            "mean_compute_s": mean([member.compute_s for member in record.members]),
            "mean_service_s": mean(service),
            "weight": weight,
            "records": sum(map(_records, record.members)),
            **{f"prequential_{name}": value for name, value in numbers.items()},
            # Another name, because the metric over several updates is not the mean of these.
            **{f"update_{name}": value for name, value in update_values(states).items()},
        }
        if (score := record.held_out_score) is not None and score.weight > 0 and math.isfinite(score.loss_sum):
            sums, score_states = split_metrics(score.metric_sums)
            means = {name: value / score.weight for name, value in {**sums, "loss": score.loss_sum}.items()}
            row |= {f"held_out_{name}": value for name, value in means.items()} | {"held_out_samples": score.n_samples}
            if not void:
                loss = means.pop("loss")
                self.held_out.add(record.version, score.n_samples, loss, means, score.weight, score_states)
        if held_out := sum(len(member.held_out) for member in record.members):
            row["held_out_records"] = held_out
        grown = self.updates.append(row, void=void)
        if not void:
            self._counts(row, states)
        return grown

    def held_out_records(self) -> HeldOutRecords | None:
        """Return the records that were held out of the stream; None: there were none."""
        if "held_out_records" not in self.updates.names:
            return None
        running, window = self.held_out.running(), self.held_out.windowed()
        return HeldOutRecords(
            records=int(np.nansum(self.updates.valid("held_out_records"))),
            samples=running.samples, metrics=_finite(running),
            window_samples=window.samples, window_metrics=_finite(window),
        )  # fmt: skip

    @property
    def learned_updates(self) -> int:
        """The number of updates that count for a stop rule. Updates without a usable sample do not count."""
        is_empty = (self.updates.valid("n_samples") == 0) & (self.updates.valid("batches") > 0)
        return self.version - int(is_empty.sum()) - sum(hi - lo for lo, hi in self._left)

    def before(self, time_s: float) -> LearnedSpan:
        """Return the part that was learned before a Unix time. Its seconds are the sum, over all terms, of the time
        from the first to the last update. The time between two sessions of a run therefore does not count."""
        times, terms = self.updates.valid("time_s"), self.updates.valid("term")
        is_before = times < time_s
        samples, batches = self.updates.valid("n_samples")[is_before], self.updates.valid("batches")[is_before]
        seconds = sum(float(np.ptp(times[is_before & (terms == term)])) for term in np.unique(terms[is_before]))
        return LearnedSpan(int(((samples > 0) | (batches == 0)).sum()), int(samples.sum()), seconds)

    def held_out_loss_trend(self) -> LossTrend:
        """Return the trend of the held-out loss."""
        return LossTrend.without_windows(self.evaluations.valid("version"), self.evaluations.valid("loss"))

    def service_s(self) -> float:
        """Return μ_C, the mean seconds from a granted batch to its stored gradient (fetch + compute + store)."""
        seconds, batches = self.updates.valid("mean_service_s"), self.updates.valid("batches")
        known = np.isfinite(seconds) & (seconds > 0)
        return float(np.average(seconds[known], weights=batches[known])) if known.any() else math.nan


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; NaN if there are no values."""
    return math.fsum(values) / len(values) if values else math.nan


def _finite(means: Means) -> dict[str, float]:
    """Return the loss and the metrics that are known."""
    return {name: value for name, value in {"loss": means.loss, **means.metrics}.items() if math.isfinite(value)}


def _records(member: Member) -> int:
    """Return the number of records of a batch that were not refused."""
    return member.hi - member.lo - len(member.dead) - sum(hi - lo for lo, hi in (*member.gaps, *member.lost))
