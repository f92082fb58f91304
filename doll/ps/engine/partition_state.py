"""Where the batches of one partition stand. Pure.

Batch j of a partition covers offsets [origin + j r, origin + (j + 1) r) for r records per batch. Batches are granted,
received and applied in order, so four counters say where each of them stands:

    [0, applied)           in the model
    [applied, received)    gradient held
    [received, granted)    being computed
    [granted, announced)   waiting

The applied batches of a partition are always a prefix of it, so `applied` in a checkpoint says which records the model
of that checkpoint holds; `durable` is `applied` of the newest checkpoint. Which worker serves a partition is in
`doll.ps.engine.assignment`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import is_

from doll.records.control import Push, Skip


@dataclass(slots=True, eq=False)
class ActiveGrant:
    """A grant whose batch is neither applied nor taken back.

    Attributes:
        number: unique within one term.
        version: weights that were current when it was granted, which it names.
        min_version: the oldest weights that the policy allows for it.
        queue_position: place in the order of announcements, kept when the batch goes back to the queue.
        included: batches of its partition in `version`.
        names: whether the weights of `version` are kept for it.
        pushed: the set that its push came in, once that is accepted; the gradient is then being fetched.
        held: the gradient is at the server.
    """

    number: int
    partition: int
    batch: int
    version: int
    min_version: int
    queue_position: int
    granted_at_s: float
    included: int = 0
    names: bool = True
    pushed: PushedSet | None = None
    held: bool = False


@dataclass(slots=True, eq=False)
class PushedSet:
    """Consecutive batches whose gradients came as one sum: they are held, lost and applied together."""

    push: Push
    grants: tuple[ActiveGrant, ...]
    received_at_s: float
    max_change: float = 0.0  # see `doll.ps.model.updater.Updater.max_change`

    @property
    def number(self) -> int:
        """Its first grant's."""
        return self.grants[0].number


@dataclass(frozen=True, slots=True, eq=False)
class LatePush:
    """A push that came after the time limit of its grants. It answers the next grants of its batches.

    Attributes:
        grants: the void ones that it names.
    """

    push: Push
    grants: tuple[ActiveGrant, ...]


