"""A worker's protocol with the parameter server: events in, actions out, no I/O, no clock.

It keeps every batch until the server reports it durable, announces it, answers grants and joins again when a new server
sends Hello. Announcing again makes up for any lost message; a message that comes twice is refused by the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from doll.records import (
    Alive,
    Announce,
    AnyRecord,
    Durable,
    Fence,
    Grant,
    Hello,
    Join,
    Leave,
    Nack,
    NewVersion,
    Push,
    PushedBatch,
    Settle,
    Stop,
    Welcome,
)

ALIVE_EVERY_S = 1.0
# A lost announcement is repeated within this time; one small message per worker.
ANNOUNCE_EVERY_S = 3.0
# An announcement takes milliseconds through Kafka. With so many batches announced, no group waits for one.
_ENOUGH_ANNOUNCED = 8


@dataclass(slots=True)
class Batch:
    """A decoded batch that the worker holds until it is durable.

    `data` is what the gradient needs (opaque here), `num_samples` how many usable samples it has.
    """

    number: int
    data: Any
    num_samples: int
    complete_at_s: float
    dead: tuple[int, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()
    lost: tuple[tuple[int, int], ...] = ()
    dead_samples: int = 0


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """What one batch of a set contributes; `dead`, `dead_samples` and `num_samples` are of this computation: at another
    version they may differ."""

    num_samples: int
    loss_sum: float = 0.0
    metric_sums: Mapping[str, float] = field(default_factory=dict)
    dead: tuple[int, ...] = ()
    dead_samples: int = 0
    compute_s: float = 0.0
    version: int = -1  # of the weights that it was computed at; -1: no weights were needed


@dataclass(frozen=True, slots=True)
class GradientDone:
    """The sum of the gradients of a grant's first batches is in the blob store under `key`.

    `key` is \"\" when none of them holds a usable sample. `is_kept`: nothing is stored yet, since more batches belong
    to the same push; the next that is stored holds these as well.
    """

    key: str
    version: int  # of the weights that it was computed at
    batches: tuple[ComputedBatch, ...]  # at least one, but for the rest that is pushed when the worker leaves
    fetch_s: float = 0.0
    store_s: float = 0.0
    is_kept: bool = False
    holds_back: bool = False  # a part of the steps stays in the worker (`doll.ps.settling`)


# --- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send this record to the parameter server, in order."""

    record: AnyRecord


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute this grant's gradients on these batches; report `gradient_done`, also in parts, or `weights_missing`."""

    grant: Grant
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """There are newer weights than a grant may ask for: compute on nothing older from now on."""

    weights: NewVersion


