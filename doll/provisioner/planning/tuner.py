"""MLLess's scale-in tuner: decides when one worker fewer would hardly slow the loss down. Pure; time is an argument.

The tuner does nothing before the knee of the loss curve. At the knee it fits the reference curve once, and one worker
is removed. From then on, every `every_s` seconds, a curve is fitted to the losses since the last removal, and both
curves are extrapolated by the horizon. Another worker is removed if the current curve exceeds the reference by less
than the threshold.

Source: MLLess (Middleware 2021; journal version 2023), "Scale-in auto-tuner"; formulas in `doll.theory.scale_in`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from doll.provisioner.kept_state import KeptState
from doll.theory import checks, scale_in
from doll.theory.checks import Floats
from doll.theory.scale_in import Pace, ReferenceCurve, Score

MOST_POINTS: Final = 2048
_CONFIRMATIONS: Final = 5  # the knee counts after it has stayed the same for as many evaluations of new losses
_IGNORED_STEPS: Final = 4  # after a removal, whose duration does not count
_Point = tuple[float, float, float]  # newest step, its time, mean loss


class LossHistory(KeptState):
    """The loss of each update (before the model learns from it) and the time of the update.

    When there are `most` points (2 or more), each two neighbours are merged into one point with their mean loss, and
    later points cover equally many updates. So each point represents `stride` updates, and the memory is limited.
    """

    KEPT: ClassVar = {"stride": Annotated[int, Meta(ge=1)], "points": list[_Point], "open": list[_Point]}

    def __init__(self, most: int = MOST_POINTS) -> None:
        if most < 2:
            raise ValueError(f"most: expected at least 2 points, got {most}")
        self._most = most - most % 2  # neighbours are joined in pairs
        self.clear()

    def clear(self) -> None:
        """Forget all points, because the job starts again."""
        self._stride = 1
        self._points: list[_Point] = []
        self._open: list[_Point] = []  # for the point that is not complete yet

    def __len__(self) -> int:
        return len(self._points)

    @property
    def last_step(self) -> float:
        """The newest step; 0 before the first."""
        newest = self._open or self._points
        return newest[-1][0] if newest else 0.0

    def observe(self, step: float, loss: float, at_s: float) -> None:
        """Record one update: its version, its loss, and its Unix time. A time before the newest time is replaced by the
        newest time. A step that is not later than the newest step, or a loss that is not finite, is ignored."""
        if not (step > self.last_step and math.isfinite(loss) and math.isfinite(at_s)):
            return
        newest = self._open or self._points
        self._open.append((float(step), max(float(at_s), newest[-1][1] if newest else -math.inf), float(loss)))
        if len(self._open) < self._stride:
            return
        mean = math.fsum(point[2] for point in self._open) / len(self._open)
        self._points.append((*self._open[-1][:2], mean))
        self._open = []
        if len(self._points) == self._most:
            self._halve()

    def _halve(self) -> None:
        pairs = zip(self._points[::2], self._points[1::2], strict=True)
        self._points = [(late[0], late[1], (early[2] + late[2]) / 2) for early, late in pairs]
        self._stride *= 2

    def cut(self, step: float) -> None:
        """Forget the updates after `step`, because they were rolled back."""
        self._open = [point for point in self._open if point[0] <= step]
        while self._points and self._points[-1][0] > step:
            self._points.pop()
            self._open = []

    def curve(self, after: float = 0.0) -> tuple[Floats, Floats]:
        """Return steps and losses of the points after the step `after`, shape (n,) each."""
        points = [point for point in self._points if point[0] > after]
        return np.array([point[0] for point in points]), np.array([point[2] for point in points])

    def step_seconds(self, after: float = 0.0, skip: int = 0) -> Floats:
        """Return the seconds per step between the points after the step `after`, shape (n - 1,), without the first
        `skip` steps."""
        points = np.array([point[:2] for point in self._points if point[0] > after + skip]).reshape(-1, 2)
        seconds: Floats = np.diff(points[:, 1]) / np.diff(points[:, 0])
        return seconds

    @property
    def elapsed_s(self) -> float:
        """The seconds from the first point to the newest."""
        return self._points[-1][1] - self._points[0][1] if self._points else 0.0

    @property
    def first_step(self) -> float:
        """The step of the first point; 0 if there is no point."""
        return self._points[0][0] if self._points else 0.0


@dataclass(frozen=True)
class TunerSettings:
    """The behaviour of the tuner. Raises ValueError for a number out of its range.

    Args:
        every_s: T, seconds between two decisions.
        horizon_s: Δ, seconds for which losses are predicted.
        threshold: S in [0, 1], see `relative_excess`.
        knee_slope: τ < 0, relative change of the loss per step at the knee.
        min_workers: p_min, minimum number of workers, at least 1.
        elapsed_reference: whether to compare with the loss that all workers would have reached by now. False: compare
            with the loss of all workers at the same step, as the paper does.
        fit_span: number of points in the moving average before a curve is fitted; 0: no average.
    """

    every_s: float = 20.0
    horizon_s: float = 10.0
    threshold: float = 0.05
    knee_slope: float = -6e-4
    min_workers: int = 1
    elapsed_reference: bool = False
    fit_span: float = scale_in.FIT_SPAN

    def __post_init__(self) -> None:
        checks.positive(every_s=self.every_s, horizon_s=self.horizon_s, min_workers=self.min_workers)
        checks.fraction(threshold=self.threshold)
        checks.non_negative(fit_span=self.fit_span)
        if not (math.isfinite(self.knee_slope) and self.knee_slope < 0):
            raise ValueError(f"knee_slope: expected a number below 0 (the loss falls), got {self.knee_slope}")


@dataclass(frozen=True)
class TunerVerdict:
    """The tuner's answer: whether a worker should be removed, and why. `score` is s; NaN if none was computed."""

    remove: bool
    why: str
    score: float = math.nan


