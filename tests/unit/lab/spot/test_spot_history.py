"""What is kept and shown of a run on a spot market: moves and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from doll.provisioner.fleets.port import Instance, InstanceState
from doll.provisioner.fleets.processes import Machine
from paths import EXAMPLES

from doll_lab.spot.spot_history import MarketTimeline, Move, Prediction, SpotResult, report_section

EXAMPLE = EXAMPLES / "digits" / "market.yaml"


def decision(at_s: float, *markets: str | None, phase: str = "run", usd: float = 0.0) -> Any:
    alive = tuple(SimpleNamespace(market=market) for market in markets if market)
    return SimpleNamespace(
        elapsed_s=at_s, phase=phase, markets=markets, reasons=tuple(f"why {n}" for n in range(len(markets))),
        alive=alive, bill=SimpleNamespace(usd=usd), updates_done=2.0 * at_s,
    )  # fmt: skip


def test_moves_are_changes_of_market_while_the_job_runs() -> None:
    timeline = MarketTimeline()
    timeline.feed(decision(0.0, "spot", "spot"))
    timeline.feed(decision(1.0, "on_demand", "spot", usd=0.5))
    timeline.feed(decision(2.0, "on_demand", "spot"))
    timeline.feed(decision(3.0, "spot", "on_demand"))
    timeline.feed(decision(4.0, None, None, phase="done"))
    assert [(move.at_s, move.slot, move.to, move.reason) for move in timeline.moves] == [
        (1.0, 0, "on_demand", "why 0"), (3.0, 0, "spot", "why 0"), (3.0, 1, "on_demand", "why 1")
    ]  # fmt: skip
    assert [(point.usd, point.num_spot, point.num_on_demand) for point in timeline.points[:2]] == [
        (0.0, 2, 0),
        (0.5, 1, 1),
    ]


def test_the_text_of_a_move_names_its_market_once() -> None:
    assert Move(1.0, 2, "on_demand", "to on-demand: it is late").text() == "worker 2 to on-demand: it is late"
    assert Move(1.0, 2, "spot", "spot is there").text() == "worker 2 to spot: spot is there"


def machine(exit_code: int, *, preempted: bool, without_notice: bool = False) -> Machine:
    instance = Instance("p", 0, 1, "spot", "chain/0", InstanceState.ENDED, 0.0)
    return Machine(instance, exit_code=exit_code, preempted=preempted, without_notice=without_notice)


def test_report_and_text_agree() -> None:
    result = SpotResult(95.0, True, 100.0, 0.7, 0.75, 1.0)
    predictions = {
        "adaptive": Prediction("adaptive", 97.0, 0.68, 1, 3),
        "on-demand": Prediction("on-demand", 80.0, 1.01, 0, 0),
        "all-spot": Prediction("all-spot", 120.0, 0.6, 0, 5),
    }
    machines = [
        machine(-9, preempted=True, without_notice=True), machine(0, preempted=True), machine(0, preempted=False),
        machine(-9, preempted=False),
    ]  # fmt: skip
    timeline = MarketTimeline()
    for at in range(12):
        timeline.feed(decision(float(at), ("spot", "on_demand")[at % 2]))
    section = report_section(result, predictions, "adaptive", timeline, machines)
    assert (section["deadline_met"], section["preemptions"], section["preemptions_killed"]) == (True, 2, 1)
    assert (section["moves"], section["moves_predicted"], section["instances"]) == (11, 1, 4)
    assert section["cost_error_points"] == pytest.approx(2.0)
    text = "\n".join(json.loads(json.dumps(section))["lines"])
    for words in ("met, at 95 s of 100 s", "70.0 % of 1.00 USD", "(+2.0 points)", "all-spot", "too late",
                  "2 preemptions (predicted 3), 1 without notice; 1 ended by SIGKILL", "and 3 more"):  # fmt: skip
        assert words in text
    for worse in (replace(result, finish_s=100.1), replace(result, reached=False)):
        assert not report_section(worse, predictions, "adaptive", timeline, machines)["deadline_met"]


def test_workers_of_several_machines_are_reported_as_such() -> None:
    gang = replace(machine(0, preempted=True), instance=replace(machine(0, preempted=True).instance, machines=3))
    predictions = {"adaptive": Prediction("adaptive", 97.0, 0.68, 1, 3)}
    result = SpotResult(95.0, True, 100.0, 0.7, 0.75, 1.0)
    section = report_section(result, predictions, "adaptive", MarketTimeline(), [gang])
    assert section["machines_per_worker"] == 3
    assert "1 instances in total, 3 machines each" in "\n".join(section["lines"])
