"""Scale-in by the controller: which slot goes, what is refused, what comes back, restarts, and EC2 on moto."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doll.config import JobConfig, load
from doll.errors import ConfigError
from doll.provisioner.billing import AWS_LAMBDA, EC2_LINUX, LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import EndReason, Instance
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.observation import Observed
from doll.provisioner.planning.state import Alpha, PlannerState
from doll.provisioner.planning.tuner import TunerSettings
from doll.provisioner.prices.port import StatedPrices
from doll.provisioner.reconcile import Launch, Terminate
from doll.provisioner.scale_in import ErrorTarget, ScaleIn, ScaleInSettings, choose_slot, release_request, sharing
from doll.provisioner.settings import ControllerSettings, controller_settings
from doll.records.control import Evaluated, Member, ProvisionDecision, Scale, Served, TermStarted, Update
from doll.theory.cost import Prices
from doll.theory.scale_in import ReferenceCurve
from fake_fleet import FakeFleet, VirtualClock
from fleet_rigs import Ec2Rig
from fuzzing import examples
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from job_world import ON_DEMAND, SPOT, JobWorld, settings
from machine_owners import LambdaOwner
from memory_state_store import MemoryStateStore
from msgspec.structs import replace as replace_fields
from record_builders import welcome
from statuses import server_status

CURVE = ReferenceCurve((0.05, 1.2, 0.5, 0.4))
TUNER = TunerSettings(every_s=60.0, horizon_s=30.0, threshold=0.05, knee_slope=-2e-3, min_workers=2)
RULE = ScaleInSettings(TUNER, require_gain=False)


def job(deadline_s: float = 10_000.0, rule: ScaleInSettings | None = RULE, **more: Any) -> ControllerSettings:
    """1000 updates of 4 batches, 2500 s of four workers; the knee is at about update 150."""
    return settings(updates=1000.0, deadline_s=deadline_s, limits=LaunchLimits(), scale_in=rule, **more)


class Scene:
    """A controller, its fleet and a job whose loss has a knee."""

    def __init__(self, asked: ControllerSettings | None = None, **more: Any) -> None:
        self.job = asked or job()
        self.clock = VirtualClock()
        self.fleet: Any = FakeFleet(self.clock, boot_s=20.0, ending_s=5.0)
        self.state_store, self.more = MemoryStateStore(), more
        self.decisions: list[Decision] = []
        self.requests: list[Scale | None] = []
        self.begin()

    def begin(self) -> None:
        self.world = JobWorld(self.clock, self.fleet, self.job)
        self.world.loss_of = CURVE.loss
        self.restart()

    def restart(self) -> None:
        self.controller = Controller(
            self.job, self.fleet, StatedPrices(SPOT, ON_DEMAND), LOCAL, self.state_store, **self.more
        )

    def step(self, seconds: float = 10.0) -> Decision:
        self.world.tell(self.controller)
        self.decisions.append(self.controller.turn(self.clock()))
        self.requests.append(self.controller.release_request(self.decisions[-1]))
        if (request := self.requests[-1]) is not None:
            self.world.released = request.released or ()
        self.clock.advance(seconds)
        self.world.pass_time(seconds)
        return self.decisions[-1]

    def until(self, condition: Callable[[], bool], turns: int = 600) -> None:
        for _ in range(turns):
            if condition():
                return
            self.step()
        raise AssertionError(f"not within {turns} turns; {self.decisions[-1].to_dict()}")

    def until_released(self, count: int = 1) -> Decision:
        self.until(lambda: bool(self.decisions) and len(self.decisions[-1].released) >= count)
        return self.decisions[-1]

    def journal(self, *kinds: str) -> list[dict[str, Any]]:
        return [entry for entry in self.state_store.journal if entry["kind"] in kinds]

    def alive_slots(self) -> set[int]:
        return {instance.slot for instance in self.fleet.alive()}


# --- what it does


def test_without_the_section_nothing_changes() -> None:
    scene = Scene(job(rule=None))
    scene.until(lambda: scene.world.finished_s is not None)
    assert all(decision.released == () for decision in scene.decisions)
    assert scene.journal("release", "recall", "release_refused") == []
    assert len(scene.controller.observed.losses) == 0, "and no loss is kept"


def test_a_slot_is_released_at_the_knee_and_its_machine_is_ended_in_order() -> None:
    scene = Scene()
    decision = scene.until_released()
    (slot,) = decision.released
    version = decision.updates_done
    assert 60 < version < 400
    (entry,) = scene.journal("release")
    assert entry["slot"] == slot
    assert "knee" in entry["why"]
    (end,) = [result.action for result in decision.actions if isinstance(result.action, Terminate)]
    assert end.slot == slot
    assert "the others have its partitions" in end.why
    assert decision.markets[slot] is None
    assert decision.to_dict()["released_slots"] == 1
    assert "the others have its partitions" in decision.reasons[slot]
    assert decision.record().markets[slot] == ""
    kinds = [entry["kind"] for entry in scene.state_store.journal]
    assert kinds.index("release") < kinds.index("end"), "noted before it is done"
    scene.step()
    scene.step()
    assert scene.alive_slots() == set(range(4)) - {slot}
    ended = [instance for instance in scene.fleet.all_instances() if instance.slot == slot]
    assert [instance.end_reason for instance in ended] == [EndReason.TERMINATED]


@pytest.mark.slow
def test_more_slots_follow_down_to_the_least_number_and_the_job_ends_in_time() -> None:
    scene = Scene()
    scene.until(lambda: scene.world.finished_s is not None)
    assert scene.world.finished_s is not None
    begun_s = scene.decisions[0].started_s
    assert scene.world.finished_s - begun_s <= 10_000
    assert max(len(decision.released) for decision in scene.decisions) == 2
    released = scene.journal("release")
    assert released[1]["time_s"] - released[0]["time_s"] >= 60
    launches = [
        result.action.order.slot
        for decision in scene.decisions
        for result in decision.actions
        if isinstance(result.action, Launch)
    ]
    assert sorted(launches) == [0, 1, 2, 3], "a released slot is not launched again"


class FunctionScene(Scene):
    """The same job on invocations of 15 minutes."""

    def begin(self) -> None:
        self.fleet = LambdaOwner(self.clock, Path(), 20.0)
        super().begin()

    def restart(self) -> None:
        prices = StatedPrices(*self.fleet.usd_per_h)
        self.controller = Controller(self.job, self.fleet.fleet(), prices, AWS_LAMBDA, self.state_store, **self.more)


@pytest.mark.slow
def test_functions_are_released_at_each_decision_and_get_no_successor() -> None:
    """The others hand their places on before their limit, as without scale-in."""
    scene = FunctionScene()
    scene.until(lambda: scene.world.finished_s is not None)
    scene.until(lambda: not scene.fleet.alive())
    first, second = scene.journal("release")
    assert 60 <= second["time_s"] - first["time_s"] <= 130, "the second decision has enough losses for its curve"
    for release in (first, second):
        mine = [each for each in scene.fleet.all_instances() if each.slot == release["slot"]]
        assert [each for each in mine if each.launched_s > release["time_s"]] == []
        assert max(each.ended_s for each in mine) <= release["time_s"] + 20
    assert scene.fleet.handed_on >= 4, "each of the two that stay, twice"
    assert scene.decisions[-1].phase == "done"


def test_the_slowest_stream_goes_first_and_then_the_slowest_worker() -> None:
    rule = ScaleIn(RULE, 4)
    scene = Scene(replace(job(), rates_per_s=np.array([10.0, 10.0, 4.0, 10.0])))
    assert scene.until_released().released == (2,)
    assert scene.journal("release")[0]["by"] == "slowest_stream"
    assert rule.active.tolist() == [True] * 4
    even = all_work()
    feed_updates(even, [updated(version, services_s=(0.1, 0.5, 0.2, 0.2)) for version in range(1, 41)])
    assert even.until_released().released == (1,)
    (entry,) = even.journal("release")
    assert entry["by"] == "slowest_worker"
    assert "a batch takes 0.5 s, 0.3 s more than" in entry["why"]
    assert entry["why"] in even.decisions[-1].reasons[1], "so `doll provision status` says it, too"


def test_without_any_difference_the_newest_machine_goes() -> None:
    scene = all_work()
    process, incarnation, session = scene.world._holders[2]
    later = welcome(2, process=f"{process}-2", incarnation=incarnation, session=session)
    scene.controller.observed.feed(later, scene.clock() + 5)
    slots, rates = range(4), np.full(4, 10.0)
    chosen = choose_slot(slots, rates, scene.controller.observed, "worst_replica")
    assert (chosen.slot, chosen.by) == (2, "newest_machine")
    assert chosen.why.startswith("no replica is certainly the worst in 0 evaluations; ")
    assert choose_slot(slots, np.array([10.0, 10.5, 11.1, 9.8]), scene.controller.observed, "slowest").slot == 3


def test_a_new_process_and_a_roll_back_forget_what_was_measured() -> None:
    scene = all_work()
    observed = scene.controller.observed
    feed_updates(scene, [updated(version, losses=(2.0, 2.0, 2.0, 2.5)) for version in range(1, 41)])
    assert observed.shared_losses(range(4)).shape == (40, 4)
    assert observed.services_s(range(4)).shape == (39, 4), "the first batch of a process says nothing"
    again = TermStarted(term=2, resumed_version=29, origins=(0,) * 4, records_per_batch=25, time_s=scene.clock())
    observed.feed(again, scene.clock())
    assert observed.shared_losses(range(4)).shape == (30, 4), "of versions 0 to 29"
    observed.feed(welcome(0, process="new", session=10**15), scene.clock())
    assert observed.shared_losses(range(4)).shape == (0, 4)
    assert observed.services_s(range(4)).shape == (0, 4)
    assert observed.services_s([1, 2, 3]).shape == (39, 3)


def test_partitions_that_have_moved_decide_which_stream_is_the_slowest() -> None:
    """Eight partitions of 5 samples/s; by load, the second of slot 1 has gone to slot 0."""
    scene = Scene()
    scene.step()
    scene.until(lambda: len(scene.world.working()) == 4)
    scene.step()
    for second in range(0, 601, 60):
        scene.controller.observed.observe_ends(scene.clock() + second, [5 * second] * 8)
    for slot, partitions in enumerate(((0, 4, 5), (1,), (2, 6), (3, 7))):
        process, incarnation, session = scene.world._holders[slot]
        served = tuple(Served(partition=number, origin=0, next_batch=0) for number in partitions)
        message = welcome(slot, process=process, incarnation=incarnation, session=session)
        scene.controller.observed.feed(replace_fields(message, served=served), scene.clock())
    decision = scene.step()
    assert decision.rates_per_s == pytest.approx([15, 5, 10, 10], rel=0.1), "what an interruption of each slot costs"
    assert scene.until_released().released == (1,)


def updated(
    version: int, services_s: Sequence[float] = (0.1, 0.5, 0.1, 0.1), losses: Sequence[float] | None = None
) -> Update:
    """A round: a batch of each slot, with its service time, and the losses of the replicas on shared samples."""
    members = tuple(
        Member(
            worker=slot, partition=slot, batch=version, lo=0, hi=2, n_samples=2, base_version=version - 1,
            compute_s=took_s, shared_loss=None if losses is None else losses[slot],
        )
        for slot, took_s in enumerate(services_s)
    )  # fmt: skip
    return Update(term=1, version=0, members=members, n_samples=8, loss=2.4)  # `JobWorld` counts the versions


def all_work(asked: ControllerSettings | None = None) -> Scene:
    scene = Scene(asked)
    scene.until(lambda: len(scene.world.working()) == 4)
    scene.step()
    return scene


def feed_updates(scene: Scene, updates: Sequence[Update]) -> None:
    for update in updates:
        scene.controller.observed.feed(update, scene.clock())


@pytest.mark.parametrize(
    ("worse", "rule", "goes", "by"),
    [
        (0.1, RULE, 3, "worst_replica"),
        (0.0, RULE, 1, "slowest_worker"),  # equal, except for noise
        (None, RULE, 1, "slowest_worker"),  # no replica was evaluated: all workers have the same weights
        (0.1, replace(RULE, evict="slowest"), 1, "slowest_worker"),
    ],
)
def test_the_worst_replica_goes_first_where_it_is_certain(
    worse: float | None, rule: ScaleInSettings, goes: int, by: str
) -> None:
    scene, rng = all_work(job(rule=rule)), np.random.default_rng(0)
    rounds = []
    for version in range(1, 41):
        losses = None if worse is None else (2.4 + 0.2 * rng.normal() + 0.01 * rng.normal(size=4)).tolist()
        if losses is not None:
            losses[3] += worse
        rounds.append(updated(version, losses=losses))
    feed_updates(scene, rounds[:20])
    scene.state_store.save(scene.controller.state.to_dict())
    scene.restart()  # a successor goes on with what was measured
    scene.step()
    feed_updates(scene, rounds[20:])
    assert scene.until_released().released == (goes,)
    (entry,) = scene.journal("release")
    assert entry["by"] == by
    expected = "on the same samples its loss is" if by == "worst_replica" else "its worker is the slowest"
    assert expected in entry["why"]
    assert ("no replica is certainly the worst in 40 evaluations" in entry["why"]) == (worse == 0.0)


@pytest.mark.parametrize(("worse", "least", "most"), [(0.0, 0.0, 0.05), (3e-4, 0.95, 1.0)])
def test_who_is_the_worst_replica_is_no_matter_of_chance(worse: float, least: float, most: float) -> None:
    """Losses of replicas that differ by 0.014 % by chance, on samples whose loss varies by 10 %."""
    rng, looks = np.random.default_rng(3), 200
    chosen = []
    for _ in range(looks):
        observed = Observed(np.full(4, 10.0), keeps_losses=True)
        worst = int(rng.integers(4))
        for version in range(1, 49):
            losses = 1 + 0.1 * rng.normal() + 1.4e-4 * rng.normal(size=4)
            losses[worst] += worse
            observed.feed(updated(version, rng.uniform(0.1, 0.2, 4).tolist(), losses.tolist()), float(version))
        candidate = choose_slot(range(4), np.full(4, 10.0), observed, "worst_replica")
        chosen.append((candidate.by, candidate.slot == worst))
    by_replica = [right for by, right in chosen if by == "worst_replica"]
    assert least <= len(by_replica) / looks <= most
    assert sum(by_replica) >= least * looks


def test_a_slot_with_an_interruption_notice_goes_first() -> None:
    """The slot loses its machine anyway: the machine is not replaced, and no other machine is ended."""
    scene = Scene()
    scene.until(lambda: scene.controller.state.plan.scale_in._tuner.knee_step is not None)  # type: ignore[union-attr]
    first = scene.decisions[-1].released or scene.until_released().released
    noticed = next(i for i in scene.fleet.alive() if i.slot not in first and i.market == "spot")
    scene.until(
        lambda: scene.clock() - scene.journal("release")[0]["time_s"] >= 120
    )  # the second decision has 8 losses
    scene.fleet.interrupt(noticed.id, 120.0)
    decision = scene.step()
    assert set(decision.released) == {*first, noticed.slot}
    assert decision.actions == ()


def test_nothing_is_counted_on_of_released_slots_where_nobody_knows_how_fast_the_others_compute() -> None:
    """Neither for the availability of spot, nor for the time that the work takes; their rates stay as they were."""
    scene = Scene()
    scene.until_released()
    before = scene.decisions[-2]
    (slot,) = scene.decisions[-1].released
    left = (scene.job.planner.samples - scene.decisions[-1].samples_done) / 30.0
    assert scene.decisions[-1].slack_s == pytest.approx(
        scene.job.planner.deadline_s * 0.995 - scene.decisions[-1].elapsed_s - left, rel=0.03
    )
    assert before.slack_s > scene.decisions[-1].slack_s
    rate = scene.controller.observed.rates_per_s()[slot]
    alpha = scene.controller.observed.spot.alpha().point
    ends = np.zeros(4)
    for _ in range(200):
        ends += 100.0 * (np.arange(4) != slot)  # a producer that pauses with the worker
        scene.controller.observed.observe_ends(scene.clock(), ends.astype(int).tolist())
        scene.controller.turn(scene.clock())
        scene.clock.advance(10.0)
    assert scene.controller.observed.rates_per_s()[slot] == pytest.approx(rate)
    assert scene.controller.observed.spot.alpha().point >= alpha - 0.02


def with_service(scene: Scene, seconds: float) -> None:
    """Each worker has computed a batch of 25 samples in this time, and goes on so."""
    scene.world.capacity_per_s = 25 / seconds
    members = tuple(
        Member(worker=slot, partition=slot, batch=0, lo=0, hi=1, n_samples=1, base_version=0, compute_s=seconds)
        for slot in range(4)
    )
    scene.controller.observed.feed(Update(term=1, version=0, members=members, n_samples=1, loss=2.4), scene.clock())


def test_the_others_take_over_as_much_of_the_stream_as_they_can_compute() -> None:
    rates, works = np.array([10.0, 10.0, 4.0, 10.0]), np.ones(4, dtype=np.bool_)
    state = PlannerState(
        elapsed_s=0.0, samples_done=0.0, rates_per_s=rates, on_spot=works, up=works, alpha=Alpha(0.9),
        prices=Prices(SPOT, ON_DEMAND),
    )  # fmt: skip
    slots = np.array([True, True, False, True])
    for capacity, expected in ((0.0, 10.0), (100.0, 10.0 + 4 / 3), (10.5, 10.5), (3.0, 10.0)):
        assert sharing(state, slots, np.full(4, capacity)).rates_per_s == pytest.approx([expected] * 3)
    assert sharing(state, works, np.full(4, 100.0)).rates_per_s.tolist() == rates.tolist()
    back = np.array([False, True, False, False])  # the others have its partitions: it gets its part again
    given = replace(state, rates_per_s=np.array([13.0, 1e-5, 13.0, 13.0]))
    assert sharing(given, works, np.zeros(4), back).rates_per_s == pytest.approx([9.75] * 4)
    assert sharing(given, works, np.zeros(4)).rates_per_s == pytest.approx([13, 0, 13, 13], abs=1e-4)
    assert sharing(given, ~back, np.zeros(4), back).rates_per_s == pytest.approx([13] * 3)
    none = replace(state, rates_per_s=np.array([1e-5, 1e-5, 30.0, 1e-5]))
    alone = np.array([True, True, False, True])
    assert sharing(none, alone, np.full(4, 99.0), alone).rates_per_s == pytest.approx([10] * 3, rel=0.01)


def test_a_deadline_that_three_workers_meet_with_all_streams_lets_one_go() -> None:
    """Three streams of four take 3333 s, all of them 2500 s: with 2800 s one goes if the others can compute them."""
    for seconds, lets_go in ((0.0, False), (0.1, True)):
        scene = Scene(job(deadline_s=2800.0))
        scene.step()
        if seconds:
            with_service(scene, seconds)
        scene.until(lambda scene=scene: scene.world.progress()[0] >= 250)  # type: ignore[misc]
        assert bool(scene.decisions[-1].released) == lets_go
        scene.until(lambda scene=scene: scene.world.finished_s is not None)  # type: ignore[misc]
        assert scene.world.finished_s - scene.decisions[0].started_s <= 2800  # type: ignore[operator]


def test_the_parameter_server_is_asked_until_it_says_so() -> None:
    scene = Scene()
    decision = scene.until_released()
    expected = Scale(workers=4, run_id="run", released=decision.released)
    assert scene.requests[-1] == expected
    scene.world.released = ()  # the request was lost
    scene.world.pass_time(0.0)
    scene.restart()
    scene.step()
    assert scene.requests[-2:] == [expected, expected], "a successor goes on"
    scene.step()
    assert scene.requests[-1] is None
    scene.job = job(rule=None)
    scene.controller.retarget(scene.job)
    scene.step()
    assert scene.requests[-1] == Scale(workers=4, run_id="run", released=())


def test_a_job_that_ends_and_a_dry_run_and_a_server_that_is_not_there_are_asked_for_nothing() -> None:
    for draining, scene in ((True, Scene()), (False, Scene(dry_run=True))):
        scene.world.released = (1,)
        scene.world.pass_time(1.0)
        scene.world.tell(scene.controller)
        decision = scene.controller.turn(scene.clock(), draining=draining)
        assert scene.controller.release_request(decision) is None
    assert release_request((1,), None) is None
    assert release_request((1,), server_status()) is None, "of an earlier release"


# --- what it refuses


def refusals(scene: Scene) -> str:
    return "; ".join(entry["why"] for entry in scene.journal("release_refused"))


def test_a_deadline_that_needs_all_workers_keeps_them() -> None:
    """2500 s of four workers, 3333 s of three: with 2650 s none goes."""
    scene = Scene(job(deadline_s=2650.0))
    scene.until(lambda: scene.world.finished_s is not None)
    assert all(decision.released == () for decision in scene.decisions)
    assert "the deadline would be at risk: 3 workers would leave" in refusals(scene)
    assert scene.world.finished_s is not None
    assert scene.world.finished_s - scene.decisions[0].started_s <= 2650


@pytest.mark.slow
def test_without_the_guard_that_deadline_is_missed_or_slots_must_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(ScaleIn, "_refusal", lambda *args: "")
    monkeypatch.setattr(ScaleIn, "_recall_in_danger", lambda *args: [])
    scene = Scene(job(deadline_s=2650.0))
    scene.until(lambda: scene.world.finished_s is not None)
    assert scene.world.finished_s is not None
    assert scene.world.finished_s - scene.decisions[0].started_s > 2650


@pytest.mark.parametrize(("batches", "released"), [((), 1), ((0, 1, 2, 3, 4), 0)])
def test_an_error_target_that_fewer_batches_cannot_reach_keeps_them(batches: tuple[int, ...], released: int) -> None:
    """The floor is 0.08 and the target 0.1: with three batches of four it would be 0.107."""
    rule = replace(RULE, target=ErrorTarget(0.1, "error_rate"), batches_of_update=batches)
    scene = Scene(job(rule=rule))
    scene.until(lambda: scene.world.progress()[0] >= 41)
    errors = [0.5 * 0.9**version + 0.08 for version in range(1, 41)]
    for version, error in enumerate(errors, 1):
        scene.controller.observed.feed(
            Evaluated(term=1, version=version, loss=1.0, accuracy=1 - max(error, 0.1001)), scene.clock()
        )
    scene.until(lambda: scene.world.progress()[0] >= 350)
    assert min(1, len(scene.decisions[-1].released)) == released
    assert ("error target 0.1 would be at risk" in refusals(scene)) == (not released)


@pytest.mark.slow
def test_an_update_that_takes_longer_with_fewer_workers_is_no_gain() -> None:
    """Under policy doll an update needs K batches whoever computes them: the second removal would only cost time."""
    scene = Scene(job(rule=replace(RULE, require_gain=True)))
    scene.until(lambda: scene.world.finished_s is not None)
    assert max(len(decision.released) for decision in scene.decisions) == 1
    assert "by the measured step times Perf/$ would fall" in refusals(scene)


# --- what comes back


def test_a_released_slot_comes_back_where_the_deadline_gets_tight() -> None:
    scene = Scene()
    (slot,) = scene.until_released().released
    scene.step()
    scene.step()
    assert slot not in scene.alive_slots()
    tight_s = scene.decisions[-1].elapsed_s + (scene.job.planner.samples - scene.world.samples) / 30.0 + 10.0
    scene.job = job(deadline_s=tight_s)
    scene.controller.retarget(scene.job)
    decision = scene.step()
    assert decision.released == ()
    (entry,) = scene.journal("recall")
    assert entry["slot"] == slot
    assert "the deadline would be at risk" in entry["why"]
    launched = [result.action.order for result in decision.actions if isinstance(result.action, Launch)]
    assert (slot, 2) in [(order.slot, order.incarnation) for order in launched], "its next incarnation"
    scene.until(lambda: scene.world.finished_s is not None)
    assert scene.world.finished_s is not None
    assert scene.world.finished_s - scene.decisions[0].started_s <= tight_s
    assert len(scene.journal("release")) == 1, "after that no slot goes any more"


def test_switched_off_it_brings_every_worker_back() -> None:
    scene = Scene()
    scene.until_released(2)
    scene.job = job(rule=None)
    scene.controller.retarget(scene.job)
    assert scene.step().released == ()
    scene.until(lambda: scene.alive_slots() == {0, 1, 2, 3})
    assert {entry["why"] for entry in scene.journal("recall")} == {"scale-in is switched off"}


def test_a_new_generation_begins_with_all_workers() -> None:
    scene = Scene()
    scene.until_released()
    again = TermStarted(term=9, generation=9, resumed_version=0, origins=(), records_per_batch=1, time_s=scene.clock())
    scene.controller.observed.feed(again, scene.clock())
    assert scene.controller.turn(scene.clock()).released == ()
    assert len(scene.controller.observed.losses) == 0


# --- restarts


def test_a_successor_keeps_what_was_released_and_goes_on() -> None:
    scene = Scene()
    before = scene.until_released()
    scene.restart()
    after = scene.step()
    assert after.released == before.released
    assert after.reasons == before.reasons
    scene.until_released(2)


def test_a_release_is_saved_before_the_machine_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provisioner dies when it ends the machine: its successor does not buy another one for the slot."""
    scene = Scene()

    def dies(ids: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scene.fleet, "terminate", dies)
        with pytest.raises(KeyboardInterrupt):
            scene.until_released()
    (entry,) = scene.journal("release")
    scene.restart()
    decision = scene.step()
    assert decision.released == (entry["slot"],)
    assert [action.action.slot for action in decision.actions if isinstance(action.action, Terminate)] == [
        entry["slot"]
    ]
    assert len(scene.journal("release")) == 1


