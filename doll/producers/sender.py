"""Sends samples to Kafka in order, acknowledged by all in-sync replicas. Every lost sample is counted."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.kafka.publisher import ClientError, Delivery, Publisher
from doll.kafka.topic_plan import plan_topics
from doll.process.metric_names import PRODUCER
from doll.records import control as records
from doll.services import Services

_LINGER_MS: Final = 5
_QUEUE_KBYTES: Final = 65_536  # samples that wait here while Kafka is unreachable; if it is full, the sender waits
_FULL_QUEUE_POLL_S: Final = 0.05


@dataclass
class Counts:
    """Numbers of samples by outcome. Samples that are sent, but neither delivered nor failed, are in flight."""

    sent: int = 0
    delivered: int = 0
    failed: int = 0


class SampleSender:
    """A sender of samples to the partitions of their streams. It connects when it sends the first sample.

    Attributes:
        unreachable: whether no broker answers; sent samples wait in the meantime.

    Args:
        say: function that is called with a sentence when Kafka becomes unreachable or reachable, or refuses a sample
            (once per reason).
    """

    def __init__(self, config: JobConfig, services: Services, say: Callable[[str], None]) -> None:
        self.counts = Counts()
        self.settled = [0] * config.data.num_partitions  # samples of each stream that were delivered or failed
        self._config = config
        self._services = services
        self._say = say
        self._samples_topic = config.topic("samples")
        self._metrics_topic = config.topic("metrics")
        self._publisher: Publisher | None = None
        self._fatal: str | None = None
        self.unreachable = False
        self._reported_reasons: set[str] = set()

    def send(
        self,
        stream: int,
        value: bytes,
        samples: int,
        give_up: Callable[[], bool],
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> bool:
        """Send a record of `samples` samples to partition `stream`. If the queue is full, wait for room.

        Returns:
            True if the record was sent. False if `give_up()` returned True during the wait; then nothing was sent.

        Raises:
            ServiceUnavailableError: the producer cannot continue (a fatal error of the idempotent producer).
        """
        publisher = self._connected()
        on_delivery = functools.partial(self._on_delivery, stream, samples)
        while not publisher.try_send(
            self._samples_topic, value, partition=stream, on_delivery=on_delivery, headers=headers
        ):
            if give_up():
                return False
            self.poll(_FULL_QUEUE_POLL_S)
        self.counts.sent += samples
        self.poll()
        return True

    def send_metric(self, values: Mapping[str, float], time_s: float) -> None:
        """Send measurements to the `metrics` topic. If the queue is full, they are dropped: samples have priority."""
        metric = records.Metric(source=PRODUCER, values=values, time_s=time_s)
        self._connected().try_send(self._metrics_topic, metric)

    def send_end(self, ends: Sequence[int]) -> None:
        """Report to the parameter server that the source has ended, with the end offsets of its partitions."""
        self._connected().try_send(self._config.topic("events"), records.SourceEnded(ends=tuple(ends)))

    def poll(self, timeout_s: float = 0.0) -> None:
        """Process the acknowledgements of Kafka; wait up to `timeout_s` for them.

        Raises:
            ServiceUnavailableError: see `send`.
        """
        if self._publisher is not None:
            self._publisher.poll(timeout_s)
        if self._fatal is not None:
            raise ServiceUnavailableError(
                f"Kafka at {self._services.kafka} refused the producer permanently ({self._fatal}): "
                f"{self.counts.delivered} samples are delivered; start the producer again"
            )

    def drain(self, give_up: Callable[[], bool], grace_s: float) -> None:
        """Wait until every sent sample is delivered or failed.

        When `give_up()` returns True, or after a fatal error, wait at most `grace_s` more seconds; then the remaining
        samples count as failed.
        """
        if self._publisher is None:
            return
        deadline_s: float | None = None
        while len(self._publisher):
            self._publisher.poll(_FULL_QUEUE_POLL_S)
            now_s = time.monotonic()
            if deadline_s is None and (give_up() or self._fatal is not None):
                deadline_s = now_s + grace_s
            if deadline_s is not None and now_s >= deadline_s:
                self._publisher.discard()  # each record is then reported to `_on_delivery` as failed
                return

    def _connected(self) -> Publisher:
        if self._publisher is None:
            self._publisher = Publisher(
                self._config,
                self._services,
                on_error=self._on_error,
                linger_ms=_LINGER_MS,
                queue_buffering_max_kbytes=_QUEUE_KBYTES,
                compression_type="none",  # samples are the user's bytes, and many are numbers, which compress badly
                message_max_bytes=int(plan_topics(self._config)[0].settings["max.message.bytes"]),
            )
        return self._publisher

    def _on_delivery(self, stream: int, samples: int, delivery: Delivery) -> None:
        self.settled[stream] += samples
        if not delivery.refusal:
            self.counts.delivered += samples
            if self.unreachable:
                self.unreachable = False
                self._say(f"Kafka at {self._services.kafka} is reachable again")
            return
        self.counts.failed += samples
        if delivery.refusal not in self._reported_reasons:
            self._reported_reasons.add(delivery.refusal)
            self._say(f"a record of {samples} sample{'s' * (samples > 1)} was not delivered: {delivery.refusal}")

    def _on_error(self, error: ClientError) -> None:
        if error.is_fatal:
            self._fatal = error.reason
        elif error.is_unreachable and not self.unreachable:
            self.unreachable = True
            self._say(f"Kafka at {self._services.kafka} is unreachable: samples wait until it is back")
