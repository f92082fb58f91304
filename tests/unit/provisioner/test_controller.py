"""The controller on a fake fleet in virtual time: deadline, budget, quotas, notices, blindness, restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from any_record import ANY  # any record of any type, with any content
from doll.errors import ConfigError, FencedError, ServiceUnavailableError
from doll.provisioner.billing import EC2_LINUX, LOCAL, BillingRule
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchFailure, Order
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.lease import Lease
from doll.provisioner.planning import planner
from doll.provisioner.planning.planner import slot_ranges
from doll.provisioner.prices.stated import StatedPrices
from doll.provisioner.reconcile import Launch
from doll.provisioner.settings import ControllerSettings
from doll.provisioner.state_store import FileStateStore, MemoryStateStore
from doll.records.control import Evaluated, TermStarted, decode, encode
from doll.storage.file_checkpoints import FileCheckpointStore
from doll.theory.cost import Prices
from fake_fleet import FakeFleet, VirtualClock
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from job_world import ON_DEMAND, SPOT, JobWorld, run, settings


class Forgetful(FakeFleet):
    """A fleet that does not list what is in `hidden`."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.hidden: set[str] = set()

    def instances(self) -> list[Instance]:
        return [instance for instance in super().instances() if instance.id not in self.hidden]

    def hand_over(self, id_: str, job: str) -> None:
        """The machine was launched for this job."""
        self._put(id_, job=job)


class Scene:
    """A controller, its fleet and its job."""

    def __init__(
        self, job: ControllerSettings | None = None, *, boot_s: float = 20.0, billing: BillingRule = LOCAL, **more: Any
    ) -> None:
        self.job = job or settings()
        self.clock = VirtualClock()
        self.fleet = Forgetful(self.clock, boot_s=boot_s, ending_s=5.0)
        self.world = JobWorld(self.clock, self.fleet, self.job)
        self.state_store = MemoryStateStore()
        self.prices = StatedPrices(SPOT, ON_DEMAND)
        self.billing = billing
        self.more = more
        self.controller = self.successor()
        self.decisions: list[Decision] = []

    def successor(self) -> Controller:
        return Controller(self.job, self.fleet, self.prices, self.billing, self.state_store, **self.more)

    def turn(self, **more: Any) -> Decision:
        self.world.tell(self.controller)
        self.decisions.append(self.controller.turn(self.clock(), **more))
        return self.decisions[-1]

    def steps(self, count: int = 1, step_s: float = 10.0) -> Decision:
        """As many turns, the world going on before each but the first."""
        decision = self.turn()
        for _ in range(count - 1):
            self.clock.advance(step_s)
            self.world.pass_time(step_s)
            decision = self.turn()
        return decision

    def to_the_end(self, until_s: float = 5000.0, **more: Any) -> list[Decision]:
        self.decisions += run(self.world, self.controller, self.clock.advance, self.clock, until_s=until_s, **more)
        return self.decisions


def launches(decision: Decision) -> list[tuple[int, int, str]]:
    return [
        (result.action.order.slot, result.action.order.incarnation, result.action.order.market)
        for result in decision.results
        if isinstance(result.action, Launch)
    ]


# --- a job ----------------------------------------------------------------------------------------------------------


def test_a_calm_job_runs_on_spot_and_hands_everything_back() -> None:
    scene = Scene()
    decisions = scene.to_the_end()
    last = decisions[-1]
    assert launches(decisions[0]) == [(slot, 1, "spot") for slot in range(4)]
    assert (last.phase, last.finished, last.updates_done >= 100) == ("done", True, True)
    assert [instance for instance in scene.fleet.all_instances() if instance.state is not InstanceState.ENDED] == []
    hours = sum((instance.ended_s or 0) - instance.launched_s for instance in scene.fleet.all_instances()) / 3600
    assert last.bill.usd == pytest.approx(hours * SPOT)
    assert last.bill.usd_without_boots == pytest.approx((hours - 4 * 20 / 3600) * SPOT, rel=0.02)
    assert last.all_on_demand_usd == pytest.approx(250 / 3600 * 4 * ON_DEMAND, rel=0.05)


