"""Theorems 4 and 5 against brute force, and the figures that are known for the paper's setting."""

from __future__ import annotations

import math
import os
import time

import numpy as np
import pytest
from benchmarks.paper import formulas, planning
from benchmarks.paper.formulas import best_num_spot, best_num_spot_at_risk, required_workers
from doll.errors import InfeasiblePlanError
from doll.theory import cost
from doll.theory.cost import Prices
from doll.theory.planning import best_assignment, check_budget

J, K, B, RATE, N = 10_000, 20, 256, 125.0, 64
SAMPLES = cost.work_samples(J, K, B)
HIGH, LOW = Prices(0.158, 0.286), Prices(0.058, 0.186)
SETTINGS = [(0.9, 1.05), (0.8, 1.05), (0.8, 1.10)]
# Cases per brute-force sweep; DOLL_SWEEP_CASES=100000 for the long one.
SWEEP = int(os.environ.get("DOLL_SWEEP_CASES", "10000"))


def test_runtime_with_all_on_demand() -> None:
    assert formulas.on_demand_runtime_s(SAMPLES, RATE, N) == 6400.0


@pytest.mark.parametrize(
    ("setting", "real", "whole", "high", "high_bound", "low", "low_bound", "runtime"),
    [
        ((0.9, 1.05), 30.476, 30, 0.8019, 0.7986, 0.6954, 0.6903, 1.0492),
        ((0.8, 1.05), 15.238, 15, 0.9120, 0.9105, 0.8646, 0.8624, 1.0492),
        ((0.8, 1.10), 29.091, 29, 0.8216, 0.8210, 0.7257, 0.7247, 1.0997),
    ],
)
def test_the_papers_settings_to_four_decimals(
    setting: tuple[float, float],
    real: float,
    whole: int,
    high: float,
    high_bound: float,
    low: float,
    low_bound: float,
    runtime: float,
) -> None:
    alpha, ratio = setting
    for prices, expected, bound in ((HIGH, high, high_bound), (LOW, low, low_bound)):
        spot = best_num_spot(SAMPLES, RATE, N, alpha, ratio * 6400, prices)
        assert spot == whole
        both = formulas.cost_usd([0, spot], SAMPLES, RATE, N, alpha, prices)
        assert round(float(both[1] / both[0]), 4) == expected
        result = cost.cost_ratio(ratio, N, alpha, prices)
        assert round(result.num_spot_real, 3) == real
        assert round(result.lower, 4) == bound
    assert round(float(formulas.runtime_s(whole, SAMPLES, RATE, N, alpha)) / 6400, 4) == runtime


@pytest.mark.parametrize(
    ("setting", "whole", "ratio_of_cost"),
    [((0.9, 1.05), 26, 0.8294), ((0.8, 1.05), 12, 0.9303), ((0.8, 1.10), 25, 0.8483)],
)
def test_the_chance_constrained_form(setting: tuple[float, float], whole: int, ratio_of_cost: float) -> None:
    alpha, ratio = setting
    spot = best_num_spot_at_risk(SAMPLES, RATE, N, alpha, ratio * 6400, HIGH, cycle_s=1000.0, z=1.645)
    assert spot == whole
    both = formulas.cost_usd([0, spot], SAMPLES, RATE, N, alpha, HIGH)
    assert round(float(both[1] / both[0]), 4) == ratio_of_cost
    assert best_num_spot_at_risk(SAMPLES, RATE, N, alpha, ratio * 6400, HIGH, cycle_s=1000.0, risk=0.05) == whole
    unequal = best_assignment(SAMPLES, [RATE] * N, alpha, ratio * 6400, HIGH, cycle_s=1000.0, risk=0.05)
    assert unequal.num_spot == whole


def test_a_deadline_nobody_meets_names_what_would_do() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"needs 68\.267 > 64") as caught:
        best_num_spot(SAMPLES, RATE, N, 0.9, 6000.0, HIGH)
    assert caught.value.constraint == "deadline"
    nearest = caught.value.nearest
    assert nearest["num_workers"] == 69
    assert nearest["deadline_s"] == pytest.approx(6400.0)
    # Each nearest value, put in, is feasible, and the next smaller one is not.
    best_num_spot(SAMPLES, RATE, N, 0.9, nearest["deadline_s"], HIGH)
    best_num_spot(SAMPLES * nearest["work_fraction"], RATE, N, 0.9, 6000.0, HIGH)
    best_num_spot(SAMPLES, RATE, 69, 0.9, 6000.0, HIGH)
    with pytest.raises(InfeasiblePlanError):
        best_num_spot(SAMPLES, RATE, 68, 0.9, 6000.0, HIGH)
    with pytest.raises(InfeasiblePlanError) as unequal:
        best_assignment(SAMPLES, [RATE] * N, 0.9, 6000.0, HIGH)
    assert unequal.value.nearest["deadline_s"] == pytest.approx(6400.0)


