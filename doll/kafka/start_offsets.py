"""Where a new job begins in each partition of its samples topic: `data.start`, resolved by Kafka.

It is decided once, by the first server of the job, and kept in its checkpoints and in `updates`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec

from doll.errors import ConfigError
from doll.kafka.clients import make_admin, retry_while_leaderless, translate_errors
from doll.kafka.samples_topic import SampleLog
from doll.services import Services

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from doll.config import JobConfig

_TIMEOUT_S: Final = 15.0
_NAMED: Final = 8  # partitions that a message names


def start_offsets(config: JobConfig, services: Services, samples: SampleLog) -> tuple[int, ...]:
    """The offset of the job's first record in each partition.

    Args:
        samples: the topic as it is now.

    Raises:
        ConfigError: `data.start.offsets` lacks a partition, or names one that there is not, or an offset that the
            log does not hold.
        ServiceUnavailableError: Kafka does not answer.
    """
    match config.data.start:
        case "earliest":
            return samples.low
        case "latest":
            return samples.high
        case start if start.offsets is not None:
            return _given(start.offsets, samples)
        case start:
            assert start.timestamp is not None  # one of both is given
            return _at_time(config, services, samples, round(start.timestamp.timestamp() * 1000))


def deleted_before(config: JobConfig, generation: int, origins: Sequence[int]) -> tuple[int, ...]:
    """How many records of each partition were deleted before the job could begin with them; () where it did not want
    all of the stream, or where the log is older than the job."""
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


def _at_time(config: JobConfig, services: Services, samples: SampleLog, time_ms: int) -> tuple[int, ...]:
    """A partition without a record of that time or a later one begins at its end."""
    wanted = {
        TopicPartition(samples.name, number): OffsetSpec.for_timestamp(time_ms) for number in range(len(samples.low))
    }

    admin = make_admin(config, services)  # the answer comes only while it lives

    def ask() -> dict[int, int]:
        futures = admin.list_offsets(wanted, request_timeout=_TIMEOUT_S)
        return {where.partition: future.result().offset for where, future in futures.items()}

    with translate_errors(services.kafka, f"say which records of {samples.name} have this time or a later one"):
        offsets = retry_while_leaderless(ask)
    return tuple(
        high if offsets[number] < 0 else min(max(offsets[number], low), high)
        for number, (low, high) in enumerate(zip(samples.low, samples.high, strict=True))
    )


def _named(numbers: list[int]) -> str:
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"partition{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_NAMED]))}{more}"
