"""Event times: when the events of records happened, by batch and by version, and how long it takes until they are
learned, durable and served. Pure. Event times are Unix milliseconds.

A wrong time makes no figure better: before 1971 it is in another unit, and in the future a clock is wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from operator import add
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Unit = Literal["s", "ms", "us", "ns", "iso8601"]
Stage = Literal["learned", "durable", "served"]
STAGES: Final[tuple[Stage, ...]] = ("learned", "durable", "served")
NO_TIME: Final = -1  # the record has no usable event time
GROUPS: Final = 8
FIRST_MS: Final = 31_536_000_000  # 1971-01-01
BOUNDS_S: Final = (  # of the histograms; the last bucket has no bound
    0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
    300.0, 900.0, 3600.0, 21_600.0, 86_400.0,
)  # fmt: skip
MS_PER_UNIT: Final = {"s": 1000.0, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
MAX_MS: Final = 2**53

_InBatch = Annotated[int, msgspec.Meta(ge=0, le=10**9)]  # a sum over all batches still fits 64 bits
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=MAX_MS)]


def milliseconds(value: datetime | float, unit: Unit) -> int:
    """Return a time as Unix milliseconds. Raise ValueError, which states what was expected, if it is not usable.

    >>> milliseconds(1_800_000_000.5, "s"), milliseconds(datetime.fromisoformat("2026-11-01T00:00:00Z"), "iso8601")
    (1800000000500, 1793491200000)
    """
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("expected a time zone, as in 2026-11-01T00:00:00Z")
        time_ms = value.timestamp() * 1000
    else:
        time_ms = value * MS_PER_UNIT[unit]
    if not 0 <= time_ms <= MAX_MS:
        raise ValueError(f"expected a time in {unit} since 1970, got {value}")
    return int(time_ms)


def header_ms(headers: Sequence[tuple[str, bytes | None]], name: str, unit: Unit) -> int:
    """Return the time in the last header of this name, as `milliseconds`."""
    text = next((value or b"" for other, value in reversed(headers) if other == name), b"").decode()
    return milliseconds(datetime.fromisoformat(text) if unit == "iso8601" else float(text), unit)


class EventTimes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, omit_defaults=True):
    """The event times of the records of one batch.

    In the order of their times, the records are divided into at most `GROUPS` groups of about the same size. Each
    record counts with the oldest one of its group.

    Attributes:
        newest_ms: the newest event time; 0 without records.
        ages_ms: for each group, the newest first: how much older than `newest_ms` its oldest record is.
        count: number of records with a usable time.
        bad: number of the others: without a time, or with one in another unit or in the future.
    """

    newest_ms: _Milliseconds = 0
    ages_ms: Annotated[tuple[_Milliseconds, ...], msgspec.Meta(max_length=GROUPS)] = ()
    count: _InBatch = 0
    bad: _InBatch = 0

    def __post_init__(self) -> None:
        ages = self.ages_ms
        if len(ages) != min(self.count, GROUPS) or any(before > after for before, after in pairwise(ages)):
            raise ValueError(f"expected ascending ages of {min(self.count, GROUPS)} groups, got {ages}")
        if ages and ages[-1] > self.newest_ms:
            raise ValueError(f"expected ages of at most {self.newest_ms} ms, got {ages[-1]}")

    @property
    def oldest_ms(self) -> int:
        return self.newest_ms - (self.ages_ms[-1] if self.ages_ms else 0)


def event_times_of(times_ms: Sequence[int] | npt.NDArray[np.int64], now_ms: int, max_ahead_ms: int) -> EventTimes:
    """Return the event times of the records of a batch. `NO_TIME`: a record without a usable one.

    Args:
        now_ms: the time at which the records are here. Clocks may differ by `max_ahead_ms`: a time that is this far in
            the future is taken for `now_ms`.
    """
    times = np.asarray(times_ms, np.int64)
    good = times[(times >= FIRST_MS) & (times <= now_ms + max_ahead_ms)]
    count, groups = len(good), min(len(good), GROUPS)
    if not count:
        return EventTimes(bad=len(times))
    newest_first = -np.sort(-np.minimum(good, max(now_ms, FIRST_MS)))
    ages_ms = newest_first[0] - newest_first[[_until(count, groups, at) - 1 for at in range(groups)]]
    return EventTimes(int(newest_first[0]), tuple(ages_ms.tolist()), count, len(times) - count)


def _until(count: int, groups: int, at: int) -> int:
    """Return how many of `count` records are in the groups up to number `at`."""
    return count * (at + 1) // groups


class EventSpan(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The event times of all records in a version. `oldest_ms` and `newest_ms` are 0 while `count` is 0; the other
    fields are as in `EventTimes`."""

    oldest_ms: int = 0
    newest_ms: int = 0
    count: int = 0
    bad: int = 0

    def with_batch(self, times: EventTimes) -> EventSpan:
        """Return the span with the records of one more batch."""
        oldest_ms = min(self.oldest_ms or times.oldest_ms, times.oldest_ms or self.oldest_ms)
        newest_ms = max(self.newest_ms, times.newest_ms)
        return EventSpan(oldest_ms, newest_ms, self.count + times.count, self.bad + times.bad)


NO_EVENTS: Final = EventSpan()


class LatencyCounts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A histogram of the time from the event until a stage.

    Attributes:
        buckets: number of records by `BOUNDS_S`.
        within: number of records within the objective of the job.
        bad: number of records without a usable event time, which are in no bucket and not within.
        newest_ms: newest event time that has reached the stage; 0: none.
    """

    buckets: Annotated[tuple[_Count, ...], msgspec.Meta(min_length=len(BOUNDS_S) + 1, max_length=len(BOUNDS_S) + 1)]
    sum_s: float = 0.0
    within: _Count = 0
    bad: _Count = 0
    newest_ms: _Milliseconds = 0

    @property
    def records(self) -> int:
        return sum(self.buckets) + self.bad

    def plus(self, other: LatencyCounts) -> LatencyCounts:
        return LatencyCounts(
            tuple(map(add, self.buckets, other.buckets)), self.sum_s + other.sum_s, self.within + other.within,
            self.bad + other.bad, max(self.newest_ms, other.newest_ms),
        )  # fmt: skip

    def with_batch(self, times: EventTimes, at_s: float, limit_s: float | None, max_ahead_s: float) -> LatencyCounts:
        """Return the histogram with the records of a batch that reach the stage at Unix `at_s`. `limit_s`: the
        objective. An event that is more than `max_ahead_s` after `at_s` has a wrong clock, and counts as bad."""
        buckets, sum_s, newest_ms = list(self.buckets), self.sum_s, self.newest_ms
        within, bad, groups = self.within, self.bad + times.bad, len(times.ages_ms)
        for at, age_ms in enumerate(times.ages_ms):
            count = _until(times.count, groups, at) - _until(times.count, groups, at - 1)
            time_ms = times.newest_ms - age_ms
            seconds = at_s - time_ms / 1000
            if seconds < -max_ahead_s:
                bad += count
                continue
            newest_ms, seconds = max(newest_ms, time_ms), max(0.0, seconds)
            buckets[bisect_left(BOUNDS_S, seconds)] += count
            sum_s += count * seconds
            within += count if limit_s is not None and seconds <= limit_s else 0
        return LatencyCounts(tuple(buckets), sum_s, within, bad, newest_ms)


NO_LATENCIES: Final = LatencyCounts((0,) * (len(BOUNDS_S) + 1))