@pytest.mark.parametrize("group_size", [1, 4, None])
def test_the_deadline_is_met_when_spot_is_taken_back_all_the_time(group_size: int | None) -> None:
    """Whatever spot does, on-demand takes over in time; also for asp (K = 1) and where updates differ."""
    scene = Scene(settings(updates=400.0 / (group_size or 4), group_size=group_size, deadline_s=500.0))

    def taken() -> None:
        for instance in scene.fleet.alive():
            if instance.market == "spot" and instance.notice_s is None and scene.clock() - instance.launched_s > 25:
                scene.fleet.interrupt(instance.id, 0.0)

    decisions = scene.to_the_end(each=taken)
    assert scene.world.finished_s is not None
    assert scene.world.finished_s - decisions[0].started_s <= 500
    assert {market for decision in decisions for market in decision.markets} == {"spot", "on_demand", None}
    assert scene.world.most_per_slot <= 2


def test_progress_is_counted_in_samples_whatever_an_update_is() -> None:
    """One job as doll, as asp, and under a policy whose updates have 1 to 3 batches: the same plan, end and bill."""
    jobs = {
        "doll": settings(updates=99.0, group_size=4),
        "asp": settings(updates=396.0, group_size=1),
        "other": settings(updates=99.0, group_size=None),
    }
    runs = {name: Scene(job).to_the_end() for name, job in jobs.items()}
    for name, decisions in runs.items():
        assert [decision.markets for decision in decisions] == [decision.markets for decision in runs["doll"]], name
        assert [decision.samples_done for decision in decisions] == pytest.approx(
            [decision.samples_done for decision in runs["doll"]], abs=4 * 25
        )
        assert {decision.target_samples for decision in decisions} == {9_900}
        assert decisions[-1].phase == "done"
        assert 9_900 <= decisions[-1].samples_done <= 10_000
        assert decisions[-1].bill.usd == pytest.approx(runs["doll"][-1].bill.usd)
        assert decisions[-1].expected_finish_s == runs["doll"][-1].expected_finish_s
    last = {name: decisions[-1] for name, decisions in runs.items()}
    assert (last["doll"].updates_done, last["doll"].target_updates) == (100, 99)
    assert (last["asp"].updates_done, last["asp"].target_updates) == (400, 396)
    assert (last["other"].updates_done, last["other"].target_updates) == (200, None), "in updates there is no target"
    record = last["asp"].record()
    assert (record.samples_done, record.target_samples, record.updates_done) == (10_000, 9_900, 400)


def test_a_deadline_that_cannot_be_met_is_told_and_all_is_on_demand() -> None:
    scene = Scene(settings(deadline_s=100.0))
    decision = scene.turn()
    assert (decision.binding, decision.feasible) == ("late", False)
    assert set(decision.markets) == {"on_demand"}
    assert any("deadline cannot be met" in alarm for alarm in decision.alarms)


def test_when_spot_is_dry_the_plan_waits_and_then_covers() -> None:
    scene = Scene(settings(deadline_s=500.0))
    for pool in scene.fleet.pools:
        scene.fleet.set_capacity(pool, "spot", 0)
    first = scene.turn()
    assert set(first.markets) == {"spot"}, "the slack allows to wait"
    assert all("capacity" in action.failure for action in first.actions)
    assert first.alive == ()
    decisions = scene.to_the_end()
    assert scene.world.finished_s is not None
    assert scene.world.finished_s - first.started_s <= 500
    assert {instance.market for instance in scene.fleet.all_instances()} == {"on_demand"}
    assert decisions[-1].bill.usd_by_market["spot"] == 0


