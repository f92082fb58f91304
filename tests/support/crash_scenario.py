"""One job of a controller that is killed between any two side effects, in a market at its worst, from one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from doll.provisioner.billing import LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import Instance, InstanceState, LaunchFailure, Order
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.settings import ControllerSettings
from fake_fleet import FakeFleet, VirtualClock
from job_world import FlatPrices, JobWorld, settings
from memory_state_store import MemoryStateStore

STEP_S = 10.0
LAG_S = 25.0
DEADLINE_S = 500.0  # 250 s of work


class Crash(BaseException):
    """The controller's process is gone."""


class Fuse:
    """Counts side effects and blows at the chosen one, before it or after it."""

    def __init__(self) -> None:
        self.left = -1
        self.after = False

    def light(self, effects: int, *, after: bool) -> None:
        self.left, self.after = effects, after

    def burn(self, effect: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Crash
        result = effect()
        if self.left == 0 and self.after:
            raise Crash
        return result


class FusedFleet:
    """A fleet whose caller may die at each call, and must not end what works or has its notice.

    Its owner's listing lags behind: what this handle has not launched itself shows up after `LAG_S`.
    """

    def __init__(self, fleet: FakeFleet, fuse: Fuse, scenario: CrashScenario) -> None:
        self._fleet, self._fuse, self._scenario = fleet, fuse, scenario
        self._launched: set[str] = set()

    def launch(self, order: Order) -> Instance:
        made: Instance = self._fuse.burn(lambda: self._fleet.launch(order))
        self._launched.add(made.id)
        return made

    def instances(self) -> Sequence[Instance]:
        now_s = self._scenario.clock()
        return [
            instance
            for instance in self._fleet.instances()
            if instance.id in self._launched or now_s - instance.launched_s >= LAG_S
        ]

    def terminate(self, ids: Collection[str]) -> None:
        for instance in self._fleet.alive():
            if instance.id in ids:
                assert instance.notice_s is None, "what has its notice is left to its owner"
                unneeded = self._scenario.ending or self._scenario.has_released(instance.slot)
                assert unneeded or not self._scenario.world.works(instance), "broken before the next was made"
        self._fuse.burn(lambda: self._fleet.terminate(ids))

    def close(self) -> None:
        pass


class FusedStateStore(MemoryStateStore):
    """A state_store whose writer may die at each writing."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self._fuse = fuse

    def save(self, kept: Mapping[str, Any]) -> None:
        self._fuse.burn(lambda: MemoryStateStore.save(self, kept))

    def append(self, entry: Mapping[str, Any]) -> None:
        self._fuse.burn(lambda: MemoryStateStore.append(self, entry))


class CrashScenario:
    """One job from its start to its drain, with crashes and a market, all from one seed.

    Args:
        crashes: how many times the controller dies.
        wild: the market interrupts, dries up, throttles and loses answers.
        forget: the state_store is lost at a crash now and then.
    """

    def __init__(
        self, seed: int, *, crashes: int, wild: bool = True, forget: bool = False, job: ControllerSettings | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.fleet = FakeFleet(self.clock, boot_s=20.0, ending_s=5.0)
        self.job = job or settings(deadline_s=DEADLINE_S, limits=LaunchLimits(pool_backoff_s=30.0, early_s=20.0))
        self.world = JobWorld(self.clock, self.fleet, self.job)
        self.fuse = Fuse()
        self.state_store = FusedStateStore(self.fuse)
        self.crashes_left = crashes
        self.crashes = 0
        self.decisions: list[Decision] = []
        self._wild, self._forget = wild, forget
        self.draining = False
        self.controller = self._start()

    def _start(self) -> Controller:
        return Controller(self.job, FusedFleet(self.fleet, self.fuse, self), FlatPrices(), LOCAL, self.state_store)

    @property
    def ending(self) -> bool:
        """The job has ended, or is drained."""
        return self.draining or self.world.finished_s is not None

    def has_released(self, slot: int) -> bool:
        """By the journal, which is written before anything is done about it."""
        kinds = [entry["kind"] for entry in self.state_store.journal if entry.get("slot") == slot]
        changes = [kind for kind in kinds if kind in ("release", "recall")]
        return changes[-1:] == ["release"]

    def turn(self, *, draining: bool = False) -> Decision:
        """One turn, by as many controllers as it takes."""
        self.draining = draining
        if self.crashes_left and self.rng.random() < 0.5:
            self.fuse.light(self.rng.randint(1, 12), after=self.rng.random() < 0.5)
        while True:
            try:
                self.world.tell(self.controller)
                decision = self.controller.turn(self.clock(), draining=draining)
                self.decisions.append(decision)
                self.fuse.left = -1
                return decision
            except Crash:
                self.crashes += 1
                self.crashes_left -= 1
                self.fuse.left = -1
                if self._forget and self.rng.random() < 0.5:
                    journal, self.state_store = self.state_store.journal, FusedStateStore(self.fuse)
                    self.state_store.journal = journal
                self.controller = self._start()

    def market(self) -> None:
        """What the owner of the machines does to us."""
        rng, fleet = self.rng, self.fleet
        for instance in fleet.alive():
            if instance.market == "spot" and instance.notice_s is None and rng.random() < 0.04:
                fleet.interrupt(instance.id, rng.choice([0.0, 30.0]))
            elif rng.random() < 0.002:
                fleet.fail_instance(instance.id)
        for pool in ("c5.xlarge/zone-a", "m5.xlarge/zone-a", "c5.xlarge/zone-b", "m5.xlarge/zone-b"):
            if rng.random() < 0.1:
                fleet.set_capacity(pool, "spot", rng.choice([0, 0, 1, None]))
        if rng.random() < 0.05:
            fleet.lose_next_response()
        if rng.random() < 0.05:
            fleet.fail_next(
                "launch", rng.choice([LaunchFailure.THROTTLED, LaunchFailure.CAPACITY, LaunchFailure.SPOT_QUOTA])
            )
        if rng.random() < 0.03:
            fleet.become_unavailable()

    def play(self, turns: int = 200) -> None:
        """To the end of the job."""
        self.world.pass_time(0.0)
        for _ in range(turns):
            if self.turn().finished:
                return
            self.clock.advance(STEP_S)
            if self._wild:
                self.market()
            self.world.pass_time(STEP_S)

    def drain(self, turns: int = 40) -> None:
        for _ in range(turns):
            if self.turn(draining=True).finished:
                return
            self.clock.advance(STEP_S)
            self.world.pass_time(STEP_S)

    def check(self) -> None:
        """What must hold of every scenario."""
        fleet, journal = self.fleet, self.state_store.journal
        assert [instance for instance in fleet.all_instances() if instance.state is not InstanceState.ENDED] == [], (
            "no orphans"
        )
        assert self.world.most_per_slot <= 2, "never more than make-before-break"
        noted = {
            (entry["slot"], entry["incarnation"], entry["market"], entry["attempt"])
            for entry in journal
            if entry["kind"] == "order"
        }
        for call in fleet.calls:
            if call.order is not None:
                order = call.order
                assert (order.slot, order.incarnation, order.market, order.attempt) in noted, (
                    "each launch is in the journal"
                )
        ended = {entry["id"] for entry in journal if entry["kind"] == "end"}
        instances = fleet.all_instances()
        ended_s = {instance.id: instance.ended_s or math.inf for instance in instances}
        asked = {id_ for call in fleet.calls for id_ in call.ids if ended_s[id_] > call.at_s}
        assert asked <= ended, "and each end, but of what had ended before"
        assert len({(instance.slot, instance.incarnation) for instance in instances}) == len(instances), (
            "an incarnation is one machine"
        )
