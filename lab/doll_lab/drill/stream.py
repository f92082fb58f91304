"""Faults in the samples topic: poison records, deletion of records that are durable in the model."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from doll.config.source import DigitsSource, IdxSource, SyntheticSource
from doll.errors import CheckpointError, DollError
from doll.kafka import topics
from doll.kafka.publisher import Delivery, Publisher
from doll.ledger.snapshot_counts import read_counts
from doll.records import packing
from doll.services import Services
from doll.storage.stores import open_store
from doll.task.base import load_task

if TYPE_CHECKING:
    from pathlib import Path

    from doll.config import JobConfig

_NO_CLASS: Final = 255
_DIGIT_PIXELS: Final = 8 * 8
_HUGE: Final = 3e38  # fits into a float32; the sum of two does not


class Poison(NamedTuple):
    """Well-formed records that cannot be decoded or that would break the model.

    Attributes:
        harmless: how many of them the model may classify correctly: these are applied without effect.
    """

    records: tuple[bytes, ...]
    harmless: int = 0


def poison_for(config: JobConfig, number: int) -> Poison | None:
    """Poison records for one fault; None if the record format of the job's source is not known.

    Args:
        number: the fault's number. For synthetic sources odd numbers give an invalid class, and even numbers give
            features of 3e38: one record for each class, so that at most one is classified correctly.
    """
    match config.source:
        case SyntheticSource(features=features, classes=classes):
            values = [0.0] * features if number % 2 else [_HUGE, -_HUGE, *[_HUGE] * features][:features]
            labels = [classes] if number % 2 else range(classes)
            samples = [struct.pack(f"<{features + 1}f", *values, float(label)) for label in labels]
        case DigitsSource():
            samples = [bytes([_NO_CLASS]) + bytes(_DIGIT_PIXELS)]
        case IdxSource():
            samples = [bytes([_NO_CLASS]) + bytes(math.prod(load_task(config).input_shape or (0,)))]
        case _:
            return None
    per_record = config.data.samples_per_record
    records = samples if per_record == 1 else [packing.pack([sample] * per_record) for sample in samples]
    return Poison(tuple(records), harmless=int(len(records) > 1))


class SamplesTopic:
    """The job's samples topic. No call waits long for Kafka, which may be down because of a fault."""

    def __init__(self, config: JobConfig, services: Services, run_folder: Path) -> None:
        self._config = config
        self._services = services
        self._run_folder = run_folder
        self._publisher: Publisher | None = None

    def put(self, partition: int, value: bytes, on_offset: Callable[[int], None]) -> None:
        """Send one record, until Kafka has it; a later `poll` calls `on_offset` with its offset."""
        if self._publisher is None:
            self._publisher = Publisher(self._config, self._services, compression_type="none")

        def on_delivery(delivery: Delivery) -> None:
            if delivery.refusal:
                raise DollError(f"Kafka refused a record of the drill: {delivery.refusal}")
            on_offset(delivery.offset)

        self._publisher.send(self._config.topic("samples"), value, partition=partition, on_delivery=on_delivery)

    def poll(self) -> None:
        """Take in what Kafka has acknowledged."""
        if self._publisher is not None:
            self._publisher.poll()

    def truncate(self, partition: int) -> int | None:
        """Delete what is durable of a stream; the first offset that is left, or None if that was not possible now."""
        until = self._durable_until(partition)
        if until is None:
            return None
        topic = self._config.topic("samples")
        return until if topics.delete_records(self._config, self._services, topic, partition, until) else None

    def _durable_until(self, partition: int) -> int | None:
        """The first offset that is not in the newest checkpoint; None while there is no checkpoint."""
        try:
            checkpoint = open_store(self._config, self._run_folder).load_newest(None)
        except CheckpointError:
            return None
        if checkpoint is None:
            return None
        return read_counts(self._config, checkpoint.state).read_until[partition]
