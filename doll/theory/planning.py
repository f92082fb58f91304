"""How many workers to put on spot, and which: Theorem 4, its chance-constrained form, and Theorem 5.

Each answer is exact for whole numbers of workers (tests compare with brute force). What cannot be met raises
`InfeasiblePlanError`, which names the constraint that binds and the nearest values that would do.

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
from doll.theory.preemption import uptime_variance_s2


@dataclass(frozen=True)
class SpotAssignment:
    """Theorem 5's answer.

    Attributes:
        spot: bool, shape (N,): True for the workers that go to spot, the slowest streams first.
        num_spot: how many those are.
        expected_runtime_s: (21) for this assignment.
        expected_cost_usd: (22) for this assignment.
        deadline_binds: one more worker on spot would be cheaper but late.
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
    """Theorem 5: the streams to put on spot, for streams of unequal rates. Exact, O(N log N), vectorised.

    Cost over n = "the n slowest streams on spot" has one local minimum, and the feasible n are a prefix, so the scan
    stops at the first n that is late or dearer than the one before.

    Args:
        samples: J K b, the work that is left.
        rates_per_s: λ_n, one per worker.
        alpha: availability, in [0, 1].
        deadline_s: θ, seconds that are left.
        prices: of the two markets.
        cycle_s: mean seconds of one up and one down period of a spot worker; needed with `risk`.
        risk: accepted probability of missing the deadline, in (0, 0.5]; None: the expected runtime counts.

    Raises:
        InfeasiblePlanError: θ < θ_0.

    Source: the DOLL paper, Lemma 2 (23) and Theorem 5; proof of quasi-convexity in docs/theory.md. Differs from the
    paper: Lemma 2 is a constraint on every N_s, not a property of the optimum.

    >>> found = best_assignment(600, [3, 1, 2], 0.5, 150.0, Prices(0.1, 1.0))
    >>> found.num_spot, found.spot.tolist(), round(found.expected_runtime_s, 2)
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
    margin: Floats | float = 0.0
    if risk is not None:
        if cycle_s is None:
            raise ValueError("cycle_s: expected the mean up + down time of a spot worker, to know the risk")
        scale = quantile_of_risk(risk) * math.sqrt(uptime_variance_s2(deadline_s, alpha, cycle_s)) / deadline_s
        margin = scale * np.sqrt(np.concatenate(([0.0], np.cumsum(ascending**2))))
    in_time = effective - margin >= needed * (1 - TOLERANCE)
    # n = 0 is in time (checked above); the others are a prefix because the left side falls with n.
    last = int(np.count_nonzero(in_time)) - 1
    cost = relative_cost(effective, alpha, prices)
    # At alpha = 0 with everybody on spot nobody works; inf <= inf would go on.
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


def check_budget(cost_usd: float, budget_usd: float | None, *, updates: float, deadline_s: float) -> None:
    """Raise when the cheapest plan that meets deadline and error target costs more than the budget.

    Raises:
        InfeasiblePlanError: constraint "budget"; nearest: the budget that would do, and the updates that this one buys.

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
    """Mask of the `count` slowest; among equal rates the lower numbers. Cheaper than an argsort."""
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
    """What is raised where the deadline is below θ_0; `workers`: how many equal ones would do."""
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
    """z with P(Z <= z) = `probability`, in (0, 1).

    >>> round(quantile(0.95), 3)
    1.645
    """
    return _STANDARD.inv_cdf(probability)


def quantile_of_risk(risk: float) -> float:
    """The quantile that an accepted probability of being late stands for.

    Raises:
        ValueError: `risk` is not in (0, 0.5].
    """
    if not 0 < risk <= 0.5:
        raise ValueError(f"risk: expected a probability in (0, 0.5], got {risk}")
    return quantile(1 - risk)


def tail(z: float) -> float:
    """P(Z > z), also for infinite z.

    >>> tail(0.0), tail(math.inf)
    (0.5, 0.0)
    """
    return 0.5 * math.erfc(z / math.sqrt(2))
