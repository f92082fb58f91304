"""The provisioner's loop, one turn at a time: observe, plan, reconcile, apply. It has no clock and no thread.

A turn has these effects, in this order: 1. list the fleet; 2. add ended instances to the bill; 3. write each
termination to the journal, then end the instance; 4. write orders to the journal and save the state; 5. make the
orders, one by one; 6. save the state. After a crash between two steps, the next turn continues. The fleet's tags show
which instances exist. An order that may have been made is repeated unchanged, which returns the same instance. Ending
an instance twice is no error.

While this process is frozen, another process may make the next turn. The successor takes over the state, so steps 4 and
6 of this process fail. This process also checks the lease before each termination and order of steps 3 and 5. If a
check fails, this process ends the instances that it has launched since the check before and that the successor does not
know.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any, ClassVar

from doll import telemetry
from doll.errors import CheckpointError, ConfigError, FencedError, ServiceUnavailableError
from doll.provisioner.apply import ActionExecutor
from doll.provisioner.billing import (
    LINES_KEPT_S,
    MARKETS,
    Bill,
    BillingAccount,
    BillingRule,
    all_on_demand_usd,
    usd_per_error_point,
)
from doll.provisioner.decision import ActionResult, Decision, Phase
from doll.provisioner.fleets.port import Fleet, Instance, InstanceState, SpotProbe
from doll.provisioner.health import JobHealth, alarms_of
from doll.provisioner.instances import InstanceTracker
from doll.provisioner.kept_state import KeptState
from doll.provisioner.launch_state import LaunchState
from doll.provisioner.market_plan import DesiredState, MarketPlan, reserve_usd
from doll.provisioner.observation import Observed
from doll.provisioner.planning.state import Market, PlannerState
from doll.provisioner.prices.port import PriceFeed
from doll.provisioner.reconcile import FleetStatus, Launch, Readiness, Terminate, Wait, reconcile
from doll.provisioner.scale_in import release_request
from doll.provisioner.settings import ControllerSettings
from doll.provisioner.state_store import RetriedStateStore, StateStore
from doll.records import control as records
from doll.theory.checks import Floats
from doll.theory.cost import Prices

log = telemetry.get_logger(__name__)

_MAX_PLANS_PER_TURN = 3  # a market without capacity is planned around in the same turn; the other may lack capacity too
_STATE_VERSION = 3
_UNKNOWN_PRICES = Prices(0.0, 1.0)  # for a drain without prices, which does not plan


class JobClock(KeptState):
    """The clock of one run of a job.

    Attributes:
        started_s: start of the clock in Unix seconds, which the job's settings may state. None before the first turn.
        generation: generation of the job's run on its topics.
        begun_s: Unix time of the start of this run. Instances that ended before belong to an earlier run.
    """

    KEPT: ClassVar = {"started_s": float, "generation": int, "begun_s": float}

    def __init__(self, started_s: float | None) -> None:
        self.started_s = started_s
        self.generation = 0
        self.begun_s = -math.inf
        self.ignores_earlier_runs = False  # the stored state belongs to another run; the next turn starts a new run

    def begin_run(self, observed: Observed, now_s: float, stated_s: float | None) -> bool:
        """Record the job's generation. Returns whether a new generation has begun after a run with saved state; the
        bill of that run must then be cleared. `stated_s` is the start from the settings."""
        if self.ignores_earlier_runs:
            self.ignores_earlier_runs, self.begun_s = False, now_s
            self.started_s = now_s if self.started_s is None else self.started_s
        if observed.generation <= self.generation:
            return False
        self.generation, began_s = observed.generation, observed.generation_s
        self.begun_s = began_s if 0 < began_s <= now_s else now_s
        if self.started_s is None:
            return False
        self.started_s = self.begun_s if stated_s is None else stated_s
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

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Restore the saved state. A start from the settings replaces the saved start."""
        stated_s = self.started_s
        super().restore(kept)
        self.started_s = self.started_s if stated_s is None else stated_s


@dataclass
class _Turn:
    """The observations of one turn.

    Attributes:
        instances: instances of the job; the actions of the turn update them.
        prices: prices of a worker with all of its machines.
        alarms: alarms for people, to which the turn adds.
    """

    now_s: float
    instances: list[Instance]
    readiness: Readiness
    bill: Bill
    prices: Prices
    alarms: list[str]

    @property
    def has_machines(self) -> bool:
        """Whether an instance runs or boots."""
        return any(instance.is_alive for instance in self.instances)


