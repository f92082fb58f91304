"""`doll regrid` of a run: killed at any point it is the grid before or the new one, and the audit covers all grids."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import commands
import pytest
import yaml
from doll.process.fault_points import ENV
from doll.services import Services
from forked_commands import Program, environment
from killed_runs import killed_run, left, version

pytestmark = pytest.mark.e2e

# In the order of `doll.run.local.regrid`: batch and group size that are asked for; whether the next command finds them.
POINTS = {
    "regrid.after_next_job": ((12, 3), False), "regrid.after_claim": ((12, 3), False),
    "ps.mid_checkpoint": ((12, 3), False), "regrid.after_checkpoint": ((12, 3), True),
    "regrid.after_copy": ((10, 2), True), "regrid.after_job": ((12, 3), True),
}  # fmt: skip


def job_of(run: Path) -> tuple[int, int]:
    job = yaml.safe_load((run / "job.yaml").read_text())
    return job["data"]["batch_size"], job["training"]["policy"]["group_size"]


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["audit"]["ok"], report["audit"]
    assert report["audit"]["produced"] == report["audit"]["applied"] + report["audit"]["pending"]
    assert isinstance(report, dict)
    return report


def test_a_killed_run_goes_on_with_other_batches_and_another_policy(
    tmp_path: Path, job_name: str, services: Services, doll: Program
) -> None:
    env = environment(services)
    run = killed_run(doll, tmp_path, job_name, **env)
    for options, words in (
        ((), "expected another batch size, policy, optimizer or number of workers"),
        (("--policy", "sap"), "--policy: expected registered policies"),
        (("--policy", "essp:stalenes=3"), "unknown key (did you mean 'staleness'?)"),
        (("--batch-size", "12", "--set", "task.args.hidden=[9]"), "task.args.hidden: expected [8], got [9]"),
        (("--set", "data.samples_per_record=2"), "data.samples_per_record: expected 1, got 2"),
        (("--policy", "asp", "--group-size", "3"), "training.policy.group_size: unknown key"),
    ):
        refused = commands.doll("regrid", run, *options, **env)
        assert refused.exit_code == 2, refused.stderr
        assert words in refused.stderr
    assert not (run / "job.next.yaml").exists()
    grid = (8, 2)
    for point, (wanted, is_new) in POINTS.items():
        options = ("--batch-size", str(wanted[0]), "--group-size", str(wanted[1]))
        lr = ("--set", "training.optimizer.lr=0.05")
        killed = doll("regrid", run, *options, *lr, **env, **{ENV: f"{point}@1"})
        assert killed.returncode == -9, (point, killed.stderr)
        grid = wanted if is_new else grid
        shown = commands.doll("config", "show", run, "--json")
        assert json.loads(shown.stdout)["data"]["batch_size"] == grid[0], point
        assert not (run / "job.next.yaml").exists(), point
        assert job_of(run) == grid, point
    # What was killed goes on, in the new grid by a resume.
    saved = version(run)
    report = report_of(doll("resume", run, "--set", f"stop.updates={saved + 20}", "--json", **env))
    learned = saved * 16 + 20 * 36
    assert report["samples"] == learned
    assert job_of(run) == (12, 3)
    assert yaml.safe_load((run / "job.grid-0.yaml").read_text())["data"]["batch_size"] == 8

    steps = ("--batch-size", "10", "--policy", "essp:staleness=2", "--workers", "1", "--set", "stop.updates=null")
    done = doll("regrid", run, *steps, "--set", f"stop.samples={learned + 480}", "--json", **env)
    report = report_of(done)
    assert f"regridded {job_name} at version {saved + 20}: batches of 10 records from offsets" in done.stderr
    assert "the optimizer runs in the workers" in done.stderr
    assert report["audit"]["applied"] >= learned + 480  # type: ignore[index]
    stop = ("--set", f"stop.samples={learned + 1000}")
    report_of(doll("regrid", run, "--policy", "doll:group_size=2", *stop, "--json", **env))
    assert sorted(path.name for path in run.glob("job.grid-*.yaml")) == [f"job.grid-{n}.yaml" for n in range(5)]
    assert left(run) == []
