"""Records with keys and headers in the formats of registries, in whole jobs: evolution, an absence, wrong ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apicurio
import pytest
from apicurio import Apicurio
from fake_registry import avro, fake_registry, schema
from job_rig import MakePipeline

pytestmark = pytest.mark.integration

TASK = """
import msgspec
import numpy as np
import torch
from doll import BadRecordsError, FieldsTask, Samples


class Click(msgspec.Struct):
    user: int
    digits: str
    price: float
    clicked: bool
    country: str = "??"


class Clicks(FieldsTask):
    record = Click
    whole_records = True
    input_shape = (2,)
    num_classes = 2

    def build_model(self):
        return torch.nn.Linear(2, 2)

    def samples(self, columns):
        wrong = [at for at, user in enumerate(columns["user"].tolist()) if str(user) != columns["digits"][at]]
        if wrong:
            raise BadRecordsError(wrong)
        bots = np.array([("agent", b"bot") in headers for headers in columns.records.headers])
        home = np.array([len(key or b"") for key in columns.records.keys]) + (columns["country"] == "DE")
        x = np.stack([columns["price"], home], axis=1)
        return Samples(x[~bots], columns["clicked"][~bots], {"bot": bots})
"""
FIRST = schema(("user", "long"), ("digits", "string"), ("price", "float"), ("clicked", "boolean"))
SECOND = schema(
    ("clicked", "boolean"), ("digits", "string"), ("country", "string"), ("price", "double"), ("user", "long")
)
WITHOUT_PRICE = schema(("user", "long"), ("digits", "string"), ("clicked", "boolean"), ("country", "string"))
BIG = 2**53 + 1


def click(number: int, written: Any, i: int) -> bytes:
    fields = {"user": BIG + 2 * i, "digits": str(BIG + 2 * i), "price": i % 3, "clicked": i % 2 == 0, "country": "DE"}
    return avro(number, written, fields)


@pytest.fixture
def clicks(make_pipeline: MakePipeline, tmp_path: Path) -> Any:
    (tmp_path / "clicks.py").write_text(TASK)
    return lambda *overrides: make_pipeline("task.class=clicks.py:Clicks", "task.args={}", *overrides)


def send(job: Any, values: list[bytes | None], *, agent: bytes = b"browser") -> None:
    """With keys and headers, in turn to both partitions."""
    for i, value in enumerate(values):
        job._producer.produce(
            job.config.topic("samples"), value, b"k%d" % i, partition=i % 2, headers=[("agent", agent), ("trace", None)]
        )
    assert job._producer.flush(60) == 0


def test_a_registry_that_is_away_is_waited_for_and_its_schema_evolves_in_mid_stream(clicks: Any) -> None:
    """It is away, then answers something else. Of a schema without a field that the task needs the records are dead
    letters, with what to do."""
    with fake_registry() as registry:
        registry.down = (503, b"back soon")
        job = clicks(
            f"data.format={{kind: avro, registry: {registry.url}}}", "data.tombstones=skip", "stop.samples=160",
            "worker.stall_timeout_s=2", "worker.fetch_max_wait_ms=500",
        )  # fmt: skip
        job.start()
        send(job, [click(1, FIRST, i) for i in range(64)])
        job.until_status(
            lambda status: all("HTTP 503: back soon" in worker.waiting_for for worker in status.workers),
            "both workers say for what they wait",
        )
        job.until(lambda: len(registry.asked) >= 14, "several attempts, for longer than worker.stall_timeout_s")
        registry.down = (200, b"<html>log in</html>")  # whatever it says, it is waited for
        job.until_status(
            lambda status: all("got HTTP 200 with <html>log in" in worker.waiting_for for worker in status.workers),
            "both workers say what it answers",
        )
        assert job.version == 0
        registry.add(1, FIRST)
        registry.add(2, SECOND)
        registry.add(3, WITHOUT_PRICE)
        registry.down = None
        job.until_status(lambda status: not any(worker.waiting_for for worker in status.workers), "nobody waits")
        send(job, [click(1, FIRST, 0)] * 30, agent=b"bot")
        send(job, [None] * 10)
        send(job, [click(3, WITHOUT_PRICE, i) for i in range(4)])
        send(job, [click(1 + i % 2, [FIRST, SECOND][i % 2], i) for i in range(96)])
        send(job, [click(2, SECOND, i) for i in range(24)])
        job.until_finished()
    report = job.assert_audit_ok()
    letters, logs = job.read("dead"), "".join(job.log(f"worker-{n}") for n in (0, 1))
    assert (report.dead, len(letters), job.restarts) == (4, 4, [])
    for letter in letters:
        assert "schema 3 has no field price, which the task's Click requires" in letter.reason
        assert "give Click.price a default, or set data.format.version" in letter.reason
    assert logs.count("schema_unusable") == 2, "each worker says it once"
    assert sum(update.n_samples for update in job.updates) >= 160
    assert dict(job.status.skipped) == {"tombstone": 10, "bot": 30}


def test_a_wrong_subject_ends_the_worker_with_the_subjects_that_there_are(clicks: Any) -> None:
    with fake_registry() as registry:
        registry.answers["/subjects"] = (200, ["clicks-value"])
        job = clicks(f"data.format={{kind: avro, registry: {registry.url}, subject: clicks}}")
        job.start_ps()
        worker = job.launch("worker-0", "worker_role", 0)
        send(job, [click(1, FIRST, i) for i in range(64)])
        job.until(lambda: worker.poll() is not None, "the end of the worker")
    assert worker.poll() == 2
    assert "has no version latest of subject clicks (40403: Schema not found); it has clicks-value" in job.log(
        "worker-0"
    )


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apicurio]:
    if (reason := apicurio.unavailable_reason()) is not None:
        pytest.skip(reason)
    with Apicurio(tmp_path_factory.mktemp("apicurio")) as server:
        yield server


def test_a_real_registry(clicks: Any, registry: Apicurio) -> None:
    first, second = registry.register("clicks-value", FIRST), registry.register("clicks-value", SECOND)
    job = clicks(
        f"data.format={{kind: avro, registry: {registry.url}, subject: clicks-value, version: 2}}", "stop.samples=140",
        "worker.stall_timeout_s=2", "worker.fetch_max_wait_ms=500",
    )  # fmt: skip
    # By Avro's rules records of the first schema lack `country`, which the second one gives no default: dead letters.
    registry.freeze()
    job.start()
    send(job, [click(second, SECOND, i) for i in range(16)])
    job.until_status(
        lambda status: all("does not answer" in worker.waiting_for for worker in status.workers), "both workers wait"
    )
    registry.thaw()
    send(job, [click(second, SECOND, i) for i in range(64)])
    send(job, [click(first, FIRST, 0), click(987_654, SECOND, 0)])
    send(job, [click(second, SECOND, i) for i in range(64)])
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.dead, job.restarts) == (2, [])
    reasons = [letter.reason for letter in job.read("dead")]
    assert any(f"schema 987654 is not in the registry at {registry.url} (404" in reason for reason in reasons), reasons
    assert any("country" in reason for reason in reasons), reasons


def test_records_are_decoded_by_name_with_a_real_registry(clicks: Any, registry: Apicurio) -> None:
    first, second = registry.register("events-value", FIRST), registry.register("events-value", SECOND)
    job = clicks(f"data.format={{kind: avro, registry: {registry.url}, subject: events-value}}", "stop.samples=64")
    job.start()
    send(job, [click([first, second][i // 2 % 2], [FIRST, SECOND][i // 2 % 2], i) for i in range(96)])
    job.until_finished()
    assert job.assert_audit_ok().dead == 0
