"""A series of limited length. If there are too many points, every second one is deleted; others keep their numbers."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """At most `most` points, by their numbers.

    Attributes:
        points: the kept points; they include the newest one if its number is a multiple of the step.
    """

    def __init__(self, most: int) -> None:
        self.points: dict[int, T] = {}
        self._most = most
        self._step = 1
        self._number = -1

    def add(self, point: T) -> None:
        """Add the next point."""
        self._number += 1
        self.replace(point)

    def replace(self, point: T) -> None:
        """Replace the newest point."""
        if self._number % self._step:
            return
        self.points[self._number] = point
        if len(self.points) > self._most:
            self._step *= 2
            self.points = {number: kept for number, kept in self.points.items() if number % self._step == 0}
