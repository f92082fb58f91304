"""Workers on machines that have a name and a number: which of them holds the slot, and what a spot notice does."""

from __future__ import annotations

from typing import Any

import pytest
from doll.local.supervisor import RoleSpec
from imds_stub import imds_stub
from job_rig import MakePipeline

pytestmark = pytest.mark.integration

GROUP, BATCH = 2, 8  # of the pipeline


def machine(job: Any, name: str, incarnation: int, **environment: str) -> RoleSpec:
    """What a fleet starts for worker 0."""
    plain = job.spec(name, "worker_role", 0)
    identity = {"DOLL_INSTANCE": name, "DOLL_INCARNATION": str(incarnation), "DOLL_MARKET": "spot"}
    return RoleSpec(name, plain.target, plain.log_path, plain.args, {**plain.env, **identity, **environment})


def test_a_machine_that_was_replaced_starts_again_and_ends_without_a_trace(make_pipeline: MakePipeline) -> None:
    job = make_pipeline()
    job.start_ps()
    job.supervisor.start(machine(job, "i-2", 2))
    job.until(lambda: "joined" in job.log("i-2"), "the machine to join")
    job.supervisor.start(machine(job, "i-1", 1))
    job.until(lambda: job.supervisor.exit_codes()["i-1"] == 0, "the end of the older one")
    assert "fenced" in job.log("i-1")
    assert "joined" not in job.log("i-1")
    job.send(job.samples(5 * GROUP * BATCH), partition=0)
    job.until_version(5)
    assert job.supervisor.exit_codes() == {"ps": None, "i-2": None, "i-1": 0}
    assert "fenced" not in job.log("i-2")
    assert {member.market for update in job.updates for member in update.members} == {"spot"}
    # The next one takes over, and nobody starts the one before again.
    job.supervisor.start(machine(job, "i-3", 3))
    job.until(lambda: job.supervisor.exit_codes()["i-2"] == 0, "the end of the one that was replaced")
    job.send(job.samples(3 * GROUP * BATCH), partition=0)
    job.until_version(8)
    assert job.supervisor.exit_codes()["i-3"] is None


def test_a_spot_notice_ends_a_worker_in_order(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("worker.notice_s=20")
    job.start_ps()
    with imds_stub() as stub:
        environment = {"DOLL_SPOT_NOTICES": "imds", "AWS_EC2_METADATA_SERVICE_ENDPOINT": stub.endpoint}
        worker = job.forks.launch(machine(job, "i-1", 1, **environment))
        job.until(lambda: "joined" in job.log("i-1"), "the machine to join")
        job.send(job.samples(3 * GROUP * BATCH), partition=0)
        job.until_version(3)
        assert worker.poll() is None
        stub.interrupt("2999-01-01T00:00:00Z")
        job.until(lambda: worker.poll() is not None, "the end of the worker")
    assert worker.exitcode == 0
    assert "interruption_notice" in job.log("i-1")
    assert "cause=notice" in job.log("i-1").replace("'", "").replace(" = ", "=")
