"""Records that Kafka deletes before they are learned: said everywhere with partition and offsets, never passed over."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from doll.cli.app import app
from doll.config import dump
from doll.errors import DataLossError
from doll.kafka.clients import kafka_settings
from doll.ledger.balance import Range
from job_rig import MakePipeline
from typer.testing import CliRunner

pytestmark = pytest.mark.integration


def delete_below(job: Any, partition: int, offset: int) -> None:
    admin = AdminClient(kafka_settings(job.config, job.services))
    topic = TopicPartition(job.config.topic("samples"), partition, offset)
    (future,) = admin.delete_records([topic]).values()
    future.result(60)


HELD_UP = ("worker.lease_s=60", "worker.fetch_max_wait_ms=50")


def lose_while_held_up(job: Any) -> None:
    """Worker 0 has read 16 records and stands still; of the 48 that follow, 26 go, and then it runs on."""
    job.send(job.samples(32))
    job.start()
    job.until(lambda: len(job.store.versions()) > 0 and job.checkpoint().version >= 2, "two durable updates")
    worker = job.role("worker-0")
    os.kill(worker.pid, signal.SIGSTOP)
    answered_s = time.monotonic() + 1.0  # the fetch that was under way has been answered, with nothing
    job.until(lambda: time.monotonic() > answered_s, "the end of a pause")
    for partition in (0, 1):
        job.send(job.samples(48), partition)
    delete_below(job, 0, 42)
    os.kill(worker.pid, signal.SIGCONT)


def stops(job: Any) -> str:
    """How the supervisor ends the job."""
    with pytest.raises(DataLossError) as caught:
        job.until_finished()
    return str(caught.value)


def cli(job: Any, *arguments: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOLL_KAFKA", job.services.kafka)
        patch.setenv("DOLL_REDIS", job.services.redis)
        return CliRunner().invoke(app, [*arguments, "--job", str(job.job_path)])


def test_unread_records_that_are_deleted_stop_the_job(make_pipeline: MakePipeline) -> None:
    job = make_pipeline(*HELD_UP)
    lose_while_held_up(job)
    said = stops(job)
    assert "samples/0: records 16 to 41 were deleted" in said
    assert "data.on_data_loss=skip" in said
    assert job.supervisor.exit_codes()["worker-0"] == 4
    report = job.audit()
    assert (report.ok, report.lost_ranges, report.lost) == (False, (Range(0, 16, 42),), 26)
    audit = cli(job, "audit", "--run-folder", str(job.run))
    assert audit.exit_code == 4
    assert "lost: partition 0: 16-41: deleted from the log before they were learned" in audit.stdout
    status = cli(job, "status")
    assert "lost: partition 0: 16-41: deleted from the log" in status.stdout
    assert "records lost: partition 0: 16-41" in json.dumps(json.loads(cli(job, "status", "--json").stdout)["events"])

    # A successor that begins below what the log holds does not go on either; one that may skip does.
    job.start_worker(0, "worker-0 again")
    assert "records 16 to 41 were deleted" in stops(job)
    skip = job.config.model_copy(update={"data": job.config.data.model_copy(update={"on_data_loss": "skip"})})
    job.job_path.write_text(dump(skip))
    job.config = skip
    job.start_worker(0, "worker-0 that may skip")
    job.until(lambda: job.checkpoint().version >= 8, "the rest of both streams")
    report = job.assert_audit_ok()
    assert (report.lost_ranges, report.lost, report.applied) == ((Range(0, 16, 42),), 26, 2 * 64 - 26)


def test_where_the_job_file_allows_it_lost_records_are_skipped_and_counted(make_pipeline: MakePipeline) -> None:
    job = make_pipeline(*HELD_UP, "data.on_data_loss=skip", "stop.samples=102")
    lose_while_held_up(job)
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.lost_ranges, report.lost, report.applied) == ((Range(0, 16, 42),), 26, 2 * 64 - 26)
    assert [member.lost for update in job.updates for member in update.members if member.lost] == [
        ((16, 24),), ((24, 32),), ((32, 40),), ((40, 42),),
    ]  # fmt: skip
    assert "records_lost" in job.log("worker-0")
    assert "samples/0: records 16 to 41 were deleted" in job.log("worker-0")
    audit = cli(job, "audit", "--run-folder", str(job.run))
    assert audit.exit_code == 0
    assert "26 lost" in audit.stdout
    assert "partition 0: 16-41" in audit.stdout
