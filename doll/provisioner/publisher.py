"""The provisioner's records on the topic `metrics`: decisions with their measurements, and heartbeats between them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from doll.kafka.publisher import Publisher
from doll.process.heartbeats import HEARTBEAT_EVERY_S, LEFT
from doll.records import AnyRecord, Metric
from doll.services import Services

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.provisioner.decision import Decision

SOURCE = "provisioner"


class DecisionPublisher:
    """Sends without waiting: what Kafka does not take is in the journal all the same."""

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._publisher = Publisher(config, services, linger_ms=5, message_timeout_ms=30_000)
        self._topic = config.topic("metrics")
        self._sent_s = time.monotonic()

    def publish(self, decision: Decision, *, last: bool) -> None:
        """Send a decision.

        Args:
            last: this process exits normally, so its silence is no failure. A provisioner that gets SIGTERM leaves
                machines behind: its silence must be noticed.
        """
        values = {**decision.measurements(), **({LEFT: 1.0} if last else {})}
        self._send(decision.record(), Metric(source=SOURCE, values=values, time_s=decision.now_s))

    def heartbeat(self) -> None:
        """Send a heartbeat if none was sent for `HEARTBEAT_EVERY_S`; call it often."""
        if time.monotonic() - self._sent_s >= HEARTBEAT_EVERY_S:
            self._sent_s = time.monotonic()
            self._send(Metric(source=SOURCE, values={}, time_s=time.time()))

    def _send(self, *records: AnyRecord) -> None:
        for record in records:
            self._publisher.try_send(self._topic, record)

    def close(self) -> None:
        """Wait up to 5 s until Kafka has everything."""
        self._publisher.close()
