"""Readers and writers of topics whose transactions are all or nothing, so that each record counts once.

`GroupStream` is a member of a consumer group, which shares the partitions among its members. Offsets are committed with
the records that were made of what was read, in one transaction. If another member has taken over a partition in the
meantime, Kafka refuses the transaction (KIP-447). `TopicFeed` and `TransactionalWriter` copy a topic without a group:
the copier writes its position itself, in the transaction.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec

from doll.config import JobConfig
from doll.errors import DataLossError, FencedError, ServiceUnavailableError
from doll.kafka.clients import (
    error_of,
    list_offsets,
    make_admin,
    make_consumer,
    make_producer,
    translate_errors,
)
from doll.kafka.topic_plan import RECORD_LIMIT_BYTES, batch_limit_bytes
from doll.process.threads import in_thread
from doll.services import Services

_SESSION_MS: Final = 10_000
_TRANSACTION_S: Final = 15.0  # the broker aborts a transaction that is open for longer
_CALL_S: Final = 30.0
_MARGIN_S: Final = 1.0
_TRANSACTION: Final = "accept a transaction"
_IN_ITS_PLACE: Final = "another process has the number of this one, and goes on in its place"
_FENCED: Final = (
    KafkaError._FENCED, KafkaError.FENCED_INSTANCE_ID, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED,
)  # fmt: skip

Place = tuple[str, int]  # topic and partition


class AbandonedError(Exception):
    """A transaction was not committed: what was read since the last one must be read again."""


class Committed(NamedTuple):
    """The committed offset of a partition, with the text that was stored with it; -1: none was committed."""

    offset: int
    metadata: str


class Run(NamedTuple):
    """Messages of one partition that follow each other, with their offsets."""

    topic: str
    partition: int
    offsets: list[int]
    messages: list[Any]

    def values(self) -> list[bytes | None]:
        return list(map(Message.value, self.messages))

    def keys(self) -> list[bytes | None]:
        return list(map(Message.key, self.messages))

    def timestamps(self) -> list[tuple[int, int]]:
        """Return the kind and the milliseconds of each timestamp."""
        return list(map(Message.timestamp, self.messages))


class Output(msgspec.Struct, gc=False):
    """A record to write."""

    topic: str
    partition: int
    value: bytes | None
    key: bytes | None = None
    on_offset: Callable[[int], None] | None = None  # called with the offset that the record gets, before `commit` ends
    headers: list[tuple[str, bytes]] = []


class TransactionalWriter:
    """A writer. A later one with the same `name` ends the open transaction of an earlier one, and fences it; `fenced`
    is the message of this error.

    All methods raise FencedError if a later process has the name, and ServiceUnavailableError if the broker refuses.
    `write` and `commit` raise AbandonedError if the transaction cannot be committed: abort it, or make a new writer.
    """

    def __init__(
        self, config: JobConfig, services: Services, name: str, *, transaction_s: float = 60.0, call_s: float = 60.0,
        compression: str = "lz4", fenced: str = _IN_ITS_PLACE,
    ) -> None:  # fmt: skip
        self._call_s, timeout_ms = call_s, round(1000 * transaction_s)
        self._translated = partial(translated, services.kafka, _TRANSACTION, fenced)
        self._is_open = self._is_stuck = False
        self._producer = make_producer(
            config, services, transactional_id=name, transaction_timeout_ms=timeout_ms, message_timeout_ms=timeout_ms,
            message_max_bytes=RECORD_LIMIT_BYTES, linger_ms=20, compression_type=compression,
            queue_buffering_max_kbytes=262_144, queue_buffering_max_messages=1_000_000,
        )  # fmt: skip
        with self._translated():
            self._producer.init_transactions(2 * _CALL_S)

    def close(self) -> None:
        """Forget what is not committed."""
        self._producer.purge()

    def write(self, outputs: Iterable[Output]) -> None:
        """Write records in the open transaction, or in a new one."""
        produce = self._producer.produce
        with self._abandoned():
            for item in outputs:
                report = None if item.on_offset is None else _report(item.on_offset)
                headers = {"headers": item.headers} if item.headers else {}  # an empty list takes the client 1 us
                while True:
                    try:
                        produce(item.topic, item.value, item.key, item.partition, report, **headers)
                        break
                    except BufferError:
                        self._producer.poll(0.1)

    def deliver(self, outputs: Sequence[Output]) -> list[int]:
        """Write records, wait until Kafka has all of them, and return their offsets. Raise AbandonedError if it refuses
        one, or does not answer."""
        offsets: dict[int, int] = {}
        refusals: list[str] = []

        def note(number: int, error: Any, message: Any) -> None:
            if error is None:
                offsets[number] = int(message.offset())
            else:
                item = outputs[number]
                refusals.append(f"Kafka does not accept a record on {item.topic}, partition {item.partition}: {error}")

        with self._abandoned():
            for number, item in enumerate(outputs):
                self._producer.produce(item.topic, item.value, item.key, item.partition, partial(note, number))
            self._producer.flush(self._call_s)
        if refusals or len(offsets) < len(outputs):
            raise AbandonedError(refusals[0] if refusals else f"Kafka does not answer: {len(outputs)} records sent")
        return [offsets[number] for number in range(len(outputs))]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Within the context, collect what is written in one transaction: committed at its end, aborted on any error.
        Raise ServiceUnavailableError in place of AbandonedError."""
        try:
            yield
            self.commit()
        except BaseException as exc:
            with contextlib.suppress(FencedError, ServiceUnavailableError):
                self.abort()
            if isinstance(exc, AbandonedError):
                raise ServiceUnavailableError(str(exc)) from exc
            raise

    def commit(self, offsets: Sequence[TopicPartition] = (), member: Any = None) -> None:
        """Commit what was written since the last call, and these offsets of the group of `member`."""
        with self._abandoned():
            if offsets:
                self._send_offsets(list(offsets), member)
            self._producer.commit_transaction(self._call_s)
            self._is_open = False

    def _send_offsets(self, offsets: list[TopicPartition], member: Any) -> None:
        """Add offsets to the transaction.

        After its group's broker was away, librdkafka may wait without a limit (its issue 5456). The call then stays in
        its thread, and the next writer with the name aborts the transaction.
        """
        send = partial(self._producer.send_offsets_to_transaction, offsets, member, self._call_s)
        try:
            in_thread(send, "send-offsets").result(self._call_s + _MARGIN_S)
        except TimeoutError as exc:
            self._is_stuck = True
            raise AbandonedError(f"Kafka does not answer for {self._call_s:g} s: offsets are not committed") from exc

    def abort(self) -> None:
        """Abort the open transaction, or leave this to the next writer, if Kafka does not answer."""
        if self._is_stuck:
            return
        with self._translated():
            self._producer.purge()
            self._producer.abort_transaction(self._call_s)
            self._is_open = False

    @contextlib.contextmanager
    def _abandoned(self) -> Iterator[None]:
        try:
            if not self._is_open:
                self._producer.begin_transaction()
                self._is_open = True
            yield
        except KafkaException as exc:
            with self._translated():
                if not error_of(exc).txn_requires_abort() and not error_of(exc).retriable():
                    raise
            raise AbandonedError(error_of(exc).str()) from exc


