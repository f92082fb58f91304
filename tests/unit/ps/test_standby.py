"""When a standby takes over: silence of the newest leader, not of Kafka, and not of an earlier leader."""

from __future__ import annotations

import pytest
from doll.ps.standby import LeaderLease
from doll.records.control import AnyRecord, Finished, Metric, ServerStatus
from record_builders import term_started, update


def status(term: int) -> ServerStatus:
    return ServerStatus(
        term=term, time_s=0.0, leader_since_s=0.0, pid=1, version=3, durable_version=3, samples_total=0,
        batches_total=0, waiting_batches=0, computing_batches=0, shortfall_batches=0, stalled_s=0.0, workers=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "sign",
    [status(1), update(1, 1), term_started(1)],
)
def test_every_sign_of_life_begins_the_lease_anew(sign: AnyRecord) -> None:
    lease = LeaderLease(5.0, now=100.0)
    assert not lease.is_over(104.9)
    lease.feed(sign, 104.0)
    assert not lease.is_over(108.9)
    assert lease.is_over(109.0)


def test_others_and_earlier_leaders_are_no_sign_of_the_leaders_life() -> None:
    lease = LeaderLease(5.0, now=0.0)
    lease.feed(status(2), 1.0)
    lease.feed(Metric(source="producer", values={"term": 2}, time_s=0.0), 5.0)
    lease.feed(status(1), 5.0)
    lease.feed(update(1, 1), 5.5)
    assert lease.is_over(6.0)
    lease.feed(status(3), 6.5)
    assert not lease.is_over(11.0)


def test_no_lease_ends_while_kafka_does_not_answer() -> None:
    lease = LeaderLease(5.0, now=0.0)
    lease.restart(20.0)
    assert not lease.is_over(24.0)
    assert lease.is_over(25.0)


def test_the_end_of_the_job_ends_the_wait() -> None:
    lease = LeaderLease(5.0, now=0.0)
    lease.feed(update(1, 1), 1.0)
    assert not lease.finished
    lease.feed(Finished(term=1, version=1, reason="updates", time_s=0.0), 2.0)
    assert lease.finished
