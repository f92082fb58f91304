"""The facts about a job that `doll.kafka.diagnosis` gets from Kafka. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from doll.kafka.permissions import Resource
from doll.kafka.topic_plan import ActualTopic


@dataclass
class StreamFacts:
    """One partition of `samples`: the newest offset that a worker has committed, and the ends of the log."""

    committed: int | None
    low: int
    high: int
    old_until: int | None = None  # records below it are older than half of the topic's retention


@dataclass
class KafkaFacts:
    """The answers of Kafka."""

    refusal: str = ""  # why Kafka cannot be used at all; if set, nothing else is known
    latency_s: float | None = None  # the shortest time of a few requests for metadata
    brokers: list[tuple[str, int]] = field(default_factory=list)  # host and port of each, as they advertise themselves
    topics: dict[str, ActualTopic] = field(default_factory=dict)  # the job's topics that exist and may be described
    partitions: dict[str, int] = field(default_factory=dict)  # number of partitions of these topics
    leaderless: list[str] = field(default_factory=list)  # `topic/partition` of partitions without a leader
    # Operations by resource; None if Kafka does not say.
    allowed: dict[tuple[Resource, str], frozenset[str] | None] = field(default_factory=dict)
    # Why the missing topics could not be created; "" if they could.
    create_refusals: dict[str, str] = field(default_factory=dict)
    streams: dict[int, StreamFacts] = field(default_factory=dict)
    # Time stamp of the newest record of the job's topics, Unix time by its writer's clock.
    newest_s: float | None = None
    problems: list[str] = field(default_factory=list)  # the questions that failed, with the reasons
