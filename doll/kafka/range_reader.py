"""Read given ranges of offsets of a job's topics, for audits, dead letters and lookups by offset."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from doll.config import JobConfig
from doll.errors import RecordError, ServiceUnavailableError
from doll.kafka.clients import make_consumer, translate_errors
from doll.kafka.reader import (
    Message,
    Partition,
    as_message,
    bounds_of_partitions,
    count_partitions,
    end_of_unreadable,
    partition_bounds,
    unreadable,
)
from doll.kafka.topic_plan import RECORD_LIMIT_BYTES, batch_limit_bytes
from doll.records.control import decode
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

_STALL_S: Final = 30.0
_POLL_S: Final = 0.1
_MESSAGES_AT_ONCE: Final = 1000
_AT_ONCE: Final = 128  # partitions of which ranges are read at once
_SPARSE_AT_ONCE: Final = 64  # those after the end of a range are discarded
# A fetch returns one batch of records at least, whatever the limits are.
_SPARSE: Final = {"fetch_message_max_bytes": 16_384, "queued_min_messages": 1, "fetch_queue_backoff_ms": 0}


class RangeReader:
    """A consumer that reads given ranges of offsets. It joins no group and commits nothing.

    Calls raise ServiceUnavailableError if the broker refuses, or sends nothing for `stall_timeout_s`.
    """

    def __init__(self, config: JobConfig, services: Services, stall_timeout_s: float = _STALL_S) -> None:
        self.problems: list[str] = []  # values that are not records of their topic, one sentence each
        self._services = services
        self._stall_s = stall_timeout_s
        self._make_consumer = partial(
            make_consumer, config, services, "read", enable_partition_eof=True,
            receive_message_max_bytes=max(batch_limit_bytes(config), 4 * RECORD_LIMIT_BYTES),
        )  # fmt: skip
        self._consumer: Any = self._make_consumer()
        self._sparse_consumer: Any = None

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._consumer.close()
        if self._sparse_consumer is not None:
            self._sparse_consumer.close()

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the first offset that is kept, and the offset after the last record."""
        return partition_bounds(self._consumer, self._services.kafka, topic, partition, self._stall_s)

    def num_partitions(self, topic: str) -> int:
        """Return the present number of partitions of the topic; 0 if it does not exist."""
        with translate_errors(self._services.kafka, f"say how many partitions {topic} has"):
            return count_partitions(self._consumer, topic, self._stall_s)

    def bounds_of_partitions(self, topic: str, partitions: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return the `bounds` of many partitions, with few requests."""
        return bounds_of_partitions(self._consumer, self._services.kafka, topic, partitions, self._stall_s)

    def records(self, topic: str, kinds: tuple[type, ...], bounds: tuple[int, int] | None = None) -> Iterator[Any]:
        """Yield all control records of a topic with one partition, from its beginning to its end, or in `bounds`."""
        for offset, value in self.read(topic, 0, *(bounds or self.bounds(topic, 0))):
            try:
                record = decode(value)
            except RecordError as exc:
                self.problems.append(f"{topic}, offset {offset}: {exc}")
                continue
            if isinstance(record, kinds):
                yield record
            else:
                self.problems.append(f"{topic}, offset {offset}: a {type(record).__name__} does not belong there")

    def read(self, topic: str, partition: int, lo: int, hi: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield offset and value of each record in [lo, hi) that the log holds, in order."""
        for message in self.messages(topic, partition, lo, hi):
            yield message.offset, message.value

    def messages(self, topic: str, partition: int, lo: int, hi: int) -> Iterator[Message]:
        """Yield the records in [lo, hi) that the log holds, in order, with their headers."""
        place = Partition(topic, partition)
        for message in self.client_messages(topic, partition, lo, hi):
            yield as_message(place, message)

    def client_messages(self, topic: str, partition: int, lo: int, hi: int) -> Iterator[Any]:
        """Yield the records as `messages`, but as the objects of the client library."""
        place = Partition(topic, partition)
        left = deque([(lo, hi)] if lo < hi else ())
        while left:
            unreadable_in: dict[int, Any] = {}
            yield from self._consume(topic, {partition: left}, unreadable_in, self._consumer, _MESSAGES_AT_ONCE)
            if partition not in unreadable_in:
                return
            # The search for the end of the batch replaces the assignment.
            first = unreadable_in[partition]
            until = end_of_unreadable(self._consumer, place, first.offset())
            reason = first.error().str()
            log.warning("batch_unreadable", topic=str(place), offsets=[first.offset(), until - 1], reason=reason)
            self.problems.append(f"{place}, offsets {first.offset()} to {until - 1} cannot be read: {reason}")
            left = deque([(until, hi)] if until < hi else ())

    def read_together(
        self, topic: str, ranges: Iterable[tuple[int, int, int]], *, sparse: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Yield partition and offset of each record that the log holds in these ranges, in order within a partition.

        A range is a partition, its first offset, and the offset after its last one. Many partitions are read at once,
        because reading each of them alone takes the time of a few requests. `sparse`: the ranges are short and far
        apart. They are read by a consumer that prefetches almost nothing, because a seek discards what was prefetched.
        """
        consumer, limit = self._consumer, _MESSAGES_AT_ONCE
        if sparse:
            if self._sparse_consumer is None:
                self._sparse_consumer = self._make_consumer(**_SPARSE)
            consumer, limit = self._sparse_consumer, _SPARSE_AT_ONCE
        by_partition: dict[int, deque[tuple[int, int]]] = {}
        for partition, lo, hi in sorted(ranges):
            if lo < hi:
                by_partition.setdefault(partition, deque()).append((lo, hi))
        numbers = list(by_partition)
        for at in range(0, len(numbers), _AT_ONCE):
            unreadable_in: dict[int, Any] = {}
            left = {number: by_partition[number] for number in numbers[at : at + _AT_ONCE]}
            for message in self._consume(topic, left, unreadable_in, consumer, limit):
                yield message.partition(), message.offset()
            for number in unreadable_in:
                for lo, hi in by_partition[number]:
                    for offset, _ in self.read(topic, number, lo, hi):
                        yield number, offset

    def _consume(
        self,
        topic: str,
        ranges: Mapping[int, deque[tuple[int, int]]],
        unreadable_in: dict[int, Any],
        consumer: Any,
        limit: int,
    ) -> Iterator[Any]:
        """Yield the client's messages in `ranges`, by partition; each part that has been read is removed from `ranges`.
        `limit`: maximum number of messages to take from the library at once.

        At a batch that cannot be read, its partition ends: `unreadable_in` gets the error message, and the part that
        was not read stays in the ranges.
        """
        left = dict(ranges)
        last_message_s = time.monotonic()
        with translate_errors(self._services.kafka, f"let {topic} be read", "correct its permissions, or the address"):
            consumer.assign([TopicPartition(topic, number, own[0][0]) for number, own in left.items()])
            try:
                while left:
                    # `consume` would wait until it has all messages, or for the whole time.
                    first = consumer.poll(_POLL_S)
                    messages = [] if first is None else [first, *consumer.consume(limit - 1, 0)]
                    for message in messages:
                        number, error = message.partition(), message.error()
                        is_end = error is not None and error.code() == KafkaError._PARTITION_EOF
                        is_unreadable = error is not None and unreadable(error) and message.offset() is not None
                        if error is not None and not (is_end or is_unreadable):
                            raise KafkaException(error)
                        if (own := left.get(number)) is None:
                            continue
                        if error is None:
                            offset = int(message.offset())
                            begin = own[0][0]
                            while own and offset >= own[0][1]:
                                own.popleft()
                            if own and offset >= own[0][0]:
                                yield message
                                own[0] = offset + 1, own[0][1]
                                if own[0][0] == own[0][1]:
                                    own.popleft()
                            if own and own[0][0] > max(offset + 1, begin):
                                consumer.seek(TopicPartition(topic, number, own[0][0]))
                        elif is_end or message.offset() >= own[-1][1]:
                            own.clear()
                        else:
                            unreadable_in[number] = message
                        if not own or error is not None:
                            del left[number]
                            consumer.incremental_unassign([TopicPartition(topic, number)])
                    if messages:
                        last_message_s = time.monotonic()
                    elif time.monotonic() - last_message_s > self._stall_s:
                        number, own = next(iter(left.items()))
                        others = f" and {len(left) - 1} other partitions" if len(left) > 1 else ""
                        raise ServiceUnavailableError(
                            f"Kafka at {self._services.kafka} has sent nothing of {topic}, partition {number}{others}, "
                            f"for {self._stall_s:g} s, but holds records from offset {own[0][0]} to {own[-1][1] - 1}: "
                            "is the broker running?"
                        )
            finally:
                consumer.unassign()
