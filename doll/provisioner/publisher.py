"""The provisioner's records on the topic `metrics`: decisions with their measurements, and heartbeats between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from doll.kafka.publisher import Publisher
from doll.process.metric_names import HEARTBEAT_EVERY_S, LEFT, PROVISIONER
from doll.records.control import AnyRecord, Metric

if TYPE_CHECKING:
    from doll.provisioner.decision import Decision


class DecisionPublisher:
    """Sends without waiting; decisions that Kafka does not take are in the journal.

    Args:
        topic: the job's `metrics`.
        clock: monotonic seconds.
    """

    def __init__(self, publisher: Publisher, topic: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._publisher = publisher
        self._topic = topic
        self._clock = clock
        self._sent_s = clock()

    def publish(self, decision: Decision, *, last: bool) -> None:
        """Send a decision.

        Args:
            last: this process exits normally, so its silence is no failure. A provisioner that gets SIGTERM leaves
                machines behind: its silence must be noticed.
        """
        values = {**decision.measurements(), **({LEFT: 1.0} if last else {})}
        self._send(decision.record(), Metric(source=PROVISIONER, values=values, time_s=decision.now_s))

    def heartbeat(self) -> None:
        """Send a heartbeat if nothing was sent for `HEARTBEAT_EVERY_S`; call it often."""
        if self._clock() - self._sent_s >= HEARTBEAT_EVERY_S:
            self._send(Metric(source=PROVISIONER, values={}, time_s=time.time()))

    def _send(self, *records: AnyRecord) -> None:
        self._sent_s = self._clock()
        for record in records:
            self._publisher.try_send(self._topic, record)

    def close(self) -> None:
        """Wait up to 5 s until Kafka has everything."""
        self._publisher.close()
