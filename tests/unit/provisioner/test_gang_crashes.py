"""Workers of several machines each, launched one by one: all or none, over any preemption and any crash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from crash_scenario import DEADLINE_S, STEP_S, CrashScenario, FusedFleet
from doll.provisioner.billing import LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.gangs import GangFleet, gang_of, gangs_of
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.launch_state import LaunchLimits, LaunchState
from doll.provisioner.reconcile import FleetAction, FleetStatus, Launch, Terminate, Wait, reconcile
from doll.theory.cost import SECONDS_PER_HOUR
from fake_fleet import FakeFleet, VirtualClock
from job_world import ON_DEMAND, SPOT, FlatPrices, JobWorld, settings

MACHINES = 3


class Gangs:
    """The workers that the machines of a fleet make: only whole gangs can work."""

    def __init__(self, fleet: FakeFleet) -> None:
        self._fleet = fleet

    def alive(self) -> list[Instance]:
        return [gang for gang in self.all_instances() if gang.is_alive]

    def all_instances(self) -> list[Instance]:
        return gangs_of(self._fleet.all_instances(), MACHINES)


class GangWorld(JobWorld):
    def works(self, instance: Instance) -> bool:
        """The worker that the machine belongs to works."""
        gangs = Gangs(self._fleet._fleet).alive()  # type: ignore[attr-defined]
        return any(super(GangWorld, self).works(gang) for gang in gangs if instance in gang.members)


class GangScenario(CrashScenario):
    """A `CrashScenario` whose workers have three machines each."""

    def __init__(self, seed: int, **more: Any) -> None:
        limits = LaunchLimits(pool_backoff_s=30.0, early_s=20.0)
        asked = settings(num_slots=3, updates=75.0, deadline_s=DEADLINE_S, limits=limits, machines_per_worker=MACHINES)
        self.incomplete_since_s: dict[str, float] = {}
        super().__init__(seed, job=asked, **more)
        self.world = GangWorld(self.clock, Gangs(self.fleet), asked)

    def _start(self) -> Controller:
        fleet = GangFleet(FusedFleet(self.fleet, self.fuse, self), MACHINES)
        return Controller(self.job, fleet, FlatPrices(), LOCAL, self.state_store)

    def turn(self, *, draining: bool = False) -> Decision:
        crashes = self.crashes
        decision = super().turn(draining=draining)
        if self.crashes > crashes and self._forget:
            self.incomplete_since_s = {}  # who has lost the state waits until all launches are listed
        self.look_for_halves()
        return decision

    def look_for_halves(self) -> None:
        """Half a gang that nobody has given notice for is completed or ended soon."""
        now_s = self.clock()
        halves = {
            gang.id
            for gang in Gangs(self.fleet).all_instances()
            if any(member.is_alive for member in gang.members)
            and not (gang.is_alive and len(gang.members) == MACHINES)
            and all(member.notice_s is None for member in gang.members if member.is_alive)
        }
        self.incomplete_since_s = {id_: self.incomplete_since_s.get(id_, now_s) for id_ in halves}
        limit_s = self.job.limits.listing_lag_s + 6 * STEP_S
        for id_, since_s in self.incomplete_since_s.items():
            assert now_s - since_s <= limit_s, f"half a gang is left: {id_}"

    def check(self) -> None:
        machines = self.fleet.all_instances()
        assert [machine for machine in machines if machine.state is not InstanceState.ENDED] == [], "no orphans"
        if self._forget:
            return  # the world may lose an answer, the state and the order's capacity in one turn
        assert self.world.most_per_slot <= 2, "never more than make-before-break"
        assert len({(machine.slot, machine.incarnation) for machine in machines}) == len(machines), (
            "an incarnation is one gang"
        )
        for call in self.fleet.calls:
            assert call.order is None or call.order.machines == 1, "the fleet below knows single machines"

    @property
    def machine_usd(self) -> float:
        """What all machines have cost, by the fleet's own records."""
        return sum(
            ((machine.ended_s or self.clock()) - machine.launched_s)
            * (SPOT if machine.market == "spot" else ON_DEMAND)
            / SECONDS_PER_HOUR
            for machine in self.fleet.all_instances()
        )


