"""The readings of a model server over time: versions that answer, requests, and response times. Pure."""

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
    """The metrics of a model server at one time.

    Attributes:
        at_s: monotonic seconds.
        versions: the version that answers, for each process.
        requests: number of requests by status, since the start of the server.
        buckets: (upper bound in seconds, number of requests within this time) since the start, in ascending order.
        age_s, samples_behind, waiting: the maximum over all processes.
        is_stale: whether a process may have missed a newer version.
        swaps: number of replaced versions, since the start.
        unlogged: number of answers that Kafka did not accept (`--log-answers`), since the start.
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
        newest: the newest reading; None before the first one.
        last: the newest interval with requests.
        problem: reason why there is no newer reading; "" if there is one.
    """

    newest: Reading | None = None
    last: Interval | None = None
    problem: str = ""
    _begun_s: float = math.nan
    _intervals: Thinned[Interval] = field(default_factory=lambda: Thinned[Interval](MAX_POINTS))

    @property
    def intervals(self) -> Mapping[int, Interval]:
        """The intervals by their number, thinned out."""
        return self._intervals.points

    def add(self, reading: Reading) -> None:
        """Add the next reading. The counters of a restarted server begin at 0."""
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
    """Return the quantile of a histogram as Prometheus does: evenly distributed within a bucket; NaN if it is empty.

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
