"""The work re-estimated while the job runs, from its own held-out errors. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from doll.errors import InfeasiblePlanError
from doll.provisioner.planning.state import PlannerSettings
from doll.theory.fitting import first_crossing, fit_tail

# A curve of three constants says little about its end before it has this many points and has fallen by half.
MIN_EVALUATIONS = 12
MIN_FALL = 0.5


def re_estimate(
    settings: PlannerSettings,
    samples: npt.ArrayLike,
    errors: npt.ArrayLike,
    target_error: float,
    rng: np.random.Generator,
    *,
    most: float = 2.0,
) -> PlannerSettings:
    """The settings with the work from the run's own error curve, or unchanged where the curve is too short yet.

    The upper end of the estimate's interval is taken, since too small an estimate spends slack that is needed later;
    where that end is unbounded the point estimate is. One step changes the work by at most the factor `most`. The curve
    is fitted against updates; where updates differ, against batches.

    Args:
        samples: samples in the model at each held-out evaluation, ascending, shape (m,).
        errors: held-out error of each, above 0, shape (m,).
        target_error: ε in the same measure.
        rng: for the bootstrap.

    Raises:
        ValueError: an error that is not above 0, or samples that are not ascending.
    """
    step = settings.samples_per_update or settings.batch_size
    at, measured = np.asarray(samples, dtype=np.float64) / step, np.asarray(errors, dtype=np.float64)
    before = settings.samples / step
    reached = first_crossing(at, measured, target_error)
    if reached is not None:
        return replace(settings, samples=max(reached, 1.0) * step)
    if len(at) < MIN_EVALUATIONS or measured[-1] > MIN_FALL * measured[0]:
        return settings
    try:
        needed = fit_tail(at, measured, rng, replicas=100).updates_to(target_error)
    except InfeasiblePlanError:
        # The fitted floor is above the target: more work than planned, by an unknown amount.
        return replace(settings, samples=settings.samples * most)
    wanted = needed.high if math.isfinite(needed.high) else needed.point
    bounded = min(max(wanted, before / most), before * most)
    # The last evaluation is above the target, so the work ends after it.
    return replace(settings, samples=max(bounded, float(at[-1]) + 1) * step)
