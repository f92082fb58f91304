"""Fig. 4: rates λ_n ~ U(1, 250) drawn for each run, Theorem 5 with the deadline relative to the draw's own θ_0.

Criteria: mean cost over on-demand 0.690, 0.770 and 0.691 within 1 point, in the paper's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from doll.theory.cost import cost_ratio

from benchmarks.paper.formulas import on_demand_runtime_s
from benchmarks.paper.harness import FORMULA, PAPER, Check, Result, Value, claim, main
from benchmarks.paper.setting import (
    HIGH,
    RATE,
    SAMPLES,
    SETTINGS,
    Costs,
    Mix,
    N,
    Setting,
    chain,
    cost_claim,
    fluid,
    mixes,
    ticks_for,
    unequal,
)
from doll_lab.figures import decorate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Digest 1.7: mean N_s and mean cost ratio over many draws.
_EXPECTED = {SETTINGS[0]: (43.5, 0.690), SETTINGS[1]: (30.4, 0.770), SETTINGS[2]: (42.4, 0.691)}

_CAUSE = "unknown: (22) at the prices in the text gives 0.770 and 0.691, and chance moves a mean of 12 by 0.4 points"


def run(quick: bool) -> Result:
    draws, points = (12, 3.0) if quick else (120, 1.0)
    theta_0 = on_demand_runtime_s(SAMPLES, RATE, N)
    checks: list[Check] = []
    rows: list[dict[str, Value]] = []
    dots: dict[Setting, tuple[Costs, float]] = {}
    for index, setting in enumerate(SETTINGS):
        rng = np.random.default_rng((4, index))
        rates = unequal(draws, rng)
        spot, formulas = mixes(rates, SAMPLES, setting.alpha, setting.ratio * theta_0, HIGH)
        costs = fluid(Mix(spot), chain(draws, ticks_for(theta_0), N, setting.alpha, rng), rates, SAMPLES, HIGH)
        spots, formula = spot.sum(axis=1), float(formulas.mean())
        dots[setting] = (costs, formula)
        rows += [
            {
                "alpha": setting.alpha,
                "deadline_ratio": setting.ratio,
                "draw": draw,
                "num_spot": int(spots[draw]),
                "cost_ratio": float(costs.cost[draw]),
                "formula": float(formulas[draw]),
                "runtime_ratio": float(costs.runtime[draw]),
            }
            for draw in range(draws)
        ]
        number, expected = _EXPECTED[setting]
        ours, mean = float(costs.cost.mean()), float(spots.mean())
        close = abs(ours - expected) < points / 100
        checks += [
            cost_claim(f"{setting}: cost over on-demand", setting.paper_unequal, ours, "" if index == 0 else _CAUSE),
            Check(
                f"{setting}: cost over on-demand, of (22)",
                None,
                formula,
                ours,
                f"{expected:g} ± {points:g} points",
                close,
            ),
            Check(f"{setting}: mean N_s", None, number, mean, "± 2", abs(mean - number) < 2),
            Check(f"{setting}: standard deviation of the cost", None, None, float(costs.cost.std()), "", None),
        ]
    means = [dots[setting][0].cost.mean() for setting in SETTINGS]
    ordered = bool(max(means[0], means[2]) < means[1] < 1)
    name = "(0.9, 1.05) and (0.8, 1.10) < (0.8, 1.05) < 1"
    checks.append(claim("order", name, "yes", "yes" if ordered else "no", "yes", ordered))
    equal = [float(cost_ratio(setting.ratio, N, setting.alpha, HIGH).lower) for setting in SETTINGS]
    fewer = sum(mine < other for mine, other in zip(means, equal, strict=True))
    checks.append(
        claim(
            "order",
            "settings with a lower cost than with equal rates (Fig. 3a)",
            "all",
            fewer,
            "3 of 3",
            fewer == len(SETTINGS),
        )
    )
    totals = np.random.default_rng(4).uniform(1, 250, (2000, N)).sum(axis=1)
    share = float(np.mean(totals * 1.05 * theta_0 < SAMPLES))
    checks.append(
        Check("draws without a feasible mix for 1.05 · 6400 s", None, 0.24, share, "± 0.03", abs(share - 0.24) < 0.03)
    )
    notes = [
        "A deadline fixed at 1.05 · 6400 s would be infeasible for a quarter of the draws, so it is set for each draw.",
        "The caption's “% below on-demand” means “% of on-demand”, and “18.71 % savings” is 100 - 81.71 = 18.29 %.",
        "“Fig. 4 has lower costs than Fig. 3a”: the paper's own numbers have it for two of three settings. Here all "
        "three costs are below (19), the least cost with equal rates.",
    ]
    return Result("Fig. 4: unequal rates, Theorem 5", checks, rows, lambda figure: _draw(figure, dots), notes)


def _draw(figure: Figure, dots: dict[Setting, tuple[Costs, float]]) -> None:
    axes = figure.subplots()
    for index, (setting, (costs, formula)) in enumerate(dots.items()):
        axes.scatter(costs.runtime, costs.cost, s=10, alpha=0.5, color=f"C{index}", label=str(setting))
        label = "(22), mean" if index == 0 else None
        axes.scatter([costs.runtime.mean()], [formula], marker="x", s=70, color=FORMULA, label=label)
        label = "paper, measured" if index == 0 else None
        axes.axhline(setting.paper_unequal, color=PAPER, linewidth=0.8, linestyle="--", label=label)
    decorate(axes, "Fig. 4: rates ~ U(1, 250), one draw per run", "runtime / θ_0", "cost / on-demand")
    axes.legend(fontsize=7, frameon=False)


if __name__ == "__main__":
    main("fig4", run)
