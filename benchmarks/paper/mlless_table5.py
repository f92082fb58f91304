"""MLLess Table 5: sparse logistic regression with a constant number of samples per step, by P = 2, 4 and 8 workers.

Each worker computes B samples of the B P of a step; bsp on the production engine, on simulated time, to a cross-entropy
of 0.42. A step takes a + c B + d P, which is linear in P as in Fig. 4 (a): every worker reads each of the P updates.
The constants follow from the paper's three times, with one worker here for six there.

Criteria: the times are within 10 % of their mean. The steps to the target are within 5 % of theirs, without which the
constants would not matter; and they are not, if each worker's gradient is a mean over its own B samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from doll.ps.policies.bsp import BspPolicyConfig

from benchmarks.paper.function_job import FunctionJob, Outcome, Store
from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, claim, main
from benchmarks.paper.logistic import Clicks
from doll_lab.figures import decorate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORKERS, STEP_SAMPLES, RATE, TARGET = (2, 4, 8), 2000, 2.0, 0.42
PAPER_WORKERS, PAPER_S = (12, 24, 48), (437.1, 395.3, 426.3)
_MOST_STEPS = 1000


class StepTime(NamedTuple):
    """Of all steps of the paper's job, at P workers: a + c / P + d P seconds."""

    a: float
    c: float
    d: float

    def transfer_share(self, workers: int) -> float:
        """Of a step at so many workers."""
        return self.d * workers / (self.a + self.c / workers + self.d * workers)


def step_time() -> StepTime:
    """The constants at which the three times of the paper take the same number of steps."""
    at = np.array(PAPER_WORKERS, float)
    return StepTime(*np.linalg.solve(np.stack([np.ones(3), 1 / at, at], axis=1), np.array(PAPER_S)).tolist())


def play(workers: int, seed: int, *, of_means: bool = False, steps: float | None = None) -> Outcome:
    """The job to its target.

    Args:
        of_means: the server adds the workers' mean gradients, with the rate at which P = 2 is the same.
        steps: of all three jobs in the paper; None: a step takes a second.
    """
    batch = STEP_SAMPLES // workers
    divisor = WORKERS[0] * batch if of_means else STEP_SAMPLES
    problem = Clicks(columns=26 * 400, samples=20_000, batch=batch, step_samples=divisor, rate=RATE, seed=seed)
    store, compute_s = Store(float("inf")), 1.0
    if steps is not None:
        scale, times = PAPER_WORKERS[0] // WORKERS[0], step_time()
        store = Store(float("inf"), latency_s=times.d * scale / steps)
        compute_s = (times.a + times.c / (scale * workers)) / steps
    job = FunctionJob(problem, BspPolicyConfig(contribution="step"), workers, store, lambda worker, number: compute_s)
    return job.run(target=TARGET, most_steps=_MOST_STEPS)


def spread(values: list[float]) -> float:
    """The largest distance from the mean, relative to it."""
    return float(np.max(np.abs(np.array(values) / np.mean(values) - 1)))


