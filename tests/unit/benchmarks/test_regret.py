"""Regret on old weights: a wrong bound, steps or views that do not shrink, or a wrong filter fails a check."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from benchmarks.paper import essp_theorems, mlless_theorem1
from benchmarks.paper.harness import Check
from benchmarks.paper.old_weights import (
    Spread,
    all_that_may,
    evenly,
    mostly_none,
    near_optimum,
    under_isp,
    under_ssp,
    under_vap,
)
from benchmarks.paper.regret import Regret

ssp = partial(under_ssp, dimensions=10, distance=3.0)
vap = partial(under_vap, dimensions=10, distance=3.0)
isp = partial(under_isp, dimensions=10, distance=3.0)


def failed(checks: list[Check]) -> list[str]:
    """Those with another verdict than the declared one."""
    return [check.what for check in checks if not check.is_expected]


def test_a_view_misses_the_clocks_that_are_drawn_and_no_more() -> None:
    """As by hand, update by update: P = 2, s = 1, all late."""
    theorem = Regret(0.5, 1.0, 3.0)
    few = under_ssp(theorem, 2, 1, all_that_may, dimensions=3, distance=2.0, clocks=60, seed=4)
    rng = np.random.default_rng((51, 4))
    optimum = rng.normal(size=(1, 3))
    optimum *= 2.0 / np.linalg.norm(optimum)
    updates: list[np.ndarray] = []
    regret = 0.0
    for clock in range(60):
        directions = rng.normal(size=(1, 2, 3))
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        seen = sum(updates[: 2 * max(0, clock - 1)], np.zeros(3))
        made = []
        for worker, direction in enumerate(directions[0]):
            error = float(direction @ (seen - optimum[0]))
            regret += abs(error)
            made.append(-(0.5 / np.sqrt(2 * clock + worker + 1)) * np.sign(error) * direction)
        updates += made
    assert few.updates[-1] == 120
    np.testing.assert_allclose(few.regret[0, -1], regret, rtol=1e-9)


def test_without_a_threshold_the_filter_is_bsp_and_with_one_it_is_not() -> None:
    theorem = Regret(1.0, 1.0, 3.0)
    bsp = ssp(theorem, 4, 0, all_that_may, clocks=100, seed=2)
    assert np.array_equal(isp(theorem, 4, 0.0, clocks=100, seed=2).regret, bsp.regret)
    assert not np.array_equal(isp(theorem, 4, 0.7, clocks=100, seed=2).regret, bsp.regret)


@pytest.mark.slow  # simulations
def test_a_bound_that_does_not_shrink_and_steps_that_do_not_fail_the_checks() -> None:
    theorem = Regret(1.5, 1.0, 3.0)
    right = vap(theorem, 1.0, updates=20_000, seed=0)
    bound = theorem.vap(right.updates, 10, 1.0)
    assert failed(essp_theorems.regret_checks("VAP", right, bound)) == []
    fixed = vap(theorem, 1.0, updates=20_000, seed=0, shrinks=False)
    assert len(failed(essp_theorems.regret_checks("VAP", fixed, bound))) >= 2, "the bound and the exponent"
    late = ssp(theorem, 4, 3, all_that_may, clocks=5000, seed=0, constant_step=1.5)
    assert len(failed(essp_theorems.regret_checks("SSP", late, theorem.ssp(late.updates, 4, 3)))) >= 2
    # A bound that leaves out what views miss is exceeded.
    assert failed(essp_theorems.regret_checks("VAP", right, theorem.of_newest(right.updates) / 10)) != []
    assert mlless_theorem1.SETTINGS[0][1] == 0.0, "the script compares its first setting with BSP"


@pytest.mark.slow  # simulations
def test_old_weights_raise_the_variance_and_fresh_ones_do_not() -> None:
    near_it = partial(near_optimum, dimensions=4, clocks=150, runs=1000, seed=1)
    near = {
        (staleness, name): near_it(1.0, 4, staleness, misses)
        for staleness in (3, 15)
        for name, misses in (("SSP", evenly), ("ESSP", mostly_none), ("all late", all_that_may))
    }
    assert failed(essp_theorems.spread_checks(near)) == []
    swapped = {**near, (15, "ESSP"): near[15, "all late"], (15, "all late"): near[15, "ESSP"]}
    assert len(failed(essp_theorems.spread_checks(swapped))) == 5
    # Weights whose changes have nothing to do with their gradients.
    rng = np.random.default_rng(0)
    random = Spread(*(np.abs(rng.normal(size=100)) for _ in range(4)))
    wrong = failed(essp_theorems.spread_checks({**near, (3, "ESSP"): random}))
    assert len([what for what in wrong if what.startswith("ESSP, s = 3: ")]) == 3, "all but the sign of the covariance"
