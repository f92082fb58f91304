"""A job in virtual time around a fleet: machines boot, workers join, learn and go silent, spot comes and goes.

What it tells the controller are the records that real workers and a real parameter server would write.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import Instance, InstanceState
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.planning.state import Market, PlannerSettings
from doll.provisioner.settings import ControllerSettings
from doll.provisioner.traces.model import Series, constant
from doll.records.control import Alive, Finished, Join, ServerStatus, TermStarted, Update
from doll.theory.cost import Prices
from record_builders import welcome

SPOT, ON_DEMAND = 0.158, 0.286


class FlatPrices:
    """A price feed that never changes."""

    def __init__(self, spot: float = SPOT, on_demand: float = ON_DEMAND) -> None:
        self._prices = Prices(spot, on_demand)

    def current(self, now_s: float) -> Prices:
        return self._prices

    def series(self, pool: str, market: Market, start_s: float, end_s: float) -> Series:
        usd = self._prices.spot_usd_per_h if market == "spot" else self._prices.on_demand_usd_per_h
        return constant(usd, start_s, end_s)


class World(Protocol):
    """What a job needs of a fake fleet, beside the port."""

    def alive(self) -> list[Instance]: ...

    def all_instances(self) -> list[Instance]: ...


def settings(
    num_slots: int = 4,
    *,
    updates: float = 100.0,
    group_size: int | None = 4,
    batch_size: int = 25,
    rate_per_s: float = 10.0,
    deadline_s: float = 1000.0,
    budget_usd: float | None = None,
    replan_s: float = 10.0,
    boot_s: float = 20.0,
    cycle_s: float = 2000.0,
    limits: LaunchLimits | None = None,
    **more: object,
) -> ControllerSettings:
    """A small job: with the defaults 250 s of four workers.

    Args:
        updates: J; of 4 batches each where `group_size` is None.
        group_size: K; None for a policy whose updates differ.
    """
    planner = PlannerSettings(
        samples=updates * (group_size or 4) * batch_size, group_size=group_size, batch_size=batch_size,
        deadline_s=deadline_s, budget_usd=budget_usd,
        replan_s=replan_s, boot_s=boot_s, cycle_s=cycle_s,
    )  # fmt: skip
    return ControllerSettings(
        planner=planner,
        rates_per_s=np.full(num_slots, rate_per_s),
        limits=limits or LaunchLimits(),
        **more,  # type: ignore[arg-type]
    )


class JobWorld:
    """Workers and parameter server of one job.

    Args:
        now: Unix seconds.
        fleet: whose machines embody the workers.
        join_s: from RUNNING to a worker that has joined.

    Attributes:
        samples: learned from so far.
        loss_of: loss of a version.
        most_per_slot: most instances that a slot ever had at a time.
        released: slots whose streams the others read, as far as they can compute them.
        capacity_per_s: samples that a worker can compute; 0: those of its own stream.
    """

    def __init__(
        self, now: Callable[[], float], fleet: World, settings: ControllerSettings, join_s: float = 0.0
    ) -> None:
        self._now = now
        self._fleet = fleet
        self._settings = settings
        self._join_s = join_s
        self._running_s: dict[str, float] = {}
        self._holders: dict[int, tuple[str, int, int]] = {}  # slot -> (instance, incarnation, session)
        self._session = 1 << 20
        self._read = np.zeros(settings.num_slots)
        self.samples = 0.0
        self.loss_of: Callable[[int], float] = lambda version: 1.0
        self.mute: set[str] = set()
        """Instances whose worker hangs."""
        self.finished_s: float | None = None
        self.most_per_slot = 0
        self.released: tuple[int, ...] = ()
        self.capacity_per_s = 0.0
        self.log: list[tuple[object, float]] = [
            (TermStarted(term=1, resumed_version=0, origins=(), records_per_batch=1, time_s=now()), now())
        ]
        """All records, as on a topic."""

    def progress(self) -> tuple[int, int]:
        """Version of the model and batches in it. Without a K updates have 1, 2 and 3 batches in turn."""
        planner = self._settings.planner
        batches = int(self.samples / planner.batch_size)
        if planner.group_size is not None:
            version = batches // planner.group_size
            return version, version * planner.group_size
        rounds, rest = divmod(batches, 6)
        version, applied = ((0, 0), (1, 1), (1, 1), (2, 3), (2, 3), (2, 3))[rest]
        return 3 * rounds + version, 6 * rounds + applied

    def working(self) -> list[int]:
        """Slots whose worker has joined and works."""
        alive = {instance.id for instance in self._fleet.alive()}
        return [slot for slot, (id_, _, _) in self._holders.items() if id_ in alive and id_ not in self.mute]

    def works(self, instance: Instance) -> bool:
        """The instance holds its slot, and its worker works."""
        holder = self._holders.get(instance.slot)
        return holder is not None and holder[0] == instance.id and instance.slot in self.working()

    def pass_time(self, seconds: float) -> None:
        """The world at the clock's time, `seconds` after the last call."""
        now_s = self._now()
        alive = self._fleet.alive()
        per_slot: dict[int, int] = {}
        for instance in alive:
            per_slot[instance.slot] = per_slot.get(instance.slot, 0) + 1
        self.most_per_slot = max([self.most_per_slot, *per_slot.values()])
        if self.finished_s is not None:
            return
        rates_per_s, working = self._settings.rates_per_s, self.working()
        share = float(rates_per_s[list(self.released)].sum()) / max(1, len(working))
        for slot in working:
            own = float(rates_per_s[slot])
            self._read[slot] += seconds * max(own, min(own + share, self.capacity_per_s))
        self.samples = float(self._read.sum())
        for instance in sorted(alive, key=lambda instance: instance.incarnation):
            if instance.state is InstanceState.RUNNING:
                self._running_s.setdefault(instance.id, now_s)
                if now_s - self._running_s[instance.id] >= self._join_s:
                    self._join(instance, now_s)
        for slot in self.working():
            _, _, session = self._holders[slot]
            self.log.append((Alive(worker=slot, session=session, next_offset=int(self._read[slot])), now_s))
        version, batches = self.progress()
        self.log.append((self._server_status(version, batches), now_s))
        if version > 0:
            loss = self.loss_of(version)
            update = Update(term=1, version=version, members=(), n_samples=1, loss=loss, batches_total=batches)
            self.log.append((update, now_s))
        planner = self._settings.planner
        if batches * planner.batch_size >= planner.samples:
            self.finished_s = now_s
            self.log.append((Finished(term=1, version=version, reason="updates", time_s=now_s), now_s))

    def _server_status(self, version: int, batches: int) -> ServerStatus:
        """A heartbeat of the parameter server."""
        return ServerStatus(
            term=1, time_s=self._now(), leader_since_s=0.0, pid=1, version=version, durable_version=version,
            samples_total=int(self.samples), batches_total=batches, waiting_batches=0, computing_batches=0,
            shortfall_batches=0, stalled_s=0.0, workers=(), run_id="run", num_workers=self._settings.num_slots,
            released=self.released,
        )  # fmt: skip

    def _join(self, instance: Instance, now_s: float) -> None:
        holder = self._holders.get(instance.slot)
        if holder is not None and (holder[0] == instance.id or holder[1] > instance.incarnation):
            return
        self._session += 1
        self._holders[instance.slot] = (instance.id, instance.incarnation, self._session)
        self.log.append((Join(worker=instance.slot, process=instance.id, incarnation=instance.incarnation), now_s))
        answer = welcome(
            instance.slot, process=instance.id, session=self._session, incarnation=instance.incarnation
        )  # fmt: skip
        self.log.append((answer, now_s))

    def tell(self, controller: Controller) -> None:
        """Everything that this controller, or the one whose state it has, has not read yet."""
        for record, at_s in self.log[controller.state.positions.get("log", 0) :]:
            controller.observed.feed(record, at_s)  # type: ignore[arg-type]
        controller.state.positions = {"log": len(self.log)}


def run(
    world: JobWorld,
    controller: Controller,
    advance: Callable[[float], None],
    now: Callable[[], float],
    *,
    until_s: float,
    step_s: float = 10.0,
    each: Callable[[], None] = lambda: None,
) -> list[Decision]:
    """Turn after turn until it is over, or the time is."""
    decisions: list[Decision] = []
    end_s = now() + until_s
    world.pass_time(0.0)
    while now() < end_s:
        world.tell(controller)
        decisions.append(controller.turn(now()))
        if decisions[-1].finished:
            break
        advance(step_s)
        each()
        world.pass_time(step_s)
    return decisions


def markov(rng: random.Random, alpha: float, cycle_s: float, step_s: float) -> Callable[[bool], bool]:
    """The two-state chain of a spot slot: up, or not, after a step."""
    down_s, up_s = (1 - alpha) * cycle_s, alpha * cycle_s

    def step(up: bool) -> bool:
        flips = rng.random() < step_s / (up_s if up else down_s)
        return up != flips

    return step


def per_slot(instances: Sequence[Instance]) -> dict[int, int]:
    """How many instances each slot has."""
    counts: dict[int, int] = {}
    for instance in instances:
        counts[instance.slot] = counts.get(instance.slot, 0) + 1
    return counts
