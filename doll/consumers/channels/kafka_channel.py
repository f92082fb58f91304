"""The part of a worker's connection to Kafka that does not use Faust, which only delivers the samples. It joins the
job, writes to the topics `events` and `dead`, and reads the topic `commands`.

The channel sends with librdkafka, whose producer keeps the order, retries without limit and never duplicates a record.
It reads commands on a separate connection, because a client has only one fetch per broker at a time. On a shared
connection, a grant would have to wait for a fetch of samples, or every fetch of samples would have to be short (ADR
0006).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

from doll.config import JobConfig
from doll.errors import FencedError, ServiceUnavailableError
from doll.kafka.clients import is_away, make_consumer
from doll.kafka.publisher import Publisher
from doll.kafka.range_reader import RangeReader
from doll.kafka.reader import RESUME_GRACE_S, Partition, Reader, bounds_of_partitions, partition_bounds
from doll.process.metric_names import worker_source
from doll.records.control import AnyRecord, DeadLetter, Fence, Hello, Join, Metric, Stop, Welcome
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

Commands: TypeAlias = list[tuple[int, bytes | None]]  # (offset, value), in order

_LOOKUP_S: Final = 5.0
_MAX_LOOKUP_S: Final = 20.0  # a worker that must leave during a lookup leaves after it
_JOIN_RETRY_S: Final = 2.0
_LOG_AGAIN_S: Final = 10.0
_POLL_S: Final = 0.2  # maximum time after which the thread that reads commands notices that it must stop


class JobEndedError(Exception):
    """The parameter server sent Stop before or while this worker joined, and no other server has started since."""


class WorkerChannel:
    """The part of one worker's connection to Kafka that does not use Faust. Any thread may call `send` and
    `send_dead_letters`.

    Methods that read raise ServiceUnavailableError if Kafka does not answer.
    """

    def __init__(self, config: JobConfig, services: Services, worker: int) -> None:
        self._config, self._services = config, services
        self._worker = worker
        self._events_topic = config.topic("events")
        self._dead_topic = config.topic("dead")
        self._commands = Partition(config.topic("commands"), worker)
        self._key = str(worker).encode()
        self._ended_after_s = config.ps.lease_s + RESUME_GRACE_S
        self._publisher = Publisher(config, services)
        self._reader: Reader | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, record: AnyRecord) -> None:
        """Queue a record for the parameter server. The order is kept, and delivery is retried until it succeeds."""
        self._publisher.send(self._events_topic, record, key=self._key)

    def send_dead_letters(self, letters: list[DeadLetter]) -> None:
        """Store refused records, and return after Kafka has them. Therefore no update counts these records as dead
        before Kafka has them. Raise ServiceUnavailableError if Kafka does not accept the records."""
        for letter in letters:
            self._publisher.send(self._dead_topic, letter, key=self._key)
        while letters and self._publisher.flush(1.0):
            continue
        if letters and (reason := self._publisher.refusals.get(self._dead_topic)) is not None:
            raise ServiceUnavailableError(
                f"Kafka at {self._services.kafka} refused a dead letter on {self._dead_topic}: {reason}; its batch is "
                "not learned before Kafka takes it"
            )

    def report(self, values: dict[str, float]) -> None:
        """Report measurements of this worker on `metrics` (`Metric`). Any thread may call this method."""
        metric = Metric(source=worker_source(self._worker), values=values, time_s=time.time())
        self._publisher.send(self._config.topic("metrics"), metric, key=self._key)

    def poll(self) -> None:
        """Handle delivery reports. Call it regularly."""
        self._publisher.poll()

    def flush(self, timeout_s: float) -> None:
        self._publisher.flush(timeout_s)

    @cached_property
    def _metadata_consumer(self) -> Any:
        """The consumer that only requests offsets. It is created when first used, because each client costs the broker
        a connection.

        On the connection for commands, a request for watermarks would have to wait for the fetch of commands. In this
        time, librdkafka would poll for the answer a thousand times a second.
        """
        return make_consumer(self._config, self._services, "metadata")

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """Return (low, high): the first offset that the partition still contains, and the offset of its next record."""
        return partition_bounds(self._metadata_consumer, self._services.kafka, topic, partition, _LOOKUP_S)

    def bounds_of_partitions(self, topic: str, partitions: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return the `watermarks` of many partitions, with few requests."""
        return bounds_of_partitions(self._metadata_consumer, self._services.kafka, topic, partitions, _LOOKUP_S)

    def holds_record(self, topic: str, partition: int, lo: int, hi: int) -> bool:
        """Return whether [lo, hi) contains a record. A transaction marker has an offset but is not a record."""
        with RangeReader(self._config, self._services) as reader:
            for _ in reader.read(topic, partition, lo, hi):
                return True
        return False

    def read_values(self, topic: str, partition: int, offsets: Collection[int]) -> dict[int, bytes]:
        """Return the values at these offsets. Offsets that the log does not contain any more, and records without a
        value (tombstones), are left out."""
        if not offsets:
            return {}
        with RangeReader(self._config, self._services) as reader:
            values = reader.read(topic, partition, min(offsets), max(offsets) + 1)
            return {offset: value for offset, value in values if offset in offsets and value is not None}

    def join(
        self, process: str, should_stop: Callable[[], bool], incarnation: int = 0, *, after_term: int = 0
    ) -> tuple[Welcome, int] | None:
        """Send Join to the parameter server, and wait for its Welcome without a time limit. Call this method once.

        Args:
            after_term: servers of terms up to this one have ended before. Their Stop does not end this job.

        Returns:
            The Welcome and the next offset in this worker's partition of `commands`, where `read_commands` continues;
            None if `should_stop` returned True.

        Raises:
            FencedError: a newer process of this worker has joined.
            JobEndedError: the job is over.
        """
        # Earlier commands are not for this process, with one exception: if the last is a Stop, the job has ended, and
        # no server will answer unless a resumed one soon starts.
        reader = self._reader = self._open_commands(should_stop)
        if reader is None:
            return None
        first_new = reader.ends[self._commands]
        ended: Stop | None = None
        asked_s = logged_s = float("-inf")
        started_s = time.monotonic()
        while not should_stop():
            now = time.monotonic()
            if now - asked_s >= _JOIN_RETRY_S:
                self.send(Join(worker=self._worker, process=process, incarnation=incarnation))
                asked_s = now
            if ended is not None and now - started_s >= self._ended_after_s:
                raise JobEndedError(ended.reason)
            if now - started_s >= _LOG_AGAIN_S and now - logged_s >= _LOG_AGAIN_S:
                log.warning(
                    "waiting_for_parameter_server", waited_s=round(now - started_s), start="doll ps --job JOB.yaml"
                )
                logged_s = now
            for message in reader.messages(_POLL_S, limit=1):
                record = reader.decode(message)
                if message.offset < first_new:
                    ended = record if isinstance(record, Stop) and record.term > after_term else None
                    continue
                ended = None
                match record:
                    case Welcome() if record.process == process:
                        return record, message.offset + 1
                    case Fence() if record.process == process:
                        raise FencedError(f"worker {self._worker} has been replaced by a newer process")
                    case Hello():
                        asked_s = float("-inf")
                    case Stop():
                        raise JobEndedError(record.reason)
        return None

    def _open_commands(self, should_stop: Callable[[], bool]) -> Reader | None:
        """Return a reader of this worker's commands, beginning with the last one; None if `should_stop` returned True.

        The broker may be overloaded, for example because a thousand workers start at once. The method then pauses for a
        random time before it asks again, so that the workers do not all ask together.
        """
        timeout_s = _LOOKUP_S
        while not should_stop():
            try:
                return Reader(
                    self._config, self._services, "commands", [self._commands], lambda _, low, high: max(low, high - 1),
                    lookup_timeout_s=timeout_s,
                )  # fmt: skip
            except ServiceUnavailableError as exc:
                if not is_away(exc):
                    raise
                pause_s = random.uniform(0.0, timeout_s)
                log.warning("waiting_for_kafka", reason=str(exc), pause_s=round(pause_s, 1))
                timeout_s = min(2.0 * timeout_s, _MAX_LOOKUP_S)
                again_s = time.monotonic() + pause_s
                while time.monotonic() < again_s and not should_stop():
                    time.sleep(_POLL_S)
        return None

    def read_commands(self, deliver: Callable[[Commands], object]) -> None:
        """Pass the commands after the Welcome to `deliver`, as (offset, value), in order, in another thread. Call this
        method once, after `join`."""
        assert self._reader is not None, "join first"
        self._thread = threading.Thread(
            target=self._read_commands, args=(self._reader, deliver), name="commands", daemon=True
        )
        self._thread.start()

    def _read_commands(self, reader: Reader, deliver: Callable[[Commands], object]) -> None:
        while not self._closed.is_set():
            if messages := reader.messages(_POLL_S):
                deliver([(message.offset, message.value) for message in messages])

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._reader is not None:
            self._reader.close()
        if "_metadata_consumer" in vars(self):
            self._metadata_consumer.close()