@dataclass(frozen=True, slots=True)
class StoreRest:
    """Store what is held back of the steps of batches below `until`; report `rest_stored`."""

    term: int
    until: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Batches below `until` are durable: acknowledge their offsets to Kafka, in order."""

    until: int


@dataclass(frozen=True, slots=True)
class Exit:
    """End this process. `code` 0: the job is over or another took this place; 1: restart me."""

    code: int
    reason: str


WorkerAction = Send | Compute | Offer | StoreRest | Acknowledge | Exit


class WorkerCore:
    """One process of a worker, from its Welcome on."""

    def __init__(
        self, welcome: Welcome, *, max_pending: int, now: float, market: str = "", incarnation: int = 0
    ) -> None:
        self.worker = welcome.worker
        self.process = welcome.process
        self.session = welcome.session
        self.term = welcome.term
        self.origin = welcome.origin
        self.generation = welcome.generation
        self.max_pending = max_pending
        self.market = market
        self.incarnation = incarnation
        self.draining = False
        self._batches: deque[Batch] = deque()  # not durable, consecutive numbers from self._durable
        self._durable = welcome.next_batch
        # What the server reports durable; ahead of `_durable` while batches that a predecessor announced are unread.
        self._reported_durable = welcome.next_batch
        self._announced = welcome.next_batch
        self._granted_until = welcome.next_batch  # behind the last batch that was granted
        self._newest: dict[int, int] = {}  # batch -> newest grant of this server, answered or not
        self._owed: dict[int, int] = {}  # batch -> of these, those that are not answered
        self._kept: list[PushedBatch] = []  # computed, and pushed with the next ones; consecutive
        self._unconfirmed: dict[int, Push] = {}  # batch -> the push that answers its newest grant
        self._held_back_until = 0  # of batches below it a part of the steps is only here; 0: of none
        self._rest: Push | None = None  # the last one, until a grant confirms it
        self._alive_at_s = now
        self._announced_at_s = now
        self.next_offset = 0
        self.lag = 0

    @property
    def retained(self) -> int:
        """Batches held that are not durable."""
        return len(self._batches)

    @property
    def reported_durable(self) -> int:
        """Batches below this one are in the durable model, by the server's last report."""
        return self._reported_durable

    @property
    def next_batch(self) -> int:
        """The batch that comes next out of the stream."""
        return self._durable + len(self._batches)

    @property
    def has_room(self) -> bool:
        """May another batch be read? Otherwise the stream waits (back-pressure)."""
        return len(self._batches) < self.max_pending

    @property
    def busy(self) -> bool:
        """A granted gradient has not been computed yet."""
        return len(self._owed) > len(self._kept)

    @property
    def rest(self) -> StoreRest | None:
        """What must be stored before the worker leaves: contributions that are computed, and not sent whole."""
        if self._kept or self._held_back_until:
            return StoreRest(self.term, self._held_back_until)
        return None

    def batch_ready(self, batch: Batch) -> list[WorkerAction]:
        """The next batch of the stream is complete and decoded.

        It is announced immediately where nothing is being computed, or where the server has few announced batches left
        to grant; else after a tick, with those that come until then: a message for each batch would cost more than it.

        Raises:
            ValueError: it is not the next one.
        """
        if batch.number != self.next_batch:
            raise ValueError(f"expected batch {self.next_batch}, got {batch.number}")
        self._batches.append(batch)
        if batch.number < self._reported_durable:
            return self._forget_durable()  # the server does not report it again
        return self._announce_if_few()

    def on_record(self, record: AnyRecord, now: float) -> list[WorkerAction]:
        """A record came on this worker's `commands` partition."""
        match record:
            case Fence() if record.process == self.process:
                return [Exit(0, "fenced: a newer process of this worker has joined")]
            case Fence():
                return []
            case Hello() if record.term >= self.term:
                # Old grants are void: their server is gone, or it has lost track of us.
                self.term = record.term
                self._forget_grants()
                return [] if self.draining else [Send(self.join())]
            case Welcome() if record.term >= self.term:
                return self._on_welcome(record)
            case Grant() if record.term == self.term and record.session == self.session and record.grant_ids:
                return self._on_grant(record)
            case NewVersion() if record.term == self.term:
                return [Offer(record)]
            case Settle() if record.term == self.term and record.session == self.session:
                return self._on_settle(record)
            case Durable() if record.term == self.term:
                return self._on_durable(record.until)
            case Stop() if record.term >= self.term:
                return [Exit(0, f"job ended ({record.reason})")]
        return []

    def join(self) -> Join:
        """What to answer to a Hello."""
        return Join(worker=self.worker, process=self.process, session=self.session, incarnation=self.incarnation)

    def _on_welcome(self, record: Welcome) -> list[WorkerAction]:
        if record.process != self.process:
            if 0 < record.incarnation < self.incarnation:
                # The server has restarted and forgotten this machine, so it gave the slot back to an older one.
                return [] if self.draining else [Send(self.join())]
            if record.session > self.session:
                return [Exit(0, "fenced: a newer process of this worker has been welcomed")]
            return []
        if record.term > self.term:
            self._forget_grants()
        self.term, self.session = record.term, record.session
        if record.generation != self.generation:
            # The dead letters of the batches held here belong to the run before.
            return [Exit(1, "another run of the job has begun: reading again")]
        if record.origin != self.origin:
            # The same batch number would be other offsets: what is held here must not be announced.
            return [Exit(1, f"the job now begins at offset {record.origin}, not at {self.origin}: reading again")]
        if record.next_batch < self._durable:
            return [
                Exit(
                    1,
                    f"the durable model went back to batch {record.next_batch} of {self._durable}: reading again",
                )
            ]
        if record.next_batch > self.next_batch:
            return [
                Exit(
                    1,
                    f"the durable model is at batch {record.next_batch}, {self.next_batch} were read: reading again",
                )
            ]
        self._reported_durable = record.next_batch
        return [*self._forget_durable(), *self._announce_all()]

    def _on_grant(self, grant: Grant) -> list[WorkerAction]:
        """Compute what is new. A grant may come again where messages were lost: what is being computed is not begun a
        second time, and what was answered is answered again."""
        if grant.grant_ids[0] > self._newest.get(grant.first, -1):  # else it comes again, and confirms nothing
            self._confirm_pushes(grant.version)
        end = grant.first + len(grant.grant_ids)
        if not self._durable <= grant.first < end <= self.next_batch:
            return [self._nack(grant, "batch")]
        self._granted_until = max(self._granted_until, end)
        self._rest = None  # no batch is granted while a rest is awaited
        new: list[int] = []
        if (
            self._kept
            and grant.first <= self._kept[-1].batch
            and grant.grant_ids[0] > self._newest.get(grant.first, -1)
        ):
            self._kept = [item for item in self._kept if item.batch < grant.first]  # they are computed again
        pushes: dict[int, Push] = {}  # by their first grants
        for batch, number in enumerate(grant.grant_ids, grant.first):
            newest = self._newest.get(batch, -1)
            if number == newest and (push := self._unconfirmed.get(batch)) is not None:
                pushes[push.batches[0].grant_id] = push
            elif number > newest or (number == newest and batch not in self._owed):
                self._newest[batch] = self._owed[batch] = number
                self._unconfirmed.pop(batch, None)
                new.append(batch)
        return [*map(Send, pushes.values()), *(self._compute(grant, run) for run in _runs(new))]

    def _compute(self, grant: Grant, batches: range) -> Compute:
        part = grant
        if len(batches) < len(grant.grant_ids):
            ids = grant.grant_ids[batches.start - grant.first : batches.stop - grant.first]
            part = msgspec.structs.replace(grant, first=batches.start, grant_ids=ids)
        return Compute(part, tuple(self._batches[number - self._durable] for number in batches))

    def _nack(self, grant: Grant, reason: Literal["weights", "batch"]) -> Send:
        return Send(
            Nack(
                worker=self.worker,
                session=self.session,
                batch=grant.first,
                term=grant.term,
                grant_id=grant.grant_ids[0],
                reason=reason,
            )
        )

    def is_wanted(self, term: int, batch: int, grant_id: int) -> bool:
        """Is this batch's gradient still to be computed for this grant, as far as this worker knows?

        A later grant replaces it; that of a later server may have the same number. May be called from any thread.
        """
        return term == self.term and self._owed.get(batch) == grant_id

    def is_current(self, grant: Grant) -> bool:
        """Is any gradient of this grant still wanted?"""
        return any(self.is_wanted(grant.term, *item) for item in enumerate(grant.grant_ids, grant.first))

    def gradient_done(
        self, grant: Grant, batches: Sequence[Batch], done: GradientDone, begun_at_s: float
    ) -> list[WorkerAction]:
        """The gradient of the first batches of `grant` is in the blob store: of as many as `done` names.

        Args:
            batches: those of `grant`.
            begun_at_s: when their computation began.
        """
        computed = tuple(
            PushedBatch(
                batch=batch.number, grant_id=number, n_samples=item.num_samples, loss_sum=item.loss_sum,
                metric_sums=item.metric_sums, dead=item.dead, gaps=batch.gaps, lost=batch.lost,
                dead_samples=item.dead_samples, compute_s=item.compute_s,
                wait_s=max(0.0, begun_at_s - batch.complete_at_s),
                version=item.version if done.is_kept or item.version != done.version else -1,
            )
            for batch, number, item in zip(batches, grant.grant_ids, done.batches, strict=False)
        )  # fmt: skip
        if done.is_kept:
            if grant.term == self.term:
                self._kept += (item for item in computed if self.is_wanted(grant.term, item.batch, item.grant_id))
            return self._announce_if_few()
        return self._push(grant.term, computed, done)

    def rest_stored(self, order: StoreRest, done: GradientDone) -> list[WorkerAction]:
        """What the worker had computed and not sent is in the blob store."""
        if order.term != self.term:
            return []
        if self._kept:
            return self._push(self.term, (), done)
        self._held_back_until = 0
        self._rest = Push(
            worker=self.worker, session=self.session, term=self.term, version=done.version, key=done.key, batches=(),
            store_s=done.store_s, market=self.market, settles=order.until,
        )  # fmt: skip
        return [Send(self._rest)]

    def _on_settle(self, order: Settle) -> list[WorkerAction]:
        if self._rest is not None and self._rest.settles >= order.until:
            return [Send(self._rest)]  # the server may not have it
        return [StoreRest(order.term, order.until)]

    def _push(self, term: int, computed: tuple[PushedBatch, ...], done: GradientDone) -> list[WorkerAction]:
        kept, self._kept = self._kept, []
        pushed = (*(kept if term == self.term else ()), *computed)
        wanted = [item for item in pushed if self.is_wanted(term, item.batch, item.grant_id)]
        if not wanted:
            return []
        # Where only a part of them is void the server takes none, and grants the others again: it must hear of it.
        push = Push(
            worker=self.worker, session=self.session, term=term, version=done.version, key=done.key, batches=pushed,
            fetch_s=done.fetch_s, store_s=done.store_s, market=self.market, holds_back=done.holds_back,
        )  # fmt: skip
        self._held_back_until = pushed[-1].batch + 1 if done.holds_back else 0
        for item in wanted:
            del self._owed[item.batch]
            self._unconfirmed[item.batch] = push
        return [*self._announce_if_few(), Send(push)]

    def weights_missing(self, grant: Grant) -> list[WorkerAction]:
        """The weights of this grant are not in the blob store: never compute on others."""
        if not self.is_current(grant):
            return []
        self.not_begun(grant)
        return [self._nack(grant, "weights")]

    def not_begun(self, grant: Grant) -> None:
        """This grant's batches are not computed: the worker does not owe them."""
        for batch, number in enumerate(grant.grant_ids, grant.first):
            if self.is_wanted(grant.term, batch, number):
                del self._owed[batch]

    def resend(self) -> list[WorkerAction]:
        """What was sent may be lost: send again the pushes that no later version and no checkpoint has confirmed."""
        pushes = {push.batches[0].grant_id: push for push in self._unconfirmed.values()}.values()
        return [Send(push) for push in (*pushes, *([] if self._rest is None else [self._rest]))]

    def _confirm_pushes(self, version: int) -> None:
        """There is a version `version`: the server has those that were computed at earlier ones, or refuses them."""
        if any(push.version < version for push in self._unconfirmed.values()):
            self._unconfirmed = {at: push for at, push in self._unconfirmed.items() if push.version >= version}

    def _forget_grants(self) -> None:
        self._kept.clear()
        self._held_back_until, self._rest = 0, None
        self._newest.clear()
        self._owed.clear()
        self._unconfirmed.clear()

    def _on_durable(self, until: int) -> list[WorkerAction]:
        self._reported_durable = max(self._reported_durable, until)
        return self._forget_durable()

    def _forget_durable(self) -> list[WorkerAction]:
        before = self._durable
        while self._batches and self._durable < self._reported_durable:
            number = self._batches.popleft().number
            for by_batch in (self._newest, self._owed, self._unconfirmed):
                by_batch.pop(number, None)
            self._durable += 1
        self._announced = max(self._announced, self._durable)
        return [Acknowledge(self._durable)] if self._durable > before else []

    def _announce_all(self) -> list[WorkerAction]:
        self._announced = self._durable
        return self._announce_new()

    def _announce_if_few(self) -> list[WorkerAction]:
        """Announce what is new, unless the server has enough to grant until the next tick."""
        is_enough = self.busy and self._announced - self._granted_until >= _ENOUGH_ANNOUNCED
        return [] if is_enough else self._announce_new()

    def _announce_new(self) -> list[WorkerAction]:
        if self.draining or self._announced == self.next_batch:
            return []
        first, self._announced = self._announced, self.next_batch
        return [Send(Announce(worker=self.worker, session=self.session, first=first, until=self.next_batch))]

    def tick(self, now: float) -> list[WorkerAction]:
        """Time has passed: announce what is new, repeat now and then what is not durable, and report being alive."""
        actions = self._announce_new()
        if now - self._alive_at_s >= ALIVE_EVERY_S:
            self._alive_at_s = now
            alive = Alive(
                worker=self.worker, session=self.session, retained=self.retained, next_offset=self.next_offset,
                lag=self.lag,
            )  # fmt: skip
            actions.append(Send(alive))
        if now - self._announced_at_s >= ANNOUNCE_EVERY_S:
            self._announced_at_s = now
            actions += self._announce_all()
        return actions

    def drain(self) -> None:
        """This process must leave (SIGTERM, a spot notice): announce nothing more; finish what is under way."""
        self.draining = True

    def leave(self, cause: str) -> Sequence[WorkerAction]:
        """Leave the job: what is held goes back to the queue and waits for the next process of this worker."""
        self._forget_grants()
        return [Send(Leave(worker=self.worker, session=self.session, cause=cause))]


def _runs(numbers: Iterable[int]) -> list[range]:
    """Increasing numbers as runs of consecutive ones."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
