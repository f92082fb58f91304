"""`doll up` on a topic that exists: the example `trips`, filled by its owner's program; audit, status, resume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
from doll.services import Services
from forked_commands import Program, environment
from owners_topic import OwnersTopic
from paths import EXAMPLES

pytestmark = pytest.mark.e2e

TRIPS = 4000


def here(services: Services, *arguments: str | Path, code: int = 0) -> Any:
    """A command that runs nothing, in this process."""
    done = commands.doll(*arguments, **environment(services))
    assert done.exit_code == code, done.stderr[-4000:] + done.stdout[-2000:]
    return json.loads(done.stdout) if "--json" in arguments else done.stderr + done.stdout


def fill(services: Services, topic: str) -> None:
    made_up = subprocess.run(
        [sys.executable, EXAMPLES / "trips" / "task.py", str(TRIPS)], capture_output=True, check=True
    )
    subprocess.run(
        [sys.executable, EXAMPLES / "trips" / "fill.py", "-", "--kafka", services.kafka, "--topic", topic],
        input=made_up.stdout, check=True,
    )  # fmt: skip


def test_trips(services: Services, job_name: str, tmp_path: Path, doll: Program) -> None:
    def ended(*arguments: str | Path) -> Any:
        """The report of a run."""
        done = doll(*arguments, **environment(services))
        assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
        return json.loads(done.stdout)

    owner = OwnersTopic(services.kafka, f"trips.{job_name}")
    job: list[str | Path] = [
        EXAMPLES / "trips" / "job.yaml",
        "--set",
        f"job={job_name}",
        "--set",
        f"data.topic={owner.name}",
    ]
    missing = here(services, "up", *job, "--parent-folder", tmp_path, code=2)
    assert f"which has no topic {owner.name}" in missing
    assert list(tmp_path.iterdir()) == [], "no run has begun"

    fill(services, owner.name)
    owner.partitions = 12
    owner.commit("somebody")
    before = owner.ends(), owner.settings(), owner.offsets_of("somebody")
    assert sum(before[0]) == TRIPS
    report = ended("up", *job, "--set", "stop.samples=2000", "--parent-folder", tmp_path, "--json")
    assert report["audit"]["ok"]
    assert report["audit"]["produced"] == TRIPS
    assert report["audit"]["applied"] == report["samples"] >= 2000

    (run,) = tmp_path.iterdir()
    assert "partitions: 12" in (run / "job.yaml").read_text()
    for target in ([run], [*job, "--run-folder", run]):
        audit = here(services, "audit", *target, "--json")
        assert audit["applied"] == report["samples"]
        assert [line["end"] for line in audit["partitions"]] == before[0]
    assert f"{job_name} (finished: " in here(services, "status", *job)
    assert owner.name in here(services, "topics", *job)
    assert f"topic {owner.name} (data.topic)" in here(services, "doctor", *job)
    assert "DOLL only reads it" in here(services, "produce", *job, "--stdin", code=2)
    assert "DOLL only reads it" in here(services, "dead", "replay", run, code=2)

    again = ended("resume", run, "--set", "data.workers=3", "--set", "stop.samples=3000", "--json")
    assert again["audit"]["ok"]
    assert again["audit"]["applied"] == again["samples"] >= 3000
    refused = here(services, "resume", run, "--set", "data.topic=other", code=2)
    assert f"data.topic: expected {owner.name}, got other" in refused
    assert (owner.ends(), owner.settings(), owner.offsets_of("somebody")) == before
