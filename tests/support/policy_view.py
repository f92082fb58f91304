"""What a policy sees, set by a test: the counters of workers, the version and the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from doll.ps.policies.base import BatchId, Policy

NO_BATCH: Final = BatchId(0, 0)


@dataclass
class Counters:
    is_live: bool = True
    session: int = 1
    applied: int = 0
    held: int = 0
    held_change: float = 0.0
    first_held: BatchId = NO_BATCH
    moved: float = 0.0
    computing: int = 0
    waiting: int = 0
    announced: int = 0
    is_done: bool = False
    is_spent: bool = False


class PolicyWorld:
    """A view of workers whose counters a test sets."""

    def __init__(self, policy: Policy, count: int) -> None:
        self.policy, self.workers = policy, [Counters() for _ in range(count)]
        self.version, self.now_s = 0, 0.0
        self.num_left: int | None = None
        self.is_settling = False

    @property
    def num_live(self) -> int:
        return sum(worker.is_live for worker in self.workers)

    @property
    def num_held(self) -> int:
        return sum(worker.held for worker in self.workers)

    @property
    def num_computing(self) -> int:
        return sum(worker.computing for worker in self.workers)

    @property
    def num_waiting(self) -> int:
        return sum(worker.waiting for worker in self.workers)

    def worker(self, number: int) -> Counters:
        return self.workers[number]

    def held_batches(self) -> list[BatchId]:
        return [BatchId(n, w.applied + at) for n, w in enumerate(self.workers) for at in range(w.held)]

    def put(self, number: int, **counters: int) -> None:
        for name, value in counters.items():
            setattr(self.workers[number], name, value)
        self.policy.changed(self, [number])
