"""The state of a job that its provisioner keeps from one turn to the next, and over restarts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from doll import telemetry
from doll.provisioner.billing import BillingAccount, BillingRule
from doll.provisioner.decision import Phase
from doll.provisioner.fleets.port import Instance, SpotProbe
from doll.provisioner.health import JobHealth
from doll.provisioner.instances import InstanceTracker
from doll.provisioner.kept_state import KeptState
from doll.provisioner.launch_state import LaunchState
from doll.provisioner.market_plan import MarketPlan
from doll.provisioner.observation import Observed
from doll.provisioner.planning.pauses import MAX_HOURS
from doll.provisioner.prices.port import PriceFeed
from doll.provisioner.settings import ControllerSettings
from doll.theory.cost import Prices

log = telemetry.get_logger(__name__)

_VERSION = 3


class JobClock(KeptState):
    """The clock of one run of a job.

    Attributes:
        started_s: start of the clock in Unix seconds. None before the first turn.
        generation: generation of the job's run on its topics.
        begun_s: Unix time of the start of this run. Instances that ended before belong to an earlier run.
    """

    KEPT: ClassVar = {"started_s": float, "generation": int, "begun_s": float}

    def __init__(self) -> None:
        self.started_s: float | None = None
        self.generation = 0
        self.begun_s = -math.inf
        self.ignores_earlier_runs = False  # the stored state belongs to another run; the next turn starts a new run

    def begin_run(self, observed: Observed, now_s: float) -> bool:
        """Record the job's generation. Returns whether a new generation has begun after a run with saved state; the
        bill of that run must then be cleared."""
        if self.ignores_earlier_runs:
            self.ignores_earlier_runs, self.begun_s = False, now_s
            self.started_s = now_s if self.started_s is None else self.started_s
        if observed.generation <= self.generation:
            return False
        self.generation, began_s = observed.generation, observed.generation_s
        self.begun_s = began_s if 0 < began_s <= now_s else now_s
        if self.started_s is None:
            return False
        self.started_s = self.begun_s
        return True

    def start(self, observed: Observed, listed: Sequence[Instance], now_s: float) -> None:
        """Start the clock if there is no saved state: at the start in the newest published decision, otherwise at the
        first launch of this run, otherwise now."""
        launched_s = [
            instance.launched_s
            for instance in listed
            if instance.is_alive or (instance.ended_s or now_s) > self.begun_s
        ]
        self.started_s = max(min([now_s, *launched_s]), min(now_s, self.begun_s))
        announced = observed.last_decision
        # Records may be wrong: a start in the future is ignored.
        if announced is not None and 0 < announced.started_s <= now_s:
            self.started_s = announced.started_s


class Pause(KeptState):
    """Whether a job pauses, and the prices from which this is decided.

    Attributes:
        why: reason of the pause; "": the job runs. A successor continues the pause, so a restart between the decision
            and its execution changes nothing.
        usd_per_h: spot price of a worker in each recorded hour, the newest last; `hour`: number of the newest one.
    """

    KEPT: ClassVar = {"why": str, "usd_per_h": list[float], "hour": int}

    def __init__(self) -> None:
        self.why = ""
        self.usd_per_h: list[float] = []
        self.hour = 0

    def record_price(self, usd_per_h: float, now_s: float) -> None:
        """Record the price once per hour."""
        if (hour := int(now_s // 3600)) > self.hour:
            self.hour = hour
            self.usd_per_h = [*self.usd_per_h, usd_per_h][-MAX_HOURS:]


class JobState(KeptState):
    """All that a provisioner remembers of its job after a turn. A successor continues with the saved values (`KEPT`).

    Args:
        name, topics_id: `job` and `topics_id` of `Controller`.

    Attributes:
        observed: knowledge from the job's records so far.
        positions: positions of the caller in the topics that it reads.
        prices: last known prices of a worker with all of its machines; None: not known.
        spent_budget_usd: the budget that is spent; None: no budget is spent.
        decision: last decision, for readers without access to this machine's journal.
    """

    KEPT: ClassVar = {
        "turn": int, "prices": Prices, "spent_budget_usd": float, "launch_state": KeptState, "observed": KeptState,
        "plan": KeptState, "instances": KeptState, "billing": KeptState, "clock": KeptState, "health": KeptState,
        "pause": KeptState, "positions": dict[str, int],
    }  # fmt: skip
    LATER: ClassVar = ("health", "pause")

    def __init__(
        self, settings: ControllerSettings, billing: BillingRule, prices: PriceFeed, probe: SpotProbe | None = None,
        *, dry_run: bool = False, name: str = "", topics_id: str = "",
    ) -> None:  # fmt: skip
        self.settings, self.dry_run, self.name, self.topics_id = settings, dry_run, name, topics_id
        self.observed = Observed(
            settings.rates_per_s, samples_per_record=settings.samples_per_record, prior_alpha=settings.prior_alpha,
            prior_cycle_s=settings.planner.cycle_s, heartbeat_timeout_s=settings.heartbeat_timeout_s,
            keeps_losses=settings.scale_in is not None,
        )  # fmt: skip
        self.positions: dict[str, int] = {}
        self.launch_state = LaunchState(settings.num_slots, settings.limits, settings.machines_per_worker)
        self.plan = MarketPlan(settings, billing, probe, dry_run=dry_run)
        self.instances = InstanceTracker(settings.num_slots)
        self.billing = BillingAccount(billing, prices.series)
        self.clock = JobClock()
        self.health = JobHealth()
        self.pause = Pause()
        self.turn = 0
        self.prices: Prices | None = None
        self.spent_budget_usd: float | None = None
        self.decision: dict[str, Any] | None = None

    def phase(self, *, draining: bool) -> tuple[Phase, str]:
        """Return the phase of the job before a plan is made, and the reason why no machine is wanted, or ""."""
        failed, idle, budget_usd = self.health.failed, self.health.idle, self.plan.planner.budget_usd
        is_spent = budget_usd is not None and budget_usd == self.spent_budget_usd
        phases: tuple[tuple[Phase, bool, str], ...] = (  # the first true one counts
            ("drain", draining, "every instance is ended"),
            ("done", self.observed.finished is not None, f"the job has ended: {self.observed.finished}"),
            ("failed", bool(failed), f"the job is stopped: {failed}"),
            ("budget", is_spent, f"the budget of {budget_usd} USD is spent"),
            ("idle", bool(idle), f"no sample has come since {idle}"),
            ("paused", bool(self.pause.why), self.pause.why),
        )
        return next(((phase, why) for phase, holds, why in phases if holds), ("run", ""))

    def to_dict(self) -> dict[str, Any]:
        names = {"state": _VERSION, "job": self.name, "topics_id": self.topics_id}
        return {**names, **super().to_dict(), "decision": self.decision}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Restore the saved state, unless it belongs to another run: of another job, or of topics that were deleted."""
        if kept["state"] != _VERSION:
            raise ValueError(f"expected state version {_VERSION}, got {kept['state']!r}")
        job, topics_id = str(kept["job"]), str(kept["topics_id"])
        if any(was and now and was != now for was, now in ((job, self.name), (topics_id, self.topics_id))):
            log.warning("provision_state_of_another_run", job=job, topics_id=topics_id, action="starting over")
            self.clock.ignores_earlier_runs = True
            return
        # A drain does not know the topics, so their values in the state are kept.
        self.name, self.topics_id = self.name or job, self.topics_id or topics_id
        super().restore(kept)
        self.decision = kept.get("decision")  # earlier releases had none
