"""What a drill does to the samples topic: puts a record there that nobody can learn from, deletes what is durable."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from doll import packing
from doll.config import DigitsSource, IdxSource, SyntheticSource
from doll.errors import CheckpointError, DollError
from doll.kafka.clients import kafka_settings
from doll.services import Services

if TYPE_CHECKING:
    from pathlib import Path

    from doll.config import JobConfig

_NO_CLASS: Final = 255
_HUGE: Final = 3e38  # a float32 holds it; a sum of two, none
_DELETE_S: Final = 5.0


class Poison(NamedTuple):
    """Records of the right form that nobody can learn from.

    Attributes:
        harmless: how many of them a model may happen to get right: these are applied, and change nothing.
    """

    records: tuple[bytes, ...]
    harmless: int = 0


def poison_for(config: JobConfig, number: int) -> Poison | None:
    """None where the form of the job's records is not known.

    Args:
        number: of the fault. Where both can be, those with an odd one have a class that is none, and the others have
            features that are far too large: one record for each class, all but one of which are wrong by 1e38.
    """
    match config.source:
        case SyntheticSource(features=features, classes=classes):
            values = [0.0] * features if number % 2 else [_HUGE, -_HUGE, *[_HUGE] * features][:features]
            labels = [classes] if number % 2 else range(classes)
            samples = [struct.pack(f"<{features + 1}f", *values, float(label)) for label in labels]
        case DigitsSource() | IdxSource():
            samples = [bytes([_NO_CLASS]) + bytes(_pixels(config))]
        case _:
            return None
    per_record = config.data.samples_per_record
    records = samples if per_record == 1 else [packing.pack([sample] * per_record) for sample in samples]
    return Poison(tuple(records), harmless=int(len(records) > 1))


def _pixels(config: JobConfig) -> int:
    from doll.task import load_task

    return math.prod(load_task(config).input_shape or (0,))


class SamplesTopic:
    """The job's samples topic. Nothing here waits for Kafka for long: it may be dead at the time."""

    def __init__(self, config: JobConfig, services: Services, run_folder: Path) -> None:
        self._config = config
        self._services = services
        self._run_folder = run_folder
        self._producer: Any = None

    def put(self, partition: int, value: bytes, on_offset: Callable[[int], None]) -> None:
        """Send one record; `on_offset` is told where it is, from a later `poll`. It is sent until Kafka has it."""
        from confluent_kafka import Producer

        if self._producer is None:
            self._producer = Producer(
                kafka_settings(self._config, self._services, acks="all", enable_idempotence=True, message_timeout_ms=0)
            )

        def told(error: Any, message: Any) -> None:
            if error is not None:
                raise DollError(f"Kafka refuses a record of the drill: {error}")
            on_offset(int(message.offset()))

        self._producer.produce(self._config.topic("samples"), value, partition=partition, on_delivery=told)

    def poll(self) -> None:
        """Take in what Kafka has acknowledged."""
        if self._producer is not None:
            self._producer.poll(0)

    def truncate(self, partition: int) -> int | None:
        """Delete what is durable of a stream; the first offset that is left, None where that was not possible now."""
        from confluent_kafka import KafkaException, TopicPartition
        from confluent_kafka.admin import AdminClient

        until = self._durable_until(partition)
        if until is None:
            return None
        admin = AdminClient(kafka_settings(self._config, self._services))
        where = TopicPartition(self._config.topic("samples"), partition, until)
        try:
            for done in admin.delete_records([where], request_timeout=_DELETE_S).values():
                done.result(2 * _DELETE_S)
        except (KafkaException, TimeoutError):
            return None
        return until

    def _durable_until(self, partition: int) -> int | None:
        """The first offset that the newest checkpoint does not hold; None while there is no checkpoint."""
        from doll.ledger.audit import read_counts
        from doll.storage.stores import open_store

        try:
            checkpoint = open_store(self._config, self._run_folder).load_newest(None)
        except CheckpointError:
            return None
        if checkpoint is None:
            return None
        counts = read_counts(self._config, checkpoint)
        return counts.origins[partition] + counts.applied[partition] * counts.records_per_batch
