"""The newest records of the stream, as the watch on the alias's version reads them from a real broker."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from confluent_kafka import Producer
from doll.config import JobConfig, parse
from doll.evaluation.live_records import LiveRecords
from doll.kafka import topics
from doll.services import Services
from doll.task.base import load_task

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.usefixtures("services")]

JOB = """
task: {class: "examples.synthetic.task:Gaussian", args: {features: 2}}
data: {workers: 2, partitions: 3, batch_size: 8}
kafka: {replication_factor: 1}
"""


def write(config: JobConfig, services: Services, values: list[tuple[int, bytes]]) -> None:
    producer = Producer({"bootstrap.servers": services.kafka})
    for partition, value in values:
        producer.produce(config.topic("samples"), value, partition=partition)
    assert producer.flush(60) == 0


def record(number: int) -> bytes:
    return np.array([number, 0.0, number % 2], "<f4").tobytes()


def test_only_new_records_are_taken_and_no_more_than_asked(services: Services, job_name: str) -> None:
    config = parse(f"job: {job_name}\n{JOB}")
    topics.ensure(config, services)
    task = load_task(config)
    write(config, services, [(number % 3, record(number)) for number in range(30)])
    with closing(LiveRecords(config, services)) as records:
        records.begin()
        assert records.take(task, 100).num_samples == 0
        write(config, services, [(number % 2, record(number)) for number in range(100, 110)])
        write(config, services, [(0, b"no sample")])
        samples = records.take(task, 100)
        assert sorted(samples.x[:, 0].tolist()) == [float(number) for number in range(100, 110)]
        assert records.take(task, 100).num_samples == 0
        write(config, services, [(number % 3, record(number)) for number in range(300, 360)])
        newest = records.take(task, 6)
        assert sorted(newest.x[:, 0].tolist()) == [354.0, 355.0, 356.0, 357.0, 358.0, 359.0]
        assert records.take(task, 6).num_samples == 0
