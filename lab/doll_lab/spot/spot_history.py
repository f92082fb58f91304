"""A run on a spot market: moves with their reasons, cost and progress over time, and the result. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from doll.amounts import clock, duration, usd

if TYPE_CHECKING:
    from doll.provisioner.decision import Decision
    from doll.provisioner.fleets.processes import Machine

_REASONS_SHOWN = 8


@dataclass(frozen=True)
class Move:
    """A change of a slot's market by the planner; `at_s` is a time of the job's clock."""

    at_s: float
    slot: int
    to: str
    reason: str

    def text(self) -> str:
        """Return a line such as `worker 2 to on-demand: <reason>`."""
        to = self.to.replace("_", "-")
        return f"worker {self.slot} to {to}: {self.reason.removeprefix('to ').removeprefix(f'{to}: ')}"


@dataclass(frozen=True)
class TimelinePoint:
    """One turn of the controller; `at_s` is a time of the job's clock."""

    at_s: float
    usd: float
    updates: float
    num_spot: int
    num_on_demand: int


@dataclass
class MarketTimeline:
    """The moves and points over time, from the controller's decisions."""

    points: list[TimelinePoint] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    _markets: tuple[str | None, ...] | None = None

    def feed(self, decision: Decision) -> None:
        """Process a decision that was made while the job's clock runs."""
        at_s = decision.elapsed_s
        if decision.phase == "run":
            if self._markets is not None:
                for slot, (before, now) in enumerate(zip(self._markets, decision.markets, strict=True)):
                    if now != before and before is not None and now is not None:
                        self.moves.append(Move(round(at_s, 3), slot, now, decision.reasons[slot]))
            self._markets = decision.markets
        alive = decision.alive
        spot = sum(instance.market == "spot" for instance in alive)
        point = TimelinePoint(at_s, decision.bill.usd, decision.updates_done, spot, len(alive) - spot)
        if self.points and self.points[-1].at_s == at_s:
            self.points[-1] = point
        else:
            self.points.append(point)


@dataclass(frozen=True)
class Prediction:
    """The prediction for one policy on one market. Times are wall seconds since the market opened.

    Attributes:
        finish_s: time at which the work is done.
        cost_usd: cost until then.
        moves: number of slots that changed their market.
        preemptions: number of machines that were preempted while a slot used them.
    """

    policy: str
    finish_s: float
    cost_usd: float
    moves: int
    preemptions: int


@dataclass(frozen=True)
class SpotResult:
    """The outcome of a run, except for the facts that the controller's decisions show.

    Attributes:
        finish_s: end of the job, in seconds on its clock.
        reached: whether its stop rule was met.
        cost_usd: cost until the end of the job.
        cost_until_terminated_usd: cost until the last machine was terminated.
    """

    finish_s: float
    reached: bool
    deadline_s: float
    cost_usd: float
    cost_until_terminated_usd: float
    all_on_demand_usd: float


def report_section(
    result: SpotResult,
    predictions: Mapping[str, Prediction],
    planned: str,
    timeline: MarketTimeline,
    machines: Sequence[Machine],
) -> dict[str, Any]:
    """Return the fields of `report.json` about the market, including `lines` of text for its summary.

    Args:
        predictions: predictions by policy.
        planned: name of the policy that ran.
    """
    predicted = predictions[planned]
    preempted = [machine for machine in machines if machine.preempted]
    percent = 100.0 * result.cost_usd / result.all_on_demand_usd
    predicted_percent = 100.0 * predicted.cost_usd / result.all_on_demand_usd
    section = {
        "planned_policy": planned,
        "deadline_met": result.reached and result.finish_s <= result.deadline_s,
        "deadline_s": result.deadline_s,
        "finish_s": round(result.finish_s, 3),
        "finish_predicted_s": round(predicted.finish_s, 3),
        "cost_usd": result.cost_usd,
        "all_on_demand_usd": result.all_on_demand_usd,
        "cost_until_terminated_usd": result.cost_until_terminated_usd,
        "cost_predicted_usd": predicted.cost_usd,
        "cost_percent": percent,
        "cost_predicted_percent": predicted_percent,
        "cost_error_points": percent - predicted_percent,
        "moves": len(timeline.moves),
        "moves_predicted": predicted.moves,
        "preemptions": len(preempted),
        "preemptions_predicted": predicted.preemptions,
        "preemptions_killed": sum(machine.exit_code == -signal.SIGKILL for machine in preempted),
        "preemptions_without_notice": sum(machine.without_notice for machine in preempted),
        "instances": len(machines),
        "machines_per_worker": max((machine.instance.machines for machine in machines), default=1),
        "predictions": {name: asdict(prediction) for name, prediction in predictions.items()},
        "moves_log": [asdict(move) for move in timeline.moves],
    }
    return {**section, "lines": text_lines(section)}


def text_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the fields of `report_section` as lines of text."""
    count = report["machines_per_worker"]
    each = f", {count} machines each" if count > 1 else ""
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
        f"others left in time; {report['instances']} instances in total{each}",
        f"  {report['moves']} moves between the markets (predicted {report['moves_predicted']})",
    ]
    moves = report["moves_log"]
    lines += [f"    {move['at_s']:6.1f} s  {Move(**move).text()}" for move in moves[:_REASONS_SHOWN]]
    if len(moves) > _REASONS_SHOWN:
        lines.append(f"    and {len(moves) - _REASONS_SHOWN} more: moves_log in report.json, provision-*.jsonl")
    return lines
