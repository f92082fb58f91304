"""The wanted market of each slot, with the reason, and the planner's input from job and fleet."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from doll.provisioner.billing import Bill, BillingRule
from doll.provisioner.decision import Phase
from doll.provisioner.fleets.port import Instance, SpotProbe
from doll.provisioner.kept_state import KeptState, plain
from doll.provisioner.launch_state import LaunchState
from doll.provisioner.observation import Observed
from doll.provisioner.planning import planner
from doll.provisioner.planning.estimators import re_estimated
from doll.provisioner.planning.pauses import before_excluded_hours
from doll.provisioner.planning.state import Bools, Market, PlannerSettings, PlannerState, SlotHistory
from doll.provisioner.scale_in import ScaleIn, SlotChange, sharing
from doll.provisioner.settings import ControllerSettings
from doll.theory.cost import SECONDS_PER_HOUR, Prices, unequal_cost_usd

_RESERVE_TURNS = 3  # a running machine continues for some turns whatever is decided


@dataclass(frozen=True)
class BudgetFit:
    """A choice of markets within the budget: bool of shape (N,), True for spot. `short` states that the budget is not
    enough even for the cheapest choice."""

    on_spot: Bools
    expected_cost_usd: float
    expected_finish_s: float
    short: bool


def fit_to_budget(
    on_spot: Bools, state: PlannerState, planner: PlannerSettings, *, reserve_usd: float
) -> BudgetFit | None:
    """Return the choice `on_spot` with as many more slots on spot as the budget requires; None if it requires no more.
    If every choice exceeds the budget, return the cheapest one; the work then continues until the budget is spent.
    `reserve_usd` is kept unspent for each machine."""
    work = planner.samples - state.samples_done
    if planner.budget_usd is None or work <= 0:
        return None
    rates, alpha, prices = state.rates_per_s, max(state.alpha.point, 1e-3), state.prices
    # While a slot moves, two machines are paid. Without this cost, plans alternate at the limit of the budget.
    moves = np.maximum(0, np.count_nonzero(state.on_spot) - np.arange(len(rates) + 1))
    twice_usd = moves * prices.on_demand_usd_per_h * 2 * planner.boot_s / SECONDS_PER_HOUR
    costs = state.spent_usd + unequal_cost_usd(work, rates, alpha, prices) + twice_usd
    enough = np.flatnonzero(costs <= planner.budget_usd - len(rates) * reserve_usd)
    fewest = int(enough[0]) if enough.size else int(np.argmin(costs))
    missing = fewest - int(np.count_nonzero(on_spot))
    if missing <= 0 and enough.size:
        return None
    order = [slot for slot in np.argsort(rates, kind="stable").tolist() if not on_spot[slot]]
    # Slots that are on spot now stay there first.
    order.sort(key=lambda slot: not state.on_spot[slot])
    chosen = on_spot.copy()
    chosen[order[: max(0, missing)]] = True
    rate = float(rates[~chosen].sum() + alpha * rates[chosen].sum())
    return BudgetFit(chosen, float(costs[fewest]), state.elapsed_s + work / rate, short=not enough.size)


_RE_ESTIMATE_EVERY = 3  # evaluations


@dataclass(frozen=True)
class DesiredState:
    """The wanted fleet. `Decision` describes the attributes. `urgent`: the deadline is in danger."""

    phase: Phase
    markets: tuple[Market | None, ...]
    reasons: tuple[str, ...]
    binding: str
    feasible: bool
    expected_cost_usd: float
    expected_finish_s: float
    slack_s: float
    urgent: bool
    state: PlannerState
    cost_sd_usd: float = math.nan
    finish_sd_s: float = math.nan

    @classmethod
    def of_no_machines(cls, phase: Phase, why: str, state: PlannerState) -> DesiredState:
        """Return the state in which no slot has a machine."""
        count = state.num_workers
        return cls(
            phase=phase, markets=(None,) * count, reasons=(why,) * count, binding=phase,
            feasible=phase not in ("budget", "failed"), expected_cost_usd=state.spent_usd,
            expected_finish_s=state.elapsed_s, slack_s=0.0, urgent=False, state=state,
        )  # fmt: skip


class MarketPlan(KeptState):
    """The markets that were chosen last, and the history that the next choice needs.

    Attributes:
        planner: work, deadline and behaviour. The work is the newest estimate.
        moves: number of changes of a slot's market so far.
        scale_in: the slots that have no worker, independent of their market.
    """

    KEPT: ClassVar = {"moves": int, "scale_in": KeptState}
    LATER: ClassVar = ("scale_in",)

    def __init__(
        self, settings: ControllerSettings, billing: BillingRule, probe: SpotProbe | None, *, dry_run: bool
    ) -> None:
        self.planner = settings.planner
        self.moves = 0
        self.scale_in = ScaleIn(settings.scale_in, settings.num_slots)
        self._settings = settings
        self._billing = billing
        self._probe = probe
        self._dry_run = dry_run
        self._history = SlotHistory((settings.num_slots,))
        self._on_spot: Bools | None = None  # None: nothing was planned yet
        self._evaluations = 0

    @property
    def markets(self) -> tuple[Market | None, ...]:
        """The last choice; None for each slot before the first choice."""
        if self._on_spot is None:
            return (None,) * self._settings.num_slots
        return _markets(self._on_spot, self.scale_in.active)

    @property
    def spot_available(self) -> Bools:
        """The last observation of whether spot has a machine for each slot, shape (N,)."""
        return self._history.spot_available

    def retarget(self, settings: ControllerSettings) -> None:
        """Use another work, deadline, budget or behaviour."""
        self._settings, self.planner, self._evaluations = settings, settings.planner, 0
        self.scale_in.retarget(settings.scale_in)

    def begin_generation(self) -> None:
        """Start again for a new generation of the job, without chosen markets and moves."""
        self.retarget(self._settings)
        self.scale_in.clear()
        self._on_spot = None
        self.moves = 0

    def planned(self, observed: Observed) -> PlannerSettings:
        """Return the planner's settings. The boot time is the planned time or the 90th percentile of the observed
        boots, whichever is longer."""
        return replace(self.planner, boot_s=max(self.planner.boot_s, observed.boots.slow_s))

    def reserve_usd(self, prices: Prices) -> float:
        """Return the USD that are kept unspent for each machine, for some turns at the higher price."""
        seconds = max(_RESERVE_TURNS * self.planner.replan_s, self._billing.billed_s(0.0))
        return max(prices.spot_usd_per_h, prices.on_demand_usd_per_h) * seconds / SECONDS_PER_HOUR

    def samples_done(self, observed: Observed) -> float:
        """Return the number of samples in the model."""
        return float(observed.batches_done * self.planner.batch_size)

    def re_estimate(self, observed: Observed) -> None:
        """Estimate the work again from the job's held-out errors, if the job has an error target."""
        settings = self._settings
        if settings.target_error is None:
            return
        versions, errors = observed.errors(settings.measure)
        if len(versions) < self._evaluations + _RE_ESTIMATE_EVERY:
            return
        samples_per_update = self.planner.samples_per_update
        if samples_per_update is None:
            samples_per_update = observed.batches_per_update * self.planner.batch_size
        if math.isnan(samples_per_update):
            return
        self._evaluations = len(versions)
        rng = np.random.default_rng(len(versions))
        samples = np.asarray(versions) * samples_per_update
        self.planner = re_estimated(
            self.planner, samples, errors, settings.target_error, rng,
            changed_at=observed.drifted_version * samples_per_update,
        )  # fmt: skip

    def observe_spot(
        self, observed: Observed, instances: Sequence[Instance], ready: Collection[str], pools: Sequence[str],
        now_s: float, *, counts: Bools,
    ) -> None:  # fmt: skip
        """Report to the estimator which slots on spot work; boots count as down. `counts` has the slots whose state is
        evidence of spot's availability, shape (N,)."""
        if self._on_spot is None or self._dry_run:
            return
        up = np.zeros(self._settings.num_slots, dtype=np.bool_)
        for instance in instances:
            if instance.market == "spot" and instance.notice_s is None and instance.id in ready:
                up[instance.slot] = True
        observed.spot.observe(now_s, up, self._on_spot & self.scale_in.active & counts, pools)

    def state(
        self, observed: Observed, instances: Sequence[Instance], ready: Collection[str], launch_state: LaunchState,
        *, bill: Bill, prices: Prices, now_s: float, started_s: float,
    ) -> PlannerState:  # fmt: skip
        """Return the planner's input: the current state of the job."""
        count = self._settings.num_slots
        on_spot, up = np.ones(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
        newest = np.zeros(count, dtype=np.int64)
        running = np.zeros(count, dtype=np.bool_)  # a spot machine runs or boots, and has no notice
        for instance in instances:
            slot = instance.slot
            if not instance.is_alive or not 0 <= slot < count:
                continue
            up[slot] |= instance.id in ready
            running[slot] |= instance.market == "spot" and instance.notice_s is None
            if instance.incarnation >= newest[slot]:
                newest[slot], on_spot[slot] = instance.incarnation, instance.market == "spot"
        if self._on_spot is not None:
            on_spot = self._on_spot.copy()
        history = copy.deepcopy(self._history) if self._dry_run else self._history
        history.observe(self._spot_available(on_spot, running, launch_state, now_s), now_s)
        return PlannerState(
            elapsed_s=max(0.0, now_s - started_s), samples_done=self.samples_done(observed),
            rates_per_s=observed.rates_per_s(), on_spot=on_spot, up=up, alpha=observed.spot.alpha(), prices=prices,
            spent_usd=bill.usd, **history.since(started_s),
        )  # fmt: skip

    def _spot_available(self, on_spot: Bools, running: Bools, launch_state: LaunchState, now_s: float) -> Bools:
        """Return whether spot has a machine for each slot, shape (N,)."""
        limits = self._settings.limits
        has_quota = now_s >= launch_state.quota_s("spot")
        available = self._history.spot_available.copy()
        for slot in range(self._settings.num_slots):
            blocked = now_s < launch_state.blocked_s(slot, "spot")
            probed = self._probe(slot) if self._probe is not None and not running[slot] else None
            if running[slot]:
                available[slot] = True
            elif probed is not None:
                available[slot] = has_quota and probed
            elif on_spot[slot]:
                # After an interruption the next launch shows it; a launch without a machine counts until one succeeds.
                available[slot] = has_quota and not blocked and not launch_state.slots[slot].no_capacity
            else:
                quiet_s = max(limits.pool_backoff_s, limits.retry_s)
                no_spot_s = max(launch_state.slots[slot].no_spot_s, launch_state.no_capacity_s)
                available[slot] = has_quota and not blocked and now_s - no_spot_s >= quiet_s
        return available

    def review_workers(
        self, state: PlannerState, observed: Observed, instances: Sequence[Instance], now_s: float
    ) -> list[SlotChange]:
        """Release or recall slots if the job uses scale-in; never in a dry run."""
        if self._dry_run:
            return []
        noticed = {instance.slot for instance in instances if instance.is_alive and instance.notice_s is not None}
        planned = before_excluded_hours(state, self.planned(observed), self._settings.pauses, now_s)
        changes = self.scale_in.review(state, planned, observed, noticed, now_s)
        recalled = np.zeros(self._settings.num_slots, dtype=np.bool_)
        recalled[[change.slot for change in changes if change.kind == "recall"]] = True
        self._history.move(recalled, now_s)  # a boot begins
        observed.released = self.scale_in.released.copy()
        return changes

    def resume(self, now_s: float) -> None:
        """Record that all slots get a machine again after a time without machines. Their boots begin now."""
        self._history.move(np.ones(self._settings.num_slots, dtype=np.bool_), now_s)

    def choose(
        self, state: PlannerState, observed: Observed, *, fleet_is_empty: bool, now_s: float, hold: str = ""
    ) -> DesiredState:
        """Choose the markets of all slots with the planner, within the budget. The choice is remembered unless this is
        a dry run. While `hold` is not "", no slot moves from spot to on-demand, and a slot whose source has paused
        never does."""
        active, pauses = self.scale_in.active, self._settings.pauses
        settings = before_excluded_hours(state, self.planned(observed), pauses, now_s)
        first = self._on_spot is None and fleet_is_empty
        working = sharing(
            state, active, observed.capacity_per_s(settings.batch_size), observed.without_partition()
        )  # fmt: skip
        plan = (planner.start if first else planner.plan)(working, settings)
        chosen, reasons, binding, feasible = plan.on_spot, list(plan.reasons), plan.binding, plan.feasible
        expected_usd, finish_s = plan.forecast.expected_cost_usd, plan.forecast.expected_finish_s
        cost_sd_usd, finish_sd_s = plan.forecast.cost_sd_usd, plan.forecast.finish_sd_s
        if not first:
            held = working.on_spot & ~chosen & (observed.paused()[active] | bool(hold))
            chosen = chosen | held
            for slot in np.flatnonzero(held):
                reasons[slot] = f"stays on spot: {hold or 'its source sends nothing'}, which on-demand does not cure"
        fit = fit_to_budget(chosen, working, settings, reserve_usd=self.reserve_usd(state.prices))
        if fit is not None:
            forced = fit.on_spot & ~chosen
            chosen, expected_usd, finish_s = fit.on_spot, fit.expected_cost_usd, fit.expected_finish_s
            cost_sd_usd = finish_sd_s = math.nan
            binding = "budget"
            feasible = feasible and not fit.short and finish_s <= settings.deadline_s
            for slot in np.flatnonzero(forced):
                reasons[slot] = "spot: on-demand would exceed the budget"
        on_spot = state.on_spot.copy()
        on_spot[active] = chosen
        of_active = iter(reasons)
        reasons = [next(of_active) if works else self.scale_in.why(slot) for slot, works in enumerate(active.tolist())]
        if not self._dry_run:
            moved = np.zeros_like(on_spot) if first else on_spot != state.on_spot
            self.moves += int(np.count_nonzero(moved))
            self._history.move(np.ones_like(on_spot) if first else moved, now_s)
            self._on_spot = on_spot.copy()
        return DesiredState(
            phase="run", markets=_markets(on_spot, active), reasons=tuple(reasons), binding=binding, feasible=feasible,
            expected_cost_usd=expected_usd, expected_finish_s=finish_s, slack_s=plan.slack_s,
            urgent=binding in ("guard", "late"), state=state, cost_sd_usd=cost_sd_usd, finish_sd_s=finish_sd_s,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        asked = self._settings.planner.samples
        work = {"asked": asked, "samples": self.planner.samples, "evaluations": self._evaluations}
        return {"on_spot": plain(self._on_spot), "work": work, **self._history.to_dict(), **super().to_dict()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Restore the saved state. The estimated work is kept only if the planned work of the job has not changed."""
        super().restore(kept)
        self._history.restore(kept)
        if kept["on_spot"] is not None:
            self._on_spot = np.array(kept["on_spot"], dtype=np.bool_)
            if self._on_spot.shape != (self._settings.num_slots,):
                raise ValueError(f"expected {self._settings.num_slots} slots, got {self._on_spot.size}")
        if kept["work"]["asked"] == self._settings.planner.samples:
            self.planner = replace(self.planner, samples=float(kept["work"]["samples"]))
            self._evaluations = int(kept["work"]["evaluations"])


def _markets(on_spot: Bools, active: Bools) -> tuple[Market | None, ...]:
    return tuple(
        None if not works else "spot" if spot else "on_demand" for spot, works in zip(on_spot, active, strict=True)
    )
