"""Jobs that fail for a day on a simulated market: what is spent, when a person is told, and what runs afterwards.

The controller and its settings are those of `doll provision`; fleet, market, workers and server are simulated, in
virtual time. `pytest -s` prints the figures.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from doll.errors import ConfigError, ServiceUnavailableError
from doll.provisioner.billing import EC2_LINUX, bill
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import Instance, InstanceState
from doll.provisioner.observation import PAUSE_S
from doll.provisioner.planning.pauses import PauseSettings
from doll.provisioner.settings import ControllerSettings, controller_settings
from doll.provisioner.state_store import cleared, stops_of
from failing_world import RATE, FailingWorld
from fake_fleet import FakeFleet, VirtualClock
from job_files import job
from job_world import ON_DEMAND, SPOT, FlatPrices, markov
from memory_state_store import MemoryStateStore

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
FAILS_AT_S = 600.0
BOOT_S = 60.0


def settings_of(updates: int = 2000, deadline_s: float = 6 * HOUR_S, **plan: Any) -> ControllerSettings:
    """Four slots, as a job file gives them: 2,000 updates are 83 minutes."""
    config = job(
        "data.workers=4", "data.batch_size=25", "training.policy.name=doll", "training.policy.group_size=4",
        "arrivals.process=poisson", f"arrivals.rate_per_s={RATE}", f"plan.updates={updates}",
        f"plan.deadline_s={deadline_s}", f"plan.boot_s={BOOT_S}", "plan.spot_usd_per_h=0.158",
        "plan.on_demand_usd_per_h=0.286", *(f"plan.{name}={value}" for name, value in plan.items()),
    )  # fmt: skip
    settings, _ = controller_settings(config)
    return settings


class Store(MemoryStateStore):
    """A state store on a disk that may be full."""

    full = False

    def save(self, kept: Mapping[str, Any]) -> None:
        self._check()
        super().save(kept)

    def append(self, entry: Mapping[str, Any]) -> None:
        self._check()
        super().append(entry)

    def _check(self) -> None:
        if self.full:
            raise ConfigError(f"cannot write provision-t.json: {OSError(errno.ENOSPC, 'No space left on device')}")


class Prices(FlatPrices):
    """A feed that may stop to answer."""

    up = True

    def current(self, now_s: float) -> Any:
        self._check()
        return super().current(now_s)

    def series(self, *args: Any) -> Any:
        self._check()
        return super().series(*args)

    def _check(self) -> None:
        if not self.up:
            raise ServiceUnavailableError("EC2, asking for spot prices: UnauthorizedOperation")


@dataclass
class Day:
    """A job from its start to a day after its failure."""

    settings: ControllerSettings = field(default_factory=settings_of)
    market: bool = True  # spot machines are preempted; else it is calm
    seed: int = 1

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.began_s = self.clock()
        self.fleet = FakeFleet(self.clock, boot_s=BOOT_S, ending_s=5.0)
        self.world = FailingWorld(self.clock, self.fleet, self.settings)
        self.store = Store()
        self.prices = Prices()
        self.failed = False
        self.decisions: list[Decision] = []
        self.alarms: dict[str, float] = {}  # first seen, seconds after the failure
        self.ended_s: float | None = None  # when the provisioner ended, on the job's clock
        self.restart()
        rng = random.Random(self.seed)
        self._step = markov(rng, 0.9, 4 * HOUR_S, self.settings.planner.replan_s)
        self._up = dict.fromkeys(range(self.settings.num_slots), True)

    def restart(self) -> None:
        self.controller = Controller(self.settings, self.fleet, self.prices, EC2_LINUX, self.store, job="t")
        self.ended_s = None

    def clear(self) -> None:
        """A person has run `doll provision clear`, and a supervisor or the person starts the provisioner again."""
        kept, limit = self.store.load(), self.settings.limits.max_failures
        assert kept is not None
        assert stops_of(kept, limit)
        self.store.save(cleared(kept, limit))
        assert stops_of(self.store.load() or {}, limit) == []
        self.restart()

    def restarted(self, each: Callable[[], None] = lambda: None, hours: float = 24.0) -> None:
        """A supervisor starts the provisioner again whenever it has ended, whatever its exit code is."""
        pause_s, until_s = 10.0, self.elapsed_s + hours * HOUR_S
        while self.elapsed_s < until_s:
            self.restart()
            while self.ended_s is None and self.elapsed_s < until_s:
                self.run(self.elapsed_s + self.settings.planner.replan_s, each)
            self.clock.advance(pause_s)
            pause_s = min(300.0, 2 * pause_s)

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began_s

    def turn(self) -> Decision:
        self.world.tell(self.controller)
        self.controller.observed.observe_ends(self.clock(), [int(end) for end in self.world.ends])
        decision = self.controller.turn(self.clock())
        self.decisions.append(decision)
        if self.failed:
            for alarm in decision.alarms:
                self.alarms.setdefault(alarm, self.elapsed_s - FAILS_AT_S)
        if decision.finished and self.ended_s is None:
            self.ended_s = self.elapsed_s
        return decision

    def run(self, until_s: float, each: Callable[[], None] = lambda: None) -> None:
        """Turn after turn until then, or until the provisioner has ended; time goes on without it."""
        step_s = self.settings.planner.replan_s
        while self.elapsed_s < until_s:
            if self.ended_s is None:
                self.turn()
            self.clock.advance(step_s)
            self._preempt()
            each()
            self.world.pass_time(step_s)

    def _preempt(self) -> None:
        for slot in self._up if self.market else ():
            was, self._up[slot] = self._up[slot], self._step(self._up[slot])
            if was and not self._up[slot]:
                for machine in self.fleet.alive():
                    if machine.slot == slot and machine.market == "spot" and machine.notice_s is None:
                        self.fleet.interrupt(machine.id, 120.0)

    def fail(self, each: Callable[[], None] = lambda: None, **flags: bool) -> Day:
        """Ten minutes of work, then a day of failure."""
        self.world.pass_time(0.0)
        self.run(FAILS_AT_S)
        self.failed = True
        for name, value in flags.items():
            setattr(self.world, name, value)
        self.run(FAILS_AT_S + DAY_S, each)
        return self

    @property
    def plan_usd(self) -> float:
        return self.decisions[0].expected_cost_usd

    @property
    def spent_usd(self) -> float:
        """What the fleet's owner bills, whatever the controller knows of it."""
        return bill(self.fleet.all_instances(), FlatPrices().series, EC2_LINUX, self.clock()).usd

    def running(self, at_s: float) -> list[Instance]:
        """What had not ended then, on the job's clock."""
        then_s = self.began_s + at_s
        return [
            machine
            for machine in self.fleet.all_instances()
            if machine.launched_s <= then_s and (machine.ended_s is None or machine.ended_s > then_s)
        ]

    def told(self, words: str) -> float:
        """Seconds after the failure at which an alarm with these words was first raised."""
        return min((at_s for alarm, at_s in self.alarms.items() if words in alarm), default=float("inf"))

    def check(self, name: str, words: str, *, boot_s: float, steps: int) -> None:
        """The bar: at most the plan, and one boot per slot and back-off step; told in time; nothing left.

        Args:
            boot_s: what a machine that comes to nothing is paid for.
            steps: back-off steps of a slot.
        """
        count = self.settings.num_slots
        allowed_usd = self.plan_usd + count * steps * boot_s / HOUR_S * ON_DEMAND
        stopped_s = self.ended_s if self.ended_s is not None else FAILS_AT_S + DAY_S
        left = self.running(stopped_s + HOUR_S if self.ended_s is not None else stopped_s)
        launched = len(self.fleet.all_instances())
        print(  # noqa: T201 - the figures of docs/operations.md
            f"\n{name}: plan {self.plan_usd:.3f} USD, allowed {allowed_usd:.3f}, spent {self.spent_usd:.3f}; "
            f"{launched} machines; told after {self.told(words):.0f} s; ended after "
            f"{'-' if self.ended_s is None else f'{self.ended_s - FAILS_AT_S:.0f} s'}; left {len(left)}; "
            f"last alarms {self.decisions[-1].alarms}"
        )
        assert self.told(words) <= 600
        assert self.spent_usd <= allowed_usd
        assert left == []
        assert abs(self.decisions[-1].bill.usd - self.spent_usd) <= 0.02 * self.spent_usd + 0.001


