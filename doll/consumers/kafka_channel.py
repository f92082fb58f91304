"""A worker's wires beside Faust: sends to `events` and `dead`, joins the job, then reads its commands on `commands`.

confluent-kafka sends, because its producer keeps order, retries for ever and never doubles a record. It reads the commands
on a connection of its own, because aiokafka asks a broker one thing at a time: a grant would wait behind a fetch of
samples, or every fetch of samples would have to be short (ADR 0006).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from doll.config import JobConfig
from doll.errors import FencedError, RecordError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.clients import LINGER_MS, RECORD_LIMIT_BYTES, kafka_settings
from doll.kafka.range_reader import RangeReader
from doll.records import AnyRecord, DeadLetter, Fence, Hello, Join, Metric, Stop, Welcome, decode, encode
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

_WATERMARK_TIMEOUT_S = 5.0
_JOIN_RETRY_S = 2.0
_LOG_AGAIN_S = 10.0
# How long a server may stay away after an earlier one's Stop before that is believed, beyond the lease of a standby.
_ENDED_AFTER_S = 30.0
_POLL_S = 0.2  # how soon the commands's thread sees that it is told to stop
_PER_POLL = 500


class JobEndedError(Exception):
    """The parameter server said Stop while this worker was joining, or before, and no other server has come since."""


class WorkerChannel:
    """Kafka, as one worker uses it beside Faust. `send` and `send_dead_letters` may be called from any thread."""

    def __init__(self, config: JobConfig, services: Services, worker: int) -> None:
        self._config, self._services = config, services
        self._worker = worker
        self._address = services.kafka
        self._events_topic = config.topic("events")
        self._dead_topic = config.topic("dead")
        self._commands_topic = config.topic("commands")
        self._key = str(worker).encode()
        self._ended_after_s = config.ps.lease_s + _ENDED_AFTER_S
        self._refused: dict[str, str] = {}  # by topic: why Kafka refused a record for good
        self._producer = Producer(
            kafka_settings(
                config, services, acks="all", enable_idempotence=True, linger_ms=LINGER_MS, message_timeout_ms=0,
                message_max_bytes=RECORD_LIMIT_BYTES,
            )
        )  # fmt: skip
        self._commands_consumer, self._metadata_consumer = (
            Consumer(
                kafka_settings(
                    config, services, group_id=f"doll-{config.job}-{use}-{uuid.uuid4().hex[:8]}",
                    enable_auto_commit=False, auto_offset_reset="earliest",
                )
            )
            # Two connections: a question for watermarks would wait behind the fetch of commands, and librdkafka would look
            # for its answer a thousand times a second.
            for use in ("commands", "ask")
        )  # fmt: skip
        self._closed = threading.Event()
        self._reader: threading.Thread | None = None

    def send(self, record: AnyRecord) -> None:
        """Queue a record for the parameter server; order is kept, delivery is retried until it succeeds."""
        self._produce(self._events_topic, encode(record), 0)

    def send_dead_letters(self, letters: list[DeadLetter]) -> None:
        """Store refused records; returns when Kafka has them, so that no update can count them before.

        Raises:
            ServiceUnavailableError: Kafka does not take them.
        """
        for letter in letters:
            self._produce(self._dead_topic, encode(letter), 0)
        while letters and self._producer.flush(1.0):
            continue
        if letters and (reason := self._refused.get(self._dead_topic)) is not None:
            raise ServiceUnavailableError(
                f"Kafka at {self._address} refused a dead letter on {self._dead_topic}: {reason}; its batch is not learned "
                "before Kafka takes it"
            )

    def lost(self, lo: int, hi: int) -> None:
        """Tell those who watch the job that offsets [lo, hi) were deleted before this worker could read them."""
        values = {"lost_from": float(lo), "lost_until": float(hi)}
        self._produce(
            self._config.topic("metrics"),
            encode(Metric(source=f"worker-{self._worker}", values=values, time_s=time.time())),
            0,
        )

    def _produce(self, topic: str, value: bytes, partition: int) -> None:
        while True:
            try:
                self._producer.produce(
                    topic, value=value, key=self._key, partition=partition, on_delivery=self._on_delivery
                )
            except BufferError:
                self._producer.poll(0.1)  # Kafka is away and the queue is full: wait, nothing may be dropped
            else:
                self._producer.poll(0)
                return

    def _on_delivery(self, error: Any, message: Any) -> None:
        # Never for being late (message.timeout.ms is 0): not allowed, too long. The protocol heals what is lost on
        # `events`, but a person has to mend the reason.
        if error is not None and message.topic() not in self._refused:
            self._refused[message.topic()] = error.str()
            log.error("kafka_refused", topic=message.topic(), reason=error.str())

    def poll(self) -> None:
        """Let the client library report what was delivered; call it now and then."""
        self._producer.poll(0)

    def flush(self, timeout_s: float) -> None:
        """Wait until what was sent has arrived, at most `timeout_s`."""
        self._producer.flush(timeout_s)

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """(low, high): the first offset that the partition still holds, and the one that its next record gets.

        Raises:
            ServiceUnavailableError: Kafka does not answer.
        """
        return topics.watermarks(self._metadata_consumer, self._address, topic, partition, _WATERMARK_TIMEOUT_S)

    def holds_record(self, topic: str, partition: int, lo: int, hi: int) -> bool:
        """Whether there is a record at all in [lo, hi): the marker of a transaction takes an offset and is none.

        Raises:
            ServiceUnavailableError: Kafka does not answer.
        """
        with RangeReader(self._config, self._services) as reader:
            for _ in reader.read(topic, partition, lo, hi):
                return True
        return False

    def read_values(self, topic: str, partition: int, offsets: Collection[int]) -> dict[int, bytes]:
        """What the log holds at these offsets; without those that it does not hold any more.

        Raises:
            ServiceUnavailableError: Kafka does not answer.
        """
        if not offsets:
            return {}
        with RangeReader(self._config, self._services) as reader:
            values = reader.read(topic, partition, min(offsets), max(offsets) + 1)
            return {offset: value for offset, value in values if offset in offsets and value is not None}

    def join(
        self, instance: str, should_stop: Callable[[], bool], incarnation: int = 0, *, after_term: int = 0
    ) -> tuple[Welcome, int] | None:
        """Ask the parameter server for a place; wait for it as long as it takes, saying so.

        Args:
            instance: name of this process, as in `Join`.
            incarnation: number of its machine, as in `Join`.
            after_term: servers of terms up to this one were of earlier runs: their Stop is not this job's.

        Returns:
            The Welcome and the offset after it on this worker's `commands` partition, where `read_commands` goes on; None if
            `should_stop` said so.

        Raises:
            FencedError: a newer incarnation of this worker is there.
            JobEndedError: the job is over.
        """
        # Mail from before this moment is not for this process, except one thing: a server's last word was Stop. It
        # tells a worker that starts again after the end that nobody will answer, unless a resumed server soon does.
        # The offset is explicit: see reference faust-kafka 8.
        low, at = self.watermarks(self._commands_topic, self._worker)
        self._commands_consumer.assign([TopicPartition(self._commands_topic, self._worker, max(low, at - 1))])
        ended: Stop | None = None
        asked_s = said_s = float("-inf")
        started_s = time.monotonic()
        while not should_stop():
            now = time.monotonic()
            if now - asked_s >= _JOIN_RETRY_S:
                self.send(Join(worker=self._worker, instance=instance, incarnation=incarnation))
                asked_s = now
            if ended is not None and now - started_s >= self._ended_after_s:
                raise JobEndedError(ended.reason)
            if now - started_s >= _LOG_AGAIN_S and now - said_s >= _LOG_AGAIN_S:
                log.warning(
                    "waiting_for_parameter_server", waited_s=round(now - started_s), start="doll ps --job JOB.yaml"
                )
                said_s = now
            message = self._commands_consumer.poll(_POLL_S)
            if message is None or message.error() is not None:
                continue
            record = _decode_or_none(message.value())
            if message.offset() < at:
                ended = record if isinstance(record, Stop) and record.term > after_term else None
                continue
            ended = None
            match record:
                case Welcome() if record.instance == instance:
                    return record, int(message.offset()) + 1
                case Fence() if record.instance == instance:
                    raise FencedError(f"worker {self._worker} has been replaced by a newer process")
                case Hello():
                    asked_s = float("-inf")
                case Stop():
                    raise JobEndedError(record.reason)
        return None

    def read_commands(self, deliver: Callable[[list[tuple[int, bytes | None]]], object]) -> None:
        """From now on hand what comes after the Welcome to `deliver`, as (offset, value), in order, from a thread.

        Call it once, after `join`.
        """
        self._reader = threading.Thread(target=self._read, args=(deliver,), name="commands", daemon=True)
        self._reader.start()

    def _read(self, deliver: Callable[[list[tuple[int, bytes | None]]], object]) -> None:
        while not self._closed.is_set():
            first = self._commands_consumer.poll(_POLL_S)
            if first is None:
                continue
            messages = [first, *self._commands_consumer.consume(_PER_POLL, 0)]
            commands = [(int(message.offset()), message.value()) for message in messages if message.error() is None]
            if commands:
                deliver(commands)

    def close(self) -> None:
        self._closed.set()
        if self._reader is not None:
            self._reader.join()
        self._commands_consumer.close()
        self._metadata_consumer.close()


def _decode_or_none(value: bytes | None) -> AnyRecord | None:
    try:
        return decode(value)
    except RecordError as exc:
        log.warning("record_refused", topic="commands", reason=str(exc))
        return None
