"""When samples arrive and are sent: processes as endless iterators of absolute send times, in seconds from the
stream's start, and the clock that waits for them. A late sender catches up and never drifts.

Pure: the random generator is an argument. Give each stream its own child generator, and streams are independent.
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
# Shortest sleep: samples that fall due within it are sent together, at most this much late, which keeps the CPU idle.
BURST_S: Final = 0.01


def poisson(rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Poisson arrivals: independent exponential gaps of mean 1 / `rate_per_s`.

    Raises:
        ValueError: `rate_per_s` is not positive and finite.
    """
    mean_gap_s = 1.0 / _checked(rate_per_s)
    return _accumulate(rng.exponential(mean_gap_s, _BLOCK) for _ in itertools.count())


def deterministic(rate_per_s: float, phase: float = 0.0) -> Iterator[float]:
    """Evenly spaced arrivals, the first `phase` gaps after the start: streams of one rate with phases n/N interleave.

    Raises:
        ValueError: `rate_per_s` is not positive and finite.
    """
    rate_per_s = _checked(rate_per_s)
    # A quotient for each time: a running sum of gaps would drift by its rounding.
    return ((index + phase) / rate_per_s for index in itertools.count())


def asap() -> Iterator[float]:
    """Everything at once: the sender's speed is the rate."""
    return itertools.repeat(0.0)


def trace(gaps_s: Sequence[float] | npt.NDArray[np.float64], start: int = 0) -> Iterator[float]:
    """Arrivals with the given gaps, beginning with gap number `start` and repeated without end.

    Args:
        gaps_s: seconds between arrivals, none negative, not all zero (see `parse_gaps`).
        start: first gap to use, modulo their number; different starts keep streams of one trace apart.
    """
    gaps = np.roll(np.asarray(gaps_s, np.float64), -start)
    return _accumulate(itertools.repeat(gaps))


def parse_gaps(text: str, origin: str) -> npt.NDArray[np.float64]:
    """Gaps in seconds, one a line; blank lines and lines that begin with # are skipped.

    Raises:
        ConfigError: a line is not a number of seconds >= 0, there is no line, or all are zero.
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
    """(time_s, stream) of all streams in time order. At equal times the streams take turns."""
    # Without the running number, equal times would all come from the first stream (and `asap` knows no other).
    numbered = (zip(times, itertools.count(), itertools.repeat(n)) for n, times in enumerate(streams))
    return ((time_s, stream) for time_s, _, stream in heapq.merge(*numbered))


class Pacer:
    """The clock of one run: arrival time t is due at `start_s` + t."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s

    def wait_s(self, time_s: float, now_s: float) -> float:
        """Seconds to sleep before the sample with arrival time `time_s`; 0 when it is due."""
        ahead_s = self._start_s + time_s - now_s
        return max(ahead_s, BURST_S) if ahead_s > 0 else 0.0

    def behind_s(self, time_s: float, now_s: float) -> float:
        """How late the sample with arrival time `time_s` is."""
        return max(0.0, now_s - self._start_s - time_s) if time_s else 0.0

    def idle(self, time_s: float, now_s: float) -> None:
        """The source had nothing for arrival time `time_s`: shift the schedule, so that no backlog builds up."""
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
