"""Runs of one job under several policies, side by side: read from their run folders, and shown as a table, as plain
values, and on a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from doll.amounts import aligned, byte_size, clock, known, number, or_nan, usd
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.monitor.state.csv_file import rows_if_any
from doll.monitor.state.policy_summary import PolicySummary
from doll.monitor.views.best_policy import Best, best_of
from doll.monitor.views.page import points
from doll.monitor.views.panels import moving_mean, staleness_panel
from doll.monitor.views.run_report import INTERRUPTED
from doll.process.files import json_safe, read_json
from doll.theory.comparison import standard_error, t_factor
from doll.theory.cost import SECONDS_PER_HOUR

Series = npt.NDArray[np.float64]
LossKind = Literal["held-out", "prequential"]

NO_REPORT: Final = "it left no report"
WINDOW: Final = 50  # number of updates of the prequential mean
COLUMNS: Final = (
    "policy", "step", "time to loss", "samples to loss", "time", "samples", "updates", "loss", "accuracy", "gradients",
    "weights", "staleness", "blocked", "USD",
)  # fmt: skip
# Copied unchanged to the output of `--json`.
_PLAIN: Final = (
    "seed",
    "ok",
    "outcome",
    "seconds",
    "samples",
    "updates",
    "usd",
    "folder",
    "step_factor",
    "step_samples",
)

_UNEQUAL_STEPS: Final = (
    "the same training.optimizer.lr makes steps of different sizes here (column step): before you call a policy worse, "
    "run it again with the lr divided by its factor"
)


class Reached(NamedTuple):
    """The point at which a loss was reached."""

    seconds: float
    samples: float
    updates: float


@dataclass(frozen=True)
class LossCurve:
    """A loss after each of some updates, float64, shape (points,).

    Attributes:
        seconds: seconds since the first update.
    """

    seconds: Series
    samples: Series
    versions: Series
    loss: Series
    accuracy: Series = field(default_factory=lambda: np.zeros(0))  # NaN where the task has none

    @property
    def last_accuracy(self) -> float:
        """The accuracy at the end; NaN if the task has none."""
        return float(self.accuracy[-1]) if len(self.accuracy) else math.nan

    @property
    def best(self) -> float:
        """The smallest loss; NaN without losses."""
        finite = self.loss[np.isfinite(self.loss)]
        return float(finite.min()) if len(finite) else math.nan

    @property
    def last(self) -> float:
        """The loss at the end; NaN without losses."""
        return float(self.loss[-1]) if len(self.loss) else math.nan

    def reached(self, target: float) -> Reached | None:
        """Return the first point with a loss of at most `target`."""
        below = np.flatnonzero(self.loss <= target)
        if not len(below):
            return None
        at = int(below[0])
        return Reached(float(self.seconds[at]), int(self.samples[at]), int(self.versions[at]))


NO_LOSSES: Final = LossCurve(*[np.zeros(0)] * 4)


@dataclass(frozen=True)
class PolicyRun:
    """The run of one policy, possibly incomplete.

    Attributes:
        label: the policy and its options, in the form of the command line.
        outcome: reason why the run ended; if it failed, the error.
        ok: whether it ended by its stop rule and passed its audit.
        seconds: seconds of learning, from the first update to the last one.
        usd: cost of its workers for this time; NaN without a price.
        step_factor, step_samples: see `doll.config.step_size`; NaN if not known.
    """

    label: str
    outcome: str
    ok: bool
    seconds: float = math.nan
    samples: int = 0
    updates: int = 0
    usd: float = math.nan
    summary: PolicySummary | None = None
    losses: Mapping[LossKind, LossCurve] = field(default_factory=dict)
    folder: str = ""
    step_factor: float = math.nan
    step_samples: float = math.nan
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of its folder, or its label if it has none."""
        return Path(self.folder).name or self.label

    @property
    def is_open(self) -> bool:
        """Whether it has no report, so that it may still be running."""
        return self.outcome == NO_REPORT

    @property
    def step(self) -> str:
        """How many samples make one step, and how far it goes beside bsp if that differs; "-" if it is not known."""
        if not known(self.step_samples):
            return f"{self.step_factor:.3g} x bsp" if known(self.step_factor) else "-"
        is_other = abs(self.step_factor - 1) > 1e-9
        return f"{self.step_samples:,.0f} samples" + (f", {self.step_factor:.3g} x bsp" if is_other else "")

    def loss(self, kind: LossKind) -> LossCurve:
        return self.losses.get(kind, NO_LOSSES)


def workers_usd_per_h(config: JobConfig) -> float:
    """Return the price of all workers, USD per hour; NaN if the job states none."""
    price = config.plan.on_demand_usd_per_h
    return math.nan if price is None else config.data.workers * config.machines_per_worker * price


