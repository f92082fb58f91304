"""A stream that is far ahead of its workers: they read on as there is room, and their mail is never held up."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Producer
from doll.kafka.clients import kafka_settings
from job_rig import MakePipeline

pytestmark = pytest.mark.integration


def test_a_backlog_above_all_buffers_is_learned(make_pipeline: MakePipeline) -> None:
    """32 batches that are not durable and 4096 buffered records leave no room for the rest of 10,000 in one fetch.

    Faust hands out all topics in one loop: were a sample to wait for room there, the durable watermark that makes room
    would wait behind it, for ever.
    """
    job = make_pipeline("data.batch_size=64", "stop.updates=156", "worker.stall_timeout_s=60")
    job.send(job.samples(20_000))
    job.start()
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.applied, report.voided) == (156, 156 * 2 * 64, 0)
    assert job.supervisor.exit_codes()["worker-0"] == 0
    assert "exiting code=1" not in job.log("worker-0") + job.log("worker-1")


def test_the_end_of_a_log_that_holds_no_record_is_not_waited_for(make_pipeline: MakePipeline) -> None:
    """The marker of a transaction takes the last offset: a worker must not start again and again for its sake."""
    job = make_pipeline("stop.updates=4", "worker.stall_timeout_s=10")
    producer = Producer(kafka_settings(job.config, job.services, **{"transactional.id": job.config.job}))
    producer.init_transactions(60)

    def send(count: int) -> None:
        producer.begin_transaction()
        for i, value in enumerate(job.samples(count)):
            producer.produce(job.config.topic("samples"), value, partition=i % 2)
        producer.commit_transaction(60)

    send(2 * 2 * 8)
    job.start()
    job.until_version(2)
    before = list(job.restarts)
    rests_until_s = time.monotonic() + 13.0  # longer than records may stay away
    job.until(lambda: time.monotonic() > rests_until_s, "the end of a pause")
    assert job.restarts == before
    send(2 * 2 * 8)
    job.until_finished()
    job.assert_audit_ok()
