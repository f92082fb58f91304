"""Whether a measured series is flat: a robust slope after warm-up, compared with a bound. Pure.

The slope is the Theil-Sen estimator: the median over pairs of samples. A role's series has a segment for each process.
Pairs within a segment count if it is long enough; otherwise all samples are one series (workers that are replaced every
minute have the same mean age at any time).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

WARM_UP: Final = 0.15  # share of the whole time; a process that starts later gets the same, at most `PROCESS_WARM_UP_S`
PROCESS_WARM_UP_S: Final = 300.0
_LONG_SEGMENT: Final = 0.15  # share of the whole time from which a process's own slope counts
_POINTS: Final = 400  # pairs grow with the square
_HOUR_S: Final = 3600.0

# Flat: the growth in an hour is below this share of the level, or below the floor of the measure.
SHARE: Final = 0.03
FLOORS: Final[Mapping[str, float]] = {"memory MB": 6.0, "files": 2.0, "threads": 1.0, "size MB": 4.0}
# Series with a row for each update: maximum bytes per update.
BY_DESIGN: Final[Mapping[tuple[str, str], float]] = {
    ("topic updates", "size MB"): 4000.0,
    ("run folder", "size MB"): 400.0,
    ("evaluator", "memory MB"): 300.0,
    ("up", "memory MB"): 300.0,
}
# Series with a limit, below which they vary: Java with 512 MB of heap, and topics, whose retention deletes whole
# segments of two or three open files each.
LIMITS: Final[Mapping[tuple[str, str], float]] = {
    ("kafka", "memory MB"): 700.0,
    ("kafka", "files"): 250.0,
    ("topic samples", "size MB"): 250.0,
    ("topic commands", "size MB"): 12.0,
    ("topic events", "size MB"): 8.0,
    ("topic metrics", "size MB"): 4.0,
}


@dataclass(frozen=True, slots=True)
class Point:
    """One value. `process` distinguishes processes of one role; it is 0 for series that do not belong to a process."""

    time_s: float
    process: int
    value: float


@dataclass(frozen=True, slots=True)
class Row:
    """The verdict on one series.

    Attributes:
        level: median after warm-up, in the unit that the measure names.
        per_hour: growth in an hour.
        bound: the most that counts as flat.
        bytes_per_update: where it grows by design.
        processes: number of processes.
    """

    of: str
    measure: str
    first: float
    level: float
    last: float
    per_hour: float
    bound: float
    processes: int
    bytes_per_update: float | None = None

    @property
    def flat(self) -> bool:
        return self.per_hour <= self.bound

    @property
    def verdict(self) -> str:
        if self.flat:
            return "flat"
        limit = LIMITS.get((self.of, self.measure))
        if limit is not None and max(self.level, self.last) <= limit:
            return f"limited: below {limit:.0f}"
        allowed = BY_DESIGN.get((self.of, self.measure))
        if allowed is not None and self.bytes_per_update is not None and self.bytes_per_update <= allowed:
            return f"by design: {self.bytes_per_update:.0f} bytes per update"
        return "GROWS"


def slope_per_hour(points: Sequence[Point], total_s: float) -> float:
    """Growth per hour after warm-up; NaN if too few samples are left."""
    segments: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        segments[point.process].append(point)
    warm_s = min(WARM_UP * total_s, PROCESS_WARM_UP_S)
    slopes: list[np.ndarray] = []
    for segment in segments.values():
        # The first process starts with the run, so the run's warm-up is its own.
        kept = _after(segment, max(WARM_UP * total_s, segment[0].time_s + warm_s))
        if kept and kept[-1].time_s - kept[0].time_s >= _LONG_SEGMENT * total_s:
            slopes.append(_pairs(kept))
    if not slopes:
        slopes = [_pairs(_after(points, WARM_UP * total_s))]
    all_slopes = np.concatenate(slopes)
    return float(np.median(all_slopes)) * _HOUR_S if len(all_slopes) else math.nan


def _after(points: Sequence[Point], time_s: float) -> list[Point]:
    return [point for point in points if point.time_s >= time_s]


def _pairs(points: Sequence[Point]) -> np.ndarray:
    thin = points[:: max(1, math.ceil(len(points) / _POINTS))]
    times = np.array([point.time_s for point in thin])
    values = np.array([point.value for point in thin])
    first, second = np.triu_indices(len(thin), 1)
    gap_s = times[second] - times[first]
    slopes: np.ndarray = (values[second] - values[first])[gap_s > 0] / gap_s[gap_s > 0]
    return slopes


def judge(series: Mapping[tuple[str, str], Sequence[Point]], total_s: float, updates_per_s: float) -> list[Row]:
    """A verdict on each series that has samples after warm-up.

    Args:
        series: by owner and measure.
        updates_per_s: update rate of the run, for series with a row per update.
    """
    rows = []
    for (of, measure), points in series.items():
        kept = _after(points, WARM_UP * total_s)
        if len(kept) < 3 or measure not in FLOORS:
            continue
        level = statistics.median(point.value for point in kept)
        per_hour = slope_per_hour(points, total_s)
        each = per_hour * 1e6 / (updates_per_s * _HOUR_S) if measure.endswith("MB") and updates_per_s > 0 else None
        rows.append(
            Row(
                of, measure, points[0].value, level, points[-1].value, per_hour,
                max(FLOORS[measure], SHARE * level), len({point.process for point in points}),
                each if (of, measure) in BY_DESIGN else None,
            )
        )  # fmt: skip
    return rows


def markdown(rows: Iterable[Row]) -> str:
    """The verdicts as a table for docs/results.md."""
    lines = [
        "| process | measure | median | last | growth per hour | flat up to | processes | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = f"**{row.verdict}**" if row.verdict == "GROWS" else row.verdict
        lines.append(
            f"| {row.of} | {row.measure} | {row.level:,.1f} | {row.last:,.1f} | {row.per_hour:+,.2f} | "
            f"{row.bound:,.1f} | {row.processes} | {verdict} |"
        )
    return "\n".join(lines)