def test_losses_of_updates_that_are_rolled_back_are_forgotten() -> None:
    scene = Scene()
    scene.until(lambda: scene.world.progress()[0] >= 40)
    scene.world.tell(scene.controller)
    assert scene.controller.observed.losses.last_step >= 40
    scene.controller.observed.feed(
        TermStarted(term=2, resumed_version=20, origins=(), records_per_batch=1, time_s=scene.clock()), scene.clock()
    )
    assert 0 < scene.controller.observed.losses.last_step <= 20


@pytest.mark.slow
@hypothesis_settings(max_examples=examples(8), deadline=None)
@given(restarts=st.sets(st.integers(1, 89), max_size=5))
def test_restarts_at_any_turn_change_no_decision(restarts: set[int]) -> None:
    whole, resumed = Scene(), Scene()
    for turn in range(90):
        if turn in restarts:
            resumed.restart()
        assert whole.step().markets == resumed.step().markets
    assert [(entry["slot"], entry["time_s"]) for entry in whole.journal("release")] == [
        (entry["slot"], entry["time_s"]) for entry in resumed.journal("release")
    ]
    assert whole.decisions[-1].released


def test_without_its_state_a_successor_reads_the_released_slots_from_the_topic() -> None:
    scene = Scene()
    before = scene.until_released()
    scene.world.log.append((before.record(), scene.clock()))
    scene.state_store = MemoryStateStore()
    scene.restart()
    after = scene.step()
    assert after.released == before.released
    assert "the state of an earlier provisioner is lost" in after.reasons[after.released[0]]
    for _ in range(60):
        scene.step()
    assert len(scene.decisions[-1].released) == 1, "it releases no other: it cannot know what it would be compared with"


