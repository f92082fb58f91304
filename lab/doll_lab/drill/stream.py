"""Faults in the samples topic: poison records, and the deletion of records that are durable in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from doll.config.source import PythonSource
from doll.errors import CheckpointError, ConfigError, DollError
from doll.kafka import topics
from doll.kafka.publisher import Delivery, Publisher
from doll.ledger.snapshot_counts import read_counts
from doll.records import packing
from doll.services import Services
from doll.storage.stores import open_store
from doll.task.base import load_function

if TYPE_CHECKING:
    from pathlib import Path

    from doll.config import JobConfig


class Poison(NamedTuple):
    """Well-formed records that cannot be decoded or that would break the model.

    Attributes:
        harmless: number of records that the model may classify correctly: they are applied without effect.
    """

    records: tuple[bytes, ...]
    harmless: int = 0


def poison_for(config: JobConfig, number: int) -> Poison | None:
    """Return poison records for one fault; None if the source is not of kind python, or its module has none.

    The module has a function `poison(number, **args)`, which gets the number of the fault and the arguments of the
    source. It returns one sample that the task refuses, or several that would break the model, of which one may be
    harmless.
    """
    if not isinstance(source := config.source, PythonSource):
        return None
    module = source.of.rpartition(":")[0]
    try:
        samples: list[bytes] = load_function(config, "source", f"{module}:poison", source.args)(number)
    except ConfigError:
        return None
    per_record = config.data.samples_per_record
    records = samples if per_record == 1 else [packing.pack([sample] * per_record) for sample in samples]
    return Poison(tuple(records), harmless=int(len(records) > 1))


class SamplesTopic:
    """The samples topic of the job. No call waits long for Kafka, which may be down because of a fault."""

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
        """Process the acknowledgements of Kafka."""
        if self._publisher is not None:
            self._publisher.poll()

    def truncate(self, partition: int) -> int | None:
        """Delete the durable records of a stream. Return the first remaining offset; None: not possible now."""
        until = self._durable_until(partition)
        if until is None:
            return None
        topic = self._config.topic("samples")
        return until if topics.delete_records(self._config, self._services, topic, partition, until) else None

    def _durable_until(self, partition: int) -> int | None:
        """Return the first offset that is not in the newest checkpoint; None if there is no checkpoint yet."""
        try:
            checkpoint = open_store(self._config, self._run_folder).load_newest(None)
        except CheckpointError:
            return None
        if checkpoint is None:
            return None
        return read_counts(self._config, checkpoint.state).read_until[partition]
