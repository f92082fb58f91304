"""Send records to a job's topics in order, with a check of each delivery."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from doll.config import JobConfig
from doll.kafka.clients import LINGER_MS, error_of, make_producer, reason_of
from doll.kafka.topic_plan import RECORD_LIMIT_BYTES
from doll.records.control import AnyRecord, encode
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

# A broker's limit (message.max.bytes, 1 MB by default) applies to compressed records. An update of 10,000 batches has 2
# MB before compression. If compression does not shorten a record, librdkafka sends it uncompressed.
CONTROL_COMPRESSION: Final = "lz4"
_FULL_QUEUE_POLL_S: Final = 0.1
_CLOSE_S: Final = 5.0


class Delivery(NamedTuple):
    """The result for a record: it is stored at `offset`, or refused (`refusal` is the reason, offset is -1).

    `time_ms`: when it was stored, by the broker's clock, if the topic has LogAppendTime; else as the client said.
    """

    topic: str
    offset: int
    refusal: str = ""
    time_ms: int = -1


class ClientError(NamedTuple):
    """An error of the client that is not about one record."""

    reason: str
    is_fatal: bool  # the producer cannot go on
    is_unreachable: bool  # no broker answers; sent records wait in the queue


class Publisher:
    """A producer that retries until Kafka accepts or refuses a record: no record is lost while Kafka is unreachable.

    Safe to share between threads. Call `poll` regularly: it reports deliveries. If Kafka refuses a record permanently
    (not allowed, too long), the record's `on_delivery` is called; a record without it is logged, once per topic.
    `on_error` gets errors of the client; by default they are logged.
    """

    def __init__(
        self,
        config: JobConfig,
        services: Services,
        *,
        on_error: Callable[[ClientError], None] | None = None,
        **settings: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "linger_ms": LINGER_MS,
            "message_timeout_ms": 0,
            "message_max_bytes": RECORD_LIMIT_BYTES,
            "compression_type": CONTROL_COMPRESSION,
        }
        if on_error is not None:
            defaults["error_cb"] = functools.partial(_report_error, on_error)
        self.address = services.kafka
        self._kafka = config.kafka
        self.refusals: dict[str, str] = {}  # by topic, why Kafka refused the first refused record
        self._producer = make_producer(config, services, **{**defaults, **settings})

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of records that are neither delivered nor refused, and of reports that wait for `poll`."""
        return len(self._producer)

    def send(
        self,
        topic: str,
        record: AnyRecord | bytes,
        *,
        partition: int = 0,
        key: bytes | None = None,
        on_delivery: Callable[[Delivery], None] | None = None,
    ) -> None:
        """Queue a record. If the queue is full (Kafka is unreachable), wait until there is room. A later `poll`, `send`
        or `flush` calls `on_delivery`, whose errors it passes on."""
        value = record if isinstance(record, bytes) else encode(record)
        while not self.try_send(topic, value, partition=partition, key=key, on_delivery=on_delivery):
            self.poll(_FULL_QUEUE_POLL_S)

    def try_send(
        self,
        topic: str,
        record: AnyRecord | bytes,
        *,
        partition: int = 0,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        on_delivery: Callable[[Delivery], None] | None = None,
    ) -> bool:
        """Queue a record if there is room. Return False if the queue is full; the record is then not sent."""
        value = record if isinstance(record, bytes) else encode(record)
        try:
            self._producer.produce(
                topic,
                value=value,
                key=key,
                partition=partition,
                headers=list(headers) or None,
                on_delivery=functools.partial(self._on_delivery, on_delivery),
            )
        except BufferError:
            return False
        except KafkaException as exc:  # refused before it was queued: too long, or after a fatal error
            self._refuse(on_delivery, Delivery(topic, -1, error_of(exc).str()))
        self._producer.poll(0)
        return True

    def poll(self, timeout_s: float = 0.0) -> None:
        """Report deliveries, and wait up to `timeout_s` for the first one."""
        self._producer.poll(timeout_s)

    def flush(self, timeout_s: float) -> int:
        """Wait at most `timeout_s` until all records are delivered or refused, and return how many are neither."""
        return int(self._producer.flush(timeout_s))

    def discard(self) -> None:
        """Refuse all records that are queued or being sent; each is reported with a refusal."""
        self._producer.purge()
        self._producer.flush(1.0)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Wait at most `timeout_s` for deliveries. The remaining records are lost, which is logged."""
        deadline_s = time.monotonic() + timeout_s
        left = len(self._producer)
        while left and time.monotonic() < deadline_s:
            left = self.flush(max(deadline_s - time.monotonic(), 0.0))
        if left:
            log.warning("records_not_delivered", address=self.address, records=left)

    def _on_delivery(self, on_delivery: Callable[[Delivery], None] | None, error: Any, message: Any) -> None:
        if error is None:
            if on_delivery is not None:
                on_delivery(Delivery(message.topic(), int(message.offset()), time_ms=message.timestamp()[1]))
        else:
            reason = reason_of(error, self._kafka, "Write", message.topic())
            self._refuse(on_delivery, Delivery(message.topic(), -1, reason))

    def _refuse(self, on_delivery: Callable[[Delivery], None] | None, refused: Delivery) -> None:
        is_first = refused.topic not in self.refusals
        self.refusals.setdefault(refused.topic, refused.refusal)
        if on_delivery is not None:
            on_delivery(refused)
        elif is_first:
            log.error("kafka_refused", topic=refused.topic, reason=refused.refusal)


def _report_error(on_error: Callable[[ClientError], None], error: KafkaError) -> None:
    is_fatal = error.fatal() or error.code() == KafkaError._FATAL
    on_error(ClientError(error.str(), is_fatal, error.code() == KafkaError._ALL_BROKERS_DOWN))