@dataclass(eq=False, repr=False)
class Controller:
    """The provisioner of one job.

    Call `turn` at least every `settings.planner.replan_s` seconds, and pass the job's records to `observed.feed` in
    between. A new object continues from the state in the state store.

    Args:
        billing: billing rule of the owner of the fleet's machines.
        probe: function that returns whether spot has a machine, without launching one. None: the outcomes of launches
            show this.
        check_lease: function that raises FencedError if another provisioner has taken over.
        dry_run: whether to decide and report without changing or saving anything.
        job, topics_id: name of the job and id of its topics; "": not known. Machines that another job has left in this
            fleet are ended. A saved state of earlier topics with the same names is ignored.

    Attributes:
        observed: knowledge from the job's records so far.
        positions: positions of the caller in the topics that it reads. They are saved with the state.
    """

    settings: ControllerSettings
    fleet: Fleet
    prices: PriceFeed
    billing: BillingRule
    state_store: StateStore
    _: KW_ONLY
    probe: SpotProbe | None = None
    check_lease: Callable[[], None] = lambda: None
    dry_run: bool = False
    job: str = ""
    topics_id: str = ""

    def __post_init__(self) -> None:
        self._retried_store = RetriedStateStore(self.state_store)
        self._reset()
        self._restore()

    def _reset(self) -> None:
        """Start without a saved state."""
        settings, count = self.settings, self.settings.num_slots
        self.observed = Observed(
            settings.rates_per_s,
            samples_per_record=settings.samples_per_record,
            prior_alpha=settings.prior_alpha,
            prior_cycle_s=settings.planner.cycle_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            keeps_losses=settings.scale_in is not None,
        )
        self.positions: dict[str, int] = {}
        self._launch_state = LaunchState(count, settings.limits, settings.machines_per_worker)
        self._plan = MarketPlan(settings, self.billing, self.probe, dry_run=self.dry_run)
        self._tracker = InstanceTracker(count)
        self._account = BillingAccount(
            self.billing, lambda pool, market, start_s, end_s: self.prices.series(pool, market, start_s, end_s)
        )
        self._executor = ActionExecutor(
            self.fleet, self._launch_state, self._tracker, journal=self._append_journal, save=self._save,
            check_lease=self.check_lease, known_to_successor=self._known_to_successor,
        )  # fmt: skip
        self._turn = 0
        self._clock = JobClock(settings.started_s)
        self._health = JobHealth()
        self._has_listed = False  # the fleet has answered
        self._has_others = False  # machines of other jobs still exist
        self._last_prices: Prices | None = None
        self._spent_budget_usd: float | None = None  # the budget that is spent
        self._last_decision: dict[str, Any] | None = None  # for readers without access to this machine's journal

    def retarget(self, settings: ControllerSettings) -> None:
        """Change deadline, budget, work, K or behaviour while the job runs; the initial rates and availability are
        ignored. Raises ValueError if slots, b or machines per worker differ, because these never change."""
        self.settings.check_change(settings)
        self.settings = settings
        self._plan.retarget(settings)
        self._launch_state.limits, self.observed.heartbeat_timeout_s = settings.limits, settings.heartbeat_timeout_s
        self.observed.keeps_losses = settings.scale_in is not None

    def release_request(self, decision: Decision) -> records.Scale | None:
        """Return the request to the parameter server that follows from this decision; None if there is none."""
        if self.dry_run or decision.phase != "run":
            return None
        return release_request(decision.released, self.observed.status)

    def turn(self, now_s: float, *, draining: bool = False) -> Decision:
        """Make one decision and carry it out. If `draining`, end every instance and launch none.

        Raises:
            FencedError: another provisioner has taken over. Nothing was changed after that.
            ConfigError, CheckpointError: the state or the journal cannot be written.
        """
        turn = self._observe(now_s, ends_all=draining or self.observed.finished is not None)
        if isinstance(turn, Decision):
            return turn
        phase = self._phase(draining)
        counts = self._health.tells_of_spot(self._launch_state, self.settings.num_slots, is_run=phase == "run")
        self._plan.observe_spot(
            self.observed, turn.instances, turn.readiness.ready_s, self._tracker.pools, now_s, counts=counts
        )
        if phase == "run":
            self._review_workers(turn)
        desired, results = self._plan_and_apply(turn, draining)
        phase = desired.phase
        never_worked = not turn.has_machines and not turn.readiness.incarnation_held
        if phase == "run" and not self.dry_run and never_worked:
            self._launch_state.stop_if_all_refuse(now_s)
        if self._launch_state.stopped and phase == "run":
            phase = "stopped"
        self._raise_alarms(turn, desired, results)
        decision = self._decision(turn, desired, phase, results)
        if decision.finished and phase != "failed":  # after a failure, the fleet's records show the cause
            self._executor.clear_away(turn.instances, dry_run=self.dry_run)
        if not self.dry_run:
            self._last_decision = decision.to_dict()
            self._retried_store.append({"kind": "decision", **self._last_decision})
            self._save()
        return decision

    def _plan_and_apply(self, turn: _Turn, draining: bool) -> tuple[DesiredState, list[ActionResult]]:
        """Plan, reconcile and apply. Repeat this if the plan relied on a launch that has failed."""
        results: list[ActionResult] = []
        for _ in range(_MAX_PLANS_PER_TURN):
            desired = self._desired_state(turn, self._phase(draining))
            status = self._fleet_status(turn, desired)
            if desired.phase == "run" and status.spare_usd < 0:
                self._spent_budget_usd = self._plan.planner.budget_usd
                desired = self._desired_state(turn, self._phase(draining))
                status = replace(status, wanted=desired.markets, reasons=desired.reasons)
            actions = reconcile(status, self._launch_state, turn.now_s)
            results = [result for result in results if not isinstance(result.action, Wait)]
            if self.dry_run:
                return desired, results + [ActionResult(action) for action in actions]
            applied = self._executor.apply(actions, turn.instances, turn.now_s)
            results += applied
            if not any(self._needs_replan(result) for result in applied):
                break
        return desired, results

    def _raise_alarms(self, turn: _Turn, desired: DesiredState, results: Sequence[ActionResult]) -> None:
        budget_usd = self._plan.planner.budget_usd
        turn.alarms += alarms_of(desired, self._launch_state, self._health, budget_usd=budget_usd, now_s=turn.now_s)
        turn.alarms += [result.text() for result in results if result.failure and isinstance(result.action, Terminate)]
        if self._retried_store.problem:
            turn.alarms.append(f"no machine is launched before this is corrected: {self._retried_store.problem}")

    def _observe(self, now_s: float, *, ends_all: bool) -> _Turn | Decision:
        """Observe fleet, prices, bill and health. Returns a decision to do nothing if the fleet or the prices are not
        available. If `ends_all` is True, every instance is ended, and no prices are needed."""
        alarms: list[str] = []
        listed = self._list(alarms)
        prices = self._current_prices(now_s, alarms)
        self._turn += 1
        if listed is None or (prices is None and not ends_all):
            return self._decide_nothing(now_s, prices, alarms)
        listed = self._own(listed, now_s, alarms)
        self._begin(now_s, listed)
        tracker, launch_state = self._tracker, self._launch_state
        instances = self._merge_listing(listed, now_s, alarms)
        readiness = tracker.readiness(
            instances, self.observed, now_s, boot_timeout_s=self.settings.limits.boot_timeout_s
        )
        tracker.record_health(instances, readiness, launch_state, now_s)
        self._re_estimate()
        bill = self._account.bill(
            tracker.known.values(), now_s, ready_s=tracker.ready_s, fenced_s=tracker.fenced_s,
            announced=self.observed.last_decision, otherwise=self._last_prices,
            machines=self.settings.machines_per_worker, alarms=alarms,
        )  # fmt: skip
        if not ends_all:  # a drain has its own settings, which must not stop anything
            self._health.review(self.settings, self.observed, instances, readiness, launch_state, self._plan, now_s)
        return _Turn(now_s, instances, readiness, bill, _UNKNOWN_PRICES if prices is None else prices, alarms)

    def _list(self, alarms: list[str]) -> list[Instance] | None:
        """Return the fleet's listing after a check of the lease; None if the lease or the fleet is not available."""
        try:
            self.check_lease()
            listed = list(self.fleet.instances())
        except (CheckpointError, ConfigError, ServiceUnavailableError) as exc:
            # Missing credentials are a mistake at the start; later they are being renewed.
            if isinstance(exc, ConfigError) and not (self._has_listed or self._launch_state.has_launched):
                raise
            alarms.append(f"the {'lease' if isinstance(exc, CheckpointError) else 'fleet'} does not answer: {exc}")
            return None
        self._has_listed = True
        return listed

    def _current_prices(self, now_s: float, alarms: list[str]) -> Prices | None:
        """Return the prices of a worker with all of its machines. If not available, return the last known ones."""
        try:
            self._last_prices = self.prices.current(now_s).times(self.settings.machines_per_worker)
        except ServiceUnavailableError as exc:
            alarms.append(f"no current prices, the last known are used: {exc}")
        return self._last_prices

    def _own(self, listed: Sequence[Instance], now_s: float, alarms: list[str]) -> list[Instance]:
        """Return the instances of this job, and end instances that another job has left in its fleet."""
        own = [instance for instance in listed if not instance.job or not self.job or instance.job == self.job]
        ids = {instance.id for instance in own}
        others = [item for item in listed if item.id not in ids and item.state is not InstanceState.ENDED]
        self._has_others = bool(others)
        self._executor.end_others(others, now_s, alarms, dry_run=self.dry_run)
        return own

    def _begin(self, now_s: float, listed: Sequence[Instance]) -> None:
        """Start the job's clock in the first turn. Without a saved state, topics and tags show the start."""
        if self._clock.begin_run(self.observed, now_s, self.settings.started_s):
            log.info("generation_started", generation=self._clock.generation, action="clock, work and bill begin again")
            self._plan.begin_generation()
            self._account.clear()
            self._tracker.interruptions = 0
            self._spent_budget_usd = None
        # A successor without state knows these values too, so that it repeats orders unchanged.
        run = f"{self.job} {self.topics_id} {self._clock.generation}"
        self._launch_state.run = hashlib.sha256(run.encode()).hexdigest()[:10] if self.job else ""
        if self._clock.started_s is None:
            self._clock.start(self.observed, listed, now_s)
            if self.observed.last_decision is not None:
                self._account.expect_earlier_costs()
                self._plan.scale_in.adopt(self.observed.last_decision)
            if listed or self.observed.last_decision is not None:
                # An earlier provisioner existed, but its state is lost: recent launches may not be listed yet.
                self._launch_state.launches_from_s = now_s + self.settings.limits.listing_lag_s
        for slot in range(self.settings.num_slots):
            self._launch_state.seen(slot, self.observed.highest_incarnation(slot))

    def _merge_listing(self, listed: Sequence[Instance], now_s: float, alarms: list[str]) -> list[Instance]:
        """Return all instances of the job, and report their changes to launch state, bill and journal."""
        tracker = self._tracker
        instances = tracker.merge(listed, now_s, self.settings.limits.listing_lag_s)
        for instance in instances:
            ended = instance.state is InstanceState.ENDED
            before = tracker.known.get(instance.id)
            if before is not None and before.ended_s is not None and instance.is_alive:  # stopped, and started again
                self._bill_ended(before, now_s, alarms)
            if instance.id in self._account.billed:
                if ended:
                    tracker.known.pop(instance.id, None)
                    continue
                log.warning("instance_came_back", id=instance.id, state=instance.state, action="billed again")
                self._account.reopen(instance)
            if ended and instance.id not in tracker.known:
                ended_s = now_s if instance.ended_s is None else instance.ended_s
                if now_s - ended_s > LINES_KEPT_S or ended_s <= self._clock.begun_s:
                    continue  # on an old bill, or on the bill of an earlier run
            if 0 <= instance.slot < self.settings.num_slots and tracker.record(
                instance, self._launch_state, now_s, server_runs=self.observed.ps_since_s(now_s) is not None
            ):
                self._append_journal(
                    "interrupted", now_s, id=instance.id, slot=instance.slot, incarnation=instance.incarnation,
                    pool=instance.pool,
                )  # fmt: skip
            tracker.known[instance.id] = instance
            if ended:
                self._bill_ended(instance, now_s, alarms)
        return instances

    def _bill_ended(self, instance: Instance, now_s: float, alarms: list[str]) -> None:
        tracker = self._tracker
        try:
            line = self._account.bill_ended(instance, now_s, ready_s=tracker.ready_s, fenced_s=tracker.fenced_s)
        except ServiceUnavailableError as exc:
            alarms.append(f"{instance.id} cannot be billed yet: {exc}")
            return
        del tracker.known[instance.id]
        self._append_journal("ended", now_s, **line.to_dict())

    def _re_estimate(self) -> None:
        before = self._plan.planner.samples
        self._plan.re_estimate(self.observed)
        if (samples := self._plan.planner.samples) != before:
            log.info("work_re_estimated", samples_before=before, samples=samples)

    def _phase(self, draining: bool) -> Phase:
        if draining:
            return "drain"
        if self.observed.finished is not None:
            return "done"
        if self._health.failed:
            return "failed"
        if self._spent_budget_usd is not None and self._plan.planner.budget_usd == self._spent_budget_usd:
            return "budget"
        return "idle" if self._health.idle else "run"

    def _state(self, turn: _Turn) -> PlannerState:
        """Return the planner's input: the current state of the job."""
        assert self._clock.started_s is not None
        return self._plan.state(
            self.observed, turn.instances, turn.readiness.ready_s, self._launch_state, bill=turn.bill,
            prices=turn.prices, now_s=turn.now_s, started_s=self._clock.started_s,
        )  # fmt: skip

    def _review_workers(self, turn: _Turn) -> None:
        """Let scale-in decide which slots have no worker from now on. The decision is saved before it takes effect."""
        changes = self._plan.review_workers(self._state(turn), self.observed, turn.instances, turn.now_s)
        for change in changes:
            log.info("scale_in", what=change.kind, slot=change.slot, why=change.why)
            self._append_journal(change.kind, turn.now_s, slot=change.slot, why=change.why)
        if changes:
            self._save()

    def _desired_state(self, turn: _Turn, phase: Phase) -> DesiredState:
        """Return the wanted market of each slot, with the reason."""
        state = self._state(turn)
        whys: dict[Phase, str] = {
            "drain": "every instance is ended",
            "done": f"the job has ended: {self.observed.finished}",
            "budget": f"the budget of {self._plan.planner.budget_usd} USD is spent",
            "failed": f"the job is stopped: {self._health.failed}",
            "idle": f"no sample has come since {self._health.idle}",
        }
        if phase in whys:
            return DesiredState.of_no_machines(phase, whys[phase], state)
        return self._plan.choose(
            state, self.observed, fleet_is_empty=not turn.has_machines, now_s=turn.now_s, hold=self._health.hold_moves
        )

    def _fleet_status(self, turn: _Turn, desired: DesiredState) -> FleetStatus:
        budget_usd, spare_usd = self._plan.planner.budget_usd, math.inf
        commit: dict[Market, float] = {}
        if budget_usd is not None:
            running = sum(instance.state is not InstanceState.ENDED for instance in turn.instances)
            reserve = reserve_usd(turn.prices, self._plan.planner.replan_s, self.billing)
            spare_usd = budget_usd - turn.bill.usd - running * reserve
            commit = dict.fromkeys(MARKETS, reserve)
        return FleetStatus(
            wanted=desired.markets, reasons=desired.reasons, instances=turn.instances, readiness=turn.readiness,
            urgent=desired.urgent, spare_usd=spare_usd, commit_usd=commit, unlisted=self._tracker.unlisted,
            hold=self._health.hold_launches,
            overdue=self._tracker.overdue(turn.now_s, self.settings.limits.notice_timeout_s),
        )  # fmt: skip

    def _needs_replan(self, result: ActionResult) -> bool:
        """Return whether the plan relied on a launch that has failed."""
        if not result.failure or not isinstance(result.action, Launch):
            return False
        order = result.action.order
        return order.market == "on_demand" or bool(self._plan.spot_available[order.slot])

    def _append_journal(self, kind: str, now_s: float, **fields: Any) -> None:
        if not self.dry_run:
            self._retried_store.append({"kind": kind, "turn": self._turn, "time_s": now_s, **fields})

    def _decision(self, turn: _Turn, desired: DesiredState, phase: Phase, results: Sequence[ActionResult]) -> Decision:
        left = any(instance.state is not InstanceState.ENDED for instance in turn.instances) or self._has_others
        left = left or self._launch_state.may_have_launched(turn.now_s)
        return Decision(
            **self._where_the_job_stands(
                turn.bill, desired.state.rates_per_s, self._last_prices, turn.alarms, turn.now_s
            ),
            phase=phase, markets=desired.markets, reasons=desired.reasons, binding=desired.binding,
            feasible=desired.feasible, results=tuple(results), instances=tuple(turn.instances),
            ready=frozenset(turn.readiness.ready_s), expected_cost_usd=desired.expected_cost_usd,
            expected_finish_s=desired.expected_finish_s, slack_s=desired.slack_s, alpha=desired.state.alpha,
            cost_sd_usd=desired.cost_sd_usd, finish_sd_s=desired.finish_sd_s,
            finished=phase in ("done", "drain", "budget", "failed") and not left,
        )  # fmt: skip

    def _decide_nothing(self, now_s: float, prices: Prices | None, alarms: Sequence[str]) -> Decision:
        """Return a decision to do nothing, because the fleet or the prices are not available."""
        why = "as before: fleet or prices do not answer"
        rates = self.observed.rates_per_s()
        return Decision(
            **self._where_the_job_stands(self._account.last_bill(), rates, prices, alarms, now_s), phase="unavailable",
            markets=self._plan.markets, reasons=(why,) * self.settings.num_slots, binding="unavailable",
            alpha=self.observed.spot.alpha(),
        )  # fmt: skip

    def _where_the_job_stands(
        self, bill: Bill, rates_per_s: Floats, prices: Prices | None, alarms: Sequence[str], now_s: float
    ) -> dict[str, Any]:
        """Return the fields of a decision that do not depend on the plan. `prices` are of one worker; None: not
        known."""
        settings, observed, plan = self.settings, self.observed, self._plan
        samples_done = plan.samples_done(observed)
        on_demand_usd = math.nan
        if prices is not None:
            on_demand_usd = all_on_demand_usd(samples_done, rates_per_s, prices.on_demand_usd_per_h)
        _, errors = observed.errors(settings.measure)
        return {
            "turn": self._turn,
            "now_s": now_s,
            "started_s": now_s if self._clock.started_s is None else self._clock.started_s,
            "incarnations": tuple(slot.incarnation for slot in self._launch_state.slots),
            "bill": bill,
            "samples_done": samples_done,
            "target_samples": plan.planner.samples,
            "updates_done": observed.version,
            "target_updates": plan.planner.updates,
            "all_on_demand_usd": on_demand_usd,
            "cycle_s": observed.spot.cycle_s,
            "prices": prices,
            "machines_per_worker": settings.machines_per_worker,
            "rates_per_s": rates_per_s,
            "usd_per_error_point": usd_per_error_point(bill.usd, errors[0], errors[-1]) if errors else math.nan,
            "moves": plan.moves,
            "interruptions": self._tracker.interruptions,
            "alarms": tuple(dict.fromkeys(alarms)),
            "dry_run": self.dry_run,
        }

    @property
    def _parts(self) -> dict[str, KeptState]:
        """The parts whose state is saved, by their names in the file."""
        return {
            "launch_state": self._launch_state, "observed": self.observed, "plan": self._plan,
            "instances": self._tracker, "billing": self._account, "clock": self._clock, "health": self._health,
        }  # fmt: skip

    def _save(self) -> str:
        """Save the state. Returns the reason for a failure, or ""."""
        if self.dry_run:
            return ""
        self._tracker.forget_all_but(self._account.billed)
        kept = {
            "state": _STATE_VERSION,
            "job": self.job,
            "topics_id": self.topics_id,
            "turn": self._turn,
            "prices": None if self._last_prices is None else asdict(self._last_prices),
            "spent_budget_usd": self._spent_budget_usd,
            **{name: part.to_dict() for name, part in self._parts.items()},
            "positions": self.positions,
            "decision": self._last_decision,
        }
        try:
            self._retried_store.save(kept)
        except FencedError:
            self._executor.undo()
            raise
        if not self._retried_store.problem:
            self._executor.confirm()
        return self._retried_store.problem

    def _known_to_successor(self) -> set[str]:
        kept = self._retried_store.load() or {}
        return {instance["id"] for instance in kept["instances"]["known"]} if kept else set()

    def _restore(self) -> None:
        kept = self._retried_store.load()
        if kept is None:
            return
        try:
            if kept["state"] != _STATE_VERSION:
                raise ValueError(f"expected state version {_STATE_VERSION}, got {kept['state']!r}")
            names = (str(kept["job"]), str(kept["topics_id"]))
            if any(was and now and was != now for was, now in zip(names, (self.job, self.topics_id), strict=True)):
                log.warning("provision_state_of_another_run", job=names[0], topics_id=names[1], action="starting over")
                self._clock.ignores_earlier_runs = True
                return
            # A drain does not know the topics, so their values in the state are kept.
            self.job, self.topics_id = self.job or names[0], self.topics_id or names[1]
            self._read(kept)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            log.warning("provision_state_invalid", error=f"{type(exc).__name__}: {exc}", action="from tags and topics")
            self._reset()

    def _read(self, kept: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            if name in kept or name != "health":  # earlier releases had none
                part.restore(kept[name])
        self._turn = int(kept["turn"])
        self._last_prices = None if kept["prices"] is None else Prices(**kept["prices"])
        self._spent_budget_usd = kept["spent_budget_usd"]
        self._last_decision = kept.get("decision")  # earlier releases had none
        self.positions = {str(name): int(at) for name, at in kept["positions"].items()}
