"""SIGTERM and SIGINT, for processes that check an event and for commands that start processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_came: set[int] = set()


def on_signal(number: int, action: Callable[[], object]) -> Any:
    """Call `action` at each signal of this number; only in the main thread. Return the earlier handler."""

    def handle(number: int, frame: FrameType | None) -> None:
        note(number)
        action()

    return signal.signal(number, handle)


def note(number: int) -> None:
    """Record that a signal of this number has arrived and is handled elsewhere."""
    _came.add(number)


def was_terminated() -> bool:
    """Return whether this process has received a SIGTERM and handled it."""
    return signal.SIGTERM in _came


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM or SIGINT sets. Only the main thread handles signals: in other threads, the event is
    never set.

    The earlier handlers are restored at the end.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: on_signal(number, stop.set) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupts:
    """A context manager for the main thread that handles SIGINT and SIGTERM for a command that starts processes.

    Attributes:
        graceful: False: a signal raises `KeyboardInterrupt`. True: the first signal sets `stop_requested`, the second
            one raises.
        stop_requested: event that is set after a signal has arrived.
    """

    def __init__(self) -> None:
        self.graceful = False
        self.stop_requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._before = {number: on_signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds` and return True. If a stop is requested, stop waiting and return False."""
        end_s = time.monotonic() + seconds
        while not self.stop_requested and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.2))
        return not self.stop_requested

    def _handle(self) -> None:
        repeated, self.stop_requested = self.stop_requested, True
        if repeated or not self.graceful:
            raise KeyboardInterrupt
