"""MLLess's scale-in tuner: smoothing, the knee of a loss curve, the two curve fits, step times, and the score s.

A *step* is one model update. Losses are above 0. Steps are numbered from 1. Only the fits import scipy.

Source: MLLess (Middleware 2021, and its journal version of 2023), "Scale-in auto-tuner", Eq. (1)-(3). Differs from the
paper: the sign of the score, see `relative_excess`; the slope at the knee is relative, see `knee`; the model of step
times has two coefficients, see `StepTimes`. docs/theory.md lists the reasons.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from doll.extras import lacking
from doll.theory import checks
from doll.theory.checks import Floats

SPAN: Final = 20
"""The span of the exponential averages that are used to find the knee, in points."""
FIT_SPAN: Final = 5
"""The span of the exponential average before each fit, in points. It is turned off in MLLess's public code."""
MIN_POINTS: Final = 8
"""The minimum number of points for a fit of a curve with four constants."""
_MAX_EXPONENT: Final = 16.0  # of the reference curve; a larger one overflows in t**exponent, and no loss falls so fast
_MAX_EVALUATIONS: Final = 1_000  # a fit of a hundred points of a curve takes about 15; of noise, some hundreds
_PRECISION: Final = 1e-7  # of the fit, relative
_NEGLIGIBLE: Final = 1e-17


def ewma(values: npt.ArrayLike, span: float) -> Floats:
    """Return the exponential average of the values up to each point, corrected for the short start; shape (n,).

    Args:
        values: the values, shape (n,).
        span: 2 / α - 1, above 1, where α is the weight of the newest value. 0: return the values unchanged.

    Source: MLLess, "Scale-in auto-tuner": losses are averaged in this way before each fit.

    >>> [round(float(value), 3) for value in ewma([0, 0, 3, 0, 0], span=3)]
    [0.0, 0.0, 1.714, 0.8, 0.387]
    """
    checks.non_negative(span=span)
    series = np.asarray(values, dtype=np.float64)
    return _average_so_far(series, 1 - 2 / (span + 1)) if span > 1 else series


def ewma_both_ways(values: npt.ArrayLike, span: float = SPAN) -> Floats:
    """Return the mean of the forward and backward exponential averages, corrected for their short start; shape (n,).

    Args:
        values: the values, shape (n,).
        span: 2 / α - 1, where α is the weight of the newest value.

    Source: MLLess's public code (two-sided, span 20).

    >>> [round(float(value), 3) for value in ewma_both_ways([0, 0, 3, 0, 0], span=3)]
    [0.194, 0.4, 1.714, 0.4, 0.194]
    """
    checks.positive(span=span)
    series = np.asarray(values, dtype=np.float64)
    keep = 1 - 2 / (span + 1)
    backward = _average_so_far(series[::-1], keep)[::-1]
    mean: Floats = 0.5 * (_average_so_far(series, keep) + backward)
    return mean


def _average_so_far(series: Floats, keep: float) -> Floats:
    """Return Σ keep^i y_(t-i) / Σ keep^i for each t. Weights below the precision of a float are left out."""
    if not series.size:
        return series.copy()
    lags = len(series)
    if 0 < keep < 1:
        lags = min(lags, math.ceil(math.log(_NEGLIGIBLE) / math.log(keep)))
    kernel = keep ** np.arange(lags, dtype=np.float64)
    weights = np.cumsum(np.pad(kernel, (0, len(series) - lags)))
    average: Floats = np.convolve(series, kernel)[: len(series)] / weights
    return average


