"""J(ε) from the error curve of a run: a fit of β ρ^J + γ, the form of Eq. (10), with bootstrap intervals.

The form holds for strongly convex problems. For other problems, the form and its extrapolation are only empirical. The
fit minimises the relative error, because the target is usually at the low end of the curve. If a single exponential
does not fit the whole curve (networks learn fast at first and slowly later), `fit_tail` leaves out the start.
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
    """The bound of Eq. (10): the error after J updates is at most β ρ^J + γ.

    Attributes:
        rho: ρ = 1 - η c, in (0, 1).
        beta: β = G(w_0) - G* - γ; at least 0 for a run that improves.
        gamma: γ, the error floor that is due to the gradient noise.
    """

    rho: float
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        if not 0 < self.rho < 1:
            raise ValueError(f"rho: expected a number in (0, 1), got {self.rho}")
        checks.non_negative(gamma=self.gamma)

    def error(self, updates: npt.ArrayLike) -> Floats:
        """Return β ρ^J + γ for each J in `updates`, in the same shape."""
        return np.asarray(self.beta * np.power(self.rho, np.asarray(updates, dtype=np.float64)) + self.gamma)

    def updates_to(self, target: float) -> int:
        """Return J(ε) = ⌈ln((ε - γ)/β) / ln ρ⌉, the smallest number of updates for which the bound is at most ε.

        Raises:
            InfeasiblePlanError: ε <= γ. The constraint is "error"; `nearest` contains the error floor.

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


_GRID = 60


@dataclass(frozen=True)
class FitInterval:
    """An estimated value with the bounds of its interval. A bound is infinite if there is none."""

    point: float
    low: float
    high: float


@dataclass(frozen=True)
class CurveFit:
    """The form of Eq. (10), fitted to a measured curve.

    Attributes:
        curve: the fitted decay.
        rho, beta, gamma: the constants of the curve with 90 % bootstrap intervals.
        relative_rmse: root mean square of (fit - measured) / measured.
        num_points: number of evaluations that were used.
        first_update, last_update: J of the first and the last of these evaluations. The curve after the last one is
            extrapolated.
        replicas: rho, beta and gamma of the bootstrap replicas, shape (replicas, 3).
    """

    curve: Decay
    rho: FitInterval
    beta: FitInterval
    gamma: FitInterval
    relative_rmse: float
    num_points: int
    first_update: float
    last_update: float
    replicas: Floats

    def updates_to(self, target: float, *, reached: bool = False) -> FitInterval:
        """Return J(ε) with its 90 % interval. The upper end is infinite if more than about 5 % of the replicas have a
        floor above the target.

        Args:
            reached: whether the run has reached the target. If True, replicas with a floor above the target must be
                wrong, and are ignored.

        Raises:
            InfeasiblePlanError: the fitted floor is at or above the target (constraint "error").
        """
        point = self.curve.updates_to(target)
        estimates = []
        for rho, beta, gamma in self.replicas.tolist():
            try:
                estimates.append(float(Decay(rho, beta, gamma).updates_to(target)))
            except InfeasiblePlanError:
                if not reached:
                    estimates.append(math.inf)
        low, high = np.quantile(estimates, [0.05, 0.95], method="nearest") if estimates else (math.nan, math.nan)
        return FitInterval(point, float(low), float(high))


def fit_decay(
    updates: npt.ArrayLike, errors: npt.ArrayLike, rng: np.random.Generator, *, replicas: int = 200
) -> CurveFit:
    """Fit β ρ^J + γ with β, γ >= 0 to measured errors.

    The intervals come from a moving-block bootstrap of the relative residuals, because the residuals of neighbouring
    evaluations are not independent (the weights are similar). The block length is the cube root of m.

    Args:
        updates: J of each evaluation, ascending, shape (m,), m >= 6.
        errors: measured error of each evaluation, above 0, shape (m,).

    Raises:
        ValueError: there are too few points, an error is not above 0, or all evaluations are at the same update.

    >>> j = np.arange(0, 300, 10)
    >>> fit = fit_decay(j, 2.0 * 0.98**j + 0.1, np.random.default_rng(0), replicas=20)
    >>> round(fit.curve.rho, 4), round(fit.curve.gamma, 3), fit.updates_to(0.2).point
    (0.98, 0.1, 149)
    """
    at = np.asarray(updates, dtype=np.float64)
    measured = np.asarray(errors, dtype=np.float64)
    if at.ndim != 1 or at.shape != measured.shape or len(at) < 6:
        raise ValueError(f"expected at least 6 pairs of updates and errors, got {at.shape} and {measured.shape}")
    if not (np.all(np.isfinite(measured)) and np.all(measured > 0) and np.all(np.diff(at) >= 0) and at[-1] > at[0]):
        raise ValueError("expected finite errors above 0 at ascending updates")
    checks.positive(replicas=replicas)
    # Weighing by the measured errors favours errors that noise made small; the fitted curve has no such noise.
    rough = Decay(*_fit(at, 1 / measured**2, measured[np.newaxis, :])[0].tolist())
    weights = 1 / np.maximum(rough.error(at), 1e-3 * measured) ** 2
    rho, beta, gamma = _fit(at, weights, measured[np.newaxis, :])[0].tolist()
    best = Decay(rho, beta, gamma)
    relative = measured / best.error(at) - 1
    # Three constants were fitted to these residuals, which makes them smaller than the noise.
    noise = (relative - relative.mean()) * math.sqrt(len(at) / (len(at) - 3))
    length = max(1, round(len(at) ** (1 / 3)))
    starts = rng.integers(0, len(at) - length + 1, size=(replicas, math.ceil(len(at) / length)))
    index = (starts[:, :, np.newaxis] + np.arange(length)).reshape(replicas, -1)[:, : len(at)]
    resampled = best.error(at) * (1 + noise[index])
    fits = _fit(at, weights, np.maximum(resampled, 1e-12))
    low, high = np.quantile(fits, [0.05, 0.95], axis=0)
    bounds = [FitInterval(point, float(low[n]), float(high[n])) for n, point in enumerate((rho, beta, gamma))]
    return CurveFit(
        curve=best,
        rho=bounds[0],
        beta=bounds[1],
        gamma=bounds[2],
        relative_rmse=float(np.sqrt(np.mean(relative**2))),
        num_points=len(at),
        first_update=float(at[0]),
        last_update=float(at[-1]),
        replicas=fits,
    )


