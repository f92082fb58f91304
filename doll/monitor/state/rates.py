"""Theoretical and measured update rates, and the stability margin.

Source: the DOLL paper, Eq. (1) and Proposition 1. Symbols: λ_A arrivals at one worker (samples/s), b batch size, K
group size, C time from a granted batch to its stored gradient (s).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.theory.queueing import Stability, stability

# The start-up differs from the steady state: connections, first weights, cold caches.
DROP_FRACTION = 0.1
DROP_S = 3.0
RATE_WINDOW_S: Final = 30.0
_GAPS: Final = 2_000  # last gaps between updates, from which the remaining time is estimated


def steady_update_rate(
    times_s: Sequence[float] | npt.NDArray[np.float64], drop_fraction: float = DROP_FRACTION, drop_s: float = DROP_S
) -> float:
    """Return the updates per second in the steady part of a run; NaN with fewer than two updates there.

    The start of the run is excluded: `drop_fraction` of the run or `drop_s`, whichever is longer, but at most half of
    the run. n updates have n - 1 gaps between them, so the rate is (n - 1) / (last - first).

    Args:
        times_s: completion time of each update, seconds, in order.

    >>> steady_update_rate([0.0, 0.5, 1.0, 1.5, 2.0], drop_s=0.0, drop_fraction=0.0)
    2.0
    """
    # As an array, for speed: called several times per second, with up to 100,000 updates.
    times = np.asarray(times_s, dtype=np.float64)
    if len(times) < 2:
        return math.nan
    span = float(times[-1] - times[0])
    start = float(times[0]) + min(max(drop_fraction * span, drop_s), 0.5 * span)
    steady = times[times >= start]
    if len(steady) < 2 or steady[-1] <= steady[0]:
        return math.nan
    return float((len(steady) - 1) / (steady[-1] - steady[0]))


def remaining_sd_s(times_s: npt.NDArray[np.float64], updates_left: float) -> float:
    """Return the standard deviation of the seconds for `updates_left` more updates; NaN if no rate is known yet.

    The gaps between updates are treated as independent, with variance s². The sum of the next n gaps has the variance n
    s². The mean of the m measured gaps is not exact, which adds n² s²/m. The variance is therefore s² (n + n²/m).
    """
    gaps = np.diff(times_s[-_GAPS:])
    if len(gaps) < 2 or not updates_left >= 0:
        return math.nan
    return float(np.std(gaps, ddof=1)) * math.sqrt(updates_left + updates_left**2 / len(gaps))


def stability_margin(rates_per_s: Sequence[float], batch_size: int, group_size: int, service_s: float) -> Stability:
    """Return Proposition 1 for a job whose mean service time of one batch is `service_s` (compute + fetch + store).

    NaN without a service time or without arrivals; 0 if arrivals are unlimited (`asap`).

    >>> round(stability_margin([125.0] * 64, 256, 20, service_s=0.032).sufficient, 6)
    1.0
    """
    total = sum(rates_per_s)
    if not service_s > 0 or not total > 0:
        return Stability(math.nan, math.nan)
    return Stability(0.0, 0.0) if math.isinf(total) else stability(total, group_size, batch_size, service_s)


class ArrivalRateEstimator:
    """Measures arrival rates from the ends (high watermarks) of the partitions, for sources without a stated rate.

    The rate of a stream is the growth of its end, divided by the time from the first observation to the last one with
    growth. The rate therefore does not fall after a source has ended.
    """

    def __init__(self, samples_per_record: int = 1) -> None:
        self._samples_per_record = samples_per_record
        self._first: dict[int, tuple[float, int]] = {}
        self._last: dict[int, tuple[float, int]] = {}

    def observe(self, now_s: float, ends: Sequence[int]) -> None:
        """Process the partitions' ends at `now_s` (monotonic seconds)."""
        for partition, end in enumerate(ends):
            # Measure a stream from its first growth on: before, the producer was starting.
            first = self._first.get(partition)
            if first is None or (partition not in self._last and end == first[1]):
                self._first[partition] = (now_s, end)
            elif end > self._last.get(partition, first)[1]:
                self._last[partition] = (now_s, end)

    def rates_per_s(self) -> list[float]:
        """Return the samples per second of each stream; 0 if nothing has arrived yet."""
        rates = []
        for partition in sorted(self._first):
            t0, n0 = self._first[partition]
            t1, n1 = self._last.get(partition, (t0, n0))
            rates.append((n1 - n0) * self._samples_per_record / (t1 - t0) if t1 > t0 else 0.0)
        return rates


class _Batch(NamedTuple):
    time_s: float  # time of its update
    worker: int
    samples: int
    computing_s: float
    waiting_s: float


class WorkerPace(NamedTuple):
    """The pace of a worker over the last `RATE_WINDOW_S` of the job's updates; NaN before the updates span some time.

    Attributes:
        samples_per_s: samples applied per second.
        computing: share of the time in which the worker read weights, and computed and stored gradients.
        waiting_s: mean seconds from a batch's completion to the start of its set; NaN without a batch.
    """

    samples_per_s: float = math.nan
    computing: float = math.nan
    waiting_s: float = math.nan


class WorkerRates:
    """The times of each worker's batches that were applied in the last `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque()
        self._sums: dict[int, list[float]] = {}  # per worker: batches, samples, computing_s, waiting_s
        self._first_s = math.nan

    def add(self, worker: int, time_s: float, samples: int, computing_s: float = 0.0, waiting_s: float = 0.0) -> None:
        """Record that a batch of `worker` was applied at Unix `time_s`. Times must not decrease."""
        if math.isnan(self._first_s):
            self._first_s = time_s
        batch = _Batch(time_s, worker, samples, computing_s, waiting_s)
        self._count(batch, 1)
        self._batches.append(batch)
        while self._batches[0].time_s <= time_s - RATE_WINDOW_S:
            self._count(self._batches.popleft(), -1)

    def _count(self, batch: _Batch, sign: int) -> None:
        sums = self._sums.setdefault(batch.worker, [0, 0, 0.0, 0.0])
        sums[0] += sign
        sums[1] += sign * batch.samples
        sums[2] += sign * batch.computing_s
        sums[3] += sign * batch.waiting_s

    def pace(self, worker: int) -> WorkerPace:
        """Return the pace of one worker."""
        if not self._batches:
            return WorkerPace()
        span_s = min(RATE_WINDOW_S, self._batches[-1].time_s - self._first_s)
        if not span_s > 0:
            return WorkerPace()
        batches, samples, computing_s, waiting_s = self._sums.get(worker, (0, 0, 0.0, 0.0))
        # Rounding errors remain in the sums of an empty window: do not divide then.
        if not batches:
            return WorkerPace(0.0, 0.0, math.nan)
        return WorkerPace(samples / span_s, min(1.0, max(0.0, computing_s / span_s)), max(0.0, waiting_s / batches))
