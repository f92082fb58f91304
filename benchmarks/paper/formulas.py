"""Formulas of the DOLL paper, and MLLess's printed score, that its reproductions and tests need and no command does.

The others are in `doll/theory/`. Corrections: docs/theory.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from doll.theory import checks
from doll.theory.checks import Floats
from doll.theory.cost import SECONDS_PER_HOUR, TOLERANCE, Prices, effective_of_sorted
from doll.theory.fitting import Decay
from doll.theory.planning import check_risk, quantile, tail, too_slow
from doll.theory.preemption import uptime_variance_s2
from doll.theory.queueing import batch_rate_per_s, update_rate_per_s
from doll.theory.scale_in import Pace, relative_excess

# --- updates done by a given time


def group_interval_s(total_rate_per_s: float, group_size: int, batch_size: int) -> float:
    """E[Γ] = K b / S, mean seconds between groups; the inverse of `update_rate_per_s`.

    >>> group_interval_s(64 * 125, 20, 256)
    0.64
    """
    return 1 / update_rate_per_s(total_rate_per_s, group_size, batch_size)


def update_interval_variance_bound_s2(
    total_rate_per_s: float, group_size: int, batch_size: int, service_sd_s: float
) -> float:
    """The bound of Eq. (1) on the variance of the time between updates: K b²/S² + K² σ_C², s².

    Holds for K >= 2 when batches arrive like a Poisson process; false for K = 1 and regular arrivals (D5). A bound
    that is several times too large: never an estimate.

    Source: the DOLL paper, Eq. (1).

    >>> update_interval_variance_bound_s2(64 * 125, 20, 256, service_sd_s=0.0)
    0.02048
    """
    checks.non_negative(service_sd_s=service_sd_s)
    return group_size / batch_rate_per_s(total_rate_per_s, batch_size) ** 2 + (group_size * service_sd_s) ** 2


class UpdateCount(NamedTuple):
    """Distribution of the updates done: normal, rounded down."""

    mean: float
    variance: float

    def cdf(self, updates: float) -> float:
        """P(J_t <= updates). The mean of the normal lies half an update lower: unfinished groups do not count."""
        return 1 - tail((updates - self.mean + 0.5) / math.sqrt(self.variance))


def update_count(
    time_s: float,
    total_rate_per_s: float,
    group_size: int,
    batch_size: int,
    *,
    arrival_scv: float = 1.0,
    num_workers: int = 0,
) -> UpdateCount:
    """Theorem 1, corrected: updates done by `time_s`, mean t λ_U and variance t λ_U c_A²/(K b) + N/(6K²) + 1/12.

    Args:
        arrival_scv: c_A², squared coefficient of variation of the time between samples (1: Poisson, 0: regular).
        num_workers: N, for the term of the unfinished batches; 0 leaves it out.

    Source: the DOLL paper, Theorem 1, Eq. (2)-(3). Differs from the paper: its variance t λ_U / K is b times too large,
    since a superposition of a fixed number of streams is not Poisson over long times, and compute time cannot add to
    the long-run variance of a stable queue's output.

    >>> update_count(128, 16 * 12.5, 4, 32, num_workers=16)
    UpdateCount(mean=200.0, variance=1.8125)
    """
    checks.non_negative(time_s=time_s, arrival_scv=arrival_scv, num_workers=num_workers)
    mean = time_s * update_rate_per_s(total_rate_per_s, group_size, batch_size)
    ends = num_workers / (6 * group_size**2) + 1 / 12
    return UpdateCount(mean, mean * arrival_scv / (group_size * batch_size) + ends)


def printed_update_variance(time_s: float, total_rate_per_s: float, group_size: int, batch_size: int) -> float:
    """t λ_U / K: the variance of Theorem 1 as printed (compute time left out), kept to show that it is wrong.

    >>> printed_update_variance(128, 16 * 12.5, 4, 32)
    50.0
    """
    return time_s * update_rate_per_s(total_rate_per_s, group_size, batch_size) / group_size


def batch_dispersion(window_s: float, rate_per_s: float, batch_size: int) -> float:
    """Var / mean of the batches counted in a window, Poisson samples, random phases: from 1 (Poisson) down to 1/b.

    A stream that starts with a fill U{0..b-1} completes floor((U + A)/b) batches, A its samples: mean A/b and, given A,
    variance f (1 - f) with f the fraction part of A/b. It is the same for one stream and for many.

    >>> [round(batch_dispersion(t, 50.0, 32), 2) for t in (0.05, 0.64, 2.0, 50.0)]
    [0.92, 0.14, 0.08, 0.03]
    """
    checks.positive(window_s=window_s, rate_per_s=rate_per_s, batch_size=batch_size)
    mean = rate_per_s * window_s
    # Poisson weights over ten standard deviations, by logarithms; more than that is 1e-20.
    reach = 10 * math.sqrt(mean) + 20
    counts = np.arange(max(0, math.floor(mean - reach)), math.ceil(mean + reach) + 1)
    log_factorial = np.array([math.lgamma(count + 1) for count in counts])
    weights = np.exp(counts * math.log(mean) - mean - log_factorial)
    part = (counts % batch_size) / batch_size
    return 1 / batch_size + float(weights @ (part * (1 - part))) * batch_size / mean


def burst_spread_s(rate_per_s: float, batch_size: int) -> float:
    """√b / λ_A: standard deviation of the moment at which equal streams that began empty finish a batch together.

    >>> round(burst_spread_s(125.0, 256), 3)
    0.128
    """
    checks.positive(rate_per_s=rate_per_s, batch_size=batch_size)
    return math.sqrt(batch_size) / rate_per_s


def lockstep_time_s(rate_per_s: float, batch_size: int) -> float:
    """b²/λ_A: about how long equal streams that began empty stay in step, so that batches come in bursts.

    Give each worker a random first fill when the Poisson approximation of the groups is to hold.

    >>> lockstep_time_s(125.0, 256)
    524.288
    """
    checks.positive(rate_per_s=rate_per_s, batch_size=batch_size)
    return batch_size**2 / rate_per_s


# --- the error


def decay(
    first_error: float,
    step_size: float,
    convexity: float,
    smoothness: float,
    sample_variance: float,
    group_size: int,
    batch_size: int,
) -> Decay:
    """(10) from the constants of the problem: ρ = 1 - η c, γ = η L B / (2 K b c).

    Args:
        first_error: G(w_0) - G*.
        step_size: η, in (0, 1/L].
        convexity: c.
        smoothness: L, at least c.
        sample_variance: B, variance of one sample's gradient.

    Raises:
        ValueError: a number out of its range, among them η > 1/L.

    Source: the DOLL paper, Eq. (10). Differs from the paper: holds for the mean gradient; with the printed sum of sums
    the floor is K b times larger, or the iteration diverges (D2).

    >>> decay(1.0, 0.1, 1.0, 1.0, 1.0, 4, 10)
    Decay(rho=0.9, beta=0.99875, gamma=0.00125)
    """
    checks.non_negative(first_error=first_error, sample_variance=sample_variance)
    checks.positive(step_size=step_size, convexity=convexity, smoothness=smoothness)
    checks.positive(group_size=group_size, batch_size=batch_size)
    if smoothness < convexity:
        raise ValueError(f"smoothness: expected at least the convexity {convexity}, got {smoothness}")
    if step_size * smoothness > 1 + 1e-12:
        raise ValueError(f"step_size: expected at most 1/L = {1 / smoothness:g}, got {step_size:g}")
    gamma = step_size * smoothness * sample_variance / (2 * group_size * batch_size * convexity)
    # η c = 1 jumps to the floor in one update; a ρ of 0 has no logarithm.
    rho = max(1 - step_size * convexity, 1e-300)
    return Decay(rho, first_error - gamma, gamma)


def stationary_error_quadratic(
    step_size: float, curvature: float, sample_variance: float, group_size: int, batch_size: int
) -> float:
    """η B / (2 K b (2 - η c)): where the error of a quadratic (L = c) settles, exactly; at most γ.

    >>> round(stationary_error_quadratic(0.1, 1.0, 1.0, 4, 10), 6)
    0.000658
    """
    checks.positive(step_size=step_size, curvature=curvature, group_size=group_size, batch_size=batch_size)
    if step_size * curvature >= 2:
        raise ValueError(f"step_size: diverges at 2/c = {2 / curvature:g} and above, got {step_size:g}")
    return step_size * sample_variance / (2 * group_size * batch_size * (2 - step_size * curvature))


def error_rate_per_s(update_rate_per_s: float, rho: float, dispersion: float) -> float:
    """(9): r with E[ρ^J_t] ≈ e^(-r t): r = λ_U |ln ρ| (1 - ½ I |ln ρ|).

    Args:
        update_rate_per_s: λ_U.
        rho: ρ, in (0, 1).
        dispersion: I = lim Var(J_t) / (t λ_U): c_A²/(K b) by the corrected Theorem 1, 1/K by the paper.

    Raises:
        ValueError: I |ln ρ| >= 2, where the normal approximation of J_t says nothing about E[ρ^J_t].

    Source: the DOLL paper, Eq. (9), whose rate is not given in closed form (D7).

    >>> round(error_rate_per_s(1.0, 0.99, 0.25), 6)
    0.010038
    """
    checks.positive(update_rate_per_s=update_rate_per_s)
    checks.non_negative(dispersion=dispersion)
    if not 0 < rho < 1:
        raise ValueError(f"rho: expected a number in (0, 1), got {rho}")
    pull = abs(math.log(rho))
    if dispersion * pull >= 2:
        raise ValueError(f"dispersion: expected below 2/|ln ρ| = {2 / pull:g}, got {dispersion:g}")
    return update_rate_per_s * pull * (1 - 0.5 * dispersion * pull)


def error_rate_poisson_per_s(batch_rate_per_s: float, rho: float, group_size: int) -> float:
    """λ_B (1 - ρ^(1/K)): the rate of (9) when batches come as an exact Poisson process; positive for every ρ.

    >>> round(error_rate_poisson_per_s(4.0, 0.99, 4), 6)
    0.010038
    """
    checks.positive(batch_rate_per_s=batch_rate_per_s, group_size=group_size)
    return batch_rate_per_s * -math.expm1(math.log(rho) / group_size)


# --- preemption


def expected_workers_up(num_workers: int, num_spot: int, alpha: float) -> float:
    """E[N] = N_o + α N_s. Source: the DOLL paper, Proposition 2.

    >>> expected_workers_up(64, 30, 0.9)
    61.0
    """
    checks.fraction(alpha=alpha)
    if not 0 <= num_spot <= num_workers:
        raise ValueError(f"num_spot: expected 0 .. {num_workers}, got {num_spot}")
    return num_workers - num_spot + alpha * num_spot


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

    Add `update_count` for the arrivals; it is far smaller.

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


# --- cost


def on_demand_runtime_s(samples: float, rate_per_s: float, num_workers: int) -> float:
    """θ_0 = J K b / (N λ_A): seconds with all workers on-demand.

    Args:
        samples: J K b.
        rate_per_s: λ_A, samples per second at one worker.
        num_workers: N.

    Source: the DOLL paper, Eq. (3) with λ_U of Eq. (1).

    >>> on_demand_runtime_s(51_200_000, rate_per_s=125, num_workers=64)
    6400.0
    """
    checks.non_negative(samples=samples)
    checks.positive(rate_per_s=rate_per_s, num_workers=num_workers)
    return samples / (rate_per_s * num_workers)


# --- Theorem 4


def runtime_s(num_spot: npt.ArrayLike, samples: float, rate_per_s: float, num_workers: int, alpha: float) -> Floats:
    """(15): expected seconds with `num_spot` of the workers on spot; infinite where no worker is ever up.

    Args:
        num_spot: N_s, 0 .. N; a number or an array.
        samples: J K b.
        rate_per_s: λ_A, samples per second at one worker that is up.
        num_workers: N.
        alpha: long-run fraction of time a spot worker is up, in [0, 1].

    Returns:
        float64, of the shape of `num_spot`.

    Source: the DOLL paper, Eq. (15).

    >>> float(runtime_s(32, 51_200_000, 125, 64, alpha=0.5))
    8533.333333333334
    """
    checks.positive(num_workers=num_workers, rate_per_s=rate_per_s)
    checks.fraction(alpha=alpha)
    checks.non_negative(samples=samples)
    spot = np.asarray(num_spot, dtype=np.float64)
    if spot.size and not (spot.min() >= 0 and spot.max() <= num_workers):
        raise ValueError(f"num_spot: expected 0 .. {num_workers}, got {spot.tolist()}")
    return _divide(samples, rate_per_s * (num_workers - (1 - alpha) * spot))


def cost_usd(
    num_spot: npt.ArrayLike, samples: float, rate_per_s: float, num_workers: int, alpha: float, prices: Prices
) -> Floats:
    """(16): expected cost in USD with `num_spot` of the workers on spot; infinite where no worker is ever up.

    Arguments as in `runtime_s`.

    Source: the DOLL paper, Eq. (16), with prices per hour.

    >>> prices = Prices(spot_usd_per_h=0.158, on_demand_usd_per_h=0.286)
    >>> all_on_demand, mixed = cost_usd([0, 30], 51_200_000, 125, 64, 0.9, prices)
    >>> round(float(mixed / all_on_demand), 4)
    0.8019
    """
    time_h = runtime_s(num_spot, samples, rate_per_s, num_workers, alpha) / SECONDS_PER_HOUR
    slope = alpha * prices.spot_usd_per_h - prices.on_demand_usd_per_h
    usd_per_h = num_workers * prices.on_demand_usd_per_h + slope * np.asarray(num_spot, dtype=np.float64)
    # An endless job is infinitely dear even where its price per hour is 0 (all spot, never up).
    return np.where(np.isinf(time_h), math.inf, np.where(np.isinf(time_h), 0.0, time_h) * usd_per_h)


def cost_slope_usd(
    num_spot: npt.ArrayLike, samples: float, rate_per_s: float, num_workers: int, alpha: float, prices: Prices
) -> Floats:
    """(17): what one more worker on spot changes of `cost_usd`, as a derivative; below 0 iff α > 0 and spot is cheaper.

    Arguments as in `runtime_s`; N_s = N with α = 0 has no derivative and gives NaN.

    Source: the DOLL paper, Eq. (17).

    >>> prices = Prices(spot_usd_per_h=0.158, on_demand_usd_per_h=0.286)
    >>> round(float(cost_slope_usd(0, 51_200_000, 125, 64, 0.9, prices)), 4)
    -0.2048
    """
    alone_h = samples / rate_per_s / SECONDS_PER_HOUR
    up = num_workers + (alpha - 1) * np.asarray(num_spot, dtype=np.float64)
    gain = alpha * num_workers * (prices.spot_usd_per_h - prices.on_demand_usd_per_h)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope: Floats = alone_h * gain / np.where(up > 0, up, np.nan) ** 2
    return slope


def unequal_runtime_s(samples: float, rates_per_s: npt.ArrayLike, alpha: float) -> Floats:
    """(21): expected seconds with the n slowest streams on spot, for every n = 0 .. N.

    Args:
        samples: J K b.
        rates_per_s: λ_n, one per worker, in any order.
        alpha: availability.

    Returns:
        float64, shape (N + 1,).

    Source: the DOLL paper, Eq. (21).

    >>> [float(t) for t in unequal_runtime_s(600, [1, 2, 3], alpha=0.5)]
    [100.0, 109.0909090909091, 133.33333333333334, 200.0]
    """
    checks.non_negative(samples=samples)
    checks.fraction(alpha=alpha)
    return _divide(samples, effective_of_sorted(np.sort(checks.rates(rates_per_s)), alpha))


def _divide(top: float, below: Floats) -> Floats:
    """top / below, infinite where below is 0 (and top is not)."""
    out = np.full(np.shape(below), math.inf if top > 0 else 0.0)
    quotient: Floats = np.divide(top, below, out=out, where=np.asarray(below) > 0)
    return quotient


def required_workers(samples: float, rate_per_s: float, deadline_s: float) -> float:
    """x = J K b / (λ_A θ): workers that must be up all the time to meet the deadline.

    Args:
        samples: J K b.
        rate_per_s: λ_A, samples per second at one worker.
        deadline_s: θ, seconds from now.

    >>> round(required_workers(51_200_000, 125, 6000.0), 3)
    68.267
    """
    checks.non_negative(samples=samples)
    checks.positive(rate_per_s=rate_per_s, deadline_s=deadline_s)
    return samples / (rate_per_s * deadline_s)


def best_num_spot(
    samples: float, rate_per_s: float, num_workers: int, alpha: float, deadline_s: float, prices: Prices
) -> int:
    """Theorem 4: N_s of least expected cost whose expected runtime meets the deadline, for equal rates.

    Args:
        samples: J K b, the work that is left.
        rate_per_s: λ_A, samples per second at one worker.
        num_workers: N.
        alpha: availability, in [0, 1].
        deadline_s: θ, seconds that are left.
        prices: of the two markets; 0 when spot is not the cheaper one.

    Returns:
        N_s in 0 .. N.

    Raises:
        InfeasiblePlanError: θ < θ_0: not even all workers on-demand meet the deadline.

    Source: the DOLL paper, Theorem 4, Eq. (18). Differs from the paper: no negative floor, α = 1 allowed, float-safe.

    >>> best_num_spot(51_200_000, 125, 64, 0.9, 1.05 * 6400, Prices(0.158, 0.286))
    30
    """
    checks.fraction(alpha=alpha)
    checks.positive(num_workers=num_workers)
    needed = required_workers(samples, rate_per_s, deadline_s)
    if needed > num_workers * (1 + TOLERANCE):
        raise too_slow(samples, rate_per_s * num_workers, deadline_s, f"{needed:.3f} > {num_workers} workers",
                        workers=math.ceil(needed - TOLERANCE))  # fmt: skip
    if not prices.spot_is_cheaper:
        return 0
    if alpha * num_workers >= needed * (1 - TOLERANCE):
        return num_workers
    return max(0, min(num_workers, math.floor((num_workers - needed) / (1 - alpha) + TOLERANCE)))


def best_num_spot_at_risk(
    samples: float,
    rate_per_s: float,
    num_workers: int,
    alpha: float,
    deadline_s: float,
    prices: Prices,
    *,
    cycle_s: float,
    risk: float | None = None,
    z: float | None = None,
    effect: float = 1.0,
) -> int:
    """Theorem 4 with P(runtime > θ) <= `risk`: the largest N_s with N - (1-α) N_s - z sqrt(N_s v(θ)) / θ >= x.

    Args:
        cycle_s: mean seconds of one up and one down period of a spot worker.
        risk: accepted probability of missing the deadline, in (0, 0.5]; or
        z: the normal quantile itself, at least 0. Exactly one of the two.
        effect: design effect of outages that come together (1: independent workers).
        The others are those of `best_num_spot`.

    Raises:
        InfeasiblePlanError: θ < θ_0. (All on-demand has no preemption risk, so the risk alone never binds.)

    Source: an extension; docs/theory.md, "Risk". Plans by Theorem 4 alone miss about two deadlines in five.

    >>> paper = dict(samples=51_200_000, rate_per_s=125, num_workers=64, alpha=0.9, deadline_s=1.05 * 6400)
    >>> best_num_spot_at_risk(**paper, prices=Prices(0.158, 0.286), cycle_s=1000.0, z=1.645)
    26
    """
    best_num_spot(samples, rate_per_s, num_workers, alpha, deadline_s, prices)  # raises where no N_s will do
    if not prices.spot_is_cheaper:
        return 0
    needed = required_workers(samples, rate_per_s, deadline_s)
    spread = _quantile(risk, z) * math.sqrt(uptime_variance_s2(deadline_s, alpha, cycle_s) * effect) / deadline_s
    spot = np.arange(num_workers + 1, dtype=np.float64)
    # The left side falls with N_s, so the numbers that will do are 0 .. the answer.
    enough = num_workers - (1 - alpha) * spot - spread * np.sqrt(spot) >= needed - TOLERANCE * max(1.0, needed)
    return max(0, int(np.count_nonzero(enough)) - 1)


def _quantile(risk: float | None, z: float | None) -> float:
    if (risk is None) == (z is None):
        raise ValueError("expected exactly one of risk and z")
    if z is not None:
        checks.non_negative(z=z)
        return z
    assert risk is not None
    check_risk(risk)
    return quantile(1 - risk)


# --- scale-in


def printed_excess(step: float, horizon_s: float, reference: Pace, current: Pace, reference_step: float) -> float:
    """(1) with its printed sign, for comparison only: `relative_excess` negated."""
    return -relative_excess(step, horizon_s, reference, current, reference_step)
