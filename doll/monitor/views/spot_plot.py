"""A plot of a run on a spot market: machines over time, cost and all on-demand, progress and the deadline."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doll.monitor.state.spot_history import MarketTimeline, Prediction, SpotResult

if TYPE_CHECKING:
    from doll.provisioner.fleets.processes import Machine
    from doll.provisioner.traces.market import SpotMarket

_SPOT, _ON_DEMAND, _UNAVAILABLE, _LINE = "#4c78a8", "#f58518", "#dddddd", "#333333"


def draw(
    path: Path, *, timeline: MarketTimeline, result: SpotResult, predicted: Prediction, market: SpotMarket,
    machines: Sequence[Machine], opened_s: float, updates: int, job: str,
) -> None:  # fmt: skip
    """Write the plot to `path` as a PNG.

    Args:
        opened_s: when the market opened, on the clock of the machines' times.
        updates: J.

    Raises:
        OSError: it cannot be written.
    """
    from doll.process.figures import new_figure

    figure = new_figure(9, 8, dpi=120)
    slots, cost, progress = figure.subplots(3, 1, sharex=True, height_ratios=(1.4, 1, 1))
    end_s = max(result.finish_s, result.deadline_s)
    _slots(slots, market, machines, opened_s, min(end_s, result.finish_s))
    times = [point.at_s for point in timeline.points]
    cost.plot(times, [point.usd for point in timeline.points], color=_SPOT, label="spent")
    on_demand_s = predicted_on_demand_s(result, market)
    cost.plot([0, on_demand_s], [0, result.all_on_demand_usd], color=_ON_DEMAND, label="all on-demand")
    cost.plot([predicted.finish_s], [predicted.cost_usd], color=_LINE, marker="x", linestyle="", label="predicted")
    cost.set(ylabel="USD")
    cost.legend(loc="upper left", frameon=False)
    progress.plot(times, [point.updates for point in timeline.points], color=_SPOT, label="updates")
    progress.plot(
        [0, result.deadline_s], [0, updates], color=_LINE, linestyle=":", label="constant pace to the deadline"
    )
    progress.axhline(updates, color=_LINE, linewidth=0.8)
    progress.set(xlabel="seconds", ylabel="updates", xlim=(0, end_s * 1.02))
    progress.legend(loc="upper left", frameon=False)
    for axes in (slots, cost, progress):
        axes.axvline(result.deadline_s, color="#e45756", linestyle="--", linewidth=1)
    met = "met" if result.reached and result.finish_s <= result.deadline_s else "missed"
    slots.set_title(
        f"{job}: deadline of {result.deadline_s:g} s {met} at {result.finish_s:.1f} s, "
        f"{100 * result.cost_usd / result.all_on_demand_usd:.1f} % of the on-demand cost"
    )
    figure.savefig(path, format="png")


def predicted_on_demand_s(result: SpotResult, market: SpotMarket) -> float:
    """Seconds that the job takes with all workers on-demand, from its cost."""
    machines = market.num_slots * market.machines_per_slot
    return result.all_on_demand_usd / (machines * market.on_demand_usd_per_h) * 3600


def _slots(axes: Any, market: SpotMarket, machines: Sequence[Machine], opened_s: float, end_s: float) -> None:
    from doll.process.figures import Patch

    for slot in range(market.num_slots):
        at_s = 0.0
        while at_s < end_s:
            interval = market.interval(slot, at_s)
            until_s = min(interval.end_s, end_s)
            if not interval.up:
                axes.broken_barh([(at_s, until_s - at_s)], (slot - 0.45, 0.9), color=_UNAVAILABLE)
            at_s = until_s
    for machine in machines:
        instance = machine.instance
        begin_s = max(0.0, instance.launched_s - opened_s)
        until_s = min(end_s, (instance.ended_s or opened_s + end_s) - opened_s)
        if until_s <= begin_s:
            continue
        spot = instance.market == "spot"
        axes.broken_barh(
            [(begin_s, until_s - begin_s)], (instance.slot - 0.3 + 0.32 * (not spot), 0.28),
            color=_SPOT if spot else _ON_DEMAND,
        )  # fmt: skip
        if machine.preempted and machine.exit_code == -signal.SIGKILL:
            axes.plot([until_s], [instance.slot - 0.16], marker="x", color="#e45756", markersize=5)
    axes.set(ylabel="worker", yticks=range(market.num_slots), ylim=(market.num_slots - 0.4, -0.6))
    axes.legend(
        handles=[
            Patch(color=_SPOT, label="spot (x: killed)"), Patch(color=_ON_DEMAND, label="on-demand"),
            Patch(color=_UNAVAILABLE, label="no spot available"),
        ],
        loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3, frameon=False,
    )  # fmt: skip
