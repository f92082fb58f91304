"""Send records to a job's topics, either in order with a check of each delivery, or in transactions (all or none)."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from confluent_kafka import KafkaError, KafkaException

from doll.errors import ServiceUnavailableError
from doll.kafka.clients import LINGER_MS, error_of, make_producer, reason_of
from doll.kafka.topic_plan import RECORD_LIMIT_BYTES
from doll.records.control import AnyRecord, encode
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

log = get_logger(__name__)

# A broker's limit (message.max.bytes, 1 MB by default) applies to compressed records. An update of 10,000 batches has 2
# MB before compression. If compression does not shorten a record, librdkafka sends it uncompressed.
CONTROL_COMPRESSION: Final = "lz4"
_FULL_QUEUE_POLL_S: Final = 0.1
_CLOSE_S: Final = 5.0
_TIMEOUT_S: Final = 30.0
_FLUSH_MARGIN_S: Final = 5.0


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


class TransactionalPublisher:
    """A producer with a transactional id. Use as a context manager.

    Of two producers with one id, the later one continues: it fences the earlier one and aborts its open transaction.
    `fenced` explains, in the error message, that a later producer has started.
    """

    def __init__(self, config: JobConfig, services: Services, name: str, *, fenced: str) -> None:
        self._address, self._name, self._fenced = services.kafka, name, fenced
        self._producer = make_producer(
            config,
            services,
            transactional_id=name,
            transaction_timeout_ms=int(_TIMEOUT_S * 1000),
            message_timeout_ms=int(_TIMEOUT_S * 1000),
            message_max_bytes=RECORD_LIMIT_BYTES,
        )

    def __enter__(self) -> Self:
        with self._translate_errors("start a transaction"):
            self._producer.init_transactions(2 * _TIMEOUT_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._producer.purge()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Within the context, collect all deliveries in one transaction: committed at its end, aborted on any error.
        Raise ServiceUnavailableError if Kafka does not commit it, or another publisher of this name has started."""
        with self._translate_errors("accept records"):
            self._producer.begin_transaction()
            try:
                yield
                self._producer.commit_transaction(2 * _TIMEOUT_S)
            except BaseException:
                with contextlib.suppress(KafkaException):
                    self._producer.purge()
                    self._producer.abort_transaction(_TIMEOUT_S)
                raise

    def deliver(self, records: Sequence[tuple[str, int, bytes]]) -> list[int]:
        """Send records (topic, partition, value), wait until Kafka has all of them, and return their offsets. Raise
        ServiceUnavailableError if it refuses one, or does not answer."""
        offsets: dict[int, int] = {}
        refusals: list[str] = []

        def on_delivery(number: int, error: Any, message: Any) -> None:
            if error is None:
                offsets[number] = int(message.offset())
            else:
                topic, partition, _ = records[number]
                refusals.append(f"Kafka does not accept a record on {topic}, partition {partition}: {error}")

        with self._translate_errors("accept records"):
            for number, (topic, partition, value) in enumerate(records):
                self._producer.produce(
                    topic, value, partition=partition, on_delivery=functools.partial(on_delivery, number)
                )
            self._producer.flush(_TIMEOUT_S + _FLUSH_MARGIN_S)
        if refusals or len(offsets) < len(records):
            raise ServiceUnavailableError(
                refusals[0] if refusals else f"Kafka at {self._address} does not answer: {len(records)} records sent"
            )
        return [offsets[number] for number in range(len(records))]

    @contextlib.contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except KafkaException as exc:
            error = error_of(exc)
            hint = (
                self._fenced
                if error.fatal()
                else f"expected transactions as {self._name}: may this user write with that transactional id?"
            )
            raise ServiceUnavailableError(f"Kafka at {self._address} does not {what}: {error.str()} ({hint})") from exc
