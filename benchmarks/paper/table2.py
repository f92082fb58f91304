"""Table II: all rows at (0.9, 1.05), by the model. Data set and optimizer do not enter a cost; K and the rates do.

Criteria: fixed mix within 0.5 points of (16) and 1 point of (22); adaptive at most 0.5 points more; (19) is below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from doll.theory.cost import cost_ratio, work_samples

from benchmarks.paper.fig5 import ALPHA, RATIO, both, streams_of
from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, main, near
from benchmarks.paper.setting import FEWER_UPDATES, HIGH, NOT_PRICES, B, Costs, J, N, bound_claim, cost_claim
from doll_lab.figures import decorate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Data set, optimizer, equal rates, K, and the paper's percentages: static, adaptive, bound.
ROWS = (
    ("EMNIST", "SGD", True, 20, 69.5, 66.5, 79.8),
    ("EMNIST", "SGD", False, 20, 70.5, 56.5, None),
    ("EMNIST", "Adam", True, 20, 78.2, 54.6, 80.1),
    ("I-MNIST", "SGD", True, 10, 75.8, 54.6, 80.1),
    ("I-MNIST", "SGD", False, 10, 77.3, 52.9, None),
    ("CIFAR-10", "SGD", True, 4, 82.6, 57.2, 79.8),
    ("CIFAR-10", "SGD", False, 4, 64.7, 53.7, None),
)

# Static percentages that are within 3 points of the formula.
_AS_BY_FORMULA = (70.5, 78.2, 82.6)
_CAUSE = f"the model has the same cost for each row of equal rates, and of unequal ones; {FEWER_UPDATES}"
_BOUND_CAUSE = "0.801 is (16) at N_s = 30, truncated: the table has two values for one setting"


_DEARER = (
    "unknown: the paper's cost is above the formula's at the prices in the text, which fewer updates cannot explain"
)


def _early(paper: float, early: float) -> str:
    """The cause of an adaptive cost: whether fewer updates are the whole of it."""
    as_early = f"if the row's runs all end as early as its static cost says, adaptive costs {early:.3f}"
    if near(early, paper, 0.03):
        return f"fewer updates than J, as the paper says: {as_early}"
    return f"{NOT_PRICES}; not only fewer updates: {as_early}"


def run(quick: bool) -> Result:
    runs = 4 if quick else 120
    slack = 0.03 if quick else 0.005
    checks: list[Check] = []
    rows: list[dict[str, Value]] = []
    lines: list[tuple[str, float, float, float, float]] = []
    known: dict[tuple[bool, int], tuple[Costs, Costs, float]] = {}
    for data, optimizer, equal, size, paper_static, paper_adaptive, paper_bound in ROWS:
        if (equal, size) not in known:
            rng = np.random.default_rng((2, equal, size))
            samples = work_samples(J, size, B)
            # Short runs (θ_0 = 1280 s) vary more.
            known[equal, size] = both(streams_of(equal, runs * (2 if size < 10 else 1), rng), HIGH, rng, samples)
        fixed, adaptive, formula = known[equal, size]
        static, ours = float(fixed.cost.mean()), float(adaptive.cost.mean())
        early = ours * paper_static / 100 / static
        width = slack if equal else 2 * slack
        name = f"{data}, {optimizer}, {'λ = 125' if equal else 'λ ~ U(1, 250)'}, K = {size}"
        checks.append(
            Check(
                f"{name}: fixed mix",
                None,
                formula,
                static,
                f"within {100 * width:g} points of {'(16)' if equal else '(22)'}",
                abs(static - formula) < width,
            )
        )
        checks.append(
            Check(
                f"{name}: adaptive",
                None,
                formula,
                ours,
                "at most fixed mix + 0.5 points",
                ours <= static + 0.005,
            )
        )
        checks += [
            cost_claim(f"{name}: static", paper_static / 100, static,
                       "" if paper_static in _AS_BY_FORMULA else _CAUSE if paper_static / 100 < static else _DEARER),
            cost_claim(f"{name}: adaptive", paper_adaptive / 100, ours, _early(paper_adaptive / 100, early)),
            Check(f"{name}: adaptive, all ending as early as the paper's static cost says", None, paper_adaptive / 100,
                  early, "", None),
        ]  # fmt: skip
        if paper_bound is not None:
            checks.append(bound_claim(f"{name}: expected lower bound", paper_bound / 100,
                                      _BOUND_CAUSE if paper_bound == 80.1 else ""))  # fmt: skip
            bound = cost_ratio(RATIO, N, ALPHA, HIGH).lower
            checks.append(
                Check(
                    f"{name}: bound (19)",
                    None,
                    bound,
                    static,
                    "(19) is below the fixed mix",
                    static > bound - slack,
                )
            )
        rows.append(
            {
                "data": data,
                "optimizer": optimizer,
                "equal_rates": str(equal),
                "group_size": size,
                "paper_static": paper_static / 100,
                "paper_adaptive": paper_adaptive / 100,
                "paper_bound": None if paper_bound is None else paper_bound / 100,
                "formula": formula,
                "static": static,
                "adaptive": ours,
                "adaptive_runtime": float(adaptive.runtime.mean()),
            }
        )
        lines.append((name, paper_static / 100, paper_adaptive / 100, static, ours))
    notes = [
        "“Expect. lower bound” is printed as 79.8 % and as 80.1 % for the same α, θ/θ_0 and prices: the first is (19), "
        "the second (16) at N_s = 30, both truncated.",
        "Three of the four measured static costs with equal rates lie below (19). The paper's own explanation is that "
        "fewer updates were needed than J; a lower price than the one in the text would do it, too. It does not "
        "explain the adaptive costs: what makes the static run of a row end early makes its adaptive run end as early "
        "(rows “all ending as early”).",
        "Six of the seven adaptive costs (52.9 to 57.2 %) are near that of runs all on spot (55.2 %). With all J "
        "updates such a run takes 1.11 θ_0 by (15); with at most 94 % of them it takes 1.05 θ_0. That is an inference "
        "from the model: the paper gives neither the updates nor the times of these runs.",
        "The model gives every row of equal rates the same cost, whatever K, data set and optimizer; the paper's rows "
        "differ by 13 points.",
    ]
    return Result("Table II: costs at (0.9, 1.05)", checks, rows, lambda figure: _draw(figure, lines), notes)


def _draw(figure: Figure, lines: list[tuple[str, float, float, float, float]]) -> None:
    axes = figure.subplots()
    at = np.arange(len(lines))[::-1]
    for column, color, label in (
        (1, PAPER, "paper, fixed mix"),
        (2, "#e3c4df", "paper, adaptive"),
        (3, OURS, "ours, fixed mix"),
        (4, "#9ecae9", "ours, adaptive"),
    ):
        marker = "s" if column < 3 else "o"
        axes.scatter([line[column] for line in lines], at, color=color, marker=marker, label=label)
    axes.axvline(HIGH.spot_usd_per_h / HIGH.on_demand_usd_per_h, color=FORMULA, linestyle=":", label="all on spot")
    axes.axvline(
        cost_ratio(RATIO, N, ALPHA, HIGH).lower, color=FORMULA, linestyle="--", label="bound (19), equal rates"
    )
    axes.set_yticks(at, [line[0] for line in lines])
    decorate(axes, "Table II", "cost / on-demand", "")
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)


if __name__ == "__main__":
    main("table2", run)
