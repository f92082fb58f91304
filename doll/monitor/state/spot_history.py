"""The lines of a report about a run on a spot market (`doll spot` of doll-lab). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from doll.amounts import duration, usd
from doll.monitor.state.formats import clock

_REASONS_SHOWN = 8


@dataclass(frozen=True)
class Move:
    """A change of a slot's market by the planner; `at_s` on the job's clock."""

    at_s: float
    slot: int
    to: str
    reason: str

    def text(self) -> str:
        """As `worker 2 to on-demand: <reason>`."""
        to = self.to.replace("_", "-")
        return f"worker {self.slot} to {to}: {self.reason.removeprefix('to ').removeprefix(f'{to}: ')}"


def _machines_each(report: Mapping[str, Any]) -> str:
    count = report.get("machines_per_worker", 1)  # earlier releases had no such field
    return f", {count} machines each" if count > 1 else ""


def text_lines(report: Mapping[str, Any]) -> list[str]:
    """The same fields as lines of text."""
    met = "met" if report["deadline_met"] else "MISSED"
    others = [prediction for name, prediction in report["predictions"].items() if name != report["planned_policy"]]
    lines = [
        f"  deadline {clock(report['deadline_s'])}: {met}, at {duration(report['finish_s'])} of "
        f"{duration(report['deadline_s'])} (predicted {duration(report['finish_predicted_s'])})",
        f"  cost {usd(report['cost_usd'])} USD, {report['cost_percent']:.1f} % of "
        f"{usd(report['all_on_demand_usd'])} USD all on-demand; predicted {usd(report['cost_predicted_usd'])} USD, "
        f"{report['cost_predicted_percent']:.1f} % "
        f"({report['cost_error_points']:+.1f} points)",
        *(
            f"  predicted for {other['policy']}: {usd(other['cost_usd'])} USD, done at {duration(other['finish_s'])}"
            + ("" if other["finish_s"] <= report["deadline_s"] else ": too late")
            for other in others
        ),
        f"  {report['preemptions']} preemptions (predicted {report['preemptions_predicted']}), "
        f"{report['preemptions_without_notice']} without notice; {report['preemptions_killed']} ended by SIGKILL, the "
        f"others left in time; {report['instances']} instances in total{_machines_each(report)}",
        f"  {report['moves']} moves between the markets (predicted {report['moves_predicted']})",
    ]
    moves = report["moves_log"]
    lines += [f"    {move['at_s']:6.1f} s  {Move(**move).text()}" for move in moves[:_REASONS_SHOWN]]
    if len(moves) > _REASONS_SHOWN:
        lines.append(f"    and {len(moves) - _REASONS_SHOWN} more: moves_log in report.json, provision-*.jsonl")
    return lines
