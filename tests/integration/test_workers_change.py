"""A job goes on with another number of workers: no sample is lost, none counts twice."""

from __future__ import annotations

import re

import pytest
from doll.ps.checkpointing import decode_snapshot
from doll.records.control import Scale, Update
from job_policies import POLICIES, some
from job_rig import MakePipeline

pytestmark = [pytest.mark.slow, pytest.mark.integration]  # starts servers


@pytest.mark.parametrize("policy", some([policy for policy in POLICIES if re.search("doll|: ssp|isp", policy)], "ssp"))
def test_workers_become_more_and_fewer_between_runs(make_pipeline: MakePipeline, policy: str) -> None:
    job = make_pipeline(f"training.policy={policy}", "data.partitions=6", "data.batch_size=8", "stop.updates=4")
    job.send(job.samples(6 * 48))
    served: list[dict[int, int]] = []
    for number, workers in enumerate((2, 5, 3, 1)):
        job.resize(workers, stop_updates=4 * (number + 1))
        seen = len(job.updates)
        job.start()
        job.until_finished()
        report = job.assert_audit_ok()
        served.append({member.partition: member.worker for update in job.updates[seen:] for member in update.members})
        assert set(served[-1].values()) <= set(range(workers))
    assert report.term == 4
    assert len({frozenset(owners.items()) for owners in served}) > 1


@pytest.mark.parametrize("policy", some(POLICIES, "essp", "vap", "isp", "diloco"))
def test_workers_become_more_and_fewer_while_the_job_runs(make_pipeline: MakePipeline, policy: str) -> None:
    """`doll scale` from two workers to five and to one, with a server and workers killed on the way."""
    job = make_pipeline(f"training.policy={policy}", "data.partitions=6", "data.batch_size=8")
    job.start()

    def learn(more: int) -> None:
        job.send(job.samples(6 * 8 * more))
        seen = len(job.updates)
        # Under isp the rests of steps are updates without batches.
        job.until(lambda: sum(bool(update.members) for update in job.updates[seen:]) > 1, "more updates")

    def scale(workers: int) -> None:
        job.until_status(lambda status: bool(status.run_id), "a status")
        job.control("events", Scale(workers=workers, run_id=job.last_status.run_id))
        job.until_status(
            lambda status: status.num_workers == workers and not status.moving_partitions, "moved partitions"
        )
        job.until(lambda: decode_snapshot(job.checkpoint()).num_workers == workers, "a checkpoint that knows of it")

    learn(4)
    for worker in (2, 3, 4):
        job.start_worker(worker)
    scale(5)
    seen = len(job.updates)
    learn(4)
    job.kill("worker-3")
    learn(4)
    job.until(lambda: {2, 3, 4} <= served_by(job.updates[seen:]), "updates of the new workers")
    job.kill("ps")
    learn(4)
    job.until_status(lambda status: status.num_workers == 5, "the server that came later")
    scale(1)
    seen = len(job.updates)
    learn(8)
    spares = {worker.worker for worker in job.last_status.workers if worker.is_spare}
    assert spares == {1, 2, 3, 4}
    assert served_by(job.updates[seen + 1 :]) == {0}
    assert [restart for restart in job.restarts if restart.name not in ("ps", "worker-3")] == []
    job.role("ps").terminate()
    job.assert_audit_ok()


def served_by(updates: list[Update]) -> set[int]:
    return {member.worker for update in updates for member in update.members}
