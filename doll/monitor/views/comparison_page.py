"""Runs side by side on the page, as plain values. Pure."""

from __future__ import annotations

from typing import Any

from doll.monitor.state.formats import known
from doll.monitor.views.comparison import COLUMNS, Comparison, LossCurve, PolicyRun
from doll.monitor.views.page import points
from doll.monitor.views.panels import staleness_panel


def comparison_page(comparison: Comparison) -> dict[str, Any]:
    """All that the page shows; what is known of no run has no column."""
    runs, target = comparison.runs, comparison.target_loss
    columns = [(head, *cells) for head, *cells in zip(COLUMNS, *map(comparison.cells, runs), strict=True)]
    shown = [column for column in columns if set(column[1:]) != {"-"}]
    heads, *rows = zip(*shown, strict=True)
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
