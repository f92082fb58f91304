"""A job goes on with another number of workers: no sample is lost, none counts twice."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.integration]  # starts servers


@pytest.mark.parametrize("policy", ["{name: doll, group_size: 2}", "{name: ssp, staleness: 2}", "{name: isp}"])
def test_workers_become_more_and_fewer_between_runs(make_pipeline: Any, policy: str) -> None:
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
