"""A standby takes over from a leader that is dead or frozen; two that are alive never both write."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from doll.local.roles import Role

pytestmark = pytest.mark.integration

LEASE_S = 2.0
TAKEOVER_BAR_S = 40.0  # 10 s on a machine of one's own; the drill measures it


def started_with_standby(make_pipeline: Any, updates: int) -> tuple[Any, Role, Role]:
    job = make_pipeline(f"stop.updates={updates}", f"ps.lease_s={LEASE_S}")
    leader: Role = job.launch("ps", "ps_role")
    for worker in (0, 1):
        job.start_worker(worker)
    job.send(job.samples(400))
    job.until_version(5)
    standby: Role = job.launch("ps-standby", "ps_standby_role")
    job.until(lambda: "standing_by" in job.log("ps-standby"), "the standby")
    return job, leader, standby


def test_a_standby_waits_while_the_leader_lives_and_succeeds_it_when_it_dies(make_pipeline: Any) -> None:
    job, leader, standby = started_with_standby(make_pipeline, 60)
    waited_until_s = time.monotonic() + 2.5 * LEASE_S  # nothing to learn for longer than a lease: the leader is alive
    job.until(lambda: time.monotonic() > waited_until_s, "two leases")
    assert [epoch.ps_epoch for epoch in job.epochs] == [1]
    job.send(job.samples(200))
    leader.kill()
    died_s = time.time()
    job.until(lambda: job.updates[-1].ps_epoch == 2, "an update by the standby", 90.0)
    first = next(update for update in job.updates if update.ps_epoch == 2)
    assert LEASE_S - 1.5 < first.time_s - died_s < TAKEOVER_BAR_S
    job.send(job.samples(600))
    job.until_finished()
    assert standby.wait(60.0) == 0
    report = job.assert_sound()
    assert (report.version, report.ps_epoch) == (60, 2)


def test_a_leader_that_was_frozen_writes_nothing_when_it_wakes_up(make_pipeline: Any) -> None:
    job, leader, standby = started_with_standby(make_pipeline, 80)
    leader.send_signal(signal.SIGSTOP)
    job.send(job.samples(400))
    job.until(lambda: job.updates[-1].ps_epoch == 2, "an update by the standby", 90.0)
    seen = len(job.updates)
    leader.send_signal(signal.SIGCONT)
    job.until(lambda: leader.poll() is not None, "the end of the old leader", 90.0)
    assert leader.exitcode == 1
    assert "parameter server epoch 1 is over: epoch 2 has claimed" in job.log("ps")
    assert "was_away" in job.log("ps")
    job.send(job.samples(800))
    job.until_finished()
    assert standby.wait(60.0) == 0
    assert {update.ps_epoch for update in job.updates[seen:]} <= {2}
    assert {epoch for epoch, _ in job.store.versions()} == {2}
    report = job.assert_sound()
    assert (report.version, report.ps_epoch) == (80, 2)


def test_a_standby_leaves_with_the_job_and_when_it_is_told_to(make_pipeline: Any) -> None:
    job, leader, standby = started_with_standby(make_pipeline, 40)
    other: Role = job.launch("ps-standby-2", "ps_standby_role")
    job.until(lambda: "standing_by" in job.log("ps-standby-2"), "the second standby")
    other.terminate()
    job.until(lambda: other.poll() is not None, "the end of the second standby", 90.0)
    assert other.exitcode == 0
    job.send(job.samples(400))
    job.until_finished()
    assert leader.wait(60.0) == 0
    assert standby.wait(60.0) == 0
    job.assert_sound()
