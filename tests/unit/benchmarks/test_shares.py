"""Which part of the cores computes gradients, and what lies between grant, gradient and push."""

from __future__ import annotations

import math

import pytest
from benchmarks.probes import GradientClock
from benchmarks.shares import gradient_share, hops, is_steady, percentile


def test_the_share_is_of_as_many_cores_as_there_are_workers() -> None:
    busy = [(0.0, 1.0, 1.0), (1.0, 2.0, 1.0)]
    half = [(0.0, 1.0, 1.0)]
    assert gradient_share([busy, half], 0.0, 2.0) == pytest.approx(0.75)


def test_a_gradient_that_waits_for_the_processor_counts_its_cpu_time_only() -> None:
    assert gradient_share([[(0.0, 2.0, 0.5)]], 0.0, 2.0) == pytest.approx(0.25)


def test_a_gradient_at_the_edge_counts_in_proportion() -> None:
    assert gradient_share([[(-1.0, 1.0, 1.6), (2.0, 6.0, 4.0)]], 0.0, 4.0) == pytest.approx((0.8 + 2.0) / 4.0)


def test_a_share_needs_an_interval() -> None:
    with pytest.raises(ValueError, match="expected logs and an interval"):
        gradient_share([[]], 1.0, 1.0)


def test_hops_are_of_a_grant_to_an_idle_worker_and_of_its_last_push() -> None:
    messages = [
        ("grant", 0, 1, 10.0),
        ("grant", 1, 2, 10.1),
        ("grant", 0, 4, 10.2),  # finds worker 0 busy
        ("grant", 0, 4, 10.3),  # the same, on another channel
        ("push", 0, 1, 13.0),  # worker 0 still owes batches
        ("push", 1, 2, 13.5),
        ("push", 1, 2, 13.6),  # sent twice
        ("push", 0, 4, 14.5),
    ]
    gradients = [
        [(9.0, 9.9, 0.9), (10.003, 11.0, 1.0), (11.0, 12.0, 1.0), (12.1, 14.0, 1.0)],
        [(10.6, 13.1, 1.0)],
    ]
    fetches = [[(10.002, 10.003, 0.0), (12.0, 12.1, 0.0)], [(10.4, 10.6, 0.1)]]
    measured = hops(messages, gradients, fetches, 0.0, 20.0)
    assert measured.grant_to_fetch_s == pytest.approx([0.002, 0.3])
    assert measured.grant_to_gradient_s == pytest.approx([0.003, 0.5])
    assert measured.gradient_to_push_s == pytest.approx([0.4, 0.5])
    early = hops(messages, gradients, fetches, 0.0, 10.05)
    assert early.grant_to_gradient_s == pytest.approx([0.003])
    assert early.gradient_to_push_s == []


def test_a_percentile_is_a_measured_value() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.50) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0
    assert math.isnan(percentile([], 0.5))


def test_steady_is_a_last_value_near_the_one_before() -> None:
    assert not is_steady([])
    assert not is_steady([5.0])
    assert not is_steady([11.3, 8.0])
    assert is_steady([11.3, 6.8, 6.5])


def test_the_clock_counts_cpu_time_and_not_sleep() -> None:
    clock = GradientClock()

    def work(numbers: int) -> int:
        return sum(range(numbers))

    assert clock.timed(work)(1_000_000) == sum(range(1_000_000))
    ((begin_s, end_s, cpu_s),) = clock.rows
    assert 0 < cpu_s <= end_s - begin_s + 0.02
