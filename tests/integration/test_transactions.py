"""Transactions of producers: what they commit is learned, what they abort is not, what is open is waited for."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer
from doll.kafka.clients import kafka_settings
from job_rig import MakePipeline

pytestmark = pytest.mark.integration


class Writer:
    """A producer whose records go to partition 0; transactional where it has a name. It compresses as it likes."""

    def __init__(self, job: Any, name: str = "", codec: str = "gzip") -> None:
        # The default limit of 60 s ends a transaction that is left open while a slow machine gets to its next update.
        open_ms = {"transaction.timeout.ms": 600_000}
        more = {"transactional.id": f"{job.config.job}-{name}", **open_ms} if name else {}
        self._producer = Producer(kafka_settings(job.config, job.services, **more, **{"compression.type": codec}))
        self._topic = job.config.topic("samples")
        self.offsets: list[int] = []
        if name:
            self._producer.init_transactions(60)
            self._producer.begin_transaction()

    def write(self, *values: bytes) -> None:
        for value in values:
            self._producer.produce(
                self._topic, value, partition=0, on_delivery=lambda _, message: self.offsets.append(message.offset())
            )
        assert self._producer.flush(60) == 0

    def commit(self) -> None:
        self._producer.commit_transaction(60)

    def abort(self) -> None:
        self._producer.abort_transaction(60)


def test_only_what_is_committed_is_learned(make_pipeline: MakePipeline) -> None:
    job = make_pipeline()
    plain, kept = Writer(job, codec="lz4"), Writer(job, "kept", codec="zstd")
    dropped = Writer(job, "dropped", codec="snappy")
    for _ in range(2):  # offsets 0 to 5, of three producers in turn
        plain.write(*job.samples(1))
        kept.write(*job.samples(1))
        dropped.write(b"this would be a dead letter")
    kept.commit()
    dropped.abort()  # their markers come at any of the next ten offsets
    plain.write(*job.samples(8))
    job.send(job.samples(16), 1)
    job.start()
    job.until(lambda: len(job.store.versions()) > 0 and job.checkpoint().version >= 2, "two durable updates")
    report = job.assert_audit_ok()
    assert (report.applied, report.gaps, report.dead, report.pending) == (2 + 2 + 8 + 16, 4, 0, 0)
    assert dropped.offsets == [2, 5]
    assert job.read("dead") == []

    # A transaction that is left open holds back what comes behind it, and nothing else.
    hanging = Writer(job, "hanging")
    hanging.write(*job.samples(4))
    plain.write(*job.samples(4))  # without the open transaction, a whole batch
    job.send(job.samples(16), 1)
    job.until(lambda: job.checkpoint().version >= 3, "an update of the other stream alone")
    report = job.assert_audit_ok()
    assert [(line.applied_until, line.end) for line in report.partitions] == [(16, 16), (32, 32)]
    job.until_status(lambda status: status.workers[0].lag_records == 0, "no lag: what is open is not there yet")
    hanging.commit()  # its marker stands behind the last whole batch
    job.send(job.samples(8), 1)
    job.until(lambda: job.checkpoint().version >= 4, "the update of what was held back")
    report = job.assert_audit_ok()
    assert (report.applied, report.gaps, report.pending, report.lost) == (12 + 8 + 40, 4, 1, 0)
    # A batch that ends in a marker is complete without a record behind it.
    last = Writer(job, "last")
    last.write(*job.samples(6))
    last.commit()
    job.send(job.samples(8), 1)
    job.until(lambda: job.checkpoint().version >= 5, "the update of a batch that ends in a marker")
    report = job.assert_audit_ok()
    assert (report.applied, report.gaps, report.pending) == (60 + 6 + 8, 6, 0)
    assert job.restarts == []


def test_a_long_hole_is_passed_in_a_few_updates(make_pipeline: MakePipeline) -> None:
    job = make_pipeline()  # batches of 8, two in an update
    plain, dropped = Writer(job), Writer(job, "dropped")
    plain.write(*job.samples(20))
    dropped.write(*[b"x"] * 24_000)
    dropped.abort()
    plain.write(*job.samples(60))
    job.send(job.samples(80), 1)
    job.start()
    job.until(lambda: len(job.store.versions()) > 0 and job.audit().pending < 16, "all but what is no group")
    report = job.assert_audit_ok()
    assert report.gaps >= 24_000, "the transaction's marker may stand behind the last whole batch"
    assert report.applied >= 144
    assert job.checkpoint().version < 20, "each update has samples, except the update that skips"
