"""Event times, from the records of a real broker to the answers of a model server and the report."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from doll.local.processes import free_port
from doll.monitor.state.progress import ProgressModel
from doll.ps.checkpointing import decode_snapshot
from doll.records.control import ServedStatus
from job_rig import FEATURES, MakePipeline, Pipeline
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.integration
SAMPLES, WRONG = 320, 16


def ask(port: int, model: str) -> dict[str, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, FEATURES], "data": FEATURES * [1.0]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/{model}/infer",
        json.dumps({"inputs": [tensor]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_TIMEOUT_S) as answer:
        return dict(json.loads(answer.read())["parameters"])


def send_at(job: Pipeline, count: int, time_ms: int) -> None:
    """The samples topic has the broker's timestamps, so the time is in a header."""
    headers = [("at", str(time_ms).encode())]
    for at, value in enumerate(job.samples(count)):
        job._producer.produce(job.config.topic("samples"), value, partition=at % 2, headers=headers)
    assert job._producer.flush(WAIT_TIMEOUT_S) == 0


def test_the_time_of_an_event_is_in_the_answer_of_the_version_that_has_learned_it(make_pipeline: MakePipeline) -> None:
    job = make_pipeline(
        "freshness.time.header=at", "stop.updates=1000", "freshness.event_to_learned_s=3600",
        "freshness.event_to_served_s=3600", "freshness.event_to_durable_s=0.001", "checkpoint.every_event_s=1",
    )  # fmt: skip
    port = free_port()
    job.start()
    begun_ms = int(time.time() * 1000)
    send_at(job, 16, begun_ms)
    job.until_version(1)
    server = job.doll("serve", "--port", str(port), log="serve")
    try:

        def answers() -> bool:
            try:
                return bool(ask(port, job.config.job))
            except urllib.error.URLError:
                return False

        until(answers, lambda: job.log("serve"))

        def served() -> ServedStatus | None:
            records = [record for record in job.read("metrics") if isinstance(record, ServedStatus)]
            return records[-1] if records else None

        until(served, lambda: job.log("serve"))  # it reads the updates now
        send_at(job, WRONG, begun_ms // 1000)  # in seconds
        send_at(job, WRONG, begun_ms + 3 * 86_400_000)  # three days ahead
        job.send(job.samples(WRONG))  # without the header
        send_at(job, SAMPLES, begun_ms + 1)
        newest_ms = int(time.time() * 1000)
        send_at(job, 16, newest_ms)
        num_good = 16 + SAMPLES + 16
        total = num_good + 3 * WRONG
        job.until(lambda: job.status is not None and job.status.samples_total == total, "all samples")
        job.until_status(lambda status: status.durable_version == status.version, "a checkpoint of all")
        until(
            lambda: ask(port, job.config.job)["newest_event_s"] == newest_ms / 1000,
            lambda: str(ask(port, job.config.job)),
        )
        events = decode_snapshot(job.checkpoint()).events
        assert (events.newest_ms, events.count, events.bad) == (newest_ms, num_good, 3 * WRONG)
        assert events.oldest_ms == begun_ms
        assert job.updates[-1].events == events

        until(lambda: (now := served()) is not None and now.served.newest_ms == newest_ms, lambda: str(served()))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    model = ProgressModel(job.config, 0.0)
    job.until_status(lambda status: status.durable is not None and status.durable.records == total, "all are durable")
    for record in [*job.read("updates"), *job.read("metrics")]:
        model.feed(record)
    stages = {stage.stage: stage for stage in model.freshness.stages()}
    assert stages["learned"].records == stages["durable"].records == total
    assert (stages["learned"].bad, stages["learned"].within) == (3 * WRONG, num_good / total)
    assert stages["durable"].within == 0.0
    assert not stages["durable"].is_met
    # Those of the version that was served first may have been served before.
    assert SAMPLES <= stages["served"].records <= total
    assert stages["served"].bad == 3 * WRONG
    assert 0 < stages["learned"].p50_s < 3600
