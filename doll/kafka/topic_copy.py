"""The two ends of a copy of a topic: a reader that loses no record, and a writer whose transactions are all or nothing.

The copier writes its position itself, in the transaction. So it needs no group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from doll.config import JobConfig
from doll.errors import DataLossError, ServiceUnavailableError
from doll.kafka.clients import error_of, make_consumer, make_producer
from doll.kafka.group_stream import AbandonedError, Translated
from doll.kafka.topic_plan import RECORD_LIMIT_BYTES, batch_limit_bytes
from doll.services import Services

_CALL_S: Final = 60.0
_TRANSACTION_MS: Final = 60_000


class TransactionalWriter:
    """A writer. A later one with the same `name` ends the open transaction of an earlier one, and fences it.

    All methods raise AbandonedError if the transaction cannot be committed: make a new writer and begin again. They
    raise FencedError if a later process has the name, and ServiceUnavailableError if the broker refuses.
    """

    def __init__(self, config: JobConfig, services: Services, name: str) -> None:
        self._translated = Translated(services.kafka, "accept a transaction")
        self._is_open = False
        self._producer = make_producer(
            config, services, transactional_id=name, transaction_timeout_ms=_TRANSACTION_MS,
            message_timeout_ms=_TRANSACTION_MS, message_max_bytes=RECORD_LIMIT_BYTES, linger_ms=20,
            compression_type="lz4", queue_buffering_max_kbytes=262_144, queue_buffering_max_messages=1_000_000,
        )  # fmt: skip
        with self._translated:
            self._producer.init_transactions(_CALL_S)

    def close(self) -> None:
        """Forget what is not committed."""
        self._producer.purge()

    def write(
        self, topic: str, partition: int, value: bytes | None, key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (), on_offset: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Write a record in the open transaction, or in a new one. `on_offset` gets its offset before `commit` ends."""
        report = None if on_offset is None else lambda error, message: error or on_offset(message.offset())
        try:
            if not self._is_open:
                self._producer.begin_transaction()
                self._is_open = True
            while True:
                try:
                    self._producer.produce(topic, value, key, partition, on_delivery=report, headers=list(headers))
                    return
                except BufferError:
                    self._producer.poll(0.1)
        except KafkaException as exc:
            self._refuse(exc)

    def commit(self) -> None:
        """Commit what was written since the last call."""
        try:
            self._producer.commit_transaction(_CALL_S)
            self._is_open = False
        except KafkaException as exc:
            self._refuse(exc)

    def _refuse(self, exc: KafkaException) -> NoReturn:
        with self._translated:
            if not error_of(exc).txn_requires_abort() and not error_of(exc).retriable():
                raise exc
        raise AbandonedError(error_of(exc).str()) from exc


class TopicFeed:
    """A reader of committed records of the partitions 0 to `len(offsets)` - 1, from these offsets on."""

    def __init__(self, config: JobConfig, services: Services, topic: str, offsets: Sequence[int]) -> None:
        self._consumer: Any = make_consumer(
            config, services, "history", isolation_level="read_committed", auto_offset_reset="error",
            receive_message_max_bytes=max(batch_limit_bytes(config), 2 * RECORD_LIMIT_BYTES), fetch_wait_max_ms=50,
        )  # fmt: skip
        self._consumer.assign([TopicPartition(topic, number, offset) for number, offset in enumerate(offsets)])

    def close(self) -> None:
        self._consumer.close()

    def poll(self, most: int, timeout_s: float) -> list[Any]:
        """Return at most `most` messages of the client, after at most `timeout_s`. Raise DataLossError if the next
        record was deleted, and ServiceUnavailableError if the broker refuses."""
        messages = self._consumer.consume(most, timeout_s)
        for message in messages:
            if (error := message.error()) is None:
                continue
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise DataLossError(f"topic {message.topic()}, partition {message.partition()}: {error.str()}")
            if not error.retriable() and error.code() not in (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT):
                raise ServiceUnavailableError(f"topic {message.topic()} cannot be read: {error.str()}")
        return [message for message in messages if message.error() is None]
