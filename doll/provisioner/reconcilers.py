"""The reconcilers of a turn. `Controller` has their order."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, replace

from doll import telemetry
from doll.errors import CheckpointError, ConfigError, ServiceUnavailableError
from doll.provisioner.billing import LINES_KEPT_S, MARKETS
from doll.provisioner.decision import ActionResult, Decision
from doll.provisioner.fleets.port import Instance, InstanceState
from doll.provisioner.health import alarms_of
from doll.provisioner.market_plan import DesiredState
from doll.provisioner.planning.pauses import no_time_left, pause_reason
from doll.provisioner.prices.port import PriceFeed
from doll.provisioner.reconcile import FleetStatus, Launch, Terminate, Wait, reconcile
from doll.provisioner.turn import OVER, Turn

log = telemetry.get_logger(__name__)

_MAX_PLANS_PER_TURN = 3  # a market without capacity is planned around in the same turn; the other may lack capacity too


class FleetListing:
    """Lists the fleet after a check of the lease."""

    def __init__(self) -> None:
        self._has_listed = False  # the fleet has answered

    def reconcile(self, turn: Turn) -> None:
        try:
            turn.executor.check_lease()
            turn.listed = list(turn.executor.fleet.instances())
            self._has_listed = True
        except (CheckpointError, ConfigError, ServiceUnavailableError) as exc:
            # Missing credentials are a mistake at the start; later they are being renewed.
            if isinstance(exc, ConfigError) and not (self._has_listed or turn.job.launch_state.has_launched):
                raise
            turn.alarms.append(f"the {'lease' if isinstance(exc, CheckpointError) else 'fleet'} does not answer: {exc}")


def read_prices(turn: Turn, prices: PriceFeed) -> Decision | None:
    """Read the current prices; if they are not available, the last known ones are used. The turn ends here if the fleet
    does not answer, or if machines may be wanted and no price was ever known."""
    job = turn.job
    try:
        job.prices = prices.current(turn.now_s).times(job.settings.machines_per_worker)
    except ServiceUnavailableError as exc:
        turn.alarms.append(f"no current prices, the last known are used: {exc}")
    return turn.decision() if turn.listed is None or (job.prices is None and turn.phase not in OVER) else None


def end_others(turn: Turn) -> None:
    """Keep the instances of this job, and end instances that another job has left in its fleet."""
    job, executor, listed = turn.job, turn.executor, turn.listed or []
    turn.instances = [instance for instance in listed if not instance.job or not job.name or instance.job == job.name]
    own = {instance.id for instance in turn.instances}
    turn.others = [other for other in listed if other.id not in own and other.state is not InstanceState.ENDED]
    if not turn.others:
        return
    jobs = ", ".join(sorted({instance.job for instance in turn.others}))
    turn.alarms.append(f"{len(turn.others)} machines of another job ({jobs}) are in this job's fleet: they are ended")
    late_s = job.settings.limits.notice_timeout_s
    endable = [other for other in turn.others if other.is_endable]
    ends = [other for other in endable if other.notice_s is None or turn.now_s > other.notice_s + late_s]
    if not ends or job.dry_run:
        return
    for other in ends:
        executor.journal("end", turn.now_s, id=other.id, slot=other.slot, why=f"it is of another job: {other.job}")
    if problem := executor.end([other.id for other in ends]):
        turn.alarms.append(f"machines of another job could not be ended: {problem}")


def begin_run(turn: Turn) -> None:
    """Start the job's clock in the first turn of a run. Without a saved state, topics and tags show the start."""
    job, now_s, announced = turn.job, turn.now_s, turn.job.observed.last_decision
    if job.clock.begin_run(job.observed, now_s):
        log.info("generation_started", generation=job.clock.generation, action="clock, work and bill begin again")
        job.plan.begin_generation()
        job.billing.clear()
        job.instances.interruptions = 0
        job.spent_budget_usd = None
    # A successor without state knows these values too, so that it repeats orders unchanged.
    run = f"{job.name} {job.topics_id} {job.clock.generation}"
    job.launch_state.run = hashlib.sha256(run.encode()).hexdigest()[:10] if job.name else ""
    if job.clock.started_s is None:
        if announced is None and not turn.instances:
            rate_per_s = float(job.settings.rates_per_s.sum())
            if problem := no_time_left(job.plan.planner, job.settings.pauses, rate_per_s, now_s):
                raise ConfigError(problem)
        job.clock.start(job.observed, turn.instances, now_s)
        if announced is not None:
            job.billing.expect_earlier_costs()
            job.plan.scale_in.adopt(announced)
        if turn.instances or announced is not None:
            # An earlier provisioner existed, but its state is lost: recent launches may not be listed yet.
            job.launch_state.launches_from_s = now_s + job.settings.limits.listing_lag_s
    for slot in range(job.settings.num_slots):
        job.launch_state.seen(slot, job.observed.highest_incarnation(slot))


