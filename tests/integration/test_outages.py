"""Kafka and Redis go away in the middle of a run and come back: the job waits, says so, and goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from doll.local.forks import Role
from doll.local.kafka_broker import LocalKafka
from doll.local.redis_server import LocalRedis
from job_rig import MakePipeline

pytestmark = pytest.mark.integration

# A worker that gets nothing for so long starts again: not here, where a busy machine may need minutes to come back.
PATIENT = ("worker.stall_timeout_s=600",)


@pytest.fixture(autouse=True)
def _services_come_back(broker: LocalKafka, redis_server: LocalRedis) -> Iterator[None]:
    """Whatever fails here, the other tests find their servers."""
    yield
    for server in (broker, redis_server):
        if server.pid is None:
            server.start()


def test_the_broker_goes_away_and_comes_back_and_once_more(make_pipeline: MakePipeline, broker: LocalKafka) -> None:
    """It is stopped, and later killed."""
    job = make_pipeline("stop.updates=120", *PATIENT)
    job.start()
    job.send(job.samples(800))
    away_s = 0.0
    for end, version in ((broker.stop, 10), (broker.kill, 60)):
        job.until_version(version)
        gone_s = time.monotonic()
        end()
        broker.start()
        away_s += time.monotonic() - gone_s
        job.send(job.samples(800))  # what was sent before may have been learned before
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.applied) == (120, 1920)
    # Nobody had to be started again, and nobody filled its log.
    assert job.restarts == []
    for name in job.pids:
        logged = [line for line in job.log(name).splitlines() if "kafka" in line.lower()]
        assert any("kafka_error" in line for line in logged), name
        # Each client says it once in 30 s; a busy machine needs minutes to start a broker.
        assert len(logged) < 20 * (2 + away_s / 30), "\n".join(logged)


def test_redis_is_killed_and_comes_back_empty(make_pipeline: MakePipeline, redis_server: LocalRedis) -> None:
    job = make_pipeline("stop.updates=120", *PATIENT)
    job.start()
    job.send(job.samples(1000))
    job.until_version(10)
    redis_server.kill()
    job.send(job.samples(1100))  # what was sent before may have been learned before: then nobody would need Redis
    # Who needs Redis next notices; the others may wait for that one meanwhile.
    job.until(lambda: any("redis_unavailable" in job.log(name) for name in job.pids), "somebody to notice")
    redis_server.start()
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.applied) == (120, 1920)
    assert job.restarts == []
    for name in job.pids:
        assert job.log(name).count("redis_unavailable") <= 1
        assert job.log(name).count("redis_unavailable") == job.log(name).count("redis_available")


def test_a_job_that_ends_while_the_broker_is_away_says_so_when_it_is_back(
    make_pipeline: MakePipeline, broker: LocalKafka
) -> None:
    job = make_pipeline()
    job.start()
    job.send(job.samples(160))
    job.until_version(10)
    job.until_status(lambda status: status.durable_version == 10, "the checkpoint")
    broker.kill()
    ps: Role = job.role("ps")
    ps.send_signal(signal.SIGINT)
    job.until(lambda: "finished" in job.log("ps"), "the end of the job at the parameter server")
    assert ps.poll() is None
    broker.start()
    job.until_finished()
    assert job.finished is not None
    assert job.finished.reason == "interrupted"
    report = job.assert_audit_ok()
    assert (report.version, report.pending) == (10, 0)
