"""A worker's protocol with the parameter server: events in, actions out, no I/O, no clock.

It keeps every batch until the server reports it durable, announces it, answers grants and joins again when a new server
sends Hello. Announcing again makes up for any lost message; a message that comes twice is refused by the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    Push,
    Stop,
    Welcome,
)

ALIVE_EVERY_S = 1.0
# A lost announcement is repeated within this time; one small message per worker.
ANNOUNCE_EVERY_S = 3.0


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
class GradientDone:
    """The gradient of a grant is in the blob store under `key` (\"\" when the batch holds no usable sample).

    `dead`, `dead_samples` and `num_samples` are of this computation: at another version they may differ.
    """

    key: str
    version: int  # of the weights that it was computed at
    loss_sum: float
    metric_sums: dict[str, float]
    compute_s: float
    fetch_s: float
    store_s: float
    num_samples: int
    dead: tuple[int, ...] = ()
    dead_samples: int = 0


# --- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send this record to the parameter server, in order."""

    record: AnyRecord


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute this grant's gradient on this batch; report `gradient_done` or `weights_missing`."""

    grant: Grant
    batch: Batch


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Batches below `until` are durable: acknowledge their offsets to Kafka, in order."""

    until: int


@dataclass(frozen=True, slots=True)
class Exit:
    """End this process. `code` 0: the job is over or another took this place; 1: restart me."""

    code: int
    reason: str


WorkerAction = Send | Compute | Acknowledge | Exit


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
        self._grants: dict[int, Grant] = {}  # batch -> newest grant that is not answered
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
        """A granted gradient has not been sent yet."""
        return bool(self._grants)

    def batch_ready(self, batch: Batch) -> list[WorkerAction]:
        """The next batch of the stream is complete and decoded.

        It is announced immediately where nothing is being computed; else together with the next push, or after a tick:
        a message by itself would cost broker and server as much as a push.

        Raises:
            ValueError: it is not the next one.
        """
        if batch.number != self.next_batch:
            raise ValueError(f"expected batch {self.next_batch}, got {batch.number}")
        self._batches.append(batch)
        if batch.number < self._reported_durable:
            return self._forget_durable()  # the server does not report it again
        return [] if self.busy else self._announce_new()

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
                self._grants.clear()
                return [] if self.draining else [Send(self.join())]
            case Welcome() if record.term >= self.term:
                return self._on_welcome(record)
            case Grant() if record.term == self.term and record.session == self.session:
                return self._on_grant(record)
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
        at = grant.batch - self._durable
        if not 0 <= at < len(self._batches):
            nack = Nack(
                worker=self.worker,
                session=self.session,
                batch=grant.batch,
                term=grant.term,
                grant_id=grant.grant_id,
                reason="batch",
            )
            return [Send(nack)]
        self._grants[grant.batch] = grant
        return [Compute(grant, self._batches[at])]

    def is_current(self, grant: Grant) -> bool:
        """Is this grant's gradient still wanted, as far as this worker knows? A later grant replaces it."""
        return self._grants.get(grant.batch) == grant

    def gradient_done(self, grant: Grant, batch: Batch, done: GradientDone, granted_at_s: float) -> list[WorkerAction]:
        """The gradient is in the blob store."""
        if not self.is_current(grant):
            return []
        del self._grants[grant.batch]
        push = Push(
            worker=self.worker, session=self.session, batch=grant.batch, term=grant.term, grant_id=grant.grant_id,
            version=done.version, key=done.key, n_samples=done.num_samples, loss_sum=done.loss_sum,
            metric_sums=done.metric_sums, dead=done.dead, gaps=batch.gaps, lost=batch.lost,
            dead_samples=done.dead_samples, compute_s=done.compute_s, fetch_s=done.fetch_s, store_s=done.store_s,
            wait_s=max(0.0, granted_at_s - batch.complete_at_s), market=self.market,
        )  # fmt: skip
        return [*self._announce_new(), Send(push)]

    def weights_missing(self, grant: Grant) -> list[WorkerAction]:
        """The weights of this grant are not in the blob store: never compute on others."""
        if not self.is_current(grant):
            return []
        del self._grants[grant.batch]
        nack = Nack(
            worker=self.worker,
            session=self.session,
            batch=grant.batch,
            term=grant.term,
            grant_id=grant.grant_id,
            reason="weights",
        )
        return [Send(nack)]

    def _on_durable(self, until: int) -> list[WorkerAction]:
        self._reported_durable = max(self._reported_durable, until)
        return self._forget_durable()

    def _forget_durable(self) -> list[WorkerAction]:
        before = self._durable
        while self._batches and self._durable < self._reported_durable:
            self._grants.pop(self._batches.popleft().number, None)
            self._durable += 1
        self._announced = max(self._announced, self._durable)
        return [Acknowledge(self._durable)] if self._durable > before else []

    def _announce_all(self) -> list[WorkerAction]:
        self._announced = self._durable
        return self._announce_new()

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
            actions.append(
                Send(
                    Alive(
                        worker=self.worker,
                        session=self.session,
                        retained=self.retained,
                        next_offset=self.next_offset,
                        lag=self.lag,
                    )
                )
            )
        if now - self._announced_at_s >= ANNOUNCE_EVERY_S:
            self._announced_at_s = now
            actions += self._announce_all()
        return actions

    def drain(self) -> None:
        """This process must leave (SIGTERM, a spot notice): announce nothing more; finish what is under way."""
        self.draining = True

    def leave(self, cause: str) -> Sequence[WorkerAction]:
        """Leave the job: what is held goes back to the queue and waits for the next process of this worker."""
        self._grants.clear()
        return [Send(Leave(worker=self.worker, session=self.session, cause=cause))]
