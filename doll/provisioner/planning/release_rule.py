"""Whether a job would still meet its deadline, budget and error target with one worker fewer. Pure.

Each function returns why a slot may not be released, for people, or "".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from doll.amounts import usd
from doll.errors import InfeasiblePlanError
from doll.provisioner.planning import planner
from doll.provisioner.planning.estimators import MIN_EVALUATIONS, MIN_FALL
from doll.provisioner.planning.state import Bools, PlannerSettings, PlannerState
from doll.theory.fitting import fit_tail

MOST_LATE = 0.05
"""Accepted probability of missing the deadline after a release, where the job states none (`plan.risk`)."""
_DEARER = 1.01  # of the expected cost: beyond what rounding of forecasts explains
_REPLICAS = 50


def spare_needed_s(settings: PlannerSettings, reserve: float) -> float:
    """Seconds that must be left to spare with all remaining slots on-demand, for the release of a slot.

    The reserve, and what the deadline guard keeps: all of spot interrupted now, detected late, and booted again.
    """
    return reserve * settings.deadline_s + settings.detection_delay + settings.boot_s


def deadline_at_risk(state: PlannerState, settings: PlannerSettings, reserve: float) -> str:
    """Whether the work cannot be done in time by the slots of `state`, with this reserve.

    Args:
        state: of the slots that would work.
        settings: with the work that the error target needs.
        reserve: fraction of the deadline that must be left to spare.
    """
    plan = planner.plan(state, settings)
    needed_s = spare_needed_s(settings, reserve)
    if not plan.feasible or plan.slack_s < needed_s:
        return (
            f"the deadline would be at risk: {state.num_workers} workers would leave {plan.slack_s:.0f} s to spare, "
            f"{needed_s:.0f} s are required"
        )
    return ""


def release_refusal(before: PlannerState, after: PlannerState, settings: PlannerSettings, reserve: float) -> str:
    """Whether going from the slots of `before` to the slots of `after` endangers deadline or budget, or costs more.

    The predictions are the planner's for both: Eq. (15)-(16) and (21)-(22) of the DOLL paper on the remaining work.
    """
    if refusal := deadline_at_risk(after, settings, reserve):
        return refusal
    forecast, cost_usd = (
        planner.plan(after, settings).forecast,
        planner.plan(before, settings).forecast.expected_cost_usd,
    )
    accepted = MOST_LATE if settings.risk is None else settings.risk
    if forecast.miss_prob > accepted:
        return f"the deadline would be missed with probability {forecast.miss_prob:.3f}, {accepted:g} is accepted"
    if forecast.over_budget:
        return f"the expected cost of {usd(forecast.expected_cost_usd)} USD would be above the budget"
    if forecast.expected_cost_usd > _DEARER * cost_usd:
        return (
            f"the expected cost would rise from {usd(cost_usd)} to {usd(forecast.expected_cost_usd)} USD: to be in "
            "time, the other workers would have to be on-demand for longer"
        )
    return ""


@dataclass(frozen=True)
class ErrorTarget:
    """The held-out error that a job is to reach.

    Attributes:
        error: ε.
        measure: "error_rate" or "loss".
    """

    error: float
    measure: str


def error_refusal(
    updates: Sequence[float], errors: Sequence[float], target: float, floor_growth: float
) -> tuple[str, float]:
    """Whether the error target would be out of reach, and how many updates it takes by the job's own error curve.

    γ of (10) is proportional to 1/(K b), so an update of fewer batches raises the floor of the curve.

    Args:
        updates: J of each held-out evaluation, ascending, shape (m,).
        errors: above 0, shape (m,).
        target: ε.
        floor_growth: batches of an update now over those after the release, at least 1.

    Returns:
        The refusal or "", and the upper end of J(ε); 0 where the curve is too short to say.
    """
    at, measured = np.asarray(updates, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    if len(at) < MIN_EVALUATIONS or measured[-1] > MIN_FALL * measured[0]:
        return "", 0.0
    fit = fit_tail(at, measured, np.random.default_rng(len(at)), replicas=_REPLICAS)
    floor = fit.curve.gamma * floor_growth
    if floor >= target:
        return (f"the error target {target:g} would be at risk: the error curve would not fall below {floor:.4g}"), 0.0
    try:
        needed = fit.updates_to(target)
    except InfeasiblePlanError:  # as the floor is below the target, by rounding only
        return "", 0.0
    return "", needed.high if np.isfinite(needed.high) else needed.point


def with_work(settings: PlannerSettings, samples: float) -> PlannerSettings:
    """Settings whose work is at least so many samples."""
    return replace(settings, samples=max(settings.samples, samples))


def of_slots(state: PlannerState, slots: Bools) -> PlannerState:
    """The state of some slots alone, in their order.

    Raises:
        ValueError: no slot with a rate above 0 is left.
    """
    if slots.all():
        return state
    names = ("rates_per_s", "on_spot", "up", "spot_available", "spot_changed_s", "moved_s")
    return replace(state, **{name: getattr(state, name)[slots] for name in names})
