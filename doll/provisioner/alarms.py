"""What a person must know or do: a job that cannot advance, quotas, refusals, a lost deadline or budget. Pure."""

from __future__ import annotations

from doll.provisioner.health import JobHealth
from doll.provisioner.launch_state import LaunchState
from doll.provisioner.market_plan import DesiredState
from doll.provisioner.planning.state import Market

_RESTART = "start the provisioner again: doll provision run JOB.yaml"
_MARKET_NAMES: dict[Market, str] = {"spot": "spot", "on_demand": "on-demand"}


def alarms_of(
    desired: DesiredState, launch_state: LaunchState, health: JobHealth, *, budget_usd: float | None, now_s: float
) -> list[str]:
    """The alarms of a turn, for people."""
    alarms = list(health.alarms) if desired.phase == "run" else []
    if desired.phase == "failed":
        alarms.append(f"the job is stopped, and all machines are ended: {health.failed}. Correct it, then {_RESTART}")
    if desired.phase == "idle":
        alarms.append(
            f"the source has sent nothing since {health.idle}: all machines are ended, and launched again when it sends"
        )
    if launch_state.stopped:
        alarms.append(f"no machine is launched any more: {launch_state.stopped}. Correct it, then {_RESTART}")
    for market, name in _MARKET_NAMES.items():
        if now_s < launch_state.quota_s(market):
            alarms.append(f"the quota of {name} machines is used up: request an increase")
        elif message := launch_state.refusal(market):
            alarms.append(f"no {name} machines, for another reason than capacity: {message}")
    if not desired.feasible and desired.phase == "run":
        alarms.append(
            "the budget does not suffice for the deadline: raise one of them, or accept a later end"
            if desired.binding == "budget"
            else "the deadline cannot be met any more: everything runs on-demand to finish as soon as possible"
            if "spot" not in desired.markets
            else "the deadline cannot be met any more at the rates of the streams"
        )
    if desired.phase == "budget":
        alarms.append(
            f"the budget of {budget_usd} USD is spent: all machines are ended, and the provisioner exits. To continue "
            f"the job, raise plan.budget_usd in the job file, then {_RESTART}"
        )
    if desired.binding == "done" and desired.phase == "run":
        alarms.append("the planned work is done, but the job goes on: set stop.updates, or plan for more")
    return alarms
