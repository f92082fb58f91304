"""A standby takes over from a leader that is dead or frozen; two that are alive never both write."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from doll.local.forks import Role
from job_rig import MakePipeline
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.integration

LEASE_S = 2.0


def started_with_standby(make_pipeline: MakePipeline, updates: int) -> tuple[Any, Role, Role]:
    job = make_pipeline(f"stop.updates={updates}", f"ps.lease_s={LEASE_S}")
    leader: Role = job.launch("ps", "ps_role")
    for worker in (0, 1):
        job.start_worker(worker)
    job.send(job.samples(400))
    job.until_version(5)
    standby: Role = job.launch("ps-standby", "ps_standby_role")
    job.until(lambda: "standby_waiting" in job.log("ps-standby"), "the standby")
    return job, leader, standby


def test_a_standby_waits_while_the_leader_lives_and_succeeds_it_when_it_dies(make_pipeline: MakePipeline) -> None:
    job, leader, standby = started_with_standby(make_pipeline, 60)
    waited_until_s = time.monotonic() + 2.5 * LEASE_S  # nothing to learn for longer than a lease: the leader is alive
    job.until(lambda: time.monotonic() > waited_until_s, "two leases")
    assert [started.term for started in job.term_starts] == [1]
    leader.kill()
    died_s = time.time()
    job.send(job.samples(200))  # not before: the leader might learn and save all of it
    job.until(lambda: job.updates[-1].term == 2, "an update by the standby")
    first = next(update for update in job.updates if update.term == 2)
    assert first.time_s - died_s > LEASE_S - 1.5  # how soon it is, the drill measures
    job.send(job.samples(600))
    job.until_finished()
    assert standby.wait(WAIT_TIMEOUT_S) == 0
    report = job.assert_audit_ok()
    assert (report.version, report.term) == (60, 2)


def test_a_leader_that_was_frozen_writes_nothing_when_it_wakes_up(make_pipeline: MakePipeline) -> None:
    job, leader, standby = started_with_standby(make_pipeline, 80)
    frozen_s = time.time()
    leader.send_signal(signal.SIGSTOP)
    job.send(job.samples(400))
    job.until(lambda: job.updates[-1].term == 2, "an update by the standby")
    seen = len(job.updates)
    leader.send_signal(signal.SIGCONT)
    job.until(lambda: leader.poll() is not None, "the end of the old leader")
    assert leader.exitcode == 1
    assert "parameter server term 1 is over: term 2 has claimed" in job.log("ps")
    assert "paused_beyond_lease" in job.log("ps")
    job.send(job.samples(800))
    job.until_finished()
    assert standby.wait(WAIT_TIMEOUT_S) == 0
    # What its client had in hand goes out when it wakes; readers know that the term is over.
    assert {update.term for update in job.updates[seen:] if update.time_s > frozen_s} == {2}
    assert {term for term, _ in job.store.versions()} == {2}
    report = job.assert_audit_ok()
    assert (report.version, report.term) == (80, 2)


def test_a_standby_leaves_with_the_job_and_when_it_is_told_to(make_pipeline: MakePipeline) -> None:
    job, leader, standby = started_with_standby(make_pipeline, 40)
    other: Role = job.launch("ps-standby-2", "ps_standby_role")
    job.until(lambda: "standby_waiting" in job.log("ps-standby-2"), "the second standby")
    other.terminate()
    job.until(lambda: other.poll() is not None, "the end of the second standby")
    assert other.exitcode == 0
    job.send(job.samples(400))
    job.until_finished()
    assert leader.wait(WAIT_TIMEOUT_S) == 0
    assert standby.wait(WAIT_TIMEOUT_S) == 0
    job.assert_audit_ok()
    # A supervisor that restarts whatever the exit code is starts nothing again.
    again, another = job.doll("ps"), job.doll("ps", "--standby")
    job.until(lambda: again.poll() is not None and another.poll() is not None, "the end of both")
    assert (again.returncode, another.returncode) == (0, 0)
    assert job.store.newest_term() == 1, "a server of a finished job claims nothing"
    assert [started.term for started in job.term_starts] == [1]


def test_a_plain_server_leaves_a_living_leader_alone_and_succeeds_a_dead_one(make_pipeline: MakePipeline) -> None:
    """Two supervisors that each keep a `doll ps` running must not take the job from each other for ever."""
    job = make_pipeline("stop.updates=60")
    leader: Role = job.launch("ps", "ps_role")
    for worker in (0, 1):
        job.start_worker(worker)
    job.send(job.samples(200))
    job.until_version(5)
    second = job.doll("ps")  # as a supervisor on another machine runs it
    job.until(lambda: second.poll() is not None, "the end of the second server")
    assert second.returncode == 1
    assert "another parameter server leads" in (stderr := second.communicate()[1])
    assert "--standby" in stderr
    assert leader.poll() is None
    assert [started.term for started in job.term_starts] == [1]
    job.send(job.samples(200))
    leader.kill()
    assert leader.wait(WAIT_TIMEOUT_S) == -signal.SIGKILL
    third = job.doll("ps")
    job.send(job.samples(600))
    job.until_finished()
    job.until(lambda: third.poll() is not None, "the end of the third server")
    assert third.returncode == 0, third.communicate()[1]
    assert [started.term for started in job.term_starts] == [1, 2]
    job.assert_audit_ok()


def test_a_server_that_was_replaced_ends_though_it_has_nothing_to_save(make_pipeline: MakePipeline) -> None:
    """As one that was cut off does: its loop has turned all the time."""
    job = make_pipeline("stop.updates=20", f"ps.lease_s={LEASE_S}")
    leader: Role = job.launch("ps", "ps_role")
    for worker in (0, 1):
        job.start_worker(worker)
    job.send(job.samples(160))
    job.until_version(10)
    job.until(lambda: bool(job.store.versions()) and job.store.versions()[-1][1] == 10, "a checkpoint of all")
    successor: Role = job.launch("ps-2", "ps_role")
    job.until(lambda: leader.poll() is not None, "the end of the first server")
    assert leader.exitcode == 1
    assert "parameter server term 1 is over: term 2 has claimed" in job.log("ps")
    job.send(job.samples(160))
    job.until_finished()
    assert successor.wait(WAIT_TIMEOUT_S) == 0
    job.assert_audit_ok()


def test_of_two_standbys_of_a_new_job_one_leads(make_pipeline: MakePipeline) -> None:
    """As in the Helm chart, whose servers are alike. Both may begin at once: then the later one fences the other, which
    its supervisor starts again."""
    job = make_pipeline("stop.updates=20", f"ps.lease_s={LEASE_S}")
    servers: list[Role] = [job.launch(f"ps-{name}", "ps_standby_role") for name in "ab"]
    for worker in (0, 1):
        job.start_worker(worker)
    job.send(job.samples(400))
    job.until_finished()
    codes = [server.wait(WAIT_TIMEOUT_S) for server in servers]
    assert set(codes) <= {0, 1}
    report = job.assert_audit_ok()
    assert (report.version, report.term) == (20, 1 + codes.count(1))
