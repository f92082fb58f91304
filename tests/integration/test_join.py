"""Features and labels of two foreign topics become one stream of samples, each record once."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from doll.config import JobConfig, parse
from doll.join.main import run_joiner
from doll.kafka import topics
from doll.kafka.range_reader import RangeReader
from doll.records.join_log import Step, decode_step
from doll.services import Services
from owners_topic import OwnersTopic
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.usefixtures("services")]

WINDOW_S = 3.0


@pytest.fixture
def shown(services: Services, job_name: str) -> OwnersTopic:
    return OwnersTopic(services.kafka, f"shown.{job_name}")


@pytest.fixture
def clicks(services: Services, job_name: str) -> OwnersTopic:
    return OwnersTopic(services.kafka, f"clicks.{job_name}")


def job_of(name: str, shown: OwnersTopic, clicks: OwnersTopic, **more: Any) -> JobConfig:
    join = {
        "features": {"topic": shown.name, "key": "id", "time": "at"},
        "labels": [{"topic": clicks.name, "name": "click", "key": "id", "time": "at"}],
        "window_s": WINDOW_S, "lateness_s": 1.0, **more,
    }  # fmt: skip
    job = {
        "job": name, "task": {"class": "gaussian:Gaussian"}, "data": {"workers": 2, "partitions": 4, "join": join},
        "kafka": {"replication_factor": 1},
    }  # fmt: skip
    return parse(json.dumps(job))


def records_of(config: JobConfig, services: Services, kind: Any) -> Iterator[tuple[int, bytes]]:
    """The partition and the value of each committed record of a topic of the job."""
    with RangeReader(config, services) as reader:
        topic = config.topic(kind)
        for partition in range(config.data.num_partitions):
            for _, value in reader.read(topic, partition, *reader.bounds(topic, partition)):
                yield partition, value or b""


def steps_of(config: JobConfig, services: Services) -> list[tuple[int, Step]]:
    return [(partition, decode_step(value)) for partition, value in records_of(config, services, "joins")]


def open_keys(config: JobConfig, services: Services) -> int:
    return sum({partition: step.open for partition, step in steps_of(config, services) if step.restart}.values())


def test_features_and_labels_of_other_partitions_are_joined_and_windows_close_without_any_record(
    services: Services, job_name: str, shown: OwnersTopic, clicks: OwnersTopic
) -> None:
    """Twelve and seven partitions; a third of the labels comes before its features, a third of the keys has none."""
    shown.create(12)
    clicks.create(7)
    config, rng = job_of(job_name, shown, clicks), random.Random(0)
    now_ms = int(time.time() * 1000)
    labelled = {f"k{number}" for number in range(300) if number % 3}
    features = [(key := f"k{number}", json.dumps({"id": key, "at": now_ms, "x": number}).encode()) for number in range(300)]
    labels = [(str(rng.random()), json.dumps({"id": key, "at": now_ms + 500}).encode()) for key in sorted(labelled)]
    clicks.write(labels[:100])
    shown.write(features)
    clicks.write(labels[100:])
    topics.ensure(config, services)
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        joiners = [pool.submit(run_joiner, config, services, number, stop=stop) for number in range(2)]
        try:
            until(lambda: all_done(joiners) or len(list(records_of(config, services, "samples"))) == 300, "all samples")
        finally:
            stop.set()
    assert [joiner.result() for joiner in joiners] == [0, 0]
    samples = [json.loads(value) for _, value in records_of(config, services, "samples")]
    assert {sample["id"]: sample["click"] for sample in samples} == {
        f"k{number}": int(f"k{number}" in labelled) for number in range(300)
    }
    assert len(samples) == 300
    assert open_keys(config, services) == 0
    assert not [refused for _, step in steps_of(config, services) for refused in step.refused]


def all_done(futures: list[Any]) -> bool:
    for future in futures:
        if future.done():
            future.result()
    return False