@pytest.mark.slow
@pytest.mark.parametrize("powers_off", [False, True])
def test_a_parameter_server_that_is_gone(powers_off: bool) -> None:
    """Permanently, as after a model that diverged. On AWS machines shut down after 20 minutes without it."""
    day = Day()

    def orphans() -> None:
        for machine in day.fleet.alive():
            if powers_off and day.clock() - max(machine.launched_s, day.began_s + FAILS_AT_S) > 1200:
                day.fleet.fail_instance(machine.id)

    day.fail(orphans, server=False)
    day.check(f"server gone, machines power off: {powers_off}", "no parameter server has been heard", boot_s=0, steps=0)
    launched = [machine for machine in day.fleet.all_instances() if machine.launched_s > day.began_s + FAILS_AT_S + 60]
    assert launched == [], "nothing is launched without its heartbeat"


def test_a_parameter_server_that_crashes_again_and_again() -> None:
    """The server is up for 10 s of each minute, and applies the same updates each time."""
    day = Day()

    def flaps() -> None:
        day.world.server = int(day.elapsed_s) % 60 < 30

    day.fail(flaps, learns=False)
    day.check("server flaps", "applies no update", boot_s=0, steps=0)
    assert day.decisions[-1].phase == "failed"


def test_workers_that_fail_at_once() -> None:
    day = Day(market=False)

    def fails() -> None:
        for machine in day.fleet.alive():
            if day.clock() - machine.launched_s >= 90:
                day.fleet.fail_instance(machine.id)

    day.fail(fails)
    day.check("workers fail at once", "fail again and again", boot_s=90 + 30, steps=5)
    assert day.decisions[-1].phase == "failed"
    assert "ended by itself" in day.decisions[-1].alarms[0]
    machines = len(day.fleet.all_instances())
    assert machines <= 4 * 6, "the machines that worked, and five of each slot"
    # A supervisor starts it again and again, a person once: then each slot has one more try.
    day.restarted(fails)
    assert len(day.fleet.all_instances()) == machines
    assert day.decisions[-1].phase == "failed"
    day.clear()
    day.run(day.elapsed_s + HOUR_S, fails)
    assert day.decisions[-1].phase == "failed"
    assert len(day.fleet.all_instances()) == machines + 4
    # ... and when it is corrected, the job goes on.
    day.clear()
    day.run(day.elapsed_s + 6 * HOUR_S)
    assert day.decisions[-1].phase == "done"


