"""A parameter server in waiting: everything is loaded, and it takes over when nothing is heard of the leader any more.

The leader's sign of life is what it writes anyway: a measurement each second, and updates. Nobody renews a lease
anywhere, so there is no second service whose loss would stop a job. Silence is no proof of death (the leader may be
frozen, or cut off); therefore the standby claims the next `term` in the checkpoint store, from which moment the old
leader can save nothing, and a leader that was away for longer than the lease looks there before it does anything else.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from doll.config import JobConfig
from doll.errors import FencedError, RecordError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.clients import kafka_settings
from doll.records import AnyRecord, Finished, Metric, TermStarted, Update, decode
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

_POLL_S: Final = 0.2
_PROBE_S: Final = 2.0
_SILENCE_S: Final = 3.0  # a leader writes a measurement each second
_IN_FLIGHT_S: Final = 0.5


class LeaderLease:
    """When a leader's lease ends. Pure: `now` is any monotonic time in seconds.

    Attributes:
        term: of the newest leader heard; 0: none yet.
        heard_s: when it was heard last; before that, when this lease began.
        finished: it has finished the job.
    """

    def __init__(self, lease_s: float, now: float) -> None:
        self._lease_s = lease_s
        self.heard_s = now
        self.term = 0
        self.finished = False

    def feed(self, record: AnyRecord, now: float) -> None:
        """A record of `updates` or `metrics` came. One of an earlier server than the newest is no sign of life."""
        match record:
            case Metric(source="ps"):
                term = int(record.values.get("term", 0))
            case TermStarted() | Update() | Finished():
                term = record.term
            case _:
                return
        if term < self.term:
            return
        self.term = term
        self.finished = isinstance(record, Finished)
        self.heard_s = now

    def restart(self, now: float) -> None:
        """Kafka does not answer, so nobody can be heard: the lease begins anew."""
        self.heard_s = now

    def is_over(self, now: float) -> bool:
        """Nothing was heard for the length of a lease."""
        return now - self.heard_s >= self._lease_s


class _ServerListener:
    """Hears what parameter servers write, from now on. Use it as a context manager.

    Raises:
        ServiceUnavailableError: Kafka does not answer at the start.
    """

    def __init__(self, config: JobConfig, services: Services) -> None:
        from confluent_kafka import Consumer, TopicPartition

        self._address = services.kafka
        self._names = (config.topic("updates"), config.topic("metrics"))
        self._consumer = Consumer(
            kafka_settings(
                config, services, group_id=f"doll-{config.job}-standby-{uuid.uuid4().hex[:8]}",
                enable_auto_commit=False, auto_offset_reset="latest", fetch_wait_max_ms=100,
            )
        )  # fmt: skip
        try:
            self._next_offsets = self._ends()
        except BaseException:
            self._consumer.close()
            raise
        self._consumer.assign([TopicPartition(name, 0, at) for name, at in self._next_offsets.items()])
        self.topics_empty = not any(self._next_offsets.values())  # nobody has ever served this job

    def _ends(self) -> dict[str, int]:
        return {name: topics.watermarks(self._consumer, self._address, name, 0, _PROBE_S)[1] for name in self._names}

    def listen(self, lease: LeaderLease) -> None:
        """Wait a moment for a record, and tell `lease`."""
        message = self._consumer.poll(_POLL_S)
        if message is None or message.error() is not None:
            return
        self._next_offsets[message.topic()] = int(message.offset()) + 1
        try:
            lease.feed(decode(message.value()), time.monotonic())
        except RecordError as exc:
            log.warning("record_refused", topic=message.topic(), reason=str(exc))

    def is_caught_up(self) -> bool:
        """Whether Kafka has nothing that was not heard yet.

        Raises:
            ServiceUnavailableError: Kafka does not answer.
        """
        return all(end <= self._next_offsets[name] for name, end in self._ends().items())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._consumer.close()


def wait_for_lease(config: JobConfig, services: Services, should_stop: Callable[[], bool]) -> bool:
    """Wait until the leader's lease is over (True); False when the job has finished, or `should_stop` says so.

    Raises:
        ServiceUnavailableError: Kafka does not answer at the start.
    """
    with _ServerListener(config, services) as listener:
        lease = LeaderLease(config.ps.lease_s, time.monotonic())
        log.info("standby_waiting", lease_s=config.ps.lease_s)
        while not should_stop():
            listener.listen(lease)
            if lease.finished:
                log.info("job_ended", reason="the leader has finished the job")
                return False
            if not lease.is_over(time.monotonic()):
                continue
            try:
                if listener.is_caught_up():
                    log.warning("leader_silent", term=lease.term, lease_s=config.ps.lease_s, action="taking over")
                    return True
            except ServiceUnavailableError:
                lease.restart(time.monotonic())
        return False


class LeaderCheck:
    """Finds out whether another parameter server leads, while this process still loads what it needs.

    Two servers under two supervisors would otherwise take the job from each other for ever: the one that is fenced
    ends, is started again, and fences the other. It listens in a thread of its own, so that a start after a crash,
    which loads for about as long, does not take longer. Use it as a context manager.
    """

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._config = config
        self._services = services
        self._stop = threading.Event()
        self._over = threading.Event()
        self._leader = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="leader_check", daemon=True)

    def require_no_leader(self, should_stop: Callable[[], bool]) -> bool:
        """Return when nobody leads (True), or when `should_stop` says so (False).

        Raises:
            FencedError: another parameter server leads.
            ServiceUnavailableError: Kafka does not answer.
        """
        while not self._over.wait(_POLL_S):
            if should_stop():
                return False
        if self._error is not None:
            raise self._error
        if self._leader:
            raise FencedError(
                f"another parameter server leads job {self._config.job} (term {self._leader}): expected none; start "
                "this one with --standby, so that it waits for the other's end, or with --takeover to replace the other"
            )
        return True

    def _run(self) -> None:
        try:
            self._leader = self._listen()
        except Exception as exc:  # of another thread: told where it is waited for
            self._error = exc
        finally:
            self._over.set()

    def _listen(self) -> int:
        """The term of a parameter server that is alive, 0 where nobody is."""
        with _ServerListener(self._config, self._services) as listener:
            if listener.topics_empty:
                return 0
            began_s = time.monotonic()
            silence_s = min(_SILENCE_S, self._config.ps.lease_s)
            lease = LeaderLease(silence_s, began_s)
            while not self._stop.is_set():
                listener.listen(lease)
                if lease.finished:
                    return 0
                # What comes at once may have been on its way when its sender died.
                if lease.heard_s > began_s + _IN_FLIGHT_S:
                    return lease.term
                if time.monotonic() > began_s + _IN_FLIGHT_S + silence_s and listener.is_caught_up():
                    return 0
            return 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
