"""A result of `make bench`: ratios, shares, goals, and the tables of both kinds."""

from __future__ import annotations

from typing import Any

from benchmarks.goals import goals
from benchmarks.report import conditions, summarize, tables

DOLL = {
    "apply_share": 0.01, "apply_ms": 1.0, "compute_ms": 9.0, "fetch_ms": 0.2, "store_ms": 0.3,
    "grant_to_fetch_p50_ms": 0.6, "grant_to_fetch_p99_ms": 12.0,
    "grant_to_gradient_p50_ms": 0.7, "grant_to_gradient_p99_ms": 13.0, "gradient_to_push_p50_ms": 0.7,
    "gradient_to_push_p99_ms": 2.0, "grant_to_update_p50_ms": 50.0, "grant_to_update_p99_ms": 60.0, "period_ms": 52.0,
}  # fmt: skip


def runs_of(doll: float, ddp: float, share: float) -> list[dict[str, Any]]:
    """One repetition of the small model at K = 8."""
    figures = [("bare", 90.0), ("doll", doll), ("bare", 110.0), ("ddp", ddp)]
    return [
        {
            "section": "A", "name": f"small K=8 {name}", "value": value, "others": 0.01, "share": share,
            **(DOLL if name == "doll" else {}),
        }
        for name, value in figures
    ]  # fmt: skip


def row(section: str, name: str, value: float) -> dict[str, Any]:
    return {"section": section, "name": name, "value": value, "others": 0.0}


def test_a_ratio_is_to_the_mean_of_the_bare_runs_before_and_after() -> None:
    rows = {row["name"]: row for row in summarize(runs_of(80.0, 95.0, 0.8) + runs_of(82.0, 95.0, 0.8))}
    assert rows["small K=8 bare"]["n"] == 4
    assert rows["small K=8 doll"]["ratio"] == {"median": 0.81, "low": 0.8, "high": 0.82}
    assert rows["small K=8 doll"]["grant_to_fetch_p99_ms"] == 12.0


def test_goals_are_beside_ddp_of_the_same_run() -> None:
    met = {goal.what: goal.met for goal in goals(summarize(runs_of(90.0, 95.0, 0.81)))}
    assert met == {
        "small K=8 ratio": True, "small K=8 share": True, "small K=8 apply / compute": True,
        "small K=8 grant to fetch, p50": True, "small K=8 grant to fetch, p99": False,
    }  # fmt: skip
    met = {goal.what: goal.met for goal in goals(summarize(runs_of(88.0, 95.0, 0.79)))}
    assert (met["small K=8 ratio"], met["small K=8 share"]) == (False, False)  # 0.93 x 0.95 = 0.8835


def test_a_goal_without_its_reference_is_open() -> None:
    rows = summarize([run for run in runs_of(90.0, 95.0, 0.9) if not run["name"].endswith("ddp")])
    assert goals(rows)[0].met is None


def test_goals_of_intake_and_of_the_update_rate() -> None:
    rows = summarize(
        [
            row("B", "stored m=64", 410_000.0), row("B", "stored m=1", 99_000.0), row("B", "live m=64", 1.0),
            row("B", "stored json", 330_000.0), row("E", "update rate / prediction", 1.012),
        ]
    )  # fmt: skip
    assert [(goal.what, goal.met) for goal in goals(rows)] == [
        ("intake stored m=64", True), ("intake stored m=1", False), ("intake stored json", True),
        ("update rate / prediction", False),
    ]  # fmt: skip


def test_both_kinds_of_tables_show_what_was_missed() -> None:
    rows = summarize(runs_of(80.0, 95.0, 0.7))
    shown = tables(rows)
    assert [len(table.rows) for table in shown] == [3, 1, 5]
    goals_table = shown[-1]
    assert "| small K=8 share | >= 0.800 | 0.700 | **NO** |" in goals_table.markdown()
    assert "**" not in goals_table.text()
    assert "NO" in goals_table.text()


def test_the_conditions_say_when_where_and_how() -> None:
    result = {
        "began": "2026-11-22T10:00:00", "commit": "32bd89a", "cores": 2, "load_before": 0.1, "repetitions": 5,
        "seconds": 6.0, "took_s": 1210, "rows": summarize(runs_of(80.0, 95.0, 0.7)), "channel": "local",
        "command": "python -m benchmarks.pipeline",
    }  # fmt: skip
    text = conditions(result)
    for part in (
        "2026-11-22 10:00:00",
        "commit 32bd89a",
        "2 cores",
        "load 0.1",
        "1% to 1%",
        "5 repetitions of 6 s",
        "`local`",
        "20 minutes",
    ):
        assert part in text
