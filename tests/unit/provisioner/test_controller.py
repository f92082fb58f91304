"""The controller on a fake fleet in virtual time: a job, the budget, changes in mid-run, what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from controller_scene import Scene, launches
from doll.errors import FencedError
from doll.provisioner.fleets.port import InstanceState
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.lease import Lease
from doll.provisioner.planning import planner
from doll.provisioner.planning.planner import slot_ranges
from doll.records.control import Drifted, Evaluated, decode, encode
from doll.storage.file_checkpoints import FileCheckpointStore
from job_world import ON_DEMAND, SPOT, settings

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
    """The probe says that spot is gone, so the machines that are taken are covered without a try."""
    there = True
    job = settings(deadline_s=600.0)
    scene = Scene(replace(job, planner=replace(job.planner, slack_reserve=1.0)), probe=lambda slot: there)
    scene.steps(3)
    for instance in scene.fleet.alive():
        scene.fleet.interrupt(instance.id, 0.0)
    there = False
    decision = scene.steps(1)
    covered = [slot for slot, _, where in launches(decision) if where == "on_demand"]
    assert covered, "not a try on spot for these"
    assert all(reason.startswith("to on-demand") for slot, reason in enumerate(decision.reasons) if slot in covered)


def test_a_try_that_was_known_to_be_in_vain_is_no_reason_to_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan of a turn may cover some workers. A launch on spot that is refused as expected changes no plan."""
    plans: list[float] = []
    scene = Scene(settings(deadline_s=1000.0), probe=lambda slot: False)
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


def test_the_work_is_estimated_again_from_the_jobs_own_errors() -> None:
    scene = Scene(settings(updates=100.0, target_error=0.05))
    scene.turn()
    for version in range(1, 25):
        error = 0.9 * 0.95**version + 0.01
        record = Evaluated(term=1, version=version, loss=1.0, accuracy=1 - error)
        scene.controller.observed.feed(record, scene.clock())
    decision = scene.steps(1)
    assert decision.target_updates is not None
    assert 58 <= decision.target_updates <= 65, "0.9 * 0.95^J + 0.01 = 0.05 at J = 60.7"
    scene.controller = scene.successor()
    assert scene.steps(1).target_updates == decision.target_updates, "a successor knows it too"


@pytest.mark.parametrize(("told", "updates", "markets"), [(False, 50, {"spot"}), (True, 76, {"on_demand"})])
def test_after_a_drift_there_is_more_work_and_the_deadline_is_kept(
    told: bool, updates: float, markets: set[str]
) -> None:
    """The model is nearly at its target when the stream changes; without the evaluator's word the old curve counts."""
    scene = Scene(settings(updates=100.0, target_error=0.05, deadline_s=225.0))
    scene.steps(12)
    observed = scene.controller.observed
    reached = observed.version

    def measure(version: int, error: float) -> None:
        observed.feed(Evaluated(term=1, version=version, loss=1.0, accuracy=1 - error), scene.clock())

    for version in range(1, reached + 1):
        measure(version, 0.9 * 0.92**version + 0.01)
    before = scene.steps(2)
    assert (before.target_updates, set(before.markets)) == (50, {"spot"})
    if told:
        observed.feed(Drifted(term=1, version=observed.version, metric="loss", since=reached + 1), scene.clock())
    for version in range(reached + 1, reached + 5):
        measure(version, 0.8)
    after = scene.steps(2)
    assert (after.target_updates, set(after.markets)) == (updates, markets)


def test_the_work_is_estimated_again_also_if_updates_differ() -> None:
    """The samples of an evaluation follow from the mean batches per update."""
    scene = Scene(settings(updates=100.0, group_size=None, target_error=0.05))
    scene.steps(20)
    assert scene.controller.observed.batches_per_update == pytest.approx(2.0, rel=0.1)
    for version in range(1, 49):
        record = Evaluated(term=1, version=version, loss=1.0, accuracy=0.99 - 0.9 * 0.95 ** (version / 2))
        scene.controller.observed.feed(record, scene.clock())
    decision = scene.turn()
    assert 58 * 4 * 25 <= decision.target_samples <= 65 * 4 * 25
    assert decision.target_updates is None


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
