"""Scale-in with real workers, Kafka and Redis: the other worker takes over, the released one comes back, all counts."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from doll.config import dump, load
from doll.provisioner.state_store import FileStateStore
from doll.records.control import Leave
from job_rig import MakePipeline
from paths import SUPPORT
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.integration

OVERRIDES = (
    "plan.deadline_s=100000", "plan.spot_usd_per_h=0.158",
    "plan.on_demand_usd_per_h=0.286", "plan.boot_s=5", "plan.alpha=0.999", "plan.cycle_s=36000",
    "provision.every_s=1", "arrivals.process=poisson",
    "arrivals.rate_per_s=20", "stop.updates=2000", "provision.scale_in.enabled=true", "provision.scale_in.every_s=2",
    "provision.scale_in.horizon_s=2", "provision.scale_in.knee_slope=-0.01",
    f"task.class={SUPPORT / 'held_out_task.py'}:HeldOut",
)  # fmt: skip

UPDATES_PER_S = 50  # until the release: the 2,000 updates of the job last 40 s


@pytest.fixture(params=["bsp", "isp"])
def job(request: pytest.FixtureRequest, make_pipeline: MakePipeline) -> Any:
    job = make_pipeline(*OVERRIDES, f"training.policy={{name: {request.param}}}")
    job.start_ps()
    return job


def test_a_worker_leaves_in_order_and_comes_back(job: Any) -> None:
    """The knee, the release, the Leave, the move, the recall by the job file, and the audit at the end."""
    provisioner = job.doll("provision run", log="provision")
    play(job)
    assert provisioner.wait(WAIT_TIMEOUT_S) == 0, job.log("provision")
    report = job.assert_audit_ok()
    assert report.applied + report.pending == job.sent
    entries = journal(job)
    kinds = [entry["kind"] for entry in entries]
    assert kinds.count("release") == kinds.count("recall") == 1
    last = [entry for entry in entries if entry["kind"] == "decision"][-1]
    assert (last["phase"], last["finished"]) == ("done", True)


def journal(job: Any) -> list[dict[str, Any]]:
    path = FileStateStore(job.run, job.config.job).journal
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def play(job: Any) -> None:
    job.sent = 0
    begun_s = time.monotonic()

    def feed(updates: int) -> None:
        job.send(job.samples(16 * updates))
        job.sent += 16 * updates

    def changed(kind: str) -> list[dict[str, Any]]:
        return [entry for entry in journal(job) if entry["kind"] == kind]

    def released() -> bool:
        # The stream goes on, and never so fast that the job has ended before the release.
        is_due = job.sent < 16 * UPDATES_PER_S * (time.monotonic() - begun_s)
        if is_due and job.status is not None and all(worker.is_live for worker in job.status.workers):
            feed(2)
        return bool(changed("release"))

    job.until(released, "a release")
    (release,) = changed("release")
    slot = release["slot"]
    job.until_status(lambda status: not status.workers[slot].is_live, "the worker to leave")
    leaves = [record for record in job.read("events") if isinstance(record, Leave)]
    assert [leave.worker for leave in leaves] == [slot], "it left, it was not killed"
    filters = any(member.held_back for update in job.updates for member in update.members)
    evaluates = any(member.shared_loss is not None for update in job.updates for member in update.members)
    assert filters == evaluates == (job.config.training.policy.name == "isp")
    assert release["by"], "what distinguished this worker from the other"
    job.until(lambda: nothing_held_back(job, slot), "all that its filter held back")
    (ended,) = [machine for machine in machines(job) if machine["instance"]["slot"] == slot]
    assert ended["exit_code"] in (0, None)

    job.until_status(lambda status: status.released == (slot,) and not status.moving_partitions, "the move")
    seen, applied = len(job.updates), applied_of(job, slot)
    feed(20)
    job.until(lambda: learned_from(job, slot, seen) >= {1 - slot}, "updates of its partition by the other worker")
    assert applied_of(job, slot) == applied
    assert len(machines(job)) == 2, "no machine is launched for it"

    config = load(job.job_path, ["provision.scale_in.enabled=false"])
    job.job_path.write_text(dump(config))
    job.until_status(lambda status: status.workers[slot].is_live, "the worker to come back")
    feed(2100)
    job.until_finished()
    assert applied_of(job, slot) > applied


def nothing_held_back(job: Any, slot: int) -> bool:
    """What a worker's filter (isp) kept of the steps of its batches is in the model."""
    settled = [until for update in job.updates for worker, until in update.settled if worker == slot]
    held_back = [
        member.batch
        for update in job.updates
        for member in update.members
        if member.worker == slot and member.held_back
    ]
    return max(settled, default=0) > max(held_back, default=-1)


def applied_of(job: Any, slot: int) -> int:
    return sum(member.worker == slot for update in job.updates for member in update.members)


def learned_from(job: Any, partition: int, since: int) -> set[int]:
    """Workers that have learned from a partition, in updates from this one on."""
    members = (member for update in job.updates[since:] for member in update.members)
    return {member.worker for member in members if member.partition == partition}


def machines(job: Any) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads((job.run / "instances.json").read_text())
    return content
