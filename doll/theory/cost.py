"""The expected cost and run time of a mix of spot and on-demand workers.

An on-demand worker is billed until the job ends. A spot worker is billed only while it is up. `samples` is the total
work, J K b: updates times batches per update times samples per batch.

Source: the DOLL paper, Eq. (19)-(22). The corrections are listed in docs/theory.md. The formulas for equal streams,
(15) and (16), are in `benchmarks/paper/formulas.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from doll.theory import checks
from doll.theory.checks import Floats

SECONDS_PER_HOUR = 3600.0
# Tolerance for floats that represent integers: rounding in (64 - 60.95) / 0.1 must not cost a worker.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Prices:
    """The price of one running worker in each market, USD per hour (π_s and π_o)."""

    spot_usd_per_h: float
    on_demand_usd_per_h: float

    def __post_init__(self) -> None:
        checks.non_negative(spot_usd_per_h=self.spot_usd_per_h)
        checks.positive(on_demand_usd_per_h=self.on_demand_usd_per_h)

    def times(self, machines: float) -> Prices:
        """Return the total prices of `machines` machines, each with these prices."""
        return Prices(self.spot_usd_per_h * machines, self.on_demand_usd_per_h * machines)

    @property
    def spot_is_cheaper(self) -> bool:
        return self.spot_usd_per_h < self.on_demand_usd_per_h


def work_samples(updates: float, group_size: int, batch_size: float) -> float:
    """Return J K b, the number of samples that `updates` updates use.

    >>> work_samples(10_000, group_size=20, batch_size=256)
    51200000.0
    """
    checks.non_negative(updates=updates)
    checks.positive(group_size=group_size, batch_size=batch_size)
    return float(updates) * group_size * batch_size


@dataclass(frozen=True)
class CostRatio:
    """The cost of the best mix divided by the cost of all workers on-demand (Corollary 2).

    Attributes:
        num_spot_real: n_c, the optimal number of spot workers if it need not be an integer.
        lower: exact cost ratio at n_c. No integer number of spot workers that meets the deadline is cheaper.
        upper: cost ratio at n_c - 1. The best integer number of spot workers costs at most this ratio.
    """

    num_spot_real: float
    lower: float
    upper: float


def cost_ratio(deadline_ratio: float, num_workers: int, alpha: float, prices: Prices) -> CostRatio:
    """Return bounds on the cost of the best mix as a fraction of the all-on-demand cost (Corollary 2, two-sided).

    Args:
        deadline_ratio: r = θ / θ_0, at least 1.
        num_workers: N, the number of workers.
        alpha: availability of spot, in [0, 1].
        prices: prices of both markets. If spot is not cheaper, the ratio is 1 (all workers on-demand).

    Source: the DOLL paper, Corollary 2, Eq. (19). Differs from the paper: (19) is a lower bound on the cost, that is,
    an upper bound on the savings. The upper bound on the cost is added here. The maximum with π_s/π_o covers r >= 1/α.

    Raises:
        ValueError: the deadline is below θ_0 (no mix meets it, so there is no ratio), or a number is out of range.

    >>> ratio = cost_ratio(1.05, 64, 0.9, Prices(0.158, 0.286))
    >>> round(ratio.num_spot_real, 3), round(ratio.lower, 4)
    (30.476, 0.7986)
    """
    checks.positive(num_workers=num_workers)
    checks.fraction(alpha=alpha)
    if not deadline_ratio >= 1 - 1e-12:
        raise ValueError(f"deadline_ratio: expected θ/θ_0 of at least 1, got {deadline_ratio}")
    ratio, pi_s, pi_o = max(deadline_ratio, 1.0), prices.spot_usd_per_h, prices.on_demand_usd_per_h
    if pi_s >= pi_o:
        return CostRatio(0.0, 1.0, 1.0)
    spare = num_workers - num_workers / ratio
    real = num_workers if alpha >= 1 else min(spare / (1 - alpha), float(num_workers))
    # At alpha = 0 and N_s = N no worker is ever up. The real optimum is below N, because the deadline is finite.
    all_spot = alpha * ratio >= 1
    lower = pi_s / pi_o if all_spot else ratio + (alpha * pi_s - pi_o) * (ratio - 1) / (pi_o * (1 - alpha))
    return CostRatio(real, lower, _ratio_at(max(real - 1, 0.0), num_workers, alpha, prices))


def unequal_cost_usd(samples: float, rates_per_s: npt.ArrayLike, alpha: float, prices: Prices) -> Floats:
    """Return the expected cost in USD, Eq. (22), with the n slowest streams on spot, for each n = 0 .. N.

    Args:
        samples: J K b, the total work.
        rates_per_s: λ_n, arrival rate of each worker's stream in samples per second, in any order.
        alpha: availability of spot, in [0, 1].

    Returns:
        Costs as float64, shape (N + 1,). A cost is infinite if no worker is ever up.

    Source: the DOLL paper, Eq. (22), with prices per hour.

    >>> [round(float(c), 4) for c in unequal_cost_usd(3600, [1.0, 1.0], 0.5, Prices(1, 2))]
    [2.0, 1.6667, 1.0]
    """
    checks.non_negative(samples=samples)
    checks.fraction(alpha=alpha)
    effective = effective_of_sorted(np.sort(checks.rates(rates_per_s)), alpha)
    hours = samples / SECONDS_PER_HOUR
    return hours * relative_cost(effective, alpha, prices) if samples else np.zeros(len(effective))


def relative_cost(effective_per_s: Floats, alpha: float, prices: Prices) -> Floats:
    """Return the cost of one sample, Eq. (22), in USD per 3600 samples, for each n = 0 .. N: the price per hour divided
    by the effective rate. The cost is infinite if no worker is ever up.

    Args:
        effective_per_s: effective rates from `effective_of_sorted`, samples per second, shape (N + 1,).
    """
    count = len(effective_per_s) - 1
    slope = alpha * prices.spot_usd_per_h - prices.on_demand_usd_per_h
    usd_per_h = count * prices.on_demand_usd_per_h + slope * np.arange(count + 1)
    # With alpha = 0, rounding noise can remain instead of 0.
    works = effective_per_s > TOLERANCE * effective_per_s[0]
    relative: Floats = np.divide(usd_per_h, effective_per_s, out=np.full(count + 1, math.inf), where=works)
    return relative


def effective_of_sorted(ascending_per_s: Floats, alpha: float) -> Floats:
    """Return S - (1 - α) Λ(n), the effective samples per second with the n slowest streams on spot, for each n = 0 ..
    N. This is Eq. (20) times K b.

    Args:
        ascending_per_s: λ_n in ascending order, samples per second, shape (N,).

    Source: the DOLL paper, Eq. (20).

    >>> [float(r) for r in effective_of_sorted(np.array([1.0, 3.0]), alpha=0.5)]
    [4.0, 3.5, 2.0]
    """
    slowest = np.concatenate(([0.0], np.cumsum(ascending_per_s)))
    effective: Floats = np.maximum(slowest[-1] - (1 - alpha) * slowest, 0.0)
    return effective


def _ratio_at(spot: float, num_workers: int, alpha: float, prices: Prices) -> float:
    effective = num_workers - (1 - alpha) * spot
    if effective <= 0:
        return math.inf
    slope = alpha * prices.spot_usd_per_h - prices.on_demand_usd_per_h
    return (num_workers * prices.on_demand_usd_per_h + slope * spot) / (effective * prices.on_demand_usd_per_h)
