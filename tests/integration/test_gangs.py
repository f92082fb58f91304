"""A job whose worker is a gang of pods on a real API server: the worker and each stage are processes of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import kube_cluster
import pytest
from fleet_worlds import on_kubernetes
from job_rig import MakePipeline
from provision_program import Provisioner, journal_of
from waiting import WAIT_TIMEOUT_S

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif((why := kube_cluster.unavailable_reason()) is not None, reason=str(why)),
]
JOB = (
    "task.args={features: 4, hidden: [16, 16]}", "data.workers=1", "stop.updates=40",
    "training.policy={name: wsp, wave_batches: 4, clock_distance: 1}",
    "worker.pipeline={stages: 2, stage_timeout_s: 4, remote: true}",
    "plan.deadline_s=600", "plan.spot_usd_per_h=0.158", "plan.on_demand_usd_per_h=0.286", "plan.boot_s=5",
    "plan.alpha=0.99", "plan.cycle_s=60", "provision.every_s=1", "arrivals.process=poisson", "arrivals.rate_per_s=20",
)  # fmt: skip


def test_a_gang_is_replaced_when_the_node_of_a_stage_is_lost(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    with on_kubernetes(make_pipeline, JOB, tmp_path) as (job, world):
        provision = Provisioner(job)
        made = partial(journal_of, job.run, job, "launched")
        try:
            job.start_ps()
            for _ in range(4):  # one more than a gang needs
                world.add()
            process = provision("run")
            job.send(job.samples(16_000))
            job.until_version(3)
            assert len(world.of_workers()) == 3
            (first,) = made()
            world.kill(world.node_of(f"{first['id']}-s1"))
            job.until(lambda: len(made()) == 2, "the second gang")
            job.until_version(job.version + 3)
            job.until_finished()
            process.communicate(timeout=WAIT_TIMEOUT_S)
            assert process.returncode == 0, job.log("provision-0")
        finally:
            provision.close()
        ended = journal_of(job.run, job, "ended")
        assert [(entry["end_reason"], entry["machines"]) for entry in ended] == [("interrupted", 3), ("terminated", 3)]
        assert job.assert_audit_ok().lost == 0
