"""`doll spot` before anything starts: what a dry run prints, and the exit codes."""

from __future__ import annotations

import json

import pytest
from doll.cli.app import app
from paths import EXAMPLES
from typer.testing import CliRunner

EXAMPLE = EXAMPLES / "digits" / "market.yaml"


def test_a_dry_run_plans_and_predicts() -> None:
    done = CliRunner().invoke(app, ["spot", str(EXAMPLE), "--dry-run", "--seed", "3", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["feasible"]
    assert report["market"]["seed"] == 3
    adaptive, on_demand = report["predictions"]["adaptive"], report["predictions"]["on-demand"]
    assert adaptive["finish_s"] <= report["deadline_s"] == 190
    assert adaptive["cost_usd"] < on_demand["cost_usd"]
    assert report["on_demand"]["cost_usd"] == pytest.approx(150 / 3600 * 6 * 0.286 * 12)


def test_flags_change_the_market() -> None:
    arguments = ["--alpha", "0.95", "--cycle", "2000", "--speed-up", "10", "--deadline", "170"]
    done = CliRunner().invoke(app, ["spot", str(EXAMPLE), "--dry-run", "--json", *arguments])
    report = json.loads(done.stdout)
    assert (report["market"]["alpha"], report["market"]["speed_up"], report["deadline_s"]) == (0.95, 10, 170)


def test_a_deadline_that_cannot_be_met_is_exit_3_with_the_nearest_that_can() -> None:
    done = CliRunner().invoke(app, ["spot", str(EXAMPLE), "--deadline", "149s"])
    assert done.exit_code == 3
    assert "NOT FEASIBLE" in done.output
    assert "150" in done.output
