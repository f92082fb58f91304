"""The experiment with a limit of memory, with runs that were not made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.live import stage_memory
from benchmarks.live.experiment import Options, Report
from benchmarks.live.stage_memory import SETTINGS, Run

OUT_OF_MEMORY = "worker-0 cannot run this job; the end of its log:\ndoll: out of memory: a process of this worker needs"


def report_of(monkeypatch: pytest.MonkeyPatch, pipeline: Run, undivided: Run) -> Report:
    def up(name: str, folder: Path, options: Options, wish: Any, limit_bytes: float, *changes: str) -> Run:
        if changes:
            return pipeline
        return undivided if limit_bytes < 1e9 else Run(name, 0, 12, 20.0, 2.2, (600_000_000,), "")

    fake: Callable[..., Run] = up
    monkeypatch.setattr(stage_memory, "_up", fake)
    return stage_memory.run(Path(), Options(settings=SETTINGS))


TRAINED = Run("a pipeline", 0, 12, 51.0, 2.3, (90_000_000, 120_000_000), "")
REFUSED = Run("undivided", 2, 0, None, None, (90_000_000,), OUT_OF_MEMORY)


@pytest.mark.parametrize(
    ("pipeline", "undivided", "verdict"),
    [
        (TRAINED, REFUSED, "reproduced"),
        (REFUSED, REFUSED, "not reproduced"),
        (TRAINED, TRAINED, "not reproduced"),
        (TRAINED._replace(updates=3), REFUSED, "not reproduced"),
        (TRAINED, REFUSED._replace(error="Kafka does not answer"), "not reproduced"),
    ],
)
def test_the_claim_needs_both_runs(
    monkeypatch: pytest.MonkeyPatch, pipeline: Run, undivided: Run, verdict: str
) -> None:
    report = report_of(monkeypatch, pipeline, undivided)
    (claim,) = report.claims
    assert claim.verdict == verdict
    (table,) = report.tables
    assert [row[1] for row in table.rows][2] == "trained"
    assert all(len(row) == len(table.columns) for row in table.rows)
