"""DiLoCo: each worker makes local steps on H batches; then the server makes one outer step on the mean change."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from doll.config.policy import OuterStep, PolicyConfig, SparsePush
from doll.ps.policies.base import BatchId, Policy, PolicySpec, PolicyView, WorkerCounters

MAX_LOCAL_BATCHES = 1_000


class DilocoPolicyConfig(PolicyConfig):
    """Rounds of local steps: each worker computes H batches from the same weights with its own optimizer and sends the
    change; the server makes one outer step on the mean. For slow networks and machines that come and go."""

    supports_tables: ClassVar[bool] = False  # rows would be as old as a round, and have no outer step

    name: Literal["diloco"] = "diloco"
    local_batches: PositiveInt = Field(
        default=16, le=MAX_LOCAL_BATCHES, description="H: batches that a worker computes between two outer steps"
    )
    outer_lr: PositiveFloat | None = Field(
        default=None, le=100, description="learning rate of the outer step; default: 0.7, or 1 with a density below 1"
    )
    outer_momentum: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Nesterov momentum of the outer step; 0: none; default: 1 - 2 / sqrt(local_batches), at least 0 "
        "and at most 0.9 (0.5 for 16 batches); 0 with a density below 1, which allows no other",
    )
    density: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of the numbers of each 4,096 that a worker sends after a round, which are the largest; it "
        "holds the rest back and adds it to the next round's change, as with a significance filter; 0.02 for slow "
        "networks; 1: all",
    )
    bits: Literal[2, 32] = Field(
        default=2,
        description="bits of each number that is sent with a density below 1; what 2 bits do not say is held back, too",
    )
    quorum: float = Field(
        default=0.75, gt=0, le=1, description="share of the live workers whose changes an outer step needs"
    )
    grace_s: NonNegativeFloat = Field(
        default=2.0,
        le=86_400,
        description="how long an outer step waits at most for the other workers once it has its quorum; it never waits "
        "longer than the quorum took, nor for workers that missed an earlier outer step",
    )
    age_discount: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="factor of a change that comes late, for each outer step that was made since its weights; 1: it "
        "counts as much as the others, as it does with a density below 1",
    )

    @model_validator(mode="after")
    def _has_momentum_only_if_dense(self) -> Self:
        if self.density < 1 and self.outer_momentum:
            raise ValueError(
                "outer_momentum: expected 0 with density below 1, because numbers that are held back for some rounds "
                f"act as momentum already; got {self.outer_momentum:g}"
            )
        return self

    @property
    def sends_steps(self) -> bool:
        return True

    @property
    def batches_per_push(self) -> int:
        return self.local_batches

    @property
    def outer_step(self) -> OuterStep | None:
        if self.density < 1:
            return None
        # A job makes 1/H as many outer steps as batches, so a momentum for long rounds would outlast many short ones.
        # Measured for H from 4 to 64 (docs/decisions/0123); at the paper's H of 500 it is the paper's 0.9.
        by_rounds = min(0.9, max(0.0, 1 - 2 / math.sqrt(self.local_batches)))
        momentum = by_rounds if self.outer_momentum is None else self.outer_momentum
        return OuterStep(self.outer_lr or 0.7, momentum, self.age_discount)

    @property
    def sparse_push(self) -> SparsePush | None:
        return SparsePush(self.density, self.bits, self.outer_lr or 1.0) if self.density < 1 else None

    @property
    def publishes_deltas(self) -> bool:
        return self.density < 1

    def batches_per_update(self, num_workers: int) -> int:
        return self.local_batches * num_workers

    def update_rate_per_s(self, rates_per_s: Sequence[float], batch_size: int) -> float:
        """Return the update rate, which the slowest stream of the quorum determines.

        >>> DilocoPolicyConfig(local_batches=4, quorum=0.5).update_rate_per_s([100.0, 40.0], batch_size=10)
        2.5
        """
        fastest = sorted(rates_per_s, reverse=True)
        return fastest[_needed(self.quorum, len(fastest)) - 1] / (batch_size * self.local_batches) if fastest else 0.0


def _needed(quorum: float, num_live: int) -> int:
    return max(1, math.ceil(quorum * num_live - 1e-9))


class Diloco(Policy):
    """Rounds in which each worker pushes the change of H batches, and each round is one update.

    A worker begins a round on the newest weights, as soon as it has H waiting batches and none of its batches is at the
    server. The round ends when every live worker has delivered, except workers that are late or were dry at the end of
    the last round. It also ends a grace time after a quorum has delivered; or, if nobody computes any more because
    streams are dry, a grace time after the last delivery. The grace time is as long as the round has taken so far, at
    most `grace_s`. A change that comes later is in the round in which it comes, and counts less
    (`DilocoPolicyConfig.age_discount`): no sample is dropped.

    Source: Douillard et al., DiLoCo (arXiv 2311.08105); quorum and grace window: Decoupled DiLoCo (2604.21428). The
    weights by age differ from 2605.09126, which gates old changes by their cosine, before the moments of Adam.
    """

    name: ClassVar[str] = "diloco"
    exact_version: ClassVar[bool] = False

    def __init__(
        self, local_batches: int, *, quorum: float = 1.0, grace_s: float = 0.0, is_sparse: bool = False
    ) -> None:
        """`local_batches`: H >= 1. `quorum`: above 0, at most 1. `grace_s`: maximum grace time in seconds, >= 0.
        `is_sparse`: workers hold back a part of their changes."""
        self.batches_per_push = local_batches
        self.holds_back = is_sparse
        self.takes_late_pushes = not is_sparse  # the held-back part may have been requested since
        self._quorum = quorum
        self._grace_s = grace_s
        self._to_start: dict[int, int] = {}  # workers, and the number of batches that each is granted next
        self._delivered: set[int] = set()  # workers with held batches
        self._computing: set[int] = set()  # workers with batches under way
        self._late: set[int] = set()  # of `_computing`: workers without a delivery since an update without them
        self._idle: set[int] = set()  # live workers with neither
        self._dry: set[int] = set()  # of `_idle`: workers that were idle when the last update was made
        self._began_s: float | None = None  # time at which the first batch of this round was granted
        self._ends_since_s: float | None = None  # time from which the grace of the round counts

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        for number in workers:
            worker = view.worker(number)
            (self._delivered.add if worker.held else self._delivered.discard)(number)
            (self._computing.add if worker.computing else self._computing.discard)(number)
            if worker.held or not worker.computing:
                self._late.discard(number)
            is_idle = worker.is_live and not worker.held and not worker.computing and not worker.is_spent
            (self._idle.add if is_idle else self._idle.discard)(number)
            if not is_idle:
                self._dry.discard(number)
            if count := self._next_batches(worker):
                self._to_start[number] = count
            else:
                self._to_start.pop(number, None)

    def _next_batches(self, worker: WorkerCounters) -> int:
        """Return how many batches the worker may be granted: all that its next push lacks; 0 until a whole first push
        is waiting; or all batches that are left of a source that has ended."""
        if worker.held:
            return 0
        size = self.batches_per_push
        place = (worker.applied + worker.computing) % size
        if not worker.computing:
            return size - place if worker.waiting >= size - place else worker.waiting if worker.is_done else 0
        return min(worker.waiting, size - place) if place else 0

    def start(self, view: PolicyView) -> Sequence[int]:
        if not self._to_start:
            return ()
        starts, self._to_start = self._to_start, {}
        if view.is_settling:  # no worker begins another push
            self._to_start = {number: count for number, count in starts.items() if not view.worker(number).computing}
            starts = {number: count for number, count in starts.items() if number not in self._to_start}
        if starts and self._began_s is None:
            self._began_s = view.now_s
        return [number for number in sorted(starts) for _ in range(starts[number])]

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        delivered = len(self._delivered)
        if not delivered or (view.num_computing and delivered < _needed(self._quorum, view.num_live)):
            self._ends_since_s = None
            return ()
        if self._ends_since_s is None:
            self._ends_since_s = view.now_s
        is_complete = self._computing == self._late and (view.is_settling or self._idle == self._dry)
        if not is_complete and view.now_s - self._ends_since_s < self._grace_now_s():
            return ()
        self._late, self._dry = self._computing.copy(), self._idle.copy()
        self._began_s = self._ends_since_s = None
        return view.held_batches()

    def _grace_now_s(self) -> float:
        if self._began_s is None or self._ends_since_s is None:
            return self._grace_s
        return min(self._grace_s, self._ends_since_s - self._began_s)

    def batches_needed(self, view: PolicyView) -> int:
        return self.batches_per_push


def _make(config: DilocoPolicyConfig) -> Diloco:
    return Diloco(config.local_batches, quorum=config.quorum, grace_s=config.grace_s, is_sparse=config.density < 1)


SPEC = PolicySpec("diloco", DilocoPolicyConfig, _make)
