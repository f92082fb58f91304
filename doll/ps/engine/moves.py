"""Partitions that move from one worker to another while the job runs. Pure.

A partition moves while none of its batches is being computed or held and its worker holds back no part of a step. To
reach this state, the server stops grants for the partition and takes back its batches that are being computed. The next
worker reads on after the durable batches, and computes these batches again. A partition moves only to a worker that has
joined and sends heartbeats. A Welcome tells both workers which partitions they serve (docs/decisions/0073, 0093); a
Welcome is also sent if a partition is added (0075).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from doll.ps.engine.assignment import largest_load, reassigned, reassigned_by_load
from doll.ps.engine.durability import Durability, Settling
from doll.ps.engine.grants import Grants
from doll.ps.engine.membership import Membership, Worker
from doll.ps.engine.partition_state import PartitionState
from doll.ps.engine.settings import EngineSettings

_LOOKS: Final = 6  # number of observations in one window


class PartitionLoads:
    """The load of each partition in records per second. The load is the sum of the records learned in the last window
    and the unread records, divided by the length of the window.

    So the load of a partition whose worker keeps up is its rate, and a partition with a backlog has a higher load.
    """

    def __init__(
        self, partitions: Sequence[PartitionState], owners: Sequence[Worker], *, window_s: float, records_per_batch: int
    ) -> None:
        """`owners`: the worker that serves each partition. `window_s`: seconds above 0."""
        self._partitions = partitions
        self._owners = owners
        self._window_s = window_s
        self._records_per_batch = records_per_batch
        self._looks: deque[tuple[float, list[int]]] = deque()  # (when, batches of each partition in the model)

    def observe(self, now: float) -> None:
        """Read the counters if an observation is due. `now` must not decrease."""
        looks = self._looks
        if looks and now - looks[-1][0] < self._window_s / _LOOKS:
            return
        looks.append((now, [partition.applied for partition in self._partitions]))
        while len(looks) > 2 and now - looks[1][0] >= self._window_s:
            looks.popleft()

    def loads(self, now: float) -> list[float] | None:
        """Return the load of each partition. None before the first window has passed, or if all loads are 0."""
        if not self._looks or (seconds := now - self._looks[0][0]) < self._window_s:
            return None
        before = self._looks[0][1]
        added = [0] * (len(self._partitions) - len(before))  # partitions that were added since the window began
        counts = zip(self._partitions, [*before, *added], strict=True)
        learned = [partition.applied - count for partition, count in counts]
        unread = self._unread()
        loads = [
            self._records_per_batch * batches / seconds + records / self._window_s
            for batches, records in zip(learned, unread, strict=True)
        ]
        return loads if any(loads) else None

    def _unread(self) -> list[float]:
        """Return the number of unread records of each partition. A worker reports its partitions with the most unread
        records; the remaining records are divided equally among its other partitions."""
        each: dict[Worker, float] = {}
        most: dict[int, int] = {}
        for worker in dict.fromkeys(self._owners):
            own = {number: count for number, count in worker.most_unread if number in worker.queue.partitions}
            most |= own
            others = len(worker.queue.partitions) - len(own)
            each[worker] = max(0, worker.lag - sum(own.values())) / others if others else 0.0
        return [most.get(number, each[worker]) for number, worker in enumerate(self._owners)]


# While the number of workers is constant, partitions move only if this lowers the largest load to this share or less,
_MOST_LEFT: Final = 0.8
# and if the worker with that load has at least this many batches of unread records: otherwise it keeps up.
_BACKLOG_BATCHES: Final = 4


class Moves:
    """The partitions that are to move, and their next workers.

    Attributes:
        num_workers: the job's number of workers. Workers with higher numbers serve nothing, and wait as spares.
        released: workers below `num_workers` that must serve nothing either.
        targets: next worker of each partition that is to move.
        frozen: partitions of `targets` for which nothing is granted any more.
    """

    def __init__(
        self, workers: Sequence[Worker], owners: list[Worker], partitions: list[PartitionState], num_workers: int,
        released: Iterable[int], *, settings: EngineSettings, members: Membership, grants: Grants, settling: Settling,
        durability: Durability,
    ) -> None:  # fmt: skip
        """`workers`: the workers of all slots. `owners`: the worker that serves each partition. All parts of the engine
        share the lists `owners` and `partitions`."""
        self._backlog = _BACKLOG_BATCHES * settings.records_per_batch
        self._every_s = settings.rebalance_s
        self._balanced_at_s: float | None = None
        self._loads = PartitionLoads(
            partitions, owners, window_s=max(1.0, self._every_s), records_per_batch=settings.records_per_batch
        )
        self._workers = workers
        self._owners = owners
        self._partitions = partitions
        self._members = members
        self._grants = grants
        self._settling = settling
        self._durability = durability
        self.targets: dict[int, Worker] = {}
        self.frozen: set[int] = set()
        self._by_taker: dict[Worker, dict[int, None]] = {}  # `targets` by next worker
        self.num_workers, self.released = num_workers, frozenset(released)
        numbers = [worker.number for worker in owners]
        # An assignment by load from before a restart is kept. If the set of workers has changed, partitions are
        # assigned by number until loads are known.
        if not self._every_s or set(numbers) != set(self._serving):
            self._plan(reassigned(numbers, self._serving))

    def serves(self, worker: Worker, number: int) -> bool:
        """Return whether this worker serves a partition that is not frozen for a move."""
        return number in worker.queue.partitions and number not in self.frozen

    @property
    def waits_for_held(self) -> bool:
        """Whether a partition would move if held gradients were in the model: its own, or others of its worker. Only
        with a new version the worker is asked for what it holds back."""
        return any(
            self._partitions[number].held or not self._settling.is_whole(self._owners[number]) for number in self.frozen
        )

    def scale(self, num_workers: int, released: frozenset[int], now: float) -> list[int]:
        """Plan few moves, after which only the first `num_workers` workers except the released ones serve partitions.
        Return the workers that need a Welcome because they keep a partition that was frozen."""
        self.num_workers, self.released, self._balanced_at_s = num_workers, released, now
        owners, serving = [worker.number for worker in self._owners], self._serving
        loads = self._loads.loads(now) if self._every_s else None
        return self._plan(reassigned(owners, serving) if loads is None else reassigned_by_load(owners, serving, loads))

    def balance(self, now: float) -> None:
        """Plan moves if one worker has a backlog and a much higher load than others; at most once in `rebalance_s`."""
        if not self._every_s:
            return
        self._loads.observe(now)
        if self._balanced_at_s is None:
            self._balanced_at_s = now
        if now - self._balanced_at_s < self._every_s or self.targets:
            return
        self._balanced_at_s = now
        loads, serving = self._loads.loads(now), self._serving
        if loads is None or not all(self._workers[number].is_here for number in serving):
            return
        owners = [worker.number for worker in self._owners]
        wanted = reassigned_by_load(owners, serving, loads)
        largest = largest_load(owners, loads)
        fullest = (
            worker
            for worker in set(self._owners)
            if sum(loads[number] for number in sorted(worker.queue.partitions)) >= largest
        )
        if largest_load(wanted, loads) <= _MOST_LEFT * largest and any(item.lag >= self._backlog for item in fullest):
            self._plan(wanted)

    def _plan(self, wanted: Sequence[int]) -> list[int]:
        owners = [worker.number for worker in self._owners]
        self.targets = {number: self._workers[new] for number, new in enumerate(wanted) if new != owners[number]}
        self._by_taker = {}
        for number, taker in self.targets.items():
            self._by_taker.setdefault(taker, {})[number] = None
        kept = self.frozen - self.targets.keys()
        self.frozen -= kept
        return sorted({owners[number] for number in kept})

    @property
    def _serving(self) -> list[int]:
        return [number for number in range(self.num_workers) if number not in self.released]

    def add_partitions(self, count: int, now: float) -> list[int]:
        """Add the partitions of the samples topic up to `count`, which begin at offset 0, and request a checkpoint that
        contains them. Return the workers that need a Welcome because they serve a new partition or keep a frozen
        one."""
        first, met = len(self._partitions), set[int]()
        if count <= first:
            return []
        owners = [worker.number for worker in self._owners]
        wanted = reassigned([*owners, *[None] * (count - first)], self._serving)
        for number in range(first, count):
            partition, worker = PartitionState(number, 0, 0), self._taker(self._workers[wanted[number]])
            self._partitions.append(partition)
            self._owners.append(worker)
            worker.queue.partitions[number] = partition
            self._members.note_partitions(worker, now)
            self._grants.note_change(worker)
            met.add(worker.number)
        self._durability.keep()
        if self._every_s and self._loads.loads(now) is not None:  # the load decides about the other partitions
            wanted = tuple(self.targets.get(number, worker).number for number, worker in enumerate(self._owners))
        else:
            wanted = reassigned([worker.number for worker in self._owners], self._serving)
        return sorted(met.union(self._plan(wanted)))

    def _taker(self, wanted: Worker) -> Worker:
        """Return the first worker of a new partition: `wanted`, or a serving worker if `wanted` is not available."""
        serving = [worker for number in self._serving if (worker := self._workers[number]).queue.partitions]
        if wanted.is_here or wanted in serving or not serving:
            return wanted
        return min(serving, key=lambda worker: (len(worker.queue.partitions), worker.number))

    def carry_out(self, now: float, freeze: Callable[[Worker, PartitionState], None]) -> list[int]:
        """Move the partitions that can move now, and return the workers that need a Welcome. `freeze`: called once
        before a partition moves; after the call, none of its batches is announced or computed."""
        met: set[int] = set()
        for taker, numbers in list(self._by_taker.items()):
            if taker.is_here:
                for number in list(numbers):
                    giver = self._owners[number]
                    if self._move(number, giver, taker, now, freeze):
                        met |= {giver.number, taker.number}
            elif self.frozen:  # the next worker has gone since
                kept = self.frozen & numbers.keys()
                self.frozen -= kept
                met |= {self._owners[number].number for number in kept}
        return sorted(met)

    def _move(
        self, number: int, giver: Worker, taker: Worker, now: float, freeze: Callable[[Worker, PartitionState], None]
    ) -> bool:
        """Move the partition if this is possible now, and return whether it has moved."""
        partition = self._partitions[number]
        if number not in self.frozen:
            self.frozen.add(number)
            freeze(giver, partition)
        if partition.held:
            return False
        if not self._settling.is_whole(giver):
            self._durability.ask()  # workers send their held-back steps for the checkpoint
            return False
        self._durability.moved(giver, taker, partition.unsaved)
        giver.queue.give(partition, taker.queue)
        self._owners[number] = taker
        del self.targets[number], self._by_taker[taker][number]
        if not self._by_taker[taker]:
            del self._by_taker[taker]
        self.frozen.discard(number)
        for worker in (giver, taker):
            self._members.note_partitions(worker, now)
            self._grants.note_change(worker)
        return True