def knee(steps: npt.ArrayLike, losses: npt.ArrayLike, slope: float, span: float = SPAN) -> float | None:
    """Return the step after which the smoothed loss falls by less than `slope` per step; None if it still falls faster.

    Differs from the paper: the slope in the paper is absolute, in loss per step, so the threshold depends on the unit
    of the loss. Here the slope is divided by the smoothed loss. The search begins at the steepest fall, so that it does
    not find a flat start of the curve instead of the knee.

    Args:
        steps: step numbers, ascending, shape (n,).
        losses: losses, above 0, shape (n,).
        slope: τ < 0, relative change of the loss per step.
        span: span of `ewma_both_ways`, both for the losses and for their slopes.

    Raises:
        ValueError: `slope` is not below 0.

    Source: MLLess, "the knee": a threshold on the first derivative of the smoothed curve.

    >>> steps = np.arange(1, 401)
    >>> knee(steps, 0.5 + np.exp(-steps / 50), slope=-1e-3) is not None
    True
    >>> knee(steps, 0.5 + np.exp(-steps / 5000), slope=-1e-5) is None
    True
    """
    if not slope < 0:
        raise ValueError(f"slope: expected a number below 0 (the loss falls), got {slope}")
    at, values = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    if len(at) < 3:
        return None
    smooth = ewma_both_ways(values, span)
    if not smooth.min() > 0:
        return None
    per_step = np.diff(smooth) / np.diff(at)
    # The steepest fall is that of the absolute slope, because noise at a low loss makes the steepest relative slopes.
    steepest = int(np.argmin(ewma_both_ways(per_step, span)))
    slopes = ewma_both_ways(per_step / smooth[1:], span)
    if slopes[steepest] > slope:
        return None
    flat = np.flatnonzero(slopes[steepest:] > slope)
    return float(at[steepest + flat[0] + 1]) if flat.size else None


@dataclass(frozen=True)
class ReferenceCurve:
    """The curve of Eq. (2), L(t) = 1 / (θ0 * t^θ1 + θ2) + θ3: the loss after t steps with all workers."""

    theta: tuple[float, float, float, float]

    def loss(self, step: float) -> float:
        """Return L(step), for a step above 0.

        >>> round(ReferenceCurve((0.05, 1.58, 0.58, 0.49)).loss(100.0), 4)
        0.5037
        """
        t0, t1, t2, t3 = self.theta
        return _inverse(t0 * step**t1 + t2) + t3


@dataclass(frozen=True)
class SlowCurve:
    """The curve of Eq. (3), l(t) = 1 / (θ0 * t² + θ1 * t + θ2) + θ3: the loss t steps after the last removal."""

    theta: tuple[float, float, float, float]

    def loss(self, step: float) -> float:
        """Return l(step)."""
        t0, t1, t2, t3 = self.theta
        return _inverse(t0 * step * step + t1 * step + t2) + t3


Curve = ReferenceCurve | SlowCurve


def _inverse(value: float) -> float:
    return 1 / value if value > 0 else math.inf


def fit_reference(steps: npt.ArrayLike, losses: npt.ArrayLike) -> ReferenceCurve | None:
    """Return the best curve of Eq. (2) whose constants θ0 to θ3 (see `ReferenceCurve`) are all >= 0; None if no fit is
    possible. Later points have more weight (σ_k = 1/k for the k-th point).

    Args:
        steps: step numbers, above 0, ascending, shape (n,).
        losses: losses, above 0, shape (n,).

    Source: MLLess, Eq. (2); bounded least squares as in MLLess's public code.
    """
    at = np.asarray(steps, dtype=np.float64)
    fitted = _fit(
        lambda x, a, exponent, c, floor: 1 / (a * x**exponent + c) + floor, at, losses, lambda rise: (rise, 1.0),
        upper=(np.inf, _MAX_EXPONENT, np.inf, np.inf), sigma=1 / np.arange(1, len(at) + 1, dtype=np.float64),
    )  # fmt: skip
    if fitted is None:
        return None
    (a, exponent, c, floor), at_scale, scale = fitted
    return ReferenceCurve((a / (scale * at_scale**exponent), exponent, c / scale, floor * scale))