def fit_tail(
    updates: npt.ArrayLike, errors: npt.ArrayLike, rng: np.random.Generator, *, replicas: int = 200
) -> CurveFit:
    """Fit as `fit_decay` does, but leave out the start of the run if necessary.

    Tries the starts J = 0, a quarter of the run and half of the run, in this order, until a fit follows the end of the
    run; otherwise returns the last of these fits. A fit follows the end if the logarithm of measured / fitted has no
    trend over the last half of the run. A falling trend means that the run still improves although the fit does not.

    Raises:
        ValueError: see `fit_decay`.
    """
    at, measured = np.asarray(updates, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    fit = fit_decay(at, measured, rng, replicas=replicas)
    span = at[-1] - at[0]
    for part in (0.25, 0.5):
        end = at >= at[0] + 0.5 * span
        kept = at >= at[0] + part * span
        if np.count_nonzero(kept) < 12 or not _still_falls(at[end], np.log(measured[end] / fit.curve.error(at[end]))):
            break
        fit = fit_decay(at[kept], measured[kept], rng, replicas=replicas)
    return fit


def first_crossing(updates: npt.ArrayLike, errors: npt.ArrayLike, target: float, window: int = 3) -> float | None:
    """Return the first J at which the running median of `window` evaluations reaches the target; None if it never does.

    >>> first_crossing([0, 10, 20, 30, 40, 50], [9, 1, 8, 2, 1, 1], target=2.0)
    30.0
    """
    at, measured = np.asarray(updates, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    if len(at) < window:
        return None
    medians = np.median(np.lib.stride_tricks.sliding_window_view(measured, window), axis=1)
    reached = np.flatnonzero(medians <= target)
    return float(at[reached[0] + window - 1]) if reached.size else None


def _still_falls(at: Floats, residuals: Floats) -> bool:
    """Return whether the trend of the residuals over `at` is below 0 by more than two standard errors."""
    centred = at - at.mean()
    spread = float(centred @ centred)
    if len(at) < 6 or spread == 0:
        return False
    slope = float(centred @ residuals) / spread
    noise = residuals - residuals.mean() - slope * centred
    return slope < -2 * math.sqrt(float(noise @ noise) / (len(at) - 2) / spread)


def _fit(at: Floats, weights: Floats, curves: Floats) -> Floats:
    """Return the best (ρ, β, γ) of each row of `curves`, shape (rows, 3). Search ρ, and fit β and γ by linear least
    squares."""
    span = at[-1] - at[0]
    # The range of |ln ρ|: from a curve that hardly falls in the run to one that is down after a hundredth of the run.
    pulls = np.geomspace(0.05 / span, 300.0 / span, _GRID)
    loss, _, _ = _linear(at, weights, curves, pulls)
    best = np.argmin(loss, axis=0)
    rows = np.arange(len(curves))
    # Two finer grids around the best point give four digits of ρ, so a golden-section search is not worthwhile.
    centre = pulls[best]
    step = pulls[1] / pulls[0]
    out = np.empty((len(curves), 3))
    for row in rows:
        middle, ratio = centre[row], step
        for _ in range(3):
            finer = middle * np.geomspace(1 / ratio, ratio, 21)
            row_loss, row_beta, row_gamma = _linear(at, weights, curves[row : row + 1], finer)
            at_best = int(np.argmin(row_loss[:, 0]))
            middle, ratio = finer[at_best], ratio ** (1 / 8)
            out[row] = math.exp(-middle), row_beta[at_best, 0], row_gamma[at_best, 0]
    return out


def _linear(at: Floats, weights: Floats, curves: Floats, pulls: Floats) -> tuple[Floats, Floats, Floats]:
    """Fit the curves on (ρ^J, 1) by weighted non-negative least squares. Each result has the shape (pulls, rows)."""
    basis = np.exp(-np.outer(pulls, at))
    w1, wb, wbb = weights.sum(), basis @ weights, (basis**2) @ weights
    wy = curves @ weights
    wby = (basis * weights) @ curves.T
    wyy = (curves**2) @ weights
    determinant = np.maximum(wbb * w1 - wb**2, 1e-300)[:, np.newaxis]
    beta = (wby * w1 - wb[:, np.newaxis] * wy) / determinant
    gamma = (wbb[:, np.newaxis] * wy - wb[:, np.newaxis] * wby) / determinant
    # If one constant is 0, the other one is the optimum for one parameter.
    beta_alone = wby / wbb[:, np.newaxis]
    beta, gamma = np.where(gamma < 0, beta_alone, beta), np.maximum(gamma, 0.0)
    gamma = np.where(beta < 0, wy / w1, gamma)
    beta = np.maximum(beta, 0.0)
    squares = wyy + beta**2 * wbb[:, np.newaxis] + gamma**2 * w1
    loss = squares - 2 * beta * wby - 2 * gamma * wy + 2 * beta * gamma * wb[:, np.newaxis]
    return loss, beta, gamma