def test_workers_that_never_join() -> None:
    day = Day(market=False)
    day.world.joins = False
    day.fail(joins=False)
    assert {machine.market for machine in day.fleet.all_instances()} == {"spot"}, "on-demand does not cure it"
    limits = day.settings.limits
    day.check("workers never join", "have not joined", boot_s=limits.boot_timeout_s + 60, steps=limits.max_failures)


def test_no_progress() -> None:
    day = Day().fail(learns=False)
    day.check("no progress", "applies no update", boot_s=0, steps=0)
    assert day.decisions[-1].phase == "failed"


def test_no_progress_from_the_start_of_a_short_job() -> None:
    """Its deadline comes into danger meanwhile: no slot is moved on-demand for it."""
    day = Day(settings_of(updates=400, deadline_s=HOUR_S))
    day.world.learns = False
    day.fail(learns=False)
    day.check("no progress, short job", "applies no update", boot_s=BOOT_S, steps=1)
    assert day.decisions[-1].bill.usd_by_market["on_demand"] == 0


@pytest.mark.slow
def test_a_source_that_has_ended() -> None:
    day = Day().fail(source=False)
    day.check("source ended", "the source has sent nothing", boot_s=0, steps=0)
    assert day.decisions[-1].phase == "idle"
    assert day.ended_s is None, "it waits for the source"
    day.world.source = True
    day.run(day.elapsed_s + 6 * HOUR_S)
    assert day.decisions[-1].phase == "done", "and the job goes on when it sends again"


def test_prices_that_are_gone() -> None:
    """The feed stops and the provisioner is restarted: the budget of 1 USD is kept, at the last known prices."""
    day = Day(settings_of(updates=100_000, deadline_s=30 * DAY_S, budget_usd=1.0), market=False)
    day.world.pass_time(0.0)
    day.run(FAILS_AT_S)
    day.prices.up, day.failed = False, True
    day.restart()
    day.run(FAILS_AT_S + DAY_S)
    print(f"\nprices gone: budget 1, spent {day.spent_usd:.3f}; told after {day.told('last known prices'):.0f} s")  # noqa: T201
    assert day.told("last known prices") <= 600
    assert 0.9 < day.spent_usd <= 1.0
    assert (day.decisions[-1].phase, day.running(day.elapsed_s)) == ("budget", [])


