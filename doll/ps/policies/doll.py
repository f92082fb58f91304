"""DOLL: an update is made of K gradients of distinct batches, all computed at the same version (Algorithms 3 and 4), or
at recent versions: semi-asynchronous groups (docs/decisions/0122)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from typing import ClassVar, Final, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt

from doll.ps.policies.base import BatchId, Policy, PolicySpec, PolicyView, PooledConfig, WorkerCounters

MAX_STALENESS = 10_000
_LATE_BATCHES: Final = 2  # a gradient that is late by the time of so many batches is not expected any more


class DollPolicyConfig(PooledConfig):
    """Groups of K batches, all computed at the same version (the DOLL paper, Algorithms 3 and 4), or at versions that
    are at most `staleness` updates old."""

    name: Literal["doll"] = "doll"
    group_size: PositiveInt = Field(default=4, description="K: batches per model update")
    staleness: NonNegativeInt = Field(
        default=0,
        le=MAX_STALENESS,
        description="τ: how many updates a gradient may miss of those made while it is computed; 0: none, as in the "
        "paper, so that each group waits for its slowest batch; above 0, groups wait only for gradients that would "
        "miss more, and a gradient counts less the more it misses",
    )

    @property
    def serial_updates(self) -> bool:
        return not self.staleness

    def batches_per_update(self, num_workers: int) -> int:
        return self.group_size

    def age_weight(self, age: int) -> float:
        """Return 1 / sqrt(1 + age), as FedBuff does (Nguyen et al., arXiv 2106.06639, section 5)."""
        return float((1 + age) ** -0.5)


class Doll(Policy):
    """Groups of K batches of one version.

    The group consists of the held batches and the batches being computed. When a batch drops out, the next waiting
    batch takes its place at the same version. The next grant goes to the worker with the fewest batches in the group,
    so that gradients are computed in parallel. Among equal workers, the number of grants since a worker's last one plus
    the number of its waiting batches decides, so that a worker that joins or is behind is in every group
    (docs/decisions/0093).
    """

    name: ClassVar[str] = "doll"
    exact_version: ClassVar[bool] = True

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self._candidates = _Candidates()
        self._last_turns: dict[int, int] = {}  # by worker: number of its last grant, counted over all workers
        self._num_turns = 0

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        for number in workers:
            worker = view.worker(number)
            turn = self._last_turns.get(number, -math.inf) - worker.waiting
            order = (worker.held + worker.computing, turn) if self._may_begin(worker) else None
            self._candidates.set(number, order)

    def _may_begin(self, worker: WorkerCounters) -> bool:
        return worker.waiting > 0

    def start(self, view: PolicyView) -> Sequence[int]:
        in_group, size = view.num_held + view.num_computing, self.batches_needed(view)
        if in_group == 0 and view.num_waiting < size:
            return ()  # a group is opened only if it can be filled at once
        if in_group >= size or not self._candidates:
            return ()
        return (self._next(),)

    def _next(self) -> int:
        """Return the first candidate, and count its turn."""
        worker = self._candidates.first()
        self._num_turns += 1
        self._last_turns[worker] = self._num_turns
        return worker

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches() if view.num_held and view.num_held >= self.batches_needed(view) else ()

    def batches_needed(self, view: PolicyView) -> int:
        """Return K, or the number of batches that are left of a source that has ended."""
        return self.group_size if view.num_left is None else min(self.group_size, view.num_left)


class _Begun(NamedTuple):
    """A batch that a worker computes.

    Attributes:
        updates: number of updates before it.
        received: number of the worker's gradients that had come before it.
        ends_s: expected time of its gradient.
    """

    updates: int
    received: int
    begun_s: float
    ends_s: float


class RecentDoll(Doll):
    """Groups of K batches of recent versions: no group waits for a slow worker, and gradients are as fresh as possible.

    A worker computes one batch at a time, on the newest weights. It begins one if the group lacks one, or if its
    gradient would come before the group is full otherwise. So workers of equal speed make the groups of `Doll`, and
    where one is slow, the others take its place; its gradient is in the group of the time at which it comes. How long
    a batch takes is learned from each worker's gradients; one that is late by the time of two batches is not expected.

    An update is made when K gradients are held. It waits while it would leave a batch behind that has missed
    `staleness` updates already, and then takes all gradients that have come: none is older, lost or computed twice.

    Sources: K-batch-async SGD (Dutta et al., arXiv 1803.01113) and the buffer and weights of FedBuff (Nguyen et al.,
    arXiv 2106.06639), with a bound on the age as in GBA (Su et al., arXiv 2205.11048), which drops what is older.
    """

    exact_version: ClassVar[bool] = False
    takes_late_pushes = False  # they may be older than `staleness` updates

    def __init__(self, group_size: int, staleness: int) -> None:
        super().__init__(group_size)
        self.staleness = staleness
        self._begun: OrderedDict[int, _Begun] = OrderedDict()  # by worker, in the order of the grants
        self._ends_s: list[float] = []  # of `_begun`, increasing
        self._batch_s: dict[int, float] = {}  # mean seconds of a worker's batches
        self._usual_s = 0.0  # of all workers
        # Of this server. Versions without a sample do not count: they have the weights of the version before.
        self._num_updates = 0

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        for number in workers:
            worker = view.worker(number)
            if worker.computing or (begun := self._begun.pop(number, None)) is None:
                continue
            del self._ends_s[bisect_left(self._ends_s, begun.ends_s)]
            if worker.applied + worker.held > begun.received:
                took_s = view.now_s - begun.begun_s
                self._batch_s[number] = _mean(self._batch_s.get(number, took_s), took_s)
                self._usual_s = _mean(self._usual_s or took_s, took_s)
        super().changed(view, workers)

    def _may_begin(self, worker: WorkerCounters) -> bool:
        return worker.waiting > 0 and not worker.computing

    def start(self, view: PolicyView) -> Sequence[int]:
        missing = self.batches_needed(view) - view.num_held
        if missing <= 0 or not self._candidates:
            return ()
        number, now_s = self._candidates.first(), view.now_s
        batch_s = self._batch_s.get(number, self._usual_s)
        if missing <= len(self._ends_s) and (not batch_s or missing <= self._num_sooner(now_s, batch_s)):
            return ()
        worker = view.worker(number)
        begun = _Begun(self._num_updates, worker.applied + worker.held, now_s, now_s + batch_s)
        self._begun[number] = begun
        insort(self._ends_s, begun.ends_s)
        return (self._next(),)

    def _num_sooner(self, now_s: float, batch_s: float) -> int:
        """Return how many gradients are expected before that of a batch of `batch_s` seconds that begins now."""
        first = bisect_left(self._ends_s, now_s - _LATE_BATCHES * batch_s)
        return bisect_right(self._ends_s, now_s + batch_s) - first

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        if self._begun and self._age(next(iter(self._begun.values()))) >= self.staleness:
            return ()
        group = super().collect(view)
        self._num_updates += bool(group)
        return group

    def waits_for(self, view: PolicyView) -> Collection[int]:
        if view.num_held < self.batches_needed(view):
            return ()
        return [number for number, begun in self._begun.items() if self._age(begun) >= self.staleness]

    def _age(self, begun: _Begun) -> int:
        """Return how many updates the batch has missed."""
        return self._num_updates - begun.updates


def _mean(mean: float, value: float) -> float:
    return mean + 0.2 * (value - mean)


class _Candidates:
    """Workers with a waiting batch, ordered by (batches in the group, turn)."""

    def __init__(self) -> None:
        self._order: dict[int, tuple[int, float]] = {}
        self._heap: list[tuple[tuple[int, float], int]] = []  # also entries that are out of date

    def __bool__(self) -> bool:
        return bool(self._order)

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


def _make(config: DollPolicyConfig) -> Doll:
    return RecentDoll(config.group_size, config.staleness) if config.staleness else Doll(config.group_size)


SPEC = PolicySpec("doll", DollPolicyConfig, _make)
