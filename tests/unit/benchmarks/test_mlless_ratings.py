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


def test_runs_are_compared_with_the_first() -> None:
    rows = [row(0.0, updates=100, pushed=4_000_000, best=0.76), row(0.7, updates=120, pushed=1_000_000, best=0.8)]
    first, second = table(rows).splitlines()[1:]
    assert first.split() == ["0", "yes", "2.5", "100", "0.7600", "4.0", "1.0", "5.0", "1.00", "x", "+0.0", "%"]
    assert second.split() == ["0.7", "no", "2.5", "120", "0.8000", "1.0", "1.0", "2.0", "2.50", "x", "+20.0", "%"]
