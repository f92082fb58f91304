"""Write the log: events with fields, one line each. Only entry points configure the log, never an import."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Final, Literal, TextIO, cast

import msgspec
import structlog

from doll.redaction import redacted

LogFormat = Literal["console", "json"]

_REPEAT_AFTER_S: Final = 30.0
_MAX_REMEMBERED: Final = 1000
_FIRST_KEYS: Final = ("time", "level", "process", "event")  # first keys of a JSON line
_HANDLER: Final = "doll"

_Event = MutableMapping[str, Any]


def configure(log_format: LogFormat = "console", *, process: str = "", stream: TextIO | None = None) -> None:
    """Write the log of this process and the warnings of libraries to `stream`, both in the same format.

    Each line has the time in UTC (ISO 8601), the level, the event, the process and the fields. The console format has
    colours if the stream is a terminal and NO_COLOR is not set; otherwise it has no control sequences.

    Args:
        process: name of this process, which each line contains.
        stream: the stream to write to. Default: `sys.stderr`, looked up each time a line is written.
    """
    out: TextIO = cast(TextIO, _StandardError()) if stream is None else stream

    def add_process(_logger: Any, _method: str, event: _Event) -> _Event:
        if process:
            event.setdefault("process", process)
        return event

    shared: list[Any] = [
        structlog.processors.add_log_level,
        add_process,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    finish: list[Any] = [structlog.processors.format_exc_info, _escape, _renderer(log_format, out)]
    structlog.configure(
        processors=[*shared, *finish],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )

    handler = logging.StreamHandler(out)
    handler.name = _HANDLER
    handler.addFilter(RateLimitFilter())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *finish],
        )
    )
    root = logging.getLogger()
    root.handlers = [*(other for other in root.handlers if other.name != _HANDLER), handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)


class _StandardError:
    """A stream that writes to the current `sys.stderr`, which a test or a fork may replace."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


def _renderer(log_format: LogFormat, out: TextIO) -> Any:
    if log_format == "json":
        return _render_json
    return structlog.dev.ConsoleRenderer(
        colors=_has_colors(out),
        pad_event_to=0,
        timestamp_key="time",
        exception_formatter=structlog.dev.plain_traceback,
    )


def _has_colors(out: TextIO) -> bool:
    """Return whether `out` can show colours and the user has not disabled colours (https://no-color.org)."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _render_json(_logger: Any, _method: str, event: _Event) -> str:
    ordered = {key: event.pop(key) for key in _FIRST_KEYS if key in event} | dict(event)
    try:
        return msgspec.json.encode(ordered, enc_hook=repr).decode()  # NaN is null
    except (TypeError, ValueError):  # a key that is no string, half of a surrogate pair
        return json.dumps({str(key): repr(value) for key, value in ordered.items()})


def _escape(_logger: Any, _method: str, event: _Event) -> _Event:
    """Escape control characters and hide credentials of URLs. Values come from records and libraries: they could
    control a terminal, or begin a line that looks like another log line."""
    for key, value in event.items():
        if isinstance(value, Exception):
            value = str(value)
        if isinstance(value, str):
            value = redacted(value)
            event[key] = value if value.isprintable() else _printable(value, keep="\n" if key == "exception" else "")
    return event


def _printable(text: str, keep: Iterable[str]) -> str:
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


class RateLimitFilter(logging.Filter):
    """A filter that passes each message of a library once in 30 s, because a client without a server may log 70/s.

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
    """Return a logger with calls such as `log.info("event_name", field=value)`."""
    return structlog.get_logger(name)
