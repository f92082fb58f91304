"""Processes die, freeze and come back in mid-run on the real broker: no sample is lost, none counts twice."""

from __future__ import annotations

import signal

import pytest
from doll.local.forks import Role
from job_rig import MakePipeline
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.integration

# Nothing is saved but at the end. Workers may hold more than the test sends, or the server would save to make room.
NO_CHECKPOINTS = ("checkpoint.every_updates=1000", "checkpoint.every_s=1000", "worker.max_pending_batches=200")


def test_worker_and_parameter_server_are_killed_in_mid_run(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("stop.updates=150")
    job.start()
    job.send(job.samples(400))
    job.until_version(8)
    job.kill("worker-0")
    job.send(job.samples(400))
    job.until_version(25)
    job.kill("ps")
    job.send(job.samples(600))
    job.until(lambda: len(job.term_starts) == 2, "a second parameter server")
    job.until_version(60)
    job.kill("worker-1")
    job.kill("ps")
    job.send(job.samples(1400))
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.applied, report.term) == (150, 2400, 3)
    assert [started.term for started in job.term_starts] == [1, 2, 3]
    assert job.checkpoint().term == 3


def test_what_was_applied_and_not_saved_is_applied_again(make_pipeline: MakePipeline) -> None:
    """SIGKILL between apply and checkpoint: the update records of the first server are void, its batches come again.

    Also where the job begins at the end of a stream that is there already: its origins are those of the first server.
    """
    job = make_pipeline("stop.updates=30", "data.start=latest", *NO_CHECKPOINTS)
    job.send(job.samples(50))  # before the job
    job.start()
    job.until(lambda: len(job.term_starts) == 1, "the origins")
    job.send(job.samples(320))  # 20 updates: the job cannot end before the server dies
    job.until_version(12)
    job.kill("ps")
    assert job.store.versions() == [(1, 0)]
    job.send(job.samples(280))
    job.until_finished()  # the end orders a checkpoint, whatever is due
    report = job.assert_audit_ok()
    assert (report.version, report.term) == (30, 2)
    assert report.voided >= 12
    assert [started.resumed_version for started in job.term_starts] == [0, 0]
    assert [started.origins for started in job.term_starts] == [(25, 25), (25, 25)]
    assert report.applied == 30 * 16


def test_a_worker_that_was_frozen_and_replaced_is_fenced_and_exits(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("stop.updates=100", "worker.lease_s=3")
    job.start()
    job.send(job.samples(600))
    job.until_version(5)
    zombie: Role = job.role("worker-0")
    zombie.send_signal(signal.SIGSTOP)
    job.until_status(lambda status: not status.workers[0].is_live, "the lease of the frozen worker to run out")
    job.send(job.samples(600))
    job.start_worker(0, name="worker-0-again")
    before = job.version
    job.until(lambda: any(m.worker == 0 for u in job.updates if u.version > before for m in u.members), "the successor")
    zombie.send_signal(signal.SIGCONT)
    job.until(lambda: zombie.poll() is not None, "the end of the zombie")
    assert zombie.exitcode == 0
    assert "fenced" in job.log("worker-0")
    job.send(job.samples(800))
    job.until_finished()
    job.assert_audit_ok()
    assert job.counters()["workers_lost"] >= 1


def test_a_second_parameter_server_ends_the_first(make_pipeline: MakePipeline) -> None:
    """Both servers live. The newer one claims the job; the older one can save no checkpoint any more, and ends."""
    job = make_pipeline("stop.updates=60")
    first: Role = job.launch("ps", "ps_role")  # unsupervised: nobody starts it again
    for worker in (0, 1):
        job.start_worker(worker)
    job.send(job.samples(400))
    job.until_version(5)
    first.send_signal(signal.SIGSTOP)
    job.send(job.samples(160))  # the first may have learned and saved all that there was
    second: Role = job.launch("ps-again", "ps_role")
    job.until(lambda: job.updates[-1].term == 2, "the second server to work")
    first.send_signal(signal.SIGCONT)
    job.send(job.samples(160))
    job.until(lambda: first.poll() is not None, "the end of the first server")
    assert first.exitcode == 1
    assert "parameter server term 1 is over: term 2 has claimed" in job.log("ps")
    job.send(job.samples(600))
    job.until_finished()
    assert second.wait(WAIT_TIMEOUT_S) == 0
    report = job.assert_audit_ok()
    assert (report.version, report.term) == (60, 2)


def test_a_worker_that_is_told_to_go_hands_its_batches_back(make_pipeline: MakePipeline) -> None:
    """SIGTERM, as a spot machine gets it: it leaves in time, and the next one goes on where the model stands."""
    job = make_pipeline("stop.updates=60")
    job.start()
    job.send(job.samples(400))
    job.until_version(5)
    job.until(lambda: any(1 in [m.worker for m in update.members] for update in job.updates), "a batch of worker 1")
    worker: Role = job.role("worker-1")
    worker.terminate()
    job.until(lambda: worker.poll() is not None, "the end of the worker")
    assert worker.exitcode == 0
    assert "draining" in job.log("worker-1")
    job.start_worker(1, name="worker-1-again")
    job.send(job.samples(700))
    job.until_finished()
    job.assert_audit_ok()
    assert job.counters()["workers_lost"] >= 1  # on a busy machine a lease may run out too


def test_a_parameter_server_that_is_told_to_go_saves_first(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("stop.updates=40", *NO_CHECKPOINTS)
    job.start()
    job.send(job.samples(320))
    job.until_version(20)
    ps: Role = job.role("ps")
    ps.terminate()
    job.until(lambda: ps.poll() is not None, "the end of the server")
    assert ps.exitcode == 0
    assert job.store.versions() == [(1, 0), (1, 20)]
    job.supervisor.start(job.spec("ps-again", "ps_role"))
    job.send(job.samples(400))
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.voided) == (40, 0)
    assert [started.resumed_version for started in job.term_starts] == [0, 20]