@pytest.mark.parametrize(
    ("phase", "markets", "released"),
    [
        ("run", ("spot", ""), [False, True]), ("done", ("", ""), [False, False]), ("run", ("", ""), [False, False]),
        ("run", ("spot",), [False, False]),
    ],
)  # fmt: skip
def test_only_a_decision_of_a_running_job_is_believed(
    phase: str, markets: tuple[str, ...], released: list[bool]
) -> None:
    rule = ScaleIn(RULE, 2)
    decision = ProvisionDecision(
        turn=1, time_s=0.0, started_s=0.0, phase=phase, binding="none", feasible=True, markets=markets
    )
    rule.adopt(decision)
    assert rule.released.tolist() == released


def test_a_state_of_other_slots_is_refused() -> None:
    kept = ScaleIn(RULE, 4).to_dict() | {"released": [7]}
    with pytest.raises(ValueError, match=r"expected released slots of 0 to 3, got \[7\]"):
        ScaleIn(RULE, 4).restore(kept)


def test_a_dry_run_releases_nothing() -> None:
    scene = Scene(dry_run=True)
    for _ in range(60):
        scene.step()
    assert all(decision.released == () for decision in scene.decisions)


# --- EC2


class Ec2World:
    """EC2 on moto, as the job's world wants to see it."""

    def __init__(self, rig: Ec2Rig) -> None:
        self._rig = rig

    def all_instances(self) -> list[Instance]:
        return list(self._rig.fleet.instances())

    def alive(self) -> list[Instance]:
        return [instance for instance in self.all_instances() if instance.is_alive]


