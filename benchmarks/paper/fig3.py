"""Fig. 3a: cost and runtime of Theorem 4's mix with equal rates, as a fluid and with the production engine.

Criteria: mean cost within 0.5 points of (16), mean runtime within 0.3 % of (15), settings in the
paper's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from doll.provisioner.traces.availability import Markov
from doll.ps.policies.doll import DollPolicyConfig
from doll.theory.cost import cost_ratio

from benchmarks.paper.formulas import best_num_spot, best_num_spot_at_risk, cost_usd, on_demand_runtime_s, runtime_s
from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, claim, main
from benchmarks.paper.setting import (
    CYCLE_S,
    FEWER_UPDATES,
    HIGH,
    LOW,
    RATE,
    SAMPLES,
    SETTINGS,
    B,
    Costs,
    K,
    Mix,
    N,
    Setting,
    bound_claim,
    chain,
    cost_claim,
    fluid,
    ticks_for,
)
from doll_lab.figures import decorate
from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Z_95 = 1.645


def run(quick: bool) -> Result:
    runs, engine_runs, engine_updates = (8, 1, 300) if quick else (120, 6, 2000)
    points, seconds = (2.0, 1.0) if quick else (0.5, 0.3)
    rates = np.full(N, RATE)
    theta_0 = on_demand_runtime_s(SAMPLES, RATE, N)
    checks: list[Check] = []
    rows: list[dict[str, Value]] = []
    dots: dict[Setting, tuple[Costs, float, float]] = {}
    for index, setting in enumerate(SETTINGS):
        deadline = setting.ratio * theta_0
        spot = best_num_spot(SAMPLES, RATE, N, setting.alpha, deadline, HIGH)
        up = chain(runs, ticks_for(theta_0), N, setting.alpha, np.random.default_rng((3, index)))
        slots = np.arange(N) < spot
        for name, prices in (("high", HIGH), ("low", LOW)):
            costs = fluid(Mix(slots), up, rates, SAMPLES, prices)
            formula = _ratio(spot, setting.alpha, prices)
            ours = float(costs.cost.mean())
            checks.append(
                Check(
                    f"{setting}: cost over on-demand, {name} spot price, N_s = {spot}",
                    None,
                    formula,
                    ours,
                    f"within {points:g} points of (16)",
                    abs(ours - formula) < points / 100,
                )
            )
            if name == "high":
                checks.append(cost_claim(f"{setting}: cost over on-demand", setting.paper_equal, ours, FEWER_UPDATES))
                dots[setting] = (costs, formula, float(runtime_s(spot, SAMPLES, RATE, N, setting.alpha)) / theta_0)
            rows += [
                {
                    "alpha": setting.alpha,
                    "deadline_ratio": setting.ratio,
                    "price": name,
                    "method": "fluid",
                    "run": i,
                    "cost_ratio": float(c),
                    "runtime_ratio": float(t),
                }
                for i, (c, t) in enumerate(zip(costs.cost, costs.runtime, strict=True))
            ]
        costs, _, expected = dots[setting]
        ours = float(costs.runtime.mean())
        checks.append(
            Check(
                f"{setting}: runtime over θ_0",
                None,
                expected,
                ours,
                f"within {seconds:g} % of (15)",
                abs(ours / expected - 1) < seconds / 100,
            )
        )
        checks.append(
            Check(
                f"{setting}: bound (19) of Corollary 2, high price",
                None,
                cost_ratio(setting.ratio, N, setting.alpha, HIGH).lower,
                float(costs.cost.mean()),
                "(19) is below the cost, 0.5 points for noise",
                bool(costs.cost.mean() > cost_ratio(setting.ratio, N, setting.alpha, HIGH).lower - points / 100),
            )
        )
        if index == 0:
            checks.append(bound_claim(f"{setting}: bound (19) of Corollary 2", 0.798))
        late = float(np.mean(costs.runtime > setting.ratio))
        checks.append(
            Check(f"{setting}: runs that miss the deadline", None, None, late, "E[runtime] ≤ θ is no guarantee", None)
        )
        safe = best_num_spot_at_risk(SAMPLES, RATE, N, setting.alpha, deadline, HIGH, cycle_s=CYCLE_S, z=_Z_95)
        kept = fluid(Mix(np.arange(N) < safe), up, rates, SAMPLES, HIGH)
        late = float(np.mean(kept.runtime > setting.ratio))
        checks.append(
            Check(
                f"{setting}: the same with P(late) ≤ 5 % asked for, N_s = {safe}, cost {kept.cost.mean():.4f}",
                None,
                0.05,
                late,
                "at most 10 %" if not quick else "at most 20 %",
                late <= (0.2 if quick else 0.1),
            )
        )
        costs = [_engine(setting, spot, engine_updates, seed) for seed in range(engine_runs)]
        ours = float(np.mean(costs))
        # Fewer updates and fewer runs than in the fluid: three standard errors, as they came out, on top.
        width = points / 100 + 3 * float(np.std(costs)) / max(len(costs) - 1, 1) ** 0.5 + (0.05 if quick else 0.0)
        formula = _ratio(spot, setting.alpha, HIGH)
        checks.append(
            Check(
                f"{setting}: cost with the production engine, {engine_runs} runs of {engine_updates} updates",
                None,
                formula,
                ours,
                f"within {100 * width:.2f} points of (16)",
                abs(ours - formula) < width,
            )
        )
        rows += [
            {
                "alpha": setting.alpha,
                "deadline_ratio": setting.ratio,
                "price": "high",
                "method": "engine",
                "run": i,
                "cost_ratio": c,
                "runtime_ratio": None,
            }
            for i, c in enumerate(costs)
        ]
    means = [float(dots[setting][0].cost.mean()) for setting in SETTINGS]
    checks.append(
        claim(
            "order",
            "order of the settings: (0.9, 1.05) < (0.8, 1.10) < (0.8, 1.05) < 1",
            "yes",
            "yes" if means[0] < means[2] < means[1] < 1 else "no",
            "yes",
            means[0] < means[2] < means[1] < 1,
        )
    )
    notes = [
        "The paper's measured costs lie 4 to 11 points below (16) at the prices that the text names (0.158 and 0.286 "
        "USD/h). The paper says why it measured less than Corollary 2: fewer updates were needed than its J. The model "
        "makes all J updates. Two of the three costs agree with (16) at the low price (0.6954, 0.8646, 0.7257), too; "
        "which of the two it is the text does not say.",
        "The text's 30.50 % of savings belongs to (0.9, 1.05), not to θ = 1.1 θ_0.",
        "The paper asks for E[runtime] ≤ θ, and that is met. A third or more of the runs are then later than θ; the "
        "form with a risk is an addition of DOLL's planner.",
    ]
    return Result("Fig. 3a: equal rates, Theorem 4", checks, rows, lambda figure: _draw(figure, dots), notes)


def _ratio(spot: int, alpha: float, prices: object) -> float:
    both = cost_usd([0, spot], SAMPLES, RATE, N, alpha, prices)  # type: ignore[arg-type]
    return float(both[1] / both[0])


def _engine(setting: Setting, spot: int, updates: int, seed: int) -> float:
    """Cost over that of all on-demand of one run of the event simulation, in steady state."""
    job = SimulationSettings(
        rates_per_s=[RATE] * N,
        batch_size=B,
        policy=DollPolicyConfig(group_size=K),
        updates=updates,
        seed=seed,
        spot_usd_per_hour=HIGH.spot_usd_per_h,
        on_demand_usd_per_hour=HIGH.on_demand_usd_per_h,
    )
    vanish = Markov(setting.alpha, CYCLE_S, np.random.default_rng((33, seed)))
    system = System(job, spot=[slot < spot for slot in range(N)], preemption=vanish)
    system.run()
    return system.usd / (updates * K * B / (RATE * N) * N * HIGH.on_demand_usd_per_h / 3600.0)


def _draw(figure: Figure, dots: dict[Setting, tuple[Costs, float, float]]) -> None:
    axes = figure.subplots()
    for index, (setting, (costs, cost, runtime)) in enumerate(dots.items()):
        color = f"C{index}"
        axes.scatter(costs.runtime, costs.cost, s=8, alpha=0.4, color=color, label=f"{setting}: runs")
        axes.scatter([runtime], [cost], marker="x", s=70, color=FORMULA, label="(15), (16)" if index == 0 else None)
        axes.scatter([costs.runtime.mean()], [costs.cost.mean()], s=45, color=color, edgecolors=OURS)
        axes.axhline(
            setting.paper_equal,
            color=PAPER,
            linewidth=0.8,
            linestyle="--",
            label="paper, measured" if index == 0 else None,
        )
        axes.axvline(setting.ratio, color="#bbbbbb", linewidth=0.8, label="deadlines" if index == 0 else None)
    decorate(axes, "Fig. 3a: cost against runtime, 64 workers, high spot price", "runtime / θ_0", "cost / on-demand")
    axes.legend(fontsize=7, frameon=False, ncols=2)


if __name__ == "__main__":
    main("fig3", run)
