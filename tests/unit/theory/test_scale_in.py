"""MLLess's tuner formulas: the verified examples, what must hold of any curve, and variants that must fail."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from benchmarks.paper.formulas import printed_excess
from doll.theory import scale_in
from doll.theory.scale_in import (
    Pace,
    ReferenceCurve,
    SlowCurve,
    StepTimes,
    ewma_both_ways,
    fit_reference,
    fit_slow,
    fit_step_times,
    knee,
    mean_step_s,
    relative_excess,
    without_outliers,
)
from hypothesis import given
from hypothesis import strategies as st

PAPER_THETA = (0.05, 1.58, 0.58, 0.49)


def level(loss: float, step_s: float = 0.5) -> Pace:
    """A curve that stays at this loss."""
    return Pace(SlowCurve((0.0, 0.0, 1 / loss, 0.0)), step_s)


# --- smoothing and the knee


def by_recurrence(values: np.ndarray, span: float) -> np.ndarray:
    """The definition, value by value."""
    keep = 1 - 2 / (span + 1)

    def one_way(series: np.ndarray) -> np.ndarray:
        num = den = 0.0
        out = []
        for value in series:
            num, den = value + keep * num, 1 + keep * den
            out.append(num / den)
        return np.array(out)

    return 0.5 * (one_way(values) + one_way(values[::-1])[::-1])


@pytest.mark.parametrize(("count", "span"), [(1, 20), (2, 20), (30, 20), (3000, 20), (50, 1), (50, 5), (200, 1000)])
def test_the_average_is_the_recurrence_in_both_directions(count: int, span: float) -> None:
    values = np.random.default_rng(count).normal(1.0, 0.3, count)
    assert ewma_both_ways(values, span) == pytest.approx(by_recurrence(values, span), rel=1e-12)


def test_the_average_has_no_delay() -> None:
    """An average of one direction lags behind a line, one of both does not."""
    line = np.arange(500.0)
    middle = slice(200, 300)
    assert ewma_both_ways(line)[middle] == pytest.approx(line[middle], abs=1e-6)
    assert ewma_both_ways([]).shape == (0,)


def falling(steps: np.ndarray, noise: float = 0.0) -> np.ndarray:
    """A loss whose relative slope passes -1e-3 at about step 300."""
    rng = np.random.default_rng(0)
    return (0.5 + 2 * np.exp(-steps / 60)) * (1 + noise * rng.standard_normal(len(steps)))


def exact_knee(slope: float) -> float:
    steps = np.arange(1.0, 2000)
    loss = falling(steps)
    relative = -2 / 60 * np.exp(-steps / 60) / loss
    return float(steps[np.argmax(relative > slope)])


@pytest.mark.parametrize("noise", [0.0, 0.002])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_knee_is_where_the_relative_slope_passes_the_limit(noise: float, scale: float) -> None:
    """The knee does not depend on the unit of the loss; with the printed absolute slope it would."""
    steps = np.arange(1, 601)
    at = knee(steps, scale * falling(steps, noise), -2e-3)
    assert at is not None
    assert at == pytest.approx(exact_knee(-2e-3), rel=0.25 if noise else 0.15)


def test_there_is_no_knee_before_the_loss_has_fallen() -> None:
    """A flat start is no knee, a curve that still falls has no knee, and two values are too few."""
    steps = np.arange(1, 301)
    assert knee(steps, np.full(300, 2.3), -1e-3) is None
    assert knee(steps, 10 * np.exp(-steps / 100), -1e-3) is None
    plateau = np.concatenate((np.full(150, 2.5), falling(np.arange(1, 601))))
    at = knee(np.arange(1, 751), plateau, -2e-3)
    assert at is not None
    assert at > 150 + 60
    assert knee([1, 2], [2.0, 1.0], -1e-3) is None
    assert knee(steps, falling(steps) - 2.0, -1e-3) is None, "a loss that is not above 0 has no relative slope"
    with pytest.raises(ValueError, match="slope: expected a number below 0"):
        knee(steps, falling(steps), 1e-3)


# --- curves


@pytest.mark.parametrize("smoothing_span", [None, 5.0])
def test_the_reference_fit_extrapolates(smoothing_span: float | None) -> None:
    """σ = 0.01, 120 points: at most 0.5 % off 200 steps later."""
    truth = ReferenceCurve(PAPER_THETA)
    steps = np.arange(1, 121)
    for seed in range(5):
        noise = np.random.default_rng(seed).normal(0, 0.01, len(steps))
        noisy = [truth.loss(float(step)) for step in steps] + noise
        fitted = fit_reference(steps, ewma_both_ways(noisy, smoothing_span) if smoothing_span else noisy)
        assert fitted is not None
        assert min(fitted.theta) >= 0
        assert fitted.loss(320) == pytest.approx(truth.loss(320), rel=0.01)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("stretch", [1, 1000])
def test_fits_do_not_depend_on_units(scale: float, stretch: int) -> None:
    steps = np.arange(1, 121) * stretch
    truth = SlowCurve((1e-4 / scale / stretch**2, 0.01 / scale / stretch, 0.5 / scale, 0.3 * scale))
    slow = fit_slow(steps, [truth.loss(float(step)) for step in steps])
    reference = fit_reference(steps, [truth.loss(float(step)) for step in steps])
    assert slow is not None
    assert reference is not None
    at = 200.0 * stretch
    assert slow.loss(at) == pytest.approx(truth.loss(at), rel=0.01)
    assert reference.loss(at) == pytest.approx(truth.loss(at), rel=0.03)


@pytest.mark.parametrize("fit", [fit_reference, fit_slow])
@pytest.mark.parametrize(
    ("steps", "losses"),
    [
        (range(1, 8), [1.0] * 7),
        (range(8), [1.0] * 8),
        (range(1, 10), [1.0] * 8 + [math.nan]),
        (range(1, 10), [1.0] * 8 + [-1.0]),
        ([1, 2, 3, 3, 4, 5, 6, 7, 8], [1.0] * 9),
        ([], []),
    ],
)
def test_what_cannot_be_fitted_is_no_curve(fit: Callable[..., object], steps: object, losses: object) -> None:
    """Fewer than 8 points, a step 0, a loss that is not a number above 0, steps that do not ascend."""
    assert fit(list(steps), losses) is None  # type: ignore[call-overload]


@pytest.mark.slow
@given(
    losses=st.lists(st.floats(1e-6, 1e6), min_size=8, max_size=40),
    ahead=st.integers(0, 1000),
    fit=st.sampled_from([fit_reference, fit_slow]),
)
def test_any_losses_give_a_curve_that_never_rises_or_none(
    losses: list[float], ahead: int, fit: Callable[..., ReferenceCurve | SlowCurve | None]
) -> None:
    """θ >= 0: whatever noise there is, no predicted loss is negative, and none is above an earlier one."""
    curve = fit(np.arange(1, len(losses) + 1), losses)
    if curve is not None:
        assert min(curve.theta) >= 0
        assert 0 <= curve.loss(len(losses) + ahead) <= curve.loss(len(losses)) * (1 + 1e-9)


# --- the score


def test_a_curve_that_is_worse_is_kept_and_the_printed_sign_removes() -> None:
    """S = 0.15, 20 % worse: s = +0.20, keep; as printed s = -0.20, which is below S: remove."""
    threshold, reference, worse = 0.15, level(1.0), level(1.2)
    corrected = relative_excess(100, 10, reference, worse, 100)
    printed = printed_excess(100, 10, reference, worse, 100)
    assert corrected == pytest.approx(0.2)
    assert printed == pytest.approx(-0.2)
    assert not corrected < threshold
    assert printed < threshold
    better = relative_excess(100, 10, reference, level(0.9), 100)
    assert better == pytest.approx(-0.1), "negative: fewer workers are ahead"


def test_each_curve_is_advanced_by_its_own_steps() -> None:
    """l_p by ⌊Δ/d_p⌋, L_P by ⌊Δ/d_P⌋: fewer workers that are quicker get further."""
    curve = SlowCurve((0.0, 0.01, 1.0, 0.0))
    slow, quick = Pace(curve, 1.0), Pace(curve, 0.25)
    assert relative_excess(100, 10, slow, quick, 100) == pytest.approx(curve.loss(140) / curve.loss(110) - 1)
    assert relative_excess(100, 10, quick, slow, 100) == pytest.approx(curve.loss(110) / curve.loss(140) - 1)
    assert relative_excess(100, 10, slow, slow, 150) == pytest.approx(curve.loss(110) / curve.loss(160) - 1)
    assert Pace(curve, 0.3).steps_within(10) == 33
    assert Pace(curve, 0.1).steps_within(10) == 100, "not 99 by rounding"


# --- step times


def test_outliers_are_left_out_of_step_times() -> None:
    rng = np.random.default_rng(0)
    seconds = 0.29 * (1 + 0.01 * rng.standard_normal(200))
    slow = seconds.copy()
    slow[::20] *= 5
    assert float(slow.mean()) > 1.15 * 0.29
    assert mean_step_s(slow) == pytest.approx(0.29, rel=0.005)
    assert len(without_outliers(seconds)) > 180


def test_times_that_vary_by_nature_are_kept_and_pauses_are_not() -> None:
    """Arrivals are random: within 5 % of the median are few of them."""
    rng = np.random.default_rng(0)
    seconds = rng.exponential(1.0, 400)
    seconds[100] = 300.0
    kept = without_outliers(seconds)
    assert len(kept) > 300
    assert kept.max() < 10
    assert mean_step_s([]) is None
    assert mean_step_s([0.0, 0.0]) is None
    assert mean_step_s([2.0]) == 2.0


def test_step_times_are_a_line() -> None:
    """The public code's three coefficients have two degrees of freedom: any c0 + c1 fits as well."""
    workers = np.arange(6, 25)
    seconds = 0.05 + 0.01 * workers
    assert fit_step_times(workers, seconds) == StepTimes(0.05, 0.01)
    rank = np.linalg.matrix_rank(np.column_stack([np.ones(19), workers - 1, workers]))
    assert rank == 2
    skewed = seconds.copy()
    skewed[0] = 9.0
    counts = np.full(19, 1000.0)
    counts[0] = 1e-9
    weighted = fit_step_times(workers, skewed, counts)
    assert weighted.seconds(10) == pytest.approx(0.15, rel=1e-3)
    with pytest.raises(ValueError, match=r"at least two numbers of workers, got \[24.0\]"):
        fit_step_times([24, 24], [0.3, 0.31])


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="step_s"):
        Pace(SlowCurve((0, 0, 1, 0)), 0.0)
    with pytest.raises(ValueError, match="span"):
        ewma_both_ways([1.0], 0)
    assert scale_in.SlowCurve((0.0, 0.0, 0.0, 1.0)).loss(5) == math.inf
