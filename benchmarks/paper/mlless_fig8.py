"""MLLess Fig. 8: the scale-in tuner on a job where workers hardly help, and on one where they are needed.

The production tuner (`doll.provisioner.planning.tuner`) runs on a model of a job: P = 24 workers, a step takes
(0.05 + 0.01 p) s times a lognormal factor (σ 0.05), progress z grows by (p / 24)^γ per step, the loss is
1 / (0.02 z^0.9 + 0.58) + 0.49 with 0.4 % noise, and the job ends with 10 losses in a row of at most 0.57.

Losses pass an exponential average before each fit, as in the paper; its code has this off.

Criteria: at γ = 0.25 Perf/$ rises by a factor of 1.4 or more in no more time; at γ = 1.25 the time grows by 15 % at the
most, and with the printed sign of Eq. (1) by more; with raw losses by more than 15 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from doll.provisioner.planning.tuner import LossHistory, ScaleInTuner, TunerSettings
from doll.theory.scale_in import FIT_SPAN, Score, relative_excess

from benchmarks.paper.formulas import printed_excess
from benchmarks.paper.function_cost import functions_usd, perf_per_usd
from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, claim, main, near
from doll_lab.figures import decorate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS, TARGET, IN_A_ROW = 24, 0.57, 10
NOISE, JITTER = 0.004, 0.05
SETTINGS = TunerSettings(every_s=20.0, horizon_s=10.0, knee_slope=-7e-4)
MILD, HARMFUL = 0.25, 1.25
_MOST_STEPS = 20_000


@dataclass
class Outcome:
    """One run of the job.

    Attributes:
        workers: left at the end.
        trace: seconds, loss and workers of every tenth step.
    """

    duration_s: float
    cost_usd: float
    workers: int
    steps: int
    trace: list[tuple[float, float, int]] = field(default_factory=list)

    @property
    def perf(self) -> float:
        """Perf/$, per second and USD."""
        return perf_per_usd(self.duration_s, self.cost_usd)


def play(
    gamma: float, seed: int, threshold: float | None, score: Score = relative_excess, fit_span: float = FIT_SPAN
) -> Outcome:
    """The job from its start to its target.

    Args:
        gamma: how progress per step depends on the workers.
        threshold: S; None: no tuner.
    """
    rng = np.random.default_rng((8, seed))
    tuner = ScaleInTuner(replace(SETTINGS, threshold=threshold or 0.0, fit_span=fit_span), WORKERS, score)
    history = LossHistory(most=_MOST_STEPS)
    now_s = worker_s = progress = 0.0
    workers, reached = WORKERS, 0
    trace: list[tuple[float, float, int]] = []
    for step in range(1, _MOST_STEPS + 1):
        step_s = (0.05 + 0.01 * workers) * math.exp(JITTER * rng.standard_normal())
        now_s, worker_s = now_s + step_s, worker_s + workers * step_s
        progress += (workers / WORKERS) ** gamma
        loss = (1 / (0.02 * progress**0.9 + 0.58) + 0.49) * (1 + NOISE * rng.standard_normal())
        if step % 10 == 1:
            trace.append((now_s, loss, workers))
        reached = reached + 1 if loss <= TARGET else 0
        if reached == IN_A_ROW:
            break
        if threshold is not None:
            history.observe(step, loss, now_s)
            if tuner.ask(history, now_s).remove:
                tuner.removed(history, now_s)
                workers = tuner.workers
    return Outcome(now_s, functions_usd(worker_s, now_s, now_s), workers, step, trace)


def run(quick: bool) -> Result:
    seeds = range(1 if quick else 5)
    jobs: dict[str, tuple[float, float | None, Score, float]] = {
        "mild, no tuner": (MILD, None, relative_excess, FIT_SPAN),
        "mild, tuner": (MILD, 0.15, relative_excess, FIT_SPAN),
        "harmful, no tuner": (HARMFUL, None, relative_excess, FIT_SPAN),
        "harmful, tuner": (HARMFUL, 0.03, relative_excess, FIT_SPAN),
        "harmful, raw losses": (HARMFUL, 0.03, relative_excess, 0.0),
        "harmful, printed sign": (HARMFUL, 0.03, printed_excess, FIT_SPAN),
        "harmful, raw losses, printed sign": (HARMFUL, 0.03, printed_excess, 0.0),
    }
    outcomes = {
        name: [play(gamma, seed, threshold, score, span) for seed in seeds]
        for name, (gamma, threshold, score, span) in jobs.items()
    }

    def mean(name: str, what: str) -> float:
        return float(np.mean([getattr(outcome, what) for outcome in outcomes[name]]))

    def ratio(name: str, what: str) -> float:
        return mean(name, what) / mean(f"{name.split(',')[0]}, no tuner", what)

    gain, slower = ratio("mild, tuner", "perf"), ratio("mild, tuner", "duration_s")
    harmful, printed = ratio("harmful, tuner", "duration_s"), ratio("harmful, printed sign", "duration_s")
    raw = ratio("harmful, raw losses", "duration_s")
    raw_printed = ratio("harmful, raw losses, printed sign", "duration_s")
    slow = 1.1 if quick else 1.15
    checks = [
        claim("value", "γ = 0.25: Perf/$ over no tuner", "1.4 to 1.6", gain, "≥ 1.4", gain >= 1.4, formula=1.57),
        claim("value",
              "γ = 0.25: time over no tuner", 0.9, slower, "paper ± 20 %, ≤ 1", slower <= 1 and near(slower, 0.9, 0.2)),
        Check("γ = 0.25: workers left", None, None, mean("mild, tuner", "workers"), "", None),
        Check("γ = 1.25, S = 0.03: time over no tuner", None, 1.09, harmful, "≤ 1.15", harmful <= 1.15),
        Check("γ = 1.25, S = 0.03: workers left", None, "14 to 16", mean("harmful, tuner", "workers"), "", None),
        Check("γ = 1.25, no tuner: Perf/$", None, 0.0079, mean("harmful, no tuner", "perf"), "", None),
        Check("γ = 1.25, S = 0.03: Perf/$", None, 0.0081, mean("harmful, tuner", "perf"), "", None),
        Check("the same with (1) as printed: time over no tuner", None, None, printed, "> with the other sign",
              printed > harmful),
        Check("the same: workers left", None, 6, mean("harmful, printed sign", "workers"), "", None),
        Check("the same: Perf/$", None, 0.0076, mean("harmful, printed sign", "perf"), "", None),
        Check("γ = 1.25, raw losses: time over no tuner", None, 1.09, raw, "≤ 1.15", raw <= 1.15),
        Check("raw losses, (1) as printed: time over no tuner", None, None, raw_printed, f"> {slow:g}",
              raw_printed > slow),
    ]  # fmt: skip
    rows: list[dict[str, Value]] = [
        {
            "job": name, "seed": seed, "duration_s": outcome.duration_s, "cost_usd": outcome.cost_usd,
            "perf_per_usd": outcome.perf, "workers": outcome.workers, "steps": outcome.steps,
        }
        for name, runs in outcomes.items()
        for seed, outcome in zip(seeds, runs, strict=True)
    ]  # fmt: skip
    notes = [
        "The paper's jobs (logistic regression on Criteo, matrix factorisation on MovieLens, on functions of 2021) are "
        "replaced by a model of a job, so absolute times and costs are not comparable.",
        "The slope at the knee is relative to the loss here (-7e-4). With a limit of -6e-4 the knee is seen some 20 s "
        "later, and the printed sign is slower by 12 to 15 % only, since less time is left for its removals.",
        "Eq. (1) as printed removes workers while they are needed: at a loss above the reference its score is "
        "negative, and so below every threshold.",
    ]
    return Result(
        "MLLess Fig. 8: scale-in tuner",
        checks,
        rows,
        lambda figure: _draw(figure, {n: o[0] for n, o in outcomes.items()}),
        notes,
    )


def _draw(figure: Figure, outcomes: dict[str, Outcome]) -> None:
    colors = {"no tuner": FORMULA, "tuner": OURS, "printed sign": PAPER}
    axes = figure.subplots(2, 2, sharex="col")
    for column, job in enumerate(("mild", "harmful")):
        for name, outcome in outcomes.items():
            if not name.startswith(job):
                continue
            variant = name.split(", ")[1]
            if variant not in colors:
                continue
            at_s, losses, workers = zip(*outcome.trace, strict=True)
            axes[0, column].plot(at_s, losses, color=colors[variant], linewidth=1, label=variant)
            axes[1, column].plot(at_s, workers, color=colors[variant], linewidth=1.5, label=variant)
        decorate(axes[0, column], f"γ = {MILD if job == 'mild' else HARMFUL}", "", "loss")
        decorate(axes[1, column], "", "seconds", "workers")
        axes[0, column].legend(fontsize=7, frameon=False)


if __name__ == "__main__":
    main("mlless_fig8", run)
