"""Availability estimates: exact quantiles, coverage of the interval, co-interruptions, censoring."""

from __future__ import annotations

import numpy as np
import pytest
from doll.provisioner.planning.estimators import AvailabilityEstimator, BootTimeEstimator, RateEstimator, alpha_quantile


def test_quantiles_are_those_of_the_posterior() -> None:
    rng = np.random.default_rng(1)
    falls, comes, up_s, down_s = 7, 6, 90_000.0, 12_000.0
    q, r = rng.gamma(0.5 + falls, 1 / up_s, 400_000), rng.gamma(0.5 + comes, 1 / down_s, 400_000)
    for probability in (0.05, 0.5, 0.95):
        exact = float(np.quantile(r / (q + r), probability))
        assert alpha_quantile(probability, falls, comes, up_s, down_s) == pytest.approx(exact, abs=0.002)


def watch(
    rng: np.random.Generator, alpha: float, share: float, *, effect: bool, slots: int = 20, steps: int = 700
) -> tuple[bool, float]:
    """One simulated day of slots in one pool; `share` of the interruptions hit the whole pool at once."""
    step_s, cycle_s = 60.0, 3600.0
    estimator = AvailabilityEstimator(prior_cycle_s=cycle_s, half_life_s=1e9, cluster_s=10.0 if effect else 1e-9)
    # The plain tally takes each slot for a pool of its own, as a binomial count would.
    pools: list[object] = ["one"] * slots if effect else list(range(slots))
    fall, rise = step_s / (alpha * cycle_s), step_s / ((1 - alpha) * cycle_s)
    up = rng.random(slots) < alpha
    for step in range(steps):
        estimator.observe(step * step_s, up, np.ones(slots, dtype=bool), pools)
        together = rng.random() < share * fall
        up = np.where(up, (rng.random(slots) >= (1 - share) * fall) & (not together), rng.random(slots) < rise)
    interval = estimator.alpha()
    return interval.low <= alpha <= interval.high, interval.high - interval.low


@pytest.mark.slow
def test_interval_covers_and_the_design_effect_is_needed() -> None:
    rng = np.random.default_rng(2)
    alone = [watch(rng, 0.9, 0.0, effect=True)[0] for _ in range(40)]
    assert np.mean(alone) >= 0.8
    together = [watch(rng, 0.9, 0.9, effect=True)[0] for _ in range(40)]
    plain = [watch(rng, 0.9, 0.9, effect=False)[0] for _ in range(40)]
    assert np.mean(together) >= 0.8
    assert np.mean(plain) <= 0.7


def test_before_anything_is_seen_the_prior_speaks_and_is_unsure() -> None:
    alpha = AvailabilityEstimator(prior_alpha=0.8).alpha()
    assert alpha.low < 0.3
    assert alpha.point == pytest.approx(0.8, abs=0.05)
    assert alpha.high > 0.95


def test_slots_on_demand_are_censored() -> None:
    seen, blind = AvailabilityEstimator(), AvailabilityEstimator()
    up = np.array([True, True])
    for second in range(0, 36_000, 60):
        seen.observe(second, up, np.array([True, True]))
        blind.observe(second, up, np.array([False, False]))
    assert seen.alpha().point > 0.95
    assert blind.alpha() == AvailabilityEstimator().alpha()


def test_a_slot_that_comes_back_to_spot_is_no_interruption() -> None:
    estimator = AvailabilityEstimator()
    estimator.observe(0.0, np.array([True]), np.array([True]))
    estimator.observe(60.0, np.array([False]), np.array([False]))  # moved on-demand by us
    estimator.observe(120.0, np.array([False]), np.array([True]))  # booting on spot
    assert estimator.design_effect == 1.0
    assert estimator.cycle_s == pytest.approx(AvailabilityEstimator().cycle_s, rel=0.01)


