"""Reads the committed records of a topic that belongs to somebody else, from given offsets on, and loses none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, TopicPartition

from doll.errors import DataLossError, ServiceUnavailableError
from doll.kafka.clients import make_consumer
from doll.kafka.topic_plan import batch_limit_bytes
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig


class TopicFeed:
    """A reader of the partitions 0 to `len(offsets)` - 1. Has no group: the caller keeps the offsets."""

    def __init__(self, config: JobConfig, services: Services, topic: str, offsets: Sequence[int]) -> None:
        self._topic = topic
        self._consumer: Any = make_consumer(
            config, services, "history", isolation_level="read_committed", auto_offset_reset="error",
            receive_message_max_bytes=max(batch_limit_bytes(config), 64 * 1024 * 1024), fetch_wait_max_ms=50,
        )  # fmt: skip
        self._consumer.assign([TopicPartition(topic, number, offset) for number, offset in enumerate(offsets)])

    def close(self) -> None:
        self._consumer.close()

    def poll(self, most: int, timeout_s: float) -> list[Any]:
        """Return at most `most` messages of the client, after at most `timeout_s`.

        Raises:
            DataLossError: the next record was deleted.
            ServiceUnavailableError: the broker refuses, or a record cannot be read.
        """
        messages = []
        for message in self._consumer.consume(most, timeout_s):
            if (error := message.error()) is None:
                messages.append(message)
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise DataLossError(f"topic {self._topic}, partition {message.partition()}: {error.str()}")
            elif not error.retriable() and error.code() not in (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT):
                raise ServiceUnavailableError(f"topic {self._topic} cannot be read: {error.str()}")
        return messages
