"""Partitions that go from one worker to another while the job runs. Pure.

A partition moves between two batches: nothing of it is being computed, no gradient of it is held, and its worker holds
back no part of a step. Until then none of its batches is granted; what was being computed of it is computed again by
the worker that takes it, which reads on from what is durable. It moves only to a worker that is here: until then its
worker keeps it. Both workers join again, by a Hello, and their Welcomes say what they serve now
(docs/decisions/0073). So does a worker that gets a partition which was added to the topic (docs/decisions/0075).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from doll.ps.engine.assignment import reassigned
from doll.ps.engine.durability import Durability, Settling
from doll.ps.engine.grants import Grants
from doll.ps.engine.membership import Membership, Worker
from doll.ps.engine.partition_state import Partition


class Moves:
    """Which partitions are to move, and to whom.

    Attributes:
        num_workers: how many workers the job is to have; the others, above, serve nothing, and wait as spares.
        targets: the worker that each of these partitions goes to.
        frozen: those of them of which nothing is granted any more.
    """

    def __init__(
        self, workers: Sequence[Worker], owners: list[Worker], partitions: list[Partition], num_workers: int, *,
        members: Membership, grants: Grants, settling: Settling, durability: Durability,
    ) -> None:  # fmt: skip
        """
        Args:
            workers: all for which there is place.
            owners: the worker that serves each partition, for all parts of the engine, as are `partitions`.
        """
        self._workers = workers
        self._owners = owners
        self._partitions = partitions
        self._members = members
        self._grants = grants
        self._settling = settling
        self._durability = durability
        self.targets: dict[int, Worker] = {}
        self.frozen: set[int] = set()
        self.plan(num_workers)

    def serves(self, worker: Worker, number: int) -> bool:
        """Whether this worker serves a partition, and goes on to."""
        return number in worker.queue.partitions and number not in self.frozen

    def plan(self, num_workers: int) -> list[int]:
        """Serve by `num_workers` workers, with the fewest moves from now. Workers that must join again: they keep a
        partition of which nothing was granted."""
        self.num_workers = num_workers
        owners = [worker.number for worker in self._owners]
        wanted = reassigned(owners, num_workers)
        self.targets = {number: self._workers[new] for number, new in enumerate(wanted) if new != owners[number]}
        kept = self.frozen - self.targets.keys()
        self.frozen -= kept
        return sorted({owners[number] for number in kept})

    def add_partitions(self, count: int, now: float) -> list[int]:
        """The samples topic has `count` partitions by now: those that are new begin at offset 0, and a checkpoint that
        knows of them is due. Workers that must join again: they serve a new one, or keep one that was to move."""
        first, met = len(self._partitions), set[int]()
        if count <= first:
            return []
        wanted = reassigned([*(worker.number for worker in self._owners), *[self.num_workers] * (count - first)],
                            self.num_workers)  # fmt: skip
        for number in range(first, count):
            partition, worker = Partition(number, 0, 0), self._taker(self._workers[wanted[number]])
            self._partitions.append(partition)
            self._owners.append(worker)
            worker.queue.partitions[number] = partition
            self._members.note_partitions(worker, now)
            self._grants.note_change(worker)
            met.add(worker.number)
        self._durability.keep()
        return sorted(met.union(self.plan(self.num_workers)))

    def _taker(self, wanted: Worker) -> Worker:
        """Who serves a partition that is new: not who has never been here, where another serves already."""
        serving = [worker for worker in self._workers[: self.num_workers] if worker.queue.partitions]
        if wanted.is_here or wanted in serving or not serving:
            return wanted
        return min(serving, key=lambda worker: (len(worker.queue.partitions), worker.number))

    def carry_out(self, now: float, freeze: Callable[[Worker, Partition], None]) -> list[int]:
        """Move the partitions that can move now. Workers that must join again: what they may compute has changed.

        Args:
            freeze: called once before a partition moves: nothing of it is announced or computed afterwards.
        """
        met: set[int] = set()
        for number, taker in list(self.targets.items()):
            partition, giver = self._partitions[number], self._owners[number]
            if not taker.is_here:
                if number in self.frozen:  # it has gone meanwhile
                    self.frozen.discard(number)
                    met.add(giver.number)
                continue
            if number not in self.frozen:
                self.frozen.add(number)
                freeze(giver, partition)
            if partition.held:
                continue
            if not self._settling.is_whole(giver):
                self._durability.ask()  # nothing is held back then
                continue
            self._durability.moved(giver, taker, partition.unsaved)
            giver.queue.give(partition, taker.queue)
            self._owners[number] = taker
            del self.targets[number]
            self.frozen.discard(number)
            for worker in (giver, taker):
                met.add(worker.number)
                self._members.note_partitions(worker, now)
                self._grants.note_change(worker)
        return sorted(met)
