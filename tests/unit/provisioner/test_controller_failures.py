"""A controller whose fleet, prices, machines or parameter server fail, on a fake fleet in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from controller_scene import Scene, launches
from doll.errors import ConfigError, ServiceUnavailableError
from doll.provisioner.controller import Controller
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchFailure, Order
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.prices.port import StatedPrices
from doll.provisioner.traces.model import Series
from doll.theory.cost import Prices
from job_world import ON_DEMAND, SPOT, settings


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


@pytest.mark.parametrize("refusals", [1, 5])
def test_a_refusal_in_mid_job_is_tried_again(refusals: int) -> None:
    """A right that was taken away for a moment, or an answer that nobody knows, is no end of all launches."""
    scene = Scene(settings(updates=1000, deadline_s=10_000.0))
    scene.steps(4)
    scene.fleet.fail_next("launch", *[LaunchFailure.CONFIG] * refusals)
    scene.fleet.interrupt(scene.fleet.alive()[0].id, 10.0)
    calls = len(scene.fleet.calls)
    decision = scene.steps(2)
    assert decision.phase == "run"
    assert any("failure of the test" in alarm for alarm in decision.alarms)
    made = [call.at_s for call in scene.fleet.calls[calls:] if call.name == "launch"]
    assert len(made) == 1, "the market is left alone for a moment"
    scene.controller = scene.successor()
    scene.steps(80)
    made = [call.at_s for call in scene.fleet.calls[calls:] if call.name == "launch"]
    assert len(made) == refusals + 1, "a pause doubles: a refused right is not asked for in every turn"
    assert len(scene.fleet.alive()) == 4


def test_the_deadline_guard_goes_on_while_one_market_refuses() -> None:
    scene = Scene(settings(deadline_s=400.0))
    scene.steps(4)
    refuse = scene.fleet.launch

    def launch(order: Order) -> Instance:
        if order.market == "spot":
            scene.fleet.fail_next("launch", LaunchFailure.CONFIG)
        return refuse(order)

    scene.fleet.launch = launch  # type: ignore[method-assign]
    for machine in scene.fleet.alive():
        if machine.market == "spot":
            scene.fleet.interrupt(machine.id, 0.0)
    decision = scene.to_the_end()[-1]
    assert decision.phase == "done"
    assert decision.elapsed_s <= 400.0
    assert decision.bill.usd_by_market["on_demand"] > 0


def test_rights_that_are_away_when_the_provisioner_starts_again_do_not_end_it() -> None:
    """Its machines would go on without it: a supervisor does not repeat what a configuration has refused."""
    scene = Scene()
    scene.fleet.fail_next("instances", ConfigError("forbidden"))
    with pytest.raises(ConfigError):
        scene.turn()
    scene.steps(4)
    scene.controller = scene.successor()
    scene.fleet.fail_next("instances", ConfigError("forbidden"))
    assert scene.turn().phase == "unavailable"
    assert scene.steps(2).phase == "run"


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

    class Failing(StatedPrices):
        fails = True

        def current(self, now_s: float) -> Prices:
            if self.fails:
                raise ServiceUnavailableError("no prices")
            return super().current(now_s)

        def series(self, *args: Any) -> Series:
            self.current(0.0)
            return super().series(*args)

    scene.prices = prices = Failing(SPOT, ON_DEMAND)
    scene.controller = scene.successor()
    assert scene.turn().phase == "unavailable", "without any price nothing is bought"
    scene.controller = scene.successor()
    prices.fails = False
    scene.steps(4)
    prices.fails = True
    decision = scene.steps(2)
    assert decision.phase == "run"
    assert decision.bill.usd == pytest.approx(4 * 40 / 3600 * SPOT), "four machines for 40 s, at the last known price"
    prices.fails = False
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


def usd_of_all(scene: Scene) -> float:
    """What all machines have cost, by what the fleet knows of them."""
    now_s = scene.clock()
    return sum(
        ((now_s if each.ended_s is None else each.ended_s) - each.launched_s) / 3600 * SPOT
        for each in scene.fleet.all_instances()
    )


def test_what_comes_back_after_its_final_bill_is_billed_until_it_ends_and_no_longer() -> None:
    scene = Scene()
    scene.steps(10)
    late = scene.fleet.alive()[0]
    scene.fleet.hidden.add(late.id)
    scene.steps(6)
    scene.fleet.hidden.clear()
    assert scene.steps(2).bill.usd == pytest.approx(usd_of_all(scene)), "it ran all the time"
    assert scene.steps(2).bill.usd == pytest.approx(usd_of_all(scene))
    scene.fleet.hidden.add(late.id)  # it has ended by now, and an owner lists it for an hour only
    bill = scene.steps(8).bill
    assert bill.usd == pytest.approx(usd_of_all(scene)), "the fleet ended it when its successor was ready"
    assert sorted(line.id for line in bill.lines) == sorted(each.id for each in scene.fleet.all_instances())
    scene.controller = scene.successor()
    assert scene.steps(3).bill.usd == pytest.approx(usd_of_all(scene)), "a successor has the same bill"


def test_a_machine_that_a_person_stops_is_replaced_and_ended() -> None:
    scene = Scene()
    scene.steps(10)
    victim = scene.fleet.alive()[0]
    scene.fleet.stop_instance(victim.id)
    scene.fleet.fail_next("terminate", ServiceUnavailableError("gone"))
    decision = scene.steps(1)
    assert [result.text() for result in decision.actions if "it is stopped" in result.text()]
    assert not decision.finished
    decision = scene.steps(2, step_s=30.0)
    ended = {each.id: each for each in decision.instances}[victim.id]
    assert ended.state is InstanceState.ENDED
    assert [line.ended_s for line in decision.bill.lines if line.id == victim.id] == [ended.ended_s]
    assert {(each.slot, each.incarnation) for each in scene.fleet.alive()} == {(0, 2), (1, 1), (2, 1), (3, 1)}
    assert decision.bill.usd == pytest.approx(usd_of_all(scene)), "while it was stopped it cost no machine"


def test_a_job_is_not_over_while_a_stopped_machine_is_there() -> None:
    scene = Scene()
    scene.steps(10)
    scene.fleet.stop_instance(scene.fleet.alive()[0].id)
    scene.fleet.fail_next("terminate", *[ServiceUnavailableError("gone")] * 2)
    assert not scene.turn(draining=True).finished
    scene.clock.advance(30.0)
    assert not scene.turn(draining=True).finished
    scene.turn(draining=True)
    scene.clock.advance(30.0)
    assert scene.turn(draining=True).finished
    assert all(each.state is InstanceState.ENDED for each in scene.fleet.all_instances())


def test_a_machine_that_was_stopped_and_started_costs_while_it_runs() -> None:
    scene = Scene()
    scene.steps(10)
    victim = scene.fleet.alive()[0]
    before = [each for each in scene.fleet.alive() if each.id != victim.id]
    scene.fleet.fail_next("terminate", *[ServiceUnavailableError("gone")] * 2)
    scene.fleet.stop_instance(victim.id)
    stopped_s = scene.clock()
    scene.steps(2)
    scene.clock.advance(600.0)
    scene.fleet.start_instance(victim.id)
    bill = scene.steps(1).bill
    first_usd = (stopped_s - victim.launched_s) / 3600 * SPOT
    assert len(before) == 3
    assert bill.usd == pytest.approx(usd_of_all(scene) + first_usd), "both times, and not the one between"


def planned_boot_s(controller: Controller) -> float:
    return controller.state.plan.planned(controller.observed).boot_s


def test_boots_that_are_slower_than_planned_are_planned_with() -> None:
    """What the plan says of boots is a guess: with 20 s instead of 90 s the guard would move too late to be in time."""
    scene = Scene(settings(updates=1e6, deadline_s=1e7, boot_s=20.0), boot_s=90.0)
    scene.steps(2)
    assert planned_boot_s(scene.controller) == 20.0
    scene.steps(14)
    assert planned_boot_s(scene.controller) == pytest.approx(90.0, abs=10.0)
    scene.controller = scene.successor()
    assert planned_boot_s(scene.controller) == pytest.approx(90.0, abs=10.0), "a successor knows it too"
    quick = Scene(settings(updates=1e6, deadline_s=1e7, boot_s=20.0), boot_s=1.0)
    quick.steps(14)
    assert planned_boot_s(quick.controller) == 20.0, "what the plan says is the least"


def test_a_machine_that_waited_for_the_parameter_server_did_not_boot_meanwhile() -> None:
    scene = Scene(settings(updates=1e6, deadline_s=1e7, boot_s=20.0), boot_s=30.0)
    scene.turn()
    scene.clock.advance(600.0)  # nobody to join
    scene.world.pass_time(0.0)
    scene.steps(3)
    assert len(scene.turn().ready) == 4
    assert planned_boot_s(scene.controller) == 20.0
