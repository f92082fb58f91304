"""A broker that takes at most 1,000,000 bytes: the longest control records, and a job with records near that."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType
from doll.config import JobConfig
from doll.kafka.publisher import Publisher
from doll.kafka.reader import Tail
from doll.kafka.topic_plan import TOPIC_KINDS
from doll.records.control import AnyRecord, Member, ServerStatus, Update, WorkerStatus, encode
from doll.records.record_sizes import COMPRESSED, fitted
from doll.services import Services
from job_files import job
from job_rig import MakePipeline
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.integration

LIMIT_BYTES = 1_000_000  # of managed services; Kafka's own default is 1,048,588
WORKERS, BATCHES = 10_000, 6_000
RNG = random.Random(0)


def seconds() -> float:
    return RNG.random() * 30


def long_status(count: int, *, waiting: bool) -> ServerStatus:
    """All numbers at random, so that they compress badly. `waiting`: each worker for a reason of its own."""
    workers = tuple(
        WorkerStatus(
            worker=n, is_live=RNG.random() < 0.9, session=RNG.randrange(2**31), incarnation=RNG.randrange(1000),
            restarts=RNG.randrange(1000), live_since_s=1.7e9 + seconds(), silent_s=seconds(), market="on_demand",
            retained_batches=RNG.randrange(1000), lag_records=RNG.randrange(2**40), control="redis", batch_s=seconds(),
            time_limit_s=seconds(), is_stalled=RNG.random() < 0.5, partitions=RNG.randrange(100),
            waiting_for=RNG.randbytes(90).hex() if waiting else "",
        )
        for n in range(count)
    )  # fmt: skip
    return ServerStatus(
        term=3, time_s=1.7e9, leader_since_s=1.7e9, pid=1, version=1, durable_version=1, samples_total=1,
        batches_total=1, waiting_batches=0, computing_batches=0, shortfall_batches=0, stalled_s=0.0, workers=workers,
    )  # fmt: skip


def long_update() -> Update:
    members = tuple(
        Member(
            worker=n, partition=n, batch=RNG.randrange(2**33), lo=(lo := RNG.randrange(2**40)), hi=lo + 64,
            n_samples=64, base_version=RNG.randrange(10**6), compute_s=seconds(), fetch_s=seconds(), store_s=seconds(),
            wait_s=seconds(), grant_to_push_s=seconds(), market=RNG.choice(("spot", "on_demand")),
            set_grant_id=RNG.randrange(2**33), loss_sum=seconds(),
        )
        for n in range(BATCHES)
    )  # fmt: skip
    return Update(term=3, version=10**6, members=members, n_samples=64 * BATCHES, loss=0.5)


def set_limit(services: Services, topics: list[str], limit_bytes: int) -> None:
    admin = AdminClient({"bootstrap.servers": services.kafka})
    entry = ConfigEntry("max.message.bytes", str(limit_bytes), incremental_operation=AlterConfigOpType.SET)
    resources = [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry]) for topic in topics]
    for future in admin.incremental_alter_configs(resources).values():
        future.result(WAIT_TIMEOUT_S)


@pytest.fixture
def limited(services: Services, job_name: str) -> Iterator[JobConfig]:
    config = job(name=job_name)
    admin = AdminClient({"bootstrap.servers": services.kafka})
    names = [config.topic("metrics"), config.topic("updates")]
    for future in admin.create_topics([NewTopic(name, 1, 1) for name in names]).values():
        future.result(WAIT_TIMEOUT_S)
    yield config
    admin.delete_topics(names)


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("metrics", fitted(long_status(WORKERS, waiting=True))), ("metrics", fitted(long_status(7_000, waiting=False))),
        ("updates", long_update()),
    ],
    ids=["status of what others decide by", "status", "update"],
)  # fmt: skip
def test_the_longest_records_are_taken_and_read(
    limited: JobConfig, services: Services, kind: Any, record: AnyRecord
) -> None:
    size_bytes = len(encode(record))
    sys.stdout.write(f"{kind}: {size_bytes} bytes as encoded\n")
    topic = limited.topic(kind)
    # Also the factor that is reckoned with.
    set_limit(services, [topic], size_bytes // COMPRESSED if size_bytes > LIMIT_BYTES else LIMIT_BYTES)
    assert size_bytes // COMPRESSED <= LIMIT_BYTES
    with Publisher(limited, services) as publisher:
        publisher.send(topic, record)
        assert publisher.flush(WAIT_TIMEOUT_S) == 0
        assert publisher.refusals == {}
    with Tail(limited, services, (topic,)) as tail:
        assert [entry.record for entry in tail.read_history()] == [record]


def test_an_update_of_batches_of_which_any_records_are_refused_is_taken(limited: JobConfig, services: Services) -> None:
    rng = np.random.default_rng(3)
    members = []
    for number in range(20):
        lo = 2**40 + number * 100_000
        dead = tuple((lo + np.flatnonzero(rng.random(100_000) < 0.5)).tolist())
        members.append(
            Member(worker=1, partition=0, batch=number, lo=lo, hi=lo + 100_000, n_samples=1, base_version=9, dead=dead)
        )
    update = Update(term=3, version=9, members=tuple(members), n_samples=1, loss=0.5)
    assert sum(len(member.dead) for member in members) * 5 > 4 * LIMIT_BYTES, "as numbers they would not fit"
    topic = limited.topic("updates")
    set_limit(services, [topic], LIMIT_BYTES)
    with Publisher(limited, services) as publisher:
        publisher.send(topic, update)
        assert publisher.flush(WAIT_TIMEOUT_S) == 0
        assert publisher.refusals == {}
    with Tail(limited, services, (topic,)) as tail:
        assert [entry.record for entry in tail.read_history()] == [update]


HOSTILE = """
import numpy as np
import torch
from doll import Sample, Task


