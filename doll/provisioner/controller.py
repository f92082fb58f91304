"""The provisioner's loop, one turn at a time: observe, plan, reconcile, act. It has no clock and no thread of its own.

Order of effects of a turn: 1. look at the fleet; 2. settle the bills of what has ended; 3. note each end, then ask for
it; 4. note and save the orders; 5. make them, one by one; 6. save. After a crash between any two the next turn does the
same: what exists says the fleet (by its tags), an order that may have been made is made again word by word, which gives
the same instance, and an end may be asked for twice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from doll import records, telemetry
from doll.errors import ServiceUnavailableError
from doll.provisioner.billing import (
    LOCAL,
    MARKETS,
    Bill,
    BillingRule,
    BillLine,
    all_on_demand_usd,
    bill_lines,
    usd_per_1000_updates,
    usd_per_error_point,
)
from doll.provisioner.fleets.port import EndReason, Fleet, Instance, InstanceState, LaunchError
from doll.provisioner.observation import Observed
from doll.provisioner.planning import planner, work_estimate
from doll.provisioner.planning.planner import slot_ranges
from doll.provisioner.planning.state import Alpha, Bools, Market, PlannerSettings, PlannerState
from doll.provisioner.prices.port import PriceFeed
from doll.provisioner.reconcile import (
    FleetAction,
    FleetStatus,
    Launch,
    LaunchLimits,
    LaunchState,
    Terminate,
    Wait,
    reconcile,
)
from doll.provisioner.state_store import StateStore
from doll.theory.checks import Floats
from doll.theory.cost import SECONDS_PER_HOUR, Prices, unequal_cost_usd

log = telemetry.get_logger(__name__)

Phase = Literal["run", "done", "drain", "budget", "stopped", "unavailable"]

_MAX_PLANS_PER_TURN = 3  # a market found dry is planned around in the same turn, which may find the other one dry
_BILL_LINES_KEPT_S = 24 * 3600.0  # an ended instance is not listed any more by then
_RESERVE_TURNS = 3  # the bill of this many turns is held back: what is running cannot be ended at once
_RE_ESTIMATE_EVERY = 3  # evaluations
_STATE_VERSION = 2


class Probe(Protocol):
    """Whoever can tell, without buying, whether spot is to be had."""

    def spot_available(self, slot: int) -> bool | None:
        """Whether a spot launch for this slot would succeed now; None: nobody knows. May be repeated."""


@dataclass(frozen=True)
class ControllerSettings:
    """What the job asks for and how its provisioner behaves.

    Attributes:
        planner: work, deadline (on the job's clock), budget and behaviour; `replan_s` is the longest time between two
            turns, which the caller sees to.
        rates_per_s: λ_n as the job file says, shape (N,): one slot each.
        samples_per_record: m of packed records.
        prior_alpha: of spot, before anything is seen.
        limits: how fast, and how often.
        billing: how the owner of the machines counts.
        heartbeat_timeout_s: a worker not heard for this long, while others are, does not work.
        target_error, measure: J is re-estimated from the job's own held-out errors; None: J is as planned.
        started_s: beginning of the job's clock; None: the first turn.
    """

    planner: PlannerSettings
    rates_per_s: Floats
    samples_per_record: int = 1
    prior_alpha: float = 0.9
    limits: LaunchLimits = field(default_factory=LaunchLimits)
    billing: BillingRule = LOCAL
    heartbeat_timeout_s: float = 30.0
    target_error: float | None = None
    measure: str = "error_rate"
    started_s: float | None = None

    @property
    def num_slots(self) -> int:
        return len(self.rates_per_s)


@dataclass(frozen=True)
class ActionResult:
    """An action and what came of it; "" where it did what it should."""

    action: FleetAction
    failure: str = ""
    id: str = ""

    def text(self) -> str:
        """For people."""
        match self.action:
            case Launch(order=order, why=why):
                got = self.failure or self.id or "as planned"
                return f"slot {order.slot}: launch incarnation {order.incarnation} {order.market} ({why}): {got}"
            case Terminate(id=id_, slot=slot, why=why):
                return f"slot {slot}: end {id_} ({why}){': ' + self.failure if self.failure else ''}"
            case Wait(slot=slot, why=why):
                return f"slot {slot}: wait: {why}"


@dataclass(frozen=True)
class Decision:
    """One turn: what was seen, what is wanted and why, what was done, what it costs.

    Attributes:
        phase: "run"; "done" (the job has ended), "drain", "budget" (it is spent): everything is ended; "stopped" (a
            person must mend something); "unavailable" (the fleet or the prices do not answer: nothing is done).
        markets, reasons: per slot; None: no machine.
        binding: what decides, as `Plan.binding`, or "budget".
        done: actions with their outcome; waits are in it.
        instances: of this moment, ended ones included while the fleet lists them.
        ready: ids of instances whose worker has its slot.
        bill: until now.
        samples_done, target_samples: work that is in the model, and work that is wanted.
        updates_done, target_updates: the same in updates; `target_updates` is None where the policy does not fix the
            batches of an update.
        over: nothing runs and nothing is left to do.
    """

    turn: int
    now_s: float
    started_s: float
    phase: Phase
    markets: tuple[Market | None, ...]
    reasons: tuple[str, ...]
    binding: str
    feasible: bool
    done: tuple[ActionResult, ...]
    instances: tuple[Instance, ...]
    ready: frozenset[str]
    incarnations: tuple[int, ...]
    bill: Bill
    samples_done: float
    target_samples: float
    updates_done: int
    target_updates: float | None
    all_on_demand_usd: float
    expected_cost_usd: float
    expected_finish_s: float
    slack_s: float
    alpha: Alpha
    cycle_s: float
    prices: Prices | None
    rates_per_s: Floats
    usd_per_error_point: float
    moves: int
    interruptions: int
    alarms: tuple[str, ...]
    dry_run: bool
    over: bool

    @property
    def elapsed_s(self) -> float:
        """Seconds on the job's clock."""
        return self.now_s - self.started_s

    @property
    def alive(self) -> tuple[Instance, ...]:
        return tuple(one for one in self.instances if one.is_alive)

    @property
    def actions(self) -> tuple[ActionResult, ...]:
        """What was done, without the waits."""
        return tuple(one for one in self.done if not isinstance(one.action, Wait))

    def record(self) -> records.ProvisionDecision:
        """As it is told on the job's topic `metrics`."""
        distinct = tuple(dict.fromkeys(self.reasons))
        return records.ProvisionDecision(
            turn=self.turn, time_s=self.now_s, started_s=self.started_s, phase=self.phase, binding=self.binding,
            feasible=self.feasible, markets=tuple(market or "" for market in self.markets), reasons=distinct,
            reason_of=tuple(distinct.index(one) for one in self.reasons), incarnations=self.incarnations,
            actions=tuple(one.text() for one in self.actions), alarms=self.alarms, instances=len(self.alive),
            num_spot=sum(one.market == "spot" for one in self.alive), samples_done=self.samples_done,
            target_samples=self.target_samples, updates_done=self.updates_done, spent_usd=self.bill.usd,
            expected_cost_usd=self.expected_cost_usd, expected_finish_s=self.expected_finish_s,
        )  # fmt: skip

    def measurements(self) -> dict[str, float]:
        """Numbers for the topic `metrics`, finite ones only."""
        alive = self.alive
        found = {
            "elapsed_s": self.elapsed_s,
            "samples_done": self.samples_done,
            "target_samples": self.target_samples,
            "spent_usd": self.bill.usd,
            "spent_spot_usd": self.bill.usd_by_market["spot"],
            "spent_on_demand_usd": self.bill.usd_by_market["on_demand"],
            "all_on_demand_usd": self.all_on_demand_usd,
            "expected_cost_usd": self.expected_cost_usd,
            "expected_finish_s": self.expected_finish_s,
            "slack_s": self.slack_s,
            "usd_per_1000_updates": usd_per_1000_updates(self.bill.usd, self.updates_done),
            "usd_per_error_point": self.usd_per_error_point,
            "instances_spot": sum(one.market == "spot" for one in alive),
            "instances_on_demand": sum(one.market == "on_demand" for one in alive),
            "instances_ready": len(self.ready),
            "desired_slots_spot": sum(one == "spot" for one in self.markets),
            "desired_slots_on_demand": sum(one == "on_demand" for one in self.markets),
            "availability": self.alpha.point,
            "spot_usd_per_h": self.prices.spot_usd_per_h if self.prices else math.nan,
            "on_demand_usd_per_h": self.prices.on_demand_usd_per_h if self.prices else math.nan,
            "moves_total": self.moves,
            "interruptions_total": self.interruptions,
            "alarms": len(self.alarms),
        }
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values: a line of the journal, and of `doll provision status --json`."""
        return {
            **self.measurements(),
            "turn": self.turn,
            "time_s": self.now_s,
            "started_s": self.started_s,
            "phase": self.phase,
            "binding": self.binding,
            "feasible": self.feasible,
            "updates_done": self.updates_done,
            "target_updates": self.target_updates,
            "markets": [market or "" for market in self.markets],
            "reasons": _by_text(self.reasons),
            "actions": [one.text() for one in self.actions],
            "waits": _by_text_of(
                {one.action.slot: one.action.why for one in self.done if isinstance(one.action, Wait)}
            ),
            "alarms": list(self.alarms),
            "dry_run": self.dry_run,
            "over": self.over,
        }


class Controller:
    """The provisioner of one job.

    Call `turn` at least every `settings.planner.replan_s`, and `feed` it the job's records meanwhile. An object that is
    made anew after a crash goes on where the old one was.

    Args:
        state_store: keeps state and journal.
        probe: who can tell whether spot is to be had without buying; None: it is inferred from what happened.
        check_lease: raises where another provisioner has taken over.
        dry_run: decide and say, but do nothing and keep nothing.
        job: its name: machines that were launched for another job, which had them before, are ended.
        topics_id: tells the job's topics from earlier ones of the same names, whose state says nothing; "": not known.

    Attributes:
        observed: what is known of the job; feed it.
        positions: where the caller stands in what it reads; kept with the state, so that both are of one moment.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        fleet: Fleet,
        prices: PriceFeed,
        state_store: StateStore,
        *,
        probe: Probe | None = None,
        check_lease: Callable[[], None] | None = None,
        dry_run: bool = False,
        job: str = "",
        topics_id: str = "",
    ) -> None:
        self.settings = settings
        self._fleet = fleet
        self._prices = prices
        self._state_store = state_store
        self._probe = probe
        self._check_lease = check_lease
        self._dry_run = dry_run
        self._job = job
        self._topics_id = topics_id
        self._reset()
        self._restore()

    def _reset(self) -> None:
        """As at the very beginning."""
        settings, count = self.settings, self.settings.num_slots
        self.observed = Observed(
            settings.rates_per_s,
            samples_per_record=settings.samples_per_record,
            prior_alpha=settings.prior_alpha,
            prior_cycle_s=settings.planner.cycle_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
        )
        self.positions: dict[str, int] = {}
        self._planner = settings.planner
        self._launch_state = LaunchState(count, settings.limits)
        self._turn = 0
        self._started_s = settings.started_s
        self._generation = 0
        self._begun_s = -math.inf  # what ended before is of an earlier run, and was billed there
        self._is_new = False  # nothing of an earlier run counts
        self._others = False  # machines of other jobs are left
        self._on_spot: Bools | None = None  # None: nothing was planned yet
        self._moved_s = np.full(count, -math.inf)
        self._spot_available = np.ones(count, dtype=np.bool_)
        self._spot_changed_s = np.full(count, -math.inf)
        self._pools = [""] * count
        self._known: dict[str, Instance] = {}  # not ended when last seen, or not billed yet
        self._unlisted: set[str] = set()  # of those, not in the newest listing
        self._ends_recorded: set[str] = set()  # instances whose notice or end has been counted
        self._ready_s: dict[str, float] = {}  # since when an instance's worker has, or had, its slot
        self._fenced_s: dict[str, float] = {}
        self._lines: dict[str, BillLine] = {}  # of ended instances
        self._archived_bill = Bill()  # of those that ended long ago
        self._earlier_usd = 0.0
        self._last_usd = 0.0
        self._last_prices: Prices | None = None
        self._spent_budget_usd: float | None = None  # the budget that is spent
        self._evaluations = 0
        self._moves = 0
        self._interruptions = 0

    # --- what comes in ----------------------------------------------------------------------------------------------

    def feed(self, record: records.AnyRecord, at_s: float) -> None:
        """A record of `updates`, `events`, `commands` or `metrics`, written at about `at_s`."""
        self.observed.feed(record, at_s)

    def observe_ends(self, now_s: float, ends: Sequence[int]) -> None:
        """The end of each sample partition at `now_s`."""
        self.observed.observe_ends(now_s, ends)

    def retarget(self, settings: ControllerSettings) -> None:
        """Another deadline, budget, work, K or behaviour, in mid-run. What is believed before anything is seen (rates,
        availability) has had its say.

        Raises:
            ValueError: another number of slots, or another b: neither changes within a job.
        """
        if settings.num_slots != self.settings.num_slots:
            raise ValueError(f"expected {self.settings.num_slots} slots as before, got {settings.num_slots}")
        before, after = self.settings.planner.batch_size, settings.planner.batch_size
        if after != before:
            raise ValueError(f"expected batches of {before} samples as before, got {after}: b stays within a job")
        self.settings, self._planner, self._evaluations = settings, settings.planner, 0
        self._launch_state.limits, self.observed.heartbeat_timeout_s = settings.limits, settings.heartbeat_timeout_s

    # --- a turn -----------------------------------------------------------------------------------------------------

    def turn(self, now_s: float, *, draining: bool = False) -> Decision:
        """Decide and act.

        Args:
            draining: every instance is to be ended, and none started.

        Raises:
            FencedError: another provisioner has taken over. Nothing was done.
            ConfigError: state or journal cannot be written.
        """
        if self._check_lease is not None:
            self._check_lease()
        alarms: list[str] = []
        listed = self._list(alarms)
        prices = self._current_prices(now_s, alarms)
        self._turn += 1
        if listed is None or prices is None:
            return self._decide_nothing(now_s, prices, alarms)
        listed, others = self._own(listed)
        self._begin(now_s, listed)
        self._end_others(others, now_s, alarms)
        instances = self._merge_listing(listed, now_s, alarms)
        fleet = self._readiness(instances, now_s)
        self._re_estimate()
        bill = self._bill(now_s, alarms)
        if not self._dry_run:
            self._observe_spot(instances, fleet.ready_s, now_s)
        phase = self._phase(draining)
        done: list[ActionResult] = []
        for _ in range(_MAX_PLANS_PER_TURN):
            desired = self._desired_state(phase, instances, fleet, bill, prices, now_s, alarms)
            status = self._fleet_status(desired, instances, fleet, bill, prices, now_s)
            if desired.phase == "run" and status.spare_usd < 0:
                self._spent_budget_usd = self._planner.budget_usd
                phase = self._phase(draining)
                desired = self._desired_state(phase, instances, fleet, bill, prices, now_s, alarms)
                status = replace(status, wanted=desired.markets, reasons=desired.reasons)
            actions = reconcile(status, self._launch_state, self.settings.limits, now_s)
            done = [one for one in done if not isinstance(one.action, Wait)]
            found = self._act(actions, instances, now_s)
            done += found
            if self._dry_run or not any(self._needs_replan(one) for one in found):
                break
        if phase == "run" and not any(one.is_alive for one in instances):
            self._give_up(now_s)
        if self._launch_state.stopped:
            phase = "stopped" if phase == "run" else phase
            alarms.append(
                f"nothing is launched any more: {self._launch_state.stopped}. Correct it, then start the provisioner "
                "again: doll provision run JOB.yaml"
            )
        alarms += self._current_alarms(desired, now_s)
        decision = self._decision(desired, phase, instances, fleet, bill, prices, done, alarms, now_s)
        if not self._dry_run:
            self._state_store.append({"kind": "decision", **decision.to_dict()})
            self._save()
        return decision

    # --- observe ----------------------------------------------------------------------------------------------------

    def _list(self, alarms: list[str]) -> list[Instance] | None:
        try:
            return list(self._fleet.instances())
        except ServiceUnavailableError as exc:
            alarms.append(f"the fleet does not answer: {exc}")
            return None

    def _own(self, listed: Sequence[Instance]) -> tuple[list[Instance], list[Instance]]:
        """The machines of this job; and those that live of others, which had the fleet before and have left them."""
        of_job = {one.id: not one.job or not self._job or one.job == self._job for one in listed}
        others = [one for one in listed if not of_job[one.id] and one.state is not InstanceState.ENDED]
        return [one for one in listed if of_job[one.id]], others

    def _end_others(self, others: Sequence[Instance], now_s: float, alarms: list[str]) -> None:
        self._others = bool(others)
        if not others:
            return
        jobs = ", ".join(sorted({one.job for one in others}))
        alarms.append(f"{len(others)} machines of another job ({jobs}) are in this job's fleet: they are ended")
        ends = [one for one in others if one.is_alive and one.notice_s is None]
        if not ends or self._dry_run:
            return
        for one in ends:
            self._append_journal("end", now_s, id=one.id, slot=one.slot, why=f"it is of another job: {one.job}")
        try:
            self._fleet.terminate([one.id for one in ends])
        except ServiceUnavailableError as exc:
            alarms.append(f"machines of another job could not be ended: {exc}")

    def _current_prices(self, now_s: float, alarms: list[str]) -> Prices | None:
        try:
            self._last_prices = self._prices.current(now_s)
        except ServiceUnavailableError as exc:
            alarms.append(f"no current prices, the last known are used: {exc}")
        return self._last_prices

    def _begin(self, now_s: float, listed: Sequence[Instance]) -> None:
        """The job's clock begins with the first turn; a successor that knows nothing asks the topics and the tags."""
        announced = self.observed.last_decision
        if self._is_new:
            self._is_new, self._begun_s = False, now_s
            self._started_s = now_s if self._started_s is None else self._started_s
        if self.observed.generation > self._generation:
            self._begin_generation(now_s)
        self._launch_state.run = _run_of(self._job, self._topics_id, self._generation)
        if self._started_s is None:
            begun = [one.launched_s for one in listed if one.is_alive or (one.ended_s or now_s) > self._begun_s]
            self._started_s = max(min([now_s, *begun]), min(now_s, self._begun_s))
            # Whoever can write to the topics could write anything: what is no past time began with the fleet.
            if announced is not None and 0 < announced.started_s <= now_s:
                self._started_s = announced.started_s
            if announced is not None:
                self._earlier_usd = math.nan  # settled with the first bill
            if listed or announced is not None:
                # No state, yet not the first: what was launched in the last moments may not be listed yet.
                self._launch_state.launches_from_s = now_s + self.settings.limits.listing_lag_s
        for slot in range(self.settings.num_slots):
            self._launch_state.seen(slot, self.observed.highest_incarnation(slot))

    def _begin_generation(self, now_s: float) -> None:
        """The job has started again on the same topics: new clock, new bill. Incarnations go on, each is used once."""
        self._generation, began_s = self.observed.generation, self.observed.generation_s
        self._begun_s = began_s if 0 < began_s <= now_s else now_s
        if self._started_s is None:
            return  # nothing was known of an earlier one
        log.info("generation_started", generation=self._generation, action="clock, work and bill begin anew")
        settings = self.settings
        self._started_s = self._begun_s if settings.started_s is None else settings.started_s
        self._planner, self._evaluations = settings.planner, 0
        self._on_spot = None
        self._lines, self._archived_bill, self._earlier_usd, self._last_usd = {}, Bill(), 0.0, 0.0
        self._spent_budget_usd = None
        self._moves = self._interruptions = 0

    def _merge_listing(self, listed: Sequence[Instance], now_s: float, alarms: list[str]) -> list[Instance]:
        """The instances that count, and what is to be remembered of them."""
        limits, count = self.settings.limits, self.settings.num_slots
        found = {one.id: one for one in listed}
        self._unlisted = self._known.keys() - found.keys()
        for id_, one in self._known.items():
            if id_ in found and found[id_].notice_s is None and one.notice_s is not None:
                # A notice is never taken back, but a fleet that was made anew may not have read it yet.
                found[id_] = replace(found[id_], notice_s=one.notice_s)
            elif id_ not in found:
                # A launch may take a moment to be listed; after that it is gone.
                found[id_] = one if now_s - one.launched_s <= limits.listing_lag_s else _vanished(one, now_s)
        for one in found.values():
            ended = one.state is InstanceState.ENDED
            if ended and one.id in self._lines:
                continue
            ended_s = now_s if one.ended_s is None else one.ended_s
            if (
                ended
                and one.id not in self._known
                and (now_s - ended_s > _BILL_LINES_KEPT_S or ended_s <= self._begun_s)
            ):
                continue  # settled long ago, or with an earlier run
            if 0 <= one.slot < count:
                self._remember(one, now_s)
            if ended:
                self._bill_ended(one, now_s, alarms)
            else:
                self._known[one.id] = one
        return list(found.values())

    def _remember(self, one: Instance, now_s: float) -> None:
        launch_state = self._launch_state
        launch_state.seen(one.slot, one.incarnation)
        pending = launch_state.pending.get(one.slot)
        if pending is not None and (pending[0].incarnation, pending[0].market) == (one.incarnation, one.market):
            launch_state.launched(pending[0])
        if one.market == "spot" and one.is_alive:
            self._pools[one.slot] = one.pool
        if one.id in self._ends_recorded:
            return
        if one.notice_s is not None or one.end is EndReason.INTERRUPTED:
            self._ends_recorded.add(one.id)
            self._interruptions += 1
            launch_state.interrupted(one, now_s if one.ended_s is None else one.ended_s)
            self._append_journal(
                "interrupted", now_s, id=one.id, slot=one.slot, incarnation=one.incarnation, pool=one.pool
            )
        elif one.end is EndReason.FAILED:
            self._ends_recorded.add(one.id)
            launch_state.instance_failed(one, now_s)

    def _bill_ended(self, one: Instance, now_s: float, alarms: list[str]) -> None:
        """The last bill of an instance that has ended."""
        try:
            (line,) = self._bill_lines([one], now_s)
        except ServiceUnavailableError as exc:
            alarms.append(f"{one.id} cannot be billed yet: {exc}")
            self._known[one.id] = one
            return
        self._lines[one.id] = line
        self._known.pop(one.id, None)
        self._append_journal("ended", now_s, **line.to_dict())

    def _readiness(self, instances: Sequence[Instance], now_s: float) -> _Readiness:
        found = _Readiness()
        present_s = self.observed.ps_since_s(now_s)
        for slot in range(self.settings.num_slots):
            holder = self.observed.holder(slot)
            if holder is not None and holder.incarnation > 0:
                found.held[slot] = holder.incarnation
        for one in instances:
            if not (0 <= one.slot < self.settings.num_slots) or one.state is InstanceState.ENDED:
                continue
            holder = self.observed.holder(one.slot)
            held = found.held.get(one.slot, 0)
            if holder is not None and held == one.incarnation:
                if one.id not in self._ready_s:
                    self._ready_s[one.id] = max(holder.since_s, one.launched_s)
                    self._booted(one, present_s)
                since_s = self._ready_s[one.id]
                if not one.is_alive:
                    continue
                if holder.works:
                    found.ready_s[one.id] = since_s
                else:
                    found.silent_s[one.id] = max(0.0, self.observed.heard_s - holder.heard_s)
            elif holder is not None and held > one.incarnation and one.id in self._ready_s:
                self._fenced_s.setdefault(one.id, holder.since_s)
            elif one.is_alive and present_s is not None:
                found.waited_s[one.id] = now_s - max(one.launched_s, present_s)
        return found

    def _booted(self, one: Instance, present_s: float | None) -> None:
        """Its worker has its slot for the first time. While there was no parameter server it could not have it."""
        seconds = self._ready_s[one.id] - one.launched_s
        if present_s is not None and present_s <= one.launched_s and seconds <= self.settings.limits.boot_timeout_s:
            self.observed.boots.observe(seconds)

    @property
    def _samples_done(self) -> float:
        return float(self.observed.batches_done * self.settings.planner.batch_size)

    @property
    def planned(self) -> PlannerSettings:
        """What the planner is asked with: boots take what the plan says, or what nine of ten did where that is more."""
        return replace(self._planner, boot_s=max(self._planner.boot_s, self.observed.boots.slow_s))

    def _observe_spot(self, instances: Sequence[Instance], ready_s: Mapping[str, float], now_s: float) -> None:
        """Tell the estimator how slots on spot fare, boots included."""
        if self._on_spot is None:
            return
        up = np.zeros(self.settings.num_slots, dtype=np.bool_)
        for one in instances:
            if one.market == "spot" and one.notice_s is None and one.id in ready_s:
                up[one.slot] = True
        self.observed.observe_spot(now_s, up, self._on_spot, self._pools)

    def _re_estimate(self) -> None:
        """The work from the job's own held-out errors, where the job asks for it."""
        settings = self.settings
        if settings.target_error is None:
            return
        versions, errors = self.observed.errors(settings.measure)
        if len(versions) < self._evaluations + _RE_ESTIMATE_EVERY:
            return
        per_update = self._planner.samples_per_update
        if per_update is None:
            per_update = self.observed.batches_per_update * self._planner.batch_size
        if math.isnan(per_update):
            return
        self._evaluations = len(versions)
        before = self._planner.samples
        rng = np.random.default_rng(len(versions))
        samples = np.asarray(versions) * per_update
        self._planner = work_estimate.re_estimate(self._planner, samples, errors, settings.target_error, rng)
        if self._planner.samples != before:
            log.info("work_re_estimated", samples_before=before, samples=self._planner.samples)

    def _bill(self, now_s: float, alarms: list[str]) -> Bill:
        lines, missing = list[BillLine](), False
        try:
            lines = self._bill_lines(self._known.values(), now_s)
        except ServiceUnavailableError as exc:
            alarms.append(f"what runs cannot be billed now: {exc}")
            missing = True
        for id_, line in list(self._lines.items()):
            if now_s - (line.ended_s or now_s) > _BILL_LINES_KEPT_S:
                self._archived_bill = replace(self._archived_bill.plus(Bill.of([line])), lines=())
                del self._lines[id_]
        found = self._archived_bill.plus(Bill.of(self._lines.values())).plus(Bill.of(lines))
        if math.isnan(self._earlier_usd):
            announced = self.observed.last_decision
            spent_usd = announced.spent_usd if announced is not None and math.isfinite(announced.spent_usd) else 0.0
            self._earlier_usd = max(0.0, spent_usd - found.usd)
        # Of what a lost file knew only the sum is left. An instance that cannot be billed now has not become free.
        usd = found.usd + self._earlier_usd
        self._last_usd = max(usd, self._last_usd) if missing else usd
        return replace(found, usd=self._last_usd)

    def _bill_lines(self, instances: Iterable[Instance], now_s: float) -> list[BillLine]:
        return bill_lines(
            instances, self._prices.series, self.settings.billing, now_s, ready_s=self._ready_s, fenced_s=self._fenced_s
        )

    # --- plan -------------------------------------------------------------------------------------------------------

    def _phase(self, draining: bool) -> Phase:
        if draining:
            return "drain"
        if self.observed.finished is not None:
            return "done"
        if self._spent_budget_usd is not None and self._planner.budget_usd == self._spent_budget_usd:
            return "budget"
        return "run"

    def _desired_state(
        self, phase: Phase, instances: Sequence[Instance], fleet: _Readiness, bill: Bill, prices: Prices, now_s: float,
        alarms: list[str],
    ) -> _DesiredState:  # fmt: skip
        """Which market each slot is to be in, and why."""
        count = self.settings.num_slots
        state = self._state(instances, fleet, bill, prices, now_s)
        if phase != "run":
            why = {
                "drain": "every instance is handed back",
                "done": f"the job has ended: {self.observed.finished}",
                "budget": f"the budget of {self._planner.budget_usd} USD is spent",
            }[phase]
            return _DesiredState(
                phase=phase, markets=(None,) * count, reasons=(why,) * count, binding=phase,
                feasible=phase != "budget", expected_cost_usd=bill.usd, expected_finish_s=state.elapsed_s, slack_s=0.0,
                urgent=False, state=state,
            )  # fmt: skip
        first = self._on_spot is None and not any(one.is_alive for one in instances)
        plan = (planner.start if first else planner.plan)(state, self.planned)
        on_spot, reasons, binding, feasible = plan.on_spot, list(plan.reasons), plan.binding, plan.feasible
        expected_usd, finish_s = plan.forecast.expected_cost_usd, plan.forecast.expected_finish_s
        within = self._within_budget(on_spot, state)
        if within is not None:
            forced = within.on_spot & ~on_spot
            on_spot, expected_usd, finish_s = within.on_spot, within.expected_cost_usd, within.expected_finish_s
            binding = "budget"
            feasible = feasible and not within.short and finish_s <= self._planner.deadline_s
            for slot in np.flatnonzero(forced):
                reasons[slot] = "spot: on-demand would pass the budget"
        if not self._dry_run:
            before = state.on_spot if not first else on_spot
            moved = on_spot != before
            self._moves += int(np.count_nonzero(moved))
            self._moved_s[moved] = now_s
            if first:
                self._moved_s[:] = now_s
            self._on_spot = on_spot.copy()
        return _DesiredState(
            phase=phase, markets=tuple("spot" if spot else "on_demand" for spot in on_spot), reasons=tuple(reasons),
            binding=binding, feasible=feasible, expected_cost_usd=expected_usd, expected_finish_s=finish_s,
            slack_s=plan.slack_s, urgent=binding in ("guard", "late"), state=state,
        )  # fmt: skip

    def _state(
        self, instances: Sequence[Instance], fleet: _Readiness, bill: Bill, prices: Prices, now_s: float
    ) -> PlannerState:
        assert self._started_s is not None
        count = self.settings.num_slots
        on_spot, up = np.ones(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
        newest = np.zeros(count, dtype=np.int64)
        running = np.zeros(count, dtype=np.bool_)  # a spot machine runs or boots, and has no notice
        for one in instances:
            if not one.is_alive or not 0 <= one.slot < count:
                continue
            up[one.slot] |= one.id in fleet.ready_s
            running[one.slot] |= one.market == "spot" and one.notice_s is None
            if one.incarnation >= newest[one.slot]:
                newest[one.slot], on_spot[one.slot] = one.incarnation, one.market == "spot"
        if self._on_spot is not None:
            on_spot = self._on_spot.copy()
        opened, changed_s = self._spot_availability(on_spot, running, now_s)
        return PlannerState(
            elapsed_s=max(0.0, now_s - self._started_s),
            samples_done=self._samples_done,
            rates_per_s=self.observed.rates_per_s(),
            on_spot=on_spot,
            up=up,
            alpha=self.observed.alpha(),
            prices=prices,
            spent_usd=bill.usd,
            spot_available=opened,
            spot_changed_s=changed_s - self._started_s,
            moved_s=self._moved_s - self._started_s,
        )

    def _spot_availability(self, on_spot: Bools, running: Bools, now_s: float) -> tuple[Bools, Floats]:
        """Whether spot is to be had, by slot, and since when that is so."""
        launch_state, limits = self._launch_state, self.settings.limits
        opened = self._spot_available.copy()
        for slot in range(self.settings.num_slots):
            free = now_s >= launch_state.quota_s("spot")
            probed = self._probe.spot_available(slot) if self._probe is not None and not running[slot] else None
            if running[slot]:
                opened[slot] = True
            elif probed is not None:
                opened[slot] = free and probed
            elif on_spot[slot]:
                # After an end the next try tells; one that found nothing counts until another one succeeds.
                opened[slot] = (
                    free and not launch_state.lacks_capacity(slot) and now_s >= launch_state.blocked_s(slot, "spot")
                )
            else:
                quiet_s = max(limits.pool_backoff_s, limits.retry_s)
                no_spot_s = max(launch_state.no_spot_since_s(slot), launch_state.no_capacity_since_s())
                blocked = now_s < launch_state.blocked_s(slot, "spot")
                opened[slot] = free and not blocked and now_s - no_spot_s >= quiet_s
        changed_s = np.where(opened != self._spot_available, now_s, self._spot_changed_s)
        if not self._dry_run:
            self._spot_available, self._spot_changed_s = opened, changed_s
        return opened, changed_s

    def _within_budget(self, on_spot: Bools, state: PlannerState) -> _BudgetFit | None:
        """The plan with so many more slots on spot that the budget suffices for what is left; None where it does."""
        budget_usd = self._planner.budget_usd
        work = self._planner.samples - state.samples_done
        if budget_usd is None or work <= 0:
            return None
        rates, alpha, prices = state.rates_per_s, max(state.alpha.point, 1e-3), state.prices
        # A move is paid for twice while the new machine boots: without that, plans would go to and fro at the edge.
        moves = np.maximum(0, np.count_nonzero(state.on_spot) - np.arange(len(rates) + 1))
        twice_usd = moves * prices.on_demand_usd_per_h * 2 * self.planned.boot_s / SECONDS_PER_HOUR
        costs = state.spent_usd + unequal_cost_usd(work, rates, alpha, prices) + twice_usd
        enough = np.flatnonzero(costs <= budget_usd - len(rates) * self._reserve_usd(prices))
        # Where no mix suffices, the cheapest: what can be done is done, up to the cap.
        fewest = int(enough[0]) if enough.size else int(np.argmin(costs))
        missing = fewest - int(np.count_nonzero(on_spot))
        if missing <= 0 and enough.size:
            return None
        order = [slot for slot in np.argsort(rates, kind="stable").tolist() if not on_spot[slot]]
        # Who is on spot already stays there first.
        order.sort(key=lambda slot: not state.on_spot[slot])
        chosen = on_spot.copy()
        chosen[order[: max(0, missing)]] = True
        rate = float(rates[~chosen].sum() + alpha * rates[chosen].sum())
        return _BudgetFit(chosen, float(costs[fewest]), state.elapsed_s + work / rate, short=not enough.size)

    def _reserve_usd(self, prices: Prices) -> float:
        """Held back for each machine, at the dearer price: it goes on for some turns whatever is decided."""
        seconds = max(_RESERVE_TURNS * self._planner.replan_s, self.settings.billing.billed_s(0.0))
        return max(prices.spot_usd_per_h, prices.on_demand_usd_per_h) * seconds / SECONDS_PER_HOUR

    def _fleet_status(
        self,
        desired: _DesiredState,
        instances: Sequence[Instance],
        fleet: _Readiness,
        bill: Bill,
        prices: Prices,
        now_s: float,
    ) -> FleetStatus:
        budget_usd, spare_usd = self._planner.budget_usd, math.inf
        commit: dict[Market, float] = {}
        if budget_usd is not None:
            running = sum(one.state is not InstanceState.ENDED for one in instances)
            spare_usd = budget_usd - bill.usd - running * self._reserve_usd(prices)
            commit = dict.fromkeys(MARKETS, self._reserve_usd(prices))
        return FleetStatus(
            wanted=desired.markets, reasons=desired.reasons, instances=instances, ready_s=fleet.ready_s,
            silent_s=fleet.silent_s, waited_s=fleet.waited_s, held=fleet.held, urgent=desired.urgent,
            spare_usd=spare_usd, commit_usd=commit, unlisted=self._unlisted,
        )  # fmt: skip

    # --- act --------------------------------------------------------------------------------------------------------

    def _act(self, actions: Sequence[FleetAction], instances: list[Instance], now_s: float) -> list[ActionResult]:
        """Do it; `instances` is brought up to date."""
        if self._dry_run:
            return [ActionResult(action) for action in actions]
        done: list[ActionResult] = [ActionResult(action) for action in actions if isinstance(action, Wait)]
        ends = [action for action in actions if isinstance(action, Terminate)]
        if ends:
            for end in ends:
                self._append_journal("end", now_s, id=end.id, slot=end.slot, why=end.why)
            failure = ""
            ids = [end.id for end in ends]
            try:
                self._fleet.terminate(ids)
                instances[:] = [replace(one, state=InstanceState.ENDING) if one.id in ids else one for one in instances]
            except ServiceUnavailableError as exc:
                failure = str(exc)
            done += [ActionResult(end, failure) for end in ends]
        launches = [action for action in actions if isinstance(action, Launch)]
        if launches:
            on_spot = {one.slot for one in instances if one.is_alive and one.market == "spot"}
            for launch in launches:
                order = launch.order
                self._launch_state.ordered(order, now_s, fallback=order.market == "on_demand" and order.slot in on_spot)
                self._append_journal("order", now_s, **_order_dict(launch))
            self._save()
            done += [self._launch(launch, instances, now_s) for launch in launches]
        return done

    def _give_up(self, now_s: float) -> None:
        """Nothing runs, and no market gives a machine for reasons that do not go away by themselves."""
        if not self._dry_run and all(self._launch_state.is_closed(market, now_s) for market in MARKETS):
            said = dict.fromkeys(self._launch_state.refusal(market) for market in MARKETS)
            self._launch_state.stopped = "every pool of both markets refuses: " + "; ".join(said)

    def _needs_replan(self, one: ActionResult) -> bool:
        """A launch that failed though there should have been a machine; the plan has counted with the others."""
        if not one.failure or not isinstance(one.action, Launch):
            return False
        return one.action.order.market == "on_demand" or bool(self._spot_available[one.action.order.slot])

    def _launch(self, launch: Launch, instances: list[Instance], now_s: float) -> ActionResult:
        order = launch.order
        if self._launch_state.stopped:
            self._launch_state.cancelled(order)
            return ActionResult(launch, f"not tried: {self._launch_state.stopped}")
        try:
            made = self._fleet.launch(order)
        except LaunchError as exc:
            self._launch_state.failed(order, exc, now_s)
            self._append_journal(
                "no_instance", now_s, **_order_dict(launch), failure=exc.failure.value, code=exc.code, error=str(exc)
            )
            return ActionResult(launch, f"{exc.failure.value}: {exc}")
        self._known[made.id] = made
        if made.id not in {one.id for one in instances}:
            instances.append(made)
        self._launch_state.launched(order)
        self._launch_state.seen(order.slot, order.incarnation)
        if order.market == "spot":
            self._pools[order.slot] = made.pool
        self._append_journal("instance", now_s, **_order_dict(launch), id=made.id, pool=made.pool)
        return ActionResult(launch, id=made.id)

    def _append_journal(self, kind: str, now_s: float, **facts: Any) -> None:
        if not self._dry_run:
            self._state_store.append({"kind": kind, "turn": self._turn, "time_s": now_s, **facts})

    # --- what comes out ---------------------------------------------------------------------------------------------

    def _current_alarms(self, desired: _DesiredState, now_s: float) -> list[str]:
        found = []
        names: dict[Market, str] = {"spot": "spot", "on_demand": "on-demand"}
        for market, name in names.items():
            if now_s < self._launch_state.quota_s(market):
                found.append(f"the quota of {name} machines is used up: ask their owner for more")
            elif says := self._launch_state.refusal(market):
                found.append(f"no {name} machines, and not for lack of capacity: {says}")
        if not desired.feasible and desired.phase == "run":
            found.append(
                "the budget does not suffice for the deadline: raise one of them, or accept a later end"
                if desired.binding == "budget"
                else "the deadline cannot be met any more: everything runs on-demand, this is the soonest"
            )
        if desired.phase == "budget":
            found.append(
                f"the budget of {self._planner.budget_usd} USD is spent: all machines are handed back, and the "
                "provisioner ends. To go on with the job, raise plan.budget_usd in the job file, then start it again: "
                "doll provision run JOB.yaml"
            )
        if desired.binding == "done" and desired.phase == "run":
            found.append("the planned updates are done, but the job goes on: set stop.updates, or plan for more")
        return found

    def _decision(
        self,
        desired: _DesiredState,
        phase: Phase,
        instances: Sequence[Instance],
        fleet: _Readiness,
        bill: Bill,
        prices: Prices,
        done: Sequence[ActionResult],
        alarms: Sequence[str],
        now_s: float,
    ) -> Decision:
        assert self._started_s is not None
        left = any(one.state is not InstanceState.ENDED for one in instances) or self._others
        left = left or self._launch_state.may_have_launched(now_s)
        return Decision(
            turn=self._turn,
            now_s=now_s,
            started_s=self._started_s,
            phase=phase,
            markets=desired.markets,
            reasons=desired.reasons,
            binding=desired.binding,
            feasible=desired.feasible,
            done=tuple(done),
            instances=tuple(instances),
            ready=frozenset(fleet.ready_s),
            incarnations=self._incarnations(),
            bill=bill,
            samples_done=self._samples_done,
            target_samples=self._planner.samples,
            updates_done=self.observed.version,
            target_updates=self._planner.updates,
            all_on_demand_usd=self._on_demand_usd(desired.state.rates_per_s, prices),
            expected_cost_usd=desired.expected_cost_usd,
            expected_finish_s=desired.expected_finish_s,
            slack_s=desired.slack_s,
            alpha=desired.state.alpha,
            cycle_s=self.observed.spot.cycle_s,
            prices=prices,
            rates_per_s=desired.state.rates_per_s,
            usd_per_error_point=self._usd_per_point(bill),
            moves=self._moves,
            interruptions=self._interruptions,
            alarms=tuple(dict.fromkeys(alarms)),
            dry_run=self._dry_run,
            over=phase in ("done", "drain", "budget") and not left,
        )

    def _decide_nothing(self, now_s: float, prices: Prices | None, alarms: Sequence[str]) -> Decision:
        """Nothing can be seen, so nothing is done."""
        count = self.settings.num_slots
        rates = self.observed.rates_per_s()
        markets: tuple[Market | None, ...] = (None,) * count
        if self._on_spot is not None:
            markets = tuple("spot" if spot else "on_demand" for spot in self._on_spot)
        bill = replace(self._archived_bill.plus(Bill.of(self._lines.values())), usd=self._last_usd)
        return Decision(
            turn=self._turn,
            now_s=now_s,
            started_s=now_s if self._started_s is None else self._started_s,
            phase="unavailable",
            markets=markets,
            reasons=("as before: fleet or prices do not answer",) * count,
            binding="unavailable",
            feasible=True,
            done=(),
            instances=(),
            ready=frozenset(),
            incarnations=self._incarnations(),
            bill=bill,
            samples_done=self._samples_done,
            target_samples=self._planner.samples,
            updates_done=self.observed.version,
            target_updates=self._planner.updates,
            all_on_demand_usd=self._on_demand_usd(rates, prices),
            expected_cost_usd=math.nan,
            expected_finish_s=math.nan,
            slack_s=math.nan,
            alpha=self.observed.alpha(),
            cycle_s=self.observed.spot.cycle_s,
            prices=prices,
            rates_per_s=rates,
            usd_per_error_point=self._usd_per_point(bill),
            moves=self._moves,
            interruptions=self._interruptions,
            alarms=tuple(alarms),
            dry_run=self._dry_run,
            over=False,
        )

    def _incarnations(self) -> tuple[int, ...]:
        return tuple(self._launch_state.incarnation(slot) for slot in range(self.settings.num_slots))

    def _on_demand_usd(self, rates_per_s: Floats, prices: Prices | None) -> float:
        if prices is None:
            return math.nan
        return all_on_demand_usd(self._samples_done, rates_per_s, prices.on_demand_usd_per_h)

    def _usd_per_point(self, bill: Bill) -> float:
        _, errors = self.observed.errors(self.settings.measure)
        return usd_per_error_point(bill.usd, errors[0], errors[-1]) if errors else math.nan

    # --- kept over restarts -----------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self._dry_run:
            return
        # What is not listed any more need not be remembered.
        about = self._known.keys() | self._lines.keys()
        self._ends_recorded &= about
        self._ready_s = {id_: at_s for id_, at_s in self._ready_s.items() if id_ in about}
        self._fenced_s = {id_: at_s for id_, at_s in self._fenced_s.items() if id_ in about}
        self._state_store.save(
            {
                "state": _STATE_VERSION,
                "job": self._job,
                "topics_id": self._topics_id,
                "generation": self._generation,
                "begun_s": self._begun_s if math.isfinite(self._begun_s) else None,
                "turn": self._turn,
                "started_s": self._started_s,
                "on_spot": None if self._on_spot is None else self._on_spot.tolist(),
                "moved_s": _plain(self._moved_s),
                "spot_available": self._spot_available.tolist(),
                "spot_changed_s": _plain(self._spot_changed_s),
                "pools": self._pools,
                "known": [_instance_dict(one) for one in self._known.values()],
                "told": sorted(self._ends_recorded),
                "ready_s": self._ready_s,
                "fenced_s": self._fenced_s,
                "lines": [line.to_dict() for line in self._lines.values()],
                "settled": self._archived_bill.to_dict(),
                "carried_usd": 0.0 if math.isnan(self._earlier_usd) else self._earlier_usd,
                "last_usd": self._last_usd,
                "prices": None if self._last_prices is None else asdict(self._last_prices),
                "spent_budget_usd": self._spent_budget_usd,
                "work": {
                    "asked": self.settings.planner.samples,
                    "samples": self._planner.samples,
                    "evaluations": self._evaluations,
                },
                "moves": self._moves,
                "interruptions": self._interruptions,
                "launch_state": self._launch_state.to_dict(),
                "observed": self.observed.to_dict(),
                "positions": self.positions,
            }
        )

    def _restore(self) -> None:
        kept = self._state_store.load()
        if kept is None:
            return
        try:
            if kept["state"] != _STATE_VERSION:
                raise ValueError(f"expected state version {_STATE_VERSION}, got {kept['state']!r}")
            # Earlier releases noted neither: such a state is taken for the job's own.
            of = (str(kept.get("job", "")), str(kept.get("topics_id", "")))
            if any(had and now and had != now for had, now in zip(of, (self._job, self._topics_id), strict=True)):
                log.warning("provision_state_of_another_run", job=of[0], topics_id=of[1], action="beginning anew")
                self._is_new = True
                return
            self._read(kept)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            # Nothing that matters is only there: tags say what runs, topics what was decided.
            log.warning("provision_state_invalid", error=f"{type(exc).__name__}: {exc}", action="from tags and topics")
            self._reset()

    def _read(self, kept: Mapping[str, Any]) -> None:
        count = self.settings.num_slots
        launch_state = LaunchState(count, self.settings.limits)
        launch_state.restore(kept["launch_state"])
        self.observed.restore(kept["observed"])
        self._launch_state = launch_state
        self._turn = int(kept["turn"])
        self._generation = int(kept.get("generation", 0))
        begun_s = kept.get("begun_s")
        self._begun_s = -math.inf if begun_s is None else float(begun_s)
        if self.settings.started_s is None and kept["started_s"] is not None:
            self._started_s = float(kept["started_s"])
        on_spot = kept["on_spot"]
        self._on_spot = None if on_spot is None else _sized(np.asarray(on_spot, dtype=np.bool_), count)
        self._moved_s = _sized(_floats(kept["moved_s"]), count)
        self._spot_available = _sized(np.asarray(kept["spot_available"], dtype=np.bool_), count)
        self._spot_changed_s = _sized(_floats(kept["spot_changed_s"]), count)
        self._pools = [str(pool) for pool in kept["pools"]]
        self._known = {one["id"]: _instance(one) for one in kept["known"]}
        self._ends_recorded = set(kept["told"])
        self._ready_s = {id_: float(at_s) for id_, at_s in kept["ready_s"].items()}
        self._fenced_s = {id_: float(at_s) for id_, at_s in kept["fenced_s"].items()}
        self._lines = {one["id"]: BillLine(**one) for one in kept["lines"]}
        self._archived_bill = Bill(**kept["settled"])
        self._earlier_usd, self._last_usd = float(kept["carried_usd"]), float(kept["last_usd"])
        self._last_prices = None if kept["prices"] is None else Prices(**kept["prices"])
        self._spent_budget_usd = kept["spent_budget_usd"]
        work = kept["work"]
        if work["asked"] == self.settings.planner.samples:
            self._planner = replace(self._planner, samples=float(work["samples"]))
            self._evaluations = int(work["evaluations"])
        self._moves, self._interruptions = int(kept["moves"]), int(kept["interruptions"])
        self.positions = {str(name): int(at) for name, at in kept["positions"].items()}


@dataclass
class _Readiness:
    """Who works: see `FleetStatus`."""

    ready_s: dict[str, float] = field(default_factory=dict)
    silent_s: dict[str, float] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _DesiredState:
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


@dataclass(frozen=True)
class _BudgetFit:
    on_spot: Bools
    expected_cost_usd: float
    expected_finish_s: float
    short: bool  # not even the cheapest mix suffices


def _run_of(job: str, topics_id: str, generation: int) -> str:
    """`Order.run`: what a successor whose state is lost knows, too, so that it repeats an order word by word."""
    return hashlib.sha256(f"{job} {topics_id} {generation}".encode()).hexdigest()[:10] if job else ""


def _by_text(texts: Sequence[str]) -> dict[str, str]:
    """Which slots each text stands for."""
    return _by_text_of(dict(enumerate(texts)))


def _by_text_of(texts: Mapping[int, str]) -> dict[str, str]:
    slots: dict[str, list[int]] = {}
    for slot in sorted(texts):
        slots.setdefault(texts[slot], []).append(slot)
    return {text: slot_ranges(which) for text, which in slots.items()}


def _vanished(one: Instance, now_s: float) -> Instance:
    """An instance that is not listed any more, and nobody says since when and why."""
    if one.state is InstanceState.ENDED:
        return one
    if one.notice_s is not None and one.notice_s <= now_s:
        return replace(one, state=InstanceState.ENDED, ended_s=one.notice_s, end=EndReason.INTERRUPTED)
    end = EndReason.TERMINATED if one.state is InstanceState.ENDING else EndReason.FAILED
    return replace(one, state=InstanceState.ENDED, ended_s=now_s, end=end)


def _instance_dict(one: Instance) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(one)
    return found


def _instance(kept: Mapping[str, Any]) -> Instance:
    return Instance(**{**kept, "state": InstanceState(kept["state"]), "end": EndReason(kept["end"])})


def _order_dict(launch: Launch) -> dict[str, Any]:
    order = launch.order
    return {
        "slot": order.slot, "incarnation": order.incarnation, "market": order.market, "attempt": order.attempt,
        "avoid": sorted(order.avoid), "why": launch.why,
    }  # fmt: skip


def _plain(values: Floats) -> list[float | None]:
    """Numbers for JSON, which has no infinity."""
    return [float(value) if math.isfinite(value) else None for value in values]


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array([-math.inf if value is None else value for value in values], dtype=np.float64)


def _sized(values: Any, count: int) -> Any:
    if values.shape != (count,):
        raise ValueError(f"expected {count} slots, got {values.shape}")
    return values