def test_budget_names_what_it_buys() -> None:
    check_budget(10.0, None, updates=J, deadline_s=1.0)
    check_budget(10.0, 10.0, updates=J, deadline_s=1.0)
    with pytest.raises(InfeasiblePlanError) as caught:
        check_budget(10.0, 4.0, updates=J, deadline_s=1.0)
    assert caught.value.constraint == "budget"
    assert caught.value.nearest == {"budget_usd": 10.0, "updates": 4000}


def test_float_floor_does_not_lose_a_worker() -> None:
    # (2 - 1.1) / 0.9 is 0.9999... in floats.
    assert best_num_spot(1.1, 1.0, 2, 0.1, 1.0, HIGH) == 1


def test_edges() -> None:
    assert best_num_spot(SAMPLES, RATE, N, 1.0, 6400.0, HIGH) == N
    assert best_num_spot(SAMPLES, RATE, N, 0.9, 6400.0, HIGH) == 0
    assert best_num_spot(SAMPLES, RATE, N, 0.9, 6400.0 / 0.9, HIGH) == N
    assert best_num_spot(SAMPLES, RATE, N, 0.9, 1e9, Prices(0.3, 0.286)) == 0
    assert best_num_spot(SAMPLES, RATE, N, 0.0, 2 * 6400.0, HIGH) == N // 2
    assert math.isinf(float(formulas.cost_usd(N, SAMPLES, RATE, N, 0.0, HIGH)))
    assert best_assignment(0.0, [RATE] * N, 0.9, 1.0, HIGH).num_spot == N


@pytest.mark.parametrize("bad", [{"alpha": 1.2}, {"deadline_s": 0.0}, {"rate_per_s": -1.0}, {"num_workers": 0}])
def test_wrong_numbers_are_named(bad: dict[str, float]) -> None:
    good = {"samples": 1.0, "rate_per_s": 1.0, "num_workers": 1, "alpha": 0.5, "deadline_s": 1.0}
    with pytest.raises(ValueError, match=next(iter(bad))):
        best_num_spot(**{**good, **bad}, prices=HIGH)  # type: ignore[arg-type]


@pytest.mark.slow
def test_theorem_4_and_corollary_2_against_brute_force() -> None:
    sweep = planning.theorem_4(SWEEP)
    assert sweep.wrong == []
    assert min(sweep.infeasible, sweep.telling) > SWEEP / 100


@pytest.mark.slow
def test_theorem_5_against_every_prefix() -> None:
    sweep = planning.theorem_5(SWEEP)
    assert sweep.wrong == []
    assert sweep.infeasible > SWEEP / 100
    assert sweep.telling > SWEEP / 5


def test_theorem_5_against_every_subset() -> None:
    rng = np.random.default_rng(55)
    for _ in range(300):
        rates = planning.rates(rng, int(rng.integers(2, 9)))
        alpha, prices = float(rng.uniform(0.05, 1)), Prices(float(rng.random()), float(rng.uniform(0.05, 1.0)))
        deadline = float(rng.uniform(1.0, 2.0)) * 1000.0 / rates.sum()
        best = math.inf
        for mask in range(2 ** len(rates)):
            spot = np.array([bool(mask >> n & 1) for n in range(len(rates))])
            effective = rates.sum() - (1 - alpha) * rates[spot].sum()
            if 1000.0 / effective <= deadline * (1 + 1e-9):
                burn = (~spot).sum() * prices.on_demand_usd_per_h + spot.sum() * alpha * prices.spot_usd_per_h
                best = min(best, 1000.0 / effective * burn / 3600)
        assert best_assignment(1000.0, rates, alpha, deadline, prices).expected_cost_usd == pytest.approx(best)


def test_equal_rates_give_theorem_4() -> None:
    for alpha, ratio in SETTINGS:
        assignment = best_assignment(SAMPLES, [RATE] * N, alpha, ratio * 6400, HIGH)
        assert assignment.num_spot == best_num_spot(SAMPLES, RATE, N, alpha, ratio * 6400, HIGH)
        assert assignment.deadline_binds
        assert assignment.spot.tolist() == [True] * assignment.num_spot + [False] * (N - assignment.num_spot)


def test_a_million_workers() -> None:
    rates = np.random.default_rng(0).pareto(2.0, 1_000_000) * 100 + 1
    deadline = 1.05 * 1e9 / rates.sum()
    took = []
    for _ in range(3):
        start = time.process_time()
        assignment = best_assignment(1e9, rates, 0.9, deadline, HIGH)
        took.append(time.process_time() - start)
    assert assignment.deadline_binds
    assert 0 < assignment.num_spot < 1_000_000
    # 0.1 s is the bar of the benchmark, by itself; here only an order of magnitude is held, on whatever machine.
    assert min(took) < 5.0


def test_required_workers_is_linear_in_work() -> None:
    assert required_workers(SAMPLES, RATE, 6400.0) == pytest.approx(N)
    assert required_workers(SAMPLES / 2, RATE, 6400.0) == pytest.approx(N / 2)
