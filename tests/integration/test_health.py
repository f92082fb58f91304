"""Probes of real processes on the real broker: ready when they work; while Kafka is away not ready, but in health."""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from doll.local.kafka_broker import LocalKafka
from doll.local.processes import free_port
from doll.process.health import PORT_ENV
from job_rig import MakePipeline

pytestmark = pytest.mark.integration


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    """Status and report; (0, {}) where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.loads(refused.read())
    except OSError:
        return 0, {}


def test_each_process_tells_whether_it_works(make_pipeline: MakePipeline, broker: LocalKafka) -> None:
    job = make_pipeline(
        "evaluation.enabled=true",
        "source={kind: python, of: examples.synthetic.source:gaussians, args: {features: 4, classes: 2}}",
        "arrivals.rate_per_s=40",
        "worker.stall_timeout_s=600",
    )
    ports: dict[str, int] = {}

    def start(name: str, role: str, *more: int) -> None:
        ports[name] = free_port()
        job._start(dataclasses.replace(job.spec(name, role, *more), env={PORT_ENV: str(ports[name])}))

    def statuses(path: str) -> dict[str, int]:
        return {name: ask(port, path)[0] for name, port in ports.items()}

    start("worker-0", "worker_role", 0)
    job.until(lambda: ask(ports["worker-0"], "/healthz")[0] == 200, "a worker without its server: healthy")
    job.until(
        lambda: ask(ports["worker-0"], "/readyz")[1].get("reasons") == ["the parameter server's answer"],
        "a worker that says what it waits for",
    )
    assert ask(ports["worker-0"], "/readyz")[0] == 503
    start("worker-1", "worker_role", 1)
    start("ps", "ps_role")
    start("evaluator", "evaluator_role")
    start("producer", "producer_role")
    job.until(lambda: set(statuses("/readyz").values()) == {200}, "all are ready")
    job.until_version(5)
    job.until(lambda: set(statuses("/healthz").values()) == {200}, "all are healthy")
    report = ask(ports["ps"], "/readyz")[1]
    assert report["process"] == "ps"
    assert {"loop", "kafka"} <= report["ages_s"].keys()

    broker.kill()
    try:
        job.until(
            lambda: {statuses("/readyz")[name] for name in ("ps", "worker-0", "producer")} == {503},
            "not ready while Kafka is away",
        )
        assert any("kafka: no beat for" in reason for reason in ask(ports["ps"], "/readyz")[1]["reasons"])
        assert "Kafka" in ask(ports["producer"], "/readyz")[1]["reasons"]
        job.until(lambda: set(statuses("/healthz").values()) == {200}, "healthy all the same")
    finally:
        broker.start()
    job.until(lambda: set(statuses("/readyz").values()) == {200}, "ready again")
    at = job.version
    job.until_version(at + 3)
    assert job.restarts == [], "nobody was started again"
    job.assert_audit_ok()