def test_a_notice_whose_machine_is_never_taken() -> None:
    day = Day(settings_of(updates=1000), market=False)
    day.world.pass_time(0.0)
    day.run(FAILS_AT_S)
    noticed = day.fleet.alive()[0]
    day.fleet.interrupt(noticed.id, 1e9)
    day.failed = True
    day.run(FAILS_AT_S + DAY_S)
    (machine,) = [machine for machine in day.fleet.all_instances() if machine.id == noticed.id]
    print(f"\nnotice not taken: ended {(machine.ended_s or 0) - day.began_s - FAILS_AT_S:.0f} s after its notice")  # noqa: T201
    assert machine.ended_s is not None
    assert machine.ended_s - day.began_s - FAILS_AT_S <= 700
    assert day.decisions[-1].phase == "done"
    assert day.spent_usd <= day.plan_usd + 700 / HOUR_S * ON_DEMAND
    assert day.running(day.elapsed_s) == []


def test_a_full_disk() -> None:
    """No machine is launched that cannot be noted; machines are ended nevertheless; the job ends with those it has."""
    day = Day(market=False)
    day.world.pass_time(0.0)
    day.run(FAILS_AT_S)
    day.store.full = day.failed = True
    lost = day.fleet.alive()[0]
    day.fleet.fail_instance(lost.id)
    machines = len(day.fleet.all_instances())
    day.run(FAILS_AT_S + 1200)
    assert len(day.fleet.all_instances()) == machines, "what cannot be noted is not done"
    assert day.told("No space left on device") <= 600
    day.run(FAILS_AT_S + DAY_S)
    print(f"\nfull disk: plan {day.plan_usd:.3f}, spent {day.spent_usd:.3f}, phase {day.decisions[-1].phase}")  # noqa: T201
    assert day.decisions[-1].phase == "done"
    assert day.spent_usd <= day.plan_usd * 1.05
    assert day.running(day.elapsed_s) == []


def test_a_full_disk_that_is_cleared_costs_a_few_turns() -> None:
    day = Day(market=False)
    day.world.pass_time(0.0)
    day.run(FAILS_AT_S)
    day.store.full = True
    day.fleet.fail_instance(day.fleet.alive()[0].id)
    day.run(FAILS_AT_S + 600)
    assert len(day.fleet.alive()) == 3
    day.store.full = False
    day.run(FAILS_AT_S + 900)
    assert len(day.fleet.alive()) == 4
    assert len({(machine.slot, machine.incarnation) for machine in day.fleet.all_instances()}) == 5
    assert not day.decisions[-1].alarms


def test_an_api_that_does_not_answer() -> None:
    """Credentials that cannot be renewed for a day. Nothing can be done, which is told; then everything is ended."""
    day = Day(market=False)
    day.world.pass_time(0.0)
    day.run(FAILS_AT_S)
    day.failed = True

    def expired() -> None:
        day.fleet.fail_next("instances", ConfigError("listing instances: NoCredentialsError"))

    expired()
    day.run(FAILS_AT_S + DAY_S, expired)
    assert day.told("the fleet does not answer") <= 600
    day.run(day.elapsed_s + HOUR_S)
    assert day.decisions[-1].phase == "done"
    assert day.running(day.elapsed_s) == []