def run(quick: bool) -> Result:
    seeds = range(1 if quick else 3)
    plain = {workers: [play(workers, seed) for seed in seeds] for workers in WORKERS}
    steps = {workers: float(np.mean([outcome.last.step for outcome in plain[workers]])) for workers in WORKERS}
    timed = {workers: [play(workers, seed, steps=steps[WORKERS[0]]) for seed in seeds] for workers in WORKERS}
    seconds = {workers: float(np.mean([outcome.last.time_s for outcome in timed[workers]])) for workers in WORKERS}
    means = {
        workers: float(np.mean([play(workers, seed, of_means=True).last.step for seed in seeds])) for workers in WORKERS
    }
    times = step_time()
    by_bytes = {}
    for workers in WORKERS:
        first, here = (
            np.mean([(run.bytes_sent + run.bytes_read) / number / run.last.step for run in plain[number]])
            for number in (WORKERS[0], workers)
        )
        transfer_s = times.d * PAPER_WORKERS[0] * here / first
        by_bytes[workers] = float(
            steps[workers]
            / steps[WORKERS[0]]
            * (times.a + times.c * WORKERS[0] / PAPER_WORKERS[0] / workers + transfer_s)
        )
    off, steps_off = spread(list(seconds.values())), spread(list(steps.values()))
    means_off, bytes_off = spread(list(means.values())), spread(list(by_bytes.values()))
    checks = [
        Check(f"seconds to the target, P = {workers} for {there} there", None, printed, seconds[workers], "", None)
        for workers, there, printed in zip(WORKERS, PAPER_WORKERS, PAPER_S, strict=True)
    ]
    checks += [
        claim("order", "times: largest distance from their mean", spread(list(PAPER_S)), off, "≤ 10 %", off <= 0.1),
        Check("steps to the target: the same", None, None, steps_off, "≤ 5 %", steps_off <= 0.05),
        Check("steps, where the mean gradients of the workers are added: the same", None, None, means_off, "> 5 %",
              means_off > 0.05),
        Check("times, if transfer took as long as its bytes: the same", None, None, bytes_off, "", None),
        Check("share of transfer in a step of 12 workers there", None, None, times.transfer_share(12), "", None),
    ]  # fmt: skip
    rows: list[dict[str, Value]] = [
        {
            "workers": workers, "seed": seed, "steps": outcome.last.step, "seconds": outcome.last.time_s,
            "bytes_sent": outcome.bytes_sent, "steps_of_means": means[workers],
        }
        for workers in WORKERS
        for seed, outcome in enumerate(timed[workers])
    ]  # fmt: skip
    notes = [
        f"a, c and d are solved from the three times of the paper (a = {times.a:.0f} s, c = {times.c:.0f} s, "
        f"d = {times.d:.1f} s in all its steps), so the times here say no more than that the steps do not depend on P.",
        "They do not depend on P if the sum of all gradients is scaled, and P workers make the step that one worker "
        "would make of all samples. In MLLess's code workers' mean gradients are added: then the step grows with P.",
        "By its bytes alone transfer would grow less than P: the fewer samples a batch has, the fewer columns its "
        "update has.",
    ]
    at_first = [outcome.last.time_s for outcome in timed[WORKERS[0]]]
    typical = int(np.argmin(np.abs(np.array(at_first) - seconds[WORKERS[0]])))
    drawn = {workers: runs[typical] for workers, runs in timed.items()}
    return Result(
        "MLLess Table 5: workers at a constant number of samples per step", checks, rows,
        lambda figure: _draw(figure, drawn, seconds), notes,
    )  # fmt: skip


def _draw(figure: Figure, drawn: dict[int, Outcome], seconds: dict[int, float]) -> None:
    losses: Axes
    bars: Axes
    losses, bars = figure.subplots(1, 2)
    for (workers, outcome), color in zip(drawn.items(), (FORMULA, OURS, PAPER), strict=True):
        at_s = [point.time_s for point in outcome.points]
        losses.plot(at_s, [point.loss for point in outcome.points], color=color, label=f"P = {workers}")
    losses.axhline(TARGET, color="#999999", linewidth=0.8, linestyle=":")
    decorate(losses, "Loss, one seed", "seconds", "cross-entropy")
    losses.legend(fontsize=8, frameon=False)
    at = np.arange(len(WORKERS))
    bars.bar(at - 0.2, list(seconds.values()), 0.38, color=OURS, label="here")
    bars.bar(at + 0.2, PAPER_S, 0.38, color=PAPER, label="paper")
    bars.set_xticks(at, [f"{here} ({there})" for here, there in zip(WORKERS, PAPER_WORKERS, strict=True)])
    decorate(bars, "Time to the target", "workers here (in the paper)", "seconds")
    bars.set_ylim(0, 540)
    bars.legend(fontsize=8, frameon=False, ncols=2)


if __name__ == "__main__":
    main("mlless_table5", run)
