"""Eq. (10) and (9) against a one-dimensional quadratic, and J(ε)."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.paper import formulas
from benchmarks.paper.formulas import decay
from doll.errors import InfeasiblePlanError
from doll.theory.fitting import Decay, first_crossing, fit_decay, fit_tail


def test_bound_10_and_the_stationary_value_on_a_quadratic() -> None:
    """Digest 6, row "DOLL (10), (9)": error <= bound at every J; stationary value within 5 %."""
    step, curvature, variance, group, batch, replicas = 0.2, 1.0, 1.0, 4, 10, 20_000
    curve = decay(0.5, step, curvature, curvature, variance, group, batch)
    rng = np.random.default_rng(1)
    w = np.ones(replicas)
    for j in range(120):
        error = 0.5 * curvature * np.mean(w**2)
        assert error <= curve.error(j) * 1.02 + 1e-12, j
        gradient = curvature * w + rng.normal(0, np.sqrt(variance / (group * batch)), replicas)
        w = w - step * gradient
    expected = formulas.stationary_error_quadratic(step, curvature, variance, group, batch)
    assert 0.5 * np.mean(w**2) == pytest.approx(expected, rel=0.05)
    assert expected <= curve.gamma


def test_the_printed_sum_step_has_another_floor() -> None:
    """D2: with the sum of sums as gradient the same η gives K b times the step: it diverges at the paper's sizes."""
    with pytest.raises(ValueError, match="diverges"):
        formulas.stationary_error_quadratic(0.1 * 4 * 10, 1.0, 1.0, 4, 10)


def test_updates_to_is_the_smallest() -> None:
    rng = np.random.default_rng(2)
    for _ in range(2000):
        curve = Decay(float(rng.uniform(0.5, 0.9999)), float(rng.uniform(0.1, 5)), float(rng.uniform(0, 0.1)))
        target = curve.gamma + float(rng.uniform(1e-4, 1)) * curve.beta
        count = curve.updates_to(target)
        assert curve.error(count) <= target * (1 + 1e-9)
        assert count == 0 or curve.error(count - 1) > target * (1 - 1e-9)
    assert Decay(0.9, 1.0, 0.0).updates_to(1.0) == 0


def test_a_target_below_the_floor_names_the_floor() -> None:
    with pytest.raises(InfeasiblePlanError, match="noise floor") as caught:
        Decay(0.9, 1.0, 0.05).updates_to(0.05)
    assert caught.value.constraint == "error"
    assert caught.value.nearest["target_error"] == 0.05


def test_rate_9_against_simulated_updates() -> None:
    """E[ρ^J_t] for Poisson batches, ρ = 0.99, K = 4: formula and simulation agree; plugging in E[J] is optimistic."""
    rng = np.random.default_rng(3)
    rho, group, time_s, batch_rate = 0.99, 4, 200.0, 4.0
    done = (rng.poisson(batch_rate * time_s, 400_000) + rng.integers(0, group, 400_000)) // group
    simulated = float(np.mean(rho ** done.astype(float)))
    rate = formulas.error_rate_per_s(batch_rate / group, rho, 1 / group)
    exact = formulas.error_rate_poisson_per_s(batch_rate, rho, group)
    assert rate == pytest.approx(exact, rel=1e-4)
    assert np.exp(-rate * time_s) == pytest.approx(simulated, rel=0.005)
    assert rho ** done.mean() < simulated


def test_rate_9_refuses_what_it_cannot_say() -> None:
    with pytest.raises(ValueError, match="dispersion"):
        formulas.error_rate_per_s(1.0, 0.01, 1.0)


def test_step_beyond_the_theory_is_refused() -> None:
    with pytest.raises(ValueError, match="step_size"):
        decay(1.0, 1.1, 1.0, 1.0, 1.0, 4, 10)


@pytest.mark.slow
def test_fit_recovers_the_constants_and_covers_them() -> None:
    """The 90 % interval of J holds the truth in four of five noisy runs at least."""
    rng = np.random.default_rng(4)
    truth, at = Decay(0.985, 1.5, 0.1), np.arange(5, 400, 6)
    target, held = 0.2, 0
    for _ in range(60):
        noisy = truth.error(at) * np.exp(rng.normal(0, 0.08, len(at)))
        interval = fit_decay(at, noisy, rng, replicas=100).updates_to(target)
        assert interval.point == pytest.approx(truth.updates_to(target), rel=0.25)
        held += interval.low <= truth.updates_to(target) <= interval.high
    assert held >= 48


def test_tail_fit_follows_a_curve_of_two_speeds() -> None:
    at = np.arange(0, 600, 6)
    two = np.exp(-at / 20.0) + 0.3 * np.exp(-at / 250.0)
    rng = np.random.default_rng(5)
    noisy = two * np.exp(rng.normal(0, 0.05, len(at)))
    whole, tail = fit_decay(at, noisy, rng, replicas=20), fit_tail(at, noisy, rng, replicas=20)
    assert tail.first_update > 0
    end = two[-1]
    assert abs(float(tail.curve.error(at[-1])) / end - 1) < abs(float(whole.curve.error(at[-1])) / end - 1)


def test_first_crossing_ignores_one_lucky_evaluation() -> None:
    assert first_crossing([1, 2, 3, 4, 5], [9, 1, 9, 9, 9], 2.0) is None
    assert first_crossing([1, 2], [1, 1], 2.0) is None


@pytest.mark.parametrize("errors", [[1, 2], [1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, float("nan")]])
def test_unusable_curves_are_refused(errors: list[float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        fit_decay(range(len(errors)), errors, np.random.default_rng(0))
