"""The results of a simulation: a summary with formulas and measurements, a CSV of the updates, and charts."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from doll.amounts import known, number, usd
from doll.dashboard.saved_page import save_panels
from doll.monitor.state.policy_summary import PolicySummary
from doll.monitor.state.rates import (
    stability_margin,
    steady_update_rate,
)
from doll.monitor.views.panels import Panel, line, panel, staleness_panel
from doll.process.files import json_safe
from doll.theory.queueing import Stability

from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System, Trajectory

COLUMNS = ("update", "time_s", "waiting_batches", "workers_up", "group_s", "usd")


@dataclass(frozen=True)
class Summary:
    """The summary of one run. Rates are in updates per second; NaN: undefined.

    Attributes:
        rate_formula: λ_U of Eq. (20): the streams of slots that are always up, plus the other streams times the
            availability.
        rate_at_observed_uptime: λ_U at the up time of this run; the remaining difference is due to the queue.
        rate_measured: updates divided by the run's seconds, from the first update on.
        queue_growth: queue at the end divided by the queue in the middle; far above 1: it grows without bound.
        margin_sufficient, margin_necessary: Proposition 1 for the set gradient time; above 1: stable in this form.
        machines_per_worker: k; the machines of a worker are up together, and lost together.
        staleness_mean, staleness_p99, blocked_share: as in `doll.monitor.state.policy_summary`; NaN: not measured.
    """

    workers: int
    spot: int
    updates: int
    seconds: float
    rate_formula: float
    rate_at_observed_uptime: float
    rate_measured: float
    mean_up: float
    mean_waiting_batches: float
    max_waiting_batches: int
    queue_growth: float
    mean_group_s: float
    margin_sufficient: float
    margin_necessary: float
    preemptions: int
    requeued_batches: int
    moves: int
    usd: float
    all_on_demand_usd: float
    seed: int
    staleness_mean: float = math.nan
    staleness_p99: float = math.nan
    blocked_share: float = math.nan
    machines_per_worker: int = 1

    @property
    def cost_ratio(self) -> float:
        """The cost divided by the cost of equal updates all on-demand at the formula's rate; NaN without updates."""
        return self.usd / self.all_on_demand_usd if self.all_on_demand_usd > 0 else math.nan

    def to_dict(self) -> dict[str, float | int]:
        """Return plain numbers, for JSON."""
        return {**asdict(self), "cost_ratio": self.cost_ratio}

    def text(self, deadline_s: float | None = None, target_updates: int | None = None) -> str:
        """Return the summary for people; with a deadline, it states whether the target was reached by then."""
        ratio = self.rate_measured / self.rate_at_observed_uptime
        count = self.machines_per_worker
        machines = f" x {count} machines" if count > 1 else ""
        lines = [
            f"{self.updates} updates in {self.seconds:.1f} simulated s; {self.workers} workers{machines}, "
            f"{self.mean_up:.2f} up on average, {self.preemptions} preemptions",
            f"update rate: {self.rate_measured:.5g} /s; formula {self.rate_formula:.5g} /s; at the simulated up-time "
            f"{self.rate_at_observed_uptime:.5g} /s (measured {100 * (ratio - 1):+.2f} %)",
            f"queue: {self.mean_waiting_batches:.2f} batches on average, {self.max_waiting_batches} at most; a group "
            f"takes {self.mean_group_s:.4g} s",
            f"Proposition 1: margin {self.margin_sufficient:.3g} in the sufficient form, "
            f"{self.margin_necessary:.3g} in the necessary one (above 1 is stable)",
            f"cost: {usd(self.usd)} USD, {100 * self.cost_ratio:.1f} % of all on-demand; {self.moves} moves",
        ]
        if known(self.staleness_mean):
            lines.append(
                f"staleness {number(self.staleness_mean)} on average, 99 % of reads at {number(self.staleness_p99)} "
                f"or above; workers blocked {100 * self.blocked_share:.1f} % of the time"
            )
        if deadline_s is not None:
            met = target_updates is not None and self.updates >= target_updates and self.seconds <= deadline_s
            lines.append(f"deadline {deadline_s:.1f} s: {'met' if met else 'MISSED'}")
        return "\n".join(lines)


def group_size(settings: SimulationSettings) -> int:
    """Return K: the number of batches per update under the policy."""
    return settings.policy.batches_per_update(settings.num_workers)


def formula_rate(settings: SimulationSettings, spot: Sequence[bool], alpha: float) -> float:
    """Return λ_U in updates per second, if spot slots are up for a share `alpha` of the time.

    Source: the DOLL paper, Eq. (1) and (20).

    >>> from doll.ps.policies.doll import DollPolicyConfig
    >>> settings = SimulationSettings(rates_per_s=[125.0] * 64, batch_size=256, updates=1,
    ...                               policy=DollPolicyConfig(group_size=20))
    >>> formula_rate(settings, [False] * 64, alpha=0.9)
    1.5625
    """
    rates = [rate * (alpha if is_spot else 1.0) for rate, is_spot in zip(settings.rates_per_s, spot, strict=True)]
    return settings.policy.update_rate_per_s(rates, settings.batch_size)


