"""A library that repeats itself while a service is away fills no log."""

from __future__ import annotations

import logging

from doll.telemetry import RateLimitFilter


def record(message: str, *values: object, name: str = "aiokafka") -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, "a.py", 1, message, values, None)


def test_a_message_is_let_through_once_in_30_seconds() -> None:
    now = 100.0
    once = RateLimitFilter(clock=lambda: now)
    passed: list[bool | logging.LogRecord] = []
    for _ in range(61):
        passed.append(once.filter(record("cannot connect to node %s", passed)))
        now += 0.5
    assert [i for i, let in enumerate(passed) if let] == [0, 60]


def test_other_messages_and_other_libraries_are_not_held_back() -> None:
    once = RateLimitFilter(clock=lambda: 0.0)
    assert once.filter(record("a %s", 1))
    assert not once.filter(record("a %s", 2))
    assert once.filter(record("b"))
    assert once.filter(record("a %s", 1, name="redis"))


def test_it_remembers_so_many_messages_and_no_more() -> None:
    once = RateLimitFilter(clock=lambda: 0.0)
    assert all(once.filter(record(f"request {i} failed")) for i in range(5000))
    assert len(once._logged_at_s) <= 1000
