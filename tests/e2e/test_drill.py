"""`doll drill` as a user runs it: everything is broken once, and the ledger balances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import commands
import pytest
from forked_commands import Program
from fuzzing import ALL_EXAMPLES

from doll_lab.drill.plan import FAULT_KINDS

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("startable_broker")]

# The tests of the world `brokers` lose one of three, too.
BROKERS = 3 if ALL_EXAMPLES else 1
JOB = """
job: shaky
task: {class: "examples.synthetic.task:Gaussian", args: {features: 4, hidden: [8]}}
data: {workers: 2, batch_size: 8}
source: {kind: python, of: examples.synthetic.source:gaussians, args: {features: 4, classes: 2}}
arrivals: {process: poisson, rate_per_s: 60}
training: {policy: {name: doll, group_size: 4}, optimizer: {name: sgd, lr: 0.05, momentum: 0.9}}
checkpoint: {every_updates: 5, every_s: 0.5}
stop: {updates: 1} # set aside by a drill
worker: {lease_s: 3, grant_timeout_s: 5, stall_timeout_s: 15, drain_s: 3}
"""


def test_a_short_drill_loses_nothing(tmp_path: Path, doll: Program) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    options = ("--faults", "30", "--seed", "7", "--brokers", str(BROKERS), "--replay", "--json")
    done = doll("drill", "job.yaml", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    (run,) = (tmp_path / "runs").iterdir()
    assert report == json.loads((run / "report.json").read_text())
    assert report["reason"] == "drill: 30 faults"
    assert sum(report["faults"].values()) == report["recoveries"] == 30
    # Each kind once; of several brokers one is broken, else Kafka as a whole; no worker has stages.
    left_out = {"kafka" if BROKERS > 1 else "broker", "stage", "shard"}
    assert set(report["faults"]) == {kind.name for kind in FAULT_KINDS if kind.target not in left_out}
    audit = report["audit"]
    assert (audit["ok"], audit["missing"], audit["duplicate"], audit["violations"]) == (True, 0, 0, [])
    assert audit["applied"] == report["samples"] > 0
    assert audit["dead"] == len(report["poisoned"]) >= 1
    assert audit["produced"] == audit["applied"] + audit["pending"] + audit["dead"]
    assert 0 < report["recovery_s"]["p50"] <= report["recovery_s"]["max"]
    assert report["ps_recovery_s"]["max"] > 0  # how long it is, docs/results.md says
    # Two servers were killed or replaced, so versions were voided or resumed: the drill was not idle.
    assert report["ps_resumes"] >= 2
    # The channel of grants and pushes was cut, the workers came back to it, and the model is that of a replay.
    assert report["control"]["kind"] == "auto"
    assert report["control"]["links_opened"]["local"] > 2
    assert report["control"]["links_broken"] > 0
    assert report["sets"]["applied_with_several_batches"] > 0
    assert report["replay"]["differences"] == []
    assert report["replay"]["terms"] >= 3
    assert report["replay"]["checkpoints"] >= 3
    log = json.loads((run / "faults.json").read_text())
    assert [entry["number"] for entry in log] == list(range(1, 31))
    assert all(entry["recovery_s"] > 0 for entry in log)


def test_a_drill_needs_a_source(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("\n".join(line for line in JOB.splitlines() if not line.startswith("source")))
    done = commands.doll("drill", tmp_path / "job.yaml")
    assert done.exit_code == 2
    assert "source" in done.stderr
