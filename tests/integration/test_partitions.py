"""More partitions than workers, on the real broker: each is learned once and in order, whoever dies."""

from __future__ import annotations

import pytest
from job_policies import some
from job_rig import MakePipeline

pytestmark = [pytest.mark.slow, pytest.mark.integration]  # starts servers

# Samples of each partition, in batches of 8. Both workers have as many: under a policy with clocks one waits for the
# other, whose partitions are dry.
SKEW = (160, 152, 40, 56, 8)

POLICIES = [
    "{name: doll, group_size: 2}",
    "{name: ssp, staleness: 2}",
    "{name: isp}",
    "{name: wsp, wave_batches: 2, clock_distance: 2}",
]


@pytest.mark.parametrize("policy", some(POLICIES, "doll", "wsp"))
def test_a_worker_learns_from_several_partitions_of_unequal_length(make_pipeline: MakePipeline, policy: str) -> None:
    job = make_pipeline(f"training.policy={policy}", "data.partitions=5", "data.batch_size=8")
    job.start()
    for partition, count in enumerate(SKEW):
        job.send(job.samples(count), partition)
    job.until(lambda: job.version >= 3, "some updates")
    job.kill("worker-1")
    for partition, count in enumerate(SKEW):
        job.send(job.samples(count), partition)
    job.until(lambda: job.version >= 6, "more updates")
    job.kill("ps")
    for partition, count in enumerate(SKEW):
        job.send(job.samples(count), partition)
    learned = 3 * sum(SKEW) - 8 * 4  # a group, a wave or a round may be left open
    job.until(lambda: bool(job.updates) and job.updates[-1].samples_total >= learned, "nearly all samples", 120)
    job.role("ps").terminate()
    report = job.assert_audit_ok()
    assert [line.produced for line in report.partitions] == [3 * count for count in SKEW]
    workers = {(member.worker, member.partition) for update in job.updates for member in update.members}
    assert {(partition % 2, partition) for partition in range(4)} <= workers <= {(n % 2, n) for n in range(5)}