def read_run(label: str, folder: Path, *, usd_per_h: float, seed: int = 0) -> PolicyRun:
    """Return the run in `folder`, from its report and its tables. A killed run has no report.

    Args:
        usd_per_h: price of all workers, USD per hour; NaN if not known.
    """
    try:
        report = read_json(folder / "report.json")
    except ConfigError:
        report = {}
    losses = _losses(folder)
    if not report:
        curve = losses["prequential"]
        updates, samples = (int(column[-1]) if len(column) else 0 for column in (curve.versions, curve.samples))
        return PolicyRun(
            label, NO_REPORT, ok=False, updates=updates, samples=samples, losses=losses, folder=str(folder), seed=seed
        )
    error, audit = report.get("error"), report.get("audit")
    seconds, measures = or_nan(report.get("training_seconds")), report.get("measures")
    return PolicyRun(
        label,
        str(error or report.get("reason", "")),
        ok=not report.get("exit_code", 1) and audit is not None and bool(audit["ok"]),
        seconds=seconds,
        samples=int(report.get("samples") or 0),
        updates=int(report.get("updates") or 0),
        usd=usd_per_h * seconds / SECONDS_PER_HOUR,
        summary=None if measures is None else msgspec.convert(measures, PolicySummary, strict=False),
        losses=losses,
        folder=str(folder),
        step_factor=float(report.get("step_factor") or math.nan),
        step_samples=float(report.get("step_samples") or math.nan),
        seed=seed,
    )


def _losses(folder: Path) -> dict[LossKind, LossCurve]:
    updates, evaluations = (
        [row for row in rows_if_any(folder / name) if not row.get("void")]
        for name in ("updates.csv", "evaluations.csv")
    )
    if not updates:
        return {"held-out": NO_LOSSES, "prequential": NO_LOSSES}
    time_s, version, samples, n_samples, loss, weight, accuracy = (
        np.array([row.get(name, math.nan) for row in updates])
        for name in (
            "time_s", "version", "samples_total", "n_samples", "prequential_loss", "weight", "prequential_accuracy",
        )
    )  # fmt: skip
    weight = np.where(np.isnan(weight), n_samples, weight)  # earlier releases did not write weights
    since_s = time_s - time_s[0]
    means = (moving_mean(values, weight, WINDOW) for values in (loss, accuracy))
    prequential = LossCurve(since_s, samples, version, *means)
    # A version is evaluated some time after it was made: use the time when it was made.
    made = {int(number): at for at, number in enumerate(version)}
    known_rows = [row for row in evaluations if int(row.get("version", -1)) in made and "loss" in row]
    at = np.array([made[int(row["version"])] for row in known_rows], dtype=np.intp)
    errors = (np.array([row.get(name, math.nan) for row in known_rows]) for name in ("loss", "accuracy"))
    held_out = LossCurve(since_s[at], samples[at], version[at], *errors)
    return {"held-out": held_out, "prequential": prequential}


class _Measure(NamedTuple):
    """A measure by which policies are compared; NaN if a run does not have it."""

    name: str
    of: Callable[[PolicyRun], float]
    shown: Callable[[float], str]
    is_most: bool = False  # whether the highest value is best


