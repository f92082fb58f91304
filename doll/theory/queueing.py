"""Samples to batches to groups: rates, stability, and how many updates are done by a given time.

A stream brings samples at rate λ_A; b samples are a batch, K batches of any workers a group, each group one update.
All functions hold for unequal streams if they take the total rate S = Σ λ_n (N λ_A for equal ones).

Source: the DOLL paper, Section III (Eq. (1)-(4), Proposition 1, Theorem 1). Corrections: docs/theory.md, D4-D6.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from doll.theory import checks


def batch_rate_per_s(total_rate_per_s: float, batch_size: float) -> float:
    """λ_B = S / b, batches per second of all workers together.

    >>> batch_rate_per_s(64 * 125, 256)
    31.25
    """
    checks.positive(total_rate_per_s=total_rate_per_s, batch_size=batch_size)
    return total_rate_per_s / batch_size


def update_rate_per_s(total_rate_per_s: float, group_size: int, batch_size: float) -> float:
    """λ_U = S / (K b), updates per second of a stable system.

    Source: the DOLL paper, Eq. (1).

    >>> update_rate_per_s(64 * 125, 20, 256)
    1.5625
    """
    checks.positive(group_size=group_size)
    return batch_rate_per_s(total_rate_per_s, batch_size) / group_size


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


def stability(total_rate_per_s: float, group_size: int, batch_size: float, service_s: float) -> Stability:
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


def smallest_stable_batch(total_rate_per_s: float, service_s: float) -> int:
    """The least b that makes the system stable by the sufficient form, if a gradient takes μ_C whatever its b is.

    >>> smallest_stable_batch(8000, 0.030)
    241
    """
    checks.positive(total_rate_per_s=total_rate_per_s)
    checks.non_negative(service_s=service_s)
    return max(1, math.floor(service_s * total_rate_per_s * (1 + 1e-12)) + 1)
