"""Eq. (1) and Proposition 1: the update rate, and when the queue grows. Event simulation with the production engine.

Criteria: rate within 0.5 % of (1) in four settings; the queue is bounded where K b μ_A / N > E[S], and grows
where it is smaller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from doll.ps.policies.doll import DollPolicyConfig
from doll.theory.queueing import harmonic, stability, update_rate_per_s

from benchmarks.paper.formulas import group_interval_s
from benchmarks.paper.harness import FORMULA, Check, Result, Value, claim, main
from benchmarks.paper.setting import RATE, B, K, N
from doll_lab.figures import decorate
from doll_lab.simulation.report import summarise
from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# (N, K, b, samples per second), each stable; the paper's EMNIST and I-MNIST settings first.
SETS = ((N, K, B, RATE), (N, 10, B, RATE), (16, 4, 32, 50.0), (8, 8, 64, 100.0))
# Mean group service time over the mean time between groups; above 1 the queue grows.
LOADS = (0.5, 0.8, 1.25)


def run(quick: bool) -> Result:
    updates, seconds, percent = (500, 400.0, 2.0) if quick else (5000, 2000.0, 0.5)
    checks: list[Check] = []
    rows: list[dict[str, Value]] = []
    for workers, size, batch, rate in SETS:
        formula = update_rate_per_s(workers * rate, size, batch)
        # A fifth of what the queue could bear: groups hardly ever wait.
        system = _system(workers, size, batch, rate, 0.2 / formula / harmonic(size), updates=updates)
        ours = summarise(system, 1.0).rate_measured
        checks.append(
            claim(
                "formula",
                f"(1): updates/s with N = {workers}, K = {size}, b = {batch}, λ = {rate:g}",
                formula,
                ours,
                f"within {percent:g} %",
                abs(ours / formula - 1) < percent / 100,
            )
        )
        rows.append(
            {
                "n": workers,
                "k": size,
                "b": batch,
                "rate": rate,
                "load": 0.2,
                "formula": formula,
                "ours": ours,
                "max_waiting": max(system.trajectory.waiting),
            }
        )
    traces = {}
    interval = group_interval_s(N * RATE, K, B)
    for load in LOADS:
        compute_s = load * interval / harmonic(K)
        system = _system(N, K, B, RATE, compute_s, seconds=seconds)
        summary = summarise(system, 1.0)
        grew, grows = summary.queue_growth > 1.5, load > 1
        margin = stability(N * RATE, K, B, compute_s)
        checks.append(
            Check(
                f"queue at μ_C = {1000 * compute_s:.0f} ms, necessary margin {margin.necessary:.2f}: end over middle",
                None,
                None,
                summary.queue_growth,
                "grows" if grows else "bounded",
                grew == grows,
            )
        )
        rows.append(
            {
                "n": N,
                "k": K,
                "b": B,
                "rate": RATE,
                "load": load,
                "formula": 1 / interval,
                "ours": summary.rate_measured,
                "max_waiting": summary.max_waiting_batches,
            }
        )
        traces[load] = (system.trajectory.time_s, system.trajectory.waiting)
    limits = stability(N * RATE, K, B, 1.0)
    checks.append(
        Check(
            "largest μ_C by the sufficient form, ms (paper's setting)", None, 1000 * limits.sufficient, None, "", None
        )
    )
    checks.append(Check("largest μ_C by the necessary form, ms", None, 1000 * limits.necessary, None, "", None))
    notes = [
        "Between the two forms the queue is stable as long as the K batches of a group come from distinct workers."
    ]
    return Result(
        "Eq. (1), Proposition 1: rate and stability", checks, rows, lambda figure: _draw(figure, traces), notes
    )


def _system(
    workers: int,
    size: int,
    batch: int,
    rate: float,
    compute_s: float,
    *,
    updates: int | None = None,
    seconds: float | None = None,
) -> System:
    system = System(
        SimulationSettings(
            rates_per_s=[rate] * workers,
            batch_size=batch,
            policy=DollPolicyConfig(group_size=size),
            compute_s=compute_s,
            updates=updates,
            seconds=seconds,
            seed=1,
        )
    )
    system.run()
    return system


def _draw(figure: Figure, traces: dict[float, tuple[list[float], list[int]]]) -> None:
    axes = figure.subplots()
    for index, (load, (times, waiting)) in enumerate(traces.items()):
        axes.plot(times, waiting, color=f"C{index}", linewidth=0.8, label=f"load {load:g}")
    axes.axhline(K, color=FORMULA, linestyle=":", linewidth=0.8, label="K")
    axes.set_yscale("symlog", linthresh=float(np.max([K, 1])))
    decorate(axes, "Proposition 1: batches that wait", "seconds", "batches")
    axes.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    main("rates", run)