class Hostile(Task):
    input_shape = (4,)
    num_classes = 2

    def build_model(self):
        return torch.nn.Linear(4, 2)

    def decode(self, record):
        if record[16] > 1:
            raise ValueError("not a class")
        return Sample(np.frombuffer(record[:16], "<f4"), record[16])
"""


def test_a_job_of_which_most_records_are_refused_goes_on_with_topics_of_a_small_limit(
    make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    made = make_pipeline(
        "task.class=hostile.py:Hostile", "task.args={}", "stop.updates=3", "data.batch_size=2000",
        "checkpoint.every_updates=1", "data.on_bad_records.share=1.0",
    )  # fmt: skip
    config = made.config
    set_limit(made.services, [config.topic("events"), config.topic("updates")], 6_000)  # 5 bytes each: 9,000 and more
    rng = np.random.default_rng(0)
    made.start()
    for i in range(16_000):
        x = rng.normal(size=4)
        value = struct.pack("<4fB", *x, 9 if rng.random() < 0.9 else i % 2)
        made._producer.produce(config.topic("samples"), value, partition=i % 2)
        if i % 1000 == 999:
            assert made._producer.flush(WAIT_TIMEOUT_S) == 0
    made.until_finished()
    report = made.assert_audit_ok()
    assert report.dead > 4_000
    assert made.restarts == []
    assert not [name for name in ("ps", "worker-0", "worker-1") if "kafka_refused" in made.log(name)]


TASK = """
import numpy as np
import torch
from doll import Sample, Task


class Long(Task):
    input_shape = (4,)
    num_classes = 2

    def build_model(self):
        return torch.nn.Linear(4, 2)

    def decode(self, record):
        x = np.frombuffer(record[:16], "<f4")
        return Sample(x, record[16])
"""


def test_a_job_whose_records_are_near_the_limit(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(TASK)
    made = make_pipeline(
        "task.class=long.py:Long", "task.args={}", "stop.samples=96", "data.batch_size=4",
        "data.max_record_bytes=999000", "checkpoint.every_updates=2",
    )  # fmt: skip
    config = made.config
    set_limit(made.services, [config.topic(kind) for kind in TOPIC_KINDS], LIMIT_BYTES)
    rng = np.random.default_rng(0)

    def record(i: int, size_bytes: int) -> bytes:
        x = rng.normal(size=4) + (2.0 * (i % 2) - 1.0)
        return struct.pack("<4fB", *x, i % 2) + rng.bytes(size_bytes - 17)

    refused: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: object) -> None:
        if error is not None:
            refused.append(error)

    made.start()
    values = [record(i, 998_000 if i % 10 else 999_500) for i in range(128)]
    for i, value in enumerate([*values, bytes(1_000_100)]):
        made._producer.produce(config.topic("samples"), value, partition=i % 2, on_delivery=delivered)
        assert made._producer.flush(WAIT_TIMEOUT_S) == 0
    made.until_finished()
    report = made.assert_audit_ok()
    assert [error.name() for error in refused] == ["MSG_SIZE_TOO_LARGE"]
    assert report.dead > 0, "those above data.max_record_bytes"
    assert all(letter.payload_bytes == 999_500 for letter in made.read("dead"))
    assert made.restarts == []
    assert not [name for name in ("ps", "worker-0", "worker-1") if "kafka_refused" in made.log(name)]
