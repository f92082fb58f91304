"""An assessment before a job starts: feasibility, the workers to run on spot, cost and risk. Pure.

`assess` computes it for a fixed mix (Theorem 5) and for the adaptive planner, which running jobs use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from doll.amounts import duration, duration_range, usd, usd_range
from doll.errors import InfeasiblePlanError
from doll.provisioner.planning.market_rules import Slack
from doll.provisioner.planning.planner import Forecast, forecast, slot_ranges, start
from doll.provisioner.planning.state import Alpha, Bools, PlannerSettings, PlannerState
from doll.theory import checks
from doll.theory.checks import Floats
from doll.theory.cost import Prices, cost_ratio, effective_of_sorted, unequal_cost_usd
from doll.theory.planning import best_assignment, check_budget, late_prob
from doll.theory.queueing import Stability, smallest_stable_batch, stability, update_rate_per_s


@dataclass(frozen=True)
class PlanRequest:
    """A request to the planner. Raises ValueError for a number out of its range.

    Attributes:
        planner: work, deadline, budget and risk, already checked; as for a running job (`ControllerSettings.planner`).
        rates_per_s: λ_n, samples per second of each stream, shape (N,). As in `planner`, the samples that the task
            makes are counted.
        mean_samples: mean number of samples that the task makes of one record, see `PlanConfig.mean_samples`.
        prices, alpha: prices and availability of a worker with all of its machines, see `plan_request.of_workers`.
        has_deadline: whether a deadline is requested. If not, `planner.deadline_s` is long enough even for all workers
            on spot.
        service_s: μ_C, mean seconds to compute and upload the gradient of one batch. None: not known.
    """

    planner: PlannerSettings
    rates_per_s: Floats
    prices: Prices
    alpha: float
    has_deadline: bool = True
    service_s: float | None = None
    machines_per_worker: int = 1
    mean_samples: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates_per_s", checks.rates(self.rates_per_s))
        checks.fraction(alpha=self.alpha)

    @property
    def updates(self) -> float:
        """The number of updates, J."""
        return self.planner.samples / (self.group_size * self.batch_size)

    @property
    def group_size(self) -> int:
        """The number of batches per update, K."""
        assert self.planner.group_size is not None
        return self.planner.group_size

    @property
    def batch_size(self) -> float:
        """The number of samples per batch, b, as the task makes them."""
        return self.planner.batch_size

    @property
    def deadline_s(self) -> float | None:
        """The requested deadline; None if there is none."""
        return self.planner.deadline_s if self.has_deadline else None

    @property
    def stability(self) -> Stability | None:
        """The margins of Proposition 1; None without a service time."""
        if self.service_s is None:
            return None
        return stability(self.total_per_s, self.group_size, self.batch_size, self.service_s)

    @property
    def total_per_s(self) -> float:
        return float(self.rates_per_s.sum())

    @property
    def num_workers(self) -> int:
        return len(self.rates_per_s)


@dataclass(frozen=True)
class Assessment:
    """The result of an assessment.

    Attributes:
        problem: reason why neither a fixed mix nor the adaptive planner can do the job as requested; None if one of
            them can. If there is a problem, `mix` is the best possible mix.
        binding: the binding constraint: "none", "deadline", "risk", "price" (of spot), "budget" or "error".
        mix: fixed mix with the lowest expected cost within the deadline (and the risk); all on-demand if the deadline
            cannot be met.
        static: forecast for the mix, if it is kept unchanged to the end.
        adaptive: forecast for the adaptive planner with its guard; None if the deadline cannot be met.
        all_on_demand_usd, on_demand_s: cost and run time with all workers on-demand.
        all_spot_usd, all_spot_s: expected cost and run time with all workers on spot.
        bounds: lowest and highest cost ratio of the best mix by Corollary 2; None for unequal rates or no deadline.
    """

    request: PlanRequest
    problem: InfeasiblePlanError | None
    binding: str
    mix: Bools
    static: Forecast
    adaptive: Forecast | None
    all_on_demand_usd: float
    on_demand_s: float
    all_spot_usd: float
    all_spot_s: float
    bounds: tuple[float, float] | None
    advice: tuple[str, ...]

    @property
    def num_spot(self) -> int:
        return int(np.count_nonzero(self.mix))

    @property
    def savings(self) -> float:
        """The expected saving of the mix compared with all workers on-demand, as a fraction."""
        return 1 - self.static.expected_cost_usd / self.all_on_demand_usd if self.all_on_demand_usd else 0.0

    def reasons(self) -> tuple[str, ...]:
        """The reason for the market of each slot."""
        rates = self.request.rates_per_s
        equal = bool(rates.min() == rates.max())
        which = "all streams are equally fast" if equal else "among the slowest streams: least is lost while it is down"
        if self.mix.all():
            which = "cheaper, and nothing keeps any worker off it"
        keeps = {
            "deadline": "its outages would make the expected runtime miss the deadline",
            "risk": "its outages would make a missed deadline likelier than the accepted risk",
            "price": "at these prices the time that it loses on spot costs more than spot saves",
            "budget": "more on spot would be late",
        }.get(self.binding, "needed")
        if self.problem is not None and self.problem.constraint == "deadline":
            keeps = "the deadline cannot be met; this is the soonest"
        return tuple(f"spot: {which}" if spot else f"on-demand: {keeps}" for spot in self.mix)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        request, stable = self.request, self.request.stability
        return {
            "feasible": self.problem is None,
            "binding": self.binding,
            "problem": str(self.problem) if self.problem else None,
            "nearest": self.problem.nearest if self.problem else {},
            "workers": request.num_workers,
            "machines_per_worker": request.machines_per_worker,
            "worker_prices": asdict(request.prices),
            "updates": request.updates,
            "deadline_s": request.deadline_s,
            "budget_usd": request.planner.budget_usd,
            "num_spot": self.num_spot,
            "num_on_demand": request.num_workers - self.num_spot,
            "markets": ["spot" if spot else "on_demand" for spot in self.mix],
            "reasons": list(self.reasons()),
            "savings": self.savings,
            "static": asdict(self.static),
            "adaptive": asdict(self.adaptive) if self.adaptive else None,
            "on_demand": {"cost_usd": self.all_on_demand_usd, "runtime_s": self.on_demand_s},
            "all_spot": {"expected_cost_usd": self.all_spot_usd, "expected_runtime_s": self.all_spot_s},
            "cost_ratio_bounds": list(self.bounds) if self.bounds else None,
            "update_rate_per_s": update_rate_per_s(request.total_per_s, request.group_size, request.batch_size),
            "stability": {**stable._asdict(), "verdict": stable.verdict} if stable else None,
            "advice": list(self.advice),
        }


def assess(request: PlanRequest) -> Assessment:
    """Compute the assessment. If the job is not feasible, `problem` has the reason; no error is raised."""
    samples, rates, alpha, prices = request.planner.samples, request.rates_per_s, request.alpha, request.prices
    problem: InfeasiblePlanError | None = None
    binding = "none"
    try:
        planner = request.planner
        best = best_assignment(
            samples, rates, alpha, planner.deadline_s, prices, cycle_s=planner.cycle_s, risk=planner.risk
        )
        mix = best.spot
        if not mix.all():
            binding = ("risk" if planner.risk is not None else "deadline") if best.deadline_binds else "price"
        cost_usd = best.expected_cost_usd
        check_budget(cost_usd, planner.budget_usd, updates=request.updates, deadline_s=planner.deadline_s)
    except InfeasiblePlanError as error:
        problem, binding = _with_longer_deadline(request, error), error.constraint
        if error.constraint == "deadline":
            mix = np.zeros(request.num_workers, dtype=np.bool_)
    adaptive = None if problem is not None and problem.constraint == "deadline" else _adaptive(request)
    advice = _advice(request)
    if problem is not None and problem.constraint == "budget" and adaptive is not None and not adaptive.over_budget:
        advice.insert(0, "this fixed mix is over the budget, but the adaptive planner is expected to stay within it")
        problem, binding = None, "budget"
    costs = unequal_cost_usd(samples, rates, alpha, prices)
    bounds = None
    if problem is None and request.deadline_s is not None and rates.min() == rates.max():
        ratio = cost_ratio(request.deadline_s / (samples / request.total_per_s), request.num_workers, alpha, prices)
        bounds = (ratio.lower, ratio.upper)
    return Assessment(
        request=request,
        problem=problem,
        binding=binding,
        mix=mix,
        static=_static(request, mix),
        adaptive=adaptive,
        all_on_demand_usd=float(costs[0]),
        on_demand_s=samples / request.total_per_s,
        all_spot_usd=float(costs[-1]),
        all_spot_s=samples / (alpha * request.total_per_s) if alpha > 0 else math.inf,
        bounds=bounds,
        advice=tuple(advice),
    )


def risk_curve(request: PlanRequest) -> tuple[Floats, Floats]:
    """Return the expected cost in USD and P(miss) of each mix "the n slowest on spot", n = 0 .. N; shape (N + 1,) each.
    P(miss) is computed for 65 mixes and interpolated between them."""
    ascending = np.sort(request.rates_per_s)
    costs = unequal_cost_usd(request.planner.samples, ascending, request.alpha, request.prices)
    limit = request.planner.deadline_s
    mixes = np.unique(np.linspace(0, len(ascending), 65).astype(int))
    late = [
        late_prob(request.planner.samples, ascending, int(n), request.alpha, request.planner.cycle_s, limit)
        for n in mixes
    ]
    return costs, np.interp(np.arange(len(costs)), mixes, late)


def _with_longer_deadline(request: PlanRequest, error: InfeasiblePlanError) -> InfeasiblePlanError:
    """Return the error of a budget that is too small. It names a deadline for which the budget is enough, if any."""
    if error.constraint != "budget" or request.planner.budget_usd is None:
        return error
    costs = unequal_cost_usd(request.planner.samples, request.rates_per_s, request.alpha, request.prices)
    enough = np.flatnonzero(costs <= request.planner.budget_usd)
    if not enough.size:
        cheapest = float(costs.min())
        message = f"{error}; no deadline makes it cheaper than {usd(cheapest, up=True)} USD"
        return InfeasiblePlanError(message, constraint="budget", nearest=error.nearest)
    effective = effective_of_sorted(np.sort(request.rates_per_s), request.alpha)
    later = request.planner.samples / float(effective[enough[0]])
    return InfeasiblePlanError(
        f"{error}, or a deadline of {later:.6g} s with {int(enough[0])} workers on spot",
        constraint="budget",
        nearest={**error.nearest, "deadline_s": later},
    )


def _state(request: PlanRequest, on_spot: Bools) -> PlannerState:
    return PlannerState(
        elapsed_s=0.0,
        samples_done=0.0,
        rates_per_s=request.rates_per_s,
        on_spot=on_spot,
        up=np.ones(request.num_workers, dtype=np.bool_),
        alpha=Alpha(request.alpha),
        prices=request.prices,
    )


def _settings(request: PlanRequest, *, adaptive: bool) -> PlannerSettings:
    # A job of a minute is not re-planned once a minute; by its work, so that a later deadline changes nothing else.
    replan_s = min(60.0, request.planner.samples / request.total_per_s / 100)
    settings = replace(request.planner, risk=None, replan_s=replan_s)
    return settings if adaptive else replace(settings, boot_s=0.0, rule="theorem", guard=False, margin=0.0)


def _static(request: PlanRequest, mix: Bools) -> Forecast:
    state, settings = _state(request, mix), _settings(request, adaptive=False)
    return forecast(mix, state, settings, Slack.compute(state, settings))


def _adaptive(request: PlanRequest) -> Forecast:
    return start(_state(request, np.ones(request.num_workers, np.bool_)), _settings(request, adaptive=True)).forecast


def _advice(request: PlanRequest) -> list[str]:
    """Return advice on K and b."""
    size, batch, workers, total = request.group_size, request.batch_size, request.num_workers, request.total_per_s
    advice = []
    margin, service_s = request.stability, request.service_s
    if margin is None or service_s is None:
        advice.append(
            f"stability is unknown without service_s (`doll calibrate` measures it): one batch's gradient may take "
            f"up to {batch / total:.4g} s to be safe whatever the groups"
        )
    else:
        if margin.verdict != "stable":
            safe = smallest_stable_batch(total, service_s)
            advice.append(
                f"raise b to at least {math.ceil(safe / request.mean_samples)} (if a batch's gradient takes no longer "
                f"then): b / S must exceed the {service_s:.4g} s that one takes"
            )
        if margin.verdict == "depends":
            advice.append("as it is, the queue is stable only while a group's batches come from different workers")
    if size > workers:
        advice.append(f"K = {size} exceeds the {workers} workers: batches of one worker are computed one after another")
    advice.append(
        f"each update averages K b = {size * batch:g} samples: the noise floor falls like 1/(K b), updates per second "
        "too"
    )
    return advice


_BINDING = {
    "none": "no constraint binds: all workers may run on spot",
    "deadline": "the deadline binds: one more worker on spot would be late in expectation",
    "risk": "the risk binds: one more worker on spot would be late too often",
    "price": "the prices bind: more workers on spot would not be cheaper",
    "budget": "the budget binds: it is expected to suffice only with the adaptive planner",
}


def report_text(assessment: Assessment, notes: Sequence[str], beside: Sequence[str] = ()) -> str:
    """Return the assessment as text, with its advice and `notes`. `beside` are lines on services beside the workers."""
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
            f"Adaptive planner with guard: about {cost} USD{late} while on-demand workers boot in "
            f"{request.planner.boot_s:g} s"
        )
    if assessment.bounds is not None:
        lines.append(
            f"Corollary 2: the best mix costs {assessment.bounds[0]:.2%} to {assessment.bounds[1]:.2%} of on-demand"
        )
    lines.append(f"All on spot: {usd(assessment.all_spot_usd)} USD, {duration(assessment.all_spot_s)} expected")
    if (stable := request.stability) is not None:
        lines.append(
            f"Stability: {stable.verdict}; margin {stable.sufficient:.3g} (sufficient form), "
            f"{stable.necessary:.3g} (necessary form)"
        )
    return "\n".join([*lines, *beside, *(f"- {line}" for line in (*assessment.advice, *notes))])


def _machines(assessment: Assessment) -> list[str]:
    """Return the machines and prices of a worker that has more than one machine."""
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
    """Return the streams of each market with the reason, as ranges."""
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
