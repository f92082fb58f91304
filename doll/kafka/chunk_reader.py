"""Read the partitions of a topic as chunks of records, in a separate thread: the input of a worker.

The client library is called once per chunk, not once per record, and the thread waits without Python's interpreter
lock. The thread delivers the records of each partition in order, and the partitions in the order in which Kafka sends
them. The thread is at most `_MAX_UNTAKEN` chunks ahead of the receiver. During a pause, fetched records are kept.

Some records are delivered as an `UnreadValue`, which becomes a dead letter: a value above `data.max_record_bytes`, a
record with headers that the library cannot read, and each record of a batch that the library cannot read.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Message as _Record
from confluent_kafka import TopicPartition as _TopicPartition

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.kafka.clients import is_denial, make_consumer, reason_of
from doll.kafka.reader import Partition, end_of_unreadable, unreadable, unreadable_headers
from doll.kafka.topic_plan import batch_limit_bytes
from doll.records.event_times import NO_TIME
from doll.records.refusals import UnreadValue
from doll.services import Services
from doll.task.records import Envelope
from doll.telemetry import get_logger

log = get_logger(__name__)

# Bounds of a chunk. While the library makes a chunk's Python objects, about 0.5 us each, all other threads wait.
MAX_CHUNK_RECORDS: Final = 512
MAX_CHUNK_BYTES: Final = 1 << 20
_MAX_UNTAKEN: Final = 2

FETCH_MIN_BYTES: Final = 65_536
_MIN_PARTITION_FETCH_BYTES: Final = 4 << 20
# Limits of the records that the library fetches in advance. It stops at the first limit, but finishes a fetch.
_FETCHED_AHEAD_RECORDS: Final = 20_000
_FETCHED_AHEAD_KBYTES: Final = 16 * 1024
# Interval at which the library checks for room; its default of 1 s would stop a fast stream for that time.
_FULL_RECHECK_MS: Final = 20
_ERROR_BACKOFF_MS: Final = 100

_POLL_S: Final = 0.1  # after this time without records, the thread checks whether to pause or stop
_COMMIT_EVERY_S: Final = 5.0  # the library's default; a restarted worker reads from the server's offsets
_WAIT_S: Final = 1.0  # interval at which a pause checks whether a commit is due
_LAST_COMMIT_S: Final = 0.7
# Time for which the library delays a commit while it looks for the group's coordinator. A close waits for the commit.
_COORDINATOR_WAIT_MS: Final = 500
_LAST_POLL_S: Final = 0.02  # a poll does not return after it has only called `_on_commit`

# The log does not contain the next offset, because it was deleted or a new leader has a shorter log.
_OUT_OF_RANGE: Final = frozenset(
    {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION}
)
_HEAD_BYTES: Final = 65_536  # kept part of a value that is too long


class Chunk(NamedTuple):
    """Records of one partition in offset order, without gaps: the log has no other records between them."""

    partition: int
    offsets: Sequence[int]  # ascending; a `range` if none is missing
    values: list[bytes | None]  # one for each offset; an `UnreadValue` becomes a dead letter
    # The leader epoch of the last record; no record before it has a higher one. -1: unknown.
    leader_epoch: int = -1
    reading: int = 0  # see `ReadFrom`, as in the other deliveries
    # If requested, the client's message for each value; None for an `UnreadValue`.
    envelopes: Sequence[Envelope | None] = ()
    # If requested, the event time of each record (`doll.records.event_times`).
    times_ms: Sequence[int] = ()


class NoRecordBelow(NamedTuple):
    """All records below `offset` have been delivered, except transaction markers and aborted records."""

    partition: int
    offset: int
    reading: int = 0


class OutOfRange(NamedTuple):
    """The log does not contain `offset`, the next offset to be read. The partition delivers nothing before `seek`."""

    partition: int
    offset: int
    reading: int = 0


class Truncated(NamedTuple):
    """The log has lost its end, including records below `offset` that were read. Other records will replace the lost
    records, or have already replaced them. The partition delivers no more records."""

    partition: int
    offset: int
    reason: str  # the evidence, with offsets and leader epochs
    reading: int = 0


class Learned(NamedTuple):
    """The records that are known to be in the model: all below offset `until`."""

    until: int
    leader_epoch: int  # the highest leader epoch of these records when they were read; -1: unknown


NOTHING_LEARNED: Final = Learned(0, -1)


class ReadFrom(NamedTuple):
    """A partition to be read from offset `start` on. The records of `learned` at `start` or later are not durable.

    Each delivery contains `reading`. If a partition is read again from another offset, deliveries of the earlier
    reading may still arrive.
    """

    partition: int
    start: int
    learned: Learned = NOTHING_LEARNED
    reading: int = 0


TimesOf: TypeAlias = Callable[[Sequence[Envelope], Sequence[bytes | None]], Sequence[int]]
Delivery: TypeAlias = Chunk | NoRecordBelow | OutOfRange | Truncated | Exception


class _Reading:
    """The state of one partition: the position of the thread, and the committed offsets.

    Attributes:
        unreadable: the reasons why the library cannot read records, by offset, from `position` on.
        number: `ReadFrom.reading`.
        durable: offset below which everything is durable; guarded by the reader's condition.
        asked, committed: offset of the commit in progress, and of the last commit that was answered.
        ended_at: offset at which the library last reported the end of the readable records.
        log_end: end of the log at the last fetch.
    """

    def __init__(self, topic: str, read: ReadFrom) -> None:
        self.where = Partition(topic, read.partition)
        self.start, self.learned, self.number = read.start, read.learned, read.reading
        self.position = read.start
        self.unreadable: tuple[int, UnreadValue] | None = None
        self.durable = self.ended_at = self.log_end = self.asked = self.committed = -1


class ChunkReader:
    """A reader of partitions from explicit offsets, which commits offsets for a group without joining it.

    It only reads committed records, and waits for an unreachable broker. Its methods may be called from any thread. If
    envelopes are requested, chunks contain the keys, headers and timestamps of their records.

    A log that was truncated while nobody read it may already be longer than before. Its leader epochs show the
    truncation: each leader has a higher one than its predecessors, and a truncated log continues with records of a
    later leader. Therefore, at the start, the library sends the leader epoch of the last learned record to the leader.
    The leader answers at which offset the records with this leader epoch or a lower one end. Later, if the record at a
    learned offset has a higher leader epoch than the learned record, it is another record.
    """

    def __init__(
        self, config: JobConfig, services: Services, topic: str, partitions: Iterable[ReadFrom], *, group: str,
        max_chunk_records: int = MAX_CHUNK_RECORDS, with_envelopes: bool = False, times_of: TimesOf | None = None,
    ) -> None:  # fmt: skip
        """`times_of`: returns the event times of records with these values; None: event times are not read."""
        self._config, self._services, self._group = config, services, group
        self._max_record_bytes = config.data.max_record_bytes
        self._unpacked_limit_bytes = batch_limit_bytes(config)
        self._topic = topic
        self._with_envelopes = with_envelopes
        self._times_of = times_of
        # Created with the first partition: a new client begins to read in 0.01 s, but a client without a partition
        # may take a second after it gets one.
        self._consumer: Any = None
        self._changed = threading.Condition()  # guards the attributes below
        self._closed = self._paused = False
        self._wanted: dict[int, _Reading] = {}
        self._is_changed = False  # `_wanted` has changed, and the thread has not processed it
        self._seeks: dict[int, int] = {}
        self._untaken = 0
        # Used only by the thread:
        self._readings: dict[int, _Reading] = {}
        self._assigned: set[int] = set()
        self._unreadable: set[int] = set()  # partitions whose next records the library cannot read
        self._is_waiting_for_commit = False  # for a partition that is not read any more
        self._commit_at_s = 0.0
        self._may_commit = False  # there may be durable offsets that are not committed; set from any thread
        self._denied = False  # a refused permission to commit was logged
        self._max_chunk_records = min(max_chunk_records, MAX_CHUNK_RECORDS)
        self._chunk_records = min(16, self._max_chunk_records)  # small at first: records may be large
        self._deliver: Callable[[Delivery], object]
        self._thread: threading.Thread | None = None
        self.change((), partitions)

    def _make_consumer(self) -> Any:
        config, limit_bytes = self._config, self._unpacked_limit_bytes
        return make_consumer(
            config, self._services, "samples", group_id=self._group, auto_offset_reset="error",
            enable_auto_offset_store=False, isolation_level="read_committed", enable_partition_eof=True,
            check_crcs=True, fetch_min_bytes=FETCH_MIN_BYTES, fetch_wait_max_ms=config.worker.fetch_max_wait_ms,
            max_partition_fetch_bytes=max(_MIN_PARTITION_FETCH_BYTES, config.data.max_record_bytes),
            fetch_max_bytes=limit_bytes // 2, receive_message_max_bytes=limit_bytes,
            queued_min_messages=_FETCHED_AHEAD_RECORDS, queued_max_messages_kbytes=_FETCHED_AHEAD_KBYTES,
            fetch_queue_backoff_ms=_FULL_RECHECK_MS, fetch_error_backoff_ms=_ERROR_BACKOFF_MS,
            session_timeout_ms=_COORDINATOR_WAIT_MS, on_commit=self._on_commit,
        )  # fmt: skip

    def start(self, deliver: Callable[[Delivery], object]) -> None:
        """Pass everything to `deliver` from now on, in order, from the thread. The last delivery may be an exception.
        Call this once.

        The receiver calls `taken` after each delivery.
        """
        self._deliver = deliver
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    def taken(self) -> None:
        """Report that one more delivery has been processed."""
        with self._changed:
            self._untaken -= 1
            self._changed.notify()

    def pause(self) -> None:
        """Stop deliveries, except the one in progress."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Deliver again. If the reader is not paused, this has no effect."""
        with self._changed:
            self._paused = False
            self._changed.notify()

    def seek(self, partition: int, offset: int) -> None:
        """Continue at `offset`, after `OutOfRange`."""
        with self._changed:
            if partition in self._wanted:
                self._seeks[partition] = offset
                self._changed.notify()

    def change(self, gone: Iterable[int], new: Iterable[ReadFrom]) -> None:
        """Stop reading the partitions of `gone`, then read the partitions of `new`. Deliveries of `gone` may still
        follow."""
        with self._changed:
            for number in gone:
                del self._wanted[number]
                self._seeks.pop(number, None)
            self._wanted |= {read.partition: _Reading(self._topic, read) for read in new}
            if self._wanted and self._consumer is None:
                self._consumer = self._make_consumer()
            self._is_changed = True
            self._changed.notify()

    def commit(self, partition: int, offset: int) -> None:
        """Record that everything below `offset` is durable. It is committed within 5 s, and at `close`."""
        with self._changed:
            reading = self._wanted[partition]
            reading.durable = max(reading.durable, offset)
            self._may_commit = True

    def log_end(self, partition: int) -> int:
        """Return the end of the partition at the last fetch, as an offset; negative before the first fetch."""
        return self._wanted[partition].log_end

    def close(self) -> None:
        """Commit the durable offsets, and end. This waits little more than one second for Kafka."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        if self._consumer is None:
            return
        if self._is_waiting_for_commit or any(reading.asked > reading.committed for reading in self._readings.values()):
            _abandon(self._consumer)
        else:
            self._consumer.close()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._may_read():
                self._read()
                self._commit_if_due()
            self._commit_last()
        except KafkaException as exc:
            self._deliver(ServiceUnavailableError(f"reading {self._topic} from Kafka at {self._services.kafka}: {exc}"))
        except Exception as exc:
            self._deliver(exc)

    def _may_read(self) -> bool:
        """Wait until there is room. Return False if the reader was closed."""
        while True:
            with self._changed:
                while not self._closed and not self._is_changed and not self._has_room:
                    self._changed.wait(_WAIT_S)
                    self._note_log_ends()
                    self._commit_if_due()
                seeks, self._seeks = self._seeks, {}
                closed, is_changed, self._is_changed = self._closed, self._is_changed, False
                wanted = self._wanted.copy()
            if closed:
                return False
            if is_changed:
                self._follow(wanted)
            if seeks:
                for number, offset in seeks.items():
                    self._readings[number].position = offset
                self._assign(seeks)
            if not is_changed:
                return True

    @property
    def _has_room(self) -> bool:
        return self._consumer is not None and not self._paused and self._untaken < _MAX_UNTAKEN

    def _follow(self, wanted: dict[int, _Reading]) -> None:
        """Read exactly these partitions."""
        self._unassign([number for number in self._assigned if wanted.get(number) is not self._readings[number]])
        new = [number for number, reading in wanted.items() if self._readings.get(number) is not reading]
        gone = [reading for number, reading in self._readings.items() if wanted.get(number) is not reading]
        self._is_waiting_for_commit |= any(reading.asked > reading.committed for reading in gone)
        self._readings = wanted
        if new:
            self._assign(new)

    def _assign(self, numbers: Iterable[int]) -> None:
        """Read these partitions at their positions, with explicit offsets: without them, a broker that has just started
        may deliver nothing."""
        wanted = []
        for number in numbers:
            reading = self._readings[number]
            leader_epoch = reading.learned.leader_epoch if reading.position == reading.start else -1
            wanted.append(_TopicPartition(*reading.where, reading.position, leader_epoch=leader_epoch))
        self._unassign(set(numbers) & self._assigned)
        self._consumer.incremental_assign(wanted)
        self._assigned.update(numbers)

    def _unassign(self, numbers: Iterable[int]) -> None:
        if gone := [_TopicPartition(*self._readings[number].where) for number in numbers]:
            self._consumer.incremental_unassign(gone)
            self._assigned.difference_update(item.partition for item in gone)

    def _note_log_ends(self, numbers: Iterable[int] | None = None) -> None:
        for number in self._readings if numbers is None else numbers:
            reading = self._readings[number]
            where = _TopicPartition(*reading.where)
            high = int(self._consumer.get_watermark_offsets(where, cached=True)[1])
            # Records of an open transaction are below the high watermark, but cannot be read yet.
            reading.log_end = reading.position if reading.ended_at == reading.position else high

    def _read(self) -> None:
        for number in self._unreadable:
            reading = self._readings.get(number)
            if reading is None or reading.unreadable is None:
                self._unreadable.remove(number)
            else:
                self._hand_over_unreadable(reading, *reading.unreadable)
            return
        first = self._consumer.poll(_POLL_S)
        if first is None:
            self._note_log_ends()
            return
        # With a longer timeout, `consume` would wait for the maximum number of records.
        records = [first, *self._consumer.consume(self._chunk_records - 1, 0)]
        by_partition = _by_partition(records)
        for number, own in by_partition.items():
            if number in self._readings:
                self._take(self._readings[number], own)
            else:  # an error of no partition
                for error in filter(None, map(_Record.error, own)):
                    self._report(error, self._topic)
        self._note_log_ends(by_partition.keys() & self._readings.keys())

    def _report(self, error: Any, topic: str, at: str = "") -> None:
        """Log a temporary error, and raise any other error."""
        if error.fatal():
            raise ServiceUnavailableError(
                f"Kafka at {self._services.kafka} sends nothing usable of {topic}{at}: {error.str()}"
            )
        log.warning("topic_error", topic=topic, reason=reason_of(error, self._config.kafka, "Read", self._topic))

    def _take(self, reading: _Reading, records: list[Any]) -> None:
        """Deliver the records of one partition."""
        if reading.position < reading.learned.until and (reason := _find_other(reading, records)):
            self._unassign([reading.where.number])
            self._send(Truncated(reading.where.number, reading.learned.until, reason, reading.number))
            return
        if not any(map(_Record.error, records)):
            self._hand_over(reading, records)
            return
        begin = 0
        for at, record in enumerate(records):
            if (error := record.error()) is not None:
                self._hand_over(reading, records[begin:at])
                begin = at + 1
                if not self._handle(reading, error, record.offset()):
                    return
        self._hand_over(reading, records[begin:])

    def _hand_over(self, reading: _Reading, records: list[Any]) -> None:
        if not records:
            return
        first, last, count = records[0].offset(), records[-1].offset(), len(records)
        offsets = range(first, last + 1) if last - first + 1 == count else list(map(_Record.offset, records))
        sizes = list(map(len, records))
        self._chunk_records = max(1, min(self._max_chunk_records, MAX_CHUNK_BYTES // (sum(sizes) // count + 1)))
        values = list(map(_Record.value, records))
        if max(sizes) > self._max_record_bytes:
            values = [self._within_limit(value) for value in values]
        for at, reason in unreadable_headers(records).items():
            value = values[at] or b""
            if not isinstance(value, UnreadValue):
                values[at] = UnreadValue.with_reason("undecodable", reason, len(value), value[:_HEAD_BYTES])
        envelopes: Sequence[Envelope | None] = ()
        if self._with_envelopes:
            envelopes = [
                None if isinstance(value, UnreadValue) else record
                for value, record in zip(values, records, strict=True)
            ]
        times_ms = () if self._times_of is None else self._times_of(records, values)
        leader_epoch = _leader_epoch(records[-1])
        self._send(Chunk(reading.where.number, offsets, values, leader_epoch, reading.number, envelopes, times_ms))
        reading.position = last + 1

    def _within_limit(self, value: bytes | None) -> bytes | None:
        limit = self._max_record_bytes
        if value is None or len(value) <= limit:
            return value
        reason = f"record of {len(value)} bytes: expected at most {limit} (data.max_record_bytes)"
        return UnreadValue.with_reason("too_long", reason, len(value), value[:_HEAD_BYTES])

    def _find_unreadable(self, reading: _Reading, base: int, reason: str) -> None:
        """Deliver the remaining records of the batch that begins at `base`, as values that cannot be read."""
        self._unassign([reading.where.number])
        probe = self._make_consumer()  # the search for the end would take all partitions from the reader's consumer
        try:
            until = end_of_unreadable(probe, reading.where, base, lambda: self._closed)
        finally:
            probe.close()
        log.error("batch_unreadable", topic=str(reading.where), offsets=[base, until - 1], reason=reason)
        text = (
            f"the batch of records at offsets {base} to {until - 1} cannot be read ({reason}): expected one that "
            f"unpacks to at most {self._unpacked_limit_bytes} bytes in all"
        )
        reading.unreadable = until, UnreadValue.with_reason("unreadable", text)
        self._unreadable.add(reading.where.number)

    def _hand_over_unreadable(self, reading: _Reading, until: int, value: UnreadValue) -> None:
        offsets = range(reading.position, min(until, reading.position + self._max_chunk_records))
        if offsets:
            reading.position = offsets.stop
            envelopes = [None] * len(offsets) if self._with_envelopes else []
            times_ms = () if self._times_of is None else [NO_TIME] * len(offsets)
            values: list[bytes | None] = [value] * len(offsets)
            self._send(Chunk(reading.where.number, offsets, values, -1, reading.number, envelopes, times_ms))
        else:
            reading.unreadable = None
            self._assign([reading.where.number])

    def _send(self, delivery: Delivery) -> None:
        with self._changed:
            self._untaken += 1
        self._deliver(delivery)

    def _handle(self, reading: _Reading, error: Any, offset: int | None) -> bool:
        """Handle an error, and return whether the following records of this partition may be read."""
        code, number = error.code(), reading.where.number
        if code == KafkaError._PARTITION_EOF:
            reading.ended_at = offset or 0
            if (offset or 0) > reading.position:  # for most partitions the last chunk states it
                reading.position = offset or 0
                self._send(NoRecordBelow(number, reading.position, reading.number))
        elif code in _OUT_OF_RANGE:
            self._unassign([number])
            # The library has a code for this case, but returns the code of any lost position.
            if code == KafkaError._LOG_TRUNCATION or "truncation detected" in error.str():
                reason = error.str().partition(". Reset")[0]
                self._send(Truncated(number, reading.position, reason, reading.number))
            else:
                self._send(OutOfRange(number, reading.position, reading.number))
            return False
        elif unreadable(error) and offset is not None:
            self._find_unreadable(reading, offset, error.str())
            return False
        else:
            self._report(error, str(reading.where), f" at offset {reading.position}")
        return True

    # --- commits ----------------------------------------------------------------------------------------------------

    def _commit_if_due(self) -> None:
        """Start a commit if there are new durable offsets, at most once in 5 s, even during a pause."""
        if not self._may_commit or (now := time.monotonic()) < self._commit_at_s:
            return
        self._may_commit = False
        new = [reading for reading in self._readings.values() if reading.durable > reading.asked]
        if new:
            self._commit_at_s = now + _COMMIT_EVERY_S
            for reading in new:
                reading.asked = reading.durable
            offsets = [_TopicPartition(*reading.where, reading.asked) for reading in new]
            self._consumer.commit(offsets=offsets, asynchronous=True)

    def _on_commit(self, error: Any, partitions: list[Any]) -> None:
        """Handle the answer to a commit, in the thread while it polls. A failed commit is repeated with newer
        offsets."""
        if error is not None and is_denial(error) and not self._denied:
            self._denied = True
            log.warning("offsets_not_committed", reason=reason_of(error, self._config.kafka, "Read", self._group))
        for item in partitions:
            reading = self._readings.get(item.partition)
            if reading is None:  # the partition is not read any more
                continue
            if error is None and item.error is None:
                reading.committed = max(reading.committed, item.offset)
            else:
                reading.asked = reading.committed
                self._may_commit = True

    def _commit_last(self) -> None:
        self._unassign(list(self._assigned))
        self._commit_at_s = 0.0
        deadline_s = time.monotonic() + _LAST_COMMIT_S
        while any(reading.committed < reading.durable for reading in self._readings.values()):
            if (left_s := deadline_s - time.monotonic()) <= 0:
                break
            self._commit_if_due()
            self._consumer.poll(min(left_s, _LAST_POLL_S))


def _by_partition(records: list[Any]) -> dict[int, list[Any]]:
    """Return the records of each partition, in their order."""
    first = records[0].partition()
    if all(record.partition() == first for record in records):  # most chunks: a fetch has long runs of each partition
        return {first: records}
    by_partition: dict[int, list[Any]] = {}
    for record in records:
        by_partition.setdefault(record.partition(), []).append(record)
    return by_partition


def _find_other(reading: _Reading, records: list[Any]) -> str:
    """Return why one of `records` at a learned offset is not the record that was learned; "" if there is none."""
    until, known_epoch = reading.learned
    read_again = (record for record in records if record.error() is None and record.offset() < until)
    other = next((record for record in read_again if 0 <= known_epoch < _leader_epoch(record)), None)
    if other is None:
        return ""
    return (
        f"the record at offset {other.offset()} has leader epoch {_leader_epoch(other)}, and those that were "
        f"learned, up to offset {until - 1}, had {known_epoch} at most"
    )


def _leader_epoch(record: Any) -> int:
    """Return the leader epoch of a record; -1 if the broker does not state one."""
    return -1 if (leader_epoch := record.leader_epoch()) is None else int(leader_epoch)


def _abandon(client: Any) -> None:
    """Keep this client alive: destroying it waits for the answer to its commits, for minutes if a broker hangs.

    The process is about to end. The next process reads from the parameter server's offsets, not from the committed
    offsets.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
