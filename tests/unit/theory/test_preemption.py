"""Up-time of spot workers, against a simulated two-state chain."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.paper import formulas
from doll.theory import preemption


def up_time_s(
    rng: np.random.Generator, runs: int, time_s: float, alpha: float, cycle_s: float, step_s: float
) -> np.ndarray:
    down, up = formulas.step_probabilities(step_s, alpha, cycle_s)
    state = rng.random(runs) < alpha
    total = np.zeros(runs)
    for _ in range(int(time_s / step_s)):
        total += state * step_s
        draw = rng.random(runs)
        state = np.where(state, draw >= down, draw < up)
    return total


@pytest.mark.parametrize("alpha", [0.8, 0.9])
def test_uptime_variance(alpha: float) -> None:
    total = up_time_s(np.random.default_rng(1), 6000, 6720.0, alpha, 1000.0, 4.0)
    assert total.mean() == pytest.approx(alpha * 6720, rel=0.01)
    assert total.var() == pytest.approx(preemption.uptime_variance_s2(6720.0, alpha, 1000.0), rel=0.06)


def test_uptime_variance_at_both_ends() -> None:
    short = preemption.uptime_variance_s2(1e-3, 0.9, 1000.0)
    assert short == pytest.approx(0.09 * 1e-6, rel=1e-4)
    # Continuous where the series takes over from the closed form.
    p = 0.09 * 1000.0
    below, above = (preemption.uptime_variance_s2(x * p, 0.9, 1000.0) for x in (0.99999e-4, 1.00001e-4))
    assert below == pytest.approx(above, rel=1e-3)
    assert preemption.uptime_variance_s2(100.0, 1.0, 1000.0) == 0.0


def test_availability_from_now_against_simulation() -> None:
    rng = np.random.default_rng(2)
    down, up = formulas.step_probabilities(1.0, 0.8, 500.0)
    for begins in (True, False):
        state = np.full(20_000, begins)
        total = np.zeros(20_000)
        for _ in range(150):
            total += state
            draw = rng.random(20_000)
            state = np.where(state, draw >= down, draw < up)
        assert total.mean() / 150 == pytest.approx(formulas.availability_from_now(begins, 150.0, 0.8, 500.0), abs=0.01)


def test_spread_of_updates_at_the_papers_setting() -> None:
    spread = formulas.updates_variance(6720.0, 30, 125.0, 20, 256, 0.9, 1000.0) ** 0.5
    assert spread / 10_000 == pytest.approx(0.0045, abs=0.0002)
    assert formulas.updates_variance(6720.0, 30, 125.0, 20, 256, 0.9, 1000.0, effect=4.0) ** 0.5 == pytest.approx(
        2 * spread
    )


def test_varying_rate_needs_the_integral_of_the_product() -> None:
    """D6: rate 2 on the first half, workers 10 on the second: nothing is done; the printed form says 500."""
    assert formulas.expected_updates([0, 50, 100], [0, 10], [2, 0], 1, 1) == 0.0
    hours = np.linspace(0, 2 * np.pi, 1001)
    middle = (hours[1:] + hours[:-1]) / 2
    diurnal = 1 + 0.5 * np.sin(middle)
    true = formulas.expected_updates(hours, diurnal, diurnal, 1, 1)
    assert true / (2 * np.pi) == pytest.approx(1.125, abs=1e-4)


def test_design_effect_is_the_variance_ratio() -> None:
    rng = np.random.default_rng(3)
    clustered = (rng.random((20_000, 5)) < 0.5).repeat(4, axis=1).sum(axis=1)
    alone = (rng.random((20_000, 20)) < 0.5).sum(axis=1)
    assert clustered.var() / alone.var() == pytest.approx(formulas.design_effect([4] * 5), rel=0.05)
    assert formulas.design_effect([]) == 1.0


def test_jensen_factor_against_simulation() -> None:
    updates = np.random.default_rng(4).normal(500, 30, 400_000)
    assert np.mean(0.99**updates) / 0.99**500 == pytest.approx(formulas.jensen_factor(0.99, 900.0), rel=0.01)


def test_a_step_longer_than_a_spell_is_refused() -> None:
    with pytest.raises(ValueError, match="step_s"):
        formulas.step_probabilities(200.0, 0.9, 1000.0)


@pytest.mark.slow
def test_a_gang_is_up_while_all_of_its_machines_are() -> None:
    """Against simulated chains: share of the time, up periods within it, and the variance of the up-time."""
    rng, machines, alpha, cycle_s, step_s, time_s = np.random.default_rng(3), 3, 0.9, 1000.0, 4.0, 6720.0
    down, up = formulas.step_probabilities(step_s, alpha, cycle_s)
    state = rng.random((8000, machines)) < alpha
    up_s, ends = np.zeros(8000), 0
    for _ in range(int(time_s / step_s)):
        whole = state.all(axis=1)
        up_s += whole * step_s
        draw = rng.random(state.shape)
        state = np.where(state, draw >= down, draw < up)
        ends += int(np.count_nonzero(whole & ~state.all(axis=1)))
    gang = preemption.gang_availability(machines, alpha, cycle_s)
    assert up_s.mean() / time_s == pytest.approx(gang.alpha, rel=0.01)
    assert 8000 * time_s / ends == pytest.approx(gang.cycle_s, rel=0.01)
    # The mean up period is a third of a machine's: it is interrupted three times as often.
    assert up_s.sum() / ends == pytest.approx(alpha * cycle_s / machines, rel=0.01)
    exact = formulas.gang_uptime_variance_s2(time_s, machines, alpha, cycle_s)
    assert up_s.var() == pytest.approx(exact, rel=0.05)
    assert preemption.uptime_variance_s2(time_s, *gang) == pytest.approx(exact, rel=0.06)
    # What one would get with the cycle of a machine is far off.
    assert preemption.uptime_variance_s2(time_s, gang.alpha, cycle_s) > 1.8 * exact


def test_gangs_at_the_ends() -> None:
    assert preemption.gang_availability(1, 0.0, 10.0) == (0.0, 10.0)
    assert preemption.gang_availability(5, 0.0, 10.0) == (0.0, 10.0)
    assert preemption.gang_availability(64, 1e-9, 10.0) == (0.0, 10.0)
    assert preemption.gang_availability(5, 1.0, 10.0).alpha == 1.0
    assert formulas.gang_uptime_variance_s2(50.0, 5, 1.0, 10.0) == 0.0
    with pytest.raises(ValueError, match="machines"):
        preemption.gang_availability(0, 0.5, 10.0)


@pytest.mark.parametrize(
    ("rates", "alpha", "cycle_s", "time_s"),
    [
        ([100.0] * 4, 0.9, 1000.0, 6000.0),
        ([100.0] * 2, 0.95, 36_000.0, 6000.0),  # most likely neither is interrupted
        ([10.0, 60.0, 180.0], 0.7, 500.0, 3000.0),
    ],
)
def test_few_workers_make_too_little_as_often_as_they_do_when_simulated(
    rates: list[float], alpha: float, cycle_s: float, time_s: float
) -> None:
    rng = np.random.default_rng(5)
    runs, noise_var = 100_000, sum(rates) * time_s
    made = rng.normal(0.0, math.sqrt(noise_var), runs)
    for rate in rates:
        up, at_s = rng.random(runs) < alpha, np.zeros(runs)
        while (at_s < time_s).any():
            lasts_s = rng.exponential(np.where(up, alpha, 1 - alpha) * cycle_s)
            lasts_s = np.minimum(lasts_s, time_s - at_s)
            made += rate * np.where(up, lasts_s, 0.0)
            at_s, up = at_s + lasts_s, ~up
    for share in (0.01, 0.03, 0.3):
        needed = float(np.quantile(made, share))
        stated = preemption.shortfall_prob(needed, rates, alpha, cycle_s, time_s, noise_var)
        assert stated == pytest.approx(share, rel=0.15), "the normal distribution states half of it and less"


def test_the_probability_of_a_shortfall_at_the_edges() -> None:
    def prob(needed: float, rates: list[float], alpha: float = 0.9, noise_var: float = 1.0) -> float:
        return preemption.shortfall_prob(needed, rates, alpha, 1000.0, 1000.0, noise_var)

    assert prob(-1e12, [100.0]) == 0.0
    assert prob(1e12, [100.0]) == 1.0
    assert prob(1.0, [], noise_var=0.0) == 1.0
    assert prob(99_000.0, [100.0], alpha=1.0) == 0.0
    assert prob(1_000.0, [100.0], alpha=0.0) == 1.0
    for num in (9_900, 10_100):
        two_sd = 2 * math.sqrt(num * preemption.uptime_variance_s2(1000.0, 0.9, 1000.0))
        assert prob(900.0 * num - two_sd, [1.0] * num) == pytest.approx(0.0228, rel=0.02)
    wide = prob(0.8 * 1e6, [999.0, *[0.001] * 1000])
    assert wide == pytest.approx(prob(0.8 * 999e3, [999.0]), abs=0.01), "slow streams hardly matter"
