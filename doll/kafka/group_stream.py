"""A member of a consumer group that reads, writes and commits in transactions: each record counts once.

The group shares the partitions among its members. Offsets are committed with the records that were made of what was
read, in one transaction. If another member has taken over a partition in the meantime, Kafka refuses the transaction
(KIP-447).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec

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
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig

_SESSION_MS: Final = 10_000
_TRANSACTION_MS: Final = 15_000
_CALL_S: Final = 30.0
_LINGER_MS: Final = 20
_QUEUE_KBYTES: Final = 262_144
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
    value: bytes
    key: bytes | None = None
    on_offset: Callable[[int], None] | None = None  # called with the offset that the record gets


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
        self._producer = make_producer(
            config, services, transactional_id=f"doll.{config.job}.{name}.{member}",
            transaction_timeout_ms=_TRANSACTION_MS, message_timeout_ms=_TRANSACTION_MS,
            message_max_bytes=RECORD_LIMIT_BYTES, linger_ms=_LINGER_MS, compression_type="lz4",
            queue_buffering_max_kbytes=_QUEUE_KBYTES, queue_buffering_max_messages=1_000_000,
        )  # fmt: skip
        self._consumer: Any = make_consumer(
            config, services, name, group_instance_id=f"{name}-{member}", session_timeout_ms=_SESSION_MS,
            enable_partition_eof=True, isolation_level="read_committed", auto_offset_reset="error",
            receive_message_max_bytes=max(batch_limit_bytes(config), 2 * RECORD_LIMIT_BYTES),
            fetch_wait_max_ms=50,
        )  # fmt: skip
        self._admin = make_admin(config, services)
        with self._translated("begin a transaction"):
            self._producer.init_transactions(2 * _CALL_S)
        self._consumer.subscribe(list(topics), on_assign=self._assign, on_revoke=self._revoke, on_lost=self._lose)

    def close(self) -> None:
        """Leave the group. What was not committed is read again by others."""
        self._consumer.close()
        self._producer.purge()

    def poll(self, most: int, timeout_s: float) -> list[Run]:
        """Return at most `most` messages, after at most `timeout_s`. May call `on_assigned` and `on_revoked`, whose
        errors it passes on.

        Raises:
            ServiceUnavailableError: the broker refuses.
            FencedError: a later process has the number of this member.
            DataLossError: passed on by the caller's functions.
        """
        runs: list[Run] = []
        with self._translated("send records"):
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
        """Say if a message of the client is no record, but tells of an error or of the end of a partition.

        Raises:
            KafkaException: the broker refuses.
            DataLossError: the broker has deleted the next records.
        """
        if (error := message.error()) is None:
            return False
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise DataLossError(
                f"topic {place[0]}, partition {place[1]}: Kafka does not have the next records any more: retention "
                "deleted them before they were joined, or the topic was deleted and made again"
            )
        if error.code() == KafkaError._PARTITION_EOF:
            self.at_end[place] = message.offset()
        elif not error.retriable() and error.code() != KafkaError._ALL_BROKERS_DOWN:
            raise KafkaException(error)
        return True

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
        with self._translated("say what was committed"):
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
        with self._translated("accept a transaction"):
            self._producer.begin_transaction()
            try:
                self._write(outputs)
                self._producer.send_offsets_to_transaction(
                    [TopicPartition(*place, at.offset, metadata=at.metadata) for place, at in offsets.items()],
                    self._consumer.consumer_group_metadata(),
                    _CALL_S,
                )
                self._producer.commit_transaction(_CALL_S)
            except KafkaException as exc:
                error = error_of(exc)
                if not error.txn_requires_abort() and not error.retriable():
                    raise
                self._producer.purge()
                self._producer.abort_transaction(_CALL_S)
                raise AbandonedError(error.str()) from exc

    def _write(self, outputs: Iterable[Output]) -> None:
        produce = self._producer.produce
        for output in outputs:
            while True:
                try:
                    produce(
                        output.topic, output.value, output.key, output.partition,
                        None if output.on_offset is None else _report(output.on_offset),
                    )  # fmt: skip
                    break
                except BufferError:
                    self._producer.poll(0.1)

    def _assign(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        try:
            begin = self._on_assigned(self.committed([(p.topic, p.partition) for p in partitions]))
            self._next.update(begin)
            consumer.assign([TopicPartition(*place, offset) for place, offset in begin.items()])
        except BaseException as exc:  # the client would only log it
            self._failed = exc

    def _revoke(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        self._give_up(partitions, is_member=True)

    def _lose(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        self._give_up(partitions, is_member=False)

    def _give_up(self, partitions: list[TopicPartition], *, is_member: bool) -> None:
        places = [(p.topic, p.partition) for p in partitions]
        for place in places:
            self.at_end.pop(place, None)
            self._next.pop(place, None)
            self._asked.pop(place, None)
        try:
            self._on_revoked(places, is_member)
        except BaseException as exc:  # the client would only log it
            self._failed = exc

    def _translated(self, what: str) -> Any:
        return Translated(self._services.kafka, what)


def _report(on_offset: Callable[[int], None]) -> Callable[[Any, Any], None]:
    return lambda error, message: on_offset(message.offset()) if error is None else None


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
