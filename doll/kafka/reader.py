"""Read partitions from explicit offsets, as messages or as records: the base of all readers of a job's topics.

There are no consumer groups and no committed offsets: readers do not disturb each other, and each has its own position.
`Tail` and `JobRecords` follow a job's topics for observers: evaluator, progress, status, provisioner.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar, Final, NamedTuple, Self

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from doll.config import JobConfig
from doll.errors import RecordError, ServiceUnavailableError
from doll.kafka.clients import make_consumer, reason_of, retry_while_leaderless, translate_errors
from doll.records.control import AnyRecord, Finished, decode
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

LOOKUP_S: Final = 10.0
_BOUNDS_TIMEOUT_S: Final = 15.0
# The broker answers a fetch as soon as there is a record. An idle reader sends the next fetch after this time.
_FETCH_WAIT_MS: Final = 5000

Start = Callable[["Partition", int, int], int]
# The library's errors about a batch of records: checksum, compression, an unknown codec, its format.
UNREADABLE: Final = frozenset(
    {KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError._NOT_IMPLEMENTED, KafkaError.INVALID_MSG}
)
_POLL_S: Final = 0.1
_PROBE_S: Final = 30.0
_FINISH_POLL_S: Final = 0.5
_TO_END_S: Final = 10.0
_MAX_REASON_CHARS: Final = 200
_ask_for_headers: Final = methodcaller("headers")
RESUME_GRACE_S: Final = 30.0
"""Seconds, in addition to the lease of a standby, without a server after the end of a job until the end is considered
final: the job may have been resumed, and all its roles may have been started together."""


def partition_bounds(
    consumer: Consumer, address: str, topic: str, partition: int, timeout_s: float = _BOUNDS_TIMEOUT_S
) -> tuple[int, int]:
    """Return (low, high): the first offset that a partition still holds, and the offset of its next record. Raise
    ServiceUnavailableError if Kafka does not answer, or the topic does not exist."""
    return bounds_of_partitions(consumer, address, topic, [partition], timeout_s)[partition]


def bounds_of_partitions(
    consumer: Consumer, address: str, topic: str, partitions: Sequence[int], timeout_s: float = _BOUNDS_TIMEOUT_S
) -> dict[int, tuple[int, int]]:
    """Return `partition_bounds` of each of these partitions, with two requests to each broker."""

    def fetch() -> dict[int, tuple[int, int]]:
        low, high = (_offsets_at(consumer, topic, partitions, at, timeout_s) for at in (OFFSET_BEGINNING, OFFSET_END))
        return {number: (low[number], high[number]) for number in partitions}

    if not partitions:
        return {}
    which = f"{topic}/{partitions[0]} begins and ends"
    if len(partitions) > 1:
        which = f"the {len(partitions)} partitions of {topic} begin and end"
    with translate_errors(address, f"say where {which}"):
        return retry_while_leaderless(fetch)


def _offsets_at(consumer: Consumer, topic: str, partitions: Sequence[int], at: int, timeout_s: float) -> dict[int, int]:
    """Return the offsets of the beginnings or ends, with a lookup by timestamp: special numbers stand for both. Raise
    the KafkaException of the first partition whose offset the broker does not state."""
    asked = [TopicPartition(topic, number, at) for number in partitions]
    answers = consumer.offsets_for_times(asked, timeout=timeout_s)
    for answer in answers:
        if answer.error is not None:
            raise KafkaException(answer.error)
    return {answer.partition: int(answer.offset) for answer in answers}


class PrefetchedBounds:
    """The bounds of a topic's partitions. The first call asks the broker for all partitions. Each of these answers is
    returned once; a later call asks the broker for one partition."""

    def __init__(
        self,
        bounds_of: Callable[[str, int], tuple[int, int]],
        bounds_of_partitions: Callable[[str, Sequence[int]], dict[int, tuple[int, int]]],
        partitions: Sequence[int],
    ) -> None:
        self._bounds_of = bounds_of
        self._bounds_of_partitions = bounds_of_partitions
        self._partitions = partitions
        self._known: dict[int, tuple[int, int]] | None = None

    def __call__(self, topic: str, partition: int) -> tuple[int, int]:
        if self._known is None:
            self._known = self._bounds_of_partitions(topic, self._partitions)
        known = self._known.pop(partition, None)
        return self._bounds_of(topic, partition) if known is None else known


class Partition(NamedTuple):
    """A partition of a topic (full name)."""

    topic: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.topic}/{self.number}"


class Message(NamedTuple):
    """A record, with its position in the partition."""

    partition: Partition
    offset: int
    value: bytes | None
    written_s: float  # Unix seconds, by its writer's or the broker's clock; 0.0 if it has no time
    headers: Sequence[tuple[str, bytes | None]] = ()  # (key, value) in order
    key: bytes | None = None


class TimedRecord(NamedTuple):
    """A record, the time when it was written (Unix seconds), and its position."""

    record: AnyRecord
    at_s: float
    topic: str
    offset: int


def as_message(partition: Partition, message: Any) -> Message:
    """Convert a message of the client library, without an error, to a `Message`. Unreadable headers are omitted."""
    kind, stamp_ms = message.timestamp()
    written_s = stamp_ms / 1000 if kind and stamp_ms > 0 else 0.0
    headers = () if unreadable_headers([message]) else message.headers() or ()
    return Message(partition, int(message.offset()), message.value(), written_s, headers, message.key())


def unreadable_headers(messages: Sequence[Any]) -> dict[int, str]:
    """Return, by index, why the client library cannot read the headers of some messages. Callers must not ask for the
    headers of these messages.

    In Kafka's protocol a header's key is UTF-8, but no broker checks it. For another key, the library returns a list
    together with an exception (confluent-kafka 2.16). Python detects this in a general call and raises an error, but
    crashes in code that it has optimized, such as a second call.
    """
    reasons: dict[int, str] = {}
    at, count = 0, len(messages)
    while at < count:
        try:
            while at < count:
                _ask_for_headers(messages[at])
                at += 1
        except (SystemError, ValueError) as exc:
            cause = exc if exc.__cause__ is None else exc.__cause__
            key = f" ({cause.object!r})" if isinstance(cause, UnicodeDecodeError) else ""
            reasons[at] = f"headers: expected keys in UTF-8, got other bytes{key}"[:_MAX_REASON_CHARS]
            at += 1
    return reasons


def from_earliest(partition: Partition, low: int, high: int) -> int:
    """Start at the first record that is kept."""
    return low


def from_end(partition: Partition, low: int, high: int) -> int:
    """Start after the last record: read only new records."""
    return high


class Reader:
    """A reader of messages or records of some partitions, in order within each. Use as a context manager. Not
    thread-safe.

    The reader waits for an unreachable broker; `poll` then returns nothing. If retention has deleted the next record,
    it continues at the first record that is left. Records that cannot be decoded are logged, counted and skipped.
    Methods that ask for bounds raise ServiceUnavailableError if the broker does not answer.

    Args:
        purpose: name of the consumer for the broker.
        start: function that returns the first offset from a partition and its bounds (low, high).

    Raises:
        ServiceUnavailableError: a topic does not exist, or the broker does not answer.
    """

    history_timeout_s: ClassVar[float] = 30.0

    def __init__(
        self,
        config: JobConfig,
        services: Services,
        purpose: str,
        partitions: Iterable[Partition],
        start: Start = from_earliest,
        *,
        lookup_timeout_s: float = LOOKUP_S,
        **settings: Any,
    ) -> None:
        self._address = services.kafka
        self._kafka = config.kafka
        self._lookup_s = lookup_timeout_s
        self._make_lookup = partial(make_consumer, config, services, f"{purpose}-ends")
        self._lookup: Any = None
        self._consumer = make_consumer(config, services, purpose, **{"fetch_wait_max_ms": _FETCH_WAIT_MS, **settings})
        self.ends: dict[Partition, int] = {}  # end of the history: end of the log when this reader was opened
        self.positions: dict[Partition, int] = {}  # the next offset; all records before it have been returned
        self.refused = 0  # number of values that could not be decoded
        try:
            by_topic: dict[str, list[int]] = {}
            for topic, number in partitions:
                by_topic.setdefault(topic, []).append(number)
            for topic, numbers in by_topic.items():
                bounds = bounds_of_partitions(self._consumer, services.kafka, topic, numbers, lookup_timeout_s)
                for number, (low, high) in bounds.items():
                    partition = Partition(topic, number)
                    self.ends[partition] = high
                    self.positions[partition] = start(partition, low, high)
        except BaseException:
            self._consumer.close()
            raise
        self._partitions = {tuple(partition): partition for partition in self.ends}
        # Always with explicit offsets: without them, a broker that has just started may deliver nothing.
        self._consumer.assign([TopicPartition(*partition, offset) for partition, offset in self.positions.items()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._consumer.close()
        if self._lookup is not None:
            self._lookup.close()

    def messages(self, timeout_s: float, limit: int = 1000) -> list[Message]:
        """Return the next messages as soon as there are any, at the latest after `timeout_s`. Raise
        ServiceUnavailableError if the client cannot continue (a fatal error)."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        messages = []
        for message in (first, *self._consumer.consume(limit - 1, timeout=0)):
            if (error := message.error()) is not None:
                if error.fatal():
                    raise ServiceUnavailableError(f"Kafka at {self._address} refuses this consumer: {error.str()}")
                reason = reason_of(error, self._kafka, "Read", message.topic() or "")
                log.warning("topic_error", reason=reason)
                continue
            partition = self._partitions[message.topic(), message.partition()]
            self.positions[partition] = int(message.offset()) + 1
            messages.append(as_message(partition, message))
        return messages

    def decode(self, message: Message) -> AnyRecord | None:
        """Return the record in a message; None if the message contains no record."""
        try:
            return decode(message.value)
        except RecordError as exc:
            self.refused += 1
            log.warning("record_refused", topic=message.partition.topic, offset=message.offset, reason=str(exc))
            return None

    def poll(self, timeout_s: float) -> list[TimedRecord]:
        """Return the next records as soon as there are any, at the latest after `timeout_s`."""
        return [
            TimedRecord(record, self._written_s(message), message.partition.topic, message.offset)
            for message in self.messages(timeout_s)
            if (record := self.decode(message)) is not None
        ]

    def read_history(self) -> list[TimedRecord]:
        """Return everything that the partitions held when this reader was opened. Raise ServiceUnavailableError if the
        broker does not send it within `history_timeout_s`."""
        records: list[TimedRecord] = []
        deadline_s = time.monotonic() + self.history_timeout_s
        while unread := [partition for partition in self.ends if not self.has_read_history(partition)]:
            if time.monotonic() > deadline_s:
                raise ServiceUnavailableError(
                    f"Kafka did not send all records of {', '.join(map(str, unread))} within "
                    f"{self.history_timeout_s:g} s: is it overloaded, or a broker down?"
                )
            records += self.poll(0.2)
        return records

    def read_to_end(self) -> list[TimedRecord]:
        """Return the records that are now in the partitions and were not returned yet; fewer if this takes over 10
        s."""
        records: list[TimedRecord] = []
        deadline_s = time.monotonic() + _TO_END_S
        try:
            ends = {partition: self.bounds(partition)[1] for partition in self.ends}
        except ServiceUnavailableError as exc:
            log.warning("topic_error", reason=str(exc))
            return records
        while any(self.positions[at] < end for at, end in ends.items()) and time.monotonic() < deadline_s:
            records += self.poll(0.2)
        return records

    def _written_s(self, message: Message) -> float:
        """Return the time of a record. For a new record this is our own clock, because clocks may differ; for an older
        record, its writer's clock."""
        now_s = time.time()
        if message.offset >= self.ends[message.partition] or not message.written_s:
            return now_s
        return min(now_s, message.written_s)

    def has_read_history(self, partition: Partition) -> bool:
        """Return whether everything that `partition` held when this reader was opened has been returned."""
        return self.positions[partition] >= self.ends[partition]

    def is_caught_up(self) -> bool:
        """Return whether all records that the partitions hold have been returned."""
        return all(self.bounds(partition)[1] <= position for partition, position in self.positions.items())

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """Return the result of `partition_bounds` for any partition."""
        return partition_bounds(self._ends_client(), self._address, *partition, self._lookup_s)

    def bounds_of_partitions(self, topic: str, partitions: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return the result of the function `bounds_of_partitions` for any topic."""
        return bounds_of_partitions(self._ends_client(), self._address, topic, partitions, self._lookup_s)

    def partition_ends(
        self, topic: str, partitions: int | None = None, timeout_s: float = 1.0
    ) -> list[int] | None:  # fmt: skip
        """Return the end (high watermark) of each partition of any topic; None if a broker does not answer in time.

        Args:
            partitions: number of partitions. None: all present partitions of an existing topic.
        """
        client = self._ends_client()
        try:
            count = count_partitions(client, topic, timeout_s) if partitions is None else partitions
            ends = _offsets_at(client, topic, range(count), OFFSET_END, timeout_s) if count else {}
        except KafkaException:
            return None
        return [ends[number] for number in range(count)] or None

    def _ends_client(self) -> Any:
        """Return a separate client, made when it is needed: most readers do not look up ends while they read.

        A broker answers the requests of a connection in order, so on the reader's client a lookup would wait for a
        fetch.
        """
        if self._lookup is None:
            self._lookup = self._make_lookup()
        return self._lookup


def count_partitions(consumer: Any, topic: str, timeout_s: float) -> int:
    """Return the present number of partitions of a topic; 0 if it does not exist. Raises KafkaException."""
    return len(consumer.list_topics(topic, timeout=timeout_s).topics[topic].partitions)


def unreadable(error: Any) -> bool:
    """Return whether an error of a consumer is about a batch of records that it cannot read."""
    return error.code() in UNREADABLE


def end_of_unreadable(
    consumer: Any, partition: tuple[str, int], base: int, should_stop: Callable[[], bool] = lambda: False
) -> int:
    """Return the offset after a batch that the library cannot read. Raise ServiceUnavailableError if Kafka does not
    answer for 30 s.

    If the library begins to read anywhere in the batch, it reports the first offset of the batch (`base`) and does not
    advance. The end is therefore searched by reads from later offsets: at most twice as many as the batch's length has
    bits. The search changes the assignment of `consumer`, which must report ends of partitions and offsets out of
    range.
    """

    def is_inside(offset: int) -> bool:
        consumer.assign([TopicPartition(*partition, offset)])
        deadline_s = time.monotonic() + _PROBE_S
        while not should_stop():
            if (message := consumer.poll(_POLL_S)) is not None:
                if (error := message.error()) is None:
                    return False
                if unreadable(error):
                    return bool(message.offset() == base)
                if error.code() in (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET):
                    return False
            if time.monotonic() > deadline_s:
                raise ServiceUnavailableError(
                    f"Kafka has sent nothing of {partition[0]}/{partition[1]} at offset {offset} for {_PROBE_S:g} s, "
                    "while the end of a batch that cannot be read was looked for: is the broker running?"
                )
        return False

    inside, step = base, 1
    while is_inside(inside + step):
        inside, step = inside + step, 2 * step
    outside = inside + step
    while outside - inside > 1:
        middle = (inside + outside) // 2
        if is_inside(middle):
            inside = middle
        else:
            outside = middle
    return outside


class Tail(Reader):
    """A reader of `topics` (full names, one partition each) from the earliest kept record, or from now on."""

    def __init__(
        self, config: JobConfig, services: Services, topics: Iterable[str], *, from_now_on: bool = False
    ) -> None:
        start = from_end if from_now_on else from_earliest
        super().__init__(config, services, "watch", map(Partition, topics), start)


@contextlib.contextmanager
def on_finish(config: JobConfig, services: Services, call: Callable[[], None]) -> Iterator[None]:
    """Within the context, call `call` in a thread, once, when the job finishes.

    An earlier Finished record is ignored, because this process was started after it to continue the job. Raise
    ServiceUnavailableError if Kafka does not answer at the start; later, this waits for Kafka.
    """
    exited = threading.Event()

    def watch() -> None:
        while not exited.is_set():
            for timed in tail.poll(_FINISH_POLL_S):
                if isinstance(timed.record, Finished):
                    log.info("job_finished", version=timed.record.version, reason=timed.record.reason)
                    call()
                    return

    with Tail(config, services, (config.topic("updates"),), from_now_on=True) as tail:
        thread = threading.Thread(target=watch, name="finish", daemon=True)
        thread.start()
        try:
            yield
        finally:
            exited.set()
            thread.join()


def has_finished(config: JobConfig, services: Services, should_stop: Callable[[], bool]) -> bool:
    """Return whether the job has ended and no server continues it; return False at once if it has not ended. Raise
    ServiceUnavailableError if Kafka does not answer at the start."""
    updates, finished = Partition(config.topic("updates")), False
    with Reader(config, services, "watch", [updates], lambda _, low, high: max(low, high - 1)) as reader:
        until_s = time.monotonic() + config.ps.lease_s + RESUME_GRACE_S
        while not should_stop() and time.monotonic() < until_s:
            for timed in reader.poll(_FINISH_POLL_S):
                finished = isinstance(timed.record, Finished)
            if not finished and reader.has_read_history(updates):
                return False
    return finished


class JobRecords(Reader):
    """All control records of a job. Use as a context manager. It starts at `positions` (the next offset, by
    `topic/partition`); partitions that are not in `positions` start at the earliest kept offset."""

    history_timeout_s = 120.0

    def __init__(self, config: JobConfig, services: Services, positions: Mapping[str, int]) -> None:
        self._samples = config.topic("samples")

        def start(partition: Partition, low: int, high: int) -> int:
            # The position is outside of the log: retention has deleted records, or the topic was created again.
            offset = positions.get(str(partition), low)
            return offset if low <= offset <= high else low

        partitions = [
            *(Partition(config.topic(kind)) for kind in ("updates", "events", "metrics")),
            *(Partition(config.topic("commands"), slot) for slot in range(config.data.places)),
        ]
        super().__init__(config, services, "provision", partitions, start)

    def named_positions(self) -> dict[str, int]:
        """Return the next offset, by `topic/partition`. `poll` has returned all records before it."""
        return {str(partition): offset for partition, offset in self.positions.items()}

    def sample_ends(self, timeout_s: float = 1.0) -> list[int] | None:
        """Return the ends of the partitions of samples; None if a broker does not answer in time."""
        return self.partition_ends(self._samples, timeout_s=timeout_s)
