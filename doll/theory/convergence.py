"""How the error falls with updates and with time, and how many updates an error target takes.

Convex theory: G is L-smooth and c-strongly convex, B bounds the variance of one sample's gradient, and the step is on
the *mean* gradient of the K b samples of a group with 0 < η <= 1/L.

Source: the DOLL paper, Eq. (9)-(13). Corrections: docs/theory.md, D2 and D7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from doll.errors import InfeasiblePlanError
from doll.theory import checks
from doll.theory.checks import Floats


@dataclass(frozen=True)
class Decay:
    """The bound of Eq. (10): error after J updates at most β ρ^J + γ.

    Attributes:
        rho: ρ = 1 - η c, in (0, 1).
        beta: β = G(w_0) - G* - γ; at least 0 for a run that improves.
        gamma: γ, the floor that the gradient noise leaves.
    """

    rho: float
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        if not 0 < self.rho < 1:
            raise ValueError(f"rho: expected a number in (0, 1), got {self.rho}")
        checks.non_negative(gamma=self.gamma)

    def error(self, updates: npt.ArrayLike) -> Floats:
        """β ρ^J + γ, of the shape of `updates`."""
        return np.asarray(self.beta * np.power(self.rho, np.asarray(updates, dtype=np.float64)) + self.gamma)

    def updates_to(self, target: float) -> int:
        """J(ε) = ⌈ln((ε - γ)/β) / ln ρ⌉: the fewest updates whose bound is at most ε.

        Raises:
            InfeasiblePlanError: ε <= γ, constraint "error"; nearest: the error that the floor allows.

        >>> Decay(rho=0.5, beta=1.0, gamma=0.0).updates_to(0.25)
        2
        """
        checks.positive(target=target)
        if target >= self.beta + self.gamma:
            return 0
        if target <= self.gamma:
            raise InfeasiblePlanError(
                f"the error target binds: {target:g} is at or below the noise floor {self.gamma:g}, which no number of "
                f"updates passes. Feasible: a target above {self.gamma:g}; or lower the floor: it is proportional to "
                f"the step size and to 1/(K b)",
                constraint="error",
                nearest={"target_error": self.gamma, "samples_per_update_factor": self.gamma / target},
            )
        exact = math.log((target - self.gamma) / self.beta) / math.log(self.rho)
        return max(0, math.ceil(exact - 1e-9))


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


def error_after_s(time_s: float, curve: Decay, rate_per_s: float) -> float:
    """(9): β e^(-r t) + γ.

    >>> error_after_s(0.0, Decay(0.9, 1.0, 0.5), 0.1)
    1.5
    """
    checks.non_negative(time_s=time_s, rate_per_s=rate_per_s)
    return curve.beta * math.exp(-rate_per_s * time_s) + curve.gamma


def non_convex_step_size(scale: float, updates: int) -> float:
    """(12)-(13): η = c / √J, for a number of updates that is fixed in advance.

    With it min_j E‖∇G(w_j)‖² = O(1/√J). The paper gives no constants, so J(ε) of a non-convex problem is measured:
    `doll calibrate`.

    >>> non_convex_step_size(1.0, 100)
    0.1
    """
    checks.positive(scale=scale, updates=updates)
    return scale / math.sqrt(updates)


def non_convex_updates(gradient_bound: float, updates: int, target: float) -> int:
    """Updates for a target on min E‖∇G‖², scaled from a pilot: J · (bound / target)², by the O(1/√J) law.

    >>> non_convex_updates(0.2, 100, 0.1)
    400
    """
    checks.positive(gradient_bound=gradient_bound, updates=updates, target=target)
    return math.ceil(updates * (gradient_bound / target) ** 2 - 1e-9)
