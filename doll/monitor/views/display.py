"""The progress of a job on standard error: a live panel on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from doll.config import StopConfig
from doll.monitor.state.progress import JobSnapshot
from doll.monitor.views.live_display import LiveDisplay
from doll.monitor.views.text import one_line

LINE_EVERY_S = 5.0


class Display(Protocol):
    """Shows the progress of a job. `say` prints a message; `show` may be called often, and draws when it is time."""

    def say(self, text: str) -> None: ...
    def show(self, snapshot: Callable[[], JobSnapshot]) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_display(stop: StopConfig) -> Display:
    """A live panel if standard error is a terminal, else plain lines."""
    return LiveDisplay(stop) if sys.stderr.isatty() else LineDisplay(stop)


class LineDisplay:
    """One line per message and per `LINE_EVERY_S`."""

    def __init__(self, stop: StopConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop = stop
        self._clock = clock
        self._started_s = clock()
        self._next_s = 0.0

    def say(self, text: str) -> None:
        seconds = self._clock() - self._started_s
        for line in text.splitlines():
            sys.stderr.write(f"[{seconds:6.1f} s] {line}\n")
        sys.stderr.flush()

    def show(self, snapshot: Callable[[], JobSnapshot]) -> None:
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + LINE_EVERY_S
            self.say(one_line(snapshot(), self._stop))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
