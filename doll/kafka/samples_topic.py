"""Check that the samples topic is still the one that the model was learned from; find where a new job begins.

Offsets identify samples only within one topic. After the topic was deleted and created again, or truncated, the same
offsets mean other records. If a reader continued at its offset, it would skip records until the log is as long as
before, or it would wait without end. Kafka gives each topic an id, which the checkpoint contains. Brokers before 2.8
have no ids, so the change is only detected if the log is shorter than the part that was read.

The first server of a job decides once where the job begins in the topic (`data.start`). The decision is kept in the
checkpoints and in the topic `updates`. Calls raise ServiceUnavailableError if Kafka does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.kafka import topics
from doll.kafka.clients import list_offsets, make_admin, retry_while_leaderless, translate_errors
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

# A broker that has just become the leader may not know for seconds which part of its log is committed.
_LEADER_SETTLE_S: Final = 30.0
_RETRY_S: Final = 0.5
_NAMED: Final = 8  # maximum number of partitions that a message lists
TRUNCATED_ADVICE = (
    "what was not learned before is gone. The model is in the checkpoints (doll export writes it). Then start over on "
    "this topic (doll up --fresh; doll ps --fresh; in containers FRESH=1 docker compose up), or take another job name"
)


class ReplacedSamplesError(ConfigError):
    """The samples topic is not the one that the model was learned from, or has lost learned records."""


@dataclass(frozen=True)
class SampleLog:
    """The state of the samples topic at the broker."""

    name: str
    topic_id: str  # Kafka's id of the topic; "" if the broker has no ids
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
    """Return the state of the samples topic. Raise ReplacedSamplesError, whose message says what to do, if the topic
    was deleted and created again, or truncated.

    Args:
        expected_id: Kafka's id of the topic that the model was learned from; "" if it is unknown.
        read_until: for each partition that the job reads, the offset after the last record that the model has learned.
            None: the job begins.
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
    """Raise ReplacedSamplesError if both ids are known and differ."""
    if problem := replaced_topic(name, expected, actual_id):
        raise ReplacedSamplesError(f"{problem}; {TRUNCATED_ADVICE}")


def replaced_topic(name: str, expected: str, actual_id: str) -> str:
    """Return the problem that both ids are known and differ; otherwise ""."""
    if not expected or not actual_id or expected == actual_id:
        return ""
    return (
        f"topic {name} was deleted and created again since this job began (expected Kafka's topic id {expected}, found "
        f"{actual_id}): its offsets are other records now"
    )


def bounds_reaching(
    name: str, partition: int, next_offset: int, bounds_of: Callable[[str, int], tuple[int, int]]
) -> tuple[int, int]:
    """Return (low, high) of a log that contains the offset before `next_offset`. Wait some time, because a new leader
    may not know its end yet. Raise ReplacedSamplesError if the log is still shorter then."""
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
    """Return the message for a log that has lost records that were read, and has or will have other records there."""
    return (
        f"{name}/{partition} was read up to offset {next_offset}, has lost records below it since, and holds others in "
        f"their place, or will: the log was truncated ({reason})"
    )


def short_log_message(name: str, partition: int, next_offset: int, high: int) -> str:
    """Return the message for a log that is shorter than the part that was read."""
    return (
        f"{name}/{partition} ends at offset {high}, but it was read up to offset {next_offset}: the topic was cut "
        "short, or deleted and created again"
    )


def lost_records(topic: str, partition: int, lo: int, hi: int) -> str:
    """Return the message for records that Kafka deleted before they were learned, and what to do about it."""
    return (
        f"{topic}/{partition}: records {lo} to {hi - 1} were deleted, by retention or by hand, before they were "
        "learned; expected them in the log. Keep records for longer (data.retention_hours, or retention.ms and "
        "retention.bytes of the topic); then go on without these (--set data.on_data_loss=skip: they are counted, and "
        "named by the audit), or begin a new job"
    )


def start_offsets(config: JobConfig, services: Services, samples: SampleLog) -> tuple[int, ...]:
    """Return the offset of the job's first record in each partition of the topic as it is now. Raise ConfigError if
    `data.start.offsets` lacks a partition, names one that does not exist, or has an offset that the log does not hold.
    Raise ServiceUnavailableError if Kafka does not answer."""
    match config.data.start:
        case "earliest":
            return samples.low
        case "latest":
            return samples.high
        case start if start.offsets is not None:
            return _given(start.offsets, samples)
        case start:
            assert start.timestamp is not None  # one of the two is given
            return at_time(config, services, samples, round(start.timestamp.timestamp() * 1000))


def deleted_before(config: JobConfig, generation: int, origins: Sequence[int]) -> tuple[int, ...]:
    """Return the number of records of each partition that were deleted before the job could begin with them. Return ()
    if the job did not start at the earliest record, or the log is older than the job."""
    is_whole = config.data.topic is None and config.data.start == "earliest" and not generation
    return tuple(origins) if is_whole and any(origins) else ()


def _given(offsets: Mapping[int, int], samples: SampleLog) -> tuple[int, ...]:
    num = len(samples.low)
    if absent := [number for number in range(num) if number not in offsets]:
        raise ConfigError(
            f"data.start.offsets: expected an offset for each of the {num} partitions of {samples.name}, got none for "
            f"{_named(absent)}"
        )
    if unknown := sorted(number for number in offsets if number >= num):
        raise ConfigError(
            f"data.start.offsets: expected partitions 0 to {num - 1} of {samples.name}, got {_named(unknown)}"
        )
    for number, (low, high) in enumerate(zip(samples.low, samples.high, strict=True)):
        if not low <= (offset := offsets[number]) <= high:
            raise ConfigError(
                f"data.start.offsets: expected {low} to {high} for partition {number} of {samples.name}, which is what "
                f"its log holds and its end, got {offset}"
            )
    return tuple(offsets[number] for number in range(num))


def at_time(config: JobConfig, services: Services, samples: SampleLog, time_ms: int) -> tuple[int, ...]:
    """Return the offset of each partition's first record of this time or later; its end if there is none."""
    places = [TopicPartition(samples.name, number) for number in range(len(samples.low))]
    spec = OffsetSpec.for_timestamp(time_ms)
    admin = make_admin(config, services)  # the answer arrives only while this client exists
    with translate_errors(services.kafka, f"say which records of {samples.name} have this time or a later one"):
        offsets = retry_while_leaderless(lambda: list_offsets(admin, places, spec))
    return tuple(
        high if offsets[samples.name, number] < 0 else min(max(offsets[samples.name, number], low), high)
        for number, (low, high) in enumerate(zip(samples.low, samples.high, strict=True))
    )


def _named(numbers: list[int]) -> str:
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"partition{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_NAMED]))}{more}"
