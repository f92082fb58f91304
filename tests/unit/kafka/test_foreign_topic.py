"""A samples topic that belongs to somebody else: what is refused, in which words, and that nothing is done to it."""

from __future__ import annotations

from typing import Any

import pytest
from doll.config import JobConfig
from doll.config.fingerprint import job_fields
from doll.config.fingerprint import parse as fields_of
from doll.errors import ConfigError
from doll.kafka import foreign_topic, topics
from doll.kafka.foreign_topic import ForeignTopic, MissingTopicError, with_partitions
from doll.kafka.samples_topic import SampleLog, start_offsets
from doll.kafka.topic_plan import TOPIC_KINDS, plan_topics
from doll.ledger.dead_letters import replay
from doll.producers.main import run_producer
from doll.services import Services
from job_files import job
from owners_topic import OwnersTopic

NOWHERE = Services("nowhere:9092", "")


def foreign(*overrides: str, topic: str = "clicks", partitions: int | None = 12, **more: Any) -> JobConfig:
    given = [] if partitions is None else [f"data.partitions={partitions}"]
    return job(f"data.topic={topic}", *given, *overrides, workers=3, **more)


def test_it_takes_the_place_of_the_samples_topic_alone() -> None:
    config = foreign()
    assert [config.topic(kind) for kind in TOPIC_KINDS] == ["clicks", *(f"doll.j.{kind}" for kind in TOPIC_KINDS[1:])]
    assert [topic.kind for topic in plan_topics(config)] == list(TOPIC_KINDS[1:])
    assert "clicks" not in [topic.name for topic in plan_topics(config)]


def test_the_fingerprint_names_it_and_not_its_size() -> None:
    fields = job_fields(foreign())
    assert fields["data.topic"] == "clicks"
    assert fields == job_fields(foreign(partitions=13)) == job_fields(foreign(partitions=None))
    assert "data.partitions" not in fields_of(" ".join(f"{key}={value}" for key, value in fields.items()))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "source={kind: text, path: a.txt}",
            "source: expected none, because data.topic is clicks: DOLL never writes to",
        ),
        ("arrivals.while_down=pause", "arrivals.while_down: expected queue, because data.topic is clicks"),
        ("kafka.producer_user=feed", "kafka.producer_user: expected none, because data.topic is clicks"),
    ],
)
def test_what_a_job_file_cannot_have_beside_it(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        foreign(override)


def test_without_kafka_its_size_is_not_known() -> None:
    with pytest.raises(
        ConfigError, match=r"expected the number of partitions of topic clicks.*--set data\.partitions=12"
    ):
        foreign(partitions=None).worker_rates_per_s()
    assert foreign("arrivals.rate_per_s=10").worker_rates_per_s() == [40.0, 40.0, 40.0]


def test_nothing_of_doll_writes_to_it() -> None:
    config = foreign()
    with pytest.raises(ConfigError, match=r"doll dead replay writes to the samples topic, and data\.topic is clicks"):
        replay(config, NOWHERE, [])
    with pytest.raises(ConfigError, match="the producer writes to the samples topic"):
        run_producer(config, NOWHERE)
    assert not topics.delete_records(config, NOWHERE, "clicks", 0, 5)


def test_what_is_wrong_with_it_is_one_line_with_the_remedy() -> None:
    topic = ForeignTopic("clicks", 14, leaderless=((3, (1, 2)),), settings={"cleanup.policy": "compact,delete"})
    assert "cleanup.policy is compact,delete, expected delete" in foreign_topic.compacted(foreign(), topic)
    assert "--add-config cleanup.policy=delete" in foreign_topic.compacted(foreign(), topic)
    assert foreign_topic.compacted(foreign("data.on_data_loss=skip"), topic) == ""
    assert "no leader for partition 3 (copies on brokers 1, 2)" in foreign_topic.without_leader(topic)
    long = ForeignTopic("clicks", 12, settings={"max.message.bytes": "60000000"})
    assert "raise data.max_record_bytes to 30000000" in foreign_topic.too_long(foreign(), long)
    assert foreign_topic.too_long(foreign("data.max_record_bytes=30000000"), long) == ""
    hidden = ForeignTopic("clicks", 12)
    assert foreign_topic.compacted(foreign(), hidden) == foreign_topic.too_long(foreign(), hidden) == ""


LOG = SampleLog("clicks", "id", (5, 0, 100), (50, 0, 200))


@pytest.mark.parametrize(
    ("start", "origins"),
    [("earliest", (5, 0, 100)), ("latest", (50, 0, 200)), ("{offsets: {2: 150, 0: 5, 1: 0}}", (5, 0, 150))],
)
def test_where_a_job_begins(start: str, origins: tuple[int, ...]) -> None:
    assert start_offsets(foreign(f"data.start={start}", partitions=3), NOWHERE, LOG) == origins


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ("{0: 5, 2: 150}", "expected an offset for each of the 3 partitions of clicks, got none for partition 1"),
        ("{0: 5, 1: 0, 2: 150, 3: 0, 7: 1}", "expected partitions 0 to 2 of clicks, got partitions 3, 7"),
        ("{0: 4, 1: 0, 2: 150}", "expected 5 to 50 for partition 0 of clicks, .*, got 4"),
        ("{0: 5, 1: 0, 2: 201}", "expected 100 to 200 for partition 2 of clicks, .*, got 201"),
    ],
)
def test_an_offset_that_there_is_not_is_refused(offsets: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"data.start.offsets: {words}"):
        start_offsets(foreign(f"data.start={{offsets: {offsets}}}", partitions=3), NOWHERE, LOG)


