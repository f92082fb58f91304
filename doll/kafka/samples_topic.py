"""Checks that the samples topic is still the one that the model was learned from.

Offsets name samples only within one topic. If it was deleted and created again, or truncated, the same offsets are
other records: a reader that continued at its offset would wait forever, or skip records until the log is as long as
before. Kafka gives each topic an id, which the checkpoint keeps. Brokers before 2.8 have no ids: there only a log that
is shorter than what was read of it shows the difference.

Calls raise ServiceUnavailableError where Kafka does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from doll.errors import ConfigError
from doll.kafka import topics
from doll.services import Services
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.config import JobConfig

log = get_logger(__name__)

# A broker that has just become the leader may not know for seconds how far its log is committed.
_LEADER_SETTLE_S: Final = 30.0
_RETRY_S: Final = 0.5
TRUNCATED_ADVICE = (
    "what was not learned before is gone. The model is in the checkpoints (doll export writes it). Then start over on "
    "this topic (doll up --fresh; doll ps --fresh; in containers FRESH=1 docker compose up), or take another job name"
)


class ReplacedSamplesError(ConfigError):
    """The samples topic is not the one that the model was learned from, or has lost records that were learned."""


@dataclass(frozen=True)
class SampleLog:
    """The samples topic as the broker has it."""

    name: str
    topic_id: str  # Kafka's id of the topic; "" where the broker has no ids
    low: tuple[int, ...]  # per partition, the first offset that is kept
    high: tuple[int, ...]  # per partition, the offset that the next record gets


def describe_samples(
    config: JobConfig,
    services: Services,
    bounds_of: Callable[[str, int], tuple[int, int]],
    *,
    expected_id: str = "",
    read_until: Sequence[int] | None = None,
) -> SampleLog:
    """Ask the broker.

    Args:
        expected_id: Kafka's id of the topic that the model was learned from; "" where it is not known.
        read_until: of each partition that the job reads, the offset behind the last record that the model has learned;
            None: of a job that begins.

    Raises:
        ReplacedSamplesError: the topic was deleted and created again, or cut short; the message says what to do.
    """
    name = config.topic("samples")
    topic_id = topics.topic_id(config, services, "samples")
    if not topic_id:
        log.warning(
            "no_topic_id", topic=name, reason="this broker gives topics no id (Kafka before 2.8)",
            hint="a topic that is deleted and created again is noticed only while it is shorter than before",
        )  # fmt: skip
    refuse_replaced_topic(name, expected_id, topic_id)
    reach = read_until or [0] * config.data.num_partitions
    bounds = [bounds_reaching(name, partition, offset, bounds_of) for partition, offset in enumerate(reach)]
    return SampleLog(name, topic_id, tuple(low for low, _ in bounds), tuple(high for _, high in bounds))


def refuse_replaced_topic(name: str, expected: str, actual_id: str) -> None:
    """Raise ReplacedSamplesError where both ids are known and differ."""
    if problem := replaced_topic(name, expected, actual_id):
        raise ReplacedSamplesError(f"{problem}; {TRUNCATED_ADVICE}")


def replaced_topic(name: str, expected: str, actual_id: str) -> str:
    """What is wrong if both ids are known and differ, else ""."""
    if not expected or not actual_id or expected == actual_id:
        return ""
    return (
        f"topic {name} was deleted and created again since this job began (expected Kafka's topic id {expected}, found "
        f"{actual_id}): its offsets are other records now"
    )


def bounds_reaching(
    name: str, partition: int, next_offset: int, bounds_of: Callable[[str, int], tuple[int, int]]
) -> tuple[int, int]:
    """(low, high) of a log that reaches as far as what is to be read next; a new leader is given time to know it.

    Raises:
        ReplacedSamplesError: the log ends before, and stays so.
    """
    deadline_s = time.monotonic() + _LEADER_SETTLE_S
    while True:
        low, high = bounds_of(name, partition)
        if next_offset <= high:
            return low, high
        if time.monotonic() > deadline_s:
            message = short_log_message(name, partition, next_offset, high)
            raise ReplacedSamplesError(f"{message}; {TRUNCATED_ADVICE}")
        time.sleep(_RETRY_S)


def truncated_message(name: str, partition: int, next_offset: int, reason: str) -> str:
    """The message for a log that has lost records which were read of it, and holds others in their place, or will."""
    return (
        f"{name}/{partition} was read up to offset {next_offset}, has lost records below it since, and holds others in "
        f"their place, or will: the log was truncated ({reason})"
    )


def short_log_message(name: str, partition: int, next_offset: int, high: int) -> str:
    """The message for a log that ends before what was read of it."""
    return (
        f"{name}/{partition} ends at offset {high}, but it was read up to offset {next_offset}: the topic was cut "
        "short, or deleted and created again"
    )


def lost_records(topic: str, partition: int, lo: int, hi: int) -> str:
    """The message for records that Kafka deleted before they were learned, and what to do about it."""
    return (
        f"{topic}/{partition}: records {lo} to {hi - 1} were deleted, by retention or by hand, before they were "
        "learned; expected them in the log. Keep records for longer (data.retention_hours, or retention.ms and "
        "retention.bytes of the topic); then go on without these (--set data.on_data_loss=skip: they are counted, and "
        "named by the audit), or begin a new job"
    )