def play(seed: int, *, crashes: int, **more: Any) -> GangScenario:
    scenario = GangScenario(seed, crashes=crashes, **more)
    scenario.play()
    scenario.drain()
    scenario.check()
    return scenario


@pytest.mark.slow  # random runs
@pytest.mark.parametrize("seed", range(15))
def test_no_half_gang_is_left_or_forgotten_on_the_bill(seed: int) -> None:
    """Random launches, preemptions, refusals and crashes: the bill is that of every machine-second."""
    scenario = play(seed, crashes=20)
    assert scenario.decisions[-1].bill.usd == pytest.approx(scenario.machine_usd, rel=1e-9)


@pytest.mark.slow  # random runs
@pytest.mark.parametrize("seed", range(6))
def test_no_half_gang_is_left_where_the_state_is_lost(seed: int) -> None:
    play(seed, crashes=20, forget=True)


@pytest.mark.slow  # random runs
@pytest.mark.parametrize("seed", range(5))
def test_a_calm_market_costs_k_times_as_much_whatever_crashes(seed: int) -> None:
    scenario = GangScenario(seed, crashes=20, wild=False)
    scenario.play()
    scenario.check()
    calm = GangScenario(seed, crashes=0, wild=False)
    calm.play()
    assert scenario.decisions[-1].bill.usd == pytest.approx(calm.decisions[-1].bill.usd, rel=0.1)
    assert calm.decisions[-1].bill.usd == pytest.approx(calm.machine_usd)


@pytest.mark.slow  # random runs
def test_the_check_sees_leftovers_that_nobody_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule of `reconcile` a machine whose gang is gone runs on."""
    monkeypatch.setattr(Instance, "has_leftovers", property(lambda self: False))

    def ten_jobs() -> None:
        for seed in range(10):
            play(seed, crashes=0)

    with pytest.raises(AssertionError, match="half a gang is left"):
        ten_jobs()


# --- one thing at a time


class Box:
    """A fake fleet below, gangs above, and a clock."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.below = FakeFleet(self.clock, pools=("one", "two"), boot_s=30.0, ending_s=5.0)
        self.fleet = GangFleet(self.below, MACHINES)

    def gang(self) -> Instance:
        (gang,) = self.fleet.instances()
        return gang


def test_a_gang_is_up_when_its_last_machine_is() -> None:
    box = Box()
    for number in range(MACHINES):
        box.below.launch(Order(6 + number, 1, "spot"))
        box.clock.advance(10.0)
    gang = box.gang()
    assert (gang.slot, gang.machines, gang.is_whole, gang.state) == (2, 3, True, InstanceState.PENDING)
    box.clock.advance(15.0)  # the first two are up
    assert [member.state for member in box.gang().members].count(InstanceState.RUNNING) == 2
    assert box.gang().state is InstanceState.PENDING
    box.clock.advance(10.0)
    assert box.gang().state is InstanceState.RUNNING


def test_a_refused_machine_ends_those_before_it_and_their_incarnation_is_not_used_again() -> None:
    box = Box()
    for pool, room in (("one", 1), ("two", 1)):
        box.below.set_capacity(pool, "spot", room)
    order = Order(0, 1, "spot", machines=MACHINES)
    with pytest.raises(LaunchError) as caught:
        box.fleet.launch(order)
    assert caught.value.failure is LaunchFailure.CAPACITY
    assert caught.value.used_up
    assert box.below.alive() == []
    state = LaunchState(1, LaunchLimits(pool_backoff_s=0.0), MACHINES)
    state.ordered(order, box.clock(), fallback=False)
    state.failed(order, caught.value, box.clock())
    assert state.next_order(0, "spot", box.clock()) == Order(0, 2, "spot", machines=MACHINES)
    # Nothing was launched: the next try may have the same incarnation.
    with pytest.raises(LaunchError) as caught:
        box.fleet.launch(Order(0, 2, "spot", machines=MACHINES))
    assert not caught.value.used_up


