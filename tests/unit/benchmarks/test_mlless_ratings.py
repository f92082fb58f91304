"""The table of `benchmarks.live.mlless_ratings`, from reports of runs."""

from __future__ import annotations

import pytest
from benchmarks.live.mlless_ratings import Row, claims, table


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
    assert first == [
        "dense",
        "no limit",
        "0",
        "1 of 1",
        "2.5",
        "100",
        "0.7600",
        "4.0",
        "1.0",
        "5.0",
        "1.00 x",
        "0.0 %",
        "1.00 x",
    ]
    assert second == [
        "dense",
        "no limit",
        "0.7",
        "0 of 1",
        "2.5",
        "120",
        "0.8000",
        "1.0",
        "1.0",
        "2.0",
        "2.50 x",
        "20.0 %",
        "1.00 x",
    ]


def test_runs_of_one_seed_are_compared_with_each_other() -> None:
    rows = [
        row(0.0, updates=100, pushed=4_000_000, best=0.76), row(0.7, updates=120, pushed=1_000_000, best=0.76),
        row(0.0, updates=200, pushed=9_000_000, best=0.76), row(0.7, updates=260, pushed=3_000_000, best=None),
    ]  # fmt: skip
    [_, second] = table(rows).rows
    assert second[3] == "1 of 2"
    assert second[-3:-1] == ["2.50 ± 0.00 x", "25.0 ± 7.1 %"]


def test_kinds_of_factors_and_networks_are_compared_among_themselves() -> None:
    dense = [row(0.0, updates=100, pushed=4_000_000, best=0.76), row(0.7, updates=110, pushed=800_000, best=0.76)]
    slow = [each._replace(mbit_per_s=100.0, time_s=each.time_s * (3 - 2 * each.significance)) for each in dense]
    tables = [each._replace(factors="tables", fetched_bytes=9_000_000) for each in dense]
    assert [line[0] + line[1] for line in table([*dense, *slow, *tables]).rows] == [
        "denseno limit", "denseno limit", "dense100", "dense100", "tablesno limit", "tablesno limit"
    ]  # fmt: skip
    verdicts = {claim.claim.split(":")[0]: claim.verdict for claim in claims([*dense, *slow, *tables])}
    assert verdicts == {
        "PMF, dense, no limit": "reproduced", "PMF, dense, 100 Mbit/s": "reproduced",
        "PMF, tables, no limit": "not reproduced",
    }  # fmt: skip
    slower = [slow[0], slow[1]._replace(time_s=100.0)]
    assert claims(slower)[0].verdict == "not reproduced"
