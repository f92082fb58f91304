"""The choice of the workers on spot, and of their number: Theorem 4, its chance-constrained form, and Theorem 5.

Each answer is exact for an integer number of workers (tests compare with brute force). If a constraint cannot be met,
the functions raise `InfeasiblePlanError`, which names the binding constraint and the nearest feasible values.

Source: the DOLL paper, Theorem 4 (18), Lemma 2 (23), Theorem 5. Differs from the paper: see docs/theory.md (D8-D11).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from doll.amounts import usd
from doll.errors import InfeasiblePlanError
from doll.theory import checks
from doll.theory.checks import Floats
from doll.theory.cost import SECONDS_PER_HOUR, TOLERANCE, Prices, effective_of_sorted, relative_cost
from doll.theory.preemption import shortfall_prob


@dataclass(frozen=True)
class SpotAssignment:
    """The result of Theorem 5.

    Attributes:
        spot: bool, shape (N,): True for each worker on spot. The slowest streams are put on spot first.
        expected_runtime_s: expected run time in seconds, Eq. (21), of this assignment.
        expected_cost_usd: expected cost in USD, Eq. (22), of this assignment.
        deadline_binds: whether one more worker on spot would be cheaper, but would miss the deadline.
    """

    spot: npt.NDArray[np.bool_]
    num_spot: int
    expected_runtime_s: float
    expected_cost_usd: float
    deadline_binds: bool


def best_assignment(
    samples: float,
    rates_per_s: npt.ArrayLike,
    alpha: float,
    deadline_s: float,
    prices: Prices,
    *,
    cycle_s: float | None = None,
    risk: float | None = None,
) -> SpotAssignment:
    """Return the cheapest assignment of streams with unequal rates to spot (Theorem 5). Exact, O(N log N), vectorised.

    The cost as a function of n ("the n slowest streams on spot") has one local minimum, and every n up to the largest
    feasible n is feasible. So the scan stops at the first n that is late or more expensive than the one before.

    Args:
        samples: J * K * b, the remaining work.
        rates_per_s: λ_n, arrival rate of each worker's stream in samples per second.
        alpha: availability of spot, in [0, 1].
        deadline_s: θ, the remaining time in seconds.
        cycle_s: mean length of one up period plus one down period of a spot worker, seconds; required with `risk`.
        risk: accepted probability of missing the deadline, in (0, 0.5]. None: only the expected run time counts.

    Raises:
        InfeasiblePlanError: θ < θ_0.

    Source: the DOLL paper, Lemma 2 (23) and Theorem 5; the proof of quasi-convexity is in docs/theory.md. Differs from
    the paper: Lemma 2 is a constraint on every N_s, not a property of the optimum.

    >>> best = best_assignment(600, [3, 1, 2], 0.5, 150.0, Prices(0.1, 1.0))
    >>> best.num_spot, best.spot.tolist(), round(best.expected_runtime_s, 2)
    (2, [False, True, True], 133.33)
    """
    checks.non_negative(samples=samples)
    checks.fraction(alpha=alpha)
    checks.positive(deadline_s=deadline_s)
    rates = checks.rates(rates_per_s)
    ascending = np.sort(rates)
    effective = effective_of_sorted(ascending, alpha)
    needed = samples / deadline_s
    if effective[0] < needed * (1 - TOLERANCE):
        detail = f"{needed:.6g} samples/s > {effective[0]:.6g} of all streams together"
        raise too_slow(samples, float(effective[0]), deadline_s, detail)
    in_time = effective >= needed * (1 - TOLERANCE)
    # n = 0 is in time (checked above). The left side falls with n, so the feasible n are 0 to some largest n.
    last = int(np.count_nonzero(in_time)) - 1
    if risk is not None:
        if cycle_s is None:
            raise ValueError("cycle_s: expected the mean up + down time of a spot worker, to know the risk")
        last = _most_at_risk(samples, ascending, alpha, deadline_s, cycle_s, risk, last)
    cost = relative_cost(effective, alpha, prices)
    # At alpha = 0 with all workers on spot, no worker is ever up, and inf <= inf would continue the scan.
    falls = (cost[1:] <= cost[:-1] * (1 + 1e-12)) & np.isfinite(cost[1:])
    rising = np.flatnonzero(~falls[:last])
    count = int(rising[0]) if rising.size else last
    runtime = samples / float(effective[count]) if samples else 0.0
    return SpotAssignment(
        spot=_slowest(rates, ascending, count),
        num_spot=count,
        expected_runtime_s=runtime,
        expected_cost_usd=samples * float(cost[count]) / SECONDS_PER_HOUR if samples else 0.0,
        deadline_binds=count == last and count < len(rates) and bool(falls[count]),
    )


def late_prob(
    samples: float, ascending_per_s: Floats, num_spot: int, alpha: float, cycle_s: float, time_s: float
) -> float:
    """Return the probability that a fixed mix with the `num_spot` slowest streams on spot is late, because of outages
    and the noise of arrivals.

    >>> round(late_prob(72_000, np.full(8, 10.0), 8, 0.95, 1000.0, 1000.0), 3)
    0.03
    """
    on_demand = float(ascending_per_s[num_spot:].sum()) * time_s
    noise_var = float(ascending_per_s.sum()) * time_s
    return shortfall_prob(samples - on_demand, ascending_per_s[:num_spot], alpha, cycle_s, time_s, noise_var)


def _most_at_risk(
    samples: float, ascending: Floats, alpha: float, time_s: float, cycle_s: float, risk: float, most: int
) -> int:
    """Return the largest number of workers on spot, at most `most`, with P(late) at most `risk`. P(late) grows with the
    number."""
    check_risk(risk)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if late_prob(samples, ascending, middle, alpha, cycle_s, time_s) <= risk:
            low = middle
        else:
            high = middle - 1
    return low


def check_budget(cost_usd: float, budget_usd: float | None, *, updates: float, deadline_s: float) -> None:
    """Raise an error if the cheapest plan that meets the deadline and the error target costs more than the budget.

    Raises:
        InfeasiblePlanError: the constraint is "budget"; `nearest` has the smallest sufficient budget, and the number of
            updates that the present budget pays for.

    >>> check_budget(2.0, 3.0, updates=100, deadline_s=60.0)
    """
    if budget_usd is None or cost_usd <= budget_usd * (1 + TOLERANCE):
        return
    affordable = math.floor(updates * budget_usd / cost_usd)
    raise InfeasiblePlanError(
        f"the budget binds: the cheapest mix that does {updates:g} updates in {deadline_s:g} s costs "
        f"{usd(cost_usd, up=True)} USD in expectation, the budget is {usd(budget_usd)} USD. "
        f"Feasible: a budget of {usd(cost_usd, up=True)} USD, or {affordable} updates",
        constraint="budget",
        nearest={"budget_usd": cost_usd, "updates": affordable},
    )


def _slowest(rates: Floats, ascending: Floats, count: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the `count` slowest workers; among equal rates, those with lower numbers. No argsort is
    needed."""
    if count == 0:
        return np.zeros(len(rates), dtype=np.bool_)
    edge = ascending[count - 1]
    chosen: npt.NDArray[np.bool_] = rates < edge
    ties = np.flatnonzero(rates == edge)
    chosen[ties[: count - int(np.count_nonzero(chosen))]] = True
    return chosen