def follow_instances(turn: Turn) -> None:
    """Merge the listing with the known instances, report each change, and determine which instances work."""
    job, tracker, limits = turn.job, turn.job.instances, turn.job.settings.limits
    turn.instances = tracker.merge(turn.instances, turn.now_s, limits.listing_lag_s)
    for instance in turn.instances:
        if not _is_settled(instance, turn):
            _follow(instance, turn)
    boot_s = limits.boot_timeout_s
    turn.readiness = tracker.readiness(turn.instances, job.observed, turn.now_s, boot_timeout_s=boot_s)
    tracker.record_health(turn.instances, turn.readiness, job.launch_state, turn.now_s)


def _is_settled(instance: Instance, turn: Turn) -> bool:
    """Return whether the instance has ended and needs nothing more. If it runs again, it is billed again."""
    known, billing = turn.job.instances.known, turn.job.billing
    ended, before = instance.state is InstanceState.ENDED, known.get(instance.id)
    if before is not None and before.ended_s is not None and instance.is_alive:  # stopped, and started again
        _bill_ended(before, turn)
    if instance.id in billing.billed:
        if ended:
            known.pop(instance.id, None)
            return True
        log.warning("instance_came_back", id=instance.id, state=instance.state, action="billed again")
        billing.reopen(instance)
    if not ended or instance.id in known:
        return False
    ended_s = turn.now_s if instance.ended_s is None else instance.ended_s
    # It is on an old bill, or on the bill of an earlier run.
    return turn.now_s - ended_s > LINES_KEPT_S or ended_s <= turn.job.clock.begun_s


def _follow(instance: Instance, turn: Turn) -> None:
    """Report a new, changed or ended instance."""
    job, now_s = turn.job, turn.now_s
    if 0 <= instance.slot < job.settings.num_slots and job.instances.record(
        instance, job.launch_state, now_s, server_runs=job.observed.ps_since_s(now_s) is not None
    ):
        turn.executor.journal(
            "interrupted", now_s, id=instance.id, slot=instance.slot, incarnation=instance.incarnation,
            pool=instance.pool,
        )  # fmt: skip
    job.instances.known[instance.id] = instance
    if instance.state is InstanceState.ENDED:
        _bill_ended(instance, turn)


def _bill_ended(instance: Instance, turn: Turn) -> None:
    billing, known = turn.job.billing, turn.job.instances
    try:
        line = billing.bill_ended(instance, turn.now_s, ready_s=known.ready_s, fenced_s=known.fenced_s)
    except ServiceUnavailableError as exc:
        turn.alarms.append(f"{instance.id} cannot be billed yet: {exc}")
        return
    del known.known[instance.id]
    turn.executor.journal("ended", turn.now_s, **asdict(line))


def bill_instances(turn: Turn) -> None:
    """Compute the bill until now."""
    job, instances = turn.job, turn.job.instances
    turn.bill = job.billing.bill(
        instances.known.values(), turn.now_s, ready_s=instances.ready_s, fenced_s=instances.fenced_s,
        announced=job.observed.last_decision, otherwise=job.prices, machines=job.settings.machines_per_worker,
        alarms=turn.alarms,
    )  # fmt: skip


def review_health(turn: Turn) -> None:
    """Determine the phase of the job. A drain has its own settings, which must not stop anything."""
    job, now_s = turn.job, turn.now_s
    if turn.phase not in OVER:
        job.health.review(job.settings, job.observed, turn.instances, turn.readiness, job.launch_state, job.plan, now_s)
    turn.phase, turn.why = job.phase(draining=turn.phase == "drain")


def update_estimates(turn: Turn) -> None:
    """Estimate the work and the availability of spot from what is observed."""
    job, plan, before = turn.job, turn.job.plan, turn.job.plan.planner.samples
    plan.re_estimate(job.observed)
    if (samples := plan.planner.samples) != before:
        log.info("work_re_estimated", samples_before=before, samples=samples)
    counts = job.health.tells_of_spot(job.launch_state, job.settings.num_slots, is_run=turn.phase == "run")
    ready, pools = turn.readiness.ready_s, job.instances.pools
    plan.observe_spot(job.observed, turn.instances, ready, pools, turn.now_s, counts=counts)


def review_pause(turn: Turn) -> None:
    """Begin or end a pause of a job that could run. A change is saved before it takes effect."""
    job, pause = turn.job, turn.job.pause
    if turn.phase not in ("run", "paused") or job.prices is None:
        return
    pause.record_price(job.prices.spot_usd_per_h, turn.now_s)
    before, pause.why = pause.why, pause_reason(
        turn.planner_state(), job.plan.planned(job.observed), job.settings.pauses, turn.now_s,
        recent_usd_per_h=pause.usd_per_h, is_paused=bool(pause.why),
    )  # fmt: skip
    if bool(before) != bool(pause.why):
        log.info("pause", begins=bool(pause.why), why=pause.why)
        turn.executor.journal("pause" if pause.why else "resume", turn.now_s, why=pause.why)
        if before:
            job.plan.resume(turn.now_s)
        turn.executor.save()
    turn.phase, turn.why = job.phase(draining=False)


