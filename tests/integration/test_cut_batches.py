"""Batches that are cut by age and by the end of a source, with real Kafka: a quiet partition holds up nobody."""

from __future__ import annotations

from typing import Any

import pytest
from doll.records.control import SourceEnded, Update
from job_policies import some
from job_rig import MakePipeline

pytestmark = [pytest.mark.slow, pytest.mark.integration]  # starts servers


def learned(updates: list[Update]) -> int:
    """Samples in the model."""
    return updates[-1].samples_total if updates else 0


def until_learned(job: Any, samples: int) -> None:
    job.until(lambda: learned(job.updates) >= samples, f"{samples} samples in the model")


QUIET = ["{name: bsp}", "{name: doll, group_size: 3}", "{name: ssp, staleness: 1}"]


@pytest.mark.parametrize("policy", some(QUIET, "bsp", "ssp"))
def test_a_quiet_partition_holds_up_no_group_and_no_record_counts_twice(
    make_pipeline: MakePipeline, policy: str
) -> None:
    """One partition gets full batches, the others few records, while workers and the server are killed."""
    job = make_pipeline(f"training.policy={policy}", "data.workers=3", "data.batch_size=8", "data.cut_after_s=0.3")
    job.start()
    sent = 0
    for number in range(6):
        for partition, count in ((0, 5), (1, 8), (2, 1 + number % 3)):
            job.send(job.samples(count), partition)
            sent += count
        until_learned(job, sent)
        if number == 1:
            job.kill("worker-0")
        elif number == 3:
            job.kill("ps")
            job.until(lambda: len(job.term_starts) == 2, "another server")
        elif number == 4:
            job.kill("worker-2")
    job.until_status(lambda status: status.durable_version == status.version, "a checkpoint of all")
    report = job.assert_audit_ok()
    assert (report.applied, report.pending, report.dead) == (sent, 0, 0)
    cut = [member for update in job.updates for member in update.members if member.cut]
    assert {member.partition for member in cut} >= {0, 2}
    assert all(0 < member.hi - member.lo < 8 for member in cut)


def test_the_end_of_a_source_is_learned_by_a_server_that_was_not_there(make_pipeline: MakePipeline) -> None:
    """The source ended before the first server began, and said so; more is said there of a topic that is gone."""
    job = make_pipeline("data.batch_size=8", "data.partitions=3", "training.policy={name: doll, group_size: 4}")
    job.send(job.samples(31))
    job.control("events", SourceEnded(ends=(11, 10, 10)))
    job.control("events", SourceEnded(ends=(5_000, 10, 10)))
    job.control("events", b"sourceended")
    job.start()
    until_learned(job, 31)
    job.until_status(lambda status: status.source_ended, "a server that knows of it")
    job.until_status(lambda status: status.durable_version == status.version, "a checkpoint of all")
    assert job.assert_audit_ok().pending == 0


POLICIES = [
    "{name: doll, group_size: 5}",
    "{name: bsp}",
    "{name: asp}",
    "{name: ssp, staleness: 0}",
    "{name: essp, staleness: 1}",
    "{name: vap, value_bound: 5}",
    "{name: isp}",
    "{name: wsp, wave_batches: 3, clock_distance: 0}",
    "{name: diloco, local_batches: 3, grace_s: 0.2}",
]


@pytest.mark.parametrize("policy", some(POLICIES, "doll", "isp", "wsp", "diloco"))
def test_a_source_that_ends_is_learned_to_its_last_record(make_pipeline: MakePipeline, policy: str) -> None:
    """`doll produce` sends a number of samples that fills neither batches nor groups. A worker is killed meanwhile."""
    samples = 8 * 5 * 7 + 3
    job = make_pipeline(
        f"training.policy={policy}", "data.workers=3", "data.partitions=5", "data.batch_size=8",
        "source={kind: python, of: examples.synthetic.source:gaussians, args: {features: 4}}",
        f"source.limit_samples={samples}",
        "arrivals={process: poisson, rate_per_s: 40}",
    )  # fmt: skip
    job.start()
    job.start_producer()
    job.until(lambda: learned(job.updates) > 40, "some updates")
    job.kill("worker-1")
    until_learned(job, samples)
    job.until_status(lambda status: status.durable_version == status.version, "a checkpoint of all")
    report = job.assert_audit_ok()
    assert (report.produced, report.applied, report.pending) == (samples, samples, 0)
