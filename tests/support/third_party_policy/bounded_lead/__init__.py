"""No worker gets more than `lead` batches ahead of the slowest live one; every gradient is applied as it comes.

The rule is that of stale synchronous parallel (Ho et al., 2013): a worker's clock counts its finished batches, and a
batch at clock c is computed on weights that contain every live worker's batches of clocks below c - lead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal

from doll.config.policy import PolicyConfig
from doll.ps.policies.base import BatchId, Policy, PolicySpec, PolicyView
from pydantic import Field, NonNegativeInt


class BoundedLeadConfig(PolicyConfig):
    """No worker gets more than `lead` batches ahead of the slowest live one."""

    name: Literal["bounded_lead"] = "bounded_lead"
    lead: NonNegativeInt = 1
    eager: bool = Field(default=False, description="send new weights to all live workers when the slowest advances")

    def batches_per_update(self, num_workers: int) -> int:
        return 1

    def update_rate_per_s(self, rates_per_s: Sequence[float], batch_size: int) -> float:
        return len(rates_per_s) * min(rates_per_s, default=0.0) / batch_size


class BoundedLead(Policy):
    name: ClassVar[str] = "bounded_lead"
    exact_version: ClassVar[bool] = False

    def __init__(self, lead: int, *, eager: bool = False) -> None:
        self._lead = lead
        self._eager = eager
        self._clocks: dict[int, int] = {}
        self._live: set[int] = set()
        self._at_clock: Counter[int] = Counter()  # live workers at each clock
        self._slowest = 0  # clock of the slowest live worker
        self._versions = [0]  # the first version at which the slowest had reached clock k
        self._applied: dict[int, int] = {}
        self._idle: set[int] = set()
        self._advanced = False

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        for number in workers:
            worker = view.worker(number)
            clock = self._clocks.get(number, 0)
            if number in self._live:
                self._at_clock[clock] -= 1
            elif worker.is_live:
                clock = max(clock, self._slowest)  # a worker that returns must not hold the others back
            clock += worker.applied - self._applied.get(number, worker.applied)
            self._applied[number], self._clocks[number] = worker.applied, clock
            (self._live.add if worker.is_live else self._live.discard)(number)
            if worker.is_live:
                self._at_clock[clock] += 1
            (self._idle.add if worker.waiting and not worker.computing else self._idle.discard)(number)
        while self._live and not self._at_clock[self._slowest]:
            del self._at_clock[self._slowest]
            self._slowest += 1
            self._versions.append(view.version)
            self._advanced = True

    def start(self, view: PolicyView) -> Sequence[int]:
        return [number for number in sorted(self._idle) if self._clocks[number] - self._slowest <= self._lead]

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches()[:1]

    def min_version(self, view: PolicyView, worker: int) -> int:
        return self._versions[max(0, self._clocks[worker] - self._lead)]

    def recipients(self, view: PolicyView) -> Collection[int]:
        advanced, self._advanced = self._advanced, False
        return sorted(self._live) if self._eager and advanced else ()

    def state(self) -> dict[str, Any] | None:
        return {"clocks": list(self._clocks.items()), "slowest": self._slowest, "versions": self._versions.copy()}

    def restore(self, state: dict[str, Any]) -> None:
        try:
            self._clocks = {int(number): int(clock) for number, clock in state["clocks"]}
            self._slowest, self._versions = int(state["slowest"]), [int(version) for version in state["versions"]]
        except (KeyError, TypeError) as exc:
            raise ValueError(f"not a state of bounded_lead: {sorted(state)}") from exc


SPEC = PolicySpec("bounded_lead", BoundedLeadConfig, lambda config: BoundedLead(config.lead, eager=config.eager))
