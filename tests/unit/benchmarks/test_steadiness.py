"""A slope that is robust against spikes, deaths and warm-up; and what counts as flat."""

from __future__ import annotations

import math
import random

import pytest
from benchmarks.steadiness import Point, judge, markdown, slope_per_hour

HOUR_S = 3600.0


def line(
    per_hour: float, *, start: float = 100.0, process: int = 0, lo: float = 0.0, hi: float = HOUR_S, noise: float = 0.2
) -> list[Point]:
    rng = random.Random(1)
    times = [lo + 5.0 * at for at in range(round((hi - lo) / 5.0))]
    return [Point(at, process, start + per_hour * (at - lo) / HOUR_S + rng.gauss(0, noise)) for at in times]


def test_a_leak_is_found_through_noise_and_spikes() -> None:
    points = line(20.0)
    for at in range(0, len(points), 9):
        points[at] = Point(points[at].time_s, 0, 500.0)
    assert slope_per_hour(points, HOUR_S) == pytest.approx(20.0, rel=0.1)


def test_what_grows_while_it_warms_up_is_flat() -> None:
    points = [Point(5.0 * at, 0, min(100.0, 1.0 * at)) for at in range(720)]
    assert abs(slope_per_hour(points, HOUR_S)) < 0.01


def test_deaths_do_not_hide_a_leak_and_are_none() -> None:
    leaking = [point for n in range(3) for point in line(30.0, process=n, lo=1200.0 * n, hi=1200.0 * (n + 1))]
    assert slope_per_hour(leaking, HOUR_S) == pytest.approx(30.0, rel=0.1)
    short = [point for n in range(60) for point in line(0.0, process=n, lo=60.0 * n, hi=60.0 * (n + 1))]
    assert abs(slope_per_hour(short, HOUR_S)) < 1.0


def test_verdicts_name_what_is_flat_what_grows_and_what_grows_by_design() -> None:
    series = {
        ("ps", "memory MB"): line(0.0),
        ("worker-0", "memory MB"): line(50.0),
        ("up", "memory MB"): line(18.0),  # 10 updates a second: 500 bytes for each
        ("topic updates", "size MB"): line(36.0, noise=0.0),
        ("kafka", "memory MB"): line(50.0),  # its heap has a limit
        ("ps", "cpu"): line(50.0),  # is shown and not judged
    }
    rows = {row.of: row for row in judge(series, HOUR_S, 10.0)}
    assert {name: row.verdict for name, row in rows.items()} == {
        "ps": "flat", "worker-0": "GROWS", "kafka": "limited: below 700", "up": "GROWS",
        "topic updates": "by design: 1000 bytes per update",
    }  # fmt: skip
    text = markdown(rows.values())
    assert "**GROWS**" in text
    assert len(text.splitlines()) == 2 + 5


def test_too_little_is_no_slope() -> None:
    assert math.isnan(slope_per_hour([Point(0.0, 0, 1.0)], HOUR_S))
