"""MLLess Fig. 9 and 10: bsp, isp(0.7), and isp(0.7) with the scale-in tuner: time, cost, and loss for a budget.

One matrix factorisation of ratings like MovieLens's, by P = 24 functions that draw 50 ratings a step from all, until
the mean squared error is 0.6. Engine, policies, filter, tuner and cost formula are those of production, on simulated
time: a function computes for 0.2 s (times a lognormal factor, σ 0.05), and writes and reads over a link at which a step
of bsp takes about a second more. Beside them, as a stand-in for the paper's machines, bsp with a dense all-reduce over
the same links. A machine computes with PyTorch, whose gradients have all rows: that takes so many times as long as with
those of the batch as measured at ML-20M's size (`benchmarks.paper.measured`).

Criteria: isp reaches the target in less time than bsp; with the tuner it costs less than without, in at most 10 % more
time; and at each of three budgets it has the lowest loss of the three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from doll.config.policy import PolicyConfig
from doll.provisioner.planning.tuner import ScaleInTuner, TunerSettings
from doll.ps.policies.bsp import BspPolicyConfig
from doll.ps.policies.isp import IspPolicyConfig

from benchmarks.paper.factorization import Factorization
from benchmarks.paper.function_cost import machines_usd
from benchmarks.paper.function_job import DenseRing, Factors, FunctionJob, Outcome, Point, Store, Vector
from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, cannot_be_tried, claim, main, near
from benchmarks.paper.measured import kept
from benchmarks.paper.mlless_fig4 import ITEMS, RANK, USERS, Ratings
from benchmarks.paper.mlless_tables import PYTORCH_MACHINES, PYTORCH_USD_PER_H
from doll_lab.figures import decorate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORKERS, BATCH, RATE = 24, 50, 0.01
COMPUTE_S, JITTER, LINK_BYTES_PER_S = 0.2, 0.05, 108_000.0
SETTINGS = TunerSettings(every_s=20.0, horizon_s=10.0, knee_slope=-1e-3, threshold=0.15)
BSP, ISP, TUNED, RING = "bsp", "isp(0.7)", "isp(0.7), tuner", "bsp, dense all-reduce"
SPARSE_RING = "bsp, dense all-reduce of sparse gradients"
MEASURED = kept()
DENSE = {name: times.dense_of_sparse for name, times in MEASURED.times.items()}
VARIANTS = (BSP, ISP, TUNED, RING, SPARSE_RING)
_POLICIES: dict[str, PolicyConfig] = {
    BSP: BspPolicyConfig(contribution="step"), RING: BspPolicyConfig(contribution="step"),
    SPARSE_RING: BspPolicyConfig(contribution="step"),
    ISP: IspPolicyConfig(significance=0.7), TUNED: IspPolicyConfig(significance=0.7),
}  # fmt: skip

_CAUSE = (
    "unknown: PyTorch's gradients of all rows, with Nesterov momentum, which the paper blames, were measured to take "
    f"{DENSE['ML-10M']:.1f} (ML-10M) and {DENSE['ML-20M']:.1f} (ML-20M) times as long as those of the batch's rows "
    f"({MEASURED.where}), and machines compute so long here; the rest of the paper's gap is not explained by it"
)


@dataclass(frozen=True)
class Setting:
    """How far the jobs go.

    Attributes:
        target: mean squared error.
        budgets_usd: increasing, see Fig. 10.
    """

    target: float
    budgets_usd: tuple[float, ...]


FULL, QUICK = Setting(0.6, (0.12, 0.16, 0.2)), Setting(0.64, (0.09, 0.1, 0.11))


class RatingFactors(Factors):
    """`Factors` whose last two are the biases of rows and columns."""

    def start(self) -> Vector:
        parameters = super().start()
        users, items = self.data.factors(parameters)
        users[:, -1], items[:, -2] = 1.0, 1.0
        users[:, -2], items[:, -1] = 0.0, 0.0
        return parameters


def ratings(seed: int) -> RatingFactors:
    """The problem."""
    drawn = Ratings.draw(np.random.default_rng((9, seed)))
    values = drawn.values - drawn.values.mean()
    data = Factorization(USERS, ITEMS, RANK + 2, drawn.users, drawn.items, values)
    return RatingFactors(data, rate=RATE, batch=BATCH, workers=0, seed=seed)


def play(variant: str, seed: int, setting: Setting) -> Outcome:
    """The job to its target, and to the largest budget where that is later."""

    def compute_s(worker: int, batch: int) -> float:
        return (
            longer
            * COMPUTE_S
            * float(np.exp(JITTER * np.random.default_rng((seed, 5, worker, batch)).standard_normal()))
        )

    problem = ratings(seed)
    store, least_s = Store(LINK_BYTES_PER_S), 0.0
    longer = DENSE["ML-20M"] if variant == RING else 1.0
    if variant in (RING, SPARSE_RING):
        store = DenseRing(LINK_BYTES_PER_S, num_parameters=problem.data.num_parameters, workers=WORKERS)
        least_s = setting.budgets_usd[-1] / machines_usd(PYTORCH_MACHINES, 1.0, PYTORCH_USD_PER_H)
    tuner = ScaleInTuner(SETTINGS, WORKERS) if variant == TUNED else None
    job = FunctionJob(problem, _POLICIES[variant], WORKERS, store, compute_s, tuner=tuner)
    return job.run(target=setting.target, least_usd=setting.budgets_usd[-1], least_s=least_s, most_steps=2000)


def spent_usd(variant: str, point: Point) -> float:
    """On functions, or on the machines of the paper."""
    return (
        machines_usd(PYTORCH_MACHINES, point.time_s, PYTORCH_USD_PER_H) if variant in (RING, SPARSE_RING) else point.usd
    )


@dataclass(frozen=True)
class Reached:
    """When and with how many workers the target was reached, and the losses that the budgets pay for."""

    seconds: float
    usd: float
    workers: int
    losses: tuple[float, ...]


def reached(variant: str, outcome: Outcome, setting: Setting) -> Reached:
    at = next(point for point in outcome.points if point.loss <= setting.target)
    losses = tuple(
        [point.loss for point in outcome.points if spent_usd(variant, point) <= budget][-1]
        for budget in setting.budgets_usd
    )
    return Reached(at.time_s, spent_usd(variant, at), at.workers, losses)


def run(quick: bool) -> Result:
    setting, seeds = (QUICK, range(1)) if quick else (FULL, range(3))
    outcomes = {variant: [play(variant, seed, setting) for seed in seeds] for variant in VARIANTS}
    all_reached = {
        variant: [reached(variant, outcome, setting) for outcome in runs] for variant, runs in outcomes.items()
    }

    def mean(variant: str, what: str) -> float:
        return float(np.mean([getattr(entry, what) for entry in all_reached[variant]]))

    def loss(variant: str, at: int) -> float:
        return float(np.mean([entry.losses[at] for entry in all_reached[variant]]))

    faster = mean(BSP, "seconds") / mean(ISP, "seconds")
    cheaper = mean(TUNED, "usd") / mean(ISP, "usd")
    slower = mean(TUNED, "seconds") / mean(ISP, "seconds")
    of_bsp = mean(BSP, "seconds") / mean(TUNED, "seconds")
    checks = [
        Check("Fig. 9: bsp's time to the target over isp's", None, None, faster, "> 1", faster > 1),
        Check("Fig. 9: isp's cost with the tuner over that without", None, None, cheaper, "< 1", cheaper < 1),
        Check("Fig. 9: isp's time with the tuner over that without", None, None, slower, "≤ 1.1", slower <= 1.1),
        Check("Fig. 9: workers left at the target", None, None, mean(TUNED, "workers"), "", None),
        claim("value", "Fig. 9, ML-20M: bsp's time over that of isp with the tuner", 334 / 115, of_bsp, "paper ± 20 %",
              near(of_bsp, 334 / 115, 0.2)),
    ]  # fmt: skip
    for at, budget in enumerate(setting.budgets_usd):
        best = min((BSP, ISP, TUNED), key=lambda variant: loss(variant, at))
        best_of_all = min((BSP, ISP, TUNED, RING), key=lambda variant: loss(variant, at))
        checks += [
            claim(
                "order",
                f"Fig. 10: lowest loss of the three for {100 * budget:.0f} ¢",
                "isp, tuner",
                best,
                TUNED,
                best == TUNED,
            ),
            claim(
                "order",
                f"Fig. 10: lowest loss for {100 * budget:.0f} ¢, machines included",
                "isp, tuner",
                best_of_all,
                TUNED,
                best_of_all == TUNED,
            ),
            *(
                Check(f"{variant} for {100 * budget:.0f} ¢: loss", None, None, loss(variant, at), "", None)
                for variant in VARIANTS
            ),
        ]
    slower, dearer = mean(RING, "seconds") / mean(TUNED, "seconds"), mean(RING, "usd") / mean(TUNED, "usd")
    sparse_s = mean(SPARSE_RING, "seconds") / mean(TUNED, "seconds")
    sparse_usd = mean(SPARSE_RING, "usd") / mean(TUNED, "usd")
    checks += [
        claim("value",
              "machines: time to the target over that of isp with the tuner", "14.5 to 15.7", slower, "12 to 18",
              12 <= slower <= 18, _CAUSE),
        claim("value",
              "machines: cost over that of isp with the tuner", "4.9 to 6.3", dearer, "4 to 7.5", 4 <= dearer <= 7.5,
              _CAUSE),
        claim("order", "machines: dearer and slower than isp with the tuner", "> 1", min(slower, dearer), "> 1",
              min(slower, dearer) > 1),
        Check("machines whose gradients have the batch's rows alone: the same time", None, None, sparse_s, "", None),
        Check("machines whose gradients have the batch's rows alone: the same cost", None, None, sparse_usd, "", None),
    ]  # fmt: skip
    checks.append(
        cannot_be_tried(
            "order", "Fig. 9: PyWren-IBM's time", "slowest in all jobs", "another system, on functions and a store"
        )
    )
    rows: list[dict[str, Value]] = [
        {
            "variant": variant, "seed": seed, "seconds": entry.seconds, "usd": entry.usd, "workers": entry.workers,
            **{f"loss_{100 * budget:.0f}_cents": value
               for budget, value in zip(setting.budgets_usd, entry.losses, strict=True)},
        }
        for variant, entries in all_reached.items()
        for seed, entry in enumerate(entries)
    ]  # fmt: skip
    notes = [
        "The ratings are those of Fig. 4; a worker's update has a tenth of the parameters. The paper's budgets are 9, "
        "18 and 36 ¢, for other jobs.",
        "Of the comparison with machines the order is reproduced, and the size is not. A dense all-reduce moves less "
        f"than {WORKERS} workers that read each other's updates, and {PYTORCH_MACHINES} machines at "
        f"{PYTORCH_USD_PER_H} USD/h cost a third of {WORKERS} functions: by bytes and prices alone, machines would be "
        "slower than isp but cheaper. The paper puts its gap down to PyTorch's handling of sparse data. A step of "
        f"PyTorch with gradients of all rows and Nesterov momentum takes {1000 * MEASURED.times['ML-20M'].dense_s:.0f} "
        f"ms at ML-20M's size, one with those of the batch {1000 * MEASURED.times['ML-20M'].sparse_s:.0f} ms, on one "
        f"thread ({MEASURED.where}). That makes machines dearer too, but not by the paper's factors.",
        "Fig. 5, 6 and 11 (threads in a function, types of machines, a GPU) are measurements of hardware of 2021 and "
        "are not reproduced: only their cost arithmetic is, in Tables 3 to 7.",
    ]
    drawn = {variant: outcomes[variant][0] for variant in (BSP, ISP, TUNED, RING)}
    return Result(
        "MLLess Fig. 9, 10: time, cost, and loss for a budget", checks, rows,
        lambda figure: _draw(figure, drawn, setting), notes,
    )  # fmt: skip


def _draw(figure: Figure, drawn: dict[str, Outcome], setting: Setting) -> None:
    of_time: Axes
    of_cost: Axes
    of_time, of_cost = figure.subplots(1, 2, sharey=True)
    colors = {BSP: FORMULA, ISP: "#72b7b2", TUNED: OURS, RING: PAPER}
    for variant, outcome in drawn.items():
        losses = [point.loss for point in outcome.points]
        cents = [100 * spent_usd(variant, point) for point in outcome.points]
        line = "--" if variant == RING else "-"
        for axes, at in ((of_time, [point.time_s for point in outcome.points]), (of_cost, cents)):
            axes.plot(at, losses, line, color=colors[variant], label=variant)
    of_time.axhline(setting.target, color="#999999", linewidth=0.8, linestyle=":")
    for budget in setting.budgets_usd:
        of_cost.axvline(100 * budget, color="#999999", linewidth=0.8, linestyle=":")
    of_time.set_ylim(setting.target - 0.02, 0.8)
    decorate(of_time, "Fig. 9: loss over time, one seed", "seconds", "mean squared error")
    decorate(of_cost, "Fig. 10: loss over cost (dotted: budgets)", "¢", "")
    of_cost.set_xlim(0, 130 * setting.budgets_usd[-1])
    of_time.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    main("mlless_fig9", run)
