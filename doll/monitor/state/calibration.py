"""The planner's constants, estimated from a run: J(ε) with its interval, rates, service time, noise constants. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np

from doll.errors import InfeasiblePlanError
from doll.monitor.state.rates import steady_update_rate
from doll.theory.checks import Floats
from doll.theory.fitting import CurveFit, FitInterval, first_crossing, fit_tail
from doll.theory.queueing import Stability, stability

Measure = Literal["error_rate", "loss"]
Rows = Sequence[Mapping[str, float]]

# Fewer held-out evaluations do not determine a curve with three constants.
MIN_EVALUATIONS = 12
_ROUNDING: Final = 0.01  # tolerance for samples per record: the last packed record is incomplete


@dataclass(frozen=True)
class Noise:
    """Constants of Eq. (10) for SGD with or without heavy-ball momentum, from the fitted curve. They are empirical
    values, not bounds.

    Attributes:
        convexity: c = (1 - ρ) / η, with η = lr / (1 - momentum).
        smoothness_times_variance: L * B = 2 * K * b * c * γ / η; the curve determines only this product.
        smoothness_times_variance_high: the same product at the upper end of γ's interval.
    """

    convexity: float
    smoothness_times_variance: float
    smoothness_times_variance_high: float


@dataclass(frozen=True)
class Calibration:
    """Measured constants of a run.

    Attributes:
        fit: fitted error curve; None if the run has too few evaluations (see `no_fit_reason`).
        updates_to_target: J(ε) with its 90 % interval; None without a target or a fit.
        reached_at: update at which the run itself reached the target; None if it did not reach it.
        service_s, service_sd_s: μ_C and σ_C, mean and standard deviation of a batch's gradient time over the updates.
        update_rate_per_s: λ_U, in the steady part of the run.
        total_rate_per_s: samples applied per second, sum of all streams.
        mean_samples: mean number of samples of one record (`plan.mean_samples`); 1 if the mean is within 1 % of 1.
        stability: Proposition 1 with these values.
        noise: constants of Eq. (10); None unless the optimizer is SGD on the mean gradient.
    """

    measure: Measure
    target_error: float | None
    fit: CurveFit | None
    no_fit_reason: str
    updates_to_target: FitInterval | None
    reached_at: float | None
    service_s: float
    service_sd_s: float
    update_rate_per_s: float
    total_rate_per_s: float
    mean_samples: float
    stability: Stability | None
    noise: Noise | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = asdict(self)
        if (fit := plain["fit"]) is not None:
            fit["evaluations"] = fit.pop("num_points")
            del fit["curve"], fit["replicas"]
        if self.stability is not None:
            plain["stability"] = {**self.stability._asdict(), "verdict": self.stability.verdict}
        return {**plain, "no_fit_reason": self.no_fit_reason or None}

    def text(self) -> str:
        """Return the constants as text for users."""
        fit = self.fit
        lines = []
        if self.updates_to_target is not None:
            updates_to_target = self.updates_to_target
            how = (
                f"reached at update {self.reached_at:g}" if self.reached_at is not None else "extrapolated from the fit"
            )
            lines.append(
                f"J        {updates_to_target.point:g} updates to {self.measure} {self.target_error:g} "
                f"(90 % interval {updates_to_target.low:g} .. {updates_to_target.high:g}); {how}"
            )
            if fit is not None and self.reached_at is None and updates_to_target.point > 2 * fit.last_update:
                lines.append(
                    f"         over twice the run's {fit.last_update:g} updates: a longer pilot run is more precise"
                )
        elif self.target_error is None:
            lines.append("J        give --target-error to estimate the number of updates")
        if fit is not None:
            lines += [
                f"curve    {fit.curve.beta:.4g} * {fit.curve.rho:.6g}^J + {fit.curve.gamma:.4g} from update "
                f"{fit.first_update:g} on ({fit.num_points} evaluations, relative error {fit.relative_rmse:.1%})",
                f"         rho {fit.rho.low:.6g} .. {fit.rho.high:.6g}, "
                f"noise floor {fit.gamma.low:.4g} .. {fit.gamma.high:.4g}",
            ]
        else:
            lines.append(f"curve    none: {self.no_fit_reason}")
        lines += [
            f"service  {self.service_s:.4g} +- {self.service_sd_s:.2g} s for one batch's gradient (plan.service_s)",
            f"rates    {self.update_rate_per_s:.4g} updates/s, {self.total_rate_per_s:.5g} samples/s of all streams",
        ]
        if self.stability is not None:
            lines.append(
                f"margin   {self.stability.sufficient:.3g} (sufficient form), {self.stability.necessary:.3g} "
                f"(necessary form): {self.stability.verdict}"
            )
        if self.mean_samples != 1:
            lines.append(f"records  {self.mean_samples:.4g} samples of each, on average (plan.mean_samples)")
        if self.noise is not None:
            lines.append(
                f"noise    c = {self.noise.convexity:.4g}, L B = {self.noise.smoothness_times_variance:.4g}, "
                f"at most {self.noise.smoothness_times_variance_high:.4g} (of the fitted curve)"
            )
        lines.append("The interval is for this run's curve; another seed, stream or model needs its own pilot run.")
        return "\n".join(lines)


def calibrate(
    updates: Rows,
    evaluations: Rows,
    *,
    group_size: int,
    batch_size: int,
    samples_per_record: int = 1,
    measure: Measure,
    target_error: float | None,
    step_size: float | None,
    rng: np.random.Generator,
) -> Calibration:
    """Estimate constants from the rows of a run's updates.csv and evaluations.csv (void rows are skipped).

    Args:
        batch_size, samples_per_record: values of the job file. b counts a record as one sample, and a packed record as
            m samples.
        measure: "error_rate" (1 - held-out accuracy) or "loss" (held-out loss).
        target_error: ε in this measure. None: J(ε) is not estimated.
        step_size: η of the mean gradient, lr / (1 - momentum), for SGD. None: another optimizer.

    Raises:
        InfeasiblePlanError: the fitted noise floor is above the target and the run did not reach it.
    """
    valid_rows = [row for row in updates if not row.get("void")]
    at, errors = _curve([row for row in evaluations if not row.get("void")], measure)
    fit, why = None, ""
    if len(at) < MIN_EVALUATIONS:
        why = f"{len(at)} held-out evaluations with {measure}, {MIN_EVALUATIONS} are needed: run the pilot for longer"
    else:
        fit = fit_tail(at, errors, rng)
    reached = first_crossing(at, errors, target_error) if target_error is not None else None
    updates_to_target = _updates_to(fit, reached, target_error) if target_error is not None else None
    service, spread = _service(valid_rows)
    rate = steady_update_rate([row["time_s"] for row in valid_rows])
    samples = float(np.mean([row["n_samples"] for row in valid_rows])) if valid_rows else math.nan
    mean_samples = _mean_samples(valid_rows, samples_per_record)
    total = rate * samples
    made = batch_size * mean_samples
    margin = stability(total, group_size, made, service) if service > 0 and total > 0 else None
    noise = None
    if fit is not None and step_size is not None:
        convexity = (1 - fit.curve.rho) / step_size
        scale = 2 * group_size * made * convexity / step_size
        noise = Noise(convexity, scale * fit.curve.gamma, scale * fit.gamma.high)
    return Calibration(
        measure=measure,
        target_error=target_error,
        fit=fit,
        no_fit_reason=why,
        updates_to_target=updates_to_target,
        reached_at=reached,
        service_s=service,
        service_sd_s=spread,
        update_rate_per_s=rate,
        total_rate_per_s=total,
        mean_samples=mean_samples,
        stability=margin,
        noise=noise,
    )


def _mean_samples(rows: Rows, samples_per_record: int) -> float:
    known = [row for row in rows if "records" in row]
    records = sum(row["records"] for row in known)
    mean = sum(row["n_samples"] for row in known) / (records * samples_per_record) if records else 0.0
    return mean if mean and abs(mean - 1) > _ROUNDING else 1.0


def _curve(rows: Rows, measure: Measure) -> tuple[Floats, Floats]:
    """Return J and error of each evaluation. An error rate is at least 0.0005, because the fit needs values above 0."""
    column = "accuracy" if measure == "error_rate" else "loss"
    pairs = [
        (row["version"], 1 - row[column] if measure == "error_rate" else row[column]) for row in rows if column in row
    ]
    pairs = sorted(pair for pair in pairs if math.isfinite(pair[1]))
    if not pairs:
        return np.empty(0), np.empty(0)
    at, errors = np.array(pairs, dtype=np.float64).T
    return at, np.maximum(errors, 5e-4) if measure == "error_rate" else errors


def _updates_to(fit: CurveFit | None, reached: float | None, target: float) -> FitInterval | None:
    """Return J(ε): the update that reached the target, with an interval around it; or else the estimate of the fit."""
    try:
        fitted = fit.updates_to(target, reached=reached is not None) if fit is not None else None
    except InfeasiblePlanError:
        if reached is None:
            raise
        fitted = None
    if reached is None:
        return fitted
    if fitted is None:
        return FitInterval(reached, reached, reached)
    return FitInterval(reached, min(reached, fitted.low), max(reached, fitted.high))


def _service(rows: Rows) -> tuple[float, float]:
    """Return mean and standard deviation of a batch's gradient time over updates, seconds; NaN if none was recorded."""
    pairs = [(row["mean_service_s"], row.get("batches", 1.0)) for row in rows if row.get("mean_service_s", 0) > 0]
    if not pairs:
        return math.nan, math.nan
    seconds, weights = np.array(pairs).T
    mean = float(np.average(seconds, weights=weights))
    # Means over a group vary less than single batches: σ_C² is the group size times their variance.
    return mean, math.sqrt(float(np.average((seconds - mean) ** 2, weights=weights)) * float(weights.mean()))
