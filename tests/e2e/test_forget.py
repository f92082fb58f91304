"""`doll forget` of a run: killed at any point it is as it was or without the records, and the audit counts these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import commands
import pytest
from doll.process.fault_points import ENV
from doll.run.target import open_target
from doll.services import Services
from doll.storage.stores import open_store
from forked_commands import Program, environment
from killed_runs import counts_of, killed_run, left

pytestmark = pytest.mark.e2e

# In the order of `doll.ps.forgetting`, and whether the records are removed then.
POINTS = {"forget.after_claim": False, "ps.mid_checkpoint": False, "forget.after_checkpoint": True}
PLACES = ("--offset", "0/20-27", "--offset", "1/40")


def test_records_are_removed_through_three_kills_and_stay_removed(
    tmp_path: Path, job_name: str, services: Services, doll: Program
) -> None:
    env = environment(services)
    run = killed_run(doll, tmp_path, job_name, "--set", "checkpoint.keep=100", **env)
    before = counts_of(run)

    planned = commands.doll("forget", run, *PLACES, "--dry-run", **env)
    assert planned.exit_code == 0, planned.stderr
    assert f"version {before.version} of {job_name} has learned 9 of these records" in planned.stdout
    assert counts_of(run) == before

    for point, is_removed in POINTS.items():
        killed = doll("forget", run, *PLACES, **env, **{ENV: f"{point}@1"})
        assert killed.returncode == -9, (point, killed.stderr)
        assert counts_of(run).version == before.version + is_removed, point
    assert counts_of(run).rollbacks[-1].forgot == (((20, 28),), ((40, 41),))

    again = commands.doll("forget", run, *PLACES, **env)
    assert "has learned none of these records: the model is not changed\n  9 more of these" in again.stdout, (
        again.stderr
    )
    versions = [version for _, version in open_store(open_target(run, []).config, run).versions()]
    refused = commands.doll("rollback", run, "--to", str(versions[1]), "--skip", **env)
    assert refused.exit_code == 2
    assert f"expected version {before.version + 1} or a later one" in " ".join(refused.stderr.split())

    # The job goes on, and then more of its records are removed, of before and after the first ones.
    stop = before.version + 25
    done = doll("resume", run, "--set", f"stop.updates={stop}", "--json", **env)
    assert done.returncode == 0, done.stderr
    audit = json.loads(done.stdout)["audit"]
    assert (audit["ok"], audit["missing"], audit["duplicate"], audit["forgotten"]) == (True, 0, 0, 9)
    assert audit["produced"] == audit["applied"] + audit["pending"] + audit["forgotten"]
    assert audit["rolled_back"] == [
        f"version {before.version + 1} is version {before.version} without 9 of its records (doll forget)",
        "removed by doll forget: partition 0: 20-27, partition 1: 40",
    ]
    again = commands.doll("audit", run, "--independent", **env)
    assert again.exit_code == 0, again.output
    assert "\nindependent audit: " in again.stdout
    last = counts_of(run)
    far = last.read_until[0] - 1
    removed = commands.doll("forget", run, "--offset", "1/3", "--offset", f"0/{far}", "--purge", "--json", **env)
    assert removed.exit_code == 0, removed.stderr
    certificate: dict[str, Any] = json.loads(removed.stdout)
    assert (certificate["records"], certificate["samples"], certificate["later"]) == (2, 2, 0)
    assert "with all records, were computed again: equal to the job's to the bit" in certificate["control"]
    assert certificate["sha256"] != certificate["sha256_before"]
    assert json.loads((run / "forgotten" / f"version-{certificate['version']}.json").read_text()) == certificate
    kept = open_store(open_target(run, []).config, run).versions()
    assert [version for _, version in kept] == [certificate["version"]], "the earlier ones are purged"
    audited = commands.doll("audit", run, "--json", **env)
    assert audited.exit_code == 0, audited.stderr
    assert json.loads(audited.stdout)["forgotten"] == 11
    refused = commands.doll("audit", run, "--independent", **env)
    assert refused.exit_code == 2
    assert "start the job, then audit it with --independent" in " ".join(refused.stderr.split())
    assert left(run) == []
