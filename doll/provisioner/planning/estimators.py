"""Estimates from observations: availability of spot with an interval, rates, boot times, work. Pure.

Model: an up period of a spot slot ends at the rate q, a down period at the rate r, so α = r / (q + r). With Gamma
posteriors for q and r, the quantiles of α are transformed quantiles of a Beta distribution: exact, without sampling.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from doll.errors import InfeasiblePlanError
from doll.extras import lacking
from doll.provisioner.kept_state import KeptState
from doll.provisioner.planning.state import Alpha, Bools, PlannerSettings
from doll.theory import checks
from doll.theory.checks import Floats
from doll.theory.fitting import first_crossing, fit_tail

_LEAST_OF_PRIOR = 1e-6
"""A rate estimate is never below this fraction of the stated rate."""


def alpha_quantile(
    probability: float, ends_of_up: float, ends_of_down: float, up_s: float, down_s: float, prior: float = 0.5
) -> float:
    """Return the quantile of α, given the numbers of ended up and down periods and the total up and down seconds (above
    0). Decay and the division by a design effect may make fractions of the numbers.

    The posteriors are q ~ Gamma(prior + ends_of_up, up_s) and r ~ Gamma(prior + ends_of_down, down_s). So p = r *
    down_s / (r * down_s + q * up_s) is Beta(prior + ends_of_down, prior + ends_of_up). α = p * up_s / (p * up_s + (1 -
    p) * down_s) increases with p, so a quantile of p gives the quantile of α.

    >>> round(alpha_quantile(0.5, 50, 50, 9000.0, 1000.0), 3)
    0.9
    """
    try:
        from scipy.special import betaincinv
    except ImportError as error:
        raise lacking("an estimate of the availability of spot", "provision") from error

    checks.positive(up_s=up_s, down_s=down_s, prior=prior)
    checks.non_negative(ends_of_up=ends_of_up, ends_of_down=ends_of_down)
    p = float(betaincinv(prior + ends_of_down, prior + ends_of_up, probability))
    return p * up_s / (p * up_s + (1 - p) * down_s)


class AvailabilityEstimator(KeptState):
    """Estimates α and the cycle from slots that are observed while they are assigned to spot.

    A slot on-demand shows nothing about spot (it is censored). Interruptions in one pool within `cluster_s` count as
    one cluster. If interruptions come in clusters of k slots, the counts are divided by the design effect Σk²/Σk. The
    prior has the weight of half an observed up period and half a down period. Observations lose half of their weight
    after `half_life_s`.
    """

    def __init__(
        self,
        *,
        prior_alpha: float = 0.9,
        prior_cycle_s: float = 36_000.0,
        half_life_s: float = 48 * 3600.0,
        cluster_s: float = 180.0,
    ) -> None:
        if not 0 < prior_alpha < 1:
            raise ValueError(f"prior_alpha: expected a number in (0, 1), got {prior_alpha}")
        checks.positive(prior_cycle_s=prior_cycle_s, half_life_s=half_life_s, cluster_s=cluster_s)
        self._prior_up_s = 0.5 * prior_alpha * prior_cycle_s
        self._prior_down_s = 0.5 * (1 - prior_alpha) * prior_cycle_s
        self._half_life_s = half_life_s
        self._cluster_s = cluster_s
        self._now_s = math.nan
        self._up = np.empty(0, dtype=np.bool_)
        self._assigned = np.empty(0, dtype=np.bool_)
        self._ends_of_up = self._ends_of_down = self._up_s = self._down_s = 0.0
        self._open: dict[Hashable, tuple[float, int]] = {}  # pool -> begin and size of the cluster that may still grow
        self._clusters: deque[tuple[float, int]] = deque(maxlen=1000)

    def observe(self, now_s: float, up: Bools, assigned: Bools, pools: Sequence[Hashable] | None = None) -> None:
        """Record the state of all slots at `now_s`, which must not decrease. The arrays have the shape (N,).

        Args:
            up: whether the slot's spot worker is ready.
            assigned: whether the slot is on spot. Only then, `up` is an observation of spot.
            pools: pool (type and zone) of each slot. None: all slots are in one pool.
        """
        up, assigned = np.asarray(up, dtype=np.bool_), np.asarray(assigned, dtype=np.bool_)
        if self._up.shape == up.shape and now_s >= self._now_s:
            span = now_s - self._now_s
            keep = 0.5 ** (span / self._half_life_s)
            self._ends_of_up, self._ends_of_down = self._ends_of_up * keep, self._ends_of_down * keep
            self._up_s, self._down_s = self._up_s * keep, self._down_s * keep
            # Only slots that were on spot for the whole time: a slot that has just moved there has no history on spot.
            seen = self._assigned & assigned
            self._up_s += span * int(np.count_nonzero(seen & self._up))
            self._down_s += span * int(np.count_nonzero(seen & ~self._up))
            fell = np.flatnonzero(seen & self._up & ~up)
            self._ends_of_up += len(fell)
            self._ends_of_down += int(np.count_nonzero(seen & ~self._up & up))
            for slot in fell.tolist():
                self._interrupted(now_s, pools[slot] if pools is not None else None)
        self._now_s, self._up, self._assigned = now_s, up.copy(), assigned.copy()

    @property
    def design_effect(self) -> float:
        """The design effect Σk²/Σk over the clusters of interruptions; 1 if each slot is interrupted alone."""
        sizes = [size for _, size in self._clusters] + [size for _, size in self._open.values()]
        total = sum(sizes)
        return sum(size * size for size in sizes) / total if total else 1.0

    def alpha(self) -> Alpha:
        """Return the median of α, and the interval that contains α with probability 0.9."""
        effect = self.design_effect
        counts = (self._ends_of_up / effect, self._ends_of_down / effect)
        times = (self._up_s / effect + self._prior_up_s, self._down_s / effect + self._prior_down_s)
        low, point, high = (min(max(alpha_quantile(p, *counts, *times), 1e-3), 1 - 1e-6) for p in (0.05, 0.5, 0.95))
        return Alpha(point, low, high)

    @property
    def cycle_s(self) -> float:
        """The mean seconds of one up period plus one down period."""
        up = (self._up_s + self._prior_up_s) / (self._ends_of_up + 0.5)
        down = (self._down_s + self._prior_down_s) / (self._ends_of_down + 0.5)
        return up + down

    def to_dict(self) -> dict[str, Any]:
        """Return the state to save, without the current up and down periods."""
        # A cluster that may still grow is saved as complete; a new one begins after a restart.
        clusters = [*self._clusters, *self._open.values()]
        return {
            "tallies": [self._ends_of_up, self._ends_of_down, self._up_s, self._down_s],
            "clusters": [[begin_s, size] for begin_s, size in clusters],
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        self._ends_of_up, self._ends_of_down, self._up_s, self._down_s = (float(tally) for tally in kept["tallies"])
        self._clusters.extend((float(begin_s), int(size)) for begin_s, size in kept["clusters"])

    def _interrupted(self, now_s: float, pool: Hashable) -> None:
        begin, size = self._open.get(pool, (now_s, 0))
        if now_s - begin > self._cluster_s:
            self._clusters.append((begin, size))
            begin, size = now_s, 0
        self._open[pool] = (begin, size + 1)


class RateEstimator(KeptState):
    """Estimates the arrival rates of the streams: samples per up time. The prior, shape (N,), has the weight of
    `prior_s` seconds.

    Observations and the prior lose half of their weight after `half_life_s` of up time. The estimate therefore follows
    changes during a day, but not the noise of minutes.
    """

    KEPT: ClassVar = {"samples": Floats, "up_s": Floats, "prior_s": Floats}
    LATER: ClassVar = ("prior_s",)  # rates did not decay

    def __init__(self, prior_per_s: npt.ArrayLike, prior_s: float = 60.0, half_life_s: float = 1800.0) -> None:
        checks.positive(prior_s=prior_s, half_life_s=half_life_s)
        self._prior = checks.rates(prior_per_s)
        self._half_life_s = half_life_s
        self._first_s = prior_s
        self._prior_s = np.full(len(self._prior), prior_s)
        self._samples = np.zeros(len(self._prior))
        self._up_s = np.zeros(len(self._prior))

    def observe(self, samples: npt.ArrayLike, up_s: npt.ArrayLike) -> None:
        """Record each stream's samples, and the up seconds of its worker, since the last call; shape (N,) each."""
        more_s = np.asarray(up_s, dtype=np.float64)
        keep = 0.5 ** (more_s / self._half_life_s)
        self._samples = self._samples * keep + np.asarray(samples, dtype=np.float64)
        self._up_s = self._up_s * keep + more_s
        self._prior_s = self._prior_s * keep

    def adopt(self, earlier: RateEstimator) -> None:
        """Copy the estimates of `earlier`. Its streams are the first streams of this object."""
        for name in ("_samples", "_up_s", "_prior_s"):
            getattr(self, name)[: len(earlier._prior)] = getattr(earlier, name)

    def forget(self, stream: int, per_s: float) -> None:
        """Forget the observations of this stream, and use the rate `per_s` as its prior."""
        self._samples[stream], self._up_s[stream], self._prior_s[stream] = per_s * self._first_s, self._first_s, 0.0

    def per_s(self) -> Floats:
        """Return λ̂ > 0, samples per second of each stream while its worker is up, shape (N,)."""
        rates: Floats = (self._samples + self._prior * self._prior_s) / (self._up_s + self._prior_s)
        # After months without a sample the counts underflow; the planner needs a rate above 0.
        return np.maximum(rates, _LEAST_OF_PRIOR * self._prior)


