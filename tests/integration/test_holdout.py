"""Held-out records on a real broker: never learned, through kills, scored once, and proven by the audit."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer
from doll.config import JobConfig, load, parse
from doll.errors import ConfigError
from doll.evaluation.holdout_topic import topic_samples
from doll.kafka.clients import kafka_settings
from doll.ledger.audit import audit
from doll.monitor.state.progress import ProgressModel
from doll.services import Services
from doll.task.base import load_task
from doll.task.holdout import Split
from fake_message import FakeMessage
from job_rig import MakePipeline, Pipeline
from owners_topic import OwnersTopic, samples
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.integration

KEYS = [b"user %d" % n for n in range(23)]


def send_with_keys(job: Pipeline, first: int, count: int) -> None:
    """Each user has records in both partitions; one of 40 records cannot be decoded, and some have no key."""
    for at, value in enumerate(job.samples(count), first):
        key = None if at % 10 == 9 else KEYS[at % len(KEYS)]
        job._producer.produce(
            job.config.topic("samples"), b"?" if at % 40 == 7 else value, partition=at % 2, key=key
        )  # fmt: skip
    assert job._producer.flush(WAIT_TIMEOUT_S) == 0


def test_a_share_of_the_keys_is_never_learned_and_scored_once(make_pipeline: MakePipeline) -> None:
    share = "evaluation.holdout.share=0.3"
    job = make_pipeline(share, "stop.updates=1000", "checkpoint.every_updates=5")
    half, total = 480, 960
    split = Split.of_job(job.config)
    assert split is not None
    dead = [at for at in range(total) if at % 40 == 7]
    held_out = [
        at for at in range(total)
        if at not in dead and split.held_out(
            at % 2, [at // 2], [b""], [FakeMessage(None if at % 10 == 9 else KEYS[at % len(KEYS)])]
        )[0]
    ]  # fmt: skip
    assert 100 < len(held_out) < 500
    job.start()
    send_with_keys(job, 0, half)
    job.until_version(5)
    job.kill("worker-1")
    send_with_keys(job, half, half)
    job.until_version(15)
    job.kill("ps")
    learned = total - len(dead) - len(held_out)
    job.until(lambda: job.status is not None and job.status.samples_total == learned, "all samples")
    job.until_status(lambda status: status.durable_version == status.version, "a checkpoint of all")
    report = job.assert_audit_ok()
    assert (report.applied, report.held_out, report.dead, report.pending) == (learned, len(held_out), len(dead), 0)
    assert job.last_status.counters["held_out_records"] == len(held_out)

    model = ProgressModel(job.config, 0.0)
    for record in job.read("updates"):
        model.feed(record)
    counted = model.history.held_out_records()
    assert counted is not None
    assert (counted.records, counted.samples) == (len(held_out), len(held_out))
    assert {"loss", "accuracy"} <= counted.metrics.keys()
    named = {
        (member.partition, offset)
        for record in job.updates if record.held_out_score is not None
        for member in record.members for offset in member.held_out
    }  # fmt: skip
    assert {(at % 2, at // 2) for at in held_out} >= named

    other = load(job.job_path, ["evaluation.holdout.share=0.6"])  # what the workers did is not what this file says
    wrong = audit(other, job.services, job.store)
    assert not wrong.ok
    assert "learned, but to be held out (evaluation.holdout): partition 0: " in " ".join(wrong.violations())
    fewer = audit(load(job.job_path, ["evaluation.holdout.share=0.1"]), job.services, job.store)
    assert "held out, but to be learned (evaluation.holdout): partition " in " ".join(fewer.violations())


def config_of(job_name: str, topic: str, *overrides: str) -> JobConfig:
    text = f"""
job: {job_name}
task: {{class: "examples.synthetic.task:Gaussian", args: {{features: 4}}}}
data: {{workers: 1}}
evaluation: {{holdout: {{topic: {topic}}}}}
"""
    return parse(text, overrides)


def test_the_samples_of_another_topic_are_its_last_ones(services: Services, job_name: str) -> None:
    topic = OwnersTopic(services.kafka, f"{job_name}.held")
    topic.create(3)
    config = config_of(job_name, topic.name)
    task = load_task(config)
    assert topic_samples(config, services, topic.name, task).num_samples == 0
    producer = Producer(kafka_settings(config, services, acks="all"))

    def send(values: list[Any], partition: int) -> None:
        for value in values:
            producer.produce(topic.name, value, partition=partition)
        assert producer.flush(WAIT_TIMEOUT_S) == 0

    values = samples(40)
    send([b"?"], 1)
    with pytest.raises(ConfigError, match="1 of 1 records cannot be decoded: expected 20 bytes"):
        topic_samples(config, services, topic.name, task)
    send(values, 0)
    send(values[:5], 1)
    assert topic_samples(config, services, topic.name, task).num_samples == 45
    few = topic_samples(config_of(job_name, topic.name, "evaluation.max_samples=9"), services, topic.name, task)
    assert few.num_samples == 6, "the last three of two partitions"
    with pytest.raises(ConfigError, match="expected an existing topic, got nothing-here"):
        topic_samples(config, services, "nothing-here", task)
