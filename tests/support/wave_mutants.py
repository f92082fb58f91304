"""Wrong variants of WSP and of a pipeline's schedule, which tests must see."""

from __future__ import annotations

from collections import deque

from doll.pipeline.schedule import Pipeline
from doll.pipeline.timeline import Kind
from doll.ps.policies.wsp import Wsp


class OneWaveLooser(Wsp):
    def needed(self, batch: int, offset: int) -> int:
        return super().needed(batch, offset) - 1


class Ungated(Wsp):
    def needed(self, batch: int, offset: int) -> int:
        return 0


class LastInFirstOut(Pipeline):
    """A stage does what arrived last, so that minibatches are not complete in order."""

    def _next(self, stage: int) -> tuple[Kind, int] | None:
        waiting: list[tuple[tuple[float, int], Kind, deque[tuple[float, int]]]] = []
        if self._forward[stage]:
            waiting.append((self._forward[stage][-1], "FB" if stage == self._last else "F", self._forward[stage]))
        if self._backward[stage]:
            waiting.append((self._backward[stage][-1], "B", self._backward[stage]))
        if not waiting:
            return None
        _, kind, queue = max(waiting, key=lambda item: item[0])
        return kind, queue.pop()[1]
