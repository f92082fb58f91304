"""Kafka's answers about a job (`doll.kafka.diagnosis` asks). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from doll.kafka.permissions import Resource
from doll.kafka.topic_plan import ActualTopic


@dataclass
class StreamFacts:
    """One partition of `samples`: the newest offset committed by any worker, and the log's ends.

    Attributes:
        old_until: records below it are older than half of the topic's retention.
    """

    committed: int | None
    low: int
    high: int
    old_until: int | None = None


@dataclass
class KafkaFacts:
    """Answers.

    Attributes:
        refusal: why Kafka cannot be used at all; then nothing else is known.
        latency_s: of a request for metadata, the fastest of a few.
        brokers: host and port of each, as they advertise themselves.
        topics: the job's topics that exist and may be described.
        partitions: of these.
        leaderless: partitions of these without a leader, `topic/partition`.
        allowed: operations by resource; None if Kafka does not say.
        create_refusals: why the missing topics could not be created; "" if they could.
        newest_s: time stamp of the newest record of the job's topics, Unix time by its writer's clock.
        problems: what could not be asked, and why.
    """

    refusal: str = ""
    latency_s: float | None = None
    brokers: list[tuple[str, int]] = field(default_factory=list)
    topics: dict[str, ActualTopic] = field(default_factory=dict)
    partitions: dict[str, int] = field(default_factory=dict)
    leaderless: list[str] = field(default_factory=list)
    allowed: dict[tuple[Resource, str], frozenset[str] | None] = field(default_factory=dict)
    create_refusals: dict[str, str] = field(default_factory=dict)
    streams: dict[int, StreamFacts] = field(default_factory=dict)
    newest_s: float | None = None
    problems: list[str] = field(default_factory=list)
