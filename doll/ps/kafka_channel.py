"""The parameter server's channel to Kafka: reads `events` from its end, writes `commands`, `updates` and `metrics`.

No consumer group and no committed offsets: what the server missed while it was away, workers say again after Hello.
"""

from __future__ import annotations

import uuid
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.clients import LINGER_MS, RECORD_LIMIT_BYTES, kafka_settings
from doll.records import AnyRecord, Metric, ServerStatus, encode
from doll.services import Services

_PER_POLL = 500


class KafkaChannel:
    """`Outbox` and inbox over confluent-kafka. Not thread-safe: one loop owns it."""

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._config = config
        self._producer = Producer(
            kafka_settings(
                config,
                services,
                acks="all",
                enable_idempotence=True,
                linger_ms=LINGER_MS,
                message_timeout_ms=0,
                compression_type="none",
                message_max_bytes=RECORD_LIMIT_BYTES,
            )
        )
        self._consumer = Consumer(
            kafka_settings(
                # The client library asks for a group name; nothing is ever committed under it.
                config,
                services,
                group_id=f"doll-{config.job}-ps-{uuid.uuid4().hex[:8]}",
                enable_auto_commit=False,
                auto_offset_reset="error",
            )
        )
        self._address = services.kafka
        self._acknowledged = 0
        self._had_traffic = False

    def open(self) -> None:
        """Start reading `events` at its present end.

        Raises:
            ServiceUnavailableError: Kafka does not answer.
        """
        topic = self._config.topic("events")
        _, high = self.watermarks(topic, 0)
        # Always with an explicit offset: without one, nothing may come while the broker is young (reference 8).
        self._consumer.assign([TopicPartition(topic, 0, high)])

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """(low, high): offset of the first record held, and the offset that the next one gets.

        Raises:
            ServiceUnavailableError: Kafka does not answer.
        """
        return topics.watermarks(self._consumer, self._address, topic, partition)

    def poll(self, timeout_s: float) -> list[bytes | None]:
        """Values that have come on `events`, waiting for the first one at most `timeout_s`."""
        self._producer.poll(0)
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        messages = [first, *self._consumer.consume(_PER_POLL, 0)]
        values: list[bytes | None] = []
        for message in messages:
            error: KafkaError | None = message.error()
            if error is None:
                self._had_traffic = True
                values.append(message.value())
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                # Retention has overtaken us after a long absence of Kafka: go on at the oldest record that is left.
                self._consumer.assign([TopicPartition(message.topic(), message.partition(), OFFSET_BEGINNING)])
            elif error.fatal():
                raise ServiceUnavailableError(f"Kafka at {self._address}: {error}")
        return values

    def send_command(self, worker: int, record: AnyRecord) -> None:
        self._produce(self._config.topic("commands"), record, partition=worker, on_delivery=self._on_record)

    def send_update(self, record: AnyRecord) -> None:
        self._produce(self._config.topic("updates"), record, partition=0, on_delivery=self._on_update)

    def send_metric(self, record: Metric | ServerStatus) -> None:
        self._produce(self._config.topic("metrics"), record, partition=0, on_delivery=self._on_metric)

    def updates_acknowledged(self) -> int:
        self._producer.poll(0)
        return self._acknowledged

    def had_traffic(self) -> bool:
        """Whether Kafka has sent or acknowledged anything since this was asked last."""
        had_traffic, self._had_traffic = self._had_traffic, False
        return had_traffic

    def flush(self, timeout_s: float) -> int:
        """Wait until everything is delivered; how many records are not when the time is over."""
        return int(self._producer.flush(timeout_s))

    def close(self) -> None:
        self._consumer.close()

    def _on_record(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:  # not by time: message.timeout.ms is 0, so this record can never be written
            raise ServiceUnavailableError(f"Kafka at {self._address} refused a record on {message.topic()}: {error}")
        self._had_traffic = True

    def _on_update(self, error: KafkaError | None, message: Any) -> None:
        self._on_record(error, message)
        self._acknowledged += 1

    def _on_metric(self, error: KafkaError | None, message: Any) -> None:
        self._had_traffic |= error is None

    def _produce(self, topic: str, record: AnyRecord, partition: int, on_delivery: Any = None) -> None:
        value = encode(record)
        while True:
            try:
                self._producer.produce(topic, value=value, partition=partition, on_delivery=on_delivery)
            except BufferError:
                self._producer.poll(0.1)  # Kafka is away and the queue is full: wait, nothing may be dropped
            else:
                self._producer.poll(0)
                return
