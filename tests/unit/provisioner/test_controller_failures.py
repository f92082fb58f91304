"""A controller whose fleet, prices, machines or parameter server fail, on a fake fleet in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from controller_scene import Scene, launches
from doll.errors import ServiceUnavailableError
from doll.provisioner.fleets.port import EndReason, LaunchFailure
from doll.provisioner.launch_state import LaunchLimits
from doll.theory.cost import Prices
from job_world import SPOT, settings


def test_a_used_up_quota_is_an_alarm_and_costs_no_deadline() -> None:
    scene = Scene(settings(deadline_s=500.0))
    scene.fleet.fail_next("launch", LaunchFailure.SPOT_QUOTA)
    first = scene.turn()
    assert any("quota of spot" in alarm for alarm in first.alarms)
    scene.to_the_end()
    assert scene.world.finished_s is not None
    assert scene.world.finished_s - first.started_s <= 500
    tries = [call for call in scene.fleet.calls if call.order is not None and call.order.market == "spot"]
    assert len(tries) <= 4, "no more tries on spot for a while"


def test_a_misconfigured_launch_stops_and_tells() -> None:
    scene = Scene()
    scene.fleet.fail_next("launch", LaunchFailure.CONFIG)
    decision = scene.turn()
    assert decision.phase == "stopped"
    assert any("failure of the test" in alarm for alarm in decision.alarms)
    assert len([call for call in scene.fleet.calls if call.name == "launch"]) == 1, "it does not try the others"
    assert scene.steps(3).phase == "stopped"
    assert len([call for call in scene.fleet.calls if call.name == "launch"]) == 1
    scene.controller = scene.successor()
    assert scene.steps(6).phase == "run", "a person has started it again"
    assert len(scene.fleet.alive()) == 4


def test_a_fleet_that_does_not_answer_blinds_and_changes_nothing() -> None:
    scene = Scene()
    scene.steps(4)
    spent = scene.decisions[-1].bill.usd
    scene.fleet.fail_next("instances", ServiceUnavailableError("gone"))
    decision = scene.steps(1)
    assert (decision.phase, decision.actions) == ("unavailable", ())
    assert decision.bill.usd == spent
    assert any("gone" in alarm for alarm in decision.alarms)
    assert scene.steps(2).phase == "run"
    assert len(scene.fleet.all_instances()) == 4


def test_prices_that_fail_are_the_last_known() -> None:
    scene = Scene()

    class Failing:
        def current(self, now_s: float) -> Prices:
            raise ServiceUnavailableError("no prices")

        def series(self, *args: Any) -> Any:
            raise ServiceUnavailableError("no prices")

    scene.controller._prices = Failing()
    assert scene.turn().phase == "unavailable", "without any price nothing is bought"
    scene.controller = scene.successor()
    scene.steps(4)
    scene.controller._prices = Failing()
    decision = scene.steps(2)
    assert decision.phase == "run"
    assert decision.bill.usd == pytest.approx(4 * 40 / 3600 * SPOT), "four machines for 40 s, at the last known price"
    scene.controller._prices = scene.prices
    assert scene.steps(1).bill.usd == pytest.approx(decision.bill.usd)


def test_a_machine_that_breaks_is_replaced() -> None:
    scene = Scene()
    scene.steps(4)
    scene.fleet.fail_instance("i-00000000000000000")
    scene.steps(8)
    alive = {(instance.slot, instance.incarnation) for instance in scene.fleet.alive()}
    assert alive == {(0, 2), (1, 1), (2, 1), (3, 1)}


def test_a_machine_whose_worker_hangs_is_replaced() -> None:
    scene = Scene(settings(deadline_s=5000.0, updates=1000.0, limits=LaunchLimits(silence_timeout_s=60.0)))
    scene.steps(4)
    scene.world.mute.add("i-00000000000000000")
    scene.steps(20)
    assert (0, 2) in {(instance.slot, instance.incarnation) for instance in scene.fleet.alive()}
    assert scene.fleet.all_instances()[0].end_reason is EndReason.TERMINATED


def test_nothing_is_launched_and_no_machine_is_blamed_without_a_parameter_server() -> None:
    scene = Scene(settings(limits=LaunchLimits(boot_timeout_s=60.0)))
    for _ in range(30):
        decision = scene.controller.turn(scene.clock())
        scene.clock.advance(10.0)
    assert scene.fleet.all_instances() == []
    assert any("no parameter server has been heard" in alarm for alarm in decision.alarms)
    scene.steps(1)
    scene.world.pass_time(0.0)
    assert len(launches(scene.steps(1))) == 4, "once it is heard"
    for _ in range(30):  # and then it is gone
        decision = scene.controller.turn(scene.clock())
        scene.clock.advance(10.0)
    assert len(scene.fleet.all_instances()) == 4, "none is replaced"


def test_what_vanishes_from_the_listing_has_ended_and_is_billed() -> None:
    scene = Scene()
    scene.steps(10)
    gone = scene.fleet.alive()[0]
    scene.fleet.hidden.add(gone.id)
    decision = scene.steps(1)
    (line,) = [line for line in decision.bill.lines if line.id == gone.id]
    assert line.usd == pytest.approx((scene.clock() - gone.launched_s) / 3600 * SPOT)
    assert line.ended_s == scene.clock()
    scene.steps(6)
    assert (0, 2) in {(instance.slot, instance.incarnation) for instance in scene.fleet.alive()}


def test_boots_that_are_slower_than_planned_are_planned_with() -> None:
    """What the plan says of boots is a guess: with 20 s instead of 90 s the guard would move too late to be in time."""
    scene = Scene(settings(updates=1e6, deadline_s=1e7, boot_s=20.0), boot_s=90.0)
    scene.steps(2)
    assert scene.controller.planned.boot_s == 20.0
    scene.steps(14)
    assert scene.controller.planned.boot_s == pytest.approx(90.0, abs=10.0)
    scene.controller = scene.successor()
    assert scene.controller.planned.boot_s == pytest.approx(90.0, abs=10.0), "a successor knows it too"
    quick = Scene(settings(updates=1e6, deadline_s=1e7, boot_s=20.0), boot_s=1.0)
    quick.steps(14)
    assert quick.controller.planned.boot_s == 20.0, "what the plan says is the least"


def test_a_machine_that_waited_for_the_parameter_server_did_not_boot_meanwhile() -> None:
    scene = Scene(settings(updates=1e6, deadline_s=1e7, boot_s=20.0), boot_s=30.0)
    scene.turn()
    scene.clock.advance(600.0)  # nobody to join
    scene.world.pass_time(0.0)
    scene.steps(3)
    assert len(scene.turn().ready) == 4
    assert scene.controller.planned.boot_s == 20.0
