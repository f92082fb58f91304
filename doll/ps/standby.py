"""A parameter server in waiting: everything is loaded, and it takes over when nothing is heard of the leader any more.

The leader's sign of life is what it writes anyway: a measurement each second, and updates. Nobody renews a lease
anywhere, so there is no second service whose loss would stop a job. Silence is no proof of death (the leader may be
frozen, or cut off); therefore the standby claims the next `ps_epoch` in the checkpoint store, from which moment the old
leader can save nothing, and a leader that was away for longer than the lease looks there before it does anything else.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Final

from doll import topics
from doll.config import JobConfig
from doll.errors import RecordError, ServiceUnavailableError
from doll.records import AnyRecord, Epoch, Finished, Metric, Update, decode
from doll.services import Services, kafka_settings
from doll.telemetry import get_logger

log = get_logger(__name__)

_POLL_S: Final = 0.2
_PROBE_S: Final = 2.0


class Watch:
    """When a leader's lease ends. Pure: `now` is any monotonic time in seconds."""

    def __init__(self, lease_s: float, now: float) -> None:
        self._lease_s = lease_s
        self._heard_s = now
        self.ps_epoch = 0
        self.finished = False

    def feed(self, record: AnyRecord, now: float) -> None:
        """A record of `updates` or `metrics` came. One of an earlier server than the newest is no sign of life."""
        match record:
            case Metric(source="ps"):
                epoch = int(record.values.get("ps_epoch", 0))
            case Epoch() | Update() | Finished():
                epoch = record.ps_epoch
            case _:
                return
        if epoch < self.ps_epoch:
            return
        self.ps_epoch = epoch
        self.finished = isinstance(record, Finished)
        self._heard_s = now

    def deaf(self, now: float) -> None:
        """Kafka does not answer, so nobody can be heard: the lease begins anew."""
        self._heard_s = now

    def is_over(self, now: float) -> bool:
        """Nothing was heard for the length of a lease."""
        return now - self._heard_s >= self._lease_s


def wait_for_lease(config: JobConfig, services: Services, should_stop: Callable[[], bool]) -> bool:
    """Wait until the leader's lease is over (True); False when the job has finished, or `should_stop` says so.

    Raises:
        ServiceUnavailableError: Kafka does not answer at the start.
    """
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        kafka_settings(
            config, services, group_id=f"doll-{config.job}-standby-{uuid.uuid4().hex[:8]}", enable_auto_commit=False,
            auto_offset_reset="latest", fetch_wait_max_ms=100,
        )
    )  # fmt: skip
    names = (config.topic("updates"), config.topic("metrics"))

    def end_of(name: str) -> int:
        return topics.watermarks(consumer, services.kafka, name, 0, _PROBE_S)[1]

    try:
        nexts = {name: end_of(name) for name in names}
        consumer.assign([TopicPartition(name, 0, at) for name, at in nexts.items()])
        watch = Watch(config.ps.lease_s, time.monotonic())
        log.info("standing_by", lease_s=config.ps.lease_s)
        while not should_stop():
            message = consumer.poll(_POLL_S)
            if message is not None and message.error() is None:
                nexts[message.topic()] = int(message.offset()) + 1
                try:
                    watch.feed(decode(message.value()), time.monotonic())
                except RecordError as exc:
                    log.warning("record_refused", topic=message.topic(), reason=str(exc))
            if watch.finished:
                log.info("job_ended", reason="the leader has finished the job")
                return False
            if not watch.is_over(time.monotonic()):
                continue
            try:
                if all(end_of(name) <= nexts[name] for name in names):
                    log.warning(
                        "leader_silent", ps_epoch=watch.ps_epoch, lease_s=config.ps.lease_s, action="taking over"
                    )
                    return True
            except ServiceUnavailableError:
                watch.deaf(time.monotonic())
        return False
    finally:
        consumer.close()
