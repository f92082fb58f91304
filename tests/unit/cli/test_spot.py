"""`doll spot` before anything starts, its clock, its timeline and its result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doll import config as job_config
from doll.cli.app import app
from doll.cli.spot import PausedClock, SpotRun
from doll.errors import ConfigError
from doll.monitor.spot_history import MarketTimeline, Move, SpotResult, facts, lines
from doll.provisioner.fleets.fake import FakeFleet, VirtualClock
from doll.provisioner.fleets.port import Instance, InstanceState
from doll.provisioner.fleets.processes import Machine
from doll.simulation.spot_prediction import Prediction, predict
from paths import EXAMPLES
from typer.testing import CliRunner

EXAMPLE = EXAMPLES / "spot.yaml"


def spot_run(*overrides: str, seed: int = 0) -> SpotRun:
    return SpotRun.of(job_config.load(EXAMPLE, list(overrides)), seed)


def test_a_dry_run_plans_and_predicts() -> None:
    done = CliRunner().invoke(app, ["spot", str(EXAMPLE), "--dry-run", "--seed", "3", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["feasible"]
    assert told["market"]["seed"] == 3
    adaptive, on_demand = told["predictions"]["adaptive"], told["predictions"]["on-demand"]
    assert adaptive["finish_s"] <= told["deadline_s"] == 190
    assert adaptive["cost_usd"] < on_demand["cost_usd"]
    assert told["on_demand"]["cost_usd"] == pytest.approx(150 / 3600 * 6 * 0.286 * 12)


def test_flags_change_the_market() -> None:
    arguments = ["--alpha", "0.95", "--cycle", "2000", "--speed-up", "10", "--deadline", "170"]
    done = CliRunner().invoke(app, ["spot", str(EXAMPLE), "--dry-run", "--json", *arguments])
    told = json.loads(done.stdout)
    assert (told["market"]["alpha"], told["market"]["speed_up"], told["deadline_s"]) == (0.95, 10, 170)


def test_a_deadline_that_cannot_be_met_is_exit_3_with_the_nearest_that_can() -> None:
    done = CliRunner().invoke(app, ["spot", str(EXAMPLE), "--deadline", "149s"])
    assert done.exit_code == 3
    assert "NOT FEASIBLE" in done.output
    assert "150" in done.output


def test_a_trace_brings_its_own_prices_and_availability(tmp_path: Path) -> None:
    (tmp_path / "pools.csv").write_text("trace_set,pool,num_machines,on_demand_usd_per_hour\nmine,one,4,0.4\n")
    (tmp_path / "prices.csv").write_text("pool,seconds,usd_per_hour\none,0,0.1\none,5000,0.2\none,10000,0.2\n")
    (tmp_path / "availability.csv").write_text("pool,seconds,num_up\none,0,4\none,7500,2\none,10000,2\n")
    found = spot_run(f"fleet.trace={tmp_path}")
    assert found.market.name == "one"
    assert found.market.alpha == pytest.approx(0.875)
    assert found.assessment.request.prices.on_demand_usd_per_h == pytest.approx(0.4 * 12)
    assert found.assessment.request.prices.spot_usd_per_h == pytest.approx(0.15 * 12)
    with pytest.raises(ConfigError, match=r"fleet\.pool: expected one of one; got two"):
        spot_run(f"fleet.trace={tmp_path}", "fleet.pool=two")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stop={accuracy: 0.9}", "stop.updates"),
        ("plan.deadline_s=null", "plan.deadline_s"),
        ("fleet={kind: compose}", "expected processes"),
        ("source=null", "source: expected one"),
        ("plan.spot_usd_per_h=null", "plan.spot_usd_per_h"),
    ],
)
def test_what_a_market_needs_is_asked_for(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spot_run(override)


def test_streams_that_pile_up_are_told_of() -> None:
    assert not any("while_down" in note for note in spot_run().notes)
    assert any("queue" in note for note in spot_run("arrivals.while_down=queue").notes)


def test_a_prediction_meets_the_deadline_at_no_more_than_on_demand() -> None:
    for seed in range(3):
        found = spot_run(seed=seed)
        one, spot = found.predicted, found.predictions["all-spot"]
        assert one.finish_s <= found.planner.deadline_s
        assert one.cost_usd < found.predictions["on-demand"].cost_usd
        assert spot.moves == 0
        assert spot.preemptions > 0


def test_tries_on_spot_leave_launches_for_those_who_go_on_demand() -> None:
    """In a minute six slots that wait for spot try 360 times: at 120 a minute, nobody could be covered in time."""
    limits = spot_run().settings.limits
    tries = 60 / limits.retry_s * spot_run().settings.num_slots
    assert min(limits.launches_per_min, limits.fallbacks_per_min) > 10 * tries


def test_a_notice_is_paid_for_and_a_surprise_is_not() -> None:
    told, surprised = spot_run("fleet.no_notice_share=0"), spot_run("fleet.no_notice_share=1")
    rates = told.settings.rates_per_s

    def usd(of: SpotRun, leave_s: float) -> float:
        return predict(of.market, of.planner, rates, leave_s=leave_s).cost_usd

    price = told.market.spot_usd_per_h(0.0) / 3600
    assert usd(told, 2.0) - usd(told, 0.0) == pytest.approx(told.predicted.preemptions * 2.0 * price)
    assert usd(told, 60.0) == usd(told, told.market.notice_s)  # then it is killed
    assert usd(surprised, 2.0) == usd(surprised, 0.0)


def test_a_standing_clock_stands_and_then_keeps_pace() -> None:
    real = VirtualClock(1000.0)
    clock = PausedClock(real)
    real.advance(50)
    assert (clock(), clock.runs) == (1000.0, False)
    clock.start()
    real.advance(7)
    clock.start()
    assert (clock(), clock.runs) == (1007.0, True)
    assert clock.at(1055.0) == 1005.0  # a record's time
    assert clock.at(1010.0) == 1000.0  # written before the start


def test_a_clock_may_start_a_little_late() -> None:
    real = VirtualClock(1000.0)
    clock = PausedClock(real)
    real.advance(10)
    clock.start(ago_s=1.5)
    assert clock() == 1001.5


# --- the timeline ---------------------------------------------------------------------------------------------------


def decision(at_s: float, *markets: str | None, phase: str = "run", usd: float = 0.0) -> Any:
    from types import SimpleNamespace

    alive = tuple(SimpleNamespace(market=market) for market in markets if market)
    return SimpleNamespace(
        elapsed_s=at_s, phase=phase, markets=markets, reasons=tuple(f"why {n}" for n in range(len(markets))), alive=alive,
        bill=SimpleNamespace(usd=usd), updates_done=2.0 * at_s,
    )  # fmt: skip


def test_moves_are_changes_of_market_while_the_job_runs() -> None:
    timeline = MarketTimeline()
    timeline.feed(decision(0.0, "spot", "spot"))
    timeline.feed(decision(1.0, "on_demand", "spot", usd=0.5))
    timeline.feed(decision(2.0, "on_demand", "spot"))
    timeline.feed(decision(3.0, "spot", "on_demand"))
    timeline.feed(decision(4.0, None, None, phase="done"))
    assert [(one.at_s, one.slot, one.to, one.reason) for one in timeline.moves] == [
        (1.0, 0, "on_demand", "why 0"), (3.0, 0, "spot", "why 0"), (3.0, 1, "on_demand", "why 1")
    ]  # fmt: skip
    assert [(one.usd, one.num_spot, one.num_on_demand) for one in timeline.points[:2]] == [(0.0, 2, 0), (0.5, 1, 1)]


def test_a_move_is_told_without_saying_its_aim_twice() -> None:
    assert Move(1.0, 2, "on_demand", "to on-demand: it is late").text() == "worker 2 to on-demand: it is late"
    assert Move(1.0, 2, "spot", "spot is there").text() == "worker 2 to spot: spot is there"


def machine(exit_code: int, *, preempted: bool, without_notice: bool = False) -> Machine:
    instance = Instance("p", 0, 1, "spot", "chain/0", InstanceState.ENDED, 0.0)
    return Machine(instance, exit_code=exit_code, preempted=preempted, without_notice=without_notice)


def test_facts_and_last_words_say_the_same() -> None:
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
    found = facts(result, predictions, "adaptive", timeline, machines)
    assert (found["deadline_met"], found["preemptions"], found["preemptions_killed"]) == (True, 2, 1)
    assert (found["moves"], found["moves_predicted"], found["instances"]) == (11, 1, 4)
    assert found["cost_error_points"] == pytest.approx(2.0)
    text = "\n".join(lines(json.loads(json.dumps(found))))
    for words in ("met, at 95.0 s of 100 s", "70.0 % of 1.000 USD", "(+2.0 points)", "all-spot", "too late",
                  "2 preemptions (predicted 3), 1 without notice; 1 by SIGKILL", "and 3 more"):  # fmt: skip
        assert words in text
    for worse in (replace(result, finish_s=100.1), replace(result, reached=False)):
        assert not facts(worse, predictions, "adaptive", timeline, machines)["deadline_met"]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    from doll.monitor.spot_plot import draw

    found = spot_run()
    clock = VirtualClock()
    fleet = FakeFleet(clock)
    from doll.provisioner.fleets.port import Order

    machines = [Machine(fleet.launch(order)) for order in (Order(0, 1, "spot"), Order(1, 1, "on_demand"))]
    timeline = MarketTimeline()
    for at_s in np.arange(0.0, 100.0):
        timeline.feed(decision(float(at_s), "spot", "on_demand", usd=at_s / 100))
    result = SpotResult(99.0, True, 190.0, 0.99, 1.0, 1.2)
    path = tmp_path / "spot.png"
    draw(
        path, timeline=timeline, result=result, predicted=found.predicted, market=found.market, machines=machines,
        opened_s=clock() - 10, updates=225, job="spot",
    )  # fmt: skip
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_machines_and_money_are_shown_in_both_views() -> None:
    import io

    from doll.monitor.display import one_line, panel
    from doll.monitor.progress import ProgressModel
    from rich.console import Console

    config = job_config.load(EXAMPLE)
    snapshot = ProgressModel(config, 0.0).snapshot(10.0)
    workers = tuple(replace(line, machine=f"spot #{line.worker} works", usd=0.25) for line in snapshot.workers)
    shown = replace(snapshot, workers=workers, costs="5 of 190 s, 6 spot + 0 on-demand, 1.500 USD")
    out = io.StringIO()
    Console(file=out, width=140).print(panel(shown, config.stop))
    assert "spot #5 works" in out.getvalue()
    assert "0.250" in out.getvalue()
    assert "6 spot + 0 on-demand" in out.getvalue()
    assert one_line(shown, config.stop).endswith("1.500 USD")
    out = io.StringIO()
    Console(file=out, width=140).print(panel(snapshot, config.stop))
    assert "USD" not in out.getvalue()
