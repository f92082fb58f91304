"""The audit against a real broker: a sound history balances, every kind of unsound one is named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from confluent_kafka import Producer
from doll.config import JobConfig, parse
from doll.errors import CheckpointError, ConfigError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.clients import kafka_settings
from doll.ledger import audit as audit_module
from doll.ledger.audit import audit
from doll.ledger.balance import LedgerReport, Range
from doll.records.control import AnyRecord, DeadLetter, Finished, Member, TermStarted, Update, encode
from doll.services import Services
from doll.storage.checkpoints import Checkpoint
from doll.storage.file_checkpoints import FileCheckpointStore
from memory_stores import MemoryCheckpointStore

pytestmark = pytest.mark.integration

B = 8


@dataclass
class Job:
    """Writes what a job's processes would write."""

    config: JobConfig
    services: Services
    store: MemoryCheckpointStore
    applied: list[int] = field(default_factory=lambda: [0, 0])
    version: int = 0

    def __post_init__(self) -> None:
        topics.ensure(self.config, self.services)
        # Each send is flushed: the order of the log is the order of the calls.
        self.producer = Producer(kafka_settings(self.config, self.services, **{"linger.ms": 0}))

    def send(self, kind: Any, values: Iterable[bytes], partition: int = 0) -> None:
        for value in values:
            self.producer.produce(self.config.topic(kind), value, partition=partition)
        assert self.producer.flush(300) == 0

    def records(self, *records: AnyRecord) -> None:
        self.send("updates", [encode(record) for record in records])

    def begin(self, term: int, resumed: int = 0) -> None:
        self.records(TermStarted(term=term, resumed_version=resumed, origins=(0, 0), records_per_batch=B, time_s=0.0))

    def update(self, term: int, version: int, *batches: tuple[int, int], **member: Any) -> None:
        members = tuple(
            Member(
                worker=n,
                partition=n,
                batch=j,
                lo=B * j,
                hi=B * j + B,
                n_samples=B,
                base_version=version - 1,
                **(member if j == 0 else {}),
            )
            for n, j in batches
        )
        self.records(Update(term=term, version=version, members=members, n_samples=B * len(members), loss=1.0))

    def save(self, term: int, version: int, *applied: int, records_per_batch: int = B) -> None:
        state = {
            "version": version,
            "applied": applied,
            "origins": (0, 0),
            "records_per_batch": records_per_batch,
            "samples_total": B * sum(applied),
            "sessions": [1, 1],
        }
        self.store.save(
            Checkpoint(
                job=self.config.job,
                fingerprint="any",
                term=term,
                version=version,
                state=msgspec.msgpack.encode(state),
                tensors={"weights": np.zeros(1, np.float32)},
            )
        )

    def dead(self, partition: int, offset: int) -> None:
        letter = DeadLetter(
            worker=partition, partition=partition, offset=offset, reason="?", payload=bytes(100), payload_bytes=100
        )
        self.send("dead", [encode(letter)])

    def audit(self) -> LedgerReport:
        return audit(self.config, self.services, self.store)


@pytest.fixture
def job(services: Services, job_name: str) -> Job:
    text = f"job: {job_name}\ntask: {{class: 'tests:Task'}}\ndata: {{workers: 2, batch_size: {B}}}\n"
    return Job(parse(text), services, MemoryCheckpointStore(job_name))


def sound(job: Job) -> None:
    """30 and 20 records. A server saves version 2, makes 3, dies; its successor makes another 3 and ends."""
    job.send("samples", [b"%d" % i for i in range(30)], partition=0)
    job.send("samples", [b"%d" % i for i in range(20)], partition=1)
    job.begin(1)
    job.dead(0, 3)
    job.update(1, 1, (0, 0), dead=(3,))
    job.update(1, 2, (1, 0), (0, 1))
    job.save(1, 2, 2, 1)
    job.update(1, 3, (0, 2))
    job.dead(0, 3)  # read again after the crash
    job.begin(2, resumed=2)
    job.update(1, 4, (1, 1))  # the old one still writes
    job.update(2, 3, (1, 1), (0, 2))
    job.save(2, 3, 3, 2)
    job.records(Finished(term=2, version=3, reason="stopped", time_s=0.0))


def test_a_sound_history_balances(job: Job) -> None:
    sound(job)
    report = job.audit()
    assert report.violations() == []
    assert report.summary() == (
        "audit: 50 offsets produced, 39 applied exactly once, 10 not yet applied, 0 missing, 0 twice, 1 dead-lettered"
    )
    assert (report.voided, report.updates, report.version, report.term) == (2, 3, 3, 2)
    assert [line.pending for line in report.partitions] == [6, 4]


def test_a_batch_applied_again_and_one_left_out_are_named(job: Job) -> None:
    sound(job)
    job.update(2, 4, (0, 0), (1, 2))
    job.send("samples", [b"x"] * 20, partition=0)
    job.send("samples", [b"x"] * 20, partition=1)
    job.save(2, 4, 4, 3)
    report = job.audit()
    assert not report.ok
    assert report.twice == (Range(0, 0, 8),)
    assert report.missing == (Range(0, 24, 32),)
    assert "missing: partition 0: 24-31" in report.violations()


