"""From samples to batches to groups: rates, stability, and the number of updates within a given time.

A stream delivers samples at the rate λ_A. A batch has b samples; a group has K batches of any workers; each group makes
one update. All functions also hold for unequal streams if they get the total rate S = Σ λ_n (N λ_A for equal streams).

The number of updates to an error target, J(ε), is `doll.theory.fitting.Decay.updates_to`.

Source: the DOLL paper, Section III (Eq. (1)-(4), Proposition 1, Theorem 1). Corrections: docs/theory.md, D4-D6.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from doll.theory import checks


def batch_rate_per_s(total_rate_per_s: float, batch_size: float) -> float:
    """Return λ_B = S / b, the batches per second of all workers together.

    >>> batch_rate_per_s(64 * 125, 256)
    31.25
    """
    checks.positive(total_rate_per_s=total_rate_per_s, batch_size=batch_size)
    return total_rate_per_s / batch_size


def update_rate_per_s(total_rate_per_s: float, group_size: int, batch_size: float) -> float:
    """Return λ_U = S / (K b), the updates per second of a stable system.

    Source: the DOLL paper, Eq. (1).

    >>> update_rate_per_s(64 * 125, 20, 256)
    1.5625
    """
    checks.positive(group_size=group_size)
    return batch_rate_per_s(total_rate_per_s, batch_size) / group_size


def harmonic(n: int) -> float:
    """Return H_n = 1 + 1/2 + ... + 1/n, the mean of the maximum of n exponential times with mean 1.

    >>> harmonic(2), round(harmonic(20), 2)
    (1.5, 3.6)
    """
    return math.fsum(1 / k for k in range(1, n + 1))


class Stability(NamedTuple):
    """The two conditions of Proposition 1 as margins. A condition holds if its margin is above 1.

    Attributes:
        sufficient: (b / S) / μ_C. Above 1, the queue is stable even if one worker computes all K batches.
        necessary: (b / S) / ((H_K / K) μ_C). At or below 1, the queue grows without bound if K different workers
            compute the K batches and the compute times are exponential.
    """

    sufficient: float
    necessary: float

    @property
    def verdict(self) -> str:
        """The verdict: `stable`, `depends` (on how the workers share the batches of a group) or `unstable`."""
        return "stable" if self.sufficient > 1 else "depends" if self.necessary > 1 else "unstable"


def stability(total_rate_per_s: float, group_size: int, batch_size: float, service_s: float) -> Stability:
    """Return the margins of Proposition 1, which show whether groups arrive faster than the workers compute them.

    Args:
        total_rate_per_s: S, samples per second of all streams.
        group_size: K, batches per update.
        batch_size: b, samples per batch.
        service_s: μ_C, mean seconds to compute and upload the gradient of one batch.

    Source: the DOLL paper, Proposition 1. Differs from the paper: H_K instead of log K in the necessary condition.

    >>> [round(x, 3) for x in stability(64 * 125, 20, 256, service_s=0.032)]
    [1.0, 5.559]
    """
    checks.positive(group_size=group_size, service_s=service_s)
    sufficient = 1 / batch_rate_per_s(total_rate_per_s, batch_size) / service_s
    return Stability(sufficient, sufficient * group_size / harmonic(group_size))


def smallest_stable_batch(total_rate_per_s: float, service_s: float) -> int:
    """Return the smallest b that meets the sufficient condition of stability, if μ_C does not depend on b.

    >>> smallest_stable_batch(8000, 0.030)
    241
    """
    checks.positive(total_rate_per_s=total_rate_per_s)
    checks.non_negative(service_s=service_s)
    return max(1, math.floor(service_s * total_rate_per_s * (1 + 1e-12)) + 1)
