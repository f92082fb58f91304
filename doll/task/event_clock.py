"""Reads the event times of records, as the job file names them (`freshness.time`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from doll.config.join import TimeConfig
from doll.records.event_times import NO_TIME, header_ms, milliseconds
from doll.task.records import Envelope


def event_clock(section: TimeConfig) -> Callable[[Sequence[Envelope], Sequence[bytes | None]], list[int]]:
    """Return a function that takes records and their values, and returns the event time of each in Unix milliseconds;
    `NO_TIME` if it has none that can be read."""
    unit, field, header = section.unit, section.field, section.header
    kind = datetime if unit == "iso8601" else float
    fields: Any = msgspec.defstruct("Fields", [("time", kind)], rename={"time": field or ""})
    decode = msgspec.json.Decoder(fields).decode

    def read(record: Envelope, value: bytes | None) -> int:
        try:
            if header is not None:
                return header_ms(record.headers() or (), header, unit)
            return milliseconds(decode(value or b"").time, unit)
        except Exception:  # bytes from outside; also headers that the client cannot read
            return NO_TIME

    def times_ms(records: Sequence[Envelope], values: Sequence[bytes | None]) -> list[int]:
        if field is None and header is None:
            return [stamp_ms if kind else NO_TIME for kind, stamp_ms in (record.timestamp() for record in records)]
        return list(map(read, records, values))

    return times_ms
