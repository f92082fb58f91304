"""Where a record has its event time."""

from __future__ import annotations

from typing import Any

import pytest
from doll.config.join import TimeConfig
from doll.records.event_times import NO_TIME
from doll.task.event_clock import event_clock

AT_MS = 1_800_000_000_000


class Message:
    def __init__(self, timestamp: tuple[int, int] = (1, AT_MS), headers: Any = None) -> None:
        self._timestamp, self._headers = timestamp, headers

    def key(self) -> None:
        return None

    def headers(self) -> Any:
        if isinstance(self._headers, Exception):
            raise self._headers
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return self._timestamp


def test_kafkas_timestamp_is_the_default() -> None:
    times = event_clock(TimeConfig())([Message(), Message((0, 5)), Message((2, 7)), Message((1, -1))], [None] * 4)
    assert times == [AT_MS, NO_TIME, 7, NO_TIME]


@pytest.mark.parametrize(
    ("unit", "value", "expected"),
    [
        ("ms", b'{"at": 1800000000000}', AT_MS),
        ("s", b'{"x": [1], "at": 1800000000.25}', AT_MS + 250),
        ("us", b'{"at": 1800000000000000}', AT_MS),
        ("iso8601", b'{"at": "2027-01-15T09:00:00+01:00"}', AT_MS),
        ("iso8601", b'{"at": "2027-01-15T09:00:00"}', NO_TIME),
        ("ms", b'{"at": "soon"}', NO_TIME),
        ("ms", b'{"at": null}', NO_TIME),
        ("ms", b"{}", NO_TIME),
        ("ms", b"[1]", NO_TIME),
        ("ms", b"\xff", NO_TIME),
        ("ms", b"", NO_TIME),
        ("ms", None, NO_TIME),
        ("ms", b'{"at": -5}', NO_TIME),
        ("ms", b'{"at": 1e308}', NO_TIME),
        ("ms", b'{"x": ' + b"[" * 100_000, NO_TIME),
    ],
)
def test_a_field_of_the_value(unit: Any, value: bytes | None, expected: int) -> None:
    assert event_clock(TimeConfig(field="at", unit=unit))([Message()], [value]) == [expected]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("at", b"1800000000000")], AT_MS),
        (None, NO_TIME),
        ([("other", b"1")], NO_TIME),
        ([("at", None)], NO_TIME),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "a name of a header"), NO_TIME),
    ],
)
def test_a_header(headers: Any, expected: int) -> None:
    assert event_clock(TimeConfig(header="at"))([Message(headers=headers)], [b""]) == [expected]
