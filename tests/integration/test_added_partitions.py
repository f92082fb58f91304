"""Partitions that are added to the topic while a job learns from it: each record of them counts once, whoever dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doll.cli.app import app
from doll.ps.checkpointing import decode_snapshot
from doll.services import Services
from job_policies import some
from job_rig import MakePipeline
from owners_topic import OwnersTopic, samples
from typer.testing import CliRunner

pytestmark = [pytest.mark.slow, pytest.mark.integration]  # starts servers


def known(job: Any) -> tuple[int, ...]:
    """Where the partitions begin that the newest checkpoint knows of."""
    return decode_snapshot(job.checkpoint()).origins


def learn_all(job: Any) -> None:
    job.until(lambda: all(line.pending < 8 for line in job.audit().partitions), "all whole batches", 240)


def served_by(job: Any) -> dict[int, int]:
    """The worker of each partition, as of the updates seen."""
    return {member.partition: member.worker for update in job.updates for member in update.members}


POLICIES = ["{name: asp}", "{name: isp}", "{name: wsp, wave_batches: 2, clock_distance: 3}"]


@pytest.mark.parametrize("policy", some(POLICIES, "asp", "wsp"))
def test_a_topic_of_somebody_else_grows_while_workers_and_server_are_killed(
    services: Services, job_name: str, make_pipeline: MakePipeline, policy: str
) -> None:
    owner = OwnersTopic(services.kafka, f"clicks.{job_name}")
    owner.create(4)

    def fill(count: int) -> None:
        for partition in range(owner.partitions):
            owner.fill(partition, samples(count))

    fill(40)  # from before the job
    job = make_pipeline(
        f"data.topic={owner.name}", "data.partitions=4", "data.workers=3", "data.start=latest",
        f"training.policy={policy}", "checkpoint.every_s=0.3",
    )  # fmt: skip
    job.start_ps()
    job.until(lambda: bool(job.term_starts), "the server, which has decided where the job begins")
    for worker in range(3):
        job.start_worker(worker)
    fill(64)
    job.until(lambda: job.version >= 4, "some updates")
    owner.add_partitions(6)
    fill(64)
    job.kill("worker-1")
    job.until(lambda: len(known(job)) == 6, "a checkpoint that knows of them")
    job.kill("ps")
    owner.add_partitions(7)  # while there is no server
    fill(64)
    job.kill("worker-2")
    seen = len(job.updates)
    job.until(lambda: len(known(job)) == 7, "a checkpoint that knows of all")
    job.kill("ps")
    fill(64)
    job.until(lambda: len(job.updates) > seen + 3, "more updates")
    job.kill("worker-0")
    fill(64)
    if "asp" in policy:
        learn_all(job)
    else:  # who has most to learn waits for the others, which have learned all
        job.until(lambda: all(line.applied >= 16 for line in job.audit().partitions), "batches of each partition", 240)
    job.role("ps").terminate()
    report = job.assert_audit_ok()
    assert known(job) == (40, 40, 40, 40, 0, 0, 0)
    assert [line.produced for line in report.partitions] == [320] * 4 + [256, 256, 192]
    assert all((line.missing, line.twice, line.lost) == (0, 0, 0) for line in report.partitions)
    job.until(lambda: len(served_by(job)) == 7, "an update with each partition, which the audit has seen before")
    assert sorted(map(list(served_by(job).values()).count, range(3))) == [2, 2, 3]
    assert [restart.name for restart in job.restarts if restart.exit_code > 0] == []
    assert {record.origins for record in job.term_starts} >= {(40, 40, 40, 40), known(job)}


def test_a_topic_of_the_job_s_own_that_was_altered_is_read_whole_and_commands_go_on(
    services: Services, job_name: str, make_pipeline: MakePipeline
) -> None:
    job = make_pipeline("training.policy={name: asp}", "checkpoint.every_s=0.3")
    job.start()
    job.send(job.samples(64))
    job.until(lambda: job.version >= 4, "some updates")
    topic = OwnersTopic(services.kafka, job.config.topic("samples"))
    topic.add_partitions(3)
    topic.fill(2, [*samples(63), b"not a sample"])
    job.send(job.samples(64))  # as a producer of DOLL that knows of two
    assert job.audit().pending >= 64, "what no checkpoint knows of is to come"
    learn_all(job)
    job.kill("worker-0")
    topic.fill(2, samples(64))
    learn_all(job)

    def cli(*arguments: str | Path) -> Any:
        words = [*arguments, job.job_path, "--set", f"kafka.address={services.kafka}", "--json"]
        if arguments[0] != "status":
            words += ["--run-folder", job.run]
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    assert cli("status")["lost"] == []
    (dead,) = cli("dead", "list")
    assert (dead["partition"], dead["offset"]) == (2, 63)
    assert [line["produced"] for line in cli("audit")["partitions"]] == [64, 64, 128]
    (replayed,) = cli("dead", "replay", "--offset", "2/63")
    assert replayed["new_offset"] == 128
    job.start_worker(1, "worker-1-again")  # with the job file of the beginning, and the topic of now
    job.role("ps").terminate()
    job.assert_audit_ok()
