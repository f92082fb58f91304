"""One process is cut off from Kafka, and nobody else: silently, or with its connections reset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from doll.drill.relay import Relays, TcpRelay
from doll.local import kafka_jars
from doll.local.kafka_broker import LocalKafka
from doll.local.redis_server import LocalRedis
from doll.local.supervisor import RoleSpec
from doll.services import Services
from waiting import WAIT_TIMEOUT_S

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("cut", ["silent", "reset"])]


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalKafka, TcpRelay]]:
    """A broker with a second way in, through a relay."""
    if (unavailable_reason := kafka_jars.unavailable_reason()) is not None:
        pytest.skip(f"no Kafka broker can be started: {unavailable_reason}")
    with Relays() as relays:
        relay = relays.open()
        with LocalKafka(tmp_path_factory.mktemp("kafka"), advertised_ports={"one": relay.port}) as kafka:
            relay.target_port = kafka.listener_port("one")
            yield kafka, relay


@pytest.fixture
def services(wired: tuple[LocalKafka, TcpRelay], redis_server: LocalRedis) -> Services:
    """For everybody but the one."""
    return Services(wired[0].address, redis_server.address)


@pytest.fixture
def relay(wired: tuple[LocalKafka, TcpRelay]) -> Iterator[TcpRelay]:
    yield wired[1]
    wired[1].restore()


def through(relay: TcpRelay, spec: RoleSpec) -> RoleSpec:
    job_path, _, *others = spec.args
    return dataclasses.replace(spec, args=[job_path, f"127.0.0.1:{relay.port}", *others])


def test_a_worker_that_was_cut_off_for_longer_than_its_lease_comes_back(
    make_pipeline: Any, relay: TcpRelay, cut: Any
) -> None:
    job = make_pipeline("stop.updates=40", "worker.lease_s=3", "worker.stall_timeout_s=600")
    job.start_ps()
    job.start_worker(0)
    spec = through(relay, job.spec("worker-1", "worker_role", 1))
    pid = job.supervisor.start(spec).pid
    job.send(job.samples(160))
    job.until_version(10)
    relay.start_cut(cut)
    job.until_status(lambda status: not status.workers[1].is_live, "the end of its lease")
    job.send(job.samples(160), partition=0)
    job.until_version(20)  # the others go on without it
    relay.restore()
    job.until_status(lambda status: status.workers[1].is_live, "its return")
    job.send(job.samples(160), partition=1)
    job.until_version(30)
    assert {member.worker for member in job.updates[-1].members} == {1}
    assert job.role("worker-1").pid == pid
    job.send(job.samples(160))
    job.until_finished()
    job.assert_audit_ok()


def test_a_leader_that_was_cut_off_ends_when_its_standby_has_taken_over(
    make_pipeline: Any, relay: TcpRelay, cut: Any
) -> None:
    """The leader did not stop and has nothing to save: it asks the store nevertheless, and becomes no second leader."""
    job = make_pipeline("stop.updates=40", "ps.lease_s=2")
    leader = job.forks.launch(through(relay, job.spec("ps", "ps_role")))
    try:
        for worker in (0, 1):
            job.start_worker(worker)
        job.send(job.samples(160))
        job.until_version(10)
        standby = job.launch("ps-standby", "ps_standby_role")
        job.until(lambda: "standby_waiting" in job.log("ps-standby"), "the standby")
        relay.start_cut(cut)
        job.send(job.samples(160))
        job.until(lambda: job.updates[-1].term == 2, "an update by the standby")
        relay.restore()
        job.until(lambda: leader.poll() is not None, "the end of the old leader")
        assert leader.exitcode == 1
        assert "parameter server term 1 is over: term 2 has claimed" in job.log("ps")
        job.send(job.samples(480))
        job.until_finished()
    finally:
        leader.kill()
    assert standby.wait(WAIT_TIMEOUT_S) == 0
    report = job.assert_audit_ok()
    assert (report.version, report.term) == (40, 2)
