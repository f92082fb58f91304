"""Checks of topics that DOLL reads and that belong to others: they exist, can be read, and lose nothing."""

from __future__ import annotations

from dataclasses import dataclass

from doll.config import JobConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.foreign_topic import look_up, unreadable, without_leader
from doll.services import Services


@dataclass(frozen=True)
class JoinedTopic:
    """A topic of features (source 0) or labels (sources from 1, in the order of the job file)."""

    source: int
    name: str
    partitions: int
    topic_id: str  # "": this Kafka has no ids


def joined_topics(config: JobConfig, services: Services) -> tuple[JoinedTopic, ...]:
    """Return the topics of `data.join`, the features first.

    Raises:
        ConfigError: a topic is missing, may not be read, or is compacted.
        ServiceUnavailableError: Kafka does not answer, or a partition has no leader.
    """
    join = config.data.join
    assert join is not None
    takes = ["", *(label.take for label in join.labels)]
    return tuple(
        check_topic(
            config, services, name,
            "data.join.features.topic" if source == 0 else f"data.join.labels[{source - 1}].topic",
            source=source, compacted=take == "last",
        )
        for source, (name, take) in enumerate(zip(join.topics, takes, strict=True))
    )  # fmt: skip


def check_topic(
    config: JobConfig, services: Services, name: str, where: str, *, source: int = 0, compacted: bool = False
) -> JoinedTopic:
    """Return the present state of a topic of which each record is needed; `where` is its key in the job file.

    Args:
        compacted: whether it may be compacted.

    Raises:
        ConfigError, ServiceUnavailableError: see `joined_topics`.
    """
    topic = look_up(config, services, name, where)
    if problem := unreadable(config, services, topic):
        raise ConfigError(f"{where}: {problem}")
    if problem := without_leader(topic):
        raise ServiceUnavailableError(problem)
    if "compact" in (topic.settings or {}).get("cleanup.policy", "") and not compacted:
        raise ConfigError(
            f"{where}: topic {name} is compacted: Kafka deletes all but the newest record of a key, perhaps before it "
            "is read; expected cleanup.policy=delete" + (", or take: last" if source else "")
        )
    return JoinedTopic(source, name, topic.partitions, topic.topic_id)
