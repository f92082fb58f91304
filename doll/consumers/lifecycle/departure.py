"""The time and the cause of this process's departure: SIGTERM, a spot notice and other causes are reported here.

Code that learns of a cause calls `leave_within`, in any thread. The worker then announces nothing more, finishes the
gradient that it owes or returns its batch, sends Leave and exits. In any case, the process ends before its time is
over, because the machine will not wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from doll.telemetry import get_logger

log = get_logger(__name__)

# Subtracted from the remaining time: the process must end before its machine does.
MARGIN_S = 0.25


def end_within(seconds: float, code: int) -> None:
    """End this process with exit code `code` after `seconds` in any case."""
    timer = threading.Timer(seconds, os._exit, args=(code,))
    timer.daemon = True
    timer.start()


class Departure:
    """The state of this process's departure: whether, when and why. Any thread and any signal handler may use it."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        end_within: Callable[[float, int], None] = end_within,
    ) -> None:
        self._clock = clock
        self._end_within = end_within
        self._lock = threading.RLock()  # a signal handler may run while the same thread holds the lock
        self.by_s: float | None = None  # time on `clock` at which it must have ended; None: it stays
        self.cause = ""  # cause, as in its Leave: `sigterm`, `notice`

    def leave_within(self, seconds: float, cause: str) -> None:
        """End this process within `seconds` from now. The earliest of several times counts."""
        at_s = self._clock() + seconds
        with self._lock:
            if self.by_s is not None and self.by_s <= at_s:
                return
            self.by_s, self.cause = at_s, cause
        self._end_within(max(0.0, at_s - self._clock() - MARGIN_S), 0)

    def left_s(self) -> float:
        return float("inf") if self.by_s is None else self.by_s - self._clock()

    def __call__(self) -> bool:
        """Return whether the process must leave."""
        return self.by_s is not None


class ProcessExit:
    """The end of this process by its own decision: orderly if Faust allows it, and within `worker.drain_s` in any case.

    Only the first request counts. The object belongs to one event loop.
    """

    def __init__(
        self,
        within_s: float,
        *,
        flush: Callable[[], None],
        stop: Callable[[], None],
        end_within: Callable[[float, int], None] = end_within,
    ) -> None:
        """Create the object. After `within_s` seconds, the process is ended in any case. `flush` delivers the sent
        records. `stop` requests the orderly end."""
        self.code = 0  # 0: the job is over, or another process has taken its place; 1: start it again
        self.is_requested = False
        self._within_s = within_s
        self._flush = flush
        self._stop = stop
        self._end_within = end_within

    def request(self, code: int, reason: str) -> None:
        if self.is_requested:
            return
        self.is_requested = True
        self.code = code
        (log.error if code else log.info)("exiting", code=code, reason=reason)
        self._flush()
        self._end_within(self._within_s, code)
        self._stop()
