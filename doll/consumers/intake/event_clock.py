"""Reads the event times of records, as the job file names them (`freshness.time`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from doll.config.join import TimeConfig
from doll.records.event_times import NO_TIME, milliseconds, parsed_time
from doll.task.records import Envelope


class EventClock:
    """Reads event times. Not thread-safe."""

    def __init__(self, section: TimeConfig) -> None:
        self._unit = section.unit
        self._header = section.header
        self._decode: Callable[[bytes], Any] | None = None
        if section.field is not None:
            kind = datetime if section.unit == "iso8601" else float
            fields = msgspec.defstruct("Fields", [("time", kind)], rename={"time": section.field})
            self._decode = msgspec.json.Decoder(fields).decode

    def times_ms(self, records: Sequence[Envelope], values: Sequence[bytes | None]) -> list[int]:
        """Return the event time of each record, in Unix milliseconds; `NO_TIME` if it has none that can be read."""
        if self._decode is not None:
            return [self._of_value(value) for value in values]
        if self._header is not None:
            return list(map(self._of_headers, records))
        return [stamp_ms if kind else NO_TIME for kind, stamp_ms in (record.timestamp() for record in records)]

    def _of_value(self, value: bytes | None) -> int:
        assert self._decode is not None
        try:
            return milliseconds(self._decode(value or b"").time, self._unit)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
            return NO_TIME

    def _of_headers(self, record: Envelope) -> int:
        try:
            values = [value for name, value in record.headers() or () if name == self._header]
            return milliseconds(parsed_time(values[-1].decode(), self._unit), self._unit) if values else NO_TIME
        except Exception:  # the client cannot read some headers; a missing value is None
            return NO_TIME
