"""The batches of one worker, over all its partitions. Pure.

Batches are granted, received and applied in the order in which the worker announced them. Each batch has two numbers.
Its number in the *worker* counts the earlier granted batches of the worker that were not taken back. Its number in the
*partition* is its batch id. A Grant contains both numbers. Pushes use the worker's numbers, and the ledger uses the
partition's numbers (docs/decisions/0069).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from operator import is_
from typing import NamedTuple

from doll.ps.engine.partition_state import PartitionState
from doll.ps.policies.base import BatchId
from doll.records.control import BatchRange, Push


@dataclass(slots=True, eq=False)
class ActiveGrant:
    """A grant whose batch is neither applied nor taken back.

    Attributes:
        number: number of the grant, unique in one term.
        worker: number of the worker from whose queue the batch was granted.
        version: version of the weights that the grant names, current when it was made.
        min_version: version of the oldest weights that the policy allows for the batch.
        included: number of the worker's batches that are in `version`.
        names: True while this grant keeps the weights of `version` from being deleted.
        pushed: the set of the push that has answered this grant; None: no push was accepted yet.
        held: True if the gradient is at the server.
    """

    number: int
    worker: int
    partition: PartitionState
    batch_id: BatchId
    batch: int
    version: int
    min_version: int
    granted_at_s: float
    included: int = 0
    names: bool = True
    pushed: PushedSet | None = None
    held: bool = False


def left_out_of(grants: Sequence[ActiveGrant]) -> tuple[tuple[int, int], ...]:
    """Return the records that cuts of these batches leave out, as in `Grant.left_out`."""
    if not any(grant.partition.cuts.total for grant in grants):
        return ()
    return tuple(grant.partition.cuts.at(grant.batch_id.number) for grant in grants)


@dataclass(slots=True, eq=False)
class PushedSet:
    """Consecutive batches whose gradients came as one sum. They are held, lost and applied together."""

    push: Push
    grants: tuple[ActiveGrant, ...]
    received_at_s: float
    max_change: float = 0.0  # see `doll.optim.optimizer.Updater.max_change`

    @property
    def number(self) -> int:
        return self.grants[0].number


@dataclass(frozen=True, slots=True, eq=False)
class LatePush:
    """A push that arrived after the time limit of its grants. It will answer the next grants of the same batches.

    Attributes:
        grants: the void grants that the push names.
    """

    push: Push
    grants: tuple[ActiveGrant, ...]


class WaitingBatch(NamedTuple):
    """A batch that is announced and not granted yet."""

    partition: PartitionState
    batch_id: BatchId


@dataclass(slots=True, eq=False)
class BatchQueue:
    """The batches of one worker in the order of their numbers: first held, then computing, then waiting batches.

    Attributes:
        partitions: partitions that the worker serves, by number.
        applied: number of granted batches that are in the model, which is the number of the first held batch.
        settled: number of the first batch of which the worker may still hold back a part. The server has all earlier
            parts.
        whole: number of the first batch whose step may be incomplete in the model.
        pending: number of batches that are announced and not durable.
        timed_out: void grants whose time limit has passed. Their batches wait first in the queue, and are not granted
            again yet.
        timed_out_since_s: time at which the time limit of these grants began.
    """

    partitions: dict[int, PartitionState]
    applied: int
    settled: int = field(init=False)
    whole: int = field(init=False)
    pending: int = 0
    held_grants: deque[ActiveGrant] = field(default_factory=deque)
    computing_grants: deque[ActiveGrant] = field(default_factory=deque)
    waiting: deque[WaitingBatch] = field(default_factory=deque)
    timed_out: tuple[ActiveGrant, ...] = ()
    timed_out_since_s: float = 0.0
    late: LatePush | None = None

    def __post_init__(self) -> None:
        self.settled = self.whole = self.applied

    @property
    def held(self) -> int:
        return len(self.held_grants)

    @property
    def computing(self) -> int:
        return len(self.computing_grants)

    @property
    def received(self) -> int:
        return self.applied + len(self.held_grants)

    @property
    def granted(self) -> int:
        return self.received + len(self.computing_grants)

    def announce(self, run: BatchRange, room: int) -> int | None:
        """Add the complete batches of `run`, at most `room` new ones, and return how many are new. Return None if `run`
        does not follow the announced batches, or contains an announced batch with another end. Raises KeyError if the
        worker does not serve the partition."""
        partition = self.partitions[run.partition]
        begin = partition.announced
        count = max(0, min(run.until - begin, room))
        if run.first > begin or (count and not partition.announce(run, count)):
            return None
        partition.is_short = run.until > partition.announced
        names = map(BatchId, repeat(partition.number), range(begin, begin + count))
        self.waiting.extend(map(WaitingBatch, repeat(partition), names))
        self.pending += count
        return count

    def forget_waiting(self) -> None:
        """Forget the batches that are announced and not granted. The worker will announce them again."""
        self.timed_out = ()
        self.pending -= len(self.waiting)
        for batch in self.waiting:
            batch.partition.forget_waiting()
        self.waiting.clear()

    def withdraw(self, partition: PartitionState) -> None:
        """Forget one partition's announced batches without a grant, because another worker may announce them."""
        self.pending -= partition.announced - partition.granted
        partition.forget_waiting()
        self.waiting = deque(batch for batch in self.waiting if batch.partition is not partition)

    def give(self, partition: PartitionState, taker: BatchQueue) -> None:
        """Give a partition to another worker. All of its announced batches must be applied."""
        taker.partitions[partition.number] = self.partitions.pop(partition.number)
        self.pending -= partition.unsaved
        taker.pending += partition.unsaved

    def grant(self, number: int, worker: int, version: int, min_version: int, now: float) -> ActiveGrant:
        """Grant the first waiting batch. Raises IndexError if no batch is waiting."""
        partition, batch_id = self.waiting.popleft()
        self.timed_out = ()
        partition.computing += 1
        batch = self.applied + len(self.held_grants) + len(self.computing_grants)
        grant = ActiveGrant(number, worker, partition, batch_id, batch, version, min_version, now, self.applied)
        self.computing_grants.append(grant)
        return grant

    def begins_with(self, grants: Sequence[ActiveGrant]) -> bool:
        """Return whether these grants are the first computing ones, in order."""
        if len(grants) == 1:
            return grants[0] is self.computing_grants[0]
        first = islice(self.computing_grants, len(grants))
        return len(grants) <= len(self.computing_grants) and all(map(is_, grants, first))

    def hold(self, pushed: PushedSet) -> None:
        """Note that the gradient of this set is at the server. The set must consist of the first computing batches."""
        for _ in pushed.grants:
            grant = self.computing_grants.popleft()
            grant.held = True
            self.held_grants.append(grant)
            grant.partition.computing -= 1
            grant.partition.held += 1
        if not pushed.push.holds_back:
            self.settled = self.received

    def take_back(self, batch: int) -> list[ActiveGrant]:
        """Return `batch` and every later computing batch to the front of the queue, and return their grants, the latest
        first.

        A later batch must not be applied before an earlier one of the same worker.
        """
        grants = []
        while self.computing_grants and self.computing_grants[-1].batch >= batch:
            grant = self.computing_grants.pop()
            grant.partition.computing -= 1
            self._return(grant)
            grants.append(grant)
        return grants

    def give_back(self, batch_id: BatchId) -> ActiveGrant | None:
        """Return a held batch to the front of the queue. Return None if it is not the last granted batch."""
        if self.computing_grants or not self.held_grants or self.held_grants[-1].batch_id != batch_id:
            return None
        grant = self.held_grants.pop()
        grant.partition.held -= 1
        self._return(grant)
        return grant

    def _return(self, grant: ActiveGrant) -> None:
        self.waiting.appendleft(WaitingBatch(grant.partition, grant.batch_id))

    def answered_late(self, push: Push) -> tuple[ActiveGrant, ...]:
        """Return the void grants that `push` answers. These are the first grants whose time limit has passed, if their
        batches were not granted again. Return () if the push answers other grants."""
        grants = self.timed_out[: len(push.batches)]
        named = [(item.grant_id, item.batch) for item in push.batches]
        return grants if named == [(grant.number, grant.batch) for grant in grants] else ()

    def apply(self, batch_id: BatchId) -> ActiveGrant | None:
        """Count a batch as applied, and return its grant; return None if the batch is not the first held one."""
        if not self.held_grants or self.held_grants[0].batch_id != batch_id:
            return None
        partition = self.held_grants[0].partition
        if partition.applied != batch_id.number:
            return None
        partition.held -= 1
        partition.applied += 1
        self.applied += 1
        return self.held_grants.popleft()

    def skip(self, partition: PartitionState, until: int) -> int:
        """Count the partition's batches below `until` as applied, because they contain no record. They must not be
        announced. Return the number of these batches."""
        count = until - partition.announced
        partition.applied = partition.announced = until
        partition.leader_epoch = -1
        self.pending += count
        return count
