"""Preemptible spot workers: the share of the time for which they are up, and its variance.

Model: each spot worker is an independent two-state Markov chain, which is up with probability α in the long run. One up
period and one down period together last `cycle_s` on average. If several workers have outages at the same time, the
variances grow by a factor, the design effect.

Source: the DOLL paper, Section IV (Eq. (4)-(6)); the variance is derived in docs/theory.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.theory import checks

_NORMAL_FROM = 10_000  # from this many workers of one rate on, the sum of their up times counts as normal
_NEVER = 1e-200  # availabilities below this count as 0


def uptime_variance_s2(time_s: float, alpha: float, cycle_s: float) -> float:
    """Return v(t), the variance of the up seconds of one spot worker within `time_s`, from a stationary start.

    v(t) = 2 p [t/g - (1 - e^(-g t)) / g²], p = α (1 - α), g = 1 / (p · cycle).

    Args:
        time_s: length of the time window, seconds.
        alpha: availability, in [0, 1]; the variance is 0 for 0 and 1.
        cycle_s: mean length of one up period plus one down period, seconds.

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


def shortfall_prob(
    needed: float, rates_per_s: npt.ArrayLike, alpha: float, cycle_s: float, time_s: float, noise_var: float
) -> float:
    """Return the probability of fewer than `needed` samples of spot workers within `time_s`, from a stationary start.

    The total up time of a few workers is not normally distributed: often a worker is not interrupted at all. Therefore
    the distribution of Σ λ_n U_n + noise is computed from its characteristic function (Gil-Pelaez's integral by the
    midpoint rule), with E[exp(s U)] of a two-state chain in closed form. Rates that differ by less than a twentieth are
    replaced by their mean.

    Args:
        needed: number of samples; may be negative.
        rates_per_s: λ_n, samples per second while a worker is up, shape (n,); may be empty.
        alpha: availability of a worker, in [0, 1].
        cycle_s: mean length of one up period plus one down period of a worker, seconds.
        time_s: length of the time window, seconds.
        noise_var: variance of all other noise, which is normal, in samples². The standard deviation is raised to at
            least a thirtieth of that of the outages, or 1/3000 of the samples that the workers can make, whichever is
            less.

    Source: Gil-Pelaez (1951); see docs/theory.md.

    >>> one_worker_and_no_outage = math.exp(-1000 / 9000) * 0.9
    >>> abs(1 - shortfall_prob(999, [1.0], 0.9, 10_000.0, 1000.0, 0.1) - one_worker_and_no_outage) < 0.002
    True
    """
    checks.fraction(alpha=alpha)
    checks.positive(cycle_s=cycle_s, time_s=time_s)
    checks.non_negative(noise_var=noise_var)
    rates = np.asarray(rates_per_s, dtype=np.float64)
    rates = rates[rates > 0]
    mean, most = alpha * float(rates.sum()) * time_s, float(rates.sum()) * time_s
    outages_sd = math.sqrt(float((rates**2).sum()) * uptime_variance_s2(time_s, alpha, cycle_s))
    noise = max(math.sqrt(noise_var), min(most / 3000, outages_sd / 30), most / 1e5)
    if outages_sd == 0 or not -10 * noise < needed < most + 10 * noise:
        return _below((needed - mean) / noise) if noise else float(needed > mean)
    if rates.sum() ** 2 > _NORMAL_FROM * (rates**2).sum():
        return _below((needed - mean) / math.hypot(outages_sd, math.sqrt(noise_var)))
    groups = np.unique(np.round(np.log(rates) / 0.05), return_inverse=True)[1]
    counts = np.bincount(groups)
    means = np.bincount(groups, weights=rates) / counts
    # The period contains the whole range of the sum. Above the highest frequency, the noise makes the terms negligible.
    step = 2 * math.pi / (2 * most + 40 * noise)
    at = np.arange(0.5, 8.5 / noise / step) * step
    transform = np.exp(-0.5 * (noise * at) ** 2 - 1j * at * needed)
    for count, rate in zip(counts, means, strict=True):
        transform *= _uptime_transform(1j * at * rate, alpha, cycle_s, time_s) ** count
    return float(np.clip(0.5 - np.sum(transform.imag / at) * step / math.pi, 0.0, 1.0))


def _uptime_transform(s: npt.NDArray[np.complex128], alpha: float, cycle_s: float, time_s: float) -> Any:
    """Return E[exp(s U)] of a worker's up time U within `time_s`, from the 2 x 2 generator of its chain."""
    ends, comes = 1 / (alpha * cycle_s), 1 / ((1 - alpha) * cycle_s)
    trace = s - ends - comes
    root = np.sqrt(trace**2 + 4 * comes * s)
    high, low = (trace + root) / 2, (trace - root) / 2
    return ((alpha * s - low) * np.exp(high * time_s) + (high - alpha * s) * np.exp(low * time_s)) / root


def _below(z: float) -> float:
    """Return P(Z < z) for a standard normal Z."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


class Availability(NamedTuple):
    """Long-run share of the time for which a worker or machine is up, and the mean length of one up period plus one
    down period, in seconds."""

    alpha: float
    cycle_s: float


def gang_availability(machines: int, alpha: float, cycle_s: float) -> Availability:
    """Return the availability of k machines that work only while all of them are up: α^k, and the cycle / (k α^(k-1)).

    Assumes that the machines are independent two-state chains. A period in which all k machines are up ends k times as
    often as an up period of one machine, after α cycle / k on average. The share of these periods in the time is α^k.
    Machines that fail together interrupt the worker less often. If all machines of a pool fail together, they have the
    α and the cycle of one machine.

    Args:
        machines: k, 1 or more.
        alpha: availability of one machine, in [0, 1].
        cycle_s: mean length of one up period plus one down period of one machine, seconds.

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