def summarise(system: System, alpha: float) -> Summary:
    """Return the summary of a run that has ended.

    Args:
        alpha: availability of spot slots, for `rate_formula`.
    """
    settings, trajectory = system.settings, system.trajectory
    n, updates = settings.num_workers, system.version
    k_b = group_size(settings) * settings.batch_size
    margin = Stability(math.nan, math.nan)
    if settings.policy.serial_updates:
        margin = stability_margin(settings.rates_per_s, settings.batch_size, group_size(settings), settings.compute_s)
    drawn = sum(rate * system.slot_up_s(worker) for worker, rate in enumerate(settings.rates_per_s))
    waiting = np.asarray(trajectory.waiting, float)
    measured = _measured(system)
    on_demand_rate = formula_rate(settings, [False] * n, 1.0)
    return Summary(
        workers=n,
        spot=sum(system.spot),
        updates=updates,
        seconds=system.now,
        rate_formula=formula_rate(settings, system.spot, alpha),
        rate_at_observed_uptime=drawn / k_b / system.now if system.now else math.nan,
        rate_measured=steady_update_rate(trajectory.time_s, drop_fraction=0.0, drop_s=0.0),
        mean_up=system.up_worker_s / system.now if system.now else math.nan,
        mean_waiting_batches=float(waiting.mean()) if updates else math.nan,
        max_waiting_batches=int(waiting.max()) if updates else 0,
        queue_growth=_growth(waiting),
        mean_group_s=float(np.mean(trajectory.group_s)) if updates else math.nan,
        margin_sufficient=margin.sufficient,
        margin_necessary=margin.necessary,
        preemptions=system.preemptions,
        requeued_batches=system.engine.counters["requeued"],
        moves=system.moves,
        usd=system.usd,
        all_on_demand_usd=updates / on_demand_rate * n * settings.worker_prices.on_demand_usd_per_h / 3600.0,
        seed=settings.seed,
        staleness_mean=math.nan if measured is None else _or_nan(measured.staleness.mean),
        staleness_p99=math.nan if measured is None else _or_nan(measured.staleness.p99),
        blocked_share=math.nan if measured is None else measured.blocked_share,
        machines_per_worker=settings.machines_per_worker,
    )


def _measured(system: System) -> PolicySummary | None:
    return None if system.measures is None else PolicySummary.total([system.measures.report()])


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _growth(waiting: npt.NDArray[np.float64]) -> float:
    """Return the mean queue in the last tenth of the run divided by that before its middle; 1: it does not grow."""
    n = len(waiting)
    if n < 20:
        return math.nan
    middle = waiting[int(0.4 * n) : int(0.5 * n)].mean()
    return float((waiting[int(0.9 * n) :].mean() + 1.0) / (middle + 1.0))


def write_report(system: System, summary: Summary, folder: Path) -> None:
    """Write summary.json, updates.csv and simulation.html into `folder`, which is created.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(system.trajectory, folder / "updates.csv")
    (folder / "summary.json").write_text(json.dumps(json_safe(summary.to_dict()), indent=2) + "\n", encoding="utf-8")
    measured = _measured(system)
    staleness = {} if measured is None else measured.staleness.histogram
    headline = (
        f"{summary.workers} workers, {summary.spot} of them spot: {summary.updates} updates, rate / formula "
        f"{summary.rate_measured / summary.rate_formula:.4f}"
    )
    save_panels("Simulation", headline, panels(system.trajectory, summary, staleness), folder / "simulation.html")


def write_csv(trajectory: Trajectory, path: Path) -> None:
    """Write one row per update."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        columns = zip(
            trajectory.time_s, trajectory.waiting, trajectory.up, trajectory.group_s, trajectory.usd, strict=True
        )
        for update, (time_s, waiting, up, group_s, usd) in enumerate(columns, 1):
            writer.writerow((update, f"{time_s:.6f}", waiting, up, f"{group_s:.6f}", f"{usd:.6f}"))


def panels(trajectory: Trajectory, summary: Summary, staleness: Mapping[int, int]) -> list[Panel]:
    """Return charts of the updates and the formula, the workers up, queue, cost and staleness.

    Args:
        staleness: number of reads by staleness; empty: not measured.
    """
    hours = np.asarray(trajectory.time_s, float) / 3600.0
    formula = summary.rate_formula * 3600.0 * hours
    shown = [
        panel(
            "Updates against theory", "hours", "updates", line("simulated", hours, np.arange(1, len(hours) + 1)),
            line(f"λ_U t, λ_U = {summary.rate_formula:.4g}/s", hours, formula, "formula"),
        ),
        panel("Workers up", "hours", "workers", line("up", hours, trajectory.up, "step")),
        panel("Batches waiting at each update", "hours", "batches", line("waiting", hours, trajectory.waiting)),
        panel("Spent", "hours", "USD", line("spent", hours, trajectory.usd)),
    ]  # fmt: skip
    return [*shown, staleness_panel({"reads": staleness}, bars=True)] if staleness else shown
