"""The cost of a job's workers in functions, beside spot and on-demand machines, and the run time up to which they win.
Pure.

A function is billed from the start of each invocation, so each invocation of a worker adds its start to the run time.
A machine is billed from its launch, so it adds one boot. Samples are assumed to take as long in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from doll.amounts import duration, usd
from doll.config import LambdaFleetConfig
from doll.provisioner.planning.assessment import Assessment
from doll.theory.cost import SECONDS_PER_HOUR


@dataclass(frozen=True)
class FunctionCost:
    """A comparison of functions with the machines of a plan.

    Attributes:
        usd: cost of all workers in functions, for the run time of on-demand workers.
        invocations: number of invocations of each worker.
        mix_usd, on_demand_usd: cost of the plan's mix, and of all workers on-demand, with one boot of each machine.
        wins_until_s: run time up to which functions cost less than all workers on-demand; infinite: always; 0: never.
    """

    settings: LambdaFleetConfig
    usd: float
    invocations: int
    mix_usd: float
    on_demand_usd: float
    wins_until_s: float

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        cheapest = min(
            ("functions", self.usd), ("the plan's mix", self.mix_usd), ("all on-demand", self.on_demand_usd),
            key=lambda each: each[1],
        )[0]  # fmt: skip
        wins = (
            "at these prices they always cost less than on-demand" if math.isinf(self.wins_until_s)
            else "at these prices they never cost less than on-demand" if self.wins_until_s <= 0
            else f"they cost less than on-demand for runs of up to {duration(self.wins_until_s)}"
        )  # fmt: skip
        return [
            f"In functions of {self.settings.memory_mb} MB at {self.settings.usd_per_h:.4g} USD/h: {usd(self.usd)} "
            f"USD, {self.invocations} invocations per worker; with boots, the mix costs {usd(self.mix_usd)} and all "
            f"on-demand {usd(self.on_demand_usd)} USD",
            f"  cheapest: {cheapest}; {wins}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "memory_mb": self.settings.memory_mb, "usd_per_h": self.settings.usd_per_h, "cost_usd": self.usd,
            "invocations_per_worker": self.invocations, "mix_with_boots_usd": self.mix_usd,
            "on_demand_with_boots_usd": self.on_demand_usd,
            "wins_until_s": None if math.isinf(self.wins_until_s) else self.wins_until_s,
        }  # fmt: skip


def function_cost(assessment: Assessment, settings: LambdaFleetConfig) -> FunctionCost:
    """Return the cost of the assessed job in functions. Each worker must need one machine only."""
    request = assessment.request
    workers, prices, boot_s = request.num_workers, request.prices, request.planner.boot_s
    run_s = assessment.on_demand_s
    works_s = settings.timeout_s - settings.start_s  # of each invocation, whose start is beside its predecessor
    invocations = max(1, math.ceil(run_s / works_s))
    paid_s = run_s + invocations * settings.start_s
    spot = assessment.num_spot
    boots_usd = boot_s * (spot * prices.spot_usd_per_h + (workers - spot) * prices.on_demand_usd_per_h)
    return FunctionCost(
        settings=settings, usd=workers * settings.usd_per_h * paid_s / SECONDS_PER_HOUR, invocations=invocations,
        mix_usd=assessment.static.expected_cost_usd + boots_usd / SECONDS_PER_HOUR,
        on_demand_usd=workers * prices.on_demand_usd_per_h * (run_s + boot_s) / SECONDS_PER_HOUR,
        wins_until_s=wins_until_s(
            settings.usd_per_h, prices.on_demand_usd_per_h, start_s=settings.start_s, limit_s=settings.timeout_s,
            boot_s=boot_s,
        ),
    )  # fmt: skip


def wins_until_s(
    function_usd_per_h: float, machine_usd_per_h: float, *, start_s: float, limit_s: float, boot_s: float
) -> float:
    """Return the longest run time for which a function costs less than a machine; infinite: any; 0: none. A longer run
    may again be cheaper for a moment, before the next invocation begins.

    With n invocations a function is paid for run + n start_s, a machine for run + boot_s.

    >>> round(wins_until_s(0.12, 0.10, start_s=10, limit_s=900, boot_s=90))
    390
    >>> wins_until_s(0.12, 0.10, start_s=90, limit_s=900, boot_s=90)
    0.0
    """
    works_s = limit_s - start_s
    start_usd, dearer = function_usd_per_h * start_s, function_usd_per_h - machine_usd_per_h
    ahead = machine_usd_per_h * boot_s - start_usd  # of the machine, when the first invocation is warm
    lost = start_usd + dearer * works_s  # from one invocation to the next
    if ahead <= 0:
        return 0.0
    if lost <= 0:
        return math.inf
    last = math.ceil(ahead / lost)  # invocation
    left = ahead - (last - 1) * lost
    return (last - 1) * works_s + (min(left / dearer, works_s) if dearer > 0 else works_s)
