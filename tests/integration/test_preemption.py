"""A machine is taken away: SIGTERM at any moment of a worker's life, from its first on, ends it within its budget."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from doll.local.forks import Role
from job_rig import MakePipeline

pytestmark = pytest.mark.integration

DRAIN_S = 3.0


def test_a_worker_that_has_just_joined_leaves_on_sigterm(make_pipeline: MakePipeline) -> None:
    """Between its own start-up and Faust's there was a moment in which the signal was heard and forgotten."""
    job = make_pipeline(f"worker.drain_s={DRAIN_S}")
    job.start_ps()
    for delay_s in (0.0, 0.05, 0.15, 0.3, 0.6):  # one after the other: each holds the slot that the one before has left
        name = f"worker-0-after-{delay_s:g}"
        worker: Role = job.launch(name, "worker_role", 0)
        job.until(lambda name=name: "joined" in job.log(name), f"{name} to join")  # type: ignore[misc]
        told_s = time.monotonic() + delay_s
        job.until(lambda told_s=told_s: time.monotonic() >= told_s, "the moment")  # type: ignore[misc]
        worker.terminate()
        job.until(lambda worker=worker: worker.poll() is not None, f"the end of {name}")  # type: ignore[misc]
        assert worker.exitcode == 0, name


NEVER = ("worker.lease_s=600", "worker.grant_timeout_s=600")  # who waited for a ghost would wait for longer than a test
GROUP, BATCH = 2, 8


def test_what_a_worker_hands_back_is_replaced_at_once(make_pipeline: MakePipeline) -> None:
    """Digest 1.2: with replacement at least 99 % of lambda / (K b) updates for the streams that are up."""
    wanted = 100
    job = make_pipeline(*NEVER, f"worker.drain_s={DRAIN_S}")
    job.start_ps()
    job.start_worker(0)
    leaving: Role = job.launch("worker-1", "worker_role", 1)
    # A group, and one batch that is announced and waits for company when its worker is told to go.
    job.send(job.samples((GROUP + 1) * BATCH), partition=1)
    job.until_status(lambda status: status.waiting_batches == 1 and job.version == 1, "a batch that waits")
    leaving.terminate()
    job.until(lambda: leaving.poll() is not None, "the end of the worker")
    assert leaving.exitcode == 0
    job.send(job.samples(wanted * GROUP * BATCH), partition=0)
    job.until_version(1 + wanted)
    made = [update for update in job.updates if update.version > 1]
    assert len(made) >= 0.99 * wanted
    assert {member.worker for update in made for member in update.members} == {0}
    # Its successor announces the batch again, and nothing of it was lost.
    job.start_worker(1)
    job.send(job.samples(BATCH), partition=0)
    job.until_version(2 + wanted)
    assert {member.worker for member in job.updates[-1].members} == {0, 1}
    job.assert_audit_ok()


TASK = """
from pathlib import Path

from examples.synthetic.task import Gaussian


class Held(Gaussian):
    def loss(self, outputs, y):
        hold = Path(__file__).with_name("hold")
        if hold.exists():
            hold.read_bytes()  # a FIFO: this waits for a writer, and nobody writes
        return super().loss(outputs, y)
"""


def test_a_notice_ends_a_worker_in_time_and_its_gradient_is_computed_by_another(
    make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    """The gradient takes longer than the notice leaves: its batch is requeued, and another takes its place."""
    (tmp_path / "held.py").write_text(TASK)
    job = make_pipeline(*NEVER, "task.class=held.py:Held", "worker.notice_s=4")
    job.start_ps()
    job.start_worker(0)
    os.mkfifo(tmp_path / "hold")
    os.mkfifo(tmp_path / "notice")
    spec = job.spec("noticed", "worker_role", str(tmp_path / "notice"))
    noticed: Role = job.forks.launch(dataclasses.replace(spec, target="noticed_worker:run"))
    try:
        job.send(job.samples(GROUP * BATCH), partition=1)
        job.until_status(lambda status: status.computing_batches == GROUP, "the grants")
        (tmp_path / "notice").write_text("now")
        job.until(lambda: noticed.poll() is not None, "the end of the worker")
    finally:
        noticed.kill()
    assert noticed.exitcode == 0
    (tmp_path / "hold").unlink()
    job.until_status(lambda status: status.counters.get("requeued") == GROUP, "the batches to come back")
    job.send(job.samples(GROUP * BATCH), partition=0)
    job.until_version(1)
    assert {member.worker for member in job.updates[0].members} == {0}
    job.start_worker(1)
    job.until_version(2)
    assert {member.worker for member in job.updates[1].members} == {1}
    job.assert_audit_ok()
