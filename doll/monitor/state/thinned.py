"""A series of points that stays bounded: of too many, every second one is left out, and the rest keep their numbers."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """The points by their numbers, of which at most `most` are kept.

    Attributes:
        points: those that are kept; the newest is among them as long as its number is a multiple of the step.
    """

    def __init__(self, most: int) -> None:
        self.points: dict[int, T] = {}
        self._most = most
        self._step = 1
        self._number = -1

    def add(self, point: T) -> None:
        """The next one."""
        self._number += 1
        self.replace(point)

    def replace(self, point: T) -> None:
        """Replace the newest one."""
        if self._number % self._step:
            return
        self.points[self._number] = point
        if len(self.points) > self._most:
            self._step *= 2
            self.points = {number: kept for number, kept in self.points.items() if number % self._step == 0}
