"""The six topics of a job as it needs them: names, partitions, settings. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    from doll.config import JobConfig

TopicKind = Literal["samples", "commands", "events", "updates", "metrics", "dead"]
TOPIC_KINDS: Final[tuple[TopicKind, ...]] = get_args(TopicKind)

# The longest control record, and dead letter: one that names every offset of a large group, because all are refused.
RECORD_LIMIT_BYTES: Final = 32 * 1024 * 1024
MIN_ISR_SETTING: Final = "min.insync.replicas"
_HOUR_MS: Final = 3_600_000
_CONTROL_RETENTION_MS: Final = 6 * _HOUR_MS
_KEEP_FOREVER_MS: Final = -1
_MIN_SAMPLE_LIMIT_BYTES: Final = 16 * 1024 * 1024
_FETCH_OVERHEAD_BYTES: Final = 1024 * 1024


@dataclass(frozen=True)
class TopicPlan:
    """One topic as the job needs it: `settings` as for Kafka's topic configs."""

    name: str
    partitions: int
    settings: dict[str, str]


def batch_limit_bytes(config: JobConfig) -> int:
    """What a compressed batch of `samples` may unpack to with zstd, and what a fetch may have at most.

    It is twice what the topic accepts of a batch as it is sent.
    """
    return 2 * _sample_limit_bytes(config) + _FETCH_OVERHEAD_BYTES


def _sample_limit_bytes(config: JobConfig) -> int:
    # An oversized record must be able to arrive, or nobody could dead-letter it.
    return max(2 * config.data.max_record_bytes, _MIN_SAMPLE_LIMIT_BYTES)


def plan_topics(config: JobConfig) -> list[TopicPlan]:
    """The job's topics, in the order of `TOPIC_KINDS`. Pure."""
    sample_limit_bytes = str(_sample_limit_bytes(config))
    samples = {
        "retention.ms": str(int(config.data.retention_hours * _HOUR_MS)),
        "max.message.bytes": sample_limit_bytes,
    }
    control = {"retention.ms": str(_CONTROL_RETENTION_MS)}
    # By size too: a broker may have a default limit.
    forever = {"retention.ms": str(_KEEP_FOREVER_MS), "retention.bytes": str(_KEEP_FOREVER_MS)}
    # An acknowledged record survives the loss of any one broker, and that loss stops no writer.
    in_sync = {"cleanup.policy": "delete", MIN_ISR_SETTING: str(max(1, config.kafka.replication_factor - 1))}
    # Kafka's own limit of 1 MB is too low for a Push or an Update that names many refused records.
    long = {"max.message.bytes": str(RECORD_LIMIT_BYTES)}
    settings: dict[TopicKind, dict[str, str]] = {
        "samples": samples,
        "commands": control,
        "events": control | long,
        "updates": forever | long,
        "metrics": control,
        "dead": forever | {"max.message.bytes": sample_limit_bytes},
    }
    return [
        TopicPlan(
            config.topic(kind), config.data.workers if kind in ("samples", "commands") else 1, settings[kind] | in_sync
        )
        for kind in TOPIC_KINDS
    ]
