"""Samples to Kafka with confluent-kafka: acknowledged by all replicas, in order, none silently lost."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from doll import records
from doll.errors import ServiceUnavailableError
from doll.kafka.clients import kafka_settings
from doll.kafka.topic_plan import plan_topics
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig

_QUEUE_KBYTES: Final = 65_536  # what waits here while Kafka is away; then the sender waits too
_FULL_QUEUE_POLL_S: Final = 0.05


@dataclass
class Counts:
    """Samples by what became of them. What is sent and neither delivered nor failed is on its way."""

    sent: int = 0
    delivered: int = 0
    failed: int = 0


class SampleSender:
    """Sends samples to their streams' partitions. It connects with the first one.

    Args:
        say: told in words when Kafka goes away, comes back, or refuses a sample (once for each reason).
    """

    def __init__(self, config: JobConfig, services: Services, say: Callable[[str], None]) -> None:
        self.counts = Counts()
        self._config = config
        self._services = services
        self._say = say
        self._samples_topic = config.topic("samples")
        self._metrics_topic = config.topic("metrics")
        self._producer: Any = None
        self._fatal: str | None = None
        self._unreachable = False
        self._reported_reasons: set[str] = set()

    def send(
        self,
        stream: int,
        value: bytes,
        samples: int,
        give_up: Callable[[], bool],
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> bool:
        """Put a record of `samples` samples on partition `stream`; waits for room while the queue is full.

        Returns:
            False if `give_up()` came true while it waited: then nothing was sent.

        Raises:
            ServiceUnavailableError: the producer cannot go on (a fatal error of the idempotent producer).
        """
        producer = self._connected()
        on_delivery = functools.partial(self._on_delivery, samples)
        while True:
            try:
                producer.produce(
                    self._samples_topic, value, partition=stream, on_delivery=on_delivery, headers=list(headers)
                )
            except BufferError:
                if give_up():
                    return False
                self.poll(_FULL_QUEUE_POLL_S)
                continue
            except _kafka_exception() as exc:
                # Refused on the spot, for instance because it is too long.
                self.counts.sent += samples
                self._on_delivery(samples, exc.args[0], None)
            else:
                self.counts.sent += samples
            self.poll()
            return True

    def send_metric(self, values: Mapping[str, float], time_s: float) -> None:
        """Put measurements on the `metrics` topic. They are dropped when the queue is full: samples go first."""
        record = records.encode(records.Metric(source="producer", values=values, time_s=time_s))
        with contextlib.suppress(BufferError, _kafka_exception()):  # a refusal for good is told by `poll`
            self._connected().produce(self._metrics_topic, record)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in what Kafka has acknowledged, waiting up to `timeout_s` for it.

        Raises:
            ServiceUnavailableError: as in `send`.
        """
        if self._producer is not None:
            self._producer.poll(timeout_s)
        if self._fatal is not None:
            raise ServiceUnavailableError(
                f"Kafka at {self._services.kafka} refused the producer for good ({self._fatal}): "
                f"{self.counts.delivered} samples are delivered; start the producer again"
            )

    @property
    def away(self) -> bool:
        """Whether no broker answers; what is sent waits meanwhile."""
        return self._unreachable

    def drain(self, give_up: Callable[[], bool], grace_s: float) -> None:
        """Wait until every sample sent is delivered or failed.

        Once `give_up()` is true, or after a fatal error, it waits `grace_s` more; what is left then is failed.
        """
        if self._producer is None:
            return
        deadline_s: float | None = None
        while len(self._producer):
            self._producer.poll(_FULL_QUEUE_POLL_S)
            now_s = time.monotonic()
            if deadline_s is None and (give_up() or self._fatal is not None):
                deadline_s = now_s + grace_s
            if deadline_s is not None and now_s >= deadline_s:
                self._producer.purge()  # each purged record comes back through `_on_delivery` as failed
                self._producer.flush(1.0)
                return

    def _connected(self) -> Any:
        if self._producer is None:
            from confluent_kafka import Producer

            self._producer = Producer(
                kafka_settings(
                    self._config,
                    self._services,
                    acks="all",
                    enable_idempotence=True,
                    linger_ms=5,
                    # No sample is given up because Kafka is away for long: the queue fills, then the sender waits.
                    message_timeout_ms=0,
                    queue_buffering_max_kbytes=_QUEUE_KBYTES,
                    message_max_bytes=int(plan_topics(self._config)[0].settings["max.message.bytes"]),
                    error_cb=self._on_error,
                )
            )
        return self._producer

    def _on_delivery(self, samples: int, error: Any, _message: Any) -> None:
        if error is None:
            self.counts.delivered += samples
            if self._unreachable:
                self._unreachable = False
                self._say(f"Kafka at {self._services.kafka} is back")
            return
        self.counts.failed += samples
        reason = error.str()
        if reason not in self._reported_reasons:
            self._reported_reasons.add(reason)
            self._say(f"a record of {samples} sample{'s' * (samples > 1)} was not delivered: {reason}")

    def _on_error(self, error: Any) -> None:
        from confluent_kafka import KafkaError

        if error.fatal() or error.code() == KafkaError._FATAL:
            self._fatal = error.str()
        elif error.code() == KafkaError._ALL_BROKERS_DOWN and not self._unreachable:
            self._unreachable = True
            self._say(f"Kafka at {self._services.kafka} is away: samples wait until it is back")


def _kafka_exception() -> type[Exception]:
    from confluent_kafka import KafkaException

    exception: type[Exception] = KafkaException
    return exception
