"""A day of a job for each failure and each fleet, whose provisioner a supervisor restarts whatever the exit code is.

At most the plan is spent, and one boot for each slot and back-off step, and the bill is what was spent; no machine is
there after the end, and none is launched for a job that is over; the deadline is met where there was capacity. Adapters
are the real ones, their owners are in memory (tests/support/machine_owners.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from doll.errors import ServiceUnavailableError
from doll.provisioner.billing import LOCAL, bill
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import EndReason
from doll.provisioner.settings import ControllerSettings
from doll.provisioner.state_store import cleared
from doll.records.control import Finished
from failing_world import FailingWorld
from fake_fleet import VirtualClock
from job_world import ON_DEMAND, FlatPrices, settings
from machine_owners import OWNERS, Ec2Owner, KubernetesOwner, LambdaOwner, Owner, RayOwner
from memory_state_store import MemoryStateStore

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
TURN_S = 120.0
BOOT_S = 60.0
FAILS_AT_S = 10 * TURN_S
DEADLINE_S = 4 * HOUR_S
MOST_PAUSE_S = 2 * HOUR_S  # of the supervisor
DRAIN_S = 5.0
AWAY_S = 20.0  # of a machine that is stopped and started between two turns; no machine takes longer to end
BUDGET_USD = 1.1  # a quarter more than the plan of the job


class Day:
    """A job of 83 minutes with a deadline of four hours.

    Attributes:
        ended_s: when a provisioner first found that there is nothing more to do; None: never.
        kept: what was left of machines then.
        chosen: machines to which something happens.
        beside: the day of another job of the same cluster; None: there is none.
    """

    def __init__(self, owner: Owner, job: ControllerSettings) -> None:
        self.owner, self.job, self.clock = owner, job, owner.clock
        self.began_s = self.clock()
        self.prices = FlatPrices(*owner.usd_per_h)
        self.world = FailingWorld(self.clock, owner, job)
        self.store = MemoryStateStore()
        self.decisions: list[Decision] = []
        self.ended_s: float | None = None
        self.kept: list[str] = []
        self._restart_at_s, self._pause_s = 0.0, 10.0
        self.controller: Controller | None = None
        self.chosen: list[str] = []
        self.beside: Day | None = None

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began_s

    def run(self, until_s: float, each: Callable[[Day], None] = lambda day: None) -> None:
        self.world.pass_time(0.0)
        while self.elapsed_s < until_s:
            step_s = self.act()
            self.clock.advance(step_s)
            each(self)
            self.world.pass_time(step_s)

    def act(self) -> float:
        """A turn, if a provisioner runs; seconds until the next."""
        if self.controller is None and self.elapsed_s >= self._restart_at_s:
            try:
                self.controller = Controller(
                    self.job, self.owner.fleet(), self.prices, LOCAL, self.store, job=self.owner.job, topics_id="t"
                )
            except ServiceUnavailableError:
                self._exit()
        if self.controller is not None:
            self._turn(self.controller)
        return TURN_S if self.controller is not None else max(TURN_S, self._restart_at_s - self.elapsed_s)

    def _turn(self, controller: Controller) -> None:
        self.world.tell(controller)
        controller.observed.observe_ends(self.clock(), [int(end) for end in self.world.ends])
        decision = controller.turn(self.clock())
        self.decisions.append(decision)
        if decision.finished or (decision.phase == "stopped" and not decision.alive):
            if self.ended_s is None:
                self.ended_s, self.kept = self.elapsed_s, self.owner.kept()
            self._exit()

    def _exit(self) -> None:
        """The process of the provisioner ends."""
        self.controller = None
        self._restart_at_s = self.elapsed_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)

    def forget(self) -> None:
        """The provisioner dies; a supervisor starts it again at once."""
        self.controller = None
        self._restart_at_s = 0.0

    @property
    def spent_usd(self) -> float:
        """By the truth of the owner."""
        return bill(self.owner.paid(), self.prices.series, LOCAL, self.clock()).usd


def nothing(day: Day) -> None:
    pass


def take(day: Day) -> None:
    """The one that is left does not do the work in time."""
    for machine in day.owner.alive()[:3]:
        day.owner.take(machine.id)


def refuse(day: Day) -> None:
    take(day)
    day.owner.refuses = True


def only_once(day: Day) -> None:
    day.owner.refuses = not day.owner.refused


def go_away(day: Day) -> None:
    take(day)
    day.owner.away = True


def away_while_it_starts_again(day: Day) -> None:
    day.forget()
    go_away(day)


def reach_the_target(day: Day) -> None:
    version, _ = day.world.progress()
    day.world.finished_s = day.clock()
    reason = f"accuracy: 0.9 at version {version} reached 0.5"
    day.world.log.append((Finished(term=1, version=version, reason=reason, time_s=day.clock()), day.clock()))


def take_and_reach_the_target(day: Day) -> None:
    take(day)
    reach_the_target(day)


def no_join(day: Day) -> None:
    day.world.joins = False


def no_update(day: Day) -> None:
    day.world.learns = False


def no_server(day: Day) -> None:
    day.world.server = False


def fail_at_once(day: Day) -> None:
    for machine in day.owner.alive():
        if day.clock() - machine.launched_s >= 2 * TURN_S:
            day.owner.has_ended(machine.id, EndReason.FAILED)


def unpulled(day: Day) -> None:
    """One node cannot pull the image; a registry that answers again is not asked before."""
    take(day)
    assert isinstance(day.owner, KubernetesOwner)
    day.owner.unpulled = {day.owner.alive()[0].id}


def ec2(day: Day) -> Ec2Owner:
    assert isinstance(day.owner, Ec2Owner)
    return day.owner


def kubernetes(day: Day) -> KubernetesOwner:
    assert isinstance(day.owner, KubernetesOwner)
    return day.owner


def ray(day: Day) -> RayOwner:
    assert isinstance(day.owner, RayOwner)
    return day.owner


def functions(day: Day) -> LambdaOwner:
    assert isinstance(day.owner, LambdaOwner)
    return day.owner


def take_and_use_concurrency_up(day: Day) -> None:
    """Events wait; each is given up, and finds that out when it starts."""
    take(day)
    functions(day).is_busy = True


def deliver_twice(day: Day) -> None:
    functions(day).is_twice = True


def stop(day: Day) -> None:
    day.chosen = [day.owner.alive()[0].id]
    day.owner.stop(day.chosen[0])


def stop_and_start(day: Day) -> None:
    stop(day)
    day.clock.advance(AWAY_S)
    day.owner.start(day.chosen[0])


def stop_what_nobody_may_end(day: Day) -> None:
    """The bill of the machine is closed, and then it runs again."""
    ec2(day).protects = True
    stop(day)


def start_after_half_an_hour(day: Day) -> None:
    if day.elapsed_s >= FAILS_AT_S + HOUR_S / 2:
        ec2(day).protects = False
        day.owner.start(day.chosen[0])


def list_late(day: Day) -> None:
    ec2(day).late_s = TURN_S + 1.0  # as the turn's listing is made


def take_and_list_late(day: Day) -> None:
    take(day)
    list_late(day)


def no_start(day: Day) -> None:
    ray(day).failing = 1


def take_and_no_start(day: Day) -> None:
    take(day)
    no_start(day)


def take_what_is_stuck(day: Day) -> None:
    """Workers hang, and their machines have to be replaced; no actor hears that it should end."""
    ray(day).stuck = True
    day.world.mute |= {machine.id for machine in day.owner.alive()[:3]}


def be_stuck(day: Day) -> None:
    ray(day).stuck = True


def lose_table(day: Day) -> None:
    ray(day).lose_table()
    day.owner.away = True


def have_a_neighbour(day: Day) -> None:
    """Another job of the same cluster, which takes days."""
    job = replace(day.job, planner=replace(day.job.planner, samples=1e9, deadline_s=1e9, budget_usd=None))
    day.beside = Day(day.owner.beside("letters"), job)
    day.beside.world.pass_time(0.0)


def live_beside(day: Day) -> None:
    assert day.beside is not None
    day.beside.world.pass_time(TURN_S)
    day.beside.act()


def wrong_image(day: Day) -> None:
    kubernetes(day).wrong_image = True


def node_is_silent(day: Day) -> None:
    """One node does not answer: its pod is evicted after minutes, and the cloud takes the node after half an hour."""
    day.chosen = [day.owner.alive()[0].id]
    day.world.mute |= set(day.chosen)


def node_goes(day: Day) -> None:
    owner, (name,) = kubernetes(day), day.chosen
    if day.elapsed_s == FAILS_AT_S + 3 * TURN_S:
        owner.evict(name)
    elif day.elapsed_s == FAILS_AT_S + 15 * TURN_S:
        owner.node_gone(name)


def recover(day: Day) -> None:
    day.owner.refuses = day.owner.away = False
    if isinstance(day.owner, Ec2Owner):
        day.owner.protects, day.owner.late_s = False, 0.0
    if isinstance(day.owner, KubernetesOwner):
        day.owner.unpulled = set()
    if isinstance(day.owner, LambdaOwner):
        day.owner.is_busy = False


@dataclass(frozen=True)
class Failure:
    """What goes wrong.

    Attributes:
        begin: 20 minutes after the start of the job, or at its start.
        lasts_s: until it is over; None: for the day.
        each: after each turn while it lasts.
        is_met: the job finishes in time.
        steps, boot_s: back-off steps of a slot, and what one machine of it is paid for.
        only: on these fleets; empty: on all.
        alarm: what a person is told of it.
        unseen_s: for so long nobody can know that a machine has ended, and it is billed; None: as its owner tells.
        waits_on: on these fleets the provisioner waits, because nothing is paid.
    """

    begin: Callable[[Day], None] = nothing
    lasts_s: float | None = None
    each: Callable[[Day], None] = nothing
    at_start: bool = False
    is_met: bool = True
    steps: int = 1
    boot_s: float = BOOT_S + 2 * TURN_S
    only: tuple[str, ...] = ()
    alarm: str = ""
    unseen_s: float | None = None
    waits_on: tuple[str, ...] = ()


LIMITS = settings().limits
REMOTE = ("compose", "ec2", "kubernetes", "ray", "lambda")  # who forks processes has no owner that refuses, or is away
TELL_OF_ENDS = ("compose", "ec2", "ray", "lambda")  # the others' ends are seen in the next turn
FAILURES = {
    "nothing": Failure(),
    "machines are taken": Failure(take),
    "the provisioner dies in every turn": Failure(each=Day.forget),
    "an order is refused once": Failure(refuse, 1800.0, each=only_once, only=REMOTE),
    "the right to launch is away for ten minutes": Failure(refuse, 600.0, only=REMOTE),
    "the owner is away for an hour": Failure(go_away, HOUR_S, only=REMOTE),
    "the owner is away while the provisioner starts again": Failure(
        away_while_it_starts_again, 600.0, only=REMOTE
    ),
    "one node cannot pull the image for a turn": Failure(unpulled, TURN_S, only=("kubernetes",)),
    "the owner is away for a minute": Failure(go_away, 60.0, only=REMOTE),
    "a machine is stopped and started once": Failure(stop_and_start, only=("ec2",)),
    "a machine is stopped and stays stopped": Failure(stop, only=("ec2",)),
    "a machine comes back after its final bill": Failure(
        stop_what_nobody_may_end, HOUR_S, each=start_after_half_an_hour, only=("ec2",)
    ),
    "a machine is listed late at the start": Failure(list_late, TURN_S, at_start=True, only=("ec2",)),
    "a machine is listed late": Failure(take_and_list_late, 5 * TURN_S, only=("ec2",)),
    "one actor does not start": Failure(take_and_no_start, only=("ray",)),
    "the first actor does not start": Failure(no_start, at_start=True, only=("ray",)),
    "no actor ends at its grace": Failure(be_stuck, only=("ray",)),
    "workers hang, and no actor ends at its grace": Failure(
        take_what_is_stuck, boot_s=LIMITS.silence_timeout_s + BOOT_S + 2 * TURN_S, only=("ray",)
    ),
    "the head loses its table": Failure(lose_table, 600.0, unseen_s=600.0, only=("ray",)),
    "another job has machines in the cluster": Failure(
        have_a_neighbour, 2 * HOUR_S, each=live_beside, at_start=True, only=("compose", "kubernetes", "ray", "lambda"),
    ),
    "the concurrency is used up for ten minutes": Failure(take_and_use_concurrency_up, 600.0, only=("lambda",)),
    "each event is delivered twice": Failure(deliver_twice, at_start=True, only=("lambda",)),
    "the image is wrong": Failure(
        wrong_image, at_start=True, is_met=False, steps=LIMITS.max_failures, boot_s=HOUR_S, only=("kubernetes",),
        alarm="ImagePullBackOff",
    ),
    "a node does not answer": Failure(node_is_silent, each=node_goes, boot_s=30 * TURN_S / 4, only=("kubernetes",)),
    "the job reaches its target": Failure(reach_the_target),
    "the job reaches its target when machines are taken": Failure(take_and_reach_the_target),
    "workers never join": Failure(
        no_join, at_start=True, is_met=False, steps=LIMITS.max_failures, boot_s=LIMITS.boot_timeout_s + 2 * TURN_S
    ),
    "machines fail at once": Failure(
        each=fail_at_once, is_met=False, steps=LIMITS.max_failures, boot_s=BOOT_S + 3 * TURN_S
    ),
    "no update": Failure(no_update, is_met=False, steps=0),
    "no parameter server": Failure(no_server, is_met=False, steps=0, waits_on=("lambda",)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, failure in FAILURES.items() for kind in failure.only or OWNERS]
)
def test_a_day(name: str, kind: str, tmp_path: Path) -> None:
    failure = FAILURES[name]
    job = settings(
        updates=2000, deadline_s=DEADLINE_S, replan_s=TURN_S, boot_s=BOOT_S, cycle_s=10 * HOUR_S, max_stall_s=HOUR_S,
        budget_usd=BUDGET_USD,
    )  # fmt: skip
    day = Day(OWNERS[kind](VirtualClock(), tmp_path, BOOT_S), job)
    if failure.at_start:
        failure.begin(day)
    else:
        day.run(FAILS_AT_S)
        failure.begin(day)
    day.run(day.elapsed_s + (DAY_S if failure.lasts_s is None else failure.lasts_s), failure.each)
    recover(day)
    day.run(max(DAY_S, day.elapsed_s + 2 * TURN_S))
    check(day, failure, kind)


def check(day: Day, failure: Failure, kind: str) -> None:
    """The bars."""
    assert failure.begin is not refuse or day.owner.refused
    count, machines = day.job.num_slots, day.owner.all_instances()
    allowed_usd = day.decisions[0].expected_cost_usd + count * failure.steps * failure.boot_s / HOUR_S * ON_DEMAND
    if isinstance(day.owner, LambdaOwner):  # both invocations of a slot are paid while the successor starts
        assert day.owner.handed_on <= count * (1 + (day.ended_s or DAY_S) / (day.owner.LIMIT_S - 2 * TURN_S - BOOT_S))
        allowed_usd += day.owner.handed_on * (BOOT_S + DRAIN_S) / HOUR_S * day.owner.usd_per_h[0]
    assert day.spent_usd <= allowed_usd, f"{len(machines)} machines; {day.decisions[-1].alarms}"
    assert (day.ended_s is None) == (kind in failure.waits_on), day.decisions[-1].alarms
    assert day.owner.kept() == []
    unseen_s = failure.unseen_s or (0.0 if kind in TELL_OF_ENDS else TURN_S)
    if kind == "lambda" and failure.begin in (go_away, away_while_it_starts_again):  # invocations tell of their ends
        unseen_s = LambdaOwner.LIMIT_S
    away_usd, unseen_usd = (seconds / HOUR_S * ON_DEMAND for seconds in (count * AWAY_S, len(machines) * unseen_s))
    too_much_usd = day.decisions[-1].bill.usd - day.spent_usd
    assert -away_usd <= too_much_usd <= away_usd + unseen_usd, "the bill is not what was spent"
    assert not failure.alarm or any(failure.alarm in " ".join(decision.alarms) for decision in day.decisions)
    ended_s = DAY_S if day.ended_s is None else day.ended_s
    assert [each.id for each in machines if each.launched_s - day.began_s > ended_s] == [], "of a job that is over"
    assert day.world.most_per_slot <= 2
    assert (day.world.finished_s is not None) == failure.is_met, day.decisions[-1].alarms
    if day.beside is not None:
        theirs = day.beside.owner
        ended = [machine for machine in theirs.all_instances() if not machine.is_alive]
        assert all(machine.end_reason is EndReason.LIMIT for machine in ended), "machines of another job were ended"
        assert len(theirs.alive()) == (0 if kind == "lambda" else count), "of invocations nobody has replaced the last"
        assert day.beside.decisions[-1].phase == "run"
    if day.world.finished_s is not None:
        assert day.world.finished_s - day.began_s <= DEADLINE_S
        assert day.decisions[-1].phase == "done"
        assert day.kept == []
    elif kind not in failure.waits_on:
        assert day.decisions[-1].phase == "failed"


def test_a_job_that_was_stopped_goes_on_after_a_person_has_said_so(tmp_path: Path) -> None:
    job = settings(updates=2000, deadline_s=DAY_S, replan_s=TURN_S, boot_s=BOOT_S, max_stall_s=HOUR_S)
    day = Day(OWNERS["ec2"](VirtualClock(), tmp_path, BOOT_S), job)
    day.world.learns = False
    day.run(8 * HOUR_S)
    launched = len(day.owner.machines)
    assert day.decisions[-1].phase == "failed"
    day.world.learns = True
    day.run(day.elapsed_s + 2 * MOST_PAUSE_S)
    assert (day.decisions[-1].phase, len(day.owner.machines)) == ("failed", launched)
    kept = day.store.load()
    assert kept is not None
    day.store.save(cleared(kept, job.limits.max_failures))
    day.run(day.elapsed_s + 4 * HOUR_S)
    assert day.decisions[-1].phase == "done"