def too_slow(
    samples: float, rate_per_s: float, deadline_s: float, detail: str, workers: int | None = None
) -> InfeasiblePlanError:
    """Return the error for a deadline below θ_0. `workers`: number of equal workers that would meet the deadline."""
    shortest = samples / rate_per_s
    nearest = {"deadline_s": shortest, "work_fraction": deadline_s / shortest}
    if workers is not None:
        nearest["num_workers"] = workers
    advice = f"a deadline of {shortest:.6g} s, or {nearest['work_fraction']:.1%} of the updates"
    advice += "" if workers is None else f", or {workers} workers"
    return InfeasiblePlanError(
        f"the deadline binds: all workers on-demand take {shortest:.6g} s, the deadline is {deadline_s:.6g} s "
        f"(needs {detail}). Feasible: {advice}",
        constraint="deadline",
        nearest=nearest,
    )


_STANDARD = NormalDist()


def quantile(probability: float) -> float:
    """Return the z with P(Z <= z) = `probability`, in (0, 1), for a standard normal Z.

    >>> round(quantile(0.95), 3)
    1.645
    """
    return _STANDARD.inv_cdf(probability)


def check_risk(risk: float) -> None:
    """Raise an error if `risk`, the accepted probability of being late, is outside the range that the planner supports.

    Raises:
        ValueError: `risk` is not in (0, 0.5].
    """
    if not 0 < risk <= 0.5:
        raise ValueError(f"risk: expected a probability in (0, 0.5], got {risk}")


def tail(z: float) -> float:
    """Return P(Z > z) for a standard normal Z. `z` may be infinite.

    >>> tail(0.0), tail(math.inf)
    (0.5, 0.0)
    """
    return 0.5 * math.erfc(z / math.sqrt(2))
