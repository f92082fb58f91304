"""A standby parameter server. It has loaded everything, and takes over when the leader's lease ends.

The leader's heartbeat consists of records that it writes anyway: `ServerStatus` once a second, and updates. Silence
does not prove that the leader has failed: it may be frozen or cut off. Therefore the standby claims the next term in
the checkpoint store. After the claim, the old leader cannot save checkpoints. A leader that paused for longer than the
lease checks the store for a newer term before it does anything else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Self

from doll.config import JobConfig
from doll.errors import FencedError, ServiceUnavailableError
from doll.kafka.reader import Partition, Reader, from_end
from doll.records.control import AnyRecord, Finished, ServerStatus, TermStarted, Update
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

_POLL_S: Final = 0.2
_LOOKUP_S: Final = 2.0
_SILENCE_S: Final = 3.0  # a leader writes its status each second
_IN_FLIGHT_S: Final = 0.5


class LeaderLease:
    """The end of a leader's lease. Pure: `now` is any monotonic time in seconds.

    Attributes:
        term: term of the newest leader; 0: no leader has written anything yet.
        renewed_s: time of the leader's last record; before the first record, the time at which this lease began.
        finished: True if the leader has finished the job.
    """

    def __init__(self, lease_s: float, now: float) -> None:
        self._lease_s = lease_s
        self.renewed_s = now
        self.term = 0
        self.finished = False

    def feed(self, record: AnyRecord, now: float) -> None:
        """Process a record of `updates` or `metrics`. Only records of the newest server count."""
        if not isinstance(record, ServerStatus | TermStarted | Update | Finished) or record.term < self.term:
            return
        self.term = record.term
        self.finished = isinstance(record, Finished)
        self.renewed_s = now

    def restart(self, now: float) -> None:
        """Begin the lease again. This is needed while Kafka does not answer, because no leader can renew its lease."""
        self.renewed_s = now

    def is_over(self, now: float) -> bool:
        """Return whether the leader has written nothing for the length of a lease."""
        return now - self.renewed_s >= self._lease_s


def _server_records(config: JobConfig, services: Services) -> Reader:
    """Return a reader of the records that parameter servers write from now on. Raises ServiceUnavailableError if Kafka
    does not answer."""
    topics = [Partition(config.topic(kind)) for kind in ("updates", "metrics")]
    return Reader(config, services, "standby", topics, from_end, lookup_timeout_s=_LOOKUP_S)


def _listen(reader: Reader, lease: LeaderLease) -> None:
    """Wait a moment for records, and feed them to `lease`."""
    for timed in reader.poll(_POLL_S):
        lease.feed(timed.record, time.monotonic())


def wait_for_lease(config: JobConfig, services: Services, should_stop: Callable[[], bool]) -> bool:
    """Wait until the leader's lease is over, and return True. Return False if before this the job finishes or
    `should_stop` returns True. Raises ServiceUnavailableError if Kafka does not answer at the start."""
    with _server_records(config, services) as reader:
        lease = LeaderLease(config.ps.lease_s, time.monotonic())
        log.info("standby_waiting", lease_s=config.ps.lease_s)
        while not should_stop():
            _listen(reader, lease)
            if lease.finished:
                log.info("job_ended", reason="the leader has finished the job")
                return False
            if not lease.is_over(time.monotonic()):
                continue
            try:
                if reader.is_caught_up():
                    log.warning("leader_silent", term=lease.term, lease_s=config.ps.lease_s, action="taking over")
                    return True
            except ServiceUnavailableError:
                lease.restart(time.monotonic())
        return False


class LeaderCheck:
    """Checks whether another parameter server leads, while this process loads its model. A context manager.

    Without this check, two servers under two supervisors would fence each other endlessly: a fenced server ends, is
    restarted by its supervisor, and fences the other one.
    """

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._config = config
        self._services = services
        self._stop = threading.Event()
        self._done = threading.Event()
        self._leader = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="leader_check", daemon=True)

    def require_no_leader(self, should_stop: Callable[[], bool]) -> bool:
        """Wait for the result of the check. Return True if no server leads; False if `should_stop` does so earlier.
        Raises FencedError if another parameter server leads, and ServiceUnavailableError if Kafka does not answer."""
        while not self._done.wait(_POLL_S):
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
        except Exception as exc:  # raised in the thread that waits for the result
            self._error = exc
        finally:
            self._done.set()

    def _listen(self) -> int:
        """Return the term of a live parameter server; 0 if there is none."""
        with _server_records(self._config, self._services) as reader:
            if not any(reader.ends.values()):  # no server has ever served this job
                return 0
            began_s = time.monotonic()
            silence_s = min(_SILENCE_S, self._config.ps.lease_s)
            lease = LeaderLease(silence_s, began_s)
            while not self._stop.is_set():
                _listen(reader, lease)
                if lease.finished:
                    return 0
                # A record that arrives at once may have been sent before its sender died.
                if lease.renewed_s > began_s + _IN_FLIGHT_S:
                    return lease.term
                if time.monotonic() > began_s + _IN_FLIGHT_S + silence_s and reader.is_caught_up():
                    return 0
            return 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
