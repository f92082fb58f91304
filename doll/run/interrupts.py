"""SIGINT and SIGTERM for a command that starts processes: at once while it sets up, in order once it runs."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context manager for the main thread.

    Attributes:
        graceful: while False, a signal raises `KeyboardInterrupt`. While True, only the second one does; the first sets
            `stop_requested`.
        stop_requested: somebody wants the command to end.
    """

    def __init__(self) -> None:
        self.graceful = False
        self.stop_requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._came) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _came(self, number: int, frame: FrameType | None) -> None:
        again, self.stop_requested = self.stop_requested, True
        if again or not self.graceful:
            raise KeyboardInterrupt