def test_the_same_order_completes_a_gang_whose_launch_was_cut_short() -> None:
    box = Box()
    box.below.launch(Order(0, 1, "spot"))
    half = box.gang()
    assert (half.is_whole, half.is_alive, half.state) == (False, True, InstanceState.PENDING)
    box.clock.advance(40.0)
    assert box.gang().state is InstanceState.PENDING, "one machine of three runs: the worker is not up"
    whole = box.fleet.launch(Order(0, 1, "spot", machines=MACHINES))
    assert (whole.id, whole.is_whole, len(box.below.alive())) == (half.id, True, 3)


def test_terminating_a_gang_ends_all_of_its_machines_but_those_with_a_notice() -> None:
    box = Box()
    gang = box.fleet.launch(Order(0, 1, "spot", machines=MACHINES))
    other = box.fleet.launch(Order(1, 1, "spot", machines=MACHINES))
    box.below.interrupt(gang.members[1].id, 120.0)
    assert box.fleet.instances()[0].notice_s == box.clock() + 120.0, "the notice of one is that of all"
    box.fleet.terminate([gang.id])
    assert {machine.id for machine in box.below.alive()} == {gang.members[1].id, *(m.id for m in other.members)}
    box.clock.advance(130.0)
    ended = next(listed for listed in box.fleet.instances() if listed.id == gang.id)
    assert (ended.state, ended.end_reason) == (InstanceState.ENDED, EndReason.INTERRUPTED)
    assert ended.ended_s == box.clock() - 10.0


def test_the_listing_forgets_ended_gangs_machine_by_machine() -> None:
    box = Box()
    gang = box.fleet.launch(Order(0, 1, "spot", machines=MACHINES))
    box.below.fail_instance(gang.members[0].id)
    box.clock.advance(100.0)
    box.fleet.terminate([gang.id])
    box.clock.advance(3550.0)
    assert len(box.below.instances()) == 2, "the first is forgotten"
    assert list(box.fleet.instances()) == [], "no other gang appears"


def actions(instances: Sequence[Instance], state: LaunchState | None = None, now_s: float = 100.0) -> list[FleetAction]:
    limits = LaunchLimits()
    status = FleetStatus(wanted=("spot",), reasons=("spot: cheaper",), instances=instances, ready_s={})
    return reconcile(status, state or LaunchState(1, limits, MACHINES), limits, now_s)


def member(number: int, state: InstanceState = InstanceState.RUNNING, **more: Any) -> Instance:
    return Instance(f"m{number}", number, 1, "spot", "a", state, 0.0, **more)


GONE: dict[str, Any] = {"state": InstanceState.ENDED, "ended_s": 50.0, "end_reason": EndReason.INTERRUPTED}


def test_when_one_machine_is_gone_the_others_are_released_and_the_slot_gets_a_new_gang() -> None:
    gang = gang_of([member(0), member(1, **GONE), member(2)], MACHINES)
    end, launch = actions([gang])
    assert end == Terminate("m0", 0, "one of its machines is gone: the others are released")
    assert isinstance(launch, Launch)
    assert launch.order.machines == MACHINES
    # Those that have a notice of their own are left to their owner.
    noticed = gang_of([member(0, notice_s=150.0), member(1, **GONE), member(2, **GONE)], MACHINES)
    assert [type(action) for action in actions([noticed])] == [Launch]


def test_half_a_gang_is_completed_by_its_own_order_and_else_ended() -> None:
    half = gang_of([member(0), member(1)], MACHINES)
    end, launch = actions([half])
    assert end == Terminate("m0", 0, "it has 2 of 3 machines")
    assert isinstance(launch, Launch)
    state = LaunchState(1, LaunchLimits(), MACHINES)
    order = Order(0, 1, "spot", machines=MACHINES)
    state.ordered(order, 90.0, fallback=False)
    (again,) = actions([half], state)
    assert isinstance(again, Launch)
    assert again.order == order, "word by word"
    late = actions([half], state, now_s=90.0 + state.limits.listing_lag_s + 1.0)
    assert [type(action) for action in late] == [Terminate, Launch]
    whole = gang_of([member(0), member(1), member(2)], MACHINES)
    assert [type(action) for action in actions([whole])] == [Wait]
