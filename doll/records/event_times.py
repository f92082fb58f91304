"""Event times: when the events of records happened, by batch and by version, and how long it takes until they are
learned, durable and served. Pure. Event times are Unix milliseconds.

A time that cannot be right is counted and left out, so that it makes no figure better: before 1971 it is in another
unit (a time in seconds, read as milliseconds, is in January 1970), and in the future a clock is wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
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
BOUNDS_S: Final = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
    300.0, 900.0, 3600.0, 21_600.0, 86_400.0,
)  # fmt: skip
"""The upper bounds of the histograms' buckets. The last bucket has no bound."""
_MS_PER_UNIT: Final = {"s": 1000.0, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
_MAX_MS: Final = 2**53

_InBatch = Annotated[int, msgspec.Meta(ge=0, le=10**9)]  # a sum over all batches still fits 64 bits
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=_MAX_MS)]


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
        time_ms = value * _MS_PER_UNIT[unit]
    if not 0 <= time_ms <= _MAX_MS:
        raise ValueError(f"expected a time in {unit} since 1970, got {value}")
    return int(time_ms)


def parsed_time(text: str, unit: Unit) -> datetime | float:
    """Return the time that a text such as the value of a header has. Raise ValueError if it has none."""
    return datetime.fromisoformat(text) if unit == "iso8601" else float(text)


class EventTimes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, omit_defaults=True):
    """The event times of the records of one batch.

    In the order of their times, the records are divided into at most `GROUPS` groups of the same size (to one record).
    The groups are exact for up to `GROUPS` records; in larger ones, each record counts with the oldest of its group.

    Attributes:
        newest_ms: the newest event time; 0 without records.
        ages_ms: for each group, the newest first: how much older than `newest_ms` its oldest record is.
        count: number of records with a usable time.
        untimed: number of other records, without a time or with one in another unit.
        ahead: number of records whose time is in the future.
    """

    newest_ms: _Milliseconds = 0
    ages_ms: Annotated[tuple[_Milliseconds, ...], msgspec.Meta(max_length=GROUPS)] = ()
    count: _InBatch = 0
    untimed: _InBatch = 0
    ahead: _InBatch = 0

    def __post_init__(self) -> None:
        ages = self.ages_ms
        if len(ages) != min(self.count, GROUPS) or any(before > after for before, after in pairwise(ages)):
            raise ValueError(f"expected ascending ages of {min(self.count, GROUPS)} groups, got {ages}")
        if ages and ages[-1] > self.newest_ms:
            raise ValueError(f"expected ages of at most {self.newest_ms} ms, got {ages[-1]}")

    @property
    def oldest_ms(self) -> int:
        return self.newest_ms - (self.ages_ms[-1] if self.ages_ms else 0)

    @property
    def sizes(self) -> list[int]:
        """The number of records of each group."""
        groups = len(self.ages_ms)
        return [self.count * (at + 1) // groups - self.count * at // groups for at in range(groups)]


def event_times_of(times_ms: Sequence[int] | npt.NDArray[np.int64], now_ms: int, max_ahead_ms: int) -> EventTimes:
    """Return the event times of the records of a batch. `NO_TIME`: a record without a usable one.

    Args:
        now_ms: the time at which the records are here. Clocks may differ by `max_ahead_ms`: a time that is this far in
            the future is taken for `now_ms`.
    """
    times = np.asarray(times_ms, np.int64)
    is_untimed, is_ahead = times < FIRST_MS, times > now_ms + max_ahead_ms
    good = times[~(is_untimed | is_ahead)]
    untimed, ahead, count = int(is_untimed.sum()), int(is_ahead.sum()), len(good)
    if not count:
        return EventTimes(untimed=untimed, ahead=ahead)
    newest_first = -np.sort(-np.minimum(good, max(now_ms, FIRST_MS)))
    groups = min(count, GROUPS)
    last = [count * (at + 1) // groups - 1 for at in range(groups)]
    newest = int(newest_first[0])
    return EventTimes(newest, tuple((newest - newest_first[last]).tolist()), count, untimed, ahead)


class EventSpan(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The event times of all records in a version.

    Attributes:
        oldest_ms, newest_ms: 0 while `count` is 0.
        count: number of records with a usable time.
        untimed, ahead: as in `EventTimes`; batches of earlier releases count as untimed.
    """

    oldest_ms: int = 0
    newest_ms: int = 0
    count: int = 0
    untimed: int = 0
    ahead: int = 0

    def with_batch(self, times: EventTimes) -> EventSpan:
        """Return the span with the records of one more batch."""
        oldest, newest = self.oldest_ms, self.newest_ms
        if times.count:
            oldest = min(oldest, times.oldest_ms) if self.count else times.oldest_ms
            newest = max(newest, times.newest_ms)
        return EventSpan(
            oldest, newest, self.count + times.count, self.untimed + times.untimed, self.ahead + times.ahead
        )


NO_EVENTS: Final = EventSpan()


class LatencyCounts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A histogram of the time from the event until a stage.

    Attributes:
        buckets: number of records by `BOUNDS_S`.
        sum_s: sum of their times.
        within: number of records within the time that the job file sets for the stage.
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
        """The number of records that have reached the stage, with those without a usable event time."""
        return sum(self.buckets) + self.bad

    def plus(self, other: LatencyCounts) -> LatencyCounts:
        return LatencyCounts(
            tuple(a + b for a, b in zip(self.buckets, other.buckets, strict=True)), self.sum_s + other.sum_s,
            self.within + other.within, self.bad + other.bad, max(self.newest_ms, other.newest_ms),
        )  # fmt: skip


NO_LATENCIES: Final = LatencyCounts((0,) * (len(BOUNDS_S) + 1))


class Latencies:
    """Counts the time from events until one stage.

    Args:
        limit_s: the time within which records should reach the stage. None: no such time is set.
        max_ahead_s: an event that reaches the stage so long before it happens has a wrong clock; it counts as bad.
    """

    def __init__(self, limit_s: float | None, max_ahead_s: float) -> None:
        self._limit_s, self._max_ahead_s = limit_s, max_ahead_s
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._within = self._bad = self._newest_ms = 0

    def add(self, times: EventTimes, at_s: float) -> None:
        """Count the records of a batch that reach the stage at Unix `at_s`."""
        self._bad += times.untimed + times.ahead
        for age_ms, count in zip(times.ages_ms, times.sizes, strict=True):
            time_ms = times.newest_ms - age_ms
            seconds = at_s - time_ms / 1000
            if seconds < -self._max_ahead_s:
                self._bad += count
                continue
            seconds = max(0.0, seconds)
            self._newest_ms = max(self._newest_ms, time_ms)
            self._buckets[bisect_left(BOUNDS_S, seconds)] += count
            self._sum_s += count * seconds
            if self._limit_s is not None and seconds <= self._limit_s:
                self._within += count

    def counts(self) -> LatencyCounts:
        return LatencyCounts(tuple(self._buckets), self._sum_s, self._within, self._bad, self._newest_ms)
