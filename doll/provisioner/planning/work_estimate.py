"""J(ε) re-estimated while the job runs, from its own held-out errors. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from doll.errors import InfeasiblePlanError
from doll.provisioner.planning.state import PlannerSettings
from doll.theory.fitting import first_crossing, fit_tail

# A curve of three constants says little about its end before it has this many points and has fallen by half.
_MIN_EVALUATIONS = 12
_MIN_FALL = 0.5


def re_estimate(
    settings: PlannerSettings,
    updates: npt.ArrayLike,
    errors: npt.ArrayLike,
    target_error: float,
    rng: np.random.Generator,
    *,
    most: float = 2.0,
) -> PlannerSettings:
    """The settings with J from the run's own error curve, or unchanged where the curve does not say enough yet.

    The upper end of J's interval is taken, since too small a J spends slack that is needed later; where that end is
    unbounded the point estimate is. One step changes J by at most the factor `most`.

    Args:
        updates: J of each held-out evaluation, ascending, shape (m,).
        errors: held-out error of each, above 0, shape (m,).
        target_error: ε in the same measure.
        rng: for the bootstrap.

    Raises:
        ValueError: an error that is not above 0, or updates that are not ascending.
    """
    at, measured = np.asarray(updates, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    reached = first_crossing(at, measured, target_error)
    if reached is not None:
        return replace(settings, updates=max(reached, 1.0))
    if len(at) < _MIN_EVALUATIONS or measured[-1] > _MIN_FALL * measured[0]:
        return settings
    try:
        updates_needed = fit_tail(at, measured, rng, replicas=100).updates_to(target_error)
    except InfeasiblePlanError:
        # The fitted floor is above the target: more work than planned, by an amount that nobody can tell yet.
        return replace(settings, updates=settings.updates * most)
    wanted = updates_needed.high if math.isfinite(updates_needed.high) else updates_needed.point
    bounded = min(max(wanted, settings.updates / most), settings.updates * most)
    # The last evaluation is above the target, so J lies beyond it.
    return replace(settings, updates=max(bounded, float(at[-1]) + 1))