def test_a_dry_market_is_planned_around_in_the_same_turn() -> None:
    """Behind an even pace, a launch that found nothing on spot is followed by one on-demand at once."""
    job = settings(deadline_s=600.0)
    scene = Scene(replace(job, planner=replace(job.planner, slack_reserve=1.0)))
    scene.steps(3)  # they have booted, which an even pace does not do
    for instance in scene.fleet.alive():
        scene.fleet.interrupt(instance.id, 0.0)
    for pool in scene.fleet.pools:
        scene.fleet.set_capacity(pool, "spot", 0)
    decision = scene.steps(1)
    assert {"spot", "on_demand"} <= {market for _, _, market in launches(decision)}
    assert {instance.market for instance in scene.fleet.alive()} == {"on_demand"}


def test_a_slot_goes_back_to_spot_when_that_is_back() -> None:
    job = settings(deadline_s=600.0, updates=160.0)  # 400 s of work
    scene = Scene(
        replace(job, planner=replace(job.planner, spot_stable_s=30.0), limits=LaunchLimits(pool_backoff_s=20.0))
    )
    for pool in scene.fleet.pools:
        scene.fleet.set_capacity(pool, "spot", 0)
    scene.steps(15)
    assert "on_demand" in {instance.market for instance in scene.fleet.alive()}
    for pool in scene.fleet.pools:
        scene.fleet.set_capacity(pool, "spot", None)
    decisions = scene.to_the_end()
    assert any(
        "RETURN" in reason or "spot has been available" in reason
        for decision in decisions
        for reason in decision.reasons
    )
    assert decisions[-1].bill.usd_by_market["spot"] > 0
    assert scene.world.finished_s is not None
    assert scene.world.finished_s - decisions[0].started_s <= 600


def test_a_notice_is_answered_at_once() -> None:
    scene = Scene()
    scene.steps(4)
    scene.fleet.interrupt("i-00000000000000000", 120.0)
    decision = scene.steps(1)
    assert launches(decision) == [(0, 2, "spot")]
    assert decision.interruptions == 1
    assert scene.steps(2).interruptions == 1, "told once"
    assert all("i-00000000000000000" not in call.ids for call in scene.fleet.calls)


def test_a_probe_is_asked_before_what_can_only_be_guessed() -> None:
    """It says that spot is gone, so that the machines that are taken are covered without a try."""

    class Market:
        there = True

        def spot_available(self, slot: int) -> bool | None:
            return self.there

    market = Market()
    job = settings(deadline_s=600.0)
    scene = Scene(replace(job, planner=replace(job.planner, slack_reserve=1.0)), probe=market)
    scene.steps(3)
    for instance in scene.fleet.alive():
        scene.fleet.interrupt(instance.id, 0.0)
    market.there = False
    decision = scene.steps(1)
    covered = [slot for slot, _, where in launches(decision) if where == "on_demand"]
    assert covered, "not a try on spot for these"
    assert all(reason.startswith("to on-demand") for slot, reason in enumerate(decision.reasons) if slot in covered)


