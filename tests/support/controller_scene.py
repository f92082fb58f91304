"""A controller, its fake fleet and its job, in virtual time."""

from __future__ import annotations

from typing import Any

from doll.provisioner.billing import LOCAL, BillingRule
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import Instance
from doll.provisioner.prices.port import StatedPrices
from doll.provisioner.reconcile import Launch
from doll.provisioner.settings import ControllerSettings
from fake_fleet import FakeFleet, VirtualClock
from job_world import ON_DEMAND, SPOT, JobWorld, run, settings
from memory_state_store import MemoryStateStore


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