@pytest.mark.slow
@pytest.mark.parametrize("pause_h", [6, 40 * 24])
def test_a_source_that_pauses_costs_no_on_demand_machine(pause_h: float) -> None:
    """A night; and forty days, after which estimates of rates have nothing left."""
    asked = settings_of(updates=24 * 3600 * 40 // 100, deadline_s=72 * HOUR_S if pause_h < 72 else 90 * DAY_S)
    costs = []
    for paused in (False, True):
        day = Day(asked, market=False)
        day.world.pass_time(0.0)
        day.run(2 * HOUR_S)
        day.world.source = not paused
        step_s = HOUR_S if pause_h > 72 else day.settings.planner.replan_s
        if paused:
            end_s = (2 + pause_h) * HOUR_S
            while day.elapsed_s < end_s:
                day.turn()
                day.clock.advance(step_s)
                day.world.pass_time(step_s)
            assert day.decisions[-1].phase == "idle"
            assert np.allclose(day.decisions[-1].rates_per_s, RATE, rtol=0.1), "the rates while it flows"
        day.world.source = True
        day.run(day.elapsed_s + 23 * HOUR_S)
        assert day.decisions[-1].phase == "done"
        assert day.decisions[-1].bill.usd_by_market["on_demand"] == 0
        costs.append(day.spent_usd)
    print(f"\npause of {pause_h} h: {costs[1] / costs[0] - 1:+.1%}")  # noqa: T201
    # Until it counts as paused permanently, machines wait for the source.
    waits_s = asked.max_stall_s + PAUSE_S + 2 * BOOT_S + (HOUR_S if pause_h > 72 else 0)
    assert costs[1] <= costs[0] + 4 * waits_s / HOUR_S * SPOT


def test_ended_instances_are_all_ended() -> None:
    """The world of these tests: a job without a failure meets its plan, and nothing is left."""
    day = Day()
    day.world.pass_time(0.0)
    day.run(6 * HOUR_S)
    assert day.decisions[-1].phase == "done"
    assert all(machine.state is InstanceState.ENDED for machine in day.fleet.all_instances())
    assert not any(decision.alarms for decision in day.decisions)


# --- jobs that pause


def pausing(hours: tuple[float, float], **more: Any) -> Day:
    """A job of 83 minutes with a deadline of 6 h, on a calm market. It begins at 22:13 UTC."""
    pauses = PauseSettings(not_between=((hours[0] * HOUR_S, hours[1] * HOUR_S),), **more)
    day = Day(replace(settings_of(), pauses=pauses), market=False)
    day.world.pass_time(0.0)
    return day


def journaled(day: Day) -> list[str]:
    return [entry["kind"] for entry in day.store.journal if entry["kind"] in ("pause", "resume")]


def test_a_job_pauses_over_midnight_and_meets_its_deadline() -> None:
    day = pausing((22.5, 0.5))
    day.run(900)
    assert len(day.running(900)) == 4
    day.run(HOUR_S)
    assert day.running(HOUR_S) == []
    decision = day.decisions[-1]
    assert (decision.phase, decision.alarms, decision.finished) == ("paused", (), False)
    day.run(6 * HOUR_S)
    assert day.decisions[-1].phase == "done"
    assert journaled(day) == ["pause", "resume"]
    assert not [machine for machine in day.fleet.all_instances() if machine.market == "on_demand"]
    assert day.ended_s is not None
    assert 8200 < day.ended_s < 3 * HOUR_S, "half past midnight is 8,200 s after the start"


@pytest.mark.parametrize("ends_machines", [False, True])
def test_a_provisioner_that_restarts_between_a_pause_and_its_execution_continues_it(ends_machines: bool) -> None:
    """It dies at its first termination, or after the save that follows them."""
    day = pausing((22.5, 0.5))
    day.run(900)
    if not ends_machines:
        day.fleet.fail_next("terminate", RuntimeError("killed"))
    while not day.controller.state.pause.why:
        try:
            day.turn()
        except RuntimeError:
            break
        day.clock.advance(30)
        day.world.pass_time(30)
    assert bool(day.fleet.alive()) is not ends_machines
    day.restart()
    assert day.controller.state.pause.why, "it was saved before the first termination"
    assert day.turn().phase == "paused"
    day.run(day.elapsed_s + 120)
    assert day.fleet.alive() == []
    assert journaled(day) == ["pause"], "it is decided once"


def test_hours_that_do_not_leave_enough_time_are_worked_in() -> None:
    day = pausing((23.0, 8.0))
    with pytest.raises(
        ConfigError, match=r"provision\.pause: no time is left before the deadline: 2800 of its 21600 s"
    ):
        day.turn()
    assert day.store.load() is None, "so the next start refuses it, too"
    day = pausing((4.0, 5.0))
    day.run(600)
    day.settings = replace(day.settings, pauses=PauseSettings(not_between=((23 * HOUR_S, 8 * HOUR_S),)))
    day.controller.retarget(day.settings)  # a job that runs is not refused
    day.run(6 * HOUR_S)
    assert day.decisions[-1].phase == "done"
    assert journaled(day) == []


def test_a_price_above_the_limit_ends_machines_until_the_deadline_needs_them() -> None:
    day = pausing((3.0, 4.0), max_spot_usd_per_h=SPOT / 2)
    day.run(600)
    assert day.decisions[-1].phase == "paused"
    assert day.fleet.all_instances() == []
    day.run(6 * HOUR_S)
    assert day.decisions[-1].phase == "done"
    assert day.ended_s is not None
    assert day.ended_s < 6 * HOUR_S
