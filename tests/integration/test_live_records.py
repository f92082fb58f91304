"""The newest records of the stream, read from a real broker by the watch on the alias's version and by commands."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import Producer
from doll.config import JobConfig, parse
from doll.evaluation.live_records import LiveRecords
from doll.kafka import topics
from doll.run.live_comparison import compare_live
from doll.run.off_policy import value_of_versions
from doll.services import Services
from doll.task.base import load_task
from gate_rig import TASK, Rig

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


CHOOSES = """
    def choose(self, output):
        return torch.stack([torch.sigmoid(-output), torch.sigmoid(output)], dim=1)
"""
DECODE = """
        import msgspec
        fields = msgspec.json.decode(record)
        return Sample(np.array(fields["x"], np.float32), np.float32(fields["y"]))
"""


def rig_on(services: Services, job_name: str, folder: Path) -> Rig:
    """A job with two versions, whose samples topic is on a real broker: version 2 is right, y = x0 - x1."""

    class OnBroker(Rig):
        job = (
            f"job: {job_name}\ntask: {{class: choosing.py:Line}}\ndata: {{workers: 2, batch_size: 1}}\n"
            f"kafka: {{address: '{services.kafka}', replication_factor: 1}}\n"
        )

    folder.mkdir()
    (folder / "choosing.py").write_text(TASK.replace("        raise NotImplementedError", DECODE) + CHOOSES)
    rig = OnBroker(folder)
    rig.save(1, 0.5, -0.5)
    rig.save(2, 1.0, -1.0)
    topics.ensure(rig.config, services)
    return rig


def served(rng: np.random.Generator) -> bytes:
    """The first action was chosen in one of four cases; it is rewarded in 10 %, the second one in 50 %."""
    x = rng.normal(size=2)
    action = int(rng.random() < 0.75)
    answer = {"action": action, "probability": (0.25, 0.75)[action]}
    reward = int(rng.random() < (0.1, 0.5)[action])
    fields = {"x": x.tolist(), "y": x[0] - x[1] + rng.normal(0, 0.3), "clicked": reward}
    return json.dumps({**fields, "doll_served": {"answer": answer}}).encode()


def test_versions_are_compared_on_records_that_come_meanwhile(
    services: Services, job_name: str, tmp_path: Path
) -> None:
    rig, rng, ended = rig_on(services, job_name, tmp_path / "run"), np.random.default_rng(0), threading.Event()

    def stream() -> None:
        while not ended.wait(0.1):
            write(rig.config, services, [(number % 2, served(rng)) for number in range(100)])

    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(stream)
        try:
            difference = compare_live(rig.target, "1", "2", seconds=120)
        finally:
            ended.set()
        streaming.result()
    assert difference.better == "version 2"
    assert difference.records >= 40 * 5
    assert difference.low <= 0.5 <= difference.high, "the mean of (0.5 (x0 - x1))²"


def test_the_value_of_versions_is_estimated_from_the_topic(services: Services, job_name: str, tmp_path: Path) -> None:
    rig, rng = rig_on(services, job_name, tmp_path / "run"), np.random.default_rng(0)
    write(rig.config, services, [(number % 2, served(rng)) for number in range(3_000)])
    write(rig.config, services, [(0, b"{}"), (1, b"no record")])
    rig.save(3, 0.0, 0.0, 9.0)  # the second action always
    report = value_of_versions(rig.target, ["1", "3"], reward="clicked", most=10_000)
    assert report.choices == 3_000
    assert sum(report.left_out.values()) == 2
    first, always = report.versions
    assert first.estimates["ips"].low <= 0.3 <= first.estimates["ips"].high, "both actions equally often"
    assert always.estimates["snips"].low <= 0.5 <= always.estimates["snips"].high
    newest = value_of_versions(rig.target, ["latest"], reward="clicked", most=100)
    assert newest.choices <= 100