class BootTimeEstimator(KeptState):
    """Estimates the time from the order of a machine to a worker that holds its slot. Only the newest `keep` boots
    count, because older ones say little about the current image and market."""

    KEPT: ClassVar = {"seconds": list[Annotated[float, Meta(ge=0)]]}

    def __init__(self, keep: int = 50) -> None:
        self._seconds: deque[float] = deque(maxlen=keep)

    def observe(self, seconds: float) -> None:
        """Record the seconds of one boot."""
        checks.non_negative(seconds=seconds)
        self._seconds.append(seconds)

    @property
    def slow_s(self) -> float:
        """The 90th percentile of boot times: nine of ten boots do not take longer; 0 without boots."""
        return float(np.quantile(list(self._seconds), 0.9, method="inverted_cdf")) if self._seconds else 0.0


# A curve of three constants says little about its end before it has this many points and has fallen by half.
MIN_EVALUATIONS = 12
MIN_FALL = 0.5


def re_estimated(
    settings: PlannerSettings,
    samples: npt.ArrayLike,
    errors: npt.ArrayLike,
    target_error: float,
    rng: np.random.Generator,
    *,
    changed_at: float = 0.0,
    most: float = 2.0,
) -> PlannerSettings:
    """Return the settings with the work estimated from the run's error curve; unchanged if the curve is too short.

    The upper end of the estimate's interval is used, because an estimate that is too small would use up slack that is
    needed later. If the upper end is infinite, the point estimate is used. One call changes the work by at most the
    factor `most`. The curve is a function of updates, or of batches if the updates differ in size.

    After a change of the stream the errors lie on another curve. Until enough of it is known, the model counts as set
    back on the old one, to where its error was the newest error.

    Args:
        samples: samples in the model at each held-out evaluation, ascending, shape (m,).
        errors: held-out error of each evaluation, above 0, shape (m,); `target_error` is ε in the same measure.
        changed_at: samples in the model when the stream changed last; 0: it has not changed.

    Raises:
        ValueError: an error is not above 0, or the samples are not ascending.
    """
    step = settings.samples_per_update or settings.batch_size
    at, measured = np.asarray(samples, dtype=np.float64) / step, np.asarray(errors, dtype=np.float64)
    before, since = settings.samples / step, int(np.searchsorted(samples, changed_at)) if changed_at else 0
    reached = first_crossing(at[since:], measured[since:], target_error)
    if reached is not None:
        return replace(settings, samples=max(reached, 1.0) * step)
    parts = slice(since, None), slice(since)
    curve = next((part for part in parts if _tells_its_end(measured[part])), None)
    if curve is None or since == len(at):
        return settings
    try:
        begin = float(at[since]) if curve is parts[0] and since else 0.0
        fit = fit_tail(at[curve] - begin, measured[curve], rng, replicas=100)
        needed = fit.updates_to(target_error)
        wanted = begin + (needed.high if math.isfinite(needed.high) else needed.point)
        if curve is not parts[0]:
            # The median of the newest errors, but none from before the change.
            wanted += float(at[-1]) - fit.curve.updates_to(float(np.median(measured[since:][-3:])))
    except InfeasiblePlanError:
        # The fitted floor is above the target: more work than planned, by an unknown amount.
        return replace(settings, samples=settings.samples * most)
    bounded = min(max(wanted, before / most), before * most)
    # The last evaluation is above the target, so the work ends after it.
    return replace(settings, samples=max(bounded, float(at[-1]) + 1) * step)


def _tells_its_end(errors: npt.NDArray[np.float64]) -> bool:
    return len(errors) >= MIN_EVALUATIONS and bool(errors[-1] <= MIN_FALL * errors[0])
