"""Logging: events with fields, one line each. Configured by entry points only, never on import."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

_REPEAT_AFTER_S: Final = 30.0
_MAX_REMEMBERED: Final = 1000


def configure(level: str = "info", *, process: str = "") -> None:
    """Write the log of this process to standard error: time, level, process, event, key=value."""
    number = getattr(logging, level.upper(), logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RateLimitFilter())
    logging.basicConfig(
        level=max(number, logging.WARNING),
        handlers=[handler],
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    if process:
        structlog.contextvars.bind_contextvars(process=process)


class RateLimitFilter(logging.Filter):
    """Passes each message of a library once in 30 s: a client without its server may write 70 lines a second.

    Messages are compared by their text before values are inserted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged_at_s: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, key = self._clock(), (record.name, str(record.msg))
        if now - self._logged_at_s.get(key, float("-inf")) < _REPEAT_AFTER_S:
            return False
        if len(self._logged_at_s) >= _MAX_REMEMBERED:  # a library that formats its messages itself
            self._logged_at_s.clear()
        self._logged_at_s[key] = now
        return True


def get_logger(name: str) -> Any:
    """A logger whose calls read `log.info("event_name", field=value)`."""
    return structlog.get_logger(name)
