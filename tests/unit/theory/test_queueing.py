"""Corrected Theorem 1, phase effects and Proposition 1, against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.paper import formulas
from doll.theory import queueing


def updates_done(
    rng: np.random.Generator, runs: int, time_s: float, workers: int, rate: float, batch: int, group: int
) -> np.ndarray:
    """J_t by definition: samples fill batches (random first fill), batches fill groups, service takes no time."""
    fills = rng.integers(0, batch, (runs, workers))
    batches = (fills + rng.poisson(rate * time_s, (runs, workers))) // batch
    # Batches before t = 0 do not count; a random number of them is in the first group already.
    return (batches.sum(axis=1) + rng.integers(0, group, runs)) // group


def test_theorem_1_corrected_and_printed() -> None:
    """Digest 6, row "DOLL Thm 1": variance within 15 % of the corrected form; the printed one is 10 times off."""
    workers, batch, group, time_s = 16, 32, 4, 128.0
    done = updates_done(np.random.default_rng(1), 20_000, time_s, workers, 12.5, batch, group)
    theory = formulas.update_count(time_s, workers * 12.5, group, batch, num_workers=workers)
    assert theory == (200.0, 1.8125)
    assert done.mean() == pytest.approx(theory.mean, abs=0.5)
    assert done.var() == pytest.approx(theory.variance, rel=0.15)
    assert formulas.printed_update_variance(time_s, workers * 12.5, group, batch) > 10 * done.var()
    distance = max(abs(float(np.mean(done <= j)) - formulas.update_count(
        time_s, workers * 12.5, group, batch, num_workers=workers).cdf(j + 0.5)) for j in range(190, 211))  # fmt: skip
    assert distance < 0.2


@pytest.mark.parametrize("window_s", [0.05, 0.2, 0.64, 2.0, 10.0, 50.0])
def test_dispersion_of_batch_counts(window_s: float) -> None:
    """From Poisson on short windows to 1/b on long ones; the measured values of the digest, and a simulation."""
    measured = {0.05: 0.915, 0.2: 0.70, 0.64: 0.15, 2.0: 0.08, 10.0: 0.05, 50.0: 0.033}[window_s]
    theory = formulas.batch_dispersion(window_s, 50.0, 32)
    assert theory == pytest.approx(measured, abs=0.02)
    rng = np.random.default_rng(2)
    fills, came = rng.integers(0, 32, 200_000), rng.poisson(50.0 * window_s, 200_000)
    counts = (fills + came) // 32
    assert counts.var() / counts.mean() == pytest.approx(theory, rel=0.03)


def test_bursts_of_streams_that_begin_empty() -> None:
    rng = np.random.default_rng(3)
    first = rng.gamma(256, 1 / 125.0, 10_000)
    assert first.std() == pytest.approx(formulas.burst_spread_s(125.0, 256), rel=0.03)
    # After b batches the spread is one batch interval: out of step.
    later = rng.gamma(256 * 256, 1 / 125.0, 10_000)
    assert later.mean() == pytest.approx(formulas.lockstep_time_s(125.0, 256), rel=0.01)
    assert later.std() == pytest.approx(256 / 125.0, rel=0.05)


def waits_s(
    rng: np.random.Generator, interval_s: float, group: int, service_s: float, groups: int
) -> tuple[float, float]:
    """Mean wait of the groups in the second and the fourth quarter; service = the slowest of K exponential times."""
    arrivals = np.cumsum(rng.gamma(group, interval_s / group, groups))
    service = rng.exponential(service_s, (groups, group)).max(axis=1)
    wait, waits = 0.0, []
    for gap, work in zip(np.diff(arrivals), service, strict=False):
        wait = max(0.0, wait + work - gap)
        waits.append(wait)
    half = len(waits) // 2
    return float(np.mean(waits[half // 2 : half])), float(np.mean(waits[half + half // 2 :]))


def test_proposition_1_tells_bounded_from_growing_queues() -> None:
    rng = np.random.default_rng(4)
    interval = formulas.group_interval_s(8000.0, 20, 256)
    for factor, grows in ((0.8, False), (1.2, True)):
        service = factor * interval / queueing.harmonic(20)
        margin = queueing.stability(8000.0, 20, 256, service)
        assert margin.necessary == pytest.approx(1 / factor)
        assert margin.sufficient < 1
        assert margin.verdict == ("unstable" if grows else "depends")
        middle, end = waits_s(rng, interval, 20, service, 8000)
        assert (end > 2 * middle) is grows
    assert queueing.stability(8000.0, 20, 256, 0.031).verdict == "stable"


def test_necessary_form_at_the_papers_setting() -> None:
    limit = 0.032 * 20 / queueing.harmonic(20)
    assert limit == pytest.approx(0.178, abs=0.001)


def test_smallest_stable_batch_is_the_smallest() -> None:
    for service_s in (0.05, 0.0123, 1e-5):
        batch = queueing.smallest_stable_batch(8000.0, service_s)
        assert queueing.stability(8000.0, 20, batch, service_s).sufficient > 1
        assert batch == 1 or queueing.stability(8000.0, 20, batch - 1, service_s).sufficient <= 1


def test_eq_1_bound_is_loose_and_can_fail() -> None:
    """D5: not an estimate. With K = 1 and regular arrivals the true variance passes it."""
    rng = np.random.default_rng(5)
    arrivals = np.arange(1, 20_001, dtype=float)  # one batch a second, regular
    service = rng.exponential(0.999**0.5, 20_000)
    ends, free = [], 0.0
    for at, work in zip(arrivals * 1.5, service, strict=True):
        free = max(at, free) + work
        ends.append(free)
    # σ_A² = 0 for regular arrivals; the form of Eq. (1) with σ_A² in place of b²/S² allows only σ_C².
    assert np.diff(ends).var() > service.var()
    assert formulas.update_interval_variance_bound_s2(1.0, 1, 1, 0.0) == 1.0


def test_update_count_is_a_distribution() -> None:
    count = formulas.update_count(1000.0, 8000.0, 20, 256, num_workers=64)
    assert count.cdf(-math.inf) == 0
    assert count.cdf(math.inf) == 1
    assert count.cdf(count.mean - 0.5) == pytest.approx(0.5)
