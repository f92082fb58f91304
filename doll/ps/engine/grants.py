"""The grants of all workers: the valid grants, the held ones, and counts over all workers. Pure.

A grant is valid ("standing") from its creation until its batch is applied or taken back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count

from doll.errors import IllegalEventError
from doll.ps.engine.batch_queue import ActiveGrant, PushedSet
from doll.ps.engine.membership import Worker
from doll.ps.policies.base import BatchId, Policy
from doll.records.control import Push


class Grants:
    """The standing grants by number, and the counts that policies use. No call looks at all workers.

    Attributes:
        num_waiting: number of batches that may be granted now, over all workers.
        num_computing: number of granted batches whose gradients have not arrived.
        num_held: number of batches whose gradients are at the server.
        named_versions: versions that unanswered grants name, each with the number of these grants. The workers of these
            grants may still have to read the weights. If the policy allows later weights, only the newest grants count.
        changed: workers whose counters have changed since the last report to the policy, in the order of the changes.
    """

    def __init__(self, workers: Sequence[Worker], owners: Sequence[Worker], policy: Policy) -> None:
        """`owners`: the worker that serves each partition."""
        self.num_waiting = self.num_computing = self.num_held = 0
        self.named_versions: dict[int, int] = {}
        self.changed: dict[int, None] = dict.fromkeys(range(len(workers)))
        self._workers = workers
        self._owners = owners
        self._policy_name = policy.name
        self._is_exact = policy.exact_version
        self._standing: dict[int, ActiveGrant] = {}
        self._held: dict[int, BatchId] = {}  # standing grants whose gradients are at the server
        # Only for a policy of exact versions: numbers of grants, increasing. Some are not being computed any more.
        self._computing_numbers: deque[int] = deque()
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._standing)

    def held_batches(self) -> list[BatchId]:
        return [self._held[number] for number in sorted(self._held)]

    def get(self, number: int) -> ActiveGrant | None:
        return self._standing.get(number)

    def next_number(self) -> int:
        """Return a number that no grant of this term has."""
        return next(self._numbers)

    def note_change(self, worker: Worker) -> None:
        """Note that the worker's counters may have changed. Every method that changes them calls this last."""
        waiting = _grantable(worker)
        self.num_waiting += waiting - worker.waiting
        worker.waiting = waiting
        self.changed[worker.number] = None

    def grant(self, worker: Worker, version: int, min_version: int, now: float) -> ActiveGrant:
        grant = worker.queue.grant(next(self._numbers), worker.number, version, min_version, now)
        self._standing[grant.number] = grant
        self.num_computing += 1
        self.named_versions[version] = self.named_versions.get(version, 0) + 1
        if self._is_exact:
            self._computing_numbers.append(grant.number)
        self.note_change(worker)
        return grant

    def release(self, grant: ActiveGrant) -> bool:
        """Note that this grant does not need its weights any more. Return whether no other grant needs them either."""
        if not grant.names:
            return False
        grant.names = False
        self.named_versions[grant.version] -= 1
        if self.named_versions[grant.version]:
            return False
        del self.named_versions[grant.version]
        return True

    def hold(self, pushed: PushedSet) -> Worker:
        """Note that the gradient of this set is at the server, and return the set's worker."""
        worker = self._workers[pushed.grants[0].worker]
        worker.queue.hold(pushed)
        self.num_computing -= len(pushed.grants)
        self.num_held += len(pushed.grants)
        for grant in pushed.grants:
            self._held[grant.number] = grant.batch_id
        self.note_change(worker)
        return worker

    def take_back(self, worker: Worker, batch: int) -> list[ActiveGrant]:
        """Return `batch` and every later computing batch to the queue; return their grants, the latest first."""
        taken = worker.queue.take_back(batch)
        self.num_computing -= len(taken)
        for grant in taken:
            del self._standing[grant.number]
        self.note_change(worker)
        return taken

    def give_back(self, batch_id: BatchId) -> PushedSet:
        """Return a held batch to the queue, and return its set. Raises IllegalEventError if the batch is not the last
        granted batch of its worker, or if its set contains other batches."""
        worker = self._owners[batch_id.partition]
        grant = worker.queue.give_back(batch_id)
        if grant is None or grant.pushed is None or len(grant.pushed.grants) > 1:
            raise IllegalEventError(
                f"policy {self._policy_name} voids batch {batch_id.number} of partition {batch_id.partition}: expected "
                "the last one under way, pushed by itself"
            )
        del self._standing[grant.number], self._held[grant.number]
        self.num_held -= 1
        self.note_change(worker)
        return grant.pushed

    def apply(self, group: Iterable[BatchId]) -> list[PushedSet]:
        """Count these batches as applied, and return their sets in the order of their first grants.

        Raises:
            IllegalEventError: a batch is not the first held one of its worker, a set is not complete, or a gradient
                of the current version would not be applied.
        """
        applied: dict[PushedSet, int] = {}
        for batch_id in group:
            worker = self._owners[batch_id.partition]
            grant = worker.queue.apply(batch_id)
            if grant is None or grant.pushed is None:
                raise IllegalEventError(
                    f"policy {self._policy_name} applies batch {batch_id.number} of partition {batch_id.partition} "
                    "out of order"
                )
            del self._standing[grant.number], self._held[grant.number]
            self.num_held -= 1
            worker.applied += 1
            applied[grant.pushed] = applied.get(grant.pushed, 0) + 1
            self.note_change(worker)
        for pushed, num_applied in applied.items():
            if num_applied < len(pushed.grants):
                raise IllegalEventError(
                    f"policy {self._policy_name} applies {num_applied} batches of a set of {len(pushed.grants)} "
                    f"(grant {pushed.number}): their gradients are one sum"
                )
        if self._is_exact and self._standing:
            version = next(iter(self._standing.values())).version
            raise IllegalEventError(
                f"policy {self._policy_name} leaves {len(self._standing)} batches of version {version} behind: "
                "expected all that were granted in one update, since no later one may use their gradients"
            )
        self._forget_answered()
        return sorted(applied, key=lambda pushed: pushed.number) if len(applied) > 1 else list(applied)

    def is_first_computing(self, number: int) -> bool:
        """Return whether all grants below `number` have their gradients. Only for policies of exact versions."""
        self._forget_answered()
        return self._computing_numbers[0] == number

    def _forget_answered(self) -> None:
        numbers = self._computing_numbers
        while numbers and ((grant := self._standing.get(numbers[0])) is None or grant.held):
            numbers.popleft()


def is_allowed(push: Push, grants: Sequence[ActiveGrant], policy: Policy, version: int) -> bool:
    """Return whether the content of `push` fits the grants that it answers. `version`: version of the model."""
    takes_sets = policy.exact_version or policy.batches_per_push > 1
    if push.version > version or (len(grants) > 1 and not takes_sets):
        return False
    if push.holds_back and not policy.holds_back:
        return False
    for grant, item in zip(grants, push.batches, strict=True):
        used = push.version if item.version < 0 else item.version
        if not grant.min_version <= used <= version or item.n_samples < 0 or item.dead_samples < 0:
            return False
        if not 0 <= item.total_weight < math.inf:
            return False
    return True


def _grantable(worker: Worker) -> int:
    """Return the number of this worker's batches that may be granted now."""
    return len(worker.queue.waiting) if worker.is_live and not worker.stalled else 0
