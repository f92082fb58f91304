"""The table of `benchmarks.live.mlless_ratings`, from reports of runs."""

from __future__ import annotations

import pytest
from benchmarks.live.mlless_ratings import Row, table


def row(significance: float, *, updates: int, pushed: int, best: float | None) -> Row:
    report = {
        "measures": {"bytes": {"pushed": pushed, "fetched": 1_000_000}}, "best_loss": best, "training_seconds": 2.5,
        "updates": updates,
    }  # fmt: skip
    return Row.of(significance, report, 0.765)


@pytest.mark.parametrize(("best", "is_reached"), [(0.765, True), (0.766, False), (None, False)])
def test_a_run_has_reached_the_loss_of_the_job_or_not(best: float | None, is_reached: bool) -> None:
    assert row(0.0, updates=1, pushed=1, best=best).is_reached == is_reached


def test_runs_are_compared_with_the_first_value() -> None:
    rows = [row(0.0, updates=100, pushed=4_000_000, best=0.76), row(0.7, updates=120, pushed=1_000_000, best=0.8)]
    first, second = table(rows).rows
    assert first == ["0", "1 of 1", "2.5", "100", "0.7600", "4.0", "1.0", "5.0", "1.00 x", "0.0 %"]
    assert second == ["0.7", "0 of 1", "2.5", "120", "0.8000", "1.0", "1.0", "2.0", "2.50 x", "20.0 %"]


def test_runs_of_one_seed_are_compared_with_each_other() -> None:
    rows = [
        row(0.0, updates=100, pushed=4_000_000, best=0.76), row(0.7, updates=120, pushed=1_000_000, best=0.76),
        row(0.0, updates=200, pushed=9_000_000, best=0.76), row(0.7, updates=260, pushed=3_000_000, best=None),
    ]  # fmt: skip
    [_, second] = table(rows).rows
    assert second[1] == "1 of 2"
    assert second[-2:] == ["2.50 ± 0.00 x", "25.0 ± 7.1 %"]
