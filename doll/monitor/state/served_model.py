"""The readings of a model server over time: versions that answer, requests, and how long they took. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from doll.monitor.state.thinned import Thinned

MAX_POINTS: Final = 480


@dataclass(frozen=True)
class Reading:
    """Its metrics at one time.

    Attributes:
        at_s: monotonic seconds.
        versions: that answer, of each process.
        requests: by status, since its start.
        buckets: (upper bound in seconds, requests that took no longer), since its start, rising.
        age_s, samples_behind, waiting: the most of all processes.
        is_stale: a newer version may not have been seen by one of them.
        swaps: versions that took the place of another one, since its start.
        unlogged: answers that Kafka has not taken (`--log-answers`), since its start.
    """

    at_s: float
    versions: Sequence[int]
    requests: Mapping[str, float]
    buckets: Sequence[tuple[float, float]]
    age_s: float
    samples_behind: float
    waiting: float
    is_stale: bool
    swaps: float
    unlogged: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.requests.values())


class Interval(NamedTuple):
    """The time between two readings; a latency is NaN without requests."""

    at_s: float  # since the first reading
    per_s: float
    median_s: float
    p99_s: float


@dataclass
class ServedModel:
    """The readings of one model server.

    Attributes:
        newest: None before the first.
        last: the newest interval in which something was asked.
        problem: why there is no newer reading; "" if there is.
    """

    newest: Reading | None = None
    last: Interval | None = None
    problem: str = ""
    _begun_s: float = math.nan
    _intervals: Thinned[Interval] = field(default_factory=lambda: Thinned[Interval](MAX_POINTS))

    @property
    def intervals(self) -> Mapping[int, Interval]:
        """Intervals by their number, thinned out."""
        return self._intervals.points

    def add(self, reading: Reading) -> None:
        """The next one; a server that has begun again counts from 0."""
        before, self.newest, self.problem = self.newest, reading, ""
        if before is None:
            self._begun_s = reading.at_s
            return
        is_new = reading.total < before.total
        earlier = {} if is_new else dict(before.buckets)
        counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in reading.buckets]
        asked = reading.total - (0.0 if is_new else before.total)
        interval = Interval(
            reading.at_s - self._begun_s, asked / max(1e-9, reading.at_s - before.at_s),
            quantile(counts, 0.5), quantile(counts, 0.99),
        )  # fmt: skip
        self._intervals.add(interval)
        if asked:
            self.last = interval


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """The quantile of a histogram as Prometheus computes it: evenly spread within a bucket. NaN of an empty one.

    >>> quantile([(0.1, 50.0), (0.2, 100.0)], 0.75)
    0.15000000000000002
    """
    if not buckets or not buckets[-1][1]:
        return math.nan
    wanted = share * buckets[-1][1]
    for (low, below), (high, count) in pairwise([(0.0, 0.0), *buckets]):
        if count >= wanted:
            return low if math.isinf(high) else low + (high - low) * (wanted - below) / (count - below)
    return math.nan
