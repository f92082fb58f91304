"""The six topics: how many partitions, how long they keep records, and what happens when they are not as expected."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from doll.config import JobConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.clients import kafka_settings
from doll.kafka.publisher import Publisher
from doll.kafka.topic_plan import TOPIC_KINDS, ActualTopic, TopicKind, find_problems, plan_topics
from doll.services import Services
from job_files import job
from waiting import WAIT_TIMEOUT_S, until


def test_samples_and_down_have_a_partition_for_each_worker_and_the_others_one() -> None:
    assert {topic.name.rpartition(".")[2]: topic.partitions for topic in plan_topics(job(workers=3))} == {
        "samples": 3,
        "commands": 3,
        "events": 1,
        "updates": 1,
        "metrics": 1,
        "dead": 1,
    }


def test_retention_follows_the_job_file_for_samples_and_is_forever_for_the_ledger() -> None:
    kept = {
        topic.name.rpartition(".")[2]: topic.settings["retention.ms"]
        for topic in plan_topics(job("data.retention_hours=0.5", workers=3))
    }
    six_hours = str(6 * 3600 * 1000)
    assert kept == {
        "samples": "1800000",
        "commands": six_hours,
        "events": six_hours,
        "updates": "-1",
        "metrics": six_hours,
        "dead": "-1",
    }


@pytest.mark.parametrize(("max_record_bytes", "limit_bytes"), [(1_000_000, 16_777_216), (10_000_000, 20_000_000)])
def test_a_record_above_the_limit_can_still_arrive_to_be_dead_lettered(max_record_bytes: int, limit_bytes: int) -> None:
    samples = plan_topics(job(f"data.max_record_bytes={max_record_bytes}", workers=3))[0]
    assert samples.settings["max.message.bytes"] == str(limit_bytes)


@pytest.mark.integration
def test_ensure_creates_all_topics_with_their_settings_and_may_be_repeated(services: Services, job_name: str) -> None:
    config = job(name=job_name, workers=3)
    topics.ensure(config, services)
    topics.ensure(config, services)
    topics.check(config, services)
    assert [(info.name, info.partitions, info.low, info.high) for info in topics.describe(config, services)] == [
        (topic.name, topic.partitions, (0,) * topic.partitions, (0,) * topic.partitions)
        for topic in plan_topics(config)
    ]
    admin = AdminClient(kafka_settings(config, services))
    for topic in plan_topics(config):
        resource = ConfigResource(ResourceType.TOPIC, topic.name)
        came = admin.describe_configs([resource])[resource].result()
        assert {key: came[key].value for key in topic.settings} == topic.settings


@pytest.mark.integration
def test_describe_tells_the_watermarks(services: Services, job_name: str) -> None:
    config = job(name=job_name, workers=3)
    topics.ensure(config, services)
    producer = Producer(kafka_settings(config, services))
    for partition in (0, 2, 2):
        producer.produce(config.topic("samples"), b"x", partition=partition)
    assert producer.flush(10) == 0
    assert topics.describe(config, services)[0].high == (1, 0, 2)


@pytest.mark.integration
@pytest.mark.parametrize("workers", [2, 5])
def test_another_number_of_streams_than_partitions_is_refused_with_the_way_out(
    services: Services, job_name: str, workers: int
) -> None:
    topics.ensure(job(name=job_name, workers=3), services)
    expected = f"samples: expected {workers} partitions, found 3.*; set data.partitions to 3, or choose another `job`"
    config = job(f"data.workers={workers}", f"data.max_workers={max(workers, 3)}", name=job_name, workers=3)
    with pytest.raises(ConfigError, match=expected):
        topics.ensure(config, services, begins=True)
    for step in (topics.ensure, topics.check):
        if workers > 3:
            with pytest.raises(ConfigError, match=expected):
                step(config, services)
        else:
            step(config, services)  # of a job that has begun: they were added since
    topics.ensure(job(f"data.workers={workers}", "data.partitions=3", name=job_name, workers=3), services)


@pytest.mark.integration
def test_more_workers_than_before_get_partitions_of_commands(services: Services, job_name: str) -> None:
    def of(workers: int) -> JobConfig:
        settings = (f"data.workers={workers}", f"data.max_workers={workers}", "data.partitions=6")
        return job(*settings, name=job_name, workers=3)

    topics.ensure(of(2), services)
    with pytest.raises(ServiceUnavailableError, match=r"commands: expected 5 partitions, found 2 .* which adds them"):
        topics.check(of(5), services)
    topics.ensure(of(5), services)
    counts = {info.name.rpartition(".")[2]: info.partitions for info in topics.describe(of(5), services)}
    assert (counts["samples"], counts["commands"], counts["events"]) == (6, 5, 1)
    topics.ensure(of(3), services)  # what is there stays


@pytest.mark.integration
def test_a_missing_topic_is_named(services: Services, job_name: str) -> None:
    with pytest.raises(ServiceUnavailableError, match=f"topic doll.{job_name}.samples does not exist"):
        topics.check(job(name=job_name, workers=3), services)
    assert topics.describe(job(name=job_name, workers=3), services) == []


@pytest.mark.integration
def test_more_replicas_than_brokers_are_refused(services: Services, job_name: str) -> None:
    with pytest.raises(ConfigError, match=r"kafka.replication_factor is 2: .* fewer brokers"):
        topics.ensure(job("kafka.replication_factor=2", name=job_name, workers=3), services)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["producer_user", "worker_user"])
def test_a_user_with_few_rights_is_refused_where_every_user_may_do_everything(
    services: Services, job_name: str, name: str
) -> None:
    """What an authorizer does with it: tests/deploy/test_kafka_hosts.py."""
    with pytest.raises(ConfigError, match=rf"kafka\.{name} is feed, but Kafka at .* has no authorizer"):
        topics.ensure(job(f"kafka.{name}=feed", name=job_name, workers=3), services)


@pytest.mark.parametrize("name", ["producer_user", "worker_user"])
@pytest.mark.parametrize("user", ["'*'", "'User:feed'", "''", "'a\\nb'"])
def test_a_user_with_few_rights_is_one_name(name: str, user: str) -> None:
    """`User:*` would be everybody."""
    with pytest.raises(ConfigError, match=name):
        job(f"kafka.{name}={user}", workers=3)
    assert getattr(job(f"kafka.{name}=", workers=3).kafka, name) is None


@pytest.mark.integration
def test_the_advice_about_the_number_of_partitions_works(services: Services, job_name: str) -> None:
    """No topic is created beside one of another size, which the advised number would not fit."""
    made = f"doll.{job_name}.samples"
    admin = AdminClient(kafka_settings(job(name=job_name, workers=3), services))
    admin.create_topics([NewTopic(made, 1)])[made].result(WAIT_TIMEOUT_S)
    until(lambda: topics.describe(job(name=job_name, workers=3), services), "the topic")
    with pytest.raises(ConfigError, match=r"samples: expected 3 partitions, found 1; set data.partitions to 1"):
        topics.ensure(job(name=job_name, workers=3), services)
    assert [info.name for info in topics.describe(job(name=job_name, workers=3), services)] == [made]
    topics.ensure(job("data.partitions=1", name=job_name, workers=3), services)


def actual(settings: dict[str, str] | None = None, replicas: int = 3, in_sync: int = 3) -> ActualTopic:
    defaults = {"cleanup.policy": "delete", "min.insync.replicas": "2", "retention.ms": "-1"}
    return ActualTopic(defaults | (settings or {}), replicas, in_sync)


@pytest.mark.parametrize(
    ("kind", "came", "fatal", "words"),
    [
        ("samples", actual({"cleanup.policy": "compact"}), True, "cleanup.policy is compact, expected delete"),
        ("updates", actual({"cleanup.policy": "compact,delete"}), True, "--add-config cleanup.policy=delete"),
        ("events", actual({"cleanup.policy": "compact"}), True, "records that the job needs"),
        ("updates", actual({"retention.ms": "604800000"}), True, "retention.ms is 604800000"),
        ("updates", actual({"retention.bytes": "1000"}), True, "retention.bytes 1000"),
        ("dead", actual({"retention.ms": "604800000"}), False, "the audit fails once a dead letter is deleted"),
        ("samples", actual({"retention.ms": "3600000"}), False, "data.retention_hours asks for 86400000"),
        ("samples", actual({"retention.bytes": "1000"}), False, "retention.bytes is 1000"),
        (
            "samples",
            actual({"retention.ms": "86400000", "message.timestamp.type": "CreateTime"}),
            False,
            "records with old timestamps are deleted before they are learned; change it: kafka-configs.sh",
        ),
        ("samples", actual({"max.message.bytes": "1048588"}), False, "expected 16777216"),
        ("updates", actual({"max.message.bytes": "1048588"}), False, "names many refused samples"),
        ("samples", actual({"min.insync.replicas": "4"}), True, "nothing can ever be written"),
        ("samples", actual(in_sync=1), False, "1 replicas are in sync and 2 must be"),
        ("updates", actual({"min.insync.replicas": "1"}), False, "--add-config min.insync.replicas=2"),
        ("updates", actual({"unclean.leader.election.enable": "true"}), False, "may become the leader"),
        ("commands", actual(replicas=2, in_sync=2), False, "it has 2 replicas, kafka.replication_factor is 3"),
    ],
)
def test_what_an_existing_topic_s_settings_mean(kind: TopicKind, came: ActualTopic, fatal: bool, words: str) -> None:
    plan = dict(zip(TOPIC_KINDS, plan_topics(job("kafka.replication_factor=3", workers=3)), strict=True))
    (finding,) = find_problems(plan[kind], came, 3)
    assert finding.fatal is fatal
    assert words in finding.text
    assert finding.text.startswith(f"topic doll.j.{kind}: ")


def test_what_doll_creates_itself_is_fine_with_any_number_of_replicas() -> None:
    for replicas, in_sync in ((1, "1"), (2, "1"), (3, "2"), (5, "4")):
        config = job(f"kafka.replication_factor={replicas}", workers=3)
        for plan in plan_topics(config):
            assert plan.settings["min.insync.replicas"] == in_sync
            assert find_problems(plan, ActualTopic(plan.settings, replicas, replicas), replicas) == []


@pytest.mark.integration
def test_a_compacted_topic_stops_the_job_and_a_short_retention_is_told(services: Services, job_name: str) -> None:
    config = job(name=job_name, workers=3)
    admin = AdminClient(kafka_settings(config, services))
    samples, updates = config.topic("samples"), config.topic("updates")
    made = [
        NewTopic(samples, 3, 1, config={"retention.ms": "1000"}),
        NewTopic(updates, 1, 1, config={"cleanup.policy": "compact", "retention.ms": "-1"}),
    ]
    for future in admin.create_topics(made).values():
        future.result(WAIT_TIMEOUT_S)
    until(lambda: len(topics.describe(config, services)) == 2, "the topics")
    with pytest.raises(ConfigError, match=f"topic {updates}: cleanup.policy is compact"):
        topics.ensure(config, services)
    change = ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, updates, incremental_configs=[change])
    admin.incremental_alter_configs([resource])[resource].result(WAIT_TIMEOUT_S)

    def allowed() -> bool:  # the change is there a moment after it was accepted
        with contextlib.suppress(ConfigError):
            topics.ensure(config, services)
            return True
        return False

    until(allowed, "the topic's new setting")
    (said, *rest) = [text for text in topics.ensure(config, services) if "max.message.bytes" not in text]
    assert "retention.ms is 1000" in said
    assert rest == []


@pytest.mark.integration
def test_the_job_s_own_topics_keep_records_by_the_time_of_the_broker(services: Services, job_name: str) -> None:
    """By its own timestamp, a record of an event of last year would be deleted within seconds."""
    config = job(name=job_name, workers=3)
    topics.ensure(config, services)
    names = [topic.name for topic in plan_topics(config)]
    admin = AdminClient(kafka_settings(config, services))
    asked = {name: ConfigResource(ResourceType.TOPIC, name) for name in names}
    answers = admin.describe_configs(list(asked.values()))
    assert {answers[item].result(WAIT_TIMEOUT_S)["message.timestamp.type"].value for item in asked.values()} == {
        "LogAppendTime"
    }


@pytest.mark.integration
def test_records_below_an_offset_are_deleted(services: Services, job_name: str) -> None:
    config = job(name=job_name, workers=3)
    topics.ensure(config, services)
    samples = config.topic("samples")
    with Publisher(config, services) as publisher:
        for _ in range(3):
            publisher.send(samples, b"x")
    assert topics.delete_records(config, services, samples, 0, 2)
    assert (topics.describe(config, services)[0].low[0], topics.describe(config, services)[0].high[0]) == (2, 3)
    assert not topics.delete_records(config, services, samples, 0, 99)


class Topic:
    def __init__(self, partitions: int, leader: int = 1) -> None:
        self.partitions = {number: Partition(leader) for number in range(partitions)}


class Partition:
    def __init__(self, leader: int) -> None:
        self.leader = leader


class Broker:
    def __init__(self, number: int) -> None:
        self.host, self.port = "broker", number


class Metadata:
    def __init__(self, topics_: dict[str, Topic]) -> None:
        self.topics = topics_
        self.brokers = {number: Broker(number) for number in (1, 2, 3)}


class SlowCluster:
    """Kafka's admin API over three brokers; the third broker hears of a new topic after it was asked `behind` times.

    A client of the whole cluster is answered by each of its brokers in turn.
    """

    def __init__(self, behind: int) -> None:
        self.created: dict[str, Topic] = {}
        self.behind = behind
        self.unopened = 0  # questions for offsets that a leader still refuses
        self._turn = 0

    def answer(self, broker: int) -> Metadata:
        if broker == 3 and self.created and self.behind > 0:
            self.behind -= 1
            return Metadata({})
        return Metadata(dict(self.created))

    def client(self, config: object, services: Services) -> SlowAdmin:
        return SlowAdmin(self, services.kafka)

    def next_broker(self) -> int:
        self._turn += 1
        return (1, 2, 3)[self._turn % 3]


class SlowAdmin:
    def __init__(self, cluster: SlowCluster, address: str) -> None:
        self._cluster, self._address = cluster, address

    def list_topics(self, timeout: float) -> Metadata:
        host, _, port = self._address.partition(":")
        return self._cluster.answer(int(port) if host == "broker" else self._cluster.next_broker())

    def describe_configs(self, wanted: list[object], **_: object) -> dict[object, Future[None]]:
        return {}  # the settings are unknown

    def create_topics(self, wanted: list[NewTopic], **_: object) -> dict[str, Future[None]]:
        done: dict[str, Future[None]] = {}
        for topic in wanted:
            self._cluster.created[topic.topic] = Topic(topic.num_partitions)
            done[topic.topic] = Future()
            done[topic.topic].set_result(None)
        return done

    def list_offsets(self, wanted: dict[TopicPartition, object], **_: object) -> dict[TopicPartition, Future[Any]]:
        answers: dict[TopicPartition, Future[Any]] = {where: Future() for where in wanted}
        for answer in answers.values():
            answer.set_result(SimpleNamespace(offset=0))
        if self._cluster.unopened > 0:
            self._cluster.unopened -= 1
            refused: Future[Any] = Future()
            codes = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.UNKNOWN_LEADER_EPOCH)
            refused.set_exception(KafkaException(KafkaError(codes[self._cluster.unopened % 2])))
            answers[next(iter(answers))] = refused
        return answers


def test_ensure_waits_until_leaders_answer_for_what_was_created(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SlowCluster(behind=0)
    cluster.unopened = 3
    monkeypatch.setattr(topics, "make_admin", cluster.client)
    topics.ensure(job(workers=3), Services("bootstrap:9092", ""))
    assert cluster.unopened == 0


def test_ensure_waits_until_every_broker_knows_what_was_created(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SlowCluster(behind=20)
    monkeypatch.setattr(topics, "make_admin", cluster.client)
    config, services = job(workers=3), Services("bootstrap:9092", "")
    topics.ensure(config, services)
    assert cluster.behind == 0
    for _ in range(3):  # whichever broker answers
        topics.check(config, services)


def test_ensure_names_the_broker_that_never_hears_of_a_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SlowCluster(behind=1_000_000)
    monkeypatch.setattr(topics, "make_admin", cluster.client)
    monkeypatch.setattr(topics, "ADMIN_S", 0.2)
    with pytest.raises(ServiceUnavailableError, match=r"after 0\.2 s.*broker:3 lacks doll\..*start again"):
        topics.ensure(job(workers=3), Services("bootstrap:9092", ""))


def test_ensure_goes_on_without_a_broker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SlowCluster(behind=0)

    def answer(broker: int) -> Metadata:
        if broker == 2:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return Metadata(dict(cluster.created))

    monkeypatch.setattr(cluster, "answer", answer)
    monkeypatch.setattr(cluster, "next_broker", lambda: 1)
    monkeypatch.setattr(topics, "make_admin", cluster.client)
    monkeypatch.setattr(topics, "ADMIN_S", 0.2)
    config, services = job(workers=3), Services("bootstrap:9092", "")
    topics.ensure(config, services)
    topics.check(config, services)


class StrictAdmin:
    """Refuses topics with settings that managed services refuse, until they are left out."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.created: dict[str, dict[str, str]] = {}
        self.requests = 0

    def create_topics(self, wanted: list[Any], **more: Any) -> dict[str, Future[None]]:
        self.requests += 1
        return {topic.topic: self._answer(topic) for topic in wanted}

    def _answer(self, topic: Any) -> Future[None]:
        future: Future[None] = Future()
        if any(name in topic.config for name in self.refused):
            future.set_exception(KafkaException(KafkaError(KafkaError.POLICY_VIOLATION, "not allowed")))
        else:
            self.created[topic.topic] = dict(topic.config)
            future.set_result(None)
        return future


@pytest.mark.parametrize(
    ("refused", "requests"),
    [
        ((), 1),
        (("min.insync.replicas",), 2),
        (("max.message.bytes",), 3),
        (("min.insync.replicas", "max.message.bytes"), 3),
    ],
)
def test_topics_are_created_without_the_settings_that_a_managed_kafka_refuses(
    refused: tuple[str, ...], requests: int
) -> None:
    config, admin = job(workers=3), StrictAdmin(*refused)
    topics._create(cast(Any, admin), config, Services("a:1", ""), plan_topics(config))
    assert set(admin.created) == {topic.name for topic in plan_topics(config)}
    assert admin.requests == requests
    assert not [name for settings in admin.created.values() for name in refused if name in settings]
    assert admin.created["doll.j.updates"]["retention.ms"] == "-1"


def test_a_topic_that_is_refused_for_another_reason_is_an_error() -> None:
    config = job(workers=3)
    with pytest.raises(ServiceUnavailableError, match="does not create topic"):
        topics._create(cast(Any, StrictAdmin("retention.ms")), config, Services("a:1", ""), plan_topics(config))
