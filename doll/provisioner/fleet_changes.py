"""The reconciler that changes the fleet: it chooses the market of each slot, and launches and ends machines."""

from __future__ import annotations

import math
from dataclasses import replace

from doll.provisioner.billing import MARKETS
from doll.provisioner.decision import ActionResult
from doll.provisioner.fleets.port import InstanceState
from doll.provisioner.market_plan import DesiredState
from doll.provisioner.reconcile import FleetStatus, Launch, Wait, reconcile
from doll.provisioner.turn import Turn

_MAX_PLANS_PER_TURN = 3  # a market without capacity is planned around in the same turn; the other may lack capacity too


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
