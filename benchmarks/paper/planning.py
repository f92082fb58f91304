"""Theorem 4, (17), Corollary 2 and Theorem 5 against exhaustive oracles, and the numbers of the paper's setting.

Criteria: 0 mismatches in 100 000 random problems each; the reference values of `TABLE` to four decimals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from doll.errors import InfeasiblePlanError
from doll.theory.cost import Prices, cost_ratio, unequal_cost_usd
from doll.theory.planning import best_assignment

from benchmarks.paper.formulas import (
    best_num_spot,
    best_num_spot_at_risk,
    cost_slope_usd,
    cost_usd,
    on_demand_runtime_s,
    runtime_s,
    unequal_runtime_s,
)
from benchmarks.paper.harness import FORMULA, OURS, Check, Result, Value, main
from benchmarks.paper.setting import CYCLE_S, HIGH, LOW, RATE, SAMPLES, SETTINGS, N
from doll_lab.figures import decorate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Digest 1.6: n_c, N_s, cost ratio and (19) at the high price, the same at the low one, runtime / θ_0; at 5 % risk N_s
# and its ratio.
TABLE = (
    (30.476, 30, 0.8019, 0.7986, 0.6954, 0.6903, 1.0492, 26, 0.8294),
    (15.238, 15, 0.9120, 0.9105, 0.8646, 0.8624, 1.0492, 12, 0.9303),
    (29.091, 29, 0.8216, 0.8210, 0.7257, 0.7247, 1.0997, 25, 0.8483),
)


@dataclass
class Sweep:
    """Random problems against an oracle.

    Attributes:
        infeasible: problems without a feasible mix (which the planner refused).
        telling: problems on which a slip would show: an N_s exactly on the deadline, or an optimum inside.
        wrong: what did not agree, in words.
    """

    cases: int = 0
    infeasible: int = 0
    telling: int = 0
    wrong: list[str] | None = None

    def __post_init__(self) -> None:
        self.wrong = self.wrong or []

    def expect(self, true: bool, what: str) -> None:
        if not true:
            assert self.wrong is not None
            self.wrong.append(what)


def theorem_4(cases: int, seed: int = 4) -> Sweep:
    """Theorem 4 and both sides of Corollary 2 against all N_s, in whole numbers: the oracle needs no rounding."""
    rng, sweep = np.random.default_rng(seed), Sweep(cases)
    for case in range(cases):
        # Availability p/q and deadline ratio u/v are fractions.
        workers, q, v = int(rng.integers(1, 40)), int(rng.choice([1, 2, 10, 20, 997])), int(rng.choice([1, 8, 20, 100]))
        p, u = int(rng.integers(0, q + 1)), int(rng.integers(max(1, v * 9 // 10), 3 * v))
        alpha, ratio, prices = p / q, u / v, Prices(float(rng.random()), float(rng.uniform(0.05, 1.0)))
        where = f"case {case}: N = {workers}, α = {p}/{q}, θ/θ_0 = {u}/{v}"
        deadline = ratio * on_demand_runtime_s(1000.0, 2.0, workers)
        spots = np.arange(workers + 1)
        slack = (workers * q - (q - p) * spots) * u - workers * v * q
        in_time = slack >= 0
        try:
            chosen = best_num_spot(1000.0, 2.0, workers, alpha, deadline, prices)
        except InfeasiblePlanError:
            sweep.infeasible += 1
            sweep.expect(not in_time.any(), f"{where}: refused")
            continue
        if not in_time.any():
            sweep.expect(False, f"{where}: not refused")
            continue
        sweep.telling += bool((slack[1:] == 0).any())
        costs = cost_usd(spots, 1000.0, 2.0, workers, alpha, prices)
        sweep.expect(bool(in_time[chosen]), f"{where}: late")
        # Ties (α = 0) may go either way: the cost decides, not the number.
        sweep.expect(bool(costs[chosen] <= costs[in_time].min() * (1 + 1e-12)), f"{where}: not the cheapest")
        if alpha > 0:
            sweep.expect(chosen == (spots[in_time].max() if prices.spot_is_cheaper else 0), f"{where}: another N_s")
        bounds, relative = cost_ratio(ratio, workers, alpha, prices), costs[chosen] / costs[0]
        sweep.expect(bool(bounds.lower <= relative * (1 + 1e-9)), f"{where}: below Corollary 2")
        sweep.expect(bool(relative <= bounds.upper * (1 + 1e-9)), f"{where}: above Corollary 2")
    return sweep


def rates(rng: np.random.Generator, count: int) -> np.ndarray:
    """Uniform, log-normal, Pareto, or of three values with ties."""
    match int(rng.integers(4)):
        case 0:
            return rng.uniform(1, 250, count)
        case 1:
            return rng.lognormal(0, 1.5, count)
        case 2:
            return rng.pareto(1.1, count) + 0.01
        case _:
            return rng.choice([1.0, 2.0, 7.0], count)


def equation_17(cases: int, seed: int = 17) -> Sweep:
    """(17) against the difference quotient of (16), and its sign."""
    rng, sweep = np.random.default_rng(seed), Sweep(cases)
    for case in range(cases):
        workers, alpha = int(rng.integers(2, 200)), float(rng.choice([0.0, 1.0, *rng.uniform(0.05, 1, 4)]))
        prices = Prices(float(rng.uniform(0.01, 1)), float(rng.uniform(0.01, 1)))
        spot, step = float(rng.uniform(0.01, workers - 1)), 1e-4
        where = f"case {case}: N = {workers}, N_s = {spot:.3f}, α = {alpha:.3f}"
        slope = float(cost_slope_usd(spot, 1e6, 2.0, workers, alpha, prices))
        low, high = cost_usd([spot - step, spot + step], 1e6, 2.0, workers, alpha, prices)
        sweep.expect(abs((high - low) / (2 * step) - slope) <= 1e-4 * abs(slope) + 1e-5, f"{where}: another slope")
        sweep.expect((slope < 0) == (alpha > 0 and prices.spot_is_cheaper), f"{where}: another sign")
        sweep.telling += alpha == 0 or not prices.spot_is_cheaper
    return sweep


def theorem_5(cases: int, seed: int = 5) -> Sweep:
    """Theorem 5 against every prefix of the sorted streams, and that the cost has one local minimum."""
    rng, sweep = np.random.default_rng(seed), Sweep(cases)
    for case in range(cases):
        streams = rates(rng, int(rng.integers(1, 30)))
        alpha, prices = float(rng.random()), Prices(float(rng.random()), float(rng.uniform(0.05, 1.0)))
        deadline = float(rng.uniform(0.9, 3.0)) * 1000.0 / streams.sum()
        times = unequal_runtime_s(1000.0, streams, alpha)
        costs = unequal_cost_usd(1000.0, streams, alpha, prices)
        in_time = times <= deadline * (1 + 1e-9)
        where = f"case {case}: N = {len(streams)}, α = {alpha:.4f}"
        try:
            best = best_assignment(1000.0, streams, alpha, deadline, prices)
        except InfeasiblePlanError:
            sweep.infeasible += 1
            sweep.expect(not in_time.any(), f"{where}: refused")
            continue
        if not in_time.any():
            sweep.expect(False, f"{where}: not refused")
            continue
        sweep.expect(bool(times[best.num_spot] <= deadline * (1 + 1e-9)), f"{where}: late")
        sweep.expect(bool(costs[best.num_spot] <= costs[in_time].min() * (1 + 1e-9)), f"{where}: not the cheapest")
        sweep.expect(best.num_spot == np.count_nonzero(best.spot), f"{where}: mask and number differ")
        sweep.expect(bool(np.isclose(best.expected_cost_usd, costs[best.num_spot])), f"{where}: another cost")
        sweep.expect(bool(np.isclose(best.expected_runtime_s, times[best.num_spot])), f"{where}: another runtime")
        if best.num_spot:
            slowest = streams[best.spot].max() <= streams[~best.spot].min(initial=np.inf)
            sweep.expect(bool(slowest), f"{where}: not the slowest")
        sweep.telling += 0 < int(np.argmin(costs)) < len(streams)
        steps = np.diff(costs)
        turns = np.sign(steps)[np.abs(steps) > 1e-12 * costs[:-1]]
        sweep.expect(np.count_nonzero(np.diff(turns) < 0) == 0, f"{where}: two local minima")
    return sweep


def run(quick: bool) -> Result:
    cases = 2000 if quick else 100_000
    checks: list[Check] = []
    rows: list[dict[str, Value]] = []
    for setting, expected in zip(SETTINGS, TABLE, strict=True):
        values = numbers(setting.alpha, setting.ratio)
        names = (
            "n_c",
            "N_s",
            "cost ratio (16), high price",
            "bound (19), high price",
            "cost ratio (16), low price",
            "bound (19), low price",
            "runtime / θ_0 (15)",
            "N_s at 5 % risk",
            "its cost ratio",
        )
        for name, ours, formula in zip(names, values, expected, strict=True):
            digits = 3 if name == "n_c" else 4
            rows.append(
                {
                    "alpha": setting.alpha,
                    "deadline_ratio": setting.ratio,
                    "what": name,
                    "formula": formula,
                    "ours": ours,
                }
            )
            if name != "n_c":
                checks.append(
                    Check(f"{setting}: {name}", None, formula, ours, "to four decimals", round(ours, digits) == formula)
                )
    sweeps = {
        "Theorem 4 and Corollary 2": theorem_4(cases),
        "(17), the slope of the cost": equation_17(cases),
        "Theorem 5": theorem_5(cases),
    }
    for name, sweep in sweeps.items():
        assert sweep.wrong is not None
        checks.append(
            Check(
                f"{name}: mismatches in {sweep.cases} random problems ({sweep.infeasible} infeasible, "
                f"{sweep.telling} on an edge)",
                0 if name == "Theorem 5" else None,
                0,
                len(sweep.wrong),
                "0",
                not sweep.wrong,
                kind="formula" if name == "Theorem 5" else None,
            )
        )
    notes = [
        "(18) as printed gives a negative floor for infeasible deadlines, divides by zero at α = 1, and loses a worker "
        "to floating-point rounding (N = 2, α = 0.1); (19) is a lower bound on cost, not a guarantee of savings.",
    ]
    return Result("Theorems 4 and 5, Corollary 2", checks, rows, _draw, notes)


def numbers(alpha: float, ratio: float) -> tuple[float, ...]:
    """One line of the table, as in `TABLE`."""
    deadline = ratio * on_demand_runtime_s(SAMPLES, RATE, N)
    spot = best_num_spot(SAMPLES, RATE, N, alpha, deadline, HIGH)
    safe = best_num_spot_at_risk(SAMPLES, RATE, N, alpha, deadline, HIGH, cycle_s=CYCLE_S, z=1.645)
    high, low = (cost_usd([0, spot, safe], SAMPLES, RATE, N, alpha, prices) for prices in (HIGH, LOW))
    bounds = [cost_ratio(ratio, N, alpha, prices) for prices in (HIGH, LOW)]
    time = float(runtime_s(spot, SAMPLES, RATE, N, alpha)) / on_demand_runtime_s(SAMPLES, RATE, N)
    return (
        round(bounds[0].num_spot_real, 3),
        spot,
        float(high[1] / high[0]),
        bounds[0].lower,
        float(low[1] / low[0]),
        bounds[1].lower,
        time,
        safe,
        float(high[2] / high[0]),
    )


def _draw(figure: Figure) -> None:
    axes = figure.subplots()
    for index, setting in enumerate(SETTINGS[:1] + SETTINGS[2:]):
        costs = cost_usd(np.arange(N + 1), SAMPLES, RATE, N, setting.alpha, HIGH)
        spot = best_num_spot(SAMPLES, RATE, N, setting.alpha, setting.ratio * 6400.0, HIGH)
        axes.plot(np.arange(N + 1), costs / costs[0], color=(OURS, FORMULA)[index], label=str(setting))
        axes.scatter([spot], [costs[spot] / costs[0]], color=(OURS, FORMULA)[index])
    decorate(axes, "Theorem 4: cost over N_s, and the last N_s in time", "N_s", "cost / on-demand")
    axes.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    main("planning", run)
