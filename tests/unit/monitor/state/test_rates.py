"""Rates against the closed forms of the DOLL paper, and against a simulated stream."""

import math
import random

import numpy as np
import pytest
from doll.monitor.state import rates
from doll.theory import queueing


def test_margin_at_the_papers_setting() -> None:
    """Sufficient form needs μ_C < 32 ms, the necessary one about 178 ms."""
    assert rates.stability_margin([125.0] * 64, 256, 20, 0.032).sufficient == pytest.approx(1.0)
    assert rates.stability_margin([125.0] * 64, 256, 20, 0.1779).necessary == pytest.approx(1.0, abs=1e-3)


def test_harmonic_numbers() -> None:
    assert queueing.harmonic(2) == 1.5
    assert queueing.harmonic(20) == pytest.approx(3.5977, abs=1e-4)


def test_margin_without_measurement_is_unknown_and_with_endless_arrivals_zero() -> None:
    assert math.isnan(rates.stability_margin([1.0], 1, 1, 0.0).sufficient)
    assert math.isnan(rates.stability_margin([0.0], 1, 1, 0.1).sufficient)
    assert rates.stability_margin([math.inf], 1, 1, 0.1).sufficient == 0.0


def test_steady_rate_counts_gaps_not_points() -> None:
    assert rates.steady_update_rate([0.25 * i for i in range(401)]) == pytest.approx(4.0)


def test_steady_rate_leaves_out_a_slow_start() -> None:
    """A 3 s stall at the start does not pull the rate down; short runs lose at most their first half."""
    times = [0.0] + [3.0 + 0.1 * i for i in range(300)]
    assert rates.steady_update_rate(times) == pytest.approx(10.0)
    assert rates.steady_update_rate([0.0, 0.5, 1.0, 1.5, 2.0]) == pytest.approx(2.0)


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 1.0, 1.0]])
def test_too_few_updates_have_no_rate(times: list[float]) -> None:
    assert math.isnan(rates.steady_update_rate(times))


def test_measured_equals_predicted_on_a_simulated_stream() -> None:
    """Poisson arrivals at 4 workers, batches of 8, groups of 3 in order of completion: the estimator finds λ_U."""
    rng = random.Random(3)
    batches = []
    for _ in range(4):
        now, count = 0.0, rng.randrange(8)
        while now < 600:
            now += rng.expovariate(20.0)
            count += 1
            if count % 8 == 0:
                batches.append(now)
    updates = sorted(batches)[2::3]
    assert rates.steady_update_rate(updates) == pytest.approx(queueing.update_rate_per_s(80.0, 3, 8), rel=0.01)


def test_arrival_meter_finds_the_rate_of_each_stream() -> None:
    """Neither the producer's start nor the silence after its end counts."""
    estimator = rates.ArrivalRateEstimator(samples_per_record=2)
    for second in range(40):
        sent = min(max(second - 5, 0), 20)
        estimator.observe(float(second), [100 * sent, 50 * sent, 7])
    assert estimator.rates_per_s() == [200.0, 100.0, 0.0]


def test_arrival_meter_without_a_look() -> None:
    assert rates.ArrivalRateEstimator().rates_per_s() == []


def test_a_workers_rate_counts_its_samples_in_the_last_window() -> None:
    worker_rates = rates.WorkerRates()
    assert math.isnan(worker_rates.pace(0).samples_per_s)
    worker_rates.add(0, 100.0, 8)
    assert math.isnan(worker_rates.pace(0).samples_per_s), "one update spans no time"
    for second in range(101, 111):
        worker_rates.add(0, float(second), 8)
        worker_rates.add(1, float(second), 4)
    assert worker_rates.pace(0).samples_per_s == pytest.approx(88 / 10)
    assert worker_rates.pace(1).samples_per_s == pytest.approx(40 / 10)
    assert worker_rates.pace(2).samples_per_s == 0.0
    for second in range(111, 200):
        worker_rates.add(1, float(second), 4)
    assert worker_rates.pace(0).samples_per_s == 0.0, "its last sample has left the window"
    assert worker_rates.pace(1).samples_per_s == pytest.approx(4.0)


def test_a_workers_pace_is_the_share_of_time_in_which_it_computes_and_what_its_batches_wait() -> None:
    worker_rates = rates.WorkerRates()
    for second in range(100, 111):
        worker_rates.add(0, float(second), 8, computing_s=0.5, waiting_s=0.2)
        worker_rates.add(1, float(second), 8, computing_s=2.0, waiting_s=0.4)
    assert worker_rates.pace(0).computing == pytest.approx(0.55)
    assert worker_rates.pace(0).waiting_s == pytest.approx(0.2)
    assert worker_rates.pace(1).computing == 1.0, "a pipeline computes several batches at a time"
    assert math.isnan(worker_rates.pace(2).waiting_s)


def test_the_spread_of_the_time_left_grows_with_it_and_with_the_gaps() -> None:
    even = np.arange(101, dtype=np.float64)
    assert rates.remaining_sd_s(even, 50) == 0.0
    uneven = np.cumsum(np.tile([0.5, 1.5], 50))
    spread = float(np.std(np.diff(uneven), ddof=1))
    assert rates.remaining_sd_s(uneven, 50) == pytest.approx(spread * math.sqrt(50 + 50**2 / 99))
    assert rates.remaining_sd_s(uneven, 0) == 0.0
    assert math.isnan(rates.remaining_sd_s(uneven, math.nan))
    assert math.isnan(rates.remaining_sd_s(even[:2], 50))