_Reference = tuple[float, float, float, float, Annotated[float, Meta(gt=0)]]
"""Constants of the reference curve, and seconds of a step."""


class ScaleInTuner(KeptState):
    """Decides whether a worker should be removed, from the losses of a job; the caller reports removals. `workers` is
    p, which is P at the start. `score` is the function whose result is compared with the threshold."""

    KEPT: ClassVar = {
        "workers": Annotated[int, Meta(ge=1)], "knee": float, "confirmations": int, "looked_at_step": float,
        "reference": _Reference, "removals": int, "removed_step": float, "next_s": float,
        "step_times": list[tuple[int, float, int]],
    }  # fmt: skip

    def __init__(self, settings: TunerSettings, workers: int, score: Score = scale_in.relative_excess) -> None:
        checks.positive(workers=workers)
        self.settings = settings
        self._score = score
        self.workers = workers
        self.removals = 0
        self._knee: float | None = None  # candidate, or the knee once there is a reference
        self._confirmations = 0
        self._looked_at_step = 0.0  # newest step at the last look for the knee
        self._reference: _Reference | None = None
        self._removed_step = 0.0
        self._next_s = -math.inf  # time before which there is no decision
        self._step_times: list[tuple[int, float, int]] = []  # workers, mean seconds, number of steps

    @property
    def knee_step(self) -> float | None:
        """The step of the knee; None before it is certain."""
        return self._knee if self._reference is not None else None

    def ask(self, history: LossHistory, now_s: float) -> TunerVerdict:
        """Return whether a worker should be removed now. At most one answer in `every_s` seconds is yes. If the caller
        does not remove a worker, the answer is repeated only after `every_s`."""
        self._removed_step = min(self._removed_step, history.last_step)  # after a roll-back
        if self._reference is None:
            why = self._look_for_the_knee(history)
            if why:
                return TunerVerdict(False, why)
        if now_s < self._next_s:
            return TunerVerdict(False, f"the next decision is due in {self._next_s - now_s:.0f} s")
        self._next_s = now_s + self.settings.every_s
        if self.workers <= self.settings.min_workers:
            return TunerVerdict(False, f"{self.workers} workers are the least that may work")
        if self.removals == 0:
            return TunerVerdict(True, f"the loss curve has its knee at update {self._knee:.0f}")
        return self._compare(history)

    def _look_for_the_knee(self, history: LossHistory) -> str:
        """Return the reason why there is no reference curve yet; "" if there is one."""
        settings = self.settings
        if history.last_step <= self._looked_at_step:
            self._looked_at_step = min(self._looked_at_step, history.last_step)  # after a roll-back
            return "no update since the last decision"
        self._looked_at_step = history.last_step
        steps, losses = history.curve()
        at = scale_in.knee(steps, losses, settings.knee_slope, scale_in.SPAN)
        if at is None or self._knee is None or at > self._knee:
            self._knee, self._confirmations = at, 0
        else:
            self._confirmations += 1
        if self._knee is None or self._confirmations < _CONFIRMATIONS:
            return "the loss curve has no knee yet"
        curve = scale_in.fit_reference(steps, scale_in.ewma(losses, settings.fit_span))
        step_s = scale_in.mean_step_s(history.step_seconds())
        if curve is None or step_s is None:
            return "no reference curve fits the losses yet"
        self._reference = (*curve.theta, step_s)
        return ""

    def _compare(self, history: LossHistory) -> TunerVerdict:
        settings = self.settings
        assert self._reference is not None
        steps, losses = history.curve(after=self._removed_step)
        if len(steps) < scale_in.MIN_POINTS:
            return TunerVerdict(False, f"{len(steps)} losses since the last removal, {scale_in.MIN_POINTS} are needed")
        curve = scale_in.fit_slow(steps, scale_in.ewma(losses, settings.fit_span))
        step_times = self._step_time_now(history)
        if curve is None or not step_times:
            return TunerVerdict(False, "no curve fits the losses since the last removal")
        a, exponent, c, floor, reference_step_s = self._reference
        reference = Pace(ReferenceCurve((a, exponent, c, floor)), reference_step_s)
        step = reference_step = history.last_step
        if settings.elapsed_reference:
            reference_step = history.first_step + history.elapsed_s / reference.step_s
        score = self._score(step, settings.horizon_s, reference, Pace(curve, step_times[0][1]), reference_step)
        why = (
            f"the loss in {settings.horizon_s:g} s is predicted to be {score:+.1%} from that of all workers, with a "
            f"threshold of {settings.threshold:.1%}"
        )
        return TunerVerdict(score < settings.threshold, why, score)

    def removed(self, history: LossHistory, now_s: float) -> None:
        """Record that a worker was removed."""
        self._step_times += self._step_time_now(history)
        self.workers -= 1
        self.removals += 1
        self._removed_step = history.last_step
        self._next_s = now_s + self.settings.every_s

    def gain_of_removal(self, history: LossHistory) -> float | None:
        """Return Perf/$ with one worker fewer, divided by the current Perf/$, for the same steps and prices.

        The measured step time with w workers is d(w) = a + b * w. The run time is proportional to d(w), and the cost to
        w * d(w). Returns None if step times were measured with only one number of workers.
        """
        measured = [*self._step_times, *self._step_time_now(history)]
        if len({workers for workers, _, _ in measured}) < 2:
            return None
        times = scale_in.fit_step_times(*zip(*measured, strict=True))
        workers = self.workers
        now_s, then_s = times.seconds(workers), times.seconds(workers - 1)
        if workers < 2 or now_s <= 0 or then_s <= 0:
            return None
        return now_s**2 * workers / (then_s**2 * (workers - 1))

    def _step_time_now(self, history: LossHistory) -> list[tuple[int, float, int]]:
        skip = _IGNORED_STEPS if self.removals else 0
        seconds = history.step_seconds(self._removed_step, skip)
        step_s = scale_in.mean_step_s(seconds)
        return [] if step_s is None else [(self.workers, step_s, len(seconds))]