@pytest.mark.slow
def test_on_ec2_the_machine_is_terminated_and_a_recall_launches_the_next_incarnation(rig: Ec2Rig) -> None:
    asked = job()
    world = JobWorld(rig.clock, Ec2World(rig), asked)
    world.loss_of = CURVE.loss
    store = MemoryStateStore()

    def start(how: ControllerSettings) -> Controller:
        return Controller(how, rig.fleet, StatedPrices(SPOT, ON_DEMAND), EC2_LINUX, store, job="digits")

    def turn() -> Decision:
        world.tell(controller)
        decision = controller.turn(rig.clock())
        rig.advance(20.0)
        world.pass_time(20.0)
        return decision

    controller = start(asked)
    for _ in range(200):
        if (decision := turn()).released:
            break
    (slot,) = decision.released
    turn()
    (gone,) = [result.action.id for result in decision.actions if isinstance(result.action, Terminate)]
    assert rig.market.terminated == [gone], "this one and no other"
    requests = len(rig.market.requests)
    rig.crash()
    controller = start(asked)
    for _ in range(2):
        assert slot in turn().released
    assert len(rig.market.requests) == requests, "nothing is bought for it, by a successor neither"
    controller.retarget(replace(asked, scale_in=None))
    launched = [result.action.order for result in turn().actions if isinstance(result.action, Launch)]
    assert [(order.slot, order.incarnation) for order in launched if order.slot == slot] == [(slot, 2)]