class TopicFeed:
    """A reader of committed records of the partitions 0 to `len(offsets)` - 1, from these offsets on."""

    def __init__(self, config: JobConfig, services: Services, topic: str, offsets: Sequence[int]) -> None:
        self._address, self._topic = services.kafka, topic
        self._consumer: Any = _consumer(config, services, "history")
        self._consumer.assign([TopicPartition(topic, number, offset) for number, offset in enumerate(offsets)])

    def close(self) -> None:
        self._consumer.close()

    def poll(self, most: int, timeout_s: float) -> list[Any]:
        """Return at most `most` messages of the client, after at most `timeout_s`. Raise DataLossError if the next
        record was deleted, and ServiceUnavailableError if the broker refuses."""
        with translated(self._address, f"let topic {self._topic} be read"):
            return [message for message in self._consumer.consume(most, timeout_s) if not is_error(message)]


class GroupStream:
    """A member of the group `name` of a job.

    Args:
        member: number of the member. A later process with this number fences the earlier one.
        on_assigned: called, within `poll`, with the committed offsets of new partitions; returns where to begin.
        on_revoked: called, within `poll` or `close`, with partitions that others read next. It may still commit what
            was read of them if the second argument is True. It is False if the group has excluded this member.

    Attributes:
        at_end: offsets of the ends of partitions that have been reached, and after which nothing has come.
    """

    def __init__(
        self,
        config: JobConfig,
        services: Services,
        name: str,
        member: int,
        topics: Sequence[str],
        *,
        on_assigned: Callable[[dict[Place, Committed]], dict[Place, int]],
        on_revoked: Callable[[list[Place], bool], None],
    ) -> None:
        self._services = services
        self._on_assigned, self._on_revoked = on_assigned, on_revoked
        self.at_end: dict[Place, int] = {}
        self._next: dict[Place, int] = {}  # next offset of each partition of this member
        self._asked: dict[Place, tuple[int, int]] = {}  # a time, and the end that a partition had
        self._failed: BaseException | None = None
        self._writer = TransactionalWriter(
            config,
            services,
            f"doll.{config.job}.{name}.{member}",
            transaction_s=_TRANSACTION_S,
            call_s=_TRANSACTION_S,
        )
        self._consumer: Any = _consumer(
            config, services, name, group_instance_id=f"{name}-{member}", session_timeout_ms=_SESSION_MS,
            enable_partition_eof=True,
        )  # fmt: skip
        self._admin = make_admin(config, services)
        self._consumer.subscribe(
            list(topics), on_assign=self._assign,
            on_revoke=partial(self._give_up, is_member=True), on_lost=partial(self._give_up, is_member=False),
        )  # fmt: skip

    def close(self) -> None:
        """Leave the group. What was not committed is read again by others."""
        self._consumer.close()
        self._writer.close()

    def poll(self, most: int, timeout_s: float) -> list[Run]:
        """Return at most `most` messages, after at most `timeout_s`. May call `on_assigned` and `on_revoked`, whose
        errors it passes on.

        Raises:
            ServiceUnavailableError: the broker refuses.
            FencedError: a later process has the number of this member.
            DataLossError: passed on by the caller's functions.
        """
        runs: list[Run] = []
        with translated(self._services.kafka, "send records"):
            polled = self._consumer.consume(most, timeout_s)
            places = zip(map(Message.topic, polled), map(Message.partition, polled), strict=True)
            end = 0
            for place, group in groupby(places):
                begin, end = end, end + len(list(group))
                messages = polled[begin:end]
                if any(map(Message.error, messages)):
                    messages = [message for message in messages if not self._is_note(place, message)]
                # A partition may have moved during this call: what was fetched of it before is read again.
                next_offset = self._next.get(place, -1)
                offsets = list(map(Message.offset, messages))
                if offsets and offsets[0] < next_offset:
                    messages = [message for message in messages if message.offset() >= next_offset]
                    offsets = list(map(Message.offset, messages))
                if messages:
                    self._next[place] = offsets[-1] + 1
                    if offsets[-1] >= self.at_end.get(place, math.inf):
                        del self.at_end[place]
                    runs.append(Run(*place, offsets, messages))
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        return runs

    def _is_note(self, place: Place, message: Any) -> bool:
        """Return whether a message is no record, but an error, or the end of a partition; errors as in `is_error`."""
        if (error := message.error()) is not None and error.code() == KafkaError._PARTITION_EOF:
            self.at_end[place] = message.offset()
            return True
        return is_error(message)

    def read_until(self, topics: Collection[str], now_ms: int) -> dict[Place, int]:
        """Return, by partition, a time: all records have been read that Kafka had then, those of transactions that were
        open included. It is `now_ms`, or, if more has been written since, the time of an earlier call."""
        wanted = [TopicPartition(*place) for place in self._next if place[0] in topics]
        if not wanted:
            return {}
        try:
            ends = list_offsets(self._admin, wanted, OffsetSpec.latest())
        except (KafkaException, TimeoutError):
            return {}
        times_ms = {}
        for place, end in ends.items():
            read = max(self._next.get(place, 0), self.at_end.get(place, 0))
            asked_ms, asked_end = self._asked.get(place, (0, 0))
            if read >= asked_end:
                times_ms[place] = now_ms if read >= end else asked_ms
                self._asked[place] = now_ms, end
        return times_ms

    def committed(self, places: Sequence[Place]) -> dict[Place, Committed]:
        """Return the committed offsets of some partitions."""
        if not places:
            return {}
        with translated(self._services.kafka, "say what was committed"):
            known = self._consumer.committed([TopicPartition(*place) for place in places], timeout=2 * _CALL_S)
        return {(p.topic, p.partition): Committed(p.offset, p.metadata or "") for p in known}

    def ends(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return the offsets after the last records of some partitions, open transactions included."""
        with translate_errors(self._services.kafka, f"say where {topic} ends"):
            ends = list_offsets(self._admin, [TopicPartition(topic, item) for item in partitions], OffsetSpec.latest())
        return {partition: offset for (_, partition), offset in ends.items()}

    def commit(self, outputs: Iterable[Output], offsets: dict[Place, Committed]) -> None:
        """Write the records and commit the offsets, all or nothing.

        Raises:
            AbandonedError: nothing was written.
            ServiceUnavailableError, FencedError: see `poll`.
        """
        committed = [TopicPartition(*place, at.offset, metadata=at.metadata) for place, at in offsets.items()]
        try:
            self._writer.write(outputs)
            self._writer.commit(committed, self._consumer.consumer_group_metadata())
        except AbandonedError:
            self._writer.abort()
            raise

    def _assign(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        try:
            begin = self._on_assigned(self.committed([(p.topic, p.partition) for p in partitions]))
            self._next.update(begin)
            consumer.assign([TopicPartition(*place, offset) for place, offset in begin.items()])
        except BaseException as exc:  # the client would only log it
            self._failed = exc

    def _give_up(self, consumer: Any, partitions: list[TopicPartition], *, is_member: bool) -> None:
        places = [(p.topic, p.partition) for p in partitions]
        for place in places:
            self.at_end.pop(place, None)
            self._next.pop(place, None)
            self._asked.pop(place, None)
        try:
            self._on_revoked(places, is_member)
        except BaseException as exc:  # the client would only log it
            self._failed = exc


def _consumer(config: JobConfig, services: Services, purpose: str, **more: Any) -> Any:
    return make_consumer(
        config, services, purpose, isolation_level="read_committed", auto_offset_reset="error", fetch_wait_max_ms=50,
        receive_message_max_bytes=max(batch_limit_bytes(config), 2 * RECORD_LIMIT_BYTES), **more,
    )  # fmt: skip


def is_error(message: Any) -> bool:
    """Return whether a message of the client is an error that passes.

    Raises:
        KafkaException: the broker refuses.
        DataLossError: the broker has deleted the next records.
    """
    if (error := message.error()) is None:
        return False
    if error.code() == KafkaError._AUTO_OFFSET_RESET:
        raise DataLossError(
            f"topic {message.topic()}, partition {message.partition()}: Kafka does not have the next records any more: "
            "retention deleted them before they were read, or the topic was deleted and made again"
        )
    if not error.retriable() and error.code() not in (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT):
        raise KafkaException(error)
    return True


def _report(on_offset: Callable[[int], None]) -> Callable[[Any, Any], None]:
    return lambda error, message: on_offset(message.offset()) if error is None else None


@contextlib.contextmanager
def translated(address: str, what: str, fenced: str = _IN_ITS_PLACE) -> Iterator[None]:
    """Within the context, raise FencedError or ServiceUnavailableError instead of KafkaException."""
    try:
        with translate_errors(address, what, "doll doctor says what is missing"):
            yield
    except ServiceUnavailableError as exc:
        if isinstance(cause := exc.__cause__, KafkaException) and error_of(cause).code() in _FENCED:
            raise FencedError(fenced) from cause
        raise
