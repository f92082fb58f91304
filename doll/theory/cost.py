"""The expected cost and time of a mix of spot and on-demand workers.

A worker on-demand is billed until the job ends, one on spot only while it is up. `samples` is the whole work, J K b:
updates times batches per update times samples per batch.

Source: the DOLL paper, Eq. (19)-(22). The corrections are listed in docs/theory.md. The formulas of equal streams, (15)
and (16), are in `benchmarks/paper/formulas.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from doll.theory import checks
from doll.theory.checks import Floats

SECONDS_PER_HOUR = 3600.0
# Floats that stand for whole numbers: (64 - 60.95) / 0.1 must not lose a worker to rounding.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Prices:
    """Price of one running worker in each market, USD per hour (π_s and π_o)."""

    spot_usd_per_h: float
    on_demand_usd_per_h: float

    def __post_init__(self) -> None:
        checks.non_negative(spot_usd_per_h=self.spot_usd_per_h)
        checks.positive(on_demand_usd_per_h=self.on_demand_usd_per_h)

    def times(self, machines: float) -> Prices:
        """The prices of `machines` machines together, each at these prices."""
        return Prices(self.spot_usd_per_h * machines, self.on_demand_usd_per_h * machines)

    @property
    def spot_is_cheaper(self) -> bool:
        return self.spot_usd_per_h < self.on_demand_usd_per_h


def work_samples(updates: float, group_size: int, batch_size: float) -> float:
    """J K b: the samples that `updates` updates consume.

    >>> work_samples(10_000, group_size=20, batch_size=256)
    51200000.0
    """
    checks.non_negative(updates=updates)
    checks.positive(group_size=group_size, batch_size=batch_size)
    return float(updates) * group_size * batch_size


@dataclass(frozen=True)
class CostRatio:
    """Corollary 2: cost over the all-on-demand cost, for the best real and the best whole number of spot workers.

    Attributes:
        num_spot_real: n_c, the optimum when a fraction of a worker may be on spot.
        lower: cost ratio at n_c, exactly; no whole number of spot workers that meets the deadline is cheaper.
        upper: cost ratio at n_c - 1: the best whole number costs no more than this.
    """

    num_spot_real: float
    lower: float
    upper: float


def cost_ratio(deadline_ratio: float, num_workers: int, alpha: float, prices: Prices) -> CostRatio:
    """Corollary 2, two-sided: what the best mix costs, as a fraction of all on-demand.

    Args:
        deadline_ratio: r = θ / θ_0, at least 1.
        num_workers: N.
        alpha: availability, in [0, 1].
        prices: both prices; spot the cheaper one (else the ratio is 1: all on-demand).

    Source: the DOLL paper, Corollary 2, Eq. (19). Differs from the paper: (19) is a lower bound on cost, so an upper
    bound on savings; the upper bound on cost is added. The maximum with π_s/π_o covers r >= 1/α.

    Raises:
        ValueError: the deadline is below θ_0 (a deadline that cannot be met has no ratio), or a number out of range.

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
    # At alpha = 0 and N_s = N nobody ever works; the real optimum stops short of it because the deadline is finite.
    all_spot = alpha * ratio >= 1
    lower = pi_s / pi_o if all_spot else ratio + (alpha * pi_s - pi_o) * (ratio - 1) / (pi_o * (1 - alpha))
    return CostRatio(real, lower, _ratio_at(max(real - 1, 0.0), num_workers, alpha, prices))


def unequal_cost_usd(samples: float, rates_per_s: npt.ArrayLike, alpha: float, prices: Prices) -> Floats:
    """(22): expected cost in USD with the n slowest streams on spot, for every n = 0 .. N; infinite if nobody works.

    Args:
        samples: J K b.
        rates_per_s: λ_n, one per worker, in any order.
        alpha: availability, in [0, 1].

    Returns:
        float64, shape (N + 1,).

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
    """(22) for one sample, in USD per 3600 samples: price per hour over effective rate, n = 0 .. N; infinite if
    nobody works.

    Args:
        effective_per_s: of `effective_of_sorted`, shape (N + 1,).
    """
    count = len(effective_per_s) - 1
    slope = alpha * prices.spot_usd_per_h - prices.on_demand_usd_per_h
    usd_per_h = count * prices.on_demand_usd_per_h + slope * np.arange(count + 1)
    # alpha = 0 leaves rounding noise in place of 0.
    works = effective_per_s > TOLERANCE * effective_per_s[0]
    relative: Floats = np.divide(usd_per_h, effective_per_s, out=np.full(count + 1, math.inf), where=works)
    return relative


def effective_of_sorted(ascending_per_s: Floats, alpha: float) -> Floats:
    """(20) times K b: S - (1 - α) Λ(n), samples per second with the n slowest streams on spot, n = 0 .. N.

    Args:
        ascending_per_s: λ_n in ascending order, shape (N,).

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
