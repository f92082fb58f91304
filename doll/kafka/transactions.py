"""Records that are written in transactions: all of a transaction, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from confluent_kafka import KafkaError, KafkaException

from doll.errors import FencedError, ServiceUnavailableError
from doll.kafka.clients import error_of, make_producer
from doll.kafka.topic_plan import RECORD_LIMIT_BYTES
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig

CALL_S: Final = 30.0
_LINGER_MS: Final = 20
_QUEUE_KBYTES: Final = 262_144
_FENCED: Final = (
    KafkaError._FENCED, KafkaError.FENCED_INSTANCE_ID, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED,
)  # fmt: skip


class AbandonedError(Exception):
    """A transaction was not committed: what was read since the last one must be read again."""


class Output(NamedTuple):
    """A record to write."""

    topic: str
    partition: int
    value: bytes | None
    key: bytes | None = None
    on_offset: Callable[[int], None] | None = None  # called with the offset that the record gets
    headers: list[tuple[str, bytes]] | None = None


class TransactionalWriter:
    """A writer. A later process with the same `name` fences an earlier one, and ends its open transaction.

    Raises, as all of its methods do:
        ServiceUnavailableError: the broker refuses.
        FencedError: a later process has this name.
    """

    def __init__(self, config: JobConfig, services: Services, name: str, timeout_ms: int = 15_000) -> None:
        self._address = services.kafka
        self._is_open = False
        self._producer = make_producer(
            config, services, transactional_id=name,
            transaction_timeout_ms=timeout_ms, message_timeout_ms=timeout_ms,
            message_max_bytes=RECORD_LIMIT_BYTES, linger_ms=_LINGER_MS, compression_type="lz4",
            queue_buffering_max_kbytes=_QUEUE_KBYTES, queue_buffering_max_messages=1_000_000,
        )  # fmt: skip
        with Translated(self._address, "begin a transaction"):
            self._producer.init_transactions(2 * CALL_S)

    def close(self) -> None:
        """Forget what is not committed."""
        self._producer.purge()

    def write(self, output: Output) -> None:
        """Write a record in the open transaction, or in a new one. Raise AbandonedError if it was aborted."""
        note, more = output.on_offset, {} if output.headers is None else {"headers": output.headers}
        if note is not None:
            more["on_delivery"] = lambda error, message: note(message.offset()) if error is None else None
        while True:
            try:
                self._begin()
                self._producer.produce(output.topic, output.value, key=output.key, partition=output.partition, **more)
                return
            except BufferError:
                self._producer.poll(0.1)
            except KafkaException as exc:
                self._abandon(exc)

    def commit(self, also: Callable[[Any], None] = lambda producer: None) -> None:
        """Commit the open transaction. `also` adds to it by the client. Raise AbandonedError if it was aborted."""
        try:
            self._begin()
            also(self._producer)
            self._producer.commit_transaction(CALL_S)
            self._is_open = False
        except KafkaException as exc:
            self._abandon(exc)

    def _begin(self) -> None:
        if not self._is_open:
            self._producer.begin_transaction()
            self._is_open = True

    def _abandon(self, exc: KafkaException) -> NoReturn:
        error = error_of(exc)
        with Translated(self._address, "accept a transaction"):
            if not error.txn_requires_abort() and not error.retriable():
                raise exc
            self._producer.purge()
            self._producer.abort_transaction(CALL_S)
        self._is_open = False
        raise AbandonedError(error.str()) from exc


class Translated:
    """A context that raises FencedError or ServiceUnavailableError instead of KafkaException."""

    def __init__(self, address: str, what: str) -> None:
        self._address, self._what = address, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        if not isinstance(exc, KafkaException):
            return
        error = error_of(exc)
        if error.code() in _FENCED:
            raise FencedError("another process has the number of this one, and goes on in its place") from exc
        hint = "doll doctor says what is missing"
        raise ServiceUnavailableError(
            f"Kafka at {self._address} does not {self._what} ({error.str()}): {hint}"
        ) from exc
