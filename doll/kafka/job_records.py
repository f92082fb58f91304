"""What the provisioner reads of a job on Kafka: `updates`, `events`, `metrics` and every partition of `commands`.

It joins no group and commits nothing; where it stands is kept with the provisioner's own state.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from doll import telemetry
from doll.errors import RecordError, ServiceUnavailableError
from doll.kafka.clients import kafka_settings
from doll.kafka.topics import watermarks
from doll.records import AnyRecord, decode
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig

log = telemetry.get_logger(__name__)

_LOOKUP_S: Final = 10.0
_MAX_MESSAGES: Final = 5000


class TimedRecord(NamedTuple):
    """A record and when it was written, Unix seconds."""

    record: AnyRecord
    at_s: float


class JobRecords:
    """All records of a job that say how it stands. Use as a context manager.

    Args:
        positions: next offset by `topic/partition`; from the earliest kept where nothing is said.

    Attributes:
        refused: records that did not decode: counted and passed over.

    Raises:
        ServiceUnavailableError: a topic is not there, or the broker does not answer.
    """

    def __init__(self, config: JobConfig, services: Services, positions: Mapping[str, int]) -> None:
        from confluent_kafka import Consumer, TopicPartition

        self.refused = 0
        self._samples = config.topic("samples")
        self._slots = config.data.workers
        self._consumer = Consumer(
            kafka_settings(
                config, services, group_id=f"doll.{config.job}.provision", enable_auto_commit=False,
                auto_offset_reset="earliest", fetch_wait_max_ms=100,
            )
        )  # fmt: skip
        self._next: dict[tuple[str, int], int] = {}
        self._ends: dict[tuple[str, int], int] = {}
        single = [(config.topic("updates"), 0), (config.topic("events"), 0), (config.topic("metrics"), 0)]
        try:
            for topic, part in [*single, *((config.topic("commands"), slot) for slot in range(self._slots))]:
                low, high = watermarks(self._consumer, services.kafka, topic, part, _LOOKUP_S)
                at = positions.get(f"{topic}/{part}", low)
                # Outside of what is kept: retention has removed it, or the topic is a new one of the same name.
                self._next[topic, part] = at if low <= at <= high else low
                self._ends[topic, part] = high
        except ServiceUnavailableError:
            self._consumer.close()
            raise
        self._consumer.assign([TopicPartition(topic, part, at) for (topic, part), at in self._next.items()])

    def __enter__(self) -> JobRecords:
        return self

    def __exit__(self, *exc: object) -> None:
        self._consumer.close()

    @property
    def positions(self) -> dict[str, int]:
        """Next offset by `topic/partition`: all before it has been returned by `poll`."""
        return {f"{topic}/{part}": at for (topic, part), at in self._next.items()}

    def poll(self, timeout_s: float) -> list[TimedRecord]:
        """The next records; as soon as there are any, at the latest after `timeout_s`."""
        message = self._consumer.poll(timeout_s)
        messages = [] if message is None else [message, *self._consumer.consume(_MAX_MESSAGES, timeout=0)]
        timed_records = []
        for message in messages:
            if message.error() is not None:
                log.warning("topic_error", reason=message.error().str())
                continue
            self._next[message.topic(), message.partition()] = message.offset() + 1
            try:
                record = decode(message.value())
            except RecordError as exc:
                self.refused += 1
                log.warning("record_refused", topic=message.topic(), offset=message.offset(), reason=str(exc))
                continue
            timed_records.append(TimedRecord(record, self._written_s(message)))
        return timed_records

    def _written_s(self, message: Any) -> float:
        """Of what comes while we listen, our own clock tells: the writers' clocks need not agree. Else theirs."""
        now_s = time.time()
        kind, stamp_ms = message.timestamp()
        if message.offset() >= self._ends[message.topic(), message.partition()] or not kind or stamp_ms <= 0:
            return now_s
        return min(now_s, float(stamp_ms) / 1000)

    def history(self, timeout_s: float = 120.0) -> list[TimedRecord]:
        """Everything that was there when this object was made.

        Raises:
            ServiceUnavailableError: the broker did not hand it out within `timeout_s`.
        """
        timed_records: list[TimedRecord] = []
        deadline_s = time.monotonic() + timeout_s
        while any(at < self._ends[place] for place, at in self._next.items()):
            if time.monotonic() > deadline_s:
                raise ServiceUnavailableError(f"Kafka did not hand out the job's records within {timeout_s:g} s")
            timed_records += self.poll(0.2)
        return timed_records

    def sample_ends(self, timeout_s: float = 1.0) -> list[int] | None:
        """The end of each partition of samples; None where the broker does not say in time."""
        from confluent_kafka import KafkaException, TopicPartition

        try:
            return [
                int(self._consumer.get_watermark_offsets(TopicPartition(self._samples, slot), timeout_s, False)[1])
                for slot in range(self._slots)
            ]
        except KafkaException:
            return None
