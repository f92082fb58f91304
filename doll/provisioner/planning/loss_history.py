"""Loss and time of a job's updates, in bounded memory. Pure; kept over restarts as plain values."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from doll.provisioner.kept_state import KeptState
from doll.theory.checks import Floats

MOST_POINTS: Final = 2048
_Point = tuple[float, float, float]  # newest step, its time, mean loss


class LossHistory(KeptState):
    """The loss of each update before learning from it, and when it was made.

    At `most` points, two neighbours become one with their mean loss, and from then on as many updates make a point.
    So a point stands for `stride` updates, and the memory is bounded for any length of the job.

    Args:
        most: points that are kept, at least 2.
    """

    KEPT: ClassVar = {"stride": Annotated[int, Meta(ge=1)], "points": list[_Point], "open": list[_Point]}

    def __init__(self, most: int = MOST_POINTS) -> None:
        if most < 2:
            raise ValueError(f"most: expected at least 2 points, got {most}")
        self._most = most - most % 2  # neighbours are joined in pairs
        self.clear()

    def clear(self) -> None:
        """Forget all of it: the job begins again."""
        self._stride = 1
        self._points: list[_Point] = []
        self._open: list[_Point] = []  # of the point that is not complete

    def __len__(self) -> int:
        return len(self._points)

    @property
    def last_step(self) -> float:
        """The newest step; 0 before the first."""
        newest = self._open or self._points
        return newest[-1][0] if newest else 0.0

    def observe(self, step: float, loss: float, at_s: float) -> None:
        """One update. A step that is not later than the newest one, or a loss that is not finite, is passed over.

        Args:
            step: version of the model that it made.
            at_s: when, Unix seconds; a time before the newest one counts as that.
        """
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
        """Forget the updates after `step`: they were rolled back."""
        self._open = [point for point in self._open if point[0] <= step]
        while self._points and self._points[-1][0] > step:
            self._points.pop()
            self._open = []

    def curve(self, after: float = 0.0) -> tuple[Floats, Floats]:
        """Steps and losses of the points after a step, shape (n,) each."""
        points = [point for point in self._points if point[0] > after]
        return np.array([point[0] for point in points]), np.array([point[2] for point in points])

    def step_seconds(self, after: float = 0.0, skip: int = 0) -> Floats:
        """Seconds of a step between the points after a step, shape (n - 1,).

        Args:
            skip: steps after `after` that are left out.
        """
        points = np.array([point[:2] for point in self._points if point[0] > after + skip]).reshape(-1, 2)
        seconds: Floats = np.diff(points[:, 1]) / np.diff(points[:, 0])
        return seconds

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first point to the newest."""
        return self._points[-1][1] - self._points[0][1] if self._points else 0.0

    @property
    def first_step(self) -> float:
        """Step of the first point; 0 before it."""
        return self._points[0][0] if self._points else 0.0
