"""How a worker's process ends on its own account: in order if Faust allows it, within `worker.drain_s` in any case."""

from __future__ import annotations

from collections.abc import Callable

from doll.consumers.lifecycle.departure import end_within
from doll.telemetry import get_logger

log = get_logger(__name__)


class ProcessExit:
    """The first request to end decides. One event loop owns it.

    Attributes:
        code: exit code of the process; 0: the job is over, or another process has its place; 1: start it again.
        is_requested: the process is about to end.
    """

    def __init__(
        self,
        within_s: float,
        *,
        flush: Callable[[], None],
        stop: Callable[[], None],
        end_within: Callable[[float, int], None] = end_within,
    ) -> None:
        """
        Args:
            within_s: until the process is ended, whatever it is doing.
            flush: delivers what was sent.
            stop: asks for the end in order.
        """
        self.code = 0
        self.is_requested = False
        self._within_s = within_s
        self._flush = flush
        self._stop = stop
        self._end_within = end_within

    def request(self, code: int, reason: str) -> None:
        """End this process soon, with `code`."""
        if self.is_requested:
            return
        self.is_requested = True
        self.code = code
        (log.error if code else log.info)("exiting", code=code, reason=reason)
        self._flush()
        self._end_within(self._within_s, code)
        self._stop()