# --- the job file

JOB = """
job: digits
task: {class: "examples.synthetic.task:Gaussian"}
data: {workers: 4, batch_size: 8}
arrivals: {process: poisson, rate_per_s: 20}
stop: {updates: 100}
plan: {deadline_s: 600}
"""


def config(tmp_path: Path, *overrides: str) -> JobConfig:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return load(path, list(overrides))


def scale_in_of(tmp_path: Path, *overrides: str) -> ScaleInSettings:
    settings_of, _ = controller_settings(config(tmp_path, "provision.scale_in.enabled=true", *overrides))
    assert settings_of.scale_in is not None
    return settings_of.scale_in


def test_the_job_file_switches_it_on(tmp_path: Path) -> None:
    assert controller_settings(config(tmp_path))[0].scale_in is None
    rule = scale_in_of(
        tmp_path, "provision.scale_in.threshold=0.1", "provision.scale_in.min_workers=3",
        "provision.scale_in.elapsed_reference=true", "provision.scale_in.knee_slope=-0.001",
        "provision.scale_in.fit_span=0", "provision.scale_in.evict=slowest",
    )  # fmt: skip
    assert rule.tuner == TunerSettings(
        threshold=0.1, min_workers=3, elapsed_reference=True, knee_slope=-0.001, fit_span=0.0
    )
    assert (rule.evict, scale_in_of(tmp_path).evict) == ("slowest", "worst_replica")
    assert rule.target is None
    assert rule.floor_growth(4) == 1.0
    assert scale_in_of(tmp_path, "training.policy.name=bsp").floor_growth(4) == pytest.approx(4 / 3)