@dataclass(frozen=True)
class Comparison:
    """The policies of one job, in the order of their runs.

    Attributes:
        target: target loss. None: the lowest loss that every policy with updates has reached.
        wanted: labels of all policies that should run.
        seeds: the seeds with which each policy should run; (): each run has the seed of the job.
        notes: remarks for readers, one line each.
    """

    job: str
    runs: Sequence[PolicyRun]
    target: float | None = None
    wanted: Sequence[str] = ()
    notes: Sequence[str] = ()
    seeds: Sequence[int] = ()

    @property
    def kind(self) -> LossKind:
        """The kind of loss: held-out if every policy with updates was evaluated, otherwise prequential."""
        learned = [run for run in self.runs if run.updates]
        return "held-out" if learned and all(len(run.loss("held-out").loss) for run in learned) else "prequential"

    @property
    def target_loss(self) -> float:
        """The loss to which times are measured; NaN if there is none."""
        if self.target is not None:
            return self.target
        bests = [best for run in self.runs if known(best := run.loss(self.kind).best)]
        return max(bests, default=math.nan)

    @property
    def missing(self) -> list[str]:
        """The policies that have not run, one for each seed that is missing."""
        done = {(run.label, run.seed if self.seeds else 0) for run in self.runs}
        return [label for seed in self.seeds or [0] for label in self.wanted if (label, seed) not in done]

    def reached(self, run: PolicyRun) -> Reached | None:
        """Return the point at which a policy reached the target."""
        return run.loss(self.kind).reached(self.target_loss)

    def to_loss(self, run: PolicyRun) -> Reached:
        """Return the point at which a policy reached the target; NaN if it did not."""
        return self.reached(run) or Reached(math.nan, math.nan, math.nan)

    def text(self) -> str:
        """Return the table, with explanations of its columns."""
        lines = [self.headline(), *aligned(self.table())] if self.runs else []
        lines += [f"{self.name(run)}: {'' if run.ok else 'failed: '}{_in_short(run.outcome)}" for run in self.runs]
        if self.missing:
            lines.append(f"not run: {', '.join(dict.fromkeys(self.missing))}")
        factors = {f"{run.step_factor:.3g}" for run in self.runs if known(run.step_factor)}
        notes = [*self.notes, *([_UNEQUAL_STEPS] if len(factors) > 1 else [])]
        return "\n".join([*lines, *(f"note: {note}" for note in notes), *filter(None, [self.conclusion()])])

    def name(self, run: PolicyRun) -> str:
        """Return the policy of a run; with several seeds also its seed."""
        return f"{run.label} (seed {run.seed})" if len(self.seeds) > 1 else run.label

    # --- which policy was best

    def _measures(self) -> list[_Measure]:
        def bytes_sent(run: PolicyRun) -> float:
            return math.nan if run.summary is None else run.summary.bytes.pushed + run.summary.bytes.fetched or math.nan

        kind, time = self.kind, _Measure("time to the loss", lambda run: self.to_loss(run).seconds, clock)
        quality = _Measure(f"{kind} accuracy", lambda run: run.loss(kind).last_accuracy, number, is_most=True)
        if not any(known(quality.of(run)) for run in self.runs):
            quality = _Measure(f"{kind} loss", lambda run: run.loss(kind).last, number)
        return [
            quality,
            time if known(self.target_loss) else _Measure("time", lambda run: run.seconds, clock),
            _Measure("bytes", bytes_sent, byte_size),
            _Measure("USD", lambda run: run.usd, usd),
        ]

    def best(self) -> list[tuple[_Measure, Best]]:
        """Return the best policy by each measure that at least two policies have.

        Only seeds with which every policy has run count. A policy with a run that failed, or without the value in a
        run, is not compared.
        """
        runs = {(run.label, run.seed): run for run in self.runs if run.outcome != INTERRUPTED}
        labels, seeds = dict.fromkeys(label for label, _ in runs), dict.fromkeys(seed for _, seed in runs)
        rows = {
            label: [runs[label, seed] for seed in seeds if all((other, seed) in runs for other in labels)]
            for label in labels
        }
        winners = []
        for measure in self._measures():
            values = {label: [measure.of(run) if run.ok else math.nan for run in row] for label, row in rows.items()}
            values = {label: row for label, row in values.items() if row and all(map(known, row))}
            if (best := best_of(measure.name, values, is_most=measure.is_most)) is not None:
                winners.append((measure, best))
        return winners

    def conclusion(self) -> str:
        """Return a sentence: the best policy by each measure, and whether the differences are more than noise; "" if
        there are fewer than two policies to compare."""
        if not (winners := self.best()):
            return ""
        count = winners[0][1].seeds
        noise = "whether a difference is more than noise is not known from one seed: run again with --seeds 3"
        if count > 1:
            noise = (
                f"a difference is noise if its mean over {count} seeds is within {t_factor(count):.3g} of its standard "
                "errors (paired t test, 5 %)"
            )
        return f"best: {'; '.join(best.text(measure.shown) for measure, best in winners)}. Note: {noise}"

    def headline(self) -> str:
        """Return a line that names the loss to which times are measured."""
        if not known(self.target_loss):
            return f"{self.job}: no loss"
        why = "" if self.target is not None else ", the best that every policy reached"
        return f"{self.job}: time and samples to a {self.kind} loss of {number(self.target_loss)}{why}"

    def table(self) -> list[tuple[str, ...]]:
        """Return the header and one row for each policy, without columns that have no values. Several runs of a policy
        are shown by their mean and its standard error."""
        labels = dict.fromkeys(run.label for run in self.runs)
        return self._table([[run for run in self.runs if run.label == label] for label in labels])

    def table_of_runs(self) -> list[tuple[str, ...]]:
        """Return the header and one row for each run."""
        return self._table([[run] for run in self.runs])

    def _table(self, rows: Sequence[Sequence[PolicyRun]]) -> list[tuple[str, ...]]:
        columns = zip(COLUMNS, *map(self.cells, rows), strict=True)
        return list(zip(*(column for column in columns if set(column[1:]) != {"-"}), strict=True))

    def cells(self, runs: Sequence[PolicyRun]) -> tuple[str, ...]:
        """Return the cells of the runs of one policy under `COLUMNS`; "-" for unknown values."""

        def cell(values: Sequence[float], shown: Callable[[float], str]) -> str:
            have = [value for value in values if known(value)]
            error = standard_error(have)
            part = f" ({len(have)} of {len(values)} runs)" if 0 < len(have) < len(values) else ""
            return f"{shown(fmean(have))}{f' ± {shown(error)}' if known(error) else ''}{part}" if have else "-"

        def count(values: Sequence[float]) -> str:
            return cell(values, lambda value: f"{value:,.0f}")

        def summed(value: Callable[[PolicySummary], float], shown: Callable[[float], str], alone: str) -> str:
            """Show a value of the summaries; of one run in the words of its property `alone`."""
            values = [math.nan if run.summary is None else value(run.summary) for run in runs]
            if len(values) == 1 and known(values[0]):
                return str(getattr(runs[0].summary, alone))
            return cell(values, shown)

        ends = [run.loss(self.kind) for run in runs]
        return (
            runs[0].label,
            runs[0].step,
            cell([self.to_loss(run).seconds for run in runs], clock),
            count([self.to_loss(run).samples for run in runs]),
            cell([run.seconds for run in runs], clock),
            count([run.samples for run in runs]),
            count([run.updates for run in runs]),
            cell([end.last for end in ends], number),
            cell([end.last_accuracy for end in ends], number),
            summed(lambda a: a.bytes.gradients if a.bytes.gradients_dense else math.nan, byte_size, "bytes_text"),
            summed(lambda a: a.bytes.weights or math.nan, byte_size, "weights_text"),
            summed(lambda a: or_nan(a.staleness.mean), number, "staleness_text"),
            summed(lambda a: a.blocked_share, lambda share: f"{100 * share:.0f} %", "blocked_and_void_text"),
            cell([run.usd for run in runs], usd),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `--json`: names of numbers contain their units; unmeasured values are None."""
        content: dict[str, Any] = json_safe(
            {
                "job": self.job,
                "loss": self.kind,
                "target_loss": self.target_loss,
                "target_given": self.target is not None,
                "seeds": list(self.seeds),
                "policies": [self._plain(run) for run in self.runs],
                "not_run": self.missing,
                "best": [best._asdict() for _, best in self.best()],
                "conclusion": self.conclusion(),
                "notes": list(self.notes),
            }
        )
        return content

    def _plain(self, run: PolicyRun) -> dict[str, Any]:
        reached = self.reached(run)
        names = ("staleness", "blocked_s", "blocked_share", "computing_s", "idle_s", "void_batches", "bytes")
        to_loss = dict.fromkeys(Reached._fields) if reached is None else reached._asdict()
        return {
            "policy": run.label,
            **{name: getattr(run, name) for name in _PLAIN},
            **{f"{name}_to_loss": value for name, value in to_loss.items()},
            "final_loss": run.loss(self.kind).last,
            "best_loss": run.loss(self.kind).best,
            "final_accuracy": run.loss(self.kind).last_accuracy,
            **(dict.fromkeys(names) if run.summary is None else run.summary.to_dict()),
        }


def comparison_page(comparison: Comparison) -> dict[str, Any]:
    """Return the content of the page; columns without values are left out."""
    runs, target = comparison.runs, comparison.target_loss
    heads, *rows = comparison.table_of_runs()
    reads = {
        comparison.name(run): run.summary.staleness.histogram
        for run in runs
        if run.summary and run.summary.staleness.reads
    }
    return {
        "job": comparison.job,
        "headline": comparison.headline().removeprefix(f"{comparison.job}: ") if runs else "no run yet",
        "columns": [*heads, "outcome"],
        "runs": {run.name: _row(comparison.name(run), run, row) for run, row in zip(runs, rows, strict=True)},
        "curves": {run.name: _curves(run.loss(comparison.kind)) for run in runs},
        "kind": comparison.kind,
        **({"target": float(f"{target:.5g}")} if known(target) else {}),
        "missing": comparison.missing,
        "conclusion": comparison.conclusion(),
        "notes": list(comparison.notes),
        "panels": [staleness_panel(reads)] if reads else [],
    }


def _row(label: str, run: PolicyRun, cells: tuple[str, ...]) -> dict[str, Any]:
    return {
        "label": label,
        "cells": [*cells, "no report yet" if run.is_open else run.outcome.strip().partition("\n")[0]],
        "tone": "good" if run.ok else "none" if run.is_open else "bad",
    }


def _curves(curve: LossCurve) -> dict[str, Any]:
    return {"seconds": points(curve.seconds, curve.loss), "samples": points(curve.samples, curve.loss)}


def _in_short(text: str) -> str:
    """Return the first and the last line of an error. The lines between them are the end of a log."""
    first, *more = text.strip().splitlines() or [""]
    return f"{first} ... {more[-1].strip()}" if more else first
