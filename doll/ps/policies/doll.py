"""DOLL: an update is made of K gradients of distinct batches, all computed at the same version (Algorithms 3 and 4)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from doll.ps.policies.base import BatchId, Policy, PolicySpec, PolicyView, PooledConfig


class DollPolicyConfig(PooledConfig):
    """Groups of K batches, all computed at the same version (the DOLL paper, Algorithms 3 and 4)."""

    serial_updates: ClassVar[bool] = True
    name: Literal["doll"] = "doll"
    group_size: PositiveInt = Field(default=4, description="K: batches per model update")

    def batches_per_update(self, num_workers: int) -> int:
        return self.group_size


class Doll(Policy):
    """Groups of K batches.

    The group consists of the held batches and the batches being computed. When a batch drops out, the next waiting
    batch takes its place at the same version. The next grant goes to the worker with the fewest batches in the group,
    so that gradients are computed in parallel. Among equal workers, the number of grants since a worker's last one plus
    the number of its waiting batches decides, so that a worker that joins or is behind is in every group
    (docs/decisions/0093).
    """

    name: ClassVar[str] = "doll"
    exact_version: ClassVar[bool] = True

    def __init__(self, group_size: int) -> None:
        if group_size < 1:
            raise ValueError(f"expected a group size K >= 1, got {group_size}")
        self.group_size = group_size
        self._candidates = _Candidates()
        self._last_turns: dict[int, int] = {}  # by worker: number of its last grant, counted over all workers
        self._num_turns = 0

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        for number in workers:
            worker = view.worker(number)
            turn = self._last_turns.get(number, -math.inf) - worker.waiting
            order = (worker.held + worker.computing, turn) if worker.waiting else None
            self._candidates.set(number, order)

    def start(self, view: PolicyView) -> Sequence[int]:
        in_group, size = view.num_held + view.num_computing, self.batches_needed(view)
        if in_group == 0 and view.num_waiting < size:
            return ()  # a group is opened only if it can be filled at once
        if in_group >= size or not view.num_waiting:
            return ()
        worker = self._candidates.first()
        self._num_turns += 1
        self._last_turns[worker] = self._num_turns
        return (worker,)

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches() if view.num_held and view.num_held >= self.batches_needed(view) else ()

    def batches_needed(self, view: PolicyView) -> int:
        """Return K, or the number of batches that are left of a source that has ended."""
        return self.group_size if view.num_left is None else min(self.group_size, view.num_left)


class _Candidates:
    """Workers with a waiting batch, ordered by (batches in the group, turn)."""

    def __init__(self) -> None:
        self._order: dict[int, tuple[int, float]] = {}
        self._heap: list[tuple[tuple[int, float], int]] = []  # also entries that are out of date

    def set(self, worker: int, order: tuple[int, float] | None) -> None:
        """Set the worker's place in the order; None: it has no waiting batch."""
        if order is None:
            self._order.pop(worker, None)
        elif self._order.get(worker) != order:
            self._order[worker] = order
            heappush(self._heap, (order, worker))
        if len(self._heap) > 2 * len(self._order) + 64:
            self._heap = [(order, worker) for worker, order in self._order.items()]
            heapify(self._heap)

    def first(self) -> int:
        """Return the first worker in the order; there must be one."""
        while self._order.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][1]


SPEC = PolicySpec("doll", DollPolicyConfig, lambda config: Doll(config.group_size))
