"""What a mix of spot and on-demand workers costs and how long it takes, in expectation.

A worker on-demand is billed until the job ends, one on spot only while it is up. `samples` is the whole work, J K b:
updates times batches per update times samples per batch. `num_spot` may be one number or an array everywhere.

Source: the DOLL paper, Eq. (5)-(6), (15)-(17), (19)-(22). The corrections are listed in docs/theory.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from doll.theory import checks
from doll.theory.checks import Floats

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Prices:
    """Price of one running worker in each market, USD per hour (π_s and π_o)."""

    spot_usd_per_h: float
    on_demand_usd_per_h: float

    def __post_init__(self) -> None:
        checks.non_negative(spot_usd_per_h=self.spot_usd_per_h)
        checks.positive(on_demand_usd_per_h=self.on_demand_usd_per_h)

    def times(self, machines: float) -> Prices:
        """Of so many together, each at these prices."""
        return Prices(self.spot_usd_per_h * machines, self.on_demand_usd_per_h * machines)

    @property
    def spot_is_cheaper(self) -> bool:
        return self.spot_usd_per_h < self.on_demand_usd_per_h


def work_samples(updates: float, group_size: int, batch_size: int) -> float:
    """J K b: the samples that `updates` updates consume.

    >>> work_samples(10_000, group_size=20, batch_size=256)
    51200000.0
    """
    checks.non_negative(updates=updates)
    checks.positive(group_size=group_size, batch_size=batch_size)
    return float(updates) * group_size * batch_size


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
    spot = _spot(num_spot, num_workers)
    checks.fraction(alpha=alpha)
    checks.non_negative(samples=samples)
    checks.positive(rate_per_s=rate_per_s)
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
    spot = _spot(num_spot, num_workers)
    time_h = runtime_s(spot, samples, rate_per_s, num_workers, alpha) / SECONDS_PER_HOUR
    return _times(time_h, _burn_usd_per_h(spot, num_workers, alpha, prices))


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
    return _divide(samples, effective_rates_per_s(rates_per_s, alpha))


def unequal_cost_usd(samples: float, rates_per_s: npt.ArrayLike, alpha: float, prices: Prices) -> Floats:
    """(22): expected cost in USD with the n slowest streams on spot, for every n = 0 .. N.

    Arguments and shape as in `unequal_runtime_s`.

    Source: the DOLL paper, Eq. (22), with prices per hour.

    >>> [round(float(c), 4) for c in unequal_cost_usd(3600, [1.0, 1.0], 0.5, Prices(1, 2))]
    [2.0, 1.6667, 1.0]
    """
    time_h = unequal_runtime_s(samples, rates_per_s, alpha) / SECONDS_PER_HOUR
    count = len(time_h) - 1
    return _times(time_h, _burn_usd_per_h(np.arange(count + 1, dtype=np.float64), count, alpha, prices))


def effective_rates_per_s(rates_per_s: npt.ArrayLike, alpha: float) -> Floats:
    """(20) times K b: S - (1 - α) Λ(n), samples per second with the n slowest streams on spot, n = 0 .. N.

    Source: the DOLL paper, Eq. (20).

    >>> [float(r) for r in effective_rates_per_s([3, 1], alpha=0.5)]
    [4.0, 3.5, 2.0]
    """
    checks.fraction(alpha=alpha)
    return effective_of_sorted(np.sort(checks.rates(rates_per_s)), alpha)


def effective_of_sorted(ascending_per_s: Floats, alpha: float) -> Floats:
    """As `effective_rates_per_s`, of rates that are checked and in ascending order."""
    slowest = np.concatenate(([0.0], np.cumsum(ascending_per_s)))
    effective: Floats = np.maximum(slowest[-1] - (1 - alpha) * slowest, 0.0)
    return effective


def _spot(num_spot: npt.ArrayLike, num_workers: int) -> Floats:
    checks.positive(num_workers=num_workers)
    spot = np.asarray(num_spot, dtype=np.float64)
    if spot.size and not (spot.min() >= 0 and spot.max() <= num_workers):
        raise ValueError(f"num_spot: expected 0 .. {num_workers}, got {spot.tolist()}")
    return spot


def _burn_usd_per_h(spot: Floats, num_workers: int, alpha: float, prices: Prices) -> Floats:
    return (
        num_workers * prices.on_demand_usd_per_h + (alpha * prices.spot_usd_per_h - prices.on_demand_usd_per_h) * spot
    )


def _divide(top: float, below: Floats) -> Floats:
    """top / below, infinite where below is 0 (and top is not)."""
    out = np.full(np.shape(below), math.inf if top > 0 else (-math.inf if top < 0 else 0.0))
    quotient: Floats = np.divide(top, below, out=out, where=np.asarray(below) > 0)
    return quotient


def _times(time_h: Floats, burn_usd_per_h: Floats) -> Floats:
    # An endless job is infinitely dear even where its burn rate is 0 (all spot, never up).
    return np.where(np.isinf(time_h), math.inf, np.where(np.isinf(time_h), 0.0, time_h) * burn_usd_per_h)


def _ratio_at(spot: float, num_workers: int, alpha: float, prices: Prices) -> float:
    effective = num_workers - (1 - alpha) * spot
    if effective <= 0:
        return math.inf
    burn = (
        num_workers * prices.on_demand_usd_per_h + (alpha * prices.spot_usd_per_h - prices.on_demand_usd_per_h) * spot
    )
    return burn / (effective * prices.on_demand_usd_per_h)
