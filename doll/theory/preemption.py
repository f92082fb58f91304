"""Spot workers that come and go: how much of the time they are up, and how much that varies.

Model: each spot worker is a two-state Markov chain of its own, up with probability α in the long run, one up and one
down period lasting `cycle_s` together on average. What happens when outages come together is `design_effect`.

Source: the DOLL paper, Section IV (Eq. (4)-(6)); the variance is derived in docs/theory.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from doll.theory import checks

_NEVER = 1e-200  # a share of the time below this is none


def expected_workers_up(num_workers: int, num_spot: int, alpha: float) -> float:
    """E[N] = N_o + α N_s. Source: the DOLL paper, Proposition 2.

    >>> expected_workers_up(64, 30, 0.9)
    61.0
    """
    checks.fraction(alpha=alpha)
    _spot_of(num_spot, num_workers)
    return num_workers - num_spot + alpha * num_spot


def uptime_variance_s2(time_s: float, alpha: float, cycle_s: float) -> float:
    """v(t): variance of the seconds that one spot worker is up within `time_s`, from a stationary start.

    v(t) = 2 p [t/g - (1 - e^(-g t)) / g²], p = α (1 - α), g = 1 / (p · cycle).

    Args:
        time_s: length of the window, seconds.
        alpha: availability, in [0, 1]; 0 and 1 have no variance.
        cycle_s: mean seconds of one up and one down period together.

    >>> round(uptime_variance_s2(6720, 0.9, 1000.0))
    107406
    """
    checks.non_negative(time_s=time_s)
    checks.fraction(alpha=alpha)
    checks.positive(cycle_s=cycle_s)
    p = alpha * (1 - alpha)
    if p == 0:
        return 0.0
    relaxation_s = p * cycle_s
    x = time_s / relaxation_s
    # x - (1 - e^-x) loses all digits for small x; its series begins with x²/2.
    excess = x * x / 2 - x**3 / 6 if x < 1e-4 else x + math.expm1(-x)
    return 2 * p * relaxation_s**2 * excess


def updates_variance(
    time_s: float,
    num_spot: int,
    rate_per_s: float,
    group_size: int,
    batch_size: int,
    alpha: float,
    cycle_s: float,
    effect: float = 1.0,
) -> float:
    """Variance of the updates done in `time_s` that preemption adds: (λ_A / (K b))² N_s v(t), updates².

    Add `queueing.updates_variance` for the arrivals; it is far smaller.

    Args:
        effect: design effect of outages that come together, 1 when they are independent.

    >>> round(updates_variance(6720, 30, 125, 20, 256, 0.9, 1000.0) ** 0.5 / 10_000, 4)
    0.0044
    """
    checks.positive(rate_per_s=rate_per_s, group_size=group_size, batch_size=batch_size, effect=effect)
    checks.non_negative(num_spot=num_spot)
    scale = rate_per_s / (group_size * batch_size)
    return scale**2 * num_spot * uptime_variance_s2(time_s, alpha, cycle_s) * effect


def expected_updates(times_s: npt.ArrayLike, workers_up: npt.ArrayLike, rates_per_s: npt.ArrayLike,
                     group_size: int, batch_size: int) -> float:  # fmt: skip
    """(4) with a rate that varies: (1 / (K b)) ∫ λ_A(τ) N(τ) dτ, for values that hold from one time to the next.

    Args:
        times_s: shape (m + 1,), ascending: the m intervals' ends.
        workers_up: N(τ) in each interval, shape (m,).
        rates_per_s: λ_A(τ) in each interval, shape (m,) or one number.

    Source: the DOLL paper, Eq. (4) and the text after it. Differs from the paper: the integral of the product, not the
    product of the integrals over t, which is right only where rate and workers are uncorrelated.

    >>> expected_updates([0, 50, 100], workers_up=[0, 10], rates_per_s=[2, 0], group_size=1, batch_size=1)
    0.0
    """
    times = np.asarray(times_s, dtype=np.float64)
    if times.ndim != 1 or len(times) < 2 or np.any(np.diff(times) < 0):
        raise ValueError("times_s: expected at least two times in ascending order")
    checks.positive(group_size=group_size, batch_size=batch_size)
    product = np.asarray(workers_up, dtype=np.float64) * np.asarray(rates_per_s, dtype=np.float64)
    return float(np.sum(np.diff(times) * product)) / (group_size * batch_size)


class Availability(NamedTuple):
    """Long-run share of the time for which something is up, and the mean length of an up and a down period together."""

    alpha: float
    cycle_s: float


def gang_availability(machines: int, alpha: float, cycle_s: float) -> Availability:
    """Availability of k machines that are used all together or not at all: α^k, and cycle / (k α^(k-1)).

    Assumes that the machines come and go independently, each a chain of its own. A period with all k up ends k times as
    often as that of one machine, after α cycle / k on average; these periods are a share α^k of the time. Machines that
    fail together are lost more rarely: those of one pool that always come and go together have the α and the cycle of
    one machine.

    Args:
        machines: k, 1 or more.
        alpha, cycle_s: of one machine.

    >>> [round(value, 3) for value in gang_availability(3, 0.9, 1000.0)]
    [0.729, 411.523]
    >>> gang_availability(1, 0.9, 1000.0)
    Availability(alpha=0.9, cycle_s=1000.0)
    """
    checks.positive(machines=machines, cycle_s=cycle_s)
    checks.fraction(alpha=alpha)
    all_up = alpha**machines
    if machines == 1 or all_up < _NEVER:
        return Availability(alpha if machines == 1 else 0.0, cycle_s)
    return Availability(all_up, alpha * cycle_s / (machines * all_up))


def gang_uptime_variance_s2(time_s: float, machines: int, alpha: float, cycle_s: float) -> float:
    """Variance of the seconds within `time_s` in which all of k independent machines are up, exactly.

    The covariance of "all up" over a lag τ is (α² + p e^(-gτ))^k - α^(2k), by the binomial theorem a sum of
    exponentials, with p = α (1 - α) and g = 1 / (p cycle); each term is integrated as in `uptime_variance_s2`. With
    the numbers of `gang_availability` that function is of a two-state chain with the same means; at α = 0.9 it is lower
    by 5 % for k = 3, and by 13 % for k = 8.

    Args:
        alpha, cycle_s: of one machine.

    >>> round(gang_uptime_variance_s2(6720, 1, 0.9, 1000.0)), round(gang_uptime_variance_s2(6720, 3, 0.9, 1000.0))
    (107406, 223524)
    """
    checks.positive(machines=machines)
    checks.non_negative(time_s=time_s)
    p = alpha * (1 - alpha)
    if p == 0:
        return 0.0
    return sum(
        # A term p^j e^(-jgτ): v(t) of a chain with the same p and j times the decay rate, scaled to its weight.
        math.comb(machines, j) * alpha ** (2 * (machines - j)) * p ** (j - 1)
        * uptime_variance_s2(time_s, alpha, cycle_s / j)
        for j in range(1, machines + 1)
    )  # fmt: skip


class StepProbabilities(NamedTuple):
    """Chance to change state within one step."""

    down: float
    up: float


def step_probabilities(step_s: float, alpha: float, cycle_s: float) -> StepProbabilities:
    """Transition probabilities of the sampled chain: step/(α cycle) from up to down, step/((1-α) cycle) back.

    Raises:
        ValueError: the step is longer than a mean up or down period, so that they are no probabilities.

    Source: the DOLL paper, Section VI (2 s steps, cycle 1000 s).

    >>> step_probabilities(2.0, 0.5, 1000.0)
    StepProbabilities(down=0.004, up=0.004)
    """
    checks.positive(step_s=step_s, cycle_s=cycle_s)
    checks.fraction(alpha=alpha)
    if alpha == 1:
        return StepProbabilities(0.0, 1.0)
    if alpha == 0:
        return StepProbabilities(1.0, 0.0)
    probabilities = StepProbabilities(step_s / (alpha * cycle_s), step_s / ((1 - alpha) * cycle_s))
    if max(probabilities) > 1:
        raise ValueError(
            f"step_s: expected at most {min(alpha, 1 - alpha) * cycle_s:g} s for this chain, got {step_s:g}"
        )
    return probabilities


def availability_from_now(up: bool, horizon_s: float, alpha: float, cycle_s: float) -> float:
    """Expected fraction of the next `horizon_s` that a worker is up, given that it is up (or down) now.

    >>> [round(availability_from_now(up, 90.0, 0.9, 1000.0), 3) for up in (True, False)]
    [0.963, 0.331]
    """
    checks.positive(horizon_s=horizon_s, cycle_s=cycle_s)
    checks.fraction(alpha=alpha)
    p = alpha * (1 - alpha)
    if p == 0:
        return alpha
    x = horizon_s / (p * cycle_s)
    memory = -math.expm1(-x) / x
    return alpha + ((1 - alpha) if up else -alpha) * memory


def design_effect(cluster_sizes: Sequence[int]) -> float:
    """Kish's design effect Σk²/Σk of interruptions that come in clusters of k: 1 when all are alone.

    The variance of a sum over workers grows by it, and tallies of up and down times are worth that much less.

    >>> design_effect([1, 1, 1]), design_effect([4, 4])
    (1.0, 4.0)
    """
    total = sum(cluster_sizes)
    return sum(size * size for size in cluster_sizes) / total if total else 1.0


def jensen_factor(rho: float, updates_var: float) -> float:
    """exp(½ ln²ρ Var(J_t)): how much larger E[ρ^J_t] is than ρ^E[J_t] (J_t near normal).

    Plugging the expected number of updates into (10) is optimistic by this factor.

    >>> round(jensen_factor(0.99, 100.0), 5)
    1.00506
    """
    if not 0 < rho < 1:
        raise ValueError(f"rho: expected a number in (0, 1), got {rho}")
    checks.non_negative(updates_var=updates_var)
    return math.exp(0.5 * math.log(rho) ** 2 * updates_var)


def _spot_of(num_spot: int, num_workers: int) -> None:
    if not 0 <= num_spot <= num_workers:
        raise ValueError(f"num_spot: expected 0 .. {num_workers}, got {num_spot}")
