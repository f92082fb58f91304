"""Policies in which a worker waits for the slowest one: ssp, essp and wsp.

Only workers with batches to compute count as the slowest: a worker whose partitions are dry is not waited for. Its next
batch gets the minimum of the clocks, like the first batch of a worker that joins (docs/decisions/0077).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from doll.config.policy import ParallelConfig
from doll.ps.policies.base import BatchId, Offer, Policy, PolicyView, PooledConfig, WorkerCounters
from doll.ps.policies.clocks import WaitingAtGate, WorkerClocks


class GatedConfig(PooledConfig, ParallelConfig):
    """The common options of ssp, essp and wsp."""

    @property
    @abstractmethod
    def bound_text(self) -> str:
        """The rule by which a worker waits, in words: the text after "with policy NAME"."""

    @property
    def sends_steps(self) -> bool:
        return True

    def shortfall_text(self, missing: int, *, live: int, workers: int, max_pending_batches: int) -> str:
        if not live:
            return super().shortfall_text(missing, live=live, workers=workers, max_pending_batches=max_pending_batches)
        return (
            f"no update can be made: with policy {self.name} {self.bound_text}, and {missing} of {live} give none "
            "(no push within worker.grant_timeout_s); restart these workers, or choose another policy"
        )


class GatedByClock(Policy):
    """A batch starts when the minimum clock has reached the value that it needs, on weights with all batches below it.

    This value depends on the batch's own place in its stream, not on the number of applied batches of its worker. Each
    push is an update of its own.
    """

    exact_version: ClassVar[bool] = False
    whole_pushes: bool = True  # whether a push begins only after all of its batches are announced

    def __init__(self, history: int) -> None:
        """`history`: how far `needed` may be below the minimum clock, for workers that are not behind the minimum."""
        # Once a batch is applied, the minimum may be `history` + 1 above its clock: so far as the others may be ahead.
        self._clocks = WorkerClocks(2 * history + 1)
        self._gate = WaitingAtGate()
        self._live: dict[int, None] = {}
        self._raised: dict[int, int] = {}  # see `take_raised`

    def max_under_way(self) -> int:
        """Return how many batches of a worker may be granted and not applied. Default: 1."""
        return 1

    def clock(self, applied: int) -> int:
        """Return the clock of a worker with `applied` batches in the model, without its offset. Default: `applied`."""
        return applied

    @abstractmethod
    def needed(self, batch: int, offset: int) -> int:
        """Return the minimum clock that batch `batch` of a stream needs. `offset`: clock offset of a worker that has
        joined after the others."""

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:
        for number in workers:
            worker = view.worker(number)
            if worker.is_live:
                self._live[number] = None
            else:
                self._live.pop(number, None)
            is_active = worker.is_live and self._has_work(worker)
            if self._clocks.set(number, self.clock(worker.applied), is_active=is_active):
                self._raised[number] = view.version
        self._clocks.advance(view.version)
        for number in workers:
            worker = view.worker(number)
            may_start = worker.waiting >= self._least_to_start(worker)
            may_start = may_start and worker.computing + worker.held < self.max_under_way()
            self._gate.set(number, self._needed_by(view, number) if may_start else None)

    def _least_to_start(self, worker: WorkerCounters) -> int:
        """Return how many batches must wait before the next one starts: for the first batch of a push, all batches of
        the push, unless no more batches will come."""
        size = self.batches_per_push
        place = (worker.applied + worker.held + worker.computing) % size
        is_first = not place or not (worker.held or worker.computing)
        return size - place if self.whole_pushes and is_first and not worker.is_done else 1

    def _has_work(self, worker: WorkerCounters) -> bool:
        """Return whether others wait for the worker: it has batches under way or could begin one, even if stalled."""
        return bool(worker.held or worker.computing) or worker.announced >= self._least_to_start(worker)

    def skipped(self, worker: int, batches: int) -> None:
        self._clocks.shift(worker, -(batches // self.batches_per_push))

    def start(self, view: PolicyView) -> Sequence[int]:
        return self._gate.open(self._clocks.minimum)

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches()[:1] if view.num_held else ()

    def min_version(self, view: PolicyView, worker: int) -> int:
        return self._clocks.version_of(self._needed_by(view, worker))

    def clock_offset(self, worker: int) -> int | None:
        return self._clocks.offset(worker) * self.batches_per_push

    def waits_for(self, view: PolicyView) -> Collection[int]:
        return self._clocks.slowest() if self._gate else ()

    def take_raised(self) -> Mapping[int, int]:
        raised, self._raised = self._raised, {}
        return raised

    def minimum_clock(self, version: int) -> int:
        return self._clocks.minimum_at(version) * self.batches_per_push

    def state(self) -> dict[str, Any] | None:
        return self._clocks.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._clocks.restore(state)

    def shortfall(self, view: PolicyView, offers: Sequence[Offer]) -> int:
        """Return the number of workers that give no batch and for which the others wait."""
        if not offers:
            return super().shortfall(view, offers)
        return 0 if view.num_computing or view.num_held else sum(offer.stalled for offer in offers)

    def _needed_by(self, view: PolicyView, number: int) -> int:
        worker = view.worker(number)
        return self.needed(worker.applied + worker.held + worker.computing, self._clocks.offset(number))
