"""An assessment as text, for `doll plan` and dry runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from doll.amounts import duration, duration_range, usd, usd_range
from doll.provisioner.planning.assessment import Assessment
from doll.provisioner.planning.planner import slot_ranges
from doll.provisioner.planning.stack_cost import StackKind, stack_lines

_BINDING = {
    "none": "no constraint binds: all workers may run on spot",
    "deadline": "the deadline binds: one more worker on spot would be late in expectation",
    "risk": "the risk binds: one more worker on spot would be late too often",
    "price": "the prices bind: more workers on spot would not be cheaper",
    "budget": "the budget binds: it is expected to suffice only with the adaptive planner",
}


def report_text(assessment: Assessment, notes: Sequence[str], stack: StackKind | None = None) -> str:
    """The assessment with its advice; `notes` are appended.

    Args:
        stack: what runs beside the workers and is shown with its cost; None: nothing.
    """
    request, static = assessment.request, assessment.static
    count = request.num_workers
    lines = []
    if assessment.problem is not None:
        lines += [f"NOT FEASIBLE: {assessment.problem}", "", "The best possible result:"]
    else:
        lines.append(f"Feasible; {_BINDING[assessment.binding]}.")
    lines += [
        f"  spot {assessment.num_spot} of {count} workers, on-demand {count - assessment.num_spot}",
        *_slots_by_market(assessment),
        *_machines(assessment),
        f"  cost    {usd_range(static.expected_cost_usd, static.cost_sd_usd)} USD, {assessment.savings:.1%} saved of "
        f"{usd(assessment.all_on_demand_usd)} USD on-demand",
        f"  finish  {duration_range(static.expected_finish_s, static.finish_sd_s)}"
        + (f", deadline {duration(request.deadline_s)}" if request.deadline_s else ", no deadline given"),
    ]
    if request.deadline_s is not None:
        lines.append(f"  P(late) {_probability(static.miss_prob)} if the mix is kept to the end")
    if assessment.adaptive is not None:
        late = f", P(late) {_probability(assessment.adaptive.miss_prob)}" if request.deadline_s else ""
        cost = usd_range(assessment.adaptive.expected_cost_usd, assessment.adaptive.cost_sd_usd)
        lines.append(
            f"Adaptive planner with guard: about {cost} USD{late} while on-demand workers boot in {request.boot_s:g} s"
        )
    if assessment.bounds is not None:
        lines.append(
            f"Corollary 2: the best mix costs {assessment.bounds[0]:.2%} to {assessment.bounds[1]:.2%} of on-demand"
        )
    lines.append(f"All on spot: {usd(assessment.all_spot_usd)} USD, {duration(assessment.all_spot_s)} expected")
    if assessment.stability is not None:
        stability = assessment.stability
        lines.append(
            f"Stability: {stability.verdict}; margin {stability.sufficient:.3g} (sufficient form), "
            f"{stability.necessary:.3g} (necessary form)"
        )
    if stack is not None and math.isfinite(static.expected_finish_s):
        lines += stack_lines(stack, static.expected_finish_s, static.expected_cost_usd)
    lines += [f"- {line}" for line in (*assessment.advice, *notes)]
    return "\n".join(lines)


def _machines(assessment: Assessment) -> list[str]:
    """What a worker consists of and what it costs, where that is more than one machine."""
    request, prices = assessment.request, assessment.request.prices
    workers, count = request.num_workers, request.machines_per_worker
    if count == 1:
        return []
    return [
        f"  {workers} workers x {count} machines = {workers * count} machines; a worker has all of its own or none",
        f"  prices  {prices.spot_usd_per_h:g} spot, {prices.on_demand_usd_per_h:g} on-demand USD/h per worker; "
        f"{prices.spot_usd_per_h / count:g} and {prices.on_demand_usd_per_h / count:g} per machine",
    ]


def _slots_by_market(assessment: Assessment) -> list[str]:
    """Streams by market with the reason, as ranges."""
    lines = []
    reasons = assessment.reasons()
    for market, spot in (("spot", True), ("on-demand", False)):
        slots = [slot for slot, on_spot in enumerate(assessment.mix) if bool(on_spot) is spot]
        if slots:
            why = reasons[slots[0]].split(": ", 1)[1]
            rates = assessment.request.rates_per_s[slots]
            span = f"{rates.min():g}" if rates.min() == rates.max() else f"{rates.min():g} .. {rates.max():g}"
            lines.append(f"    {market}: streams {slot_ranges(slots)} ({span} samples/s); {why}")
    return lines


def _probability(probability: float) -> str:
    return "below 1e-6" if probability < 1e-6 else f"{probability:.3g}"
