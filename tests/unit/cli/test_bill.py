"""`doll bill` on a run folder: its text, its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doll.cli.app import app
from typer.testing import CliRunner

START_S = 1_764_576_000.0  # 2025-12-01 08:00 UTC


def bill(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bill", "digits", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run whose provisioner has ended one machine; another one runs."""
    ended: dict[str, Any] = {
        "kind": "ended", "turn": 3, "id": "i-1", "slot": 0, "market": "spot", "usd": 0.05, "launched_s": START_S,
        "ended_s": START_S + 3600,
    }  # fmt: skip
    decision = {"kind": "decision", "turn": 9, "time_s": START_S + 7200, "started_s": START_S, "spent_usd": 0.08}
    lines = [json.dumps(entry) + "\n" for entry in (ended, decision)]
    (tmp_path / "provision-digits.jsonl").write_text("".join(lines))
    return tmp_path


def test_a_bill_has_each_machine_each_service_and_the_sum(run_folder: Path) -> None:
    code, out, _ = bill("--run-folder", run_folder, "--set", "plan.services.run_anyway=[kafka]")
    assert code == 0
    assert "i-1  0.050 USD" in out
    assert "of the workers 0.030 USD are of machines that run" in out
    assert "not counted: runs anyway" in out
    assert "sum, with workers" in out
    assert f"{0.08 + 2 * 0.28:.2f} USD" in out.splitlines()[-1]
    code, out, _ = bill("--run-folder", run_folder, "--stack", "none", "--json")
    assert json.loads(out)["categories"][-1] == {"name": "sum", "doll_usd": pytest.approx(0.08), "aws_usd": None}


def test_it_is_compared_with_a_report(run_folder: Path) -> None:
    report = run_folder / "cur.csv"
    report.write_text(
        "lineItem/UsageStartDate,lineItem/UnblendedCost,lineItem/ResourceId,lineItem/UsageType\n"
        "2025-12-01T08:00:00Z,0.06,i-1,SpotUsage:c7g.large\n"
    )
    code, out, _ = bill("--run-folder", run_folder, "--cur", report)
    assert code == 0
    assert "by 1 lines of AWS's report" in out
    assert any(line.split() == ["i-1", "0.050", "0.060", "0.010"] for line in out.splitlines())
    report.write_text("nothing\n")
    code, out, err = bill("--run-folder", run_folder, "--cur", report)
    assert (code, out) == (2, "")
    assert "no column line_item_unblended_cost" in err


def test_a_run_without_machines_has_no_bill(tmp_path: Path) -> None:
    code, _, err = bill("--run-folder", tmp_path)
    assert code == 2
    assert "no decision yet" in err
