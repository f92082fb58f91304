"""A day of the paper's setting, 64 workers, through the controller in virtual time: on the fake fleet, and on EC2.

CI plays some hours; the whole day: `DOLL_DAY_HOURS=24 pytest tests/integration/test_provision_day.py -s`.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pytest
from doll.provisioner.billing import EC2_LINUX
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import EndReason, Fleet, Instance, InstanceState
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.prices.ec2 import Ec2Prices, OnDemandPrices
from doll.provisioner.prices.port import PriceFeed, StatedPrices
from doll.provisioner.prices.shipped import OnDemandPrice
from fake_fleet import FakeFleet, VirtualClock
from job_world import ON_DEMAND, SPOT, JobWorld, run, settings
from memory_state_store import MemoryStateStore

HOURS = float(os.environ.get("DOLL_DAY_HOURS", "2"))
SLOTS, RATE, GROUP, BATCH = 64, 125.0, 20, 256
# moto takes half a second of processor time to list 64 machines, so EC2 is asked less often than it would be in life.
STEP_S, EC2_STEP_S = 60.0, 300.0
ALPHA, CYCLE_S = 0.9, 36_000.0
BUSY = 0.9  # share of the deadline that the work takes with all workers up


class Stage(Protocol):
    """A fleet with its owner."""

    @property
    def fleet(self) -> Fleet: ...

    @property
    def prices(self) -> PriceFeed: ...

    def alive(self) -> list[Instance]: ...

    def all_instances(self) -> list[Instance]: ...

    def interrupt(self, id_: str) -> None: ...

    def dry(self, rng: random.Random) -> None:
        """A pool runs dry on spot, or is filled again."""

    def launches(self) -> list[tuple[int, int, str, int]]:
        """Slot, incarnation, market and attempt of each call that asked for a machine."""


class FakeStage:
    def __init__(self, clock: VirtualClock) -> None:
        self.fleet = self._fake = FakeFleet(clock, boot_s=30.0, ending_s=30.0, keep_ended_s=7200.0)
        self.prices = StatedPrices(SPOT, ON_DEMAND)
        self.alive, self.all_instances = self._fake.alive, self._fake.all_instances

    def interrupt(self, id_: str) -> None:
        self._fake.interrupt(id_, 120.0)

    def dry(self, rng: random.Random) -> None:
        self._fake.set_capacity(rng.choice(self._fake.pools), "spot", rng.choice([0, None]))

    def launches(self) -> list[tuple[int, int, str, int]]:
        orders = [call.order for call in self._fake.calls if call.order is not None]
        return [(order.slot, order.incarnation, order.market, order.attempt) for order in orders]


class Ec2Stage:
    """The EC2 adapters on moto with a market (tests/support/moto_overlay.py)."""

    def __init__(self, rig: Any) -> None:
        from moto_overlay import REGION

        self._rig, self._market = rig, rig.market
        start_s = rig.clock()
        for number, type_ in enumerate(rig.types):
            for zone in "ab":
                self._market.prices[type_, REGION + zone] = [(start_s - 3600, SPOT + 0.001 * number)]
        self.fleet = rig.make(page_size=1000)
        self.prices = Ec2Prices(
            rig.ec2, _OnDemand(None, REGION), instance_types=rig.types, zones=[REGION + "a", REGION + "b"],
            lacks_capacity=self.fleet.cache.lacks_capacity, clock=rig.clock,
        )  # fmt: skip
        self._seen: dict[str, Instance] = {}

    def all_instances(self) -> list[Instance]:
        """What the adapter has learned, which it has from EC2 alone."""
        for known in self.fleet._known.values():
            self._seen[known.instance.id] = known.instance
        return list(self._seen.values())

    def alive(self) -> list[Instance]:
        from moto_overlay import _backend

        self._market.apply_due_events()
        states = {
            instance.id: instance._state.name
            for group in _backend().reservations.values()
            for instance in group.instances
        }
        running = {"pending": InstanceState.PENDING, "running": InstanceState.RUNNING}
        instances = [instance for instance in self.all_instances() if states.get(instance.id) in running]
        return [replace(instance, state=running[states[instance.id]]) for instance in instances]

    def interrupt(self, id_: str) -> None:
        self._market.interrupt(id_)

    def dry(self, rng: random.Random) -> None:
        from moto_overlay import REGION

        pool = (rng.choice(self._rig.types), REGION + rng.choice("ab"))
        if rng.random() < 0.5:
            self._market.capacity[pool, "spot"] = 0
        else:
            self._market.capacity.pop((pool, "spot"), None)

    def launches(self) -> list[tuple[int, int, str, int]]:
        orders = []
        for request in self._market.requests:
            tags = {tag["Key"]: tag["Value"] for tag in request["TagSpecifications"][0]["Tags"]}
            attempt = int(request["ClientToken"].rsplit("-a", 1)[1].split("z")[0])
            orders.append((int(tags["doll:worker"]), int(tags["doll:incarnation"]), tags["doll:market"], attempt))
        return orders


class _OnDemand(OnDemandPrices):
    """moto has no price list."""

    def of(self, instance_type: str) -> OnDemandPrice:
        return OnDemandPrice(ON_DEMAND, "test", "2026-11-01")


@dataclass
class Day:
    """What is left of it."""

    decisions: Sequence[Decision]
    world: JobWorld
    state_store: MemoryStateStore
    seconds: float

    def text(self, name: str) -> str:
        last = self.decisions[-1]
        return (
            f"{name}: {last.elapsed_s / 3600:.1f} h in {self.seconds:.1f} s of processor, {len(self.decisions)} turns, "
            f"{last.bill.instances} instances, {last.interruptions} interruptions, {last.moves} moves, "
            f"{last.bill.usd:.2f} USD of {last.all_on_demand_usd:.2f} on-demand "
            f"({last.bill.usd / last.all_on_demand_usd:.1%})"
        )


def play(stage: Stage, clock: VirtualClock, hours: float, *, step_s: float = STEP_S, seed: int = 7) -> Day:
    deadline_s = hours * 3600
    job = settings(
        SLOTS, updates=BUSY * deadline_s * SLOTS * RATE / (GROUP * BATCH), group_size=GROUP, batch_size=BATCH,
        rate_per_s=RATE, deadline_s=deadline_s, replan_s=step_s, boot_s=90.0, cycle_s=CYCLE_S,
        limits=LaunchLimits(launches_per_min=240), heartbeat_timeout_s=2.5 * step_s,
    )  # fmt: skip
    world, state_store, rng = JobWorld(clock, stage, job, join_s=30.0), MemoryStateStore(), random.Random(seed)
    controller = Controller(job, stage.fleet, stage.prices, EC2_LINUX, state_store)

    def market() -> None:
        for instance in stage.alive():
            if instance.market == "spot" and instance.notice_s is None and rng.random() < step_s / (ALPHA * CYCLE_S):
                stage.interrupt(instance.id)
        if rng.random() < step_s / 600:
            stage.dry(rng)

    begun_s = time.process_time()
    decisions = run(world, controller, clock.advance, clock, until_s=2 * deadline_s, step_s=step_s, each=market)
    return Day(decisions, world, state_store, time.process_time() - begun_s)


def check(day: Day, stage: Stage) -> None:
    """The deadline holds, nothing is left, every launch is in the journal, and the bill is that of all machines."""
    last, journal = day.decisions[-1], day.state_store.journal
    assert (last.phase, last.finished) == ("done", True)
    assert day.world.finished_s is not None
    assert day.world.finished_s - last.started_s <= HOURS * 3600
    assert day.world.most_per_slot <= 2
    assert stage.alive() == []
    noted = [
        (entry["slot"], entry["incarnation"], entry["market"], entry["attempt"])
        for entry in journal
        if entry["kind"] == "order"
    ]
    asked = stage.launches()
    assert set(asked) <= set(noted), "every call is accounted for"
    machines = stage.all_instances()
    assert len(machines) == last.bill.instances == len([entry for entry in journal if entry["kind"] == "launched"])
    assert len({(machine.slot, machine.incarnation) for machine in machines}) == len(machines)
    if HOURS >= 8:  # the guard of a short job, asked every few minutes, leaves little to spot
        assert last.bill.usd < 0.9 * last.all_on_demand_usd
    for machine in machines:
        assert machine.end_reason in (EndReason.INTERRUPTED, EndReason.TERMINATED)
        assert machine.notice_s is None or machine.end_reason is EndReason.INTERRUPTED, (
            "what has its notice is left to its owner"
        )


def test_on_the_fake_fleet() -> None:
    clock = VirtualClock()
    stage = FakeStage(clock)
    day = play(stage, clock, HOURS)
    sys.stdout.write(f"\n{day.text('fake fleet')}\n")
    check(day, stage)
    spot = sum(
        (instance.ended_s or 0) - instance.launched_s
        for instance in stage.all_instances()
        if _costs(instance) and instance.market == "spot"
    )
    demand = sum(
        (instance.ended_s or 0) - instance.launched_s for instance in stage.all_instances() if instance.market != "spot"
    )
    assert day.decisions[-1].bill.usd == pytest.approx((spot * SPOT + demand * ON_DEMAND) / 3600, rel=1e-3)


def _costs(instance: Instance) -> bool:
    """EC2's first hour is free where it was interrupted."""
    return instance.end_reason is not EndReason.INTERRUPTED or (instance.ended_s or 0) - instance.launched_s >= 3600


def test_on_ec2() -> None:
    import fleet_rigs

    with fleet_rigs.ec2() as rig:
        assert isinstance(rig, fleet_rigs.Ec2Rig)
        stage = Ec2Stage(rig)
        day = play(stage, rig.clock, HOURS, step_s=EC2_STEP_S)
        sys.stdout.write(f"\n{day.text('EC2 on moto')}, {len(rig.market.requests)} CreateFleet calls\n")
        check(day, stage)
