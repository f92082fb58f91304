"""When the events of records happened: what is carried, what is counted, and what no wrong clock may make better."""

from __future__ import annotations

from datetime import datetime

import msgspec
import pytest
from doll.records.event_times import (
    FIRST_MS,
    GROUPS,
    NO_EVENTS,
    NO_LATENCIES,
    NO_TIME,
    EventSpan,
    EventTimes,
    event_times_of,
    header_ms,
    milliseconds,
)
from hypothesis import given
from hypothesis import strategies as st

NOW_MS = 1_800_000_000_000
TIMES = st.lists(st.integers(NOW_MS - 10**6, NOW_MS), max_size=40)


@given(TIMES)
def test_the_times_of_a_batch_are_those_of_its_records(times: list[int]) -> None:
    batch = event_times_of(times, NOW_MS, 1000)
    assert (batch.count, batch.bad) == (len(times), 0)
    if times:
        assert (batch.oldest_ms, batch.newest_ms) == (min(times), max(times))


@given(TIMES.filter(bool))
def test_no_record_counts_as_younger_than_it_is(times: list[int]) -> None:
    """And those of a small batch count as they are."""
    batch = event_times_of(times, NOW_MS, 1000)
    counted = NO_LATENCIES.with_batch(batch, NOW_MS / 1000, None, 1.0)
    true = NO_LATENCIES
    for time_ms in times:
        true = true.with_batch(EventTimes(time_ms, (0,), 1), NOW_MS / 1000, None, 1.0)
    assert counted.records == true.records == len(times)
    assert counted.sum_s >= true.sum_s - 1e-6
    for at in range(len(true.buckets)):
        assert sum(counted.buckets[:at]) <= sum(true.buckets[:at])
    if len(times) <= GROUPS:
        assert counted.buckets == true.buckets


@pytest.mark.parametrize(
    "wrong",
    [
        NO_TIME,
        NOW_MS // 1000,  # seconds
        NOW_MS * 1000,  # microseconds
        NOW_MS * 10**6,  # nanoseconds
        NOW_MS + 3 * 86_400_000,  # a clock that is three days ahead
        NOW_MS + 1001,
        FIRST_MS - 1,
        2**63 - 1,
    ],
)
def test_a_time_that_cannot_be_right_is_counted_and_makes_nothing_better(wrong: int) -> None:
    batch = event_times_of([wrong, NOW_MS - 5000], NOW_MS, 1000)
    assert batch == EventTimes(NOW_MS - 5000, (0,), 1, bad=1)
    latencies = NO_LATENCIES.with_batch(batch, NOW_MS / 1000, 5.0, 1.0)
    assert (latencies.records, latencies.within, latencies.bad) == (2, 1, 1)
    assert NO_EVENTS.with_batch(batch) == EventSpan(NOW_MS - 5000, NOW_MS - 5000, 1, 1)
    assert event_times_of([wrong], NOW_MS, 1000) == EventTimes(bad=1)


def test_a_clock_that_is_a_little_ahead_counts_as_the_present() -> None:
    assert event_times_of([NOW_MS + 900], NOW_MS, 1000) == EventTimes(NOW_MS, (0,), 1)


def test_a_clock_of_a_server_behind_the_events_is_not_fresh() -> None:
    """The worker's clock was ahead, or the server's is behind."""
    latencies = NO_LATENCIES.with_batch(EventTimes(NOW_MS, (0, 0, 0), 3), NOW_MS / 1000 - 60.0, 5.0, 1.0)
    assert (latencies.within, latencies.bad, sum(latencies.buckets), latencies.newest_ms) == (0, 3, 0, 0)
    latencies = NO_LATENCIES.with_batch(EventTimes(NOW_MS, (0, 0, 0), 3), NOW_MS / 1000 - 0.5, 5.0, 1.0)
    assert (latencies.within, latencies.bad, latencies.buckets[0]) == (3, 0, 3)


def test_the_edges_of_buckets_and_of_the_objective() -> None:
    counted = NO_LATENCIES
    for seconds in (0.0, 0.01, 5.0, 5.001, 86_400.0, 86_401.0):
        counted = counted.with_batch(EventTimes(NOW_MS, (0,), 1), NOW_MS / 1000 + seconds, 5.0, 1.0)
    assert (counted.buckets[0], counted.buckets[-1], counted.within) == (2, 1, 3)
    doubled = counted.plus(counted)
    assert (doubled.records, doubled.within, doubled.newest_ms) == (12, 6, NOW_MS)


@pytest.mark.parametrize(
    "wire",
    [
        [NOW_MS, [0], 2],  # two records, one group
        [NOW_MS, [5, 0], 2],  # not ascending
        [NOW_MS, [0] * 9, 9],
        [NOW_MS, [-1], 1],
        [NOW_MS, [], -1],
        [5, [6], 1],  # before 1970
        [2**60, [0], 1],
        [NOW_MS, [0], 1, 10**12],
        [NOW_MS, [0], 1, 0, 0],
        ["x"],
    ],
)
def test_times_from_outside_that_do_not_fit_are_refused(wire: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=EventTimes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_number_that_is_no_time_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="expected a time in s since 1970"):
        milliseconds(value, "s")


def test_a_text_needs_its_time_zone() -> None:
    with pytest.raises(ValueError, match="time zone"):
        milliseconds(datetime(2026, 11, 1), "iso8601")


def test_the_last_header_of_a_name_counts() -> None:
    headers = [("at", b"1"), ("at", b"1800000000"), ("other", b"2")]
    assert header_ms(headers, "at", "s") == NOW_MS
    assert header_ms([("at", b"2027-01-15T08:00:00Z")], "at", "iso8601") == NOW_MS
    for bad in ([], [("at", None)], [("at", b"\xff")], [("at", b"soon")]):
        with pytest.raises(ValueError):
            header_ms(bad, "at", "s")
