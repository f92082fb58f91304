"""What `benchmarks.live.mlless_scale_in` makes of its runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.live.mlless_scale_in import Row, claims, table


def row(*, is_on: bool, seed: int, time_s: float, usd: float) -> Row:
    return Row(is_on, seed, True, time_s, usd, 200, 0.76, int(is_on), 0, 0)


def test_a_run_is_read_from_its_report_and_the_journal_of_its_controller(tmp_path: Path) -> None:
    kinds = ["decision", "release", "decision", "release", "recall", "decision"]
    lines = [{"kind": kind, "by": "slowest_worker" if kind == "release" else ""} for kind in kinds]
    (tmp_path / "provision-ratings.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = {
        "best_loss": 0.77, "finish_s": 20.0, "cost_usd": 0.01, "updates": 150, "audit": {"missing": 0, "duplicate": 0},
    }  # fmt: skip
    got = Row.of(True, 3, 0.765, tmp_path, report)
    assert (got.num_released, got.is_reached) == (1, False)
    assert got.perf_per_usd == pytest.approx(5.0)
    assert table([got]).rows[0][-1] == "slowest_worker 2"


def test_runs_of_one_seed_are_compared_with_each_other() -> None:
    rows = [
        row(is_on=False, seed=0, time_s=20, usd=0.01), row(is_on=True, seed=0, time_s=16, usd=0.01),
        row(is_on=False, seed=1, time_s=40, usd=0.02), row(is_on=True, seed=1, time_s=40, usd=0.01),
    ]  # fmt: skip
    (claim,) = claims(rows)
    assert (claim.ours, claim.verdict) == ("1.25, 2.00", "reproduced")
    (claim,) = claims(
        [*rows, row(is_on=False, seed=2, time_s=9, usd=0.01), row(is_on=True, seed=2, time_s=9, usd=0.02)]
    )
    assert claim.verdict == "not reproduced"
    assert [line[0] for line in table(rows).rows] == ["off", "on"]
