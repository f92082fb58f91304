"""The example `clicks_avro` with a real registry: filled by its owner's program, learned, audited, by both schemas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apicurio
import pytest
from apicurio import Apicurio
from doll.services import Services
from owners_topic import OwnersTopic
from paths import EXAMPLES

pytestmark = pytest.mark.e2e

CLICKS = 4000
FOLDER = EXAMPLES / "clicks_avro"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apicurio]:
    if (reason := apicurio.unavailable_reason()) is not None:
        pytest.skip(reason)
    with Apicurio(tmp_path_factory.mktemp("apicurio")) as server:
        yield server


def run(environment: dict[str, str], *command: str | Path, code: int = 0, **more: Any) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=800, check=False,
        env=os.environ | environment, **more,
    )  # fmt: skip
    assert done.returncode == code, done.stderr[-4000:] + done.stdout[-2000:]
    return done.stdout if "--json" in command else done.stderr + done.stdout


def test_clicks_in_avro(services: Services, registry: Apicurio, job_name: str, tmp_path: Path) -> None:
    owner = OwnersTopic(services.kafka, f"clicks.{job_name}")
    environment = {"DOLL_KAFKA": services.kafka, "DOLL_REDIS": services.redis, "DOLL_REGISTRY": registry.url}
    lines = run({}, FOLDER / "task.py", str(CLICKS))
    filled = run(
        environment, FOLDER / "fill.py", "-", "--topic", owner.name, "--change-at", str(CLICKS // 2), input=lines
    )
    assert f"{CLICKS} clicks in topic {owner.name}" in filled
    owner.partitions = 4
    before = owner.ends(), owner.settings()
    assert sum(before[0]) == CLICKS

    settings = {
        "job": job_name, "data.topic": owner.name, "data.format.registry": registry.url,
        "data.format.subject": f"{owner.name}-value", "stop.samples": 3000,
    }  # fmt: skip
    job: list[str | Path] = [
        FOLDER / "job.yaml",
        *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")),
    ]
    checks = json.loads(run(environment, "-m", "doll", "doctor", *job, "--role", "worker", "--json"))["checks"]
    subject = next(check for check in checks if check["name"] == f"worker: subject {owner.name}-value")
    assert (subject["result"], subject["detail"]) == ("ok", "fields impression, clicked, counts, categories")
    wrong = [*job, "--set", f"data.format.subject={owner.name}-valu"]
    missing = run(environment, "-m", "doll", "doctor", *wrong, "--role", "worker", code=1)
    assert f"there is {owner.name}-value" in missing
    report = json.loads(run(environment, "-m", "doll", "up", *job, "--parent-folder", tmp_path, "--json"))
    assert report["audit"]["ok"]
    assert report["audit"]["produced"] == CLICKS
    assert report["audit"]["dead"] == 0
    assert report["audit"]["applied"] == report["samples"] >= 3000, "more than the records of the first schema"
    assert (owner.ends(), owner.settings()) == before


def test_a_registry_that_is_not_there_ends_the_owners_program_with_what_to_do(services: Services) -> None:
    said = run({}, FOLDER / "fill.py", "-", "--registry", "http://127.0.0.1:1", "--kafka", services.kafka, code=1)
    assert "no schema registry answers at http://127.0.0.1:1" in said
    assert "--registry URL, or DOLL_REGISTRY" in said