def test_a_try_that_was_known_to_be_in_vain_is_no_reason_to_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan of a turn may cover some workers: who waits for spot, and is refused as was known, changes nothing."""

    class Market:
        def spot_available(self, slot: int) -> bool | None:
            return False

    plans: list[float] = []
    scene = Scene(settings(deadline_s=1000.0), probe=Market())
    scene.steps(3)
    for instance in scene.fleet.alive():
        scene.fleet.interrupt(instance.id, 0.0)
    for pool in scene.fleet.pools:
        scene.fleet.set_capacity(pool, "spot", 0)
    plan = planner.plan
    monkeypatch.setattr(planner, "plan", lambda state, how: plans.append(state.elapsed_s) or plan(state, how))
    decision = scene.steps(1)
    assert [slot for slot, _, where in launches(decision) if where == "spot"], "still tried"
    assert len(plans) == 1


# --- failure --------------------------------------------------------------------------------------------------------


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


# --- the budget -----------------------------------------------------------------------------------------------------


def test_the_budget_is_never_passed_and_its_end_is_told() -> None:
    """Half of what the job costs: half of the work is done, and not a cent more is spent."""
    whole = Scene().to_the_end()[-1].bill.usd
    scene = Scene(settings(budget_usd=whole / 2))
    decisions = scene.to_the_end(until_s=1500.0)
    last = decisions[-1]
    assert last.phase == "budget"
    assert whole / 4 < last.bill.usd <= whole / 2
    assert 20 < last.updates_done < 60
    assert not decisions[0].feasible
    assert any("raise" in alarm for alarm in decisions[0].alarms), "it is told at the start"
    (said,) = [alarm for alarm in last.alarms if "is spent" in alarm]
    assert last.finished, "its process ends, so the advice must be of use without it"
    assert "raise plan.budget_usd in the job file, then start the provisioner again: doll provision run" in said
    assert scene.fleet.alive() == []


@pytest.mark.parametrize("started_again", [False, True])
def test_a_higher_budget_lets_the_job_go_on(started_again: bool) -> None:
    scene = Scene(settings(budget_usd=0.02, deadline_s=3000.0))
    scene.to_the_end(until_s=1500.0)
    assert scene.decisions[-1].phase == "budget"
    scene.job = settings(budget_usd=0.2, deadline_s=3000.0)
    if started_again:
        scene.controller = scene.successor()
    else:
        scene.controller.retarget(scene.job)
    scene.clock.advance(10.0)
    scene.to_the_end()
    assert scene.decisions[-1].phase == "done"
    assert scene.decisions[-1].bill.usd <= 0.2


def test_a_budget_that_suffices_for_spot_only_keeps_the_job_on_spot() -> None:
    """Deadline and budget cannot both be met: the budget is kept, and it is said."""
    job = settings(deadline_s=252.0, budget_usd=0.06)
    scene = Scene(job)
    first = scene.turn()
    assert (first.binding, first.feasible) == ("budget", False)
    assert first.markets.count("spot") >= 3
    last = scene.to_the_end()[-1]
    assert last.phase == "done"
    assert last.bill.usd <= 0.06


# --- other questions ------------------------------------------------------------------------------------------------


def test_a_dry_run_says_and_does_nothing() -> None:
    scene = Scene(dry_run=True)
    first = scene.turn()
    assert first.dry_run
    assert launches(first) == [(slot, 1, "spot") for slot in range(4)]
    assert launches(scene.turn()) == launches(first)
    assert [call for call in scene.fleet.calls if call.name != "instances"] == []
    assert (scene.state_store.load(), scene.state_store.journal) == (None, [])


def test_a_drain_ends_everything_and_starts_nothing() -> None:
    scene = Scene()
    scene.steps(4)
    first = scene.turn(draining=True)
    assert not first.finished
    assert len(first.actions) == 4
    scene.clock.advance(10.0)
    assert scene.turn(draining=True).finished
    scene.clock.advance(10.0)
    again = scene.successor()
    scene.controller = again
    assert scene.steps(1).phase == "run", "and the job may go on later"
    assert launches(scene.decisions[-1]) == [(slot, 2, "spot") for slot in range(4)]


def test_a_fenced_controller_does_nothing(tmp_path: Path) -> None:
    claims = FileCheckpointStore(tmp_path, "job")
    first = Lease(claims)
    scene = Scene(check_lease=first.check)
    scene.turn()
    second = Lease(claims)
    with pytest.raises(FencedError, match="provisioner 1 of this job is over: provisioner 2"):
        scene.turn()
    assert len([call for call in scene.fleet.calls if call.name == "launch"]) == 4
    second.check()


def test_the_deadline_may_be_changed_in_mid_run() -> None:
    scene = Scene(settings(deadline_s=1000.0))
    assert set(scene.steps(4).markets) == {"spot"}
    scene.controller.retarget(settings(deadline_s=260.0))
    assert set(scene.steps(1).markets) == {"on_demand"}
    with pytest.raises(ValueError, match="expected 4 slots as before, got 5"):
        scene.controller.retarget(settings(5))
    with pytest.raises(ValueError, match="expected batches of 25 samples as before, got 26"):
        scene.controller.retarget(settings(batch_size=26))


def test_the_behaviour_may_be_changed_in_mid_run() -> None:
    """How often a dry market is asked, how soon a silent worker counts as down."""
    scene = Scene(settings(deadline_s=5000.0, limits=LaunchLimits(retry_s=1000.0, pool_backoff_s=0.0)))
    for pool in scene.fleet.pools:
        scene.fleet.set_capacity(pool, "spot", 0)
    scene.steps(6)
    asked = len([call for call in scene.fleet.calls if call.name == "launch"])
    assert asked == 4, "each slot once"
    scene.controller.retarget(
        settings(deadline_s=5000.0, heartbeat_timeout_s=7.0, limits=LaunchLimits(retry_s=10.0, pool_backoff_s=0.0))
    )
    scene.clock.advance(1000.0)
    scene.world.pass_time(0.0)
    scene.steps(4)
    assert len([call for call in scene.fleet.calls if call.name == "launch"]) == asked + 4 * 4
    assert scene.controller.observed.heartbeat_timeout_s == 7.0


def test_the_work_is_estimated_anew_from_the_jobs_own_errors() -> None:
    scene = Scene(settings(updates=100.0, target_error=0.05))
    scene.turn()
    for version in range(1, 25):
        error = 0.9 * 0.95**version + 0.01
        record = Evaluated(term=1, version=version, loss=1.0, accuracy=1 - error)
        scene.controller.feed(record, scene.clock())
    decision = scene.steps(1)
    assert decision.target_updates is not None
    assert 58 <= decision.target_updates <= 65, "0.9 * 0.95^J + 0.01 = 0.05 at J = 60.7"
    scene.controller = scene.successor()
    assert scene.steps(1).target_updates == decision.target_updates, "a successor knows it too"


def test_the_work_is_estimated_anew_also_where_updates_differ() -> None:
    """The samples of an evaluation follow from the mean batches per update."""
    scene = Scene(settings(updates=100.0, group_size=None, target_error=0.05))
    scene.steps(20)
    assert scene.controller.observed.batches_per_update == pytest.approx(2.0, rel=0.1)
    for version in range(1, 49):
        record = Evaluated(term=1, version=version, loss=1.0, accuracy=0.99 - 0.9 * 0.95 ** (version / 2))
        scene.controller.feed(record, scene.clock())
    decision = scene.turn()
    assert 58 * 4 * 25 <= decision.target_samples <= 65 * 4 * 25
    assert decision.target_updates is None


# --- restarts -------------------------------------------------------------------------------------------------------


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
    assert scene.controller._launch_state.incarnation(0) == 2


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
@hypothesis_settings(max_examples=25)
def test_no_record_stops_it(strange: list[tuple[Any, float]]) -> None:
    """Whatever stands on the topics: it goes on, nothing is doubled, and its state can be kept and read again."""
    scene = Scene()
    scene.steps(3)
    for record, at_s in strange:
        scene.controller.feed(record, at_s)
    scene.steps(2)
    scene.state_store = MemoryStateStore()
    scene.controller = scene.successor()
    for record, at_s in strange:
        scene.controller.feed(record, at_s)
    scene.steps(2)
    scene.controller = scene.successor()
    scene.steps(2)
    assert scene.world.most_per_slot <= 2


# --- what it says ---------------------------------------------------------------------------------------------------


def test_a_decision_says_why_for_every_slot_and_crosses_the_wire() -> None:
    scene = Scene(settings(deadline_s=300.0))
    for decision in (scene.turn(), scene.steps(5)):
        assert len(decision.reasons) == len(decision.markets) == 4
        assert all(decision.reasons)
        record = decision.record()
        assert decode(encode(record)) == record
        assert [record.reasons[index] for index in record.reason_of] == list(decision.reasons)
        assert json.loads(json.dumps(decision.to_dict()))["markets"] == list(decision.markets)
        assert all(np.isfinite(value) for value in decision.measurements().values())


def test_slot_ranges() -> None:
    assert slot_ranges([]) == ""
    assert slot_ranges([3]) == "3"
    assert slot_ranges([0, 1, 2, 7, 9, 10]) == "0-2, 7, 9-10"
    assert slot_ranges(list(range(0, 40, 2)), most=2) == "0, 2, ... (20 in all; --json lists them)"