def test_the_workers_that_are_left_can_hold_an_update(tmp_path: Path) -> None:
    """K = 10, and a worker holds 4: with fewer than three no update could ever be made."""
    policy = ("training.policy.group_size=10", "worker.max_pending_batches=4")
    assert scale_in_of(tmp_path, *policy).tuner.min_workers == 3
    assert scale_in_of(tmp_path, *policy, "provision.scale_in.min_workers=4").tuner.min_workers == 4
    assert scale_in_of(tmp_path, "training.policy.name=bsp", "worker.max_pending_batches=4").tuner.min_workers == 1


def test_the_error_target_is_that_of_the_plan_or_of_the_stop_rule(tmp_path: Path) -> None:
    planned = ("plan.updates=null", "plan.target_error=0.05")
    with pytest.raises(ConfigError):  # J is then estimated from a pilot run, and this job has no pilot run
        scale_in_of(tmp_path, *planned)
    assert scale_in_of(tmp_path, "stop.loss=0.3").target == ErrorTarget(0.3, "loss")
    target = scale_in_of(tmp_path, "stop.accuracy=0.97").target
    assert target is not None
    assert (target.error, target.measure) == (pytest.approx(0.03), "error_rate")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("threshold", "1.5"), ("threshold", "-0.1"), ("knee_slope", "0"), ("knee_slope", "0.001"), ("every_s", "0"),
        ("horizon_s", "-1"), ("min_workers", "0"), ("min_workers", "5"), ("deadline_reserve", "1"), ("unknown", "1"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_its_name(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        config(tmp_path, f"provision.scale_in.{key}={value}")
