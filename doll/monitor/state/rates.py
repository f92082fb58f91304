"""Update rates in theory and as measured, and the margin of stability.

Source: the DOLL paper, Eq. (1) and Proposition 1. Symbols: λ_A arrivals at one worker (samples/s), b batch size, K
group size, C time to turn one granted batch into a stored gradient (s).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.theory.queueing import Stability, stability

# Start-up, which differs from the steady state: connections, first weights, cold caches.
DROP_FRACTION = 0.1
DROP_S = 3.0
RATE_WINDOW_S: Final = 30.0
_GAPS: Final = 2_000  # between the last updates, from which the rest of a run is foreseen


def steady_update_rate(
    times_s: Sequence[float] | npt.NDArray[np.float64], drop_fraction: float = DROP_FRACTION, drop_s: float = DROP_S
) -> float:
    """Updates per second over the steady part of a run; NaN with fewer than two updates there.

    The start is excluded: the larger of `drop_fraction` of the run and `drop_s`, but never more than half of the run.
    n updates span n - 1 gaps, so the rate is (n - 1) / (last - first).

    Args:
        times_s: completion time of each update, seconds, in order.

    >>> steady_update_rate([0.0, 0.5, 1.0, 1.5, 2.0], drop_s=0.0, drop_fraction=0.0)
    2.0
    """
    # As an array: this is called several times a second, and a long run has 100,000 updates.
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
    """The standard deviation of the seconds that so many more updates take; NaN if no rate is known yet.

    The gaps between updates count as independent: n of them differ from n times their mean, and the mean of the m
    measured ones is not exact. So the variance is s² (n + n²/m).
    """
    gaps = np.diff(times_s[-_GAPS:])
    if len(gaps) < 2 or not updates_left >= 0:
        return math.nan
    return float(np.std(gaps, ddof=1)) * math.sqrt(updates_left + updates_left**2 / len(gaps))


def stability_margin(rates_per_s: Sequence[float], batch_size: int, group_size: int, service_s: float) -> Stability:
    """Proposition 1 for a job whose mean service time of one batch is `service_s` (compute + fetch + store).

    NaN without a service time or without arrivals; 0 when arrivals are unlimited (`asap`).

    >>> round(stability_margin([125.0] * 64, 256, 20, service_s=0.032).sufficient, 6)
    1.0
    """
    total = sum(rates_per_s)
    if not service_s > 0 or not total > 0:
        return Stability(math.nan, math.nan)
    return Stability(0.0, 0.0) if math.isinf(total) else stability(total, group_size, batch_size, service_s)


class ArrivalRateEstimator:
    """Arrival rates measured from the ends (high watermarks) of the partitions, for sources without a stated rate.

    The rate of a stream is the growth of its end between the first observation and the last one that saw it grow, so
    that a source that has ended does not lower it.
    """

    def __init__(self, samples_per_record: int = 1) -> None:
        self._samples_per_record = samples_per_record
        self._first: dict[int, tuple[float, int]] = {}
        self._last: dict[int, tuple[float, int]] = {}

    def observe(self, now_s: float, ends: Sequence[int]) -> None:
        """The partitions' ends as seen at `now_s` (monotonic seconds)."""
        for partition, end in enumerate(ends):
            # A stream is measured from its first growth on: before that, the producer was starting.
            first = self._first.get(partition)
            if first is None or (partition not in self._last and end == first[1]):
                self._first[partition] = (now_s, end)
            elif end > self._last.get(partition, first)[1]:
                self._last[partition] = (now_s, end)

    def rates_per_s(self) -> list[float]:
        """Samples per second of each stream; 0 if nothing has arrived yet."""
        rates = []
        for partition in sorted(self._first):
            t0, n0 = self._first[partition]
            t1, n1 = self._last.get(partition, (t0, n0))
            rates.append((n1 - n0) * self._samples_per_record / (t1 - t0) if t1 > t0 else 0.0)
        return rates


class _Batch(NamedTuple):
    time_s: float  # of its update
    worker: int
    samples: int
    computing_s: float
    waiting_s: float


class WorkerPace(NamedTuple):
    """The pace of a worker over the last `RATE_WINDOW_S` of the job's updates; NaN before updates span any time.

    Attributes:
        samples_per_s: applied.
        computing: share of the time in which it read weights, computed and stored gradients.
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
        """A batch of `worker` was applied at Unix `time_s`. Times do not decrease."""
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
        """The pace of one worker."""
        if not self._batches:
            return WorkerPace()
        span_s = min(RATE_WINDOW_S, self._batches[-1].time_s - self._first_s)
        if not span_s > 0:
            return WorkerPace()
        batches, samples, computing_s, waiting_s = self._sums.get(worker, (0, 0, 0.0, 0.0))
        # Sums of what has left the window keep a rounding error: without a batch there is nothing to divide.
        if not batches:
            return WorkerPace(0.0, 0.0, math.nan)
        return WorkerPace(samples / span_s, min(1.0, max(0.0, computing_s / span_s)), max(0.0, waiting_s / batches))