def test_old_observations_fade() -> None:
    fading, lasting, fresh = (
        AvailabilityEstimator(half_life_s=7200.0),
        AvailabilityEstimator(half_life_s=1e12),
        AvailabilityEstimator(half_life_s=7200.0),
    )
    on = np.ones(4, dtype=bool)
    for minute in range(2400):
        up_minutes = 10 if minute < 1200 else 18
        up = on if minute % 20 < up_minutes else ~on
        fading.observe(minute * 60.0, up, on, pools=range(4))
        lasting.observe(minute * 60.0, up, on, pools=range(4))
        if minute >= 1200:
            fresh.observe(minute * 60.0, up, on, pools=range(4))
    assert fading.alpha().point == pytest.approx(fresh.alpha().point, abs=0.01)
    assert fading.alpha().point == pytest.approx(0.9, abs=0.04)
    assert lasting.alpha().point == pytest.approx(0.7, abs=0.04)


def test_design_effect_of_one_pool_outage() -> None:
    estimator = AvailabilityEstimator()
    on = np.ones(8, dtype=bool)
    estimator.observe(0.0, on, on)
    estimator.observe(60.0, ~on, on)
    assert estimator.design_effect == 8.0
    apart = AvailabilityEstimator()
    apart.observe(0.0, on, on)
    apart.observe(60.0, ~on, on, pools=list(range(8)))
    assert apart.design_effect == 1.0


def test_cycle_is_measured() -> None:
    estimator = AvailabilityEstimator(prior_cycle_s=3600.0)
    for step in range(2000):
        up = np.array([(step // 9) % 2 == 0])
        estimator.observe(step * 60.0, up, np.array([True]))
    assert estimator.cycle_s == pytest.approx(18 * 60, rel=0.1)


def test_rates_move_from_the_stated_to_the_seen() -> None:
    rates = RateEstimator([100.0, 100.0], prior_s=60.0)
    assert rates.per_s().tolist() == [100.0, 100.0]
    rates.observe([60 * 200, 0], [60.0, 0.0])
    assert rates.per_s() == pytest.approx([150.0, 100.0], rel=0.01)
    rates.observe([600_000 * 200, 0], [600_000.0, 0.0])
    assert rates.per_s()[0] == pytest.approx(200.0, rel=1e-3)


def test_a_rate_that_has_changed_is_learned_however_long_the_job_has_run() -> None:
    rates = RateEstimator([100.0, 100.0], half_life_s=1800.0)
    for _ in range(24 * 60):
        rates.observe([60 * 100.0, 60 * 100.0], [60.0, 60.0])  # a day
    for minute in range(1, 121):
        rates.observe([60 * 20.0, 0.0], [60.0, 0.0])
        if minute == 30:
            assert rates.per_s()[0] == pytest.approx(60.0, rel=0.02), "half of the way in half_life_s"
    assert rates.per_s()[0] == pytest.approx(25.0, rel=0.02)
    assert rates.per_s()[1] == pytest.approx(100.0), "a stream whose worker is away is not forgotten"
    again = RateEstimator([100.0, 100.0])
    again.restore(rates.to_dict())
    assert again.per_s().tolist() == rates.per_s().tolist()


def test_a_state_of_an_earlier_release_is_rates_without_decay() -> None:
    rates = RateEstimator([100.0], prior_s=60.0)
    rates.restore({"samples": [60 * 200.0], "up_s": [60.0]})
    assert rates.per_s().tolist() == [150.0]


def test_boots_count_with_their_slow_tenth_and_old_ones_are_forgotten() -> None:
    boots = BootTimeEstimator(keep=20)
    assert boots.slow_s == 0.0
    boots.observe(75.0)
    assert boots.slow_s == 75.0
    for seconds in range(1, 21):
        boots.observe(float(seconds))
    assert boots.slow_s == 18.0, "the smallest that nine of ten do not exceed; 75 s is long ago"
    again = BootTimeEstimator(keep=20)
    again.restore(boots.to_dict())
    assert again.slow_s == 18.0
