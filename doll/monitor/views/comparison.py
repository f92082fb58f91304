"""Runs of one job under several policies, side by side: read from their run folders, and shown as a table, as plain
values, and on a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from doll.amounts import aligned, clock, known, number, or_nan, usd
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.monitor.state.csv_file import rows_if_any
from doll.monitor.state.policy_summary import PolicySummary
from doll.monitor.views.page import points
from doll.monitor.views.panels import moving_mean, staleness_panel
from doll.process.files import json_safe, read_json
from doll.theory.cost import SECONDS_PER_HOUR

Series = npt.NDArray[np.float64]
LossKind = Literal["held-out", "prequential"]

NO_REPORT: Final = "it left no report"
WINDOW: Final = 50  # number of updates of the prequential mean
COLUMNS: Final = (
    "policy", "step", "time to loss", "samples to loss", "time", "samples", "updates", "loss", "gradients", "weights",
    "staleness", "blocked", "USD",
)  # fmt: skip
# Copied unchanged to the output of `--json`.
_PLAIN: Final = ("ok", "outcome", "seconds", "samples", "updates", "usd", "folder", "step_factor")

_UNEQUAL_STEPS: Final = (
    "the same training.optimizer.lr makes steps of different sizes here (column step): before you call a policy worse, "
    "run it again with the lr divided by its factor"
)


class Reached(NamedTuple):
    """The point at which a loss was reached."""

    seconds: float
    samples: int
    updates: int


@dataclass(frozen=True)
class LossCurve:
    """A loss after each of some updates, float64, shape (points,).

    Attributes:
        seconds: seconds since the first update.
        samples: number of samples in the model.
        versions: version number of the model.
    """

    seconds: Series
    samples: Series
    versions: Series
    loss: Series

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
        step_factor: see `doll.config.step_size`; NaN if not known.
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

    @property
    def name(self) -> str:
        """The name of its folder, or its label if it has none."""
        return Path(self.folder).name or self.label

    @property
    def is_open(self) -> bool:
        """Whether it has no report, so that it may still be running."""
        return self.outcome == NO_REPORT

    def loss(self, kind: LossKind) -> LossCurve:
        return self.losses.get(kind, NO_LOSSES)


def workers_usd_per_h(config: JobConfig) -> float:
    """Return the price of all workers, USD per hour; NaN if the job states none."""
    price = config.plan.on_demand_usd_per_h
    return math.nan if price is None else config.data.workers * config.machines_per_worker * price


def read_run(label: str, folder: Path, *, usd_per_h: float) -> PolicyRun:
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
            label, NO_REPORT, ok=False, updates=updates, samples=samples, losses=losses, folder=str(folder)
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
    )


def _losses(folder: Path) -> dict[LossKind, LossCurve]:
    updates, evaluations = (
        [row for row in rows_if_any(folder / name) if not row.get("void")]
        for name in ("updates.csv", "evaluations.csv")
    )
    if not updates:
        return {"held-out": NO_LOSSES, "prequential": NO_LOSSES}
    time_s, version, samples, n_samples, loss, weight = (
        np.array([row.get(name, math.nan) for row in updates])
        for name in ("time_s", "version", "samples_total", "n_samples", "prequential_loss", "weight")
    )
    weight = np.where(np.isnan(weight), n_samples, weight)  # earlier releases did not write weights
    since_s = time_s - time_s[0]
    prequential = LossCurve(since_s, samples, version, moving_mean(loss, weight, WINDOW))
    # A version is evaluated some time after it was made: use the time when it was made.
    made = {int(number): at for at, number in enumerate(version)}
    known_rows = [row for row in evaluations if int(row.get("version", -1)) in made and "loss" in row]
    at = np.array([made[int(row["version"])] for row in known_rows], dtype=np.intp)
    held_out = LossCurve(since_s[at], samples[at], version[at], np.array([row["loss"] for row in known_rows]))
    return {"held-out": held_out, "prequential": prequential}


@dataclass(frozen=True)
class Comparison:
    """The policies of one job, in the order of their runs.

    Attributes:
        target: target loss. None: the lowest loss that every policy with updates has reached.
        wanted: labels of all policies that should run.
        notes: remarks for readers, one line each.
    """

    job: str
    runs: Sequence[PolicyRun]
    target: float | None = None
    wanted: Sequence[str] = ()
    notes: Sequence[str] = ()

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
        """The policies that have not run."""
        done = {run.label for run in self.runs}
        return [label for label in self.wanted if label not in done]

    def reached(self, run: PolicyRun) -> Reached | None:
        """Return the point at which a policy reached the target."""
        return run.loss(self.kind).reached(self.target_loss)

    def text(self) -> str:
        """Return the table, with explanations of its columns."""
        lines = [self.headline(), *aligned(self.table())] if self.runs else []
        lines += [f"{run.label}: {'' if run.ok else 'failed: '}{_in_short(run.outcome)}" for run in self.runs]
        if self.missing:
            lines.append(f"not run: {', '.join(self.missing)}")
        factors = {f"{run.step_factor:.3g}" for run in self.runs if known(run.step_factor)}
        notes = [*self.notes, *([_UNEQUAL_STEPS] if len(factors) > 1 else [])]
        return "\n".join([*lines, *(f"note: {note}" for note in notes)])

    def headline(self) -> str:
        """Return a line that names the loss to which times are measured."""
        if not known(self.target_loss):
            return f"{self.job}: no loss"
        why = "" if self.target is not None else ", the best that every policy reached"
        return f"{self.job}: time and samples to a {self.kind} loss of {number(self.target_loss)}{why}"

    def table(self) -> list[tuple[str, ...]]:
        """Return the header and one row for each run, without columns that have no values."""
        columns = zip(COLUMNS, *map(self.cells, self.runs), strict=True)
        return list(zip(*(column for column in columns if set(column[1:]) != {"-"}), strict=True))

    def cells(self, run: PolicyRun) -> tuple[str, ...]:
        """Return the cells of a run under `COLUMNS`; "-" for unknown values."""
        reached, summary, last = self.reached(run), run.summary, run.loss(self.kind).last
        return (
            run.label,
            f"{run.step_factor:.3g} x bsp" if known(run.step_factor) else "-",
            "-" if reached is None else clock(reached.seconds),
            "-" if reached is None else f"{reached.samples:,}",
            clock(run.seconds) or "-",
            f"{run.samples:,}",
            f"{run.updates:,}",
            number(last) if known(last) else "-",
            "-" if summary is None or not summary.bytes.gradients_dense else summary.bytes_text,
            "-" if summary is None or not summary.bytes.weights else summary.weights_text,
            "-" if summary is None or not summary.staleness.reads else summary.staleness_text,
            "-" if summary is None or not known(summary.blocked_share) else summary.blocked_text + summary.void_text,
            usd(run.usd) if known(run.usd) else "-",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `--json`: names of numbers contain their units; unmeasured values are None."""
        content: dict[str, Any] = json_safe(
            {
                "job": self.job,
                "loss": self.kind,
                "target_loss": self.target_loss,
                "target_given": self.target is not None,
                "policies": [self._plain(run) for run in self.runs],
                "not_run": self.missing,
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
            **(dict.fromkeys(names) if run.summary is None else run.summary.to_dict()),
        }


def comparison_page(comparison: Comparison) -> dict[str, Any]:
    """Return the content of the page; columns without values are left out."""
    runs, target = comparison.runs, comparison.target_loss
    heads, *rows = comparison.table()
    reads = {run.label: run.summary.staleness.histogram for run in runs if run.summary and run.summary.staleness.reads}
    return {
        "job": comparison.job,
        "headline": comparison.headline().removeprefix(f"{comparison.job}: ") if runs else "no run yet",
        "columns": [*heads, "outcome"],
        "runs": {run.name: _row(run, row) for run, row in zip(runs, rows, strict=True)},
        "curves": {run.name: _curves(run.loss(comparison.kind)) for run in runs},
        "kind": comparison.kind,
        **({"target": float(f"{target:.5g}")} if known(target) else {}),
        "missing": comparison.missing,
        "notes": list(comparison.notes),
        "panels": [staleness_panel(reads)] if reads else [],
    }


def _row(run: PolicyRun, cells: tuple[str, ...]) -> dict[str, Any]:
    return {
        "label": run.label,
        "cells": [*cells, "no report yet" if run.is_open else run.outcome.strip().partition("\n")[0]],
        "tone": "good" if run.ok else "none" if run.is_open else "bad",
    }


def _curves(curve: LossCurve) -> dict[str, Any]:
    return {"seconds": points(curve.seconds, curve.loss), "samples": points(curve.samples, curve.loss)}


def _in_short(text: str) -> str:
    """Return the first and the last line of an error. The lines between them are the end of a log."""
    first, *more = text.strip().splitlines() or [""]
    return f"{first} ... {more[-1].strip()}" if more else first
