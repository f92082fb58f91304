"""When a standby takes over: silence of the newest leader, not of the wires, and not of a zombie."""

from __future__ import annotations

import pytest
from doll.ps.standby import LeaderLease
from doll.records import AnyRecord, Finished, Metric, TermStarted, Update


def metric(term: int, source: str = "ps") -> Metric:
    return Metric(source=source, values={"term": term, "version": 3}, time_s=0.0)


def update(term: int) -> Update:
    return Update(term=term, version=1, members=(), n_samples=1, loss=1.0, metrics={}, samples_total=1, time_s=0.0)


@pytest.mark.parametrize(
    "sign",
    [metric(1), update(1), TermStarted(term=1, resumed_version=0, origins=(0,), records_per_batch=1, time_s=0.0)],
)
def test_every_sign_of_life_begins_the_lease_anew(sign: AnyRecord) -> None:
    lease = LeaderLease(5.0, now=100.0)
    assert not lease.is_over(104.9)
    lease.feed(sign, 104.0)
    assert not lease.is_over(108.9)
    assert lease.is_over(109.0)


def test_others_and_zombies_are_no_sign_of_the_leaders_life() -> None:
    lease = LeaderLease(5.0, now=0.0)
    lease.feed(metric(2), 1.0)
    lease.feed(metric(2, source="producer"), 5.0)
    lease.feed(metric(1), 5.0)
    lease.feed(update(1), 5.5)
    assert lease.is_over(6.0)
    lease.feed(metric(3), 6.5)
    assert not lease.is_over(11.0)


def test_nobody_is_taken_for_dead_while_nobody_can_be_heard() -> None:
    lease = LeaderLease(5.0, now=0.0)
    lease.restart(20.0)
    assert not lease.is_over(24.0)
    assert lease.is_over(25.0)


def test_the_end_of_the_job_ends_the_wait() -> None:
    lease = LeaderLease(5.0, now=0.0)
    lease.feed(update(1), 1.0)
    assert not lease.finished
    lease.feed(Finished(term=1, version=1, reason="updates", time_s=0.0), 2.0)
    assert lease.finished
