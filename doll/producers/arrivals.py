"""The arrival times of samples, and the clock that waits for them. An arrival process is an endless iterator of send
times, in seconds since the start of the stream. A late sender catches up, so delays do not add up.

Pure: the random generator is an argument. Give each stream its own child generator, so that streams are independent.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from doll.errors import ConfigError

_BLOCK = 1024
_LONGEST_GAP_S = 1e9
# Shortest sleep: samples that are due within it are sent together, at most this much late, which saves CPU time.
BURST_S: Final = 0.01


def poisson(rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield Poisson arrival times, with independent exponential gaps of mean 1 / `rate_per_s`.

    Raises:
        ValueError: `rate_per_s` is not positive and finite.
    """
    mean_gap_s = 1.0 / _checked(rate_per_s)
    return _accumulate(rng.exponential(mean_gap_s, _BLOCK) for _ in itertools.count())


def deterministic(rate_per_s: float, phase: float = 0.0) -> Iterator[float]:
    """Yield evenly spaced arrival times; the first is `phase` gaps after the start. Phases n/N interleave N streams.

    Raises:
        ValueError: `rate_per_s` is not positive and finite.
    """
    rate_per_s = _checked(rate_per_s)
    # Each time is a quotient, because a running sum of gaps would accumulate rounding errors.
    return ((index + phase) / rate_per_s for index in itertools.count())


def asap() -> Iterator[float]:
    """Yield arrival times that are due immediately, so that samples are sent as fast as possible."""
    return itertools.repeat(0.0)


def trace(gaps_s: Sequence[float] | npt.NDArray[np.float64], start: int = 0) -> Iterator[float]:
    """Yield arrival times with the given gaps, from gap number `start` on, and repeat the gaps endlessly.

    Args:
        gaps_s: seconds between arrivals; not negative and not all zero (see `parse_gaps`).
        start: index of the first gap, modulo the number of gaps. Different values separate the streams of one trace.
    """
    gaps = np.roll(np.asarray(gaps_s, np.float64), -start)
    return _accumulate(itertools.repeat(gaps))


def parse_gaps(text: str, origin: str) -> npt.NDArray[np.float64]:
    """Parse gaps in seconds, one per line. Blank lines and lines that begin with # are skipped.

    Raises:
        ConfigError: a line is not a number of seconds >= 0, there is no gap, or all gaps are zero.
    """
    gaps: list[float] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            gap_s = float(line)
        except ValueError:
            gap_s = math.nan
        if not 0 <= gap_s <= _LONGEST_GAP_S:
            at_most = f" (at most {_LONGEST_GAP_S:g})" if gap_s > _LONGEST_GAP_S else ""
            raise ConfigError(f"{origin}, line {number}: expected a gap in seconds >= 0, got {line[:60]!r}{at_most}")
        gaps.append(gap_s)
    if not any(gaps):
        raise ConfigError(f"{origin}: expected at least one gap above 0 seconds, got {len(gaps)} gaps")
    return np.array(gaps)


def merge(streams: Sequence[Iterable[float]]) -> Iterator[tuple[float, int]]:
    """Yield (time_s, stream) of all streams in the order of time. At equal times, the streams alternate."""
    # Without the running number, equal times would all come from the first stream; with `asap` all times are equal.
    numbered = (zip(times, itertools.count(), itertools.repeat(n)) for n, times in enumerate(streams))
    return ((time_s, stream) for time_s, _, stream in heapq.merge(*numbered))


class Pacer:
    """The clock of one run: a sample with arrival time t is due at `start_s` + t."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s

    def wait_s(self, time_s: float, now_s: float) -> float:
        """Return the seconds to sleep before the sample with arrival time `time_s`; 0 if the sample is due."""
        ahead_s = self._start_s + time_s - now_s
        return max(ahead_s, BURST_S) if ahead_s > 0 else 0.0

    def behind_s(self, time_s: float, now_s: float) -> float:
        """Return by how many seconds the sample with arrival time `time_s` is late."""
        return max(0.0, now_s - self._start_s - time_s) if time_s else 0.0

    def idle(self, time_s: float, now_s: float) -> None:
        """Shift the schedule because the source had no sample for arrival time `time_s`. Later samples are then not
        late."""
        self._start_s = max(self._start_s, now_s - time_s)


def _accumulate(blocks: Iterable[npt.NDArray[np.float64]]) -> Iterator[float]:
    now_s = 0.0
    for gaps in blocks:
        times = np.cumsum(gaps) + now_s
        yield from times.tolist()
        now_s = float(times[-1])


def _checked(rate_per_s: float) -> float:
    if not 0 < rate_per_s < math.inf:
        raise ValueError(f"expected a rate above 0 and finite, got {rate_per_s} per second")
    return rate_per_s