def fit_slow(steps: npt.ArrayLike, losses: npt.ArrayLike) -> SlowCurve | None:
    """Return the best curve of Eq. (3) whose constants θ0 to θ3 (see `SlowCurve`) are all >= 0; None if no fit is
    possible. Arguments: see `fit_reference`.

    Source: MLLess, Eq. (3).
    """
    at = np.asarray(steps, dtype=np.float64)
    fitted = _fit(
        lambda x, a, b, c, floor: 1 / (a * x * x + b * x + c) + floor, at, losses, lambda rise: (rise / 2, rise / 2),
        upper=(np.inf,) * 4,
    )  # fmt: skip
    if fitted is None:
        return None
    (a, b, c, floor), at_scale, scale = fitted
    return SlowCurve((a / (scale * at_scale**2), b / (scale * at_scale), c / scale, floor * scale))


def _fit(
    model: Callable[..., Floats],
    at: Floats,
    losses: npt.ArrayLike,
    start: Callable[[float], tuple[float, float]],
    *,
    upper: Sequence[float],
    sigma: Floats | None = None,
) -> tuple[tuple[float, ...], float, float] | None:
    """Fit by bounded least squares, with steps and losses scaled to at most 1; return the constants and both scales.
    `start`: returns the first two constants at which the search begins, for a rise of the inverse loss."""
    try:
        from scipy.optimize import curve_fit
    except ImportError as error:
        raise lacking("the scale-in tuner", "provision") from error
    values = np.asarray(losses, dtype=np.float64)
    if len(at) < MIN_POINTS or at.shape != values.shape:
        return None
    if not (np.all(np.isfinite(values)) and np.all(values > 0) and at[0] > 0 and np.all(np.diff(at) > 0)):
        return None
    at_scale, scale = float(at[-1]), float(values.max())
    x, y = at / at_scale, values / scale
    floor = 0.8 * float(y.min())
    ends = max(1, len(y) // 10)
    # Inverse losses, above the floor.
    first, last = (1 / (float(part.mean()) - floor) for part in (y[:ends], y[-ends:]))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # a warning that the covariance, which is not used, cannot be estimated
        try:
            theta, _ = curve_fit(
                model, x, y, p0=(*start(max(last - first, 0.1)), first, floor), sigma=sigma,
                bounds=(np.zeros(4), np.asarray(upper)),
                max_nfev=_MAX_EVALUATIONS, ftol=_PRECISION, xtol=_PRECISION, gtol=_PRECISION,
            )  # fmt: skip
        except (RuntimeError, ValueError):
            return None
    constants = tuple(float(value) for value in theta)
    return (constants, at_scale, scale) if all(math.isfinite(value) for value in constants) else None


@dataclass(frozen=True)
class Pace:
    """A loss curve and the duration of its steps."""

    curve: Curve
    step_s: float

    def __post_init__(self) -> None:
        checks.positive(step_s=self.step_s)

    def steps_within(self, horizon_s: float) -> int:
        """Return ⌊Δ / d⌋, the number of whole steps within a horizon of `horizon_s` seconds.

        >>> Pace(SlowCurve((0, 0, 1, 0)), step_s=0.3).steps_within(10)
        33
        """
        return math.floor(horizon_s / self.step_s + 1e-9)

    def loss_ahead(self, step: float, horizon_s: float) -> float:
        """Return the predicted loss `horizon_s` seconds after `step`."""
        return self.curve.loss(step + self.steps_within(horizon_s))


Score = Callable[[float, float, Pace, Pace, float], float]
"""A score function, as `relative_excess`. A worker is removed if the score is below the threshold S."""


def relative_excess(step: float, horizon_s: float, reference: Pace, current: Pace, reference_step: float) -> float:
    """Return s = (l_p(t + ⌊Δ/d_p⌋) - L_P(t + ⌊Δ/d_P⌋)) / L_P(t + ⌊Δ/d_P⌋), the relative excess loss with fewer workers.

    Differs from the paper: (1) is printed with the other sign, L_P - l_p, together with the rule "remove if s < S".
    With this sign, s is -0.2 at a loss 20 % above the reference, so workers would be removed exactly when they are
    needed. MLLess's public code has the sign that is used here. Each curve is advanced by its own step time; the two
    versions of the paper differ on this point.

    Args:
        step: t, the newest step.
        horizon_s: Δ, seconds for which losses are predicted.
        reference: L_P and d_P, the loss curve and step time with all workers.
        current: l_p and d_p, the loss curve and step time with the current workers.
        reference_step: the step at which L_P starts: t as in the paper, or the step that all workers would be at now.

    Source: MLLess, Eq. (1), corrected.

    >>> level = lambda loss: Pace(SlowCurve((0, 0, 1 / loss, 0)), step_s=0.5)
    >>> round(relative_excess(100, 10, level(1.0), level(1.2), 100), 4)
    0.2
    """
    ahead = reference.loss_ahead(reference_step, horizon_s)
    return (current.loss_ahead(step, horizon_s) - ahead) / ahead


# --- step times


def without_outliers(seconds: npt.ArrayLike, window: int = 10, tolerance: float = 0.05) -> Floats:
    """Return the durations that differ by at most `tolerance` (a fraction) from the rolling median of `window` values.

    If this would remove more than half of the durations, they also vary without pauses. Then durations up to three
    times the median are kept, so that only pauses are removed.

    Source: MLLess's public code (rolling median, 10 values, 5 %).

    >>> without_outliers([1.0] * 10 + [9.0] + [1.01] * 5).tolist().count(9.0)
    0
    """
    durations = np.asarray(seconds, dtype=np.float64)
    if not durations.size:
        return durations
    if len(durations) < window:
        medians = np.full(len(durations), np.median(durations))
    else:
        rolling = np.median(np.lib.stride_tricks.sliding_window_view(durations, window), axis=1)
        medians = np.concatenate((np.full(window - 1, rolling[0]), rolling))
    near = np.abs(durations - medians) <= tolerance * durations
    if 2 * np.count_nonzero(near) < len(durations):
        near = durations <= 3 * medians
    kept: Floats = durations[near] if near.any() else durations
    return kept


def mean_step_s(seconds: npt.ArrayLike) -> float | None:
    """Return the mean of the durations without outliers; None if no duration is above 0."""
    kept = without_outliers(seconds)
    mean = float(kept.mean()) if kept.size else 0.0
    return mean if mean > 0 else None


@dataclass(frozen=True)
class StepTimes:
    """A model of the step time, d(w) = a + b * w: seconds of a step with w workers.

    Differs from the paper's code, whose three coefficients c0 + (w - 1) * c1 + w * c2 have only two degrees of freedom.
    """

    a: float
    b: float

    def seconds(self, workers: float) -> float:
        """Return d(workers), the seconds of a step."""
        return self.a + self.b * workers


def fit_step_times(workers: npt.ArrayLike, seconds: npt.ArrayLike, counts: npt.ArrayLike | None = None) -> StepTimes:
    """Fit a + b * w by least squares.

    Args:
        workers: number of workers w of each measurement, shape (n,); at least two different numbers.
        seconds: mean duration of a step in each measurement, shape (n,).
        counts: number of steps in each mean, shape (n,). None: all means have the same weight.

    Raises:
        ValueError: there are fewer than two different w.

    >>> fit_step_times([24, 23, 22], [0.29, 0.28, 0.27])
    StepTimes(a=0.05, b=0.01)
    """
    w, d = np.asarray(workers, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    weights = np.ones(len(w)) if counts is None else np.asarray(counts, dtype=np.float64)
    if np.unique(w).size < 2:
        raise ValueError(f"expected step times of at least two numbers of workers, got {sorted(set(w.tolist()))}")
    mean_w, mean_d = np.average(w, weights=weights), np.average(d, weights=weights)
    slope = float(np.sum(weights * (w - mean_w) * (d - mean_d)) / np.sum(weights * (w - mean_w) ** 2))
    # Twelve digits, because further digits are rounding errors of these sums.
    return StepTimes(a=round(float(mean_d - slope * mean_w), 12), b=round(slope, 12))
