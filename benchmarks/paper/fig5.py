"""Fig. 5: a fixed mix against adaptive provisioning (Section V-C), equal and unequal rates, two spot prices.

α = 0.9, θ = 1.05 θ_0.

Criteria: adaptive costs at most 0.5 points more than the fixed mix, and its runtime varies by at most 0.1 %.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from doll.theory.cost import Prices

from benchmarks.paper.formulas import on_demand_runtime_s
from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, claim, main
from benchmarks.paper.setting import (
    HIGH,
    LOW,
    NOT_PRICES,
    RATE,
    SAMPLES,
    Costs,
    Mix,
    N,
    PaperAdaptive,
    bound_claim,
    chain,
    fluid,
    mixes,
    ticks_for,
    unequal,
)
from doll_lab.figures import decorate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHA, RATIO = 0.9, 1.05
_PAPER_SAVING = {"equal": 0.0432, "unequal": 0.1985}
_CAUSE = f"{NOT_PRICES}; not fewer updates, of which the paper speaks: both mixes would need fewer"
_PAPER = {("equal", "high"): (0.6950, 0.6650), ("unequal", "high"): (0.7054, 0.5654)}


def both(
    rates: np.ndarray, prices: Prices, rng: np.random.Generator, samples: float = SAMPLES
) -> tuple[Costs, Costs, float]:
    """(fixed mix, adaptive, mean formula of the fixed mix) on the same chains; `rates` has shape (runs, N)."""
    theta_0 = on_demand_runtime_s(samples, RATE, N)
    spot, formulas = mixes(rates, samples, ALPHA, RATIO * theta_0, prices)
    up = chain(len(rates), ticks_for(theta_0), N, ALPHA, rng)
    fixed = fluid(Mix(spot), up, rates, samples, prices)
    return fixed, fluid(PaperAdaptive(RATIO * theta_0), up, rates, samples, prices), float(formulas.mean())


def streams_of(equal: bool, runs: int, rng: np.random.Generator) -> np.ndarray:
    """Rates of shape (runs, N): 125 samples/s each, or U(1, 250) drawn per run."""
    return np.full((runs, N), RATE) if equal else unequal(runs, rng)


def run(quick: bool) -> Result:
    runs = 6 if quick else 120
    checks: list[Check] = []
    rows: list[dict[str, Value]] = []
    bars: list[tuple[str, float, float, float, Value, Value]] = []
    for streams in ("equal", "unequal"):
        for price, prices in (("high", HIGH), ("low", LOW)):
            rng = np.random.default_rng((5, streams == "equal", price == "high"))
            fixed, adaptive, formula = both(streams_of(streams == "equal", runs, rng), prices, rng)
            paper = _PAPER.get((streams, price), (None, None))
            name = f"{streams} rates, {price} spot price"
            static, ours = float(fixed.cost.mean()), float(adaptive.cost.mean())
            spread, spread_static = float(adaptive.runtime.std()), float(fixed.runtime.std())
            late = float(np.mean(adaptive.runtime > RATIO * (1 + 1e-9)))
            checks += [
                Check(
                    f"{name}: fixed mix, cost over on-demand",
                    None,
                    formula,
                    static,
                    "within 1 point" if not quick else "within 3 points",
                    abs(static - formula) < (0.03 if quick else 0.01),
                ),
                Check(
                    f"{name}: adaptive, cost over on-demand",
                    None,
                    formula,
                    ours,
                    "at most fixed mix + 0.5 points",
                    ours <= static + 0.005,
                ),
                Check(
                    f"{name}: adaptive, s.d. of the runtime over θ_0 (fixed mix {spread_static:.4f})",
                    None,
                    None,
                    spread,
                    "≤ 0.001" if not quick else "≤ 0.003",
                    spread <= (0.003 if quick else 0.001),
                ),
                Check(f"{name}: adaptive, runs that are late by any amount", None, None, late, "", None),
            ]
            if price == "high":
                saving, stated = 1.0 - ours / static, _PAPER_SAVING[streams]
                checks.append(
                    claim("value", f"{streams} rates: adaptive saves, of the fixed mix", stated, saving,
                          "at least half of the paper's", saving >= stated / 2, _CAUSE if streams == "unequal" else "")
                )  # fmt: skip
            bars.append((name, static, ours, formula, *paper))
            for method, costs in (("fixed", fixed), ("adaptive", adaptive)):
                rows += [
                    {
                        "streams": streams,
                        "price": price,
                        "method": method,
                        "run": index,
                        "cost_ratio": float(cost),
                        "runtime_ratio": float(runtime),
                    }
                    for index, (cost, runtime) in enumerate(zip(costs.cost, costs.runtime, strict=True))
                ]
    checks.append(bound_claim("bound (19), equal rates, high price", 0.798))
    notes = [
        "Prices are constant here. Recorded ones change little: re-planning saves as much with them (docs/live.md, "
        "Figs. 3 to 5 on recorded prices), so that they do not make the difference. It narrows the runtime about "
        "sixfold. The "
        "savings of one to three points come from DOLL's choice of slots: of the slots on spot, those that are down "
        "move first, and lose nothing by it. With the paper's choice (any N_s slots) a separate reference simulation "
        "found no savings.",
        "Adaptive runs end just before the deadline: a plan needs a margin or a guard, and DOLL's has both.",
        "The paper's 56.54 % is near π_s/π_o = 55.2 %, the cost of all on spot from beginning to end. By (15) that "
        "takes 1.11 θ_0 for J updates; with fewer updates, of which the paper speaks, it may end before 1.05 θ_0. How "
        "many updates its runs made is not given.",
    ]
    return Result("Fig. 5: fixed mix and adaptive", checks, rows, lambda figure: _draw(figure, bars), notes)


def _draw(figure: Figure, bars: list[tuple[str, float, float, float, Value, Value]]) -> None:
    axes = figure.subplots()
    at = np.arange(len(bars))
    axes.bar(at - 0.2, [bar[1] for bar in bars], 0.38, color=OURS, label="fixed mix")
    axes.bar(at + 0.2, [bar[2] for bar in bars], 0.38, color="#9ecae9", label="adaptive")
    axes.scatter(at, [bar[3] for bar in bars], marker="x", s=70, color=FORMULA, label="(16), (22)", zorder=3)
    for index, bar in enumerate(bars):
        for offset, value in ((-0.2, bar[4]), (0.2, bar[5])):
            if isinstance(value, float):
                axes.plot([index + offset - 0.19, index + offset + 0.19], [value, value], color=PAPER, linewidth=2)
    axes.plot([], [], color=PAPER, linewidth=2, label="paper, measured")
    axes.set_xticks(at, [bar[0].replace(", ", "\n") for bar in bars])
    axes.set_ylim(0.4, 0.95)
    decorate(axes, "Fig. 5: α = 0.9, θ = 1.05 θ_0", "", "cost / on-demand")
    axes.legend(fontsize=7, frameon=False, ncols=4)


if __name__ == "__main__":
    main("fig5", run)
