"""The six topics: how many partitions, how long they keep records, and what happens when they are not as expected."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType
from doll import topics
from doll.config import JobConfig, parse
from doll.errors import ConfigError, ServiceUnavailableError
from doll.services import Services, kafka_settings


def job(name: str, *overrides: str) -> JobConfig:
    return parse(f"job: {name}\ntask: {{class: 'a:B'}}\ndata: {{workers: 3}}\n", overrides)


def test_samples_and_down_have_a_partition_for_each_worker_and_the_others_one() -> None:
    assert {topic.name.rpartition(".")[2]: topic.partitions for topic in topics.plan(job("j"))} == {
        "samples": 3,
        "down": 3,
        "up": 1,
        "updates": 1,
        "metrics": 1,
        "dead": 1,
    }


def test_retention_follows_the_job_file_for_samples_and_is_forever_for_the_ledger() -> None:
    kept = {
        topic.name.rpartition(".")[2]: topic.settings["retention.ms"]
        for topic in topics.plan(job("j", "data.retention_hours=0.5"))
    }
    six_hours = str(6 * 3600 * 1000)
    assert kept == {
        "samples": "1800000",
        "down": six_hours,
        "up": six_hours,
        "updates": "-1",
        "metrics": six_hours,
        "dead": "-1",
    }


@pytest.mark.parametrize(("max_record_bytes", "limit_bytes"), [(1_000_000, 16_777_216), (10_000_000, 20_000_000)])
def test_a_record_above_the_limit_can_still_arrive_to_be_dead_lettered(max_record_bytes: int, limit_bytes: int) -> None:
    samples = topics.plan(job("j", f"data.max_record_bytes={max_record_bytes}"))[0]
    assert samples.settings["max.message.bytes"] == str(limit_bytes)


@pytest.mark.integration
def test_ensure_creates_all_topics_with_their_settings_and_may_be_repeated(services: Services, job_name: str) -> None:
    config = job(job_name)
    topics.ensure(config, services)
    topics.ensure(config, services)
    topics.check(config, services)
    assert [(info.name, info.partitions, info.low, info.high) for info in topics.describe(config, services)] == [
        (topic.name, topic.partitions, (0,) * topic.partitions, (0,) * topic.partitions)
        for topic in topics.plan(config)
    ]
    admin = AdminClient(kafka_settings(config, services))
    for topic in topics.plan(config):
        resource = ConfigResource(ResourceType.TOPIC, topic.name)
        came = admin.describe_configs([resource])[resource].result()
        assert {key: came[key].value for key in topic.settings} == topic.settings


@pytest.mark.integration
def test_describe_tells_the_watermarks(services: Services, job_name: str) -> None:
    config = job(job_name)
    topics.ensure(config, services)
    producer = Producer(kafka_settings(config, services))
    for partition in (0, 2, 2):
        producer.produce(config.topic("samples"), b"x", partition=partition)
    assert producer.flush(10) == 0
    assert topics.describe(config, services)[0].high == (1, 0, 2)


@pytest.mark.integration
@pytest.mark.parametrize("workers", [2, 5])
def test_another_number_of_workers_than_partitions_is_refused_with_the_way_out(
    services: Services, job_name: str, workers: int
) -> None:
    topics.ensure(job(job_name), services)
    expected = f"samples: expected {workers} partitions, found 3 .* set data.workers to 3, or choose another `job` name"
    for step in (topics.ensure, topics.check):
        with pytest.raises(ConfigError, match=expected):
            step(job(job_name, f"data.workers={workers}"), services)


@pytest.mark.integration
def test_a_missing_topic_is_named(services: Services, job_name: str) -> None:
    with pytest.raises(ServiceUnavailableError, match=f"topic doll.{job_name}.samples does not exist"):
        topics.check(job(job_name), services)
    assert topics.describe(job(job_name), services) == []


@pytest.mark.integration
def test_more_replicas_than_brokers_are_refused(services: Services, job_name: str) -> None:
    with pytest.raises(ConfigError, match=r"kafka.replication_factor is 2: .* fewer brokers"):
        topics.ensure(job(job_name, "kafka.replication_factor=2"), services)


@pytest.mark.integration
def test_a_producer_s_user_is_refused_where_every_user_may_do_everything(services: Services, job_name: str) -> None:
    """What an authorizer does with it: tests/deploy/test_kafka_hosts.py."""
    with pytest.raises(ConfigError, match=r"kafka\.producer_user is feed, but Kafka at .* has no authorizer"):
        topics.ensure(job(job_name, "kafka.producer_user=feed"), services)


@pytest.mark.parametrize("user", ["'*'", "'User:feed'", "''", "'a\\nb'"])
def test_a_producer_s_user_is_one_name(user: str) -> None:
    """`User:*` would be everybody."""
    with pytest.raises(ConfigError, match="producer_user"):
        job("j", f"kafka.producer_user={user}")
    assert job("j", "kafka.producer_user=").kafka.producer_user is None
