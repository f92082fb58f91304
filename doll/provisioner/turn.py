"""A turn of the provisioner: what its reconcilers have observed and done so far, and the decision that follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from doll.provisioner.apply import ActionExecutor
from doll.provisioner.billing import Bill, all_on_demand_usd, usd_per_error_point
from doll.provisioner.decision import ActionResult, Decision, Phase
from doll.provisioner.fleets.port import Instance, InstanceState
from doll.provisioner.job_state import JobState
from doll.provisioner.market_plan import DesiredState
from doll.provisioner.planning.state import PlannerState
from doll.provisioner.reconcile import Readiness
from doll.theory.cost import Prices

OVER: Final = ("drain", "done")  # phases in which every instance is ended, whatever else is observed
_UNKNOWN_PRICES = Prices(0.0, 1.0)  # for a drain without prices, which does not plan


@dataclass
class Turn:
    """One turn. A reconciler reads what those before it have written.

    Attributes:
        phase, why: phase of the job, and the reason why no machine is wanted, or "".
        bill: the last bill, then the bill until now.
        listed: the fleet's listing; None: the fleet does not answer.
        instances: instances of the job; the actions of the turn update them.
        others: instances of other jobs that have not ended.
        desired: the wanted fleet; None before it is planned.
    """

    job: JobState
    executor: ActionExecutor
    now_s: float
    phase: Phase
    why: str
    bill: Bill
    alarms: list[str] = field(default_factory=list)
    listed: list[Instance] | None = None
    instances: list[Instance] = field(default_factory=list)
    others: list[Instance] = field(default_factory=list)
    readiness: Readiness = field(default_factory=Readiness)
    desired: DesiredState | None = None
    results: list[ActionResult] = field(default_factory=list)

    @property
    def has_machines(self) -> bool:
        """Whether an instance runs or boots."""
        return any(instance.is_alive for instance in self.instances)

    @property
    def prices(self) -> Prices:
        """The prices of a worker with all of its machines."""
        return self.job.prices or _UNKNOWN_PRICES

    def planner_state(self) -> PlannerState:
        """Return the planner's input: the current state of the job."""
        job = self.job
        assert job.clock.started_s is not None
        return job.plan.state(
            job.observed, self.instances, self.readiness.ready_s, job.launch_state, bill=self.bill,
            prices=self.prices, now_s=self.now_s, started_s=job.clock.started_s,
        )  # fmt: skip

    def decision(self) -> Decision:
        """Return the decision of this turn. Before the wanted fleet is planned, it is to do nothing."""
        job, desired = self.job, self.desired
        settings, observed, plan = job.settings, job.observed, job.plan
        rates_per_s, samples_done = observed.rates_per_s(), plan.samples_done(observed)
        on_demand_usd = math.nan
        if job.prices is not None:
            on_demand_usd = all_on_demand_usd(samples_done, rates_per_s, job.prices.on_demand_usd_per_h)
        _, errors = observed.errors(settings.measure)
        phase: Phase = "unavailable" if desired is None else self.phase
        reasons = ("as before: fleet or prices do not answer",) * settings.num_slots
        wanted: dict[str, Any] = {"markets": plan.markets, "reasons": reasons, "binding": "unavailable"}
        if desired is not None:
            wanted = {name: value for name, value in vars(desired).items() if name not in ("phase", "urgent", "state")}
        left = job.launch_state.may_have_launched(self.now_s)
        left = left or any(instance.state is not InstanceState.ENDED for instance in self.instances + self.others)
        started_s = self.now_s if job.clock.started_s is None else job.clock.started_s
        return Decision(
            **wanted, turn=job.turn, now_s=self.now_s, started_s=started_s, phase=phase,
            results=tuple(self.results), instances=tuple(self.instances), ready=frozenset(self.readiness.ready_s),
            incarnations=tuple(slot.incarnation for slot in job.launch_state.slots), bill=self.bill,
            samples_done=samples_done, target_samples=plan.planner.samples, updates_done=observed.version,
            target_updates=plan.planner.updates, all_on_demand_usd=on_demand_usd, alpha=observed.spot.alpha(),
            cycle_s=observed.spot.cycle_s, prices=job.prices, rates_per_s=rates_per_s,
            usd_per_error_point=usd_per_error_point(self.bill.usd, errors[0], errors[-1]) if errors else math.nan,
            moves=plan.moves, interruptions=job.instances.interruptions, alarms=tuple(dict.fromkeys(self.alarms)),
            dry_run=job.dry_run, machines_per_worker=settings.machines_per_worker,
            finished=phase in ("done", "drain", "budget", "failed") and not left,
        )  # fmt: skip


Reconciler = Callable[[Turn], Decision | None]
"""A function that takes one step of a turn. It returns a decision if the turn ends with this step."""
