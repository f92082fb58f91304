"""Reading a job's single-partition topics from their beginning, for those who only watch: evaluator, progress, status.

No consumer group and no commits: positions are explicit, so that many may watch and none disturbs a worker.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from doll import telemetry
from doll.errors import RecordError, ServiceUnavailableError
from doll.kafka.clients import kafka_settings
from doll.kafka.topics import watermarks
from doll.records import AnyRecord, decode
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig

log = telemetry.get_logger(__name__)
_LOOKUP_S = 10.0


class TopicRecord(NamedTuple):
    """One record and where it stood."""

    topic: str
    offset: int
    record: AnyRecord


class Tail:
    """Records of `topics` (full names, one partition each) from the earliest that is kept, or from now on.

    A broker that goes away is waited for: `poll` then returns nothing. Records that do not decode are counted and
    skipped. Use as a context manager.

    Attributes:
        ends: per topic, the offset behind its last record when this tail was opened: what came before is history.
        refused: records that did not decode.

    Raises:
        ServiceUnavailableError: a topic is not there, or the broker does not answer.
    """

    def __init__(
        self, config: JobConfig, services: Services, topics: tuple[str, ...], *, from_end: bool = False
    ) -> None:
        from confluent_kafka import Consumer, TopicPartition

        # A group id must be given even where, as here, no group is joined.
        settings = kafka_settings(
            config,
            services,
            group_id=f"doll.{config.job}.watch",
            enable_auto_commit=False,
            auto_offset_reset="earliest",  # only where retention has removed what was to be read next
            fetch_wait_max_ms=100,
        )
        self._consumer = Consumer(settings)
        self.refused = 0
        try:
            marks = {topic: watermarks(self._consumer, services.kafka, topic, 0, _LOOKUP_S) for topic in topics}
        except ServiceUnavailableError:
            self._consumer.close()
            raise
        self._address = services.kafka
        self.ends: dict[str, int] = {topic: high for topic, (_, high) in marks.items()}
        self._next: dict[str, int] = {topic: high if from_end else low for topic, (low, high) in marks.items()}
        self._consumer.assign([TopicPartition(topic, 0, offset) for topic, offset in self._next.items()])

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *exc: object) -> None:
        self._consumer.close()

    def poll(self, timeout_s: float, limit: int = 1000) -> list[TopicRecord]:
        """The next records, in order within each topic; as soon as there are any, at the latest after `timeout_s`."""
        message = self._consumer.poll(timeout_s)
        messages = [] if message is None else [message, *self._consumer.consume(limit - 1, timeout=0)]
        records = []
        for message in messages:
            if message.error() is not None:
                log.warning("topic_error", reason=message.error().str())
                continue
            topic, offset = message.topic(), message.offset()
            self._next[topic] = offset + 1
            try:
                records.append(TopicRecord(topic, offset, decode(message.value())))
            except RecordError as exc:
                self.refused += 1
                log.warning("record_refused", topic=topic, offset=offset, reason=str(exc))
        return records

    def has_read_history(self, topic: str) -> bool:
        """Whether everything that `topic` held when this tail was opened has been returned."""
        return self._next[topic] >= self.ends[topic]

    def read_to_end(self, timeout_s: float = 10.0) -> list[TopicRecord]:
        """What the topics hold by now and has not been returned yet; less of it if `timeout_s` is over before."""
        records: list[TopicRecord] = []
        deadline_s = time.monotonic() + timeout_s
        try:
            ends = {topic: watermarks(self._consumer, self._address, topic, 0, _LOOKUP_S)[1] for topic in self.ends}
        except ServiceUnavailableError as exc:
            log.warning("topic_error", reason=str(exc))
            return records
        while any(self._next[topic] < end for topic, end in ends.items()) and time.monotonic() < deadline_s:
            records += self.poll(0.2)
        return records

    def partition_bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """First offset that a partition of any topic still holds, and one above its last.

        Raises:
            ServiceUnavailableError: the broker does not say.
        """
        return watermarks(self._consumer, self._address, topic, partition, _LOOKUP_S)

    def partition_ends(self, topic: str, partitions: int, timeout_s: float = 1.0) -> list[int] | None:
        """The end (high watermark) of each partition of any topic; None where the broker does not say in time."""
        from confluent_kafka import KafkaException, TopicPartition

        try:
            return [
                self._consumer.get_watermark_offsets(TopicPartition(topic, n), timeout=timeout_s, cached=False)[1]
                for n in range(partitions)
            ]
        except KafkaException:
            return None

    def read_history(self, timeout_s: float = 30.0) -> list[TopicRecord]:
        """Everything that the topics held when this tail was opened.

        Raises:
            ServiceUnavailableError: the broker did not hand it out within `timeout_s`.
        """
        records: list[TopicRecord] = []
        deadline_s = time.monotonic() + timeout_s
        while not all(self.has_read_history(topic) for topic in self.ends):
            if time.monotonic() > deadline_s:
                raise ServiceUnavailableError(f"Kafka did not hand out {', '.join(self.ends)} within {timeout_s:g} s")
            records += self.poll(0.2)
        return records
