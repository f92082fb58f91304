"""`doll spot` as a user runs it: workers are killed by their market and replaced, and the books balance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from doll.services import Services
from forked_commands import Program, environment

pytestmark = pytest.mark.e2e

JOB = """
job: market
task: {class: "examples.synthetic.task:Gaussian", args: {features: 4, hidden: [8]}}
data: {workers: 3, batch_size: 10}
source: {kind: python, of: examples.synthetic.source:gaussians, args: {features: 4, classes: 2}}
arrivals: {process: poisson, rate_per_s: 20, while_down: pause}
training: {policy: {name: doll, group_size: 2}, optimizer: {name: sgd, lr: 0.05}}
checkpoint: {every_updates: 5, every_s: 0.5}
stop: {updates: 60} # 20 s of three streams
worker: {lease_s: 4, drain_s: 2}
plan: {deadline_s: 36, alpha: 0.6, cycle_s: 100, spot_usd_per_h: 0.158, on_demand_usd_per_h: 0.286, boot_s: 2}
provision: {spot_stable_s: 4}
fleet: {kind: processes, speed_up: 10, notice_s: 3, no_notice_share: 0.5, boot_s: 1.7}
"""
SEED = 20  # all are up at first; two go without a word after 5 and 9 s, one with a notice after 10 s


def test_a_job_on_a_market_ends_with_its_books_balanced(
    tmp_path: Path, services: Services, job_name: str, doll: Program
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    command = ("spot", "job.yaml", "--set", f"job={job_name}", "--seed", str(SEED), "--json")
    done = doll(*command, cwd=tmp_path, **environment(services))
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    (run,) = (tmp_path / "runs").iterdir()
    assert report == json.loads((run / "report.json").read_text())
    assert report["updates"] == 60
    assert report["prequential"]["samples"] == 1200

    audit = report["audit"]
    assert (audit["ok"], audit["missing"], audit["duplicate"], audit["violations"]) == (True, 0, 0, [])
    assert audit["applied"] == report["samples"] == 1200

    # Machines came and went, and at least one worker died at work.
    machines = json.loads((run / "instances.json").read_text())
    preempted = [machine for machine in machines if machine["preempted"]]
    assert report["preemptions"] == len(preempted)
    assert report["preemptions_killed"] >= 1
    killed = [machine for machine in preempted if machine["exit_code"] == -9]
    assert len(killed) == report["preemptions_killed"]
    assert report["instances"] == len(machines) > 3
    assert all(machine["instance"]["state"] == "ended" for machine in machines)
    assert not any(psutil.pid_exists(machine["pid"]) for machine in machines if machine["pid"] is not None)

    # Whether a busy machine keeps the deadline is its own business; the figures have to agree with each other.
    assert report["deadline_met"] == (report["finish_s"] <= report["deadline_s"] == 36)
    assert 0 < report["cost_usd"] <= report["cost_until_terminated_usd"]
    assert report["all_on_demand_usd"] == pytest.approx(20 / 3600 * 3 * 0.286 * 10)  # the meter bills market time
    assert 0 < report["cost_predicted_usd"] < report["all_on_demand_usd"] * 1.2
    assert report["moves"] == len(report["moves_log"])
    assert all(move["reason"] for move in report["moves_log"])
    decisions = [json.loads(line) for line in (run / f"provision-{report['job']}.jsonl").read_text().splitlines()]
    assert any(entry["kind"] == "interrupted" for entry in decisions)
    assert len(report["spot_unavailable_s"]) == 3
    assert '"all_on_demand_usd"' in (run / "report.html").read_text(), "the market"
