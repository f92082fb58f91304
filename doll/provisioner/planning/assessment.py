"""Before a job starts: can it be done, with how many workers on spot, which, at what cost and risk. Pure.

`look_ahead` answers for a fixed mix (Theorem 5) and for the adaptive planner, which the live system uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from doll.errors import InfeasiblePlanError
from doll.provisioner.planning.forecast import Forecast, forecast
from doll.provisioner.planning.market_rules import Budget
from doll.provisioner.planning.planner import start
from doll.provisioner.planning.state import Alpha, Bools, PlannerSettings, PlannerState
from doll.theory import checks
from doll.theory.checks import Floats
from doll.theory.cost import Prices, cost_ratio, effective_of_sorted, unequal_cost_usd, work_samples
from doll.theory.normal import tail
from doll.theory.planning import Assignment, best_assignment, check_budget
from doll.theory.preemption import uptime_variance_s2
from doll.theory.queueing import Stability, smallest_stable_batch, stability, update_rate_per_s


@dataclass(frozen=True)
class Question:
    """What is asked, with the names and defaults of the job file's `plan:` section.

    Raises:
        ValueError: a number out of its range.
    """

    rates_per_s: Floats
    group_size: int
    batch_size: int
    updates: float
    prices: Prices
    alpha: float
    cycle_s: float
    deadline_s: float | None = None
    budget_usd: float | None = None
    risk: float | None = None
    boot_s: float = 90.0
    margin: float = 0.005
    service_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates_per_s", checks.rates(self.rates_per_s))
        checks.positive(updates=self.updates, group_size=self.group_size, batch_size=self.batch_size)
        checks.positive(cycle_s=self.cycle_s)
        checks.fraction(alpha=self.alpha, margin=self.margin)

    @property
    def samples(self) -> float:
        return work_samples(self.updates, self.group_size, self.batch_size)

    @property
    def total_per_s(self) -> float:
        return float(self.rates_per_s.sum())

    @property
    def num_workers(self) -> int:
        return len(self.rates_per_s)

    @property
    def horizon_s(self) -> float:
        """The deadline, or a time in which even all on spot are done where there is none."""
        if self.deadline_s is not None:
            return self.deadline_s
        return 2 * self.samples / (max(self.alpha, 0.01) * self.total_per_s)


@dataclass(frozen=True)
class Outlook:
    """The answer.

    Attributes:
        problem: why the job cannot be done as asked, neither by a fixed mix nor adaptively; None when it can. With a
            problem, `mix` is the best that can be done.
        binding: "none", "deadline", "risk", "price" (what keeps more workers off spot), "budget" or "error".
        mix: the fixed mix of least expected cost within the deadline (and the risk); all on-demand when late.
        static: forecast for the mix, kept unchanged to the end.
        adaptive: forecast for the adaptive planner with its guard; None where the deadline cannot be met.
        on_demand_usd, on_demand_s: cost and time of all on-demand.
        all_spot_usd, all_spot_s: of all on spot, in expectation.
        bounds: Corollary 2, lowest and highest cost ratio of the best mix; None for unequal rates or no deadline.
        stability: Proposition 1; None without a service time.
    """

    question: Question
    problem: InfeasiblePlanError | None
    binding: str
    mix: Bools
    static: Forecast
    adaptive: Forecast | None
    on_demand_usd: float
    on_demand_s: float
    all_spot_usd: float
    all_spot_s: float
    bounds: tuple[float, float] | None
    stability: Stability | None
    advice: tuple[str, ...]

    @property
    def num_spot(self) -> int:
        return int(np.count_nonzero(self.mix))

    @property
    def savings(self) -> float:
        """Expected saving of the mix against all on-demand, as a fraction."""
        return 1 - self.static.expected_cost_usd / self.on_demand_usd if self.on_demand_usd else 0.0

    def reasons(self) -> tuple[str, ...]:
        """Why each slot is where it is."""
        rates = self.question.rates_per_s
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
        """Plain values for JSON."""
        question = self.question
        return {
            "feasible": self.problem is None,
            "binding": self.binding,
            "problem": str(self.problem) if self.problem else None,
            "nearest": self.problem.nearest if self.problem else {},
            "workers": question.num_workers,
            "updates": question.updates,
            "deadline_s": question.deadline_s,
            "budget_usd": question.budget_usd,
            "num_spot": self.num_spot,
            "num_on_demand": question.num_workers - self.num_spot,
            "markets": ["spot" if spot else "on_demand" for spot in self.mix],
            "reasons": list(self.reasons()),
            "savings": self.savings,
            "static": self.static.to_dict(),
            "adaptive": self.adaptive.to_dict() if self.adaptive else None,
            "on_demand": {"cost_usd": self.on_demand_usd, "runtime_s": self.on_demand_s},
            "all_spot": {"expected_cost_usd": self.all_spot_usd, "expected_runtime_s": self.all_spot_s},
            "cost_ratio_bounds": list(self.bounds) if self.bounds else None,
            "update_rate_per_s": update_rate_per_s(question.total_per_s, question.group_size, question.batch_size),
            "stability": {**self.stability._asdict(), "verdict": self.stability.verdict} if self.stability else None,
            "advice": list(self.advice),
        }


def look_ahead(question: Question) -> Outlook:
    """Answer the question. What cannot be done is in the answer (`problem`), not raised."""
    samples, rates, alpha, prices = question.samples, question.rates_per_s, question.alpha, question.prices
    problem: InfeasiblePlanError | None = None
    binding = "none"
    try:
        found = _best(question)
        mix = found.spot
        if not mix.all():
            binding = ("risk" if question.risk is not None else "deadline") if found.deadline_binds else "price"
        check_budget(
            found.expected_cost_usd, question.budget_usd, updates=question.updates, deadline_s=question.horizon_s
        )
    except InfeasiblePlanError as error:
        problem, binding = _with_longer_deadline(question, error), error.constraint
        if error.constraint == "deadline":
            mix = np.zeros(question.num_workers, dtype=np.bool_)
    adaptive = None if problem is not None and problem.constraint == "deadline" else _adaptive(question)
    advice = _advice(question)
    if problem is not None and problem.constraint == "budget" and adaptive is not None and not adaptive.over_budget:
        advice.insert(0, "this fixed mix is over the budget, but the adaptive planner is expected to stay within it")
        problem, binding = None, "budget"
    costs = unequal_cost_usd(samples, rates, alpha, prices)
    bounds = None
    if problem is None and question.deadline_s is not None and rates.min() == rates.max():
        ratio = cost_ratio(question.deadline_s / (samples / question.total_per_s), question.num_workers, alpha, prices)
        bounds = (ratio.lower, ratio.upper)
    return Outlook(
        question=question,
        problem=problem,
        binding=binding,
        mix=mix,
        static=_static(question, mix),
        adaptive=adaptive,
        on_demand_usd=float(costs[0]),
        on_demand_s=samples / question.total_per_s,
        all_spot_usd=float(costs[-1]),
        all_spot_s=samples / (alpha * question.total_per_s) if alpha > 0 else math.inf,
        bounds=bounds,
        stability=_stability(question),
        advice=tuple(advice),
    )


def risk_curve(question: Question) -> tuple[Floats, Floats]:
    """Expected cost in USD and P(miss) of every mix "the n slowest on spot", n = 0 .. N; shape (N + 1,) each."""
    ascending = np.sort(question.rates_per_s)
    costs = unequal_cost_usd(question.samples, ascending, question.alpha, question.prices)
    limit = question.horizon_s
    effective = effective_of_sorted(ascending, question.alpha)
    squares = np.concatenate(([0.0], np.cumsum(ascending**2)))
    variance = squares * uptime_variance_s2(limit, question.alpha, question.cycle_s) + question.total_per_s * limit
    z = (effective * limit - question.samples) / np.sqrt(variance)
    return costs, np.array([tail(float(value)) for value in z])


def _best(question: Question) -> Assignment:
    return best_assignment(
        question.samples,
        question.rates_per_s,
        question.alpha,
        question.horizon_s,
        question.prices,
        cycle_s=question.cycle_s,
        risk=question.risk,
    )


def _with_longer_deadline(question: Question, error: InfeasiblePlanError) -> InfeasiblePlanError:
    """For a budget that binds: the deadline at which it would do, if there is one."""
    if error.constraint != "budget" or question.budget_usd is None:
        return error
    costs = unequal_cost_usd(question.samples, question.rates_per_s, question.alpha, question.prices)
    enough = np.flatnonzero(costs <= question.budget_usd)
    if not enough.size:
        cheapest = float(costs.min())
        message = f"{error}; no deadline makes it cheaper than {cheapest:.4f} USD"
        return InfeasiblePlanError(message, constraint="budget", nearest=error.nearest)
    effective = effective_of_sorted(np.sort(question.rates_per_s), question.alpha)
    later = question.samples / float(effective[enough[0]])
    return InfeasiblePlanError(
        f"{error}, or a deadline of {later:.6g} s with {int(enough[0])} workers on spot",
        constraint="budget",
        nearest={**error.nearest, "deadline_s": later},
    )


def _state(question: Question, on_spot: Bools) -> PlannerState:
    return PlannerState(
        clock_s=0.0,
        updates_done=0.0,
        rates_per_s=question.rates_per_s,
        on_spot=on_spot,
        up=np.ones(question.num_workers, dtype=np.bool_),
        alpha=Alpha(question.alpha),
        prices=question.prices,
    )


def _settings(question: Question, *, adaptive: bool) -> PlannerSettings:
    return PlannerSettings(
        updates=question.updates,
        group_size=question.group_size,
        batch_size=question.batch_size,
        deadline_s=question.horizon_s,
        budget_usd=question.budget_usd,
        boot_s=question.boot_s if adaptive else 0.0,
        # A job of a minute is not re-planned once a minute.
        replan_s=min(60.0, question.horizon_s / 100),
        cycle_s=question.cycle_s,
        rule="pace" if adaptive else "theorem",
        guard=adaptive,
        margin=question.margin if adaptive else 0.0,
    )


def _static(question: Question, mix: Bools) -> Forecast:
    state, settings = _state(question, mix), _settings(question, adaptive=False)
    return forecast(mix, state, settings, Budget.of(state, settings))


def _adaptive(question: Question) -> Forecast:
    return start(_state(question, np.ones(question.num_workers, np.bool_)), _settings(question, adaptive=True)).forecast


def _stability(question: Question) -> Stability | None:
    if question.service_s is None:
        return None
    return stability(question.total_per_s, question.group_size, question.batch_size, question.service_s)


def _advice(question: Question) -> list[str]:
    """What to do about K and b."""
    size, batch, workers, total = question.group_size, question.batch_size, question.num_workers, question.total_per_s
    advice = []
    if question.service_s is None:
        advice.append(
            f"stability is unknown without service_s (`doll calibrate` measures it): one batch's gradient may take "
            f"up to {batch / total:.4g} s to be safe whatever the groups"
        )
    else:
        margin = stability(total, size, batch, question.service_s)
        if margin.verdict != "stable":
            safe = smallest_stable_batch(total, size, question.service_s)
            advice.append(
                f"raise b to at least {safe} (if a batch's gradient takes no longer then): b / S must exceed the "
                f"{question.service_s:.4g} s that one takes"
            )
        if margin.verdict == "depends":
            advice.append("as it is, the queue is stable only while a group's batches come from different workers")
    if size > workers:
        advice.append(f"K = {size} exceeds the {workers} workers: batches of one worker are computed one after another")
    advice.append(
        f"each update averages K b = {size * batch} samples: the noise floor falls like 1/(K b), updates per second too"
    )
    return advice
