"""The page as plain values: the four questions answered from the records, and what a click opens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from doll.config import parse
from doll.dashboard.merge_patch import merge_patch
from doll.monitor.state.watched_job import PageState
from doll.monitor.views.page import MAX_POINTS, page
from doll.monitor.views.page_details import detail
from doll.records.control import Finished, Metric, TermStarted
from page_feed import JOB, MadeUpJob
from record_builders import update


@pytest.fixture
def made_up() -> MadeUpJob:
    """A job after two minutes, with a provisioner."""
    made_up = MadeUpJob()
    made_up.run(119)
    made_up.decide("slot 3: launch incarnation 2 on_demand (cover): i-0003")
    made_up.run(1)
    return made_up


def facts(page_: dict[str, Any], question: str) -> dict[str, str]:
    return dict(page_["questions"][question]["facts"])


def verdict(page_: dict[str, Any], question: str) -> tuple[str, str]:
    return page_["questions"][question]["tone"], page_["questions"][question]["verdict"]


def test_a_job_before_its_first_update_says_that_it_waits() -> None:
    shown = MadeUpJob().read(page)
    assert {tone for tone, _ in (verdict(shown, name) for name in shown["questions"])} == {"none"}
    assert verdict(shown, "learning") == ("none", "waiting for the first update")


def test_the_four_questions_of_a_job_that_does_well(made_up: MadeUpJob) -> None:
    shown = made_up.read(page)
    tone, text = verdict(shown, "learning")
    assert (tone, text.startswith("yes: held-out accuracy 0.93")) == ("good", True), text
    assert facts(shown, "learning")["target"] == "accuracy 0.97"
    assert verdict(shown, "progress") == ("good", "yes: expected end 4:22 of 5:00")
    assert facts(shown, "progress")["expected end"] == "4:22 ± 0:04"
    assert facts(shown, "progress")["expected cost"] == "0.720 ± 0.030 USD"
    bars = {bar["label"]: bar for bar in shown["questions"]["progress"]["bars"]}
    assert bars["samples"]["text"] == "61,440 of 100,000"
    assert bars["samples"]["share"] == 0.614
    assert bars["cost"]["text"] == "0.31 USD, 65 % of 0.48 all on-demand"
    assert verdict(shown, "safety") == ("good", "yes: each offset is in one update, none is missing")
    assert facts(shown, "safety")["audit"] == "61,440 offsets in updates, 0 missing, 0 twice so far"
    assert facts(shown, "safety")["durable"] == "version 474, updates after it: 6"
    assert verdict(shown, "work") == ("good", "8 of 8 workers are live")
    assert facts(shown, "work")["staleness"] == "-0.899 batches (99 %: -1, lock step: -1; 100 % of reads)"


def test_a_job_without_a_provisioner_foresees_its_end_by_its_own_rate() -> None:
    made_up = MadeUpJob()
    made_up.run(60)
    shown = made_up.read(page)
    assert verdict(shown, "progress") == ("good", "yes: expected end 3:15 of 5:00")
    assert facts(shown, "progress")["workers on EC2"].endswith("USD on-demand")
    assert facts(shown, "progress")["Kafka on three machines"].endswith("USD: 0.17 USD/h, table")
    assert facts(shown, "progress")["egress"] == "not priced: set plan.services.egress_gb_per_h"
    assert facts(shown, "progress")["workers and services"].endswith("USD")


def test_trouble_is_said_first() -> None:
    made_up = MadeUpJob()
    made_up.run(20)
    assert verdict(made_up.read(page), "safety")[0] == "good"
    made_up.status(dead_reasons=(("no JSON: Expecting value", 3),))
    shown = made_up.read(page)
    assert verdict(shown, "safety") == ("warn", "yes, but 3 records could not be learned")
    assert facts(shown, "safety")["dead letters"] == "3 dead letters: no JSON: Expecting value"
    made_up.feed(update(1, 81, (0, 400)))
    tone, text = verdict(made_up.read(page), "safety")
    assert tone == "bad"
    assert text.startswith("no: partition 0: offsets ")
    silent = made_up.read(lambda state: page(replace(state, continuity=None, silent_s={"worker-3": 40.0, "ps": 31.0})))
    assert verdict(silent, "safety") == ("bad", "no: nothing is heard of the parameter server for 31 s")
    assert facts(silent, "safety")["silent"] == "the parameter server for 31 s, worker 3 for 40 s"
    late = made_up.read(lambda state: page(replace(state, problem="Kafka has not answered for 20 s")))
    assert verdict(late, "safety") == ("warn", "Kafka has not answered for 20 s")


def test_a_worker_that_is_gone_and_a_partition_that_limits_are_seen(made_up: MadeUpJob) -> None:
    made_up.kill(3)
    made_up.run(1)
    shown = made_up.read(page)
    assert verdict(shown, "work") == ("warn", "7 of 8 workers are live")
    assert (shown["workers"]["3"]["state"], shown["workers"]["3"]["event"]) == ("gone", "gone")
    assert shown["lists"]["events"][0] == [made_up.now_s, "worker 3: gone"]
    made_up.limited()
    tone, text = verdict(made_up.read(page), "work")
    assert tone == "warn"
    assert text.startswith("partition 3 has 93% of the 41,204 unread records")


def test_a_deadline_that_will_be_missed_is_said() -> None:
    made_up = MadeUpJob()
    made_up.config = made_up.config.model_copy(
        update={"plan": made_up.config.plan.model_copy(update={"deadline_s": 100.0})}
    )
    made_up.run(60)
    shown = made_up.read(lambda state: page(replace(state, config=made_up.config)))
    assert verdict(shown, "progress") == ("bad", "no: expected end 3:15 of 1:40")


def test_the_end_is_shown(made_up: MadeUpJob) -> None:
    made_up.feed(Finished(term=1, version=480, reason="samples: 61440 reached", time_s=made_up.now_s))
    report = {"audit": {"ok": False, "applied": 7, "pending": 0, "missing": 0, "duplicate": 8}}
    shown = made_up.read(lambda state: page(replace(state, report=report)))
    assert shown["job"]["state"] == "ended: samples: 61440 reached"
    assert verdict(shown, "safety") == ("bad", "no: the audit found offsets that are missing or applied twice")
    assert facts(shown, "safety")["audit"] == "7 applied once, 0 not yet, 0 missing, 8 twice"


def test_it_is_json_without_null_and_a_second_changes_little(made_up: MadeUpJob) -> None:
    made_up.run(1)  # in which half of the points were left out
    before = made_up.read(page)
    assert b"null" not in msgspec.json.encode(before)
    made_up.run(1)
    after = made_up.read(page)
    patch = merge_patch(before, after)
    assert len(msgspec.json.encode(patch)) < len(msgspec.json.encode(after)) / 4
    assert "events" not in patch["lists"]


def test_a_long_run_has_as_many_points_as_a_short_one_and_they_stay() -> None:
    made_up = MadeUpJob(workers=2, members=2)
    made_up.run(200)
    before = made_up.read(page)["curves"]["samples"]
    assert MAX_POINTS <= len(before) <= 2 * MAX_POINTS + 1
    made_up.run(1)
    after = made_up.read(page)["curves"]["samples"]
    assert len([key for key in before if key not in after]) <= 1, "only the last one moves"
    made_up.run(300)
    assert MAX_POINTS <= len(made_up.read(page)["curves"]["samples"]) <= 2 * MAX_POINTS + 1


# --- what a click opens


def opened(state: PageState, kind: str, *key: int) -> dict[str, str]:
    opened_detail = detail(state, kind, key)
    assert opened_detail is not None
    return {"title": opened_detail["title"], **dict(opened_detail["facts"])}


def test_a_worker_opens(made_up: MadeUpJob) -> None:
    shown = made_up.read(lambda state: detail(state, "worker", [2]))
    assert shown is not None
    named = dict(shown["facts"])
    assert (named["market"], named["control link"], named["state"]) == ("spot", "local", "live 2:00")
    assert named["last event"].startswith("live, 20")
    assert shown["rows"][0][0] == "2"


def test_an_update_opens_with_its_offsets(made_up: MadeUpJob) -> None:
    shown = made_up.read(lambda state: detail(state, "update", [480]))
    assert shown is not None
    assert all(int(row[1].partition(" to ")[2].replace(",", "")) % 32 == 31 for row in shown["rows"])
    assert sum(int(row[2]) for row in shown["rows"]) == 128
    old = made_up.read(lambda state: opened(state, "update", 3))
    assert old["samples"] == "128"
    assert old["offsets"].startswith("in the topic doll.clicks.updates; a page keeps those of the newest updates only")
    ended = made_up.read(lambda state: opened(replace(state, is_live=False), "update", 3))
    assert ended["offsets"].endswith("at most 200, and so does the folder of a run that has ended")


def test_a_dead_letter_opens_and_shows_its_content_as_text(made_up: MadeUpJob) -> None:
    made_up.refuse(7, "no JSON", b"<script>\x1b[31m\xff")
    shown = made_up.read(lambda state: opened(state, "letter", 0, 7))
    assert (shown["reason"], shown["code"]) == ("no JSON", "undecodable")
    assert shown["content"] == "<script>�[31m\\xff"


def test_a_decision_opens_with_its_reasons(made_up: MadeUpJob) -> None:
    shown = made_up.read(lambda state: detail(state, "decision", [1]))
    assert shown is not None
    assert shown["rows"] == [
        ["0-4", "spot is cheaper and the slack can bear its loss"],
        ["5-7", "without it the work would not be done in time"],
    ]
    assert dict(shown["facts"])["done"].startswith("slot 3: launch")


def test_a_version_opens(made_up: MadeUpJob) -> None:
    shown = made_up.read(lambda state: opened(state, "version", 480))
    assert shown["durable"] == "not yet"
    assert shown["held-out accuracy"].startswith("0.93")
    assert made_up.read(lambda state: opened(state, "version", 400))["durable"] == "in a checkpoint, or a later one is"


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("worker", [9]),
        ("update", [10**9]),
        ("letter", [0, 1]),
        ("letter", [0]),
        ("decision", [7]),
        ("version", [10**9]),
    ],
)
def test_what_is_not_there_opens_nothing(made_up: MadeUpJob, kind: str, key: list[int]) -> None:
    assert made_up.read(lambda state: detail(state, kind, key)) is None


def test_a_worker_that_is_a_pipeline_names_its_stages(made_up: MadeUpJob) -> None:
    pipeline = {"stages": 2, "devices": ["cuda:0", "cpu"], "layers": [["conv", "norm"], ["head"]]}
    config = parse(JOB, [f"worker.pipeline={json.dumps(pipeline)}", "training.policy={name: wsp}"])
    opened = made_up.read(lambda state: detail(replace(state, config=config), "worker", [2]))
    assert opened is not None
    facts_ = dict(opened["facts"])
    assert (facts_["stage 1"], facts_["stage 2"]) == ("cuda:0: conv, norm", "cpu: head")


def test_other_metrics_of_held_out_samples_are_shown(made_up: MadeUpJob) -> None:
    values = {"version": 480.0, "term": 1.0, "loss": 0.2, "accuracy": 0.9, "ndcg": 0.8125}
    made_up.feed(Metric(source="evaluator", values=values, time_s=made_up.now_s))
    assert facts(made_up.read(page), "learning")["held-out ndcg"] == "0.812"


def test_updates_that_a_rollback_has_left_are_void() -> None:
    made_up = MadeUpJob()
    made_up.run(3)
    newest = max(int(version) for version in made_up.read(page)["lists"]["updates"])
    made_up.feed(
        TermStarted(
            term=2, resumed_version=newest + 1, rolled_back_to=newest - 1, origins=(0,) * 8, records_per_batch=32,
            time_s=made_up.now_s, grid=1,
        )
    )  # fmt: skip
    updates = made_up.read(page)["lists"]["updates"]
    assert updates[str(newest)][0].endswith(", void")
    assert not updates[str(newest - 1)][0].endswith(", void")
    opened = made_up.read(lambda state: detail(state, "update", [newest]))
    assert opened is not None
    assert dict(opened["facts"])["void"].startswith("not in the model")
    earlier = made_up.read(lambda state: detail(state, "update", [newest - 1]))
    assert earlier is not None
    assert "void" not in dict(earlier["facts"])
