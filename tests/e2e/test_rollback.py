"""`doll rollback` of a run: killed at any point it is as it was or rolled back, and the audit covers what was left."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import commands
import pytest
from doll.process.fault_points import ENV, MARKER_ENV
from doll.run.replay import replay_version
from doll.run.target import open_target
from doll.services import Services
from doll.storage.stores import open_store
from forked_commands import Program, environment
from killed_runs import counts_of, killed_run, left

pytestmark = pytest.mark.e2e

KEPT = ("--set", "checkpoint.keep=100", "--set", "checkpoint.event_log=true")
# In the order of `doll.ps.rollback`, and whether the run is rolled back then.
POINTS = {"rollback.after_claim": False, "ps.mid_checkpoint": False, "rollback.after_checkpoint": True}


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    audit = report["audit"]
    assert audit["ok"], audit
    assert (audit["missing"], audit["duplicate"], audit["lost"]) == (0, 0, 0)
    assert audit["produced"] == audit["applied"] + audit["pending"] + audit["skipped"]
    return report


def test_a_run_goes_back_through_three_kills_and_counts_what_it_skipped(
    tmp_path: Path, job_name: str, services: Services, doll: Program
) -> None:
    env = environment(services)
    run = killed_run(doll, tmp_path, job_name, *KEPT, **env)
    versions = [version for _, version in open_store(open_target(run, []).config, run).versions()]
    newest, to = counts_of(run), versions[1]
    then = counts_of(run, to)
    for options, words in (
        (("--to", "9999", "--skip"), "an alias (none) or latest, got '9999'"),
        (("--to", "../1", "--skip"), "got '../1'"),
        (("--to", str(to)), "expected --again, to learn again what was learned since, or --skip"),
    ):
        refused = commands.doll("rollback", run, *options, **env)
        assert refused.exit_code == 2, refused.stderr
        assert words in " ".join(refused.stderr.split())
    for point, is_back in POINTS.items():
        killed = doll("rollback", run, "--to", str(to), "--skip", **env, **{ENV: f"{point}@1"})
        assert killed.returncode == -9, (point, killed.stderr)
        assert counts_of(run).version == newest.version + is_back, point
    # A server dies, too, and goes on.
    fault = {ENV: "ps.after_apply@4", MARKER_ENV: str(tmp_path / "killed")}
    report = report_of(doll("resume", run, "--set", f"stop.updates={to + 20}", "--json", **env, **fault))
    assert (tmp_path / "killed").exists()
    assert report["audit"]["skipped"] == sum(newest.read_until) - sum(then.read_until) > 0
    assert report["samples"] == (to + 20) * 16, "of the model: none of what was skipped"
    said, where = report["audit"]["rolled_back"]
    again = f"version {newest.version + 1} is version {to} again (doll rollback)"
    assert said == f"{again}: the samples since then are skipped"
    assert where.startswith(f"skipped by doll rollback: partition 0: {then.read_until[0]}-")

    # Once more, further back than what was skipped: now all of it is learned.
    first = versions[0]
    stop = f"stop={{samples: {sum(newest.read_until) + 160}}}"
    done = doll("rollback", run, "--to", str(first), "--again", "--set", stop, "--json", **env)
    report = report_of(done)
    assert f"rolled back {job_name} from version" in done.stderr
    assert report["audit"]["skipped"] == 0
    assert report["audit"]["applied"] >= sum(newest.read_until) + 160
    assert len(report["audit"]["rolled_back"]) == 1, "the first one is left, with what it skipped"

    # Each version is made again from the logs, also one that was left.
    for version in (to, counts_of(run).version):
        made = replay_version(open_target(run, []).run, str(version), tmp_path / "replayed")
        assert (made.version, made.is_kept) == (version, True)
        assert (tmp_path / "replayed" / "model.safetensors").exists()
    assert left(run) == []
