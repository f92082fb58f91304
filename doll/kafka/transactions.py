"""Sending in transactions: all records of one can be read, or none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from confluent_kafka import KafkaException

from doll.errors import ServiceUnavailableError
from doll.kafka.clients import make_producer
from doll.kafka.errors import error_of
from doll.kafka.topic_plan import RECORD_LIMIT_BYTES

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

_TIMEOUT_S: Final = 30.0
_FLUSH_MARGIN_S: Final = 5.0


class TransactionalPublisher:
    """A producer under a transactional id. Use as a context manager.

    Of two with one id the later one goes on: it fences the earlier one and aborts what that one had left open.

    Args:
        name: the transactional id.
        fenced: what it means that a later one has begun, for the message.
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
        """Within the context, what is delivered is of one transaction: committed at its end, aborted on any error.

        Raises:
            ServiceUnavailableError: Kafka does not commit it, or another publisher of this name has begun.
        """
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
        """Send records (topic, partition, value); their offsets, as soon as Kafka has all of them.

        Raises:
            ServiceUnavailableError: Kafka refuses one of them, or does not answer.
        """
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
