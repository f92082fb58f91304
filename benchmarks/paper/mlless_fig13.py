"""MLLess Fig. 13: one or two shards of the key-value store, by number of workers.

The matrix factorisation of Fig. 7 by P = 12 to 96 workers of 12 entries a step each, bsp on the production engine, on
simulated time. Each of the P workers reads P - 1 updates in a step, over its own link and from shards that serve one
request after the other; worker w writes to shard w mod 2. A shard is 40 times as fast as a link, so one shard is busy
all the time from some 40 workers on.

Criteria: with two shards the target is reached in the same time at 24 workers, within 2 %; and 1.2 times as fast or
more from the number of workers on at which one shard is busy for 9 tenths of the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from doll.ps.policies.bsp import BspPolicyConfig

from benchmarks.paper.factorization import low_rank
from benchmarks.paper.function_job import Factors, FunctionJob, Outcome, Store
from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, claim, main, near
from benchmarks.paper.mlless_fig7 import RATE, TARGET
from doll_lab.figures import decorate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORKERS, BATCH = (12, 24, 48, 64, 80, 96), 12
LINK_BYTES_PER_S, SHARD_LINKS, COMPUTE_S = 30_000.0, 40.0, 0.2
SATURATED = 0.9
# Of the paper, as ratios of the times with one and with two shards.
PAPER_SPEED_UP = {64: 1.4, 96: 1 / 0.9}
"""Over 24 workers with one shard, to which the paper normalises its times."""
_MOST_STEPS = 1000


def play(workers: int, shards: int, seed: int) -> tuple[Outcome, float]:
    """The job to its target, and the share of its time in which its first shard was busy."""
    data = low_rank(300, 200, 5, 0.2, 0.1, np.random.default_rng((7, seed)))
    problem = Factors(data, rate=RATE, batch=BATCH, workers=workers, seed=seed)
    store = Store(LINK_BYTES_PER_S, shards=shards, shard_bytes_per_s=SHARD_LINKS * LINK_BYTES_PER_S)
    policy = BspPolicyConfig(contribution="step")
    outcome = FunctionJob(problem, policy, workers, store, lambda worker, batch: COMPUTE_S).run(
        target=TARGET, most_steps=_MOST_STEPS
    )
    return outcome, store.busy_s[0] / outcome.last.time_s


def run(quick: bool) -> Result:
    seeds, all_workers = (range(1), (24, 64)) if quick else (range(3), WORKERS)
    played = {
        (workers, shards): [play(workers, shards, seed) for seed in seeds]
        for workers in all_workers
        for shards in (1, 2)
    }

    def mean_s(workers: int, shards: int) -> float:
        return float(np.mean([outcome.last.time_s for outcome, _ in played[workers, shards]]))

    def steps(workers: int) -> float:
        return float(np.mean([outcome.last.step for outcome, _ in played[workers, 1]]))

    gain = {workers: mean_s(workers, 1) / mean_s(workers, 2) for workers in all_workers}
    busy = {workers: float(np.mean([share for _, share in played[workers, 1]])) for workers in all_workers}
    checks: list[Check] = []
    for workers in all_workers:
        stated: str | None = None
        criterion, ok = "", None
        if workers == 24:
            stated, criterion, ok = "almost no effect", "1 ± 0.02", abs(gain[workers] - 1) <= 0.02
        elif busy[workers] >= SATURATED:
            criterion, ok = "≥ 1.2", gain[workers] >= 1.2
        checks.append(
            Check(f"P = {workers}, one shard busy for {busy[workers]:.0%}: time with one shard over that with two",
                  stated, None, gain[workers], criterion, ok, kind=None if stated is None else "order")
        )  # fmt: skip
    for workers, paper in PAPER_SPEED_UP.items():
        if workers in all_workers:
            speed_up = mean_s(24, 1) / mean_s(workers, 2)
            checks.append(
                claim("value",
                      f"P = {workers} with two shards: speed-up over 24 with one", paper, speed_up, "paper ± 20 %",
                      near(speed_up, paper, 0.2))
            )  # fmt: skip
    saturated = [workers for workers in all_workers if busy[workers] >= SATURATED]
    fewer = steps(all_workers[-1]) / steps(all_workers[0])
    checks += [
        Check("fewest workers that saturate one shard", None, "above 40", min(saturated, default=0), "> 24",
              min(saturated, default=0) > 24),
        claim("order", f"steps to the target, P = {all_workers[-1]} over P = {all_workers[0]}", "fewer", fewer, "< 1",
              fewer < 1),
    ]  # fmt: skip
    rows: list[dict[str, Value]] = [
        {
            "workers": workers, "shards": shards, "seed": seed, "steps": outcome.last.step,
            "seconds": outcome.last.time_s, "first_shard_busy": share,
        }
        for (workers, shards), runs in played.items()
        for seed, (outcome, share) in enumerate(runs)
    ]  # fmt: skip
    notes = [
        "All read all updates, so one shard has P² of them to serve in a step, and a link P. The paper's 1.4 at 64 "
        "workers and 10 % at 96 are those of two shards over 24 workers with one, to which it normalises its times.",
        "The steps to the target fall with P, since every worker adds 12 entries to a step at the same rate. In the "
        "paper they rise beyond 96 workers, which is not tried here.",
    ]
    seconds = {shards: [mean_s(workers, shards) for workers in all_workers] for shards in (1, 2)}
    mean_steps = [steps(workers) for workers in all_workers]
    return Result(
        "MLLess Fig. 13: shards of the store", checks, rows,
        lambda figure: _draw(figure, all_workers, seconds, mean_steps), notes,
    )  # fmt: skip


def _draw(figure: Figure, workers: tuple[int, ...], seconds: dict[int, list[float]], steps: list[float]) -> None:
    left: Axes
    right: Axes
    left, right = figure.subplots(1, 2)
    for shards, color, label in ((1, PAPER, "1 shard"), (2, OURS, "2 shards")):
        left.plot(workers, seconds[shards], "o-", color=color, label=label, markersize=4)
    left.axvline(SHARD_LINKS, color="#999999", linewidth=0.8, linestyle=":", label="a shard's speed over a link's")
    left.set_ylim(bottom=0)
    decorate(left, "Time to the target, mean", "workers", "seconds")
    left.legend(fontsize=8, frameon=False)
    right.plot(workers, steps, "o-", color=FORMULA, markersize=4)
    right.set_ylim(bottom=0)
    decorate(right, "Steps to the target, mean", "workers", "steps")


if __name__ == "__main__":
    main("mlless_fig13", run)
