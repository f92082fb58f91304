"""What digits has learned stays: over a regrid to other batches and another policy, and as the begin of another job."""

from __future__ import annotations

import json
from pathlib import Path

import commands
import pytest
from doll.monitor.state.csv_file import read_rows
from doll.services import Services
from forked_commands import Program, environment
from killed_runs import left

pytestmark = pytest.mark.e2e


def accuracies(run: Path) -> dict[int, float]:
    """Held-out accuracy by version."""
    return {int(row["version"]): float(row["accuracy"]) for row in read_rows(run / "evaluations.csv")}


def test_digits_goes_on_from_what_it_has_learned(
    tmp_path: Path, job_name: str, services: Services, doll: Program
) -> None:
    common = ("--parent-folder", tmp_path / "runs", "--json", "--set", "stop.accuracy=null")
    faster = ("--set", "arrivals.rate_per_s=250")  # twice as fast as the example
    done = doll("up", "digits", *common, *faster, "--set", "stop.updates=160")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    before = accuracies(run)
    reached = before[160]
    assert reached > 0.8, "else this test would show little"
    assert before[min(before)] < reached - 0.2, "this run has learned"

    # Another job begins with these weights.
    begins = ("--set", f"job={job_name}", "--set", f"training.init_from={run}", "--set", "stop.updates=20")
    warm = doll("up", "digits", *common, *begins, **environment(services))
    assert warm.returncode == 0, warm.stderr
    assert "version 160 of digits (sha256 " in warm.stderr
    assert "6 tensors taken" in warm.stderr
    (other,) = set((tmp_path / "runs").iterdir()) - {run}
    first = accuracies(other)
    assert min(first) < 10
    assert first[min(first)] > reached - 0.05
    assert json.loads((other / "init_from.json").read_text())["missing"] == []
    refused = commands.doll("resume", other, "--set", "training.init_from=elsewhere.pt")
    assert refused.exit_code == 2
    assert "this run has begun and goes on with its own weights" in refused.stderr

    # And the run itself goes on, with other batches, another policy and another optimizer.
    regridded = doll(
        "regrid", run, "--batch-size", "48", "--policy", "essp:staleness=3", "--set", "stop.samples=30000",
        "--set", "stop.updates=null",
        "--set", "arrivals.rate_per_s=500", "--set", "training.optimizer={name: sgd, lr: 0.01}", "--json",
    )  # fmt: skip
    assert regridded.returncode == 0, regridded.stderr
    report = json.loads(regridded.stdout)
    assert report["audit"]["ok"], report["audit"]
    assert report["audit"]["applied"] >= 30_000 > 160 * 128
    later = {version: accuracy for version, accuracy in accuracies(run).items() if version > 160}
    assert later[min(later)] > reached - 0.1
    assert min(later.values()) > reached - 0.1
    assert later[max(later)] >= reached - 0.03
    assert left(run) == []
