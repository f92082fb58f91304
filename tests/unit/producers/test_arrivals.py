"""Arrival processes: rates, spread, order, reproducibility."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from doll.errors import ConfigError
from doll.producers import arrivals
from doll.producers.sources import child_rng


def _times(process: Iterator[float], count: int) -> npt.NDArray[np.float64]:
    return np.array(list(itertools.islice(process, count)))


@pytest.mark.parametrize("rate_per_s", [0.5, 125.0, 4000.0])
def test_poisson_has_the_rate_and_a_squared_coefficient_of_variation_of_one(rate_per_s: float) -> None:
    gaps = np.diff(_times(arrivals.poisson(rate_per_s, np.random.default_rng(1)), 40_000))
    assert (gaps > 0).all()
    # 40,000 gaps: the mean's deviation is 0.5 %, the variance's about 1.4 %.
    assert gaps.mean() * rate_per_s == pytest.approx(1.0, abs=0.025)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1.0, abs=0.06)


def test_poisson_counts_in_a_window_have_variance_equal_to_their_mean() -> None:
    times = _times(arrivals.poisson(50.0, np.random.default_rng(2)), 100_000)
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(50.0, rel=0.02)
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.12)


def test_one_seed_gives_one_stream_and_children_are_independent() -> None:
    first, again, other = (
        np.diff(_times(arrivals.poisson(10.0, child_rng(7, 0, stream, 0)), 20_000)) for stream in (0, 0, 1)
    )
    assert (first == again).all()
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.03


def test_deterministic_gaps_are_equal_and_do_not_drift() -> None:
    times = _times(arrivals.deterministic(3.0, phase=0.5), 300_001)
    assert times[0] == pytest.approx(0.5 / 3)
    assert times[-1] == pytest.approx(100_000 + 0.5 / 3, abs=1e-9)


@pytest.mark.parametrize("rate_per_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_must_be_positive_and_finite(rate_per_s: float) -> None:
    with pytest.raises(ValueError, match="rate above 0 and finite"):
        arrivals.poisson(rate_per_s, np.random.default_rng(0))
    with pytest.raises(ValueError, match="rate above 0 and finite"):
        arrivals.deterministic(rate_per_s)


def test_a_trace_repeats_and_can_begin_anywhere() -> None:
    assert list(itertools.islice(arrivals.trace([1.0, 2.0, 4.0]), 5)) == [1.0, 3.0, 7.0, 8.0, 10.0]
    assert list(itertools.islice(arrivals.trace([1.0, 2.0, 4.0], start=2), 4)) == [4.0, 5.0, 7.0, 11.0]


def test_gaps_are_parsed_with_comments_and_blank_lines() -> None:
    assert arrivals.parse_gaps("# seconds\n0.5\n\n 0 \n1e-3\n", "gaps.txt").tolist() == [0.5, 0.0, 0.001]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.1\nsoon\n", r"gaps.txt, line 2: expected a gap in seconds >= 0, got 'soon'"),
        ("-1\n", "line 1"),
        ("nan\n", "line 1"),
        ("inf\n", "line 1"),
        ("", "at least one gap above 0"),
        ("0\n0\n", "at least one gap above 0 seconds, got 2 gaps"),
    ],
)
def test_a_bad_trace_says_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arrivals.parse_gaps(text, "gaps.txt")


def test_merge_is_in_time_order_and_keeps_each_streams_own_rate() -> None:
    rates = [10.0, 40.0, 150.0]
    merged = arrivals.merge([arrivals.poisson(rate, child_rng(3, n)) for n, rate in enumerate(rates)])
    events = list(itertools.takewhile(lambda event: event[0] < 200, merged))
    times = [time_s for time_s, _ in events]
    assert times == sorted(times)
    counts = np.bincount([stream for _, stream in events])
    np.testing.assert_allclose(counts / 200, rates, rtol=0.08)  # 2,000 arrivals: 4.5 % is two deviations


def test_the_superposition_of_poisson_streams_is_poisson() -> None:
    merged = arrivals.merge([arrivals.poisson(25.0, child_rng(4, n)) for n in range(4)])
    gaps = np.diff([time_s for time_s, _ in itertools.islice(merged, 40_000)])
    assert gaps.mean() == pytest.approx(0.01, rel=0.02)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1.0, abs=0.06)


def test_equal_times_take_turns() -> None:
    merged = arrivals.merge([arrivals.asap(), arrivals.asap(), arrivals.asap()])
    assert [stream for _, stream in itertools.islice(merged, 7)] == [0, 1, 2, 0, 1, 2, 0]


def test_merge_ends_with_its_streams() -> None:
    assert list(arrivals.merge([[0.0, 2.0], [1.0]])) == [(0.0, 0), (1.0, 1), (2.0, 0)]
