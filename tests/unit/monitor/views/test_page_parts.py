"""The market on the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from doll.monitor.state.watched_job import PageState
from doll.monitor.views.page import page
from page_feed import MadeUpJob


def feed(made_up: MadeUpJob, turn: int, at_s: float, running: list[str], **numbers: float) -> None:
    decision: dict[str, Any] = {
        "turn": turn, "elapsed_s": at_s, "phase": "run", "binding": "deadline", "feasible": True,
        "markets": ["spot"] * len(running), "running": running, "reasons": {}, "actions": [], "alarms": [],
        "spot_usd_per_h": 0.1, "on_demand_usd_per_h": 0.4, **numbers,
    }  # fmt: skip
    made_up.watched.decisions.add(decision)


def test_a_job_without_a_provisioner_has_no_market() -> None:
    made_up = MadeUpJob(2)
    made_up.run(1)
    assert made_up.read(page)["market"] == {}


def test_the_market_has_prices_costs_and_who_ran_where() -> None:
    made_up = MadeUpJob(2)
    made_up.run(1)
    for turn in range(1, 6):
        running = ["spot", "" if turn == 3 else "on_demand"]
        feed(made_up, turn, float(turn), running, spent_usd=0.01 * turn, interruptions_total=1.0, availability=0.7)
    shown = made_up.read(page)["market"]
    facts = dict(shown["facts"])
    assert facts["spot, per hour"] == "0.10 USD, 25 % of on-demand"
    assert facts["workers"] == "1 spot, 1 on-demand, of 2"
    assert (facts["interruptions"], facts["availability"]) == ("1", "70 % of the time")
    assert shown["spans"] == {
        "0": [[1.0, -1, "spot"]],
        "1": [[1.0, 3.0, "on_demand"], [4.0, -1, "on_demand"]],
    }
    assert [value for _, value in shown["curves"]["spent_usd"].values()] == [0.01, 0.02, 0.03, 0.04, 0.05]
    assert shown["curves"]["spot_usd_per_h"] == {"0": [1.0, 0.1], "4": [5.0, 0.1]}, "a price that stays is a line"
    assert shown["curves"]["all_on_demand_usd"] == {}


def test_a_spot_run_also_says_when_no_spot_was_there() -> None:
    made_up = MadeUpJob(2)
    feed(made_up, 1, 1.0, ["spot", "on_demand"])
    report = {"spot_unavailable_s": [[], [[0.0, 9.5]]]}
    shown = made_up.read(lambda state: page(replace(state, report=report)))["market"]
    assert shown["spans"] == {"0": [[1.0, -1, "spot"]], "1": [[0.0, 9.5, "unavailable"], [1.0, -1, "on_demand"]]}


def test_the_market_of_a_thousand_workers_is_small() -> None:
    made_up = MadeUpJob(1_000, members=2)
    feed(made_up, 1, 1.0, ["spot"] * 1_000)
    state: PageState = made_up.read(lambda state: state)
    assert len(str(page(state)["market"])) < 50_000
