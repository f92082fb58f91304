"""Theorem 1 of HetPipe: its constants, the algebra of its bound, and the sign of its second lemma."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.paper.wsp import WspRegret, global_staleness, regret_of_step
from hypothesis import given
from hypothesis import strategies as st

SETTINGS = st.builds(
    WspRegret, num_workers=st.integers(2, 16), in_flight=st.integers(1, 8), distance=st.integers(0, 32),
    gradient_bound=st.floats(0.1, 10.0), radius=st.floats(0.1, 10.0),
)  # fmt: skip


def test_global_staleness_of_the_papers_example() -> None:
    assert [global_staleness(4, distance) for distance in (0, 1, 4)] == [6, 10, 22]
    assert [global_staleness(1, distance) for distance in range(4)] == [0, 1, 2, 3], "SSP with s = D"
    for bad in ((0, 0), (4, -1)):
        with pytest.raises(ValueError, match="expected"):
            global_staleness(*bad)


@given(SETTINGS)
def test_the_bound_is_what_the_three_sums_of_the_proof_give(setting: WspRegret) -> None:
    """(9), (10) and the first sum with σ inserted; from `least_updates` on the simple form is no smaller."""
    big_l, m, sigma, window = setting.gradient_bound, setting.radius, setting.step_scale, setting.window
    s_g, s_l, n = global_staleness(setting.in_flight, setting.distance), setting.in_flight, setting.num_workers
    for count in (10, setting.least_updates, 10**7):
        sums = (
            sigma * big_l**2 * math.sqrt(count)
            + m**2 / sigma * math.sqrt(count)
            + sigma * big_l**2 * (2 * s_g + s_l) * (s_g + s_l) * n**2
            + 2 * sigma * big_l**2 * (2 * s_g + s_l) * n * math.sqrt(count)
        )
        assert float(setting.bound_for_any(count)) == pytest.approx(sums / count)
    least = setting.least_updates
    assert float(setting.bound_for_any(least)) <= float(setting.bound(least)) * (1 + 1e-9)
    assert float(setting.bound(least)) == pytest.approx(4 * m * big_l * math.sqrt((2 * s_g + s_l) * n / least))
    if least > 20:
        assert float(setting.bound_for_any(least - 2)) > float(setting.bound(least - 2)), "and not before"
    assert window == (2 * s_g + s_l) * n


@given(SETTINGS)
def test_no_other_scale_of_the_steps_has_a_lower_leading_term_by_much(setting: WspRegret) -> None:
    """σ = M/(L √W) is where M²/σ and the staleness term 2 σ L² W are within a factor 2 of each other."""
    sigma, window = setting.step_scale, setting.window

    def leading(scale: float) -> float:
        return setting.radius**2 / scale + 2 * scale * setting.gradient_bound**2 * window

    best = 2 * math.sqrt(2 * window) * setting.radius * setting.gradient_bound
    assert best * (1 - 1e-9) <= leading(sigma) <= 1.07 * best
    assert np.all(np.diff(setting.step_size(np.arange(1, 50))) < 0)


def test_one_minibatch_alone_has_no_condition() -> None:
    with pytest.raises(ValueError, match="expected N, N_m or D to be larger"):
        _ = WspRegret(1, 1, 0, 1.0, 1.0).least_updates


@given(st.integers(0, 2**32))
def test_the_second_lemma_holds_with_the_other_sign_only(seed: int) -> None:
    rng = np.random.default_rng(seed)
    optimum, weights, gradient = rng.normal(size=(3, 5))
    missing, extra = rng.normal(size=(2, 4, 5)).sum(axis=1) * 0.1
    eta = float(rng.uniform(0.01, 0.5))
    noisy = weights + missing - extra  # updates are -η g: what is missing is added back
    exact = float((noisy - optimum) @ gradient)
    assert regret_of_step(optimum, weights, gradient, eta, missing, extra) == pytest.approx(exact, abs=1e-9)
    after = weights - eta * gradient
    difference = (float(np.sum((optimum - after) ** 2)) - float(np.sum((optimum - weights) ** 2))) / 2 / eta
    printed = eta / 2 * float(gradient @ gradient) + difference + float((missing - extra) @ gradient)
    assert abs(printed - exact) == pytest.approx(2 * abs(difference), abs=1e-9)
    assert abs(printed - exact) > 1e-6
