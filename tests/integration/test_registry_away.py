"""A registry that is away for DOLL_REGISTRY_AWAY_S seconds (5) while a new schema comes: `doll status` says what is
waited for, no record is refused, no process is started again, and ids above 2**53 arrive whole.

DOLL_REGISTRY_AWAY_S=60 python -m pytest -n0 -s tests/integration/test_registry_away.py
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import apicurio
import commands
import pytest
from apicurio import Apicurio
from fake_registry import avro, fake_registry, schema
from forked_commands import environment
from job_rig import MakePipeline

pytestmark = pytest.mark.integration

AWAY_S = float(os.environ.get("DOLL_REGISTRY_AWAY_S", "5"))
BIG = 2**53 + 1
RECORDS = 640

TASK = """
import msgspec
import numpy as np
import torch
from doll import BadRecordsError, FieldsTask


class Click(msgspec.Struct):
    user: int
    digits: str
    clicked: bool
    country: str = "??"


class Clicks(FieldsTask):
    record = Click
    input_shape = (2,)
    num_classes = 2

    def build_model(self):
        return torch.nn.Linear(2, 2)

    def samples(self, columns):
        wrong = [at for at, user in enumerate(columns["user"].tolist()) if str(user) != columns["digits"][at]]
        if wrong:
            raise BadRecordsError(wrong)
        x = np.stack([columns["user"] % 7, columns["country"] == "DE"], axis=1)
        return x, columns["clicked"]
"""
FIRST = schema(("user", "long"), ("digits", "string"), ("clicked", "boolean"))
SECOND = schema(
    {"name": "country", "type": "string", "default": "DE"}, ("clicked", "boolean"), ("digits", "string"),
    ("user", "long"),
)  # fmt: skip


def click(number: int, written: Any, i: int) -> bytes:
    user = BIG + 2 * i
    return avro(number, written, {"user": user, "digits": str(user), "clicked": i % 2 == 0, "country": "DE"})


@pytest.fixture
def job(make_pipeline: MakePipeline, tmp_path: Path) -> Any:
    (tmp_path / "clicks.py").write_text(TASK)
    return lambda url: make_pipeline(
        "task.class=clicks.py:Clicks", "task.args={}", f"data.format={{kind: avro, registry: {url}}}",
        f"stop.samples={RECORDS}", "worker.stall_timeout_s=2", "worker.fetch_max_wait_ms=500",
    )  # fmt: skip


def status_of(job: Any) -> str:
    done = commands.doll("status", job.job_path, **environment(job.services))
    assert done.exit_code == 0, done.output
    return done.stdout


def go_through(job: Any, first: int, second: int, leave: Any, come_back: Any) -> None:
    """Learn with the first schema, let the registry go, send the second schema, let the registry come back."""
    quarter = RECORDS // 4
    job.start()
    job.send([click(first, FIRST, i) for i in range(quarter)])
    job.until_version(1)
    leave()
    left_s = time.monotonic()
    # The first schema is known: these are learned. A batch with the second one is not, and what is behind it waits.
    job.send([click(first, FIRST, i) for i in range(quarter)])
    job.send([click(second, SECOND, i) for i in range(quarter)])
    job.until_status(
        lambda status: all("does not answer" in worker.waiting_for for worker in status.workers), "both workers wait"
    )
    waits_after_s, version = time.monotonic() - left_s, job.version
    shown = status_of(job)
    job.until(lambda: time.monotonic() - left_s > AWAY_S, "the registry has been away", timeout_s=AWAY_S + 60)
    assert all("does not answer" in worker.waiting_for for worker in job.status.workers)
    waited = job.version
    come_back()
    back_s = time.monotonic()
    job.until(lambda: job.version > waited, "learning goes on")
    resumed_after_s = time.monotonic() - back_s
    job.send([click(second, SECOND, i) for i in range(quarter)])
    job.until_finished()
    report = job.assert_audit_ok()
    waiting = [line for line in shown.splitlines() if line.startswith("waiting:")]
    sys.stdout.write(
        f"\naway {back_s - left_s:.1f} s; workers wait {waits_after_s:.1f} s after it left, versions then {version} to "
        f"{waited}; first update {resumed_after_s:.1f} s after it is back; {report.applied} of {RECORDS} records "
        f"learned, {report.dead} dead, {len(job.restarts)} restarts\n{waiting}\n"
    )
    assert waiting
    assert "the schema registry at" in waiting[0]
    assert (report.dead, job.read("dead"), job.restarts) == (0, [], [])
    assert report.applied == RECORDS
    logs = "".join(job.log(f"worker-{n}") for n in (0, 1))
    assert logs.count("decoding_waits") >= 2
    assert logs.count("decoding_goes_on") >= 2


def test_a_registry_that_nothing_answers_for(job: Any) -> None:
    with fake_registry() as registry:
        registry.add(1, FIRST)
        registry.add(2, SECOND)
        go_through(job(registry.url), 1, 2, registry.close, registry.start)


def test_a_real_registry_that_hangs(job: Any, tmp_path: Path) -> None:
    if (reason := apicurio.unavailable_reason()) is not None:
        pytest.skip(reason)
    with Apicurio(tmp_path / "registry") as registry:
        first, second = registry.register("clicks-value", FIRST), registry.register("clicks-value", SECOND)
        go_through(job(registry.url), first, second, registry.freeze, registry.thaw)
