"""Samples to batches to groups: rates, stability, and how many updates are done by a given time.

A stream brings samples at rate λ_A; b samples are a batch, K batches of any workers a group, each group one update.
All functions hold for unequal streams where they take the total rate S = Σ λ_n (N λ_A for equal ones).

Source: the DOLL paper, Section III (Eq. (1)-(4), Proposition 1, Theorem 1). Corrections: docs/theory.md, D4-D6.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from doll.theory import checks
from doll.theory.normal import tail


def batch_rate_per_s(total_rate_per_s: float, batch_size: int) -> float:
    """λ_B = S / b, batches per second of all workers together.

    >>> batch_rate_per_s(64 * 125, 256)
    31.25
    """
    checks.positive(total_rate_per_s=total_rate_per_s, batch_size=batch_size)
    return total_rate_per_s / batch_size


def update_rate_per_s(total_rate_per_s: float, group_size: int, batch_size: int) -> float:
    """λ_U = S / (K b), updates per second of a stable system.

    Source: the DOLL paper, Eq. (1).

    >>> update_rate_per_s(64 * 125, 20, 256)
    1.5625
    """
    checks.positive(group_size=group_size)
    return batch_rate_per_s(total_rate_per_s, batch_size) / group_size


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


def harmonic(n: int) -> float:
    """H_n = 1 + 1/2 + ... + 1/n: the mean maximum of n exponential times of mean 1.

    >>> harmonic(2), round(harmonic(20), 2)
    (1.5, 3.6)
    """
    return math.fsum(1 / k for k in range(1, n + 1))


class Stability(NamedTuple):
    """Proposition 1 as margins: above 1 the form holds.

    Attributes:
        sufficient: (b / S) / μ_C. Above 1 the queue is stable even if one worker computes all K batches.
        necessary: (b / S) / ((H_K / K) μ_C). At or below 1 it grows without bound when the K batches are computed at K
            distinct workers and compute times are exponential.
    """

    sufficient: float
    necessary: float

    @property
    def verdict(self) -> str:
        """`stable`, `depends` (on how batches of a group spread over workers) or `unstable`."""
        return "stable" if self.sufficient > 1 else "depends" if self.necessary > 1 else "unstable"


def stability(total_rate_per_s: float, group_size: int, batch_size: int, service_s: float) -> Stability:
    """Proposition 1: may groups come faster than they are served?

    Args:
        total_rate_per_s: S, samples per second of all streams.
        group_size: K.
        batch_size: b.
        service_s: μ_C, mean seconds to compute and upload one batch's gradient.

    Source: the DOLL paper, Proposition 1. Differs from the paper: H_K in place of log K in the necessary form.

    >>> [round(x, 3) for x in stability(64 * 125, 20, 256, service_s=0.032)]
    [1.0, 5.559]
    """
    checks.positive(group_size=group_size, service_s=service_s)
    sufficient = 1 / batch_rate_per_s(total_rate_per_s, batch_size) / service_s
    return Stability(sufficient, sufficient * group_size / harmonic(group_size))


def smallest_stable_batch(total_rate_per_s: float, group_size: int, service_s: float, service_per_sample_s: float = 0.0,
                          *, necessary: bool = False) -> int | None:  # fmt: skip
    """The least b that makes the system stable; None when no b does.

    Args:
        service_s: μ_C at b = 0, seconds: what a gradient costs whatever its batch size.
        service_per_sample_s: seconds more per sample of the batch.
        necessary: by the necessary form (distinct workers) instead of the sufficient one.

    >>> smallest_stable_batch(8000, 20, 0.030), smallest_stable_batch(8000, 20, 0.030, 0.001)
    (241, None)
    """
    checks.positive(total_rate_per_s=total_rate_per_s, group_size=group_size)
    checks.non_negative(service_s=service_s, service_per_sample_s=service_per_sample_s)
    factor = harmonic(group_size) / group_size if necessary else 1.0
    gain = 1 / total_rate_per_s - factor * service_per_sample_s
    if gain <= 0:
        return None
    return max(1, math.floor(factor * service_s / gain * (1 + 1e-12)) + 1)


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