@pytest.mark.integration
def test_kafka_says_how_many_partitions_there_are(services: Services, job_name: str) -> None:
    owner = OwnersTopic(services.kafka, f"clicks.{job_name}")
    open_job = foreign(topic=owner.name, partitions=None, name=job_name)
    with pytest.raises(MissingTopicError, match=f"which has no topic {owner.name}: .*; DOLL does not"):
        foreign_topic.look_up(open_job, services, admin=owner.admin)
    owner.create(5, {"max.message.bytes": "1048588"})
    config = with_partitions(open_job, services)
    assert (config.data.num_partitions, config.data.workers) == (5, 3)
    assert with_partitions(open_job, services, recorded=4).data.num_partitions == 4
    rated = foreign("arrivals.rate_per_s=[1, 2, 3]", topic=owner.name, partitions=None, name=job_name)
    assert with_partitions(rated, services, recorded=5).data.num_partitions == 3, "when it began"
    with pytest.raises(ConfigError, match=r"arrivals\.rate_per_s: expected one rate, or 5, .* got 3"):
        with_partitions(rated, services)
    with pytest.raises(ConfigError, match=r"data\.partitions: expected 5, .* got 4: correct the key, or remove it"):
        with_partitions(foreign(topic=owner.name, partitions=4), services, begins=True)
    with pytest.raises(ConfigError, match=r"data\.partitions: expected at most 5, .* got 12"):
        foreign_topic.require(foreign(topic=owner.name), services)

    before = owner.settings()
    assert topics.ensure(config, services) == []
    topics.check(config, services)
    assert next((info.name, info.partitions) for info in topics.describe(config, services)) == (owner.name, 5)
    assert not topics.exists(config, services, f"doll.{job_name}.samples")
    assert owner.settings() == before
    topic = foreign_topic.look_up(config, services)
    assert topic.topic_id == topics.topic_id(config, services, "samples") != ""
    assert (topic.may_read, topic.leaderless) == (True, ())

    owner.set(**{"cleanup.policy": "compact"})
    with pytest.raises(ConfigError, match=r"cleanup\.policy is compact, expected delete"):
        topics.ensure(config, services)
