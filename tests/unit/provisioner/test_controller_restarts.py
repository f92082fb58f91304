"""A controller that is started again: on its state, without it, after another job or generation, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from any_record import ANY  # any record of any type, with any content
from controller_scene import Scene, launches
from doll.errors import ConfigError
from doll.provisioner.billing import EC2_LINUX
from doll.provisioner.fleets.port import Order
from doll.provisioner.state_store import FileStateStore
from doll.records.control import TermStarted
from fuzzing import examples
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from job_world import JobWorld, settings
from memory_state_store import MemoryStateStore


def test_a_successor_goes_on_where_the_other_was(tmp_path: Path) -> None:
    scene = Scene()
    scene.state_store = FileStateStore(tmp_path, "digits")  # type: ignore[assignment]
    scene.controller = scene.successor()
    before = scene.steps(6)
    scene.controller = scene.successor()
    after = scene.turn()
    assert (after.turn, after.started_s, after.markets) == (before.turn + 1, before.started_s, before.markets)
    assert after.bill.usd == pytest.approx(before.bill.usd)
    assert after.actions == ()
    assert after.ready == before.ready
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "provision-digits.jsonl").read_text().splitlines()]
    assert kinds.count("decision") == 7
    assert kinds[:9] == ["order"] * 4 + ["launched"] * 4 + ["decision"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": 99}', '{"state": 1}', '{"state": 1, "memory": {}}'])
def test_a_state_file_that_is_no_use_is_no_obstacle(tmp_path: Path, content: str) -> None:
    """Tags and topics say enough: no second machine for any slot, the clock goes on, the money is not forgotten."""
    scene = Scene()
    scene.state_store = FileStateStore(tmp_path, "digits")  # type: ignore[assignment]
    scene.controller = scene.successor()
    before = scene.steps(6)
    (tmp_path / "provision-digits.json").write_text(content)
    scene.controller = scene.successor()
    scene.world.log.append((before.record(), scene.clock()))
    after = scene.turn()
    assert after.actions == ()
    assert after.started_s == before.started_s
    assert after.bill.usd == pytest.approx(before.bill.usd)
    assert after.markets == before.markets
    assert len(scene.fleet.all_instances()) == 4


def test_the_state_of_deleted_topics_says_nothing_about_new_ones_of_the_same_names() -> None:
    scene = Scene()
    scene.more = {"job": "digits", "topics_id": "first"}
    scene.controller = scene.successor()
    scene.to_the_end()
    assert scene.decisions[-1].finished
    bought = {instance.id for instance in scene.fleet.all_instances()}
    scene.more["topics_id"] = "second"
    scene.world = JobWorld(scene.clock, scene.fleet, scene.job)
    scene.controller = scene.successor()
    decision = scene.turn()
    assert (decision.phase, decision.turn, decision.started_s) == ("run", 1, scene.clock())
    assert decision.bill.usd == 0, "what has ended was billed to the earlier run"
    assert len(launches(decision)) == 4
    assert bought.isdisjoint(instance.id for instance in scene.fleet.alive()), (
        "the fleet remembers orders; these are others"
    )
    scene.controller = scene.successor()
    assert scene.turn().turn == 2, "and its own state it knows"


@pytest.mark.parametrize("restarted", ["no", "yes", "without its state_store"])
def test_a_new_generation_has_a_clock_and_a_bill_of_its_own_and_new_incarnations(restarted: str) -> None:
    scene = Scene()
    scene.more = {"job": "digits", "topics_id": "same"}
    scene.controller = scene.successor()
    scene.to_the_end()
    before = scene.decisions[-1]
    scene.world.log.append((before.record(), scene.clock()))
    scene.clock.advance(100.0)
    fresh = TermStarted(term=2, resumed_version=0, origins=(), records_per_batch=1, time_s=scene.clock(), generation=2)
    scene.world.log.append((fresh, scene.clock()))
    scene.clock.advance(3.0)
    if restarted != "no":
        scene.state_store = scene.state_store if restarted == "yes" else MemoryStateStore()
        scene.controller = scene.successor()
    decision = scene.turn()
    assert (before.phase, decision.phase, decision.updates_done) == ("done", "run", 0)
    first_turn = restarted == "without its state_store"
    assert (decision.started_s, decision.bill.usd) == (scene.clock() if first_turn else fresh.time_s, 0)
    if restarted == "without its state_store":
        assert launches(decision) == [], "what its predecessor has launched may not be listed yet"
        for _ in range(10):
            if launches(decision):
                break
            scene.world.log.append((scene.world._server_status(0, 0), scene.clock()))
            decision = scene.steps(2)
    assert launches(decision) == [(slot, 2, "spot") for slot in range(4)]
    assert len({call.order.run for call in scene.fleet.calls if call.order is not None}) == 2


def test_machines_that_another_job_has_left_are_ended_and_are_not_taken_for_ones_own() -> None:
    scene = Scene()
    scene.more = {"job": "digits"}
    scene.controller = scene.successor()
    scene.clock.advance(100.0)
    scene.world.pass_time(0.0)
    left = scene.fleet.launch(Order(1, 1, "spot"))
    scene.fleet.hand_over(left.id, "letters")
    decision = scene.turn()
    assert len(launches(decision)) == 4
    assert [call.ids for call in scene.fleet.calls if call.name == "terminate"] == [{left.id}]
    assert any("of another job (letters)" in alarm for alarm in decision.alarms)
    assert left.id not in {instance.id for instance in decision.instances}
    assert [entry["id"] for entry in scene.state_store.journal if entry["kind"] == "end"] == [left.id]
    assert not scene.steps(2).alarms


def test_each_job_has_a_state_file_of_its_own(tmp_path: Path) -> None:
    assert FileStateStore(tmp_path, "digits").load() is None
    FileStateStore(tmp_path, "digits").save({"turn": 1})
    assert FileStateStore(tmp_path, "digits").load() == {"turn": 1}
    assert FileStateStore(tmp_path, "other").load() is None


def test_a_lost_book_forgets_no_money() -> None:
    """What the topics say was spent is a floor, also for machines that nobody lists any more."""
    scene = Scene(settings(deadline_s=3000.0))
    scene.steps(8)
    scene.fleet.fail_instance("i-00000000000000000")
    before = scene.steps(8)
    scene.fleet.hidden.add("i-00000000000000000")
    scene.state_store = MemoryStateStore()
    scene.controller = scene.successor()
    scene.world.log.append((before.record(), scene.clock()))
    assert scene.turn().bill.usd == pytest.approx(before.bill.usd)
    assert scene.controller.state.launch_state.slots[0].incarnation == 2


def test_an_unwritable_book_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    scene = Scene()
    scene.state_store = FileStateStore(tmp_path / "file", "digits")  # type: ignore[assignment]
    scene.controller = scene.successor()
    with pytest.raises(ConfigError, match=r"cannot write .*see --run-folder"):
        scene.turn()
    assert scene.fleet.alive() == [], "what cannot be noted is not done"


def test_ended_machines_are_settled_once_and_in_the_end_only_as_a_sum() -> None:
    job = settings(updates=1e6, deadline_s=1e7, replan_s=600.0)
    scene = Scene(job, billing=EC2_LINUX)
    scene.steps(4, step_s=600.0)
    scene.fleet.interrupt("i-00000000000000000", 0.0)
    scene.steps(4, step_s=600.0)
    usd = sum(line.usd for line in scene.decisions[-1].bill.lines if line.ended_s is not None)
    scene.steps(200, step_s=600.0)
    last = scene.decisions[-1]
    assert [line for line in last.bill.lines if line.ended_s is not None] == []
    running = sum(line.usd for line in last.bill.lines)
    assert last.bill.usd == pytest.approx(running + usd)
    assert last.bill.instances == 5
    scene.controller = scene.successor()
    assert scene.turn().bill.usd == pytest.approx(last.bill.usd)


@given(st.lists(st.tuples(ANY, st.floats(-1e9, 1e12)), max_size=30))
@hypothesis_settings(max_examples=examples(25))
def test_no_record_stops_it(strange: list[tuple[Any, float]]) -> None:
    """Whatever stands on the topics: it goes on, nothing is doubled, and its state can be kept and read again."""
    scene = Scene()
    scene.steps(3)
    for record, at_s in strange:
        scene.controller.observed.feed(record, at_s)
    scene.steps(2)
    scene.state_store = MemoryStateStore()
    scene.controller = scene.successor()
    for record, at_s in strange:
        scene.controller.observed.feed(record, at_s)
    scene.steps(2)
    scene.controller = scene.successor()
    scene.steps(2)
    assert scene.world.most_per_slot <= 2