def review_workers(turn: Turn) -> None:
    """Let scale-in decide which slots have no worker from now on. The decision is saved before it takes effect."""
    if turn.phase != "run":
        return
    changes = turn.job.plan.review_workers(turn.planner_state(), turn.job.observed, turn.instances, turn.now_s)
    for change in changes:
        log.info("scale_in", what=change.kind, slot=change.slot, by=change.by, why=change.why)
        turn.executor.journal(change.kind, turn.now_s, slot=change.slot, by=change.by, why=change.why)
    if changes:
        turn.executor.save()


def stop_launches(turn: Turn) -> None:
    """Stop all launches if both markets refuse machines and no machine has ever worked."""
    job, never_worked = turn.job, not turn.has_machines and not turn.readiness.incarnation_held
    if turn.phase == "run" and not job.dry_run and never_worked:
        job.launch_state.stop_if_all_refuse(turn.now_s)
    if job.launch_state.stopped and turn.phase == "run":
        turn.phase = "stopped"


def raise_alarms(turn: Turn) -> None:
    """Collect the alarms of the turn."""
    job, desired, budget_usd = turn.job, turn.desired, turn.job.plan.planner.budget_usd
    assert desired is not None
    turn.alarms += alarms_of(desired, job.launch_state, job.health, budget_usd=budget_usd, now_s=turn.now_s)
    turn.alarms += [result.text() for result in turn.results if result.failure and isinstance(result.action, Terminate)]
    if problem := turn.executor.problem:
        turn.alarms.append(f"no machine is launched before this is corrected: {problem}")


def record_decision(turn: Turn) -> Decision:
    """End the turn: write its decision to the journal, and save the state."""
    executor, decision = turn.executor, turn.decision()
    if turn.job.dry_run:
        return decision
    # Its fleet may forget a finished job. After a failure, the fleet's records show the cause.
    ended = turn.instances if decision.finished and decision.phase != "failed" else []
    if ended and (problem := executor.end([instance.id for instance in ended])):
        log.warning("ended_instances_not_cleared", error=problem, action="nothing runs; their owner keeps them")
    turn.job.decision = decision.to_dict()
    executor.journal("decision", turn.now_s, **turn.job.decision)
    executor.save()
    return decision


def change_fleet(turn: Turn) -> None:
    """Plan, compare the fleet with the plan, and apply the actions. Repeat this if the plan relied on a launch that has
    failed. If the budget is spent, end every machine."""
    job = turn.job
    for _ in range(_MAX_PLANS_PER_TURN):
        turn.desired = _desired_state(turn)
        status = _fleet_status(turn, turn.desired)
        if turn.phase == "run" and status.spare_usd < 0:
            job.spent_budget_usd = job.plan.planner.budget_usd
            turn.phase, turn.why = job.phase(draining=False)
            turn.desired = _desired_state(turn)
            status = replace(status, wanted=turn.desired.markets, reasons=turn.desired.reasons)
        actions = reconcile(status, job.launch_state, turn.now_s)
        turn.results = [result for result in turn.results if not isinstance(result.action, Wait)]
        if job.dry_run:
            turn.results += [ActionResult(action) for action in actions]
            return
        applied = turn.executor.apply(actions, turn.instances, turn.now_s)
        turn.results += applied
        if not any(_needs_replan(result, turn) for result in applied):
            return


def _desired_state(turn: Turn) -> DesiredState:
    """Return the wanted market of each slot, with the reason."""
    job, state = turn.job, turn.planner_state()
    if turn.phase != "run":
        return DesiredState.of_no_machines(turn.phase, turn.why, state)
    return job.plan.choose(
        state, job.observed, fleet_is_empty=not turn.has_machines, now_s=turn.now_s, hold=job.health.hold_moves
    )


def _fleet_status(turn: Turn, desired: DesiredState) -> FleetStatus:
    job, budget_usd, reserve_usd = turn.job, turn.job.plan.planner.budget_usd, turn.job.plan.reserve_usd(turn.prices)
    running = sum(instance.state is not InstanceState.ENDED for instance in turn.instances)
    spare_usd = math.inf if budget_usd is None else budget_usd - turn.bill.usd - running * reserve_usd
    return FleetStatus(
        wanted=desired.markets, reasons=desired.reasons, instances=turn.instances, readiness=turn.readiness,
        urgent=desired.urgent, spare_usd=spare_usd, commit_usd=dict.fromkeys(MARKETS, reserve_usd),
        unlisted=job.instances.unlisted, hold=job.health.hold_launches,
        overdue=job.instances.overdue(turn.now_s, job.settings.limits.notice_timeout_s),
    )  # fmt: skip


def _needs_replan(result: ActionResult, turn: Turn) -> bool:
    """Return whether the plan relied on a launch that has failed."""
    if not result.failure or not isinstance(result.action, Launch):
        return False
    order = result.action.order
    return order.market == "on_demand" or bool(turn.job.plan.spot_available[order.slot])
