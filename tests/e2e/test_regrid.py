"""`doll regrid` of a run: killed at any point it is the grid before or the new one, and the audit covers all grids."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from doll.process.fault_points import ENV
from killed_runs import doll, killed_run, left, version

pytestmark = pytest.mark.e2e

# In the order of `doll.run.local.regrid`; what the run's job file is after the next command.
POINTS = {
    "regrid.after_next_job": "before", "regrid.after_claim": "before", "ps.mid_checkpoint": "before",
    "regrid.after_checkpoint": "after", "regrid.after_copy": "after", "regrid.after_job": "after",
}  # fmt: skip
REGRID = ("--batch-size", "12", "--group-size", "3", "--set", "training.optimizer.lr=0.05")


def job_of(run: Path) -> tuple[int, int]:
    job = yaml.safe_load((run / "job.yaml").read_text())
    return job["data"]["batch_size"], job["training"]["policy"]["group_size"]


def copy_of(run: Path, to: Path) -> Path:
    """The same run once more, with its broker's data and its checkpoints."""
    shutil.copytree(run, to)
    (to / "job.yaml").write_text((run / "job.yaml").read_text().replace(str(run), str(to)))
    return to


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["audit"]["ok"], report["audit"]
    assert report["audit"]["produced"] == report["audit"]["applied"] + report["audit"]["pending"]
    assert isinstance(report, dict)
    return report


def test_a_killed_run_goes_on_with_other_batches_and_another_policy(tmp_path: Path, job_name: str) -> None:
    run = killed_run(tmp_path, job_name)
    for options, words in (
        ((), "expected another batch size, policy, optimizer or number of workers"),
        (("--policy", "sap"), "--policy: expected registered policies"),
        (("--policy", "essp:stalenes=3"), "unknown key (did you mean 'staleness'?)"),
        (("--batch-size", "12", "--set", "task.args.hidden=[9]"), "task.args.hidden: expected [8], got [9]"),
        (("--set", "data.samples_per_record=2"), "data.samples_per_record: expected 1, got 2"),
        (("--policy", "asp", "--group-size", "3"), "training.policy.group_size: unknown key"),
    ):
        refused = doll("regrid", run, *options)
        assert refused.returncode == 2, refused.stderr
        assert words in refused.stderr
    assert not (run / "job.next.yaml").exists()
    copies: dict[str, Path] = {}
    for point in POINTS:
        copies[point] = copy_of(run, tmp_path / point)
        killed = doll("regrid", copies[point], *REGRID, **{ENV: f"{point}@1"})
        assert killed.returncode == -9, (point, killed.stderr)
        shown = doll("config", "show", copies[point], "--json")
        batch_size = json.loads(shown.stdout)["data"]["batch_size"]
        assert batch_size == (8 if POINTS[point] == "before" else 12), point
        assert not (copies[point] / "job.next.yaml").exists(), point
        assert job_of(copies[point]) == ((8, 2) if POINTS[point] == "before" else (12, 3))
    # What was killed goes on: in the new grid by a resume, and in the one before, with another regrid.
    saved = version(run)
    after = copies["regrid.after_copy"]
    report = report_of(doll("resume", after, "--set", f"stop.updates={saved + 20}", "--json"))
    assert report["samples"] == saved * 16 + 20 * 36
    assert job_of(after) == (12, 3)
    assert yaml.safe_load((after / "job.grid-0.yaml").read_text())["data"]["batch_size"] == 8

    before = copies["regrid.after_claim"]
    stop = ("--set", f"stop.samples={saved * 16 + 480}", "--json")
    done = doll("regrid", before, "--batch-size", "10", "--policy", "essp:staleness=2", "--workers", "1", *stop)
    report = report_of(done)
    assert f"regridded {job_name} at version {saved}: batches of 10 records from offsets" in done.stderr
    assert "the optimizer runs in the workers" in done.stderr
    assert report["audit"]["applied"] >= saved * 16 + 480  # type: ignore[index]
    done = doll(
        "regrid", before, "--policy", "doll:group_size=2", "--set", f"stop.samples={saved * 16 + 1000}", "--json"
    )
    report_of(done)
    assert sorted(path.name for path in before.glob("job.grid-*.yaml")) == ["job.grid-0.yaml", "job.grid-1.yaml"]
    assert left(before) == []
