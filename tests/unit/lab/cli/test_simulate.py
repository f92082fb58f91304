"""`doll simulate`: what it prints and writes, and wrong flags."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from doll.cli.app import app
from doll.provisioner.traces.model import Pool, Series, TraceSet, constant
from typer.testing import CliRunner, Result

from doll_lab.traces.export import write_folder

SMALL = ["--workers", "8", "--group-size", "4", "--batch-size", "32", "--rate", "50", "--updates", "300"]
JOB = """
job: line
task: {class: 'my_task.py:MyTask'}
data: {workers: 3, batch_size: 8}
source: {kind: python, of: examples.synthetic.source:gaussians}
arrivals: {rate_per_s: [4.0, 8.0, 12.0]}
training: {policy: {name: doll, group_size: 2}}
stop: {updates: 40}
"""


def simulate(*arguments: str | Path | float) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


@pytest.mark.slow
def test_doll_simulate_prints_measurement_beside_formula_and_writes_files(tmp_path: Path) -> None:
    result = simulate(*SMALL, "--spot", 4, "--alpha", 0.8, "--cycle", 20, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "300 updates in" in result.stdout
    assert "formula 2.8125 /s" in result.stdout
    with (tmp_path / "out" / "updates.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 300
    assert [int(row["update"]) for row in rows] == list(range(1, 301))
    assert all(0 <= int(row["workers_up"]) <= 8 for row in rows)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["updates"] == 300
    assert summary["rate_measured"] == pytest.approx(summary["rate_at_observed_uptime"], rel=0.02)
    assert "300 updates, rate / formula" in (tmp_path / "out" / "simulation.html").read_text()


def test_a_job_file_without_prices_is_simulated_at_those_of_the_shipped_table(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(JOB)
    shown = simulate(tmp_path / "my.yaml", "--instance", "c7g.xlarge", "--region", "eu-west-1")
    assert "0.155 USD/h on-demand: c7g.xlarge in eu-west-1, prices of early 2026" in shown.stdout
    costs = [
        json.loads(simulate(tmp_path / "my.yaml", *prices, "--json").stdout)["usd"]
        for prices in (
            [],
            ["--on-demand-price", 0.0725],
            ["--set", "plan={spot_usd_per_h: 1, on_demand_usd_per_h: 0.725}"],
        )
    ]
    assert costs[0] == pytest.approx(costs[1])
    assert costs[2] == pytest.approx(10 * costs[0])
    assert "c7g" not in simulate(*SMALL).stdout, "the paper's prices"


def test_the_same_seed_prints_the_same_json() -> None:
    first, second, other = (simulate(*SMALL, "--seed", seed, "--json").stdout for seed in (1, 1, 2))
    assert first == second != other
    assert json.loads(first)["workers"] == 8


def test_a_job_file_gives_streams_batch_policy_and_end(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(JOB)
    summary = json.loads(simulate(tmp_path / "my.yaml", "--json").stdout)
    assert (summary["workers"], summary["updates"]) == (3, 40)
    assert summary["rate_formula"] == pytest.approx(24 / 16)
    changed = simulate(tmp_path / "my.yaml", "--group-size", 3, "--updates", 5, "--set", "data.batch_size=4", "--json")
    assert json.loads(changed.stdout)["rate_formula"] == pytest.approx(24 / 12)


def test_spot_goes_to_the_slowest_streams(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(JOB)
    summary = json.loads(simulate(tmp_path / "my.yaml", "--spot", 1, "--alpha", 0.5, "--json").stdout)
    assert summary["rate_formula"] == pytest.approx((24 - 2) / 16)


def test_a_deadline_calls_the_planner() -> None:
    result = simulate(*SMALL, "--deadline", "2m", "--alpha", 0.8, "--cycle", 60, "--replan", 1)
    assert result.exit_code == 0, result.output
    assert "deadline 120.0 s: met" in result.stdout


def test_recorded_availability_moves_the_machines(tmp_path: Path) -> None:
    up = Series(np.array([0.0, 20.0, 40.0]), np.array([2.0, 0.0, 0.0]))
    pools = (Pool("a", 2, 0.3, constant(0.1, 0.0, 40.0), up), Pool("b", 2, 0.3, constant(0.1, 0.0, 40.0), up))
    write_folder([TraceSet("s", pools)], tmp_path)
    result = simulate(*SMALL, "--spot", 8, "--trace", tmp_path, "--pool", "b", "--json")
    summary = json.loads(result.stdout)
    assert summary["mean_up"] == pytest.approx(4.0, abs=0.5)
    assert simulate("--trace", tmp_path, "--pool", "c").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rate", "1", "--rate", "2", "--workers", "3"], "one for each of 3 workers"),
        (["--workers", "3", "--spot", "4"], "expected 0 .. 3"),
        (["--pool", "a"], "expected --trace"),
        (["--duration", "10", "--deadline", "5"], "expected --updates"),
        (["--alpha", "1.5", "--spot", "1"], "availability alpha"),
        (["--set", "a=1"], "expected a job file"),
        (["--rate", "0"], "arrival rate above 0"),
    ],
)
def test_wrong_flags_say_what_was_expected(arguments: list[str], expected: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())