@dataclass(slots=True, eq=False)
class Partition:
    """Counters and queues of one partition.

    Attributes:
        origin: offset at which the job began.
        applied: batches in the model; at first all of them are durable.
        leader_epoch: of the last applied batch, see `doll.records.control.PushedBatch`; -1: not known.
        settled: of batches below it nothing is held back: all of their steps are at the server.
        whole: batches below it are in the model with their whole steps.
        timed_out: void grants whose time limit has passed: their batches wait before all others, and are granted to
            nobody.
        timed_out_since_s: when the limited time began.
        waiting: of each waiting batch its place in the order of announcements.
    """

    number: int
    origin: int
    applied: int
    leader_epoch: int = -1
    durable: int = field(init=False)
    announced: int = field(init=False)
    settled: int = field(init=False)
    whole: int = field(init=False)
    held_grants: deque[ActiveGrant] = field(default_factory=deque)
    computing_grants: deque[ActiveGrant] = field(default_factory=deque)
    timed_out: tuple[ActiveGrant, ...] = ()
    timed_out_since_s: float = 0.0
    late: LatePush | None = None
    waiting: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.durable = self.announced = self.settled = self.whole = self.applied

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

    @property
    def unsaved(self) -> int:
        """Batches in the model that no checkpoint holds yet."""
        return self.applied - self.durable

    def offsets(self, batch: int, records_per_batch: int) -> tuple[int, int]:
        """[lo, hi) of a batch."""
        lo = self.origin + batch * records_per_batch
        return lo, lo + records_per_batch

    def is_covered(self, skip: Skip, records_per_batch: int) -> bool:
        """Whether what `skip` says of its offsets covers each of them once."""
        at, end = (self.origin + batch * records_per_batch for batch in (skip.first, skip.until))
        for lo, hi in sorted([*skip.gaps, *skip.lost]):
            if lo != at or hi <= lo:
                return False
            at = hi
        return at == end

    def announce(self, positions: Iterable[int]) -> None:
        """The next batches are complete; one for each place in the order of announcements."""
        before = len(self.waiting)
        self.waiting.extend(positions)
        self.announced += len(self.waiting) - before

    def skip_to(self, batch: int) -> None:
        """The batches below `batch` that are not applied hold no record; none of them is announced."""
        self.applied = self.announced = self.settled = self.whole = batch
        self.leader_epoch = -1

    def forget_waiting(self) -> None:
        """What was announced and not granted has to be announced again."""
        self.timed_out = ()
        self.waiting.clear()
        self.announced = self.granted

    def grant(self, number: int, version: int, min_version: int, now: float) -> ActiveGrant:
        """Grant the first waiting batch.

        Raises:
            IndexError: no batch is waiting.
        """
        position = self.waiting.popleft()
        self.timed_out = ()
        # The batch is `granted` of the time before: it is computing now, and waits no longer.
        grant = ActiveGrant(number, self.number, self.granted, version, min_version, position, now, self.applied)
        self.computing_grants.append(grant)
        return grant

    def begins_with(self, grants: Sequence[ActiveGrant]) -> bool:
        """Whether these are the first computing ones, in order."""
        if len(grants) == 1:
            return grants[0] is self.computing_grants[0]
        first = islice(self.computing_grants, len(grants))
        return len(grants) <= len(self.computing_grants) and all(map(is_, grants, first))

    def hold(self, pushed: PushedSet) -> None:
        """The gradient of this set, whose batches are the first computing ones, is at the server."""
        for _ in pushed.grants:
            grant = self.computing_grants.popleft()
            grant.held = True
            self.held_grants.append(grant)
        if not pushed.push.holds_back:
            self.settled = self.received

    def take_back(self, batch: int) -> list[ActiveGrant]:
        """Return `batch` and every later one without a gradient to the front of the queue: the latest first.

        A later batch must not be applied before an earlier one of the same partition.
        """
        grants = []
        while self.computing_grants and self.computing_grants[-1].batch >= batch:
            grant = self.computing_grants.pop()
            self.waiting.appendleft(grant.queue_position)
            grants.append(grant)
        return grants

    def give_back(self, batch: int) -> ActiveGrant | None:
        """Return a held batch to the front of the queue; None: it is not the last one under way."""
        if self.computing_grants or not self.held_grants or self.held_grants[-1].batch != batch:
            return None
        grant = self.held_grants.pop()
        self.waiting.appendleft(grant.queue_position)
        return grant

    def answered_late(self, push: Push) -> tuple[ActiveGrant, ...]:
        """The void grants that `push` answers: the first of those whose time limit has passed, with no other grant of
        their batches since; none: it answers others."""
        grants = self.timed_out[: len(push.batches)]
        named = [(item.grant_id, item.batch) for item in push.batches]
        return grants if named == [(grant.number, grant.batch) for grant in grants] else ()

    def apply(self, batch: int) -> ActiveGrant | None:
        """Count `batch` as applied; None if it is not the first held one."""
        if not self.held_grants or self.held_grants[0].batch != batch or batch != self.applied:
            return None
        self.applied += 1
        return self.held_grants.popleft()

    def check_invariants(self) -> None:
        """Assert what must hold after every event; for tests."""
        assert self.durable <= self.applied <= self.announced
        assert self.granted + len(self.waiting) == self.announced
        assert [grant.batch for grant in self.timed_out] == list(
            range(self.granted, self.granted + len(self.timed_out))
        ), "the first waiting ones"
        assert len(self.timed_out) <= len(self.waiting)
        grants = [*self.held_grants, *self.computing_grants]
        batches = [grant.batch for grant in grants]
        assert batches == list(range(self.applied, self.granted)), "batches are in flight in order, without a hole"
        assert all(grant.partition == self.number for grant in grants)
        assert all(grant.pushed is not None and grant.held for grant in self.held_grants)
        assert not any(grant.held for grant in self.computing_grants)
        for grant in grants:
            if grant.pushed is not None:
                assert grant in grant.pushed.grants
                assert len({item.held for item in grant.pushed.grants}) == 1, "a set is held as one"
                assert all(item in grants for item in grant.pushed.grants), "a set is applied and lost as one"