def test_before_the_first_checkpoint_everything_is_to_come(job: Job) -> None:
    job.send("samples", [b"x"] * 10, partition=0)
    assert job.audit().summary().startswith("audit: 10 offsets produced, 0 applied exactly once, 10 not yet applied")
    job.save(1, 0, 0, 0)
    job.begin(1)
    job.update(1, 1, (0, 0))
    report = job.audit()
    assert report.ok
    assert (report.pending, report.unsaved) == (10, 1)


def test_updates_without_a_checkpoint_are_a_problem_that_names_where_it_was_looked_for(
    job: Job, tmp_path: Path
) -> None:
    """The checkpoints are lost, or the audit looks into the wrong folder."""
    job.send("samples", [b"x"] * 10, partition=0)
    job.begin(1)
    job.update(1, 1, (0, 0))
    report = audit(job.config, job.services, FileCheckpointStore(tmp_path / "checkpoints", job.config.job))
    assert not report.ok
    assert f"no checkpoint was found in {tmp_path / 'checkpoints'}" in " ".join(report.violations())


def test_a_gap_that_is_none_is_found_on_the_broker(job: Job) -> None:
    job.send("samples", [b"x"] * 20, partition=0)
    job.begin(1)
    job.update(1, 1, (0, 0), gaps=((2, 4),))
    job.save(1, 1, 1, 0)
    report = job.audit()
    assert report.missing == (Range(0, 2, 4),)
    assert "but the log holds records: partition 0: 2-3" in " ".join(report.violations())


def test_a_real_gap_is_one(job: Job) -> None:
    """A transaction's end marker takes an offset and is no record."""
    producer = Producer(kafka_settings(job.config, job.services, **{"transactional.id": job.config.job}))
    producer.init_transactions(60)
    for _ in range(2):  # offsets 0-2 and marker 3; 4-6 and 7
        producer.begin_transaction()
        for _ in range(3):
            producer.produce(job.config.topic("samples"), b"x", partition=0)
        producer.commit_transaction(60)
    job.begin(1)
    job.update(1, 1, (0, 0), gaps=((3, 4), (7, 8)))
    job.save(1, 1, 1, 0)
    report = job.audit()
    assert report.violations() == []
    assert (report.applied, report.gaps) == (6, 2)


def test_unreadable_records_are_problems(job: Job) -> None:
    sound(job)
    letter = DeadLetter(worker=0, partition=0, offset=0, reason="", payload=b"", payload_bytes=0)
    job.send("updates", [b"garbage"])
    job.send("updates", [encode(letter)])
    report = job.audit()
    assert not report.ok
    assert "updates, offset 8: expected a control record (first byte 0xd0), got first byte 0x67" in report.problems[0]
    assert report.problems[1].endswith("updates, offset 9: a DeadLetter does not belong there")


def test_it_looks_again_when_a_checkpoint_was_saved_meanwhile(job: Job) -> None:
    """As read: version 2 from the old checkpoint, then an end at version 3. Only the second look fits together."""
    sound(job)
    old = MemoryCheckpointStore(job.config.job)
    job.store, new = old, job.store
    job.save(1, 2, 2, 1)

    class Saving(MemoryCheckpointStore):
        loads = 0

        def load_newest(
            self,
            fingerprint: str | None,
            version: int | None = None,
            *,
            in_place: bool = False,
            with_parts: bool = True,
        ) -> Checkpoint | None:
            self.loads += 1
            return (old if self.loads == 1 else new).load_newest(fingerprint)

        def versions(self) -> list[tuple[int, int]]:
            return new.versions()

    store = Saving(job.config.job)
    assert audit(job.config, job.services, store).violations() == []
    assert store.loads == 2
    job.store = old
    assert "the job ended at version 3, but the newest checkpoint is of version 2" in " ".join(job.audit().problems)


def test_what_hinders_an_audit_is_said(job: Job, services: Services) -> None:
    store = MemoryCheckpointStore("never-ran")
    text = "job: never-ran\ntask: {class: 'tests:Task'}\n"
    with pytest.raises(ServiceUnavailableError, match=r"topic doll\.never-ran\.samples does not exist"):
        audit(parse(text), services, store)
    wider = job.config.model_copy(update={"data": job.config.data.model_copy(update={"workers": 3})})
    with pytest.raises(ConfigError, match="expected 3 partitions, found 2"):
        audit(wider, services, job.store)
    job.save(1, 1, 1, 0, records_per_batch=4)
    with pytest.raises(CheckpointError, match="of 2 partitions with 4 records per batch, the job file says 2 and 8"):
        job.audit()
    with pytest.raises(CheckpointError, match=r"expected a checkpoint of job 'other'"):
        audit(job.config, services, job.store.handle("other"))


@pytest.mark.parametrize("long_records", [2, 5000])
def test_gaps_far_apart_and_near_are_all_looked_up(
    job: Job, monkeypatch: pytest.MonkeyPatch, long_records: int
) -> None:
    monkeypatch.setattr(audit_module, "_MAX_GAP_RECORDS", 3)
    monkeypatch.setattr(audit_module, "_LONG_RECORDS", long_records)
    job.send("samples", [b"x"] * 24, partition=0)
    job.send("samples", [b"x"] * 24, partition=1)
    job.begin(1)
    job.update(1, 1, (0, 0), (1, 0), gaps=((0, 1), (2, 3), (7, 8)))
    job.save(1, 1, 1, 1)
    expected = [Range(n, lo, lo + 1) for n in (0, 1) for lo in (0, 2, 7)]
    assert job.audit().missing == tuple(expected)
