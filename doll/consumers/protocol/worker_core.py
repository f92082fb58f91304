"""A worker's protocol with the parameter server: a state machine from events to actions, without I/O or clock.

The worker keeps every batch until the server reports it as durable. It announces batches, answers grants, and joins
again when a new server sends Hello. It serves any number of partitions, which a Welcome can change. The server numbers
the worker's batches in the order of their grants: a Grant names the partition and the batch of each number, and pushes
use these numbers.

A lost message does no harm, because batches are announced again. Messages that arrive twice or late are handled in
`doll.consumers.protocol.grants`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

import msgspec

from doll.config.fingerprint import difference
from doll.consumers.protocol.grants import WorkerGrants, part_of
from doll.consumers.protocol.skipped_batches import SkippedBatches, SkippedRange
from doll.records.bounds import Bounds, Cuts
from doll.records.control import (
    Alive,
    Announce,
    AnyRecord,
    BatchRange,
    Durable,
    Fence,
    Flush,
    Grant,
    HeldOutScore,
    Hello,
    Join,
    Leave,
    Nack,
    NewVersion,
    Push,
    PushedBatch,
    Served,
    Settle,
    Stop,
    Welcome,
)
from doll.records.event_times import EventTimes

ALIVE_EVERY_S = 1.0
ANNOUNCE_EVERY_S = 3.0  # a lost announcement is repeated within this time; one small message per worker
# An announcement takes milliseconds through Kafka. If so many batches are announced, no group waits for another one.
_ENOUGH_ANNOUNCED = 8


@dataclass(slots=True)
class Batch:
    """A decoded batch that the worker holds until it is durable.

    Attributes:
        number: number of the batch among the worker's batches, from the grant (`Grant.first`). Before the grant, it
            equals `number_in_partition`.
        data: the input of the gradient (not interpreted here).
        order: position in the order in which the worker has read its batches; `WorkerCore` sets it.
    """

    number: int
    data: Any
    num_samples: int
    complete_at_s: float
    dead: tuple[int, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()
    lost: tuple[tuple[int, int], ...] = ()
    dead_samples: int = 0
    skipped: tuple[tuple[str, int], ...] = ()  # samples that the task leaves out, by reason
    leader_epoch: int = -1  # see `doll.consumers.intake.batching.RawBatch`
    partition: int = 0
    times: EventTimes | None = None  # event times of its learned records; None: not known
    held_out: tuple[int, ...] = ()  # offsets of records that are not learned
    number_in_partition: int = -1
    order: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.number_in_partition < 0:
            self.number_in_partition = self.number


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """The contribution of one batch of a set in one computation. If the batch is computed again with other weights,
    other samples may be dead.

    `dead_samples` counts the refused samples in records that are not dead as a whole. `dead_reasons` has the number of
    dead letters for each reason.
    """

    num_samples: int
    loss_sum: float = 0.0
    metric_sums: Mapping[str, float | bytes] = field(default_factory=dict)
    dead: tuple[int, ...] = ()
    dead_samples: int = 0
    compute_s: float = 0.0
    version: int = -1  # version of the weights used; -1: no weights were needed
    dead_reasons: tuple[tuple[str, int], ...] = ()
    weight: float | None = None  # sum of the samples' weights; None: each is 1
    usual: tuple[float, ...] = ()  # as in an Alive
    shared_loss: float | None = None  # see `BatchOutcome`
    held_out_score: HeldOutScore | None = None  # see `PushedBatch`


@dataclass(frozen=True, slots=True)
class GradientDone:
    """The sum of the gradients of a grant's first batches is in the blob store under `key`.

    Attributes:
        key: "" if no batch has a usable sample.
        is_kept: whether nothing is stored yet, because the push needs more batches. The next stored sum contains these
            batches.
        holds: (batch, grant id) of all batches in the stored sum, in order. The push names these batches. Empty: the
            sum contains `batches`.
    """

    key: str
    version: int  # version of the weights used
    batches: tuple[ComputedBatch, ...]  # at least one, except for a rest that is pushed
    fetch_s: float = 0.0
    store_s: float = 0.0
    is_kept: bool = False
    holds_back: bool = False  # a part of the steps stays in the worker (`doll.ps.engine.durability`)
    holds: tuple[tuple[int, int], ...] = ()
    delta_bytes: int = 0  # see `Push`
    is_on_its_way: bool = False  # see `Push`
    absent: bytes = b""  # see `Push`


# --- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send this record to the parameter server, in order."""

    record: AnyRecord


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the gradients of this grant on these batches. Report `gradient_done`, possibly once for each part, or
    `weights_missing`."""

    grant: Grant
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class OfferWeights:
    """Do not compute on older weights than these. They may be newer than the weights that a grant requires."""

    weights: NewVersion


@dataclass(frozen=True, slots=True)
class StoreRest:
    """Store the held-back steps of batches below `until`, and report `rest_stored`."""

    term: int
    until: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Acknowledge the offsets of a partition's batches below `until` to Kafka, in order, because they are durable.
    `left_out` is the number of records that these batches lack compared with full batches, because of cuts."""

    partition: int
    until: int
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Exit:
    """End this process. `code` 0: the job is over, or another process has replaced this one. 1: start it again."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Serve:
    """Stop reading the partitions `gone`, and begin to read the partitions `new`.

    If a partition is in both, the worker drops the partition's batches and reads the partition again.
    """

    gone: tuple[int, ...]
    new: tuple[Served, ...]


WorkerAction = Send | Compute | OfferWeights | StoreRest | Acknowledge | Serve | Exit


@dataclass(slots=True)
class ServedPartition:
    """A partition that this worker serves.

    Attributes:
        origin: offset at which the job began.
        next_batch: the next batch to be read from the log, after skipped batches that are durable.
        reported_durable: number of durable batches according to the server. It can exceed the number of batches that
            were read, because an earlier process of this worker may have announced batches that this process has not
            read yet.
        included: number of its batches in the model, durable or not, when the server was last asked.
        leader_epoch: see `Served`.
        batches: the held batches, in order.
        skipped: the batches without a record that follow `batches`.
        cuts: cuts of the held batches, of batches that the server has decided, and of batches that are being decoded.
        flush_until: offset at which a source has ended. Records below this offset are announced even if they do not
            fill a batch.
    """

    number: int
    origin: int
    next_batch: int
    reported_durable: int
    included: int = 0
    leader_epoch: int = -1
    batches: deque[Batch] = field(default_factory=deque)
    skipped: SkippedBatches = field(default_factory=SkippedBatches)
    cuts: Cuts = field(default_factory=Cuts)
    flush_until: int = 0

    @property
    def durable(self) -> int:
        """The number of the first held batch, or of the next batch if no batch is held."""
        return self.next_batch - len(self.batches)

    def bounds(self, records_per_batch: int) -> Bounds:
        """Return the offsets of the partition's batches, beginning with the first batch that is not durable."""
        return Bounds(self.origin, records_per_batch, self.cuts)

    def agrees(self, item: Served) -> bool:
        """Return whether all durable batches were read, and the batches that the server has decided have the same
        bounds in this process.

        The result may be False if another process has served the partition in the meantime: its batches may have become
        durable, and it may have cut batches that were not decided.
        """
        cuts = self.cuts
        if item.origin != self.origin or item.next_batch < self.durable:
            return True  # the held batches are useless for another reason, see `_problem`
        if item.next_batch > self.skipped.end(self.next_batch):
            return False
        is_same = cuts.before(item.next_batch) == item.left_out
        return is_same and cuts.within(item.next_batch, item.decided) == item.cuts


class WorkerCore:
    """The state of one worker process, from its Welcome on.

    Attributes:
        served: the partitions that it serves, by number.
        retained: number of held batches that are not durable.
    """

    def __init__(
        self, welcome: Welcome, *, max_pending: int, now: float, market: str = "", incarnation: int = 0
    ) -> None:
        self.worker = welcome.worker
        self.process = welcome.process
        self.session = welcome.session
        self.term = welcome.term
        self.served = {item.partition: _begun(item) for item in welcome.served}
        self.generation = welcome.generation
        self.fingerprint = welcome.fingerprint
        self.usual = welcome.usual
        self.run_id = welcome.run_id
        self.grid = welcome.grid
        self.max_pending = max_pending
        self.market = market
        self.incarnation = incarnation
        self.draining = False
        self.most_unread: tuple[tuple[int, int], ...] = ()  # see `Alive`, as `lag`
        self.waiting_for = ""  # the reason why no batch is decoded now; "": batches are decoded
        self.retained = self._num_read = 0
        self._new: list[Batch] = []  # not announced, in the order of arrival
        self._granted: set[tuple[int, int]] = set()  # held batches that are granted or applied
        self._most_at_once = 1  # the most batches of one grant or one push
        self._durable = 0  # the worker's batches below this number are durable
        self._grants = WorkerGrants()  # grants of this server
        self._newest: Grant | None = None  # this server's grant with the newest weights
        self._applied = 0  # batches below this number are in the model
        self._held_back_until = 0  # steps of batches below it are partly held back here; 0: none
        self._rest: Push | None = None  # the newest rest, until it is durable
        self._settling_until = 0  # the rest of batches below it is being stored; 0: none
        self._settled_until = 0  # the rest of batches below it was stored
        self._alive_at_s = now
        self._announced_at_s = now
        self.next_offset = 0
        self.lag = 0

    @property
    def has_room(self) -> bool:
        """Whether another batch may be read. If not, the stream waits (back-pressure)."""
        return self.retained < self.max_pending

    @property
    def busy(self) -> bool:
        """Whether a granted gradient is not computed yet, or a rest is being stored."""
        return self._settling_until > 0 or self._grants.is_busy

    @property
    def rest(self) -> StoreRest | None:
        """The order to store contributions that were not completely sent, before the worker leaves; None if there are
        none."""
        if self._grants.kept or self._held_back_until:
            return StoreRest(self.term, self._held_back_until)
        return None

    def batch_ready(self, batch: Batch) -> list[WorkerAction]:
        """Add the next batch of a partition, which is complete and decoded. Raise ValueError if it is not the next
        batch.

        The batch is announced immediately if the server has only few announced batches left to grant. Otherwise, the
        batch is announced in the next tick together with further batches, because one message for each batch would cost
        more than the wait.
        """
        self.hold(batch)
        partition = self.served[batch.partition]
        if batch.number_in_partition < partition.reported_durable:
            return self._forget_durable(partition)  # the server does not report this batch again
        return self._announce_if_few()

    def hold(self, batch: Batch) -> None:
        """Add a ready batch without announcing it, because more batches follow at once. `announce` announces them
        all."""
        partition = self.served[batch.partition]
        if (number := batch.number_in_partition) != (expected := partition.next_batch):
            raise ValueError(f"expected batch {expected} of partition {partition.number}, got {number}")
        self._num_read += 1
        batch.order = self._num_read
        partition.batches.append(batch)
        partition.next_batch += 1
        self.retained += 1
        self._new.append(batch)

    def skip(self, partition: int, skipped: SkippedRange) -> list[WorkerAction]:
        """Add batches of a partition without a record. While they are in `skipped`, no later batch may be added."""
        served = self.served[partition]
        served.skipped.put(skipped, served.next_batch)
        return self._forget_durable(served) or self._announce_skipped(served)

    def next_of_skipped(self, partition: int, now: float, records_per_batch: int) -> SkippedRange | None:
        """Return one of the skipped batches if it must be passed to `batch_ready` now; see `SkippedBatches.take`."""
        if not self.has_room or self.busy or self.draining:
            return None
        served = self.served[partition]
        hi = served.bounds(records_per_batch).hi(served.next_batch)
        granted = len(self._granted)
        waiting = self.retained - granted
        return served.skipped.take(now, served.reported_durable, hi, waiting=waiting, granted=granted)

    def on_record(self, record: AnyRecord, now: float) -> list[WorkerAction]:
        """Handle a record from this worker's partition of `commands`."""
        match record:
            case Fence() if record.process == self.process:
                return [Exit(0, "fenced: a newer process of this worker has joined")]
            case Fence():
                return []
            case Hello() if record.term >= self.term:
                # Old grants are void: their server is gone, or it does not know this process any more.
                self._void_grants()
                self._follow(record.term)
                return [] if self.draining else [Send(self.join())]
            case Welcome() if record.term >= self.term:
                return self._on_welcome(record)
            case Grant() if record.term == self.term and record.session == self.session and record.grant_ids:
                return self._on_grant(record)
            case NewVersion() if record.term == self.term:
                return [OfferWeights(record)]
            case Flush() if record.term == self.term:
                for number, until in record.until.items():
                    if (served := self.served.get(number)) is not None:
                        served.flush_until = max(served.flush_until, until)
            case Settle() if record.term == self.term and record.session == self.session:
                return self._on_settle(record)
            case Durable() if record.term == self.term:
                return self._on_durable(record)
            case Stop() if record.term >= self.term:
                return [Exit(0, f"job ended ({record.reason})")]
        return []

    def join(self) -> Join:
        return Join(worker=self.worker, process=self.process, session=self.session, incarnation=self.incarnation)

    def _on_welcome(self, record: Welcome) -> list[WorkerAction]:
        if record.process != self.process:
            if 0 < record.incarnation < self.incarnation:
                # The server has restarted without knowing this machine, so it gave the slot to an older machine.
                return [] if self.draining else [Send(self.join())]
            if record.session > self.session:
                return [Exit(0, "fenced: a newer process of this worker has been welcomed")]
            return []
        if record.session != self.session:
            self._void_grants()
        self._follow(record.term)
        self.session = record.session
        if changed := difference(record.fingerprint, self.fingerprint):
            return [Exit(1, f"the parameter server runs another job file now: {changed}: reading it again")]
        if (record.generation, record.run_id) != (self.generation, self.run_id):
            # The dead letters of the held batches belong to the earlier run.
            return [Exit(1, "another run of the job has begun: reading again")]
        if record.grid != self.grid:
            return [Exit(1, "the job was regridded or rolled back, and numbers other batches: reading again")]
        actions = self._serve(record.served)
        for item in record.served:
            served = self.served[item.partition]
            if problem := _problem(served, item):
                return [Exit(1, f"partition {item.partition}: {problem}: reading again")]
            served.reported_durable = item.next_batch
            served.cuts.decided = max(served.cuts.decided, item.decided)
            served.flush_until = max(served.flush_until, item.flush_until)
            actions += self._forget_durable(served)
        self._granted |= {
            (item.partition, number)
            for item in record.served
            for number in range(item.next_batch, min(item.included, self.served[item.partition].next_batch))
        }
        return [*actions, *self._announce_all()]

    def _serve(self, records: Sequence[Served]) -> list[WorkerAction]:
        """Serve exactly these partitions. Drop the held batches of all other partitions; the workers that serve these
        read the batches again. This worker reads a partition again if the server has decided other batches than this
        worker holds, or if more batches are durable than this worker has read."""
        known = [(item, self.served[item.partition]) for item in records if item.partition in self.served]
        kept = {item.partition for item, served in known if served.agrees(item)}
        gone = tuple(number for number in self.served if number not in kept)
        new = tuple(item for item in records if item.partition not in kept)
        if not gone and not new:
            return []
        for number in gone:
            self.retained -= len(self.served.pop(number).batches)
        for item in new:
            self.served[item.partition] = _begun(item)
        self._new = [batch for batch in self._new if batch.partition in self.served]
        self._granted = {name for name in self._granted if name[0] not in gone}
        return [Serve(gone, new)]

    def _on_durable(self, record: Durable) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        for number, until in record.until.items():
            served = self.served.get(number)
            if served is None or until <= served.reported_durable:
                continue
            if served.cuts.before(until) == record.left_out.get(number, 0):  # otherwise a Welcome will follow
                served.reported_durable = until
                actions += self._forget_durable(served)
        self._durable = max(self._durable, record.batches)
        self._grants.forget_below(self._durable)
        if self._rest is not None and self._rest.settles <= self._durable:
            self._rest = None
        return actions

    def _on_grant(self, grant: Grant) -> list[WorkerAction]:
        """Compute the new batches of a grant. A grant may arrive again, even when its batches are in the model. Batches
        that are being computed are not begun again, and batches that were answered are answered again."""
        self._applied = max(self._applied, grant.included)
        is_whole = grant.first >= 0 and len(grant.batches) == len(grant.grant_ids)
        if not is_whole or not all(map(self._find, grant.batches)) or self._means_others(grant):
            return [self._nack(grant, "batch")]
        self._granted.update(grant.batches)
        self._newest = self.newest(grant)
        self._most_at_once = max(self._most_at_once, len(grant.grant_ids))
        answers, orders = self._grants.take(grant)
        return [*map(Send, answers), *(self._compute(order, run) for order, run in orders)]

    def _find(self, name: tuple[int, int]) -> Batch | None:
        """Return a held batch by its partition and its number in the partition; None if no such batch is held."""
        served = self.served.get(name[0])
        at = -1 if served is None else name[1] - served.durable
        return served.batches[at] if served is not None and 0 <= at < len(served.batches) else None

    def _means_others(self, grant: Grant) -> bool:
        """Return whether these held batches have other offsets at the server than at this worker."""
        left_out = tuple(self.served[partition].cuts.at(number) for partition, number in grant.batches)
        return left_out != (grant.left_out or ((0, 0),) * len(left_out))

    def _compute(self, grant: Grant, run: range) -> Compute:
        """Return the order to compute the batches `run` of the grant."""
        part = part_of(grant, run.start - grant.first, run.stop - grant.first)
        held = map(self._find, part.batches)
        return Compute(
            part,
            tuple(replace(batch, number=number) for number, batch in enumerate(held, part.first) if batch is not None),
        )

    def _nack(self, grant: Grant, reason: Literal["weights", "batch"]) -> Send:
        nack = Nack(
            worker=self.worker, session=self.session, batch=grant.first, term=grant.term, grant_id=grant.grant_ids[0],
            reason=reason,
        )  # fmt: skip
        self._grants.refuse(nack)
        return Send(nack)

    def is_wanted(self, term: int, batch: int, grant_id: int) -> bool:
        """Return whether the gradient of this batch must still be computed for this grant, to this worker's knowledge.

        A later grant replaces an earlier one. A grant of a later server may have the same id. Any thread may call this
        method.
        """
        return term == self.term and self._grants.is_wanted(batch, grant_id)

    def is_current(self, grant: Grant) -> bool:
        """Return whether any gradient of this grant is still wanted."""
        return any(self.is_wanted(grant.term, *item) for item in enumerate(grant.grant_ids, grant.first))

    def newest(self, grant: Grant) -> Grant:
        """Return `grant` with the newest weights of all grants to this worker.

        A grant may wait while other grants are computed. In the meantime, its own weights may have been deleted, and
        newer weights are closer to the model. The minimum version of the grant does not change, so the newer weights
        are read only if the worker has no allowed version.
        """
        newest = self._newest
        if newest is None or newest.term != grant.term or newest.version <= grant.version:
            return grant
        return msgspec.structs.replace(grant, version=newest.version, key=newest.key, included=newest.included)

    def begin(self, grant: Grant) -> Grant | None:
        """Return the grant to compute when `grant` is next in the queue; None if it is void or the worker leaves."""
        if self.draining:
            self.not_begun(grant)
        return self.newest(grant) if self.is_current(grant) else None

    def gradient_done(
        self, grant: Grant, batches: Sequence[Batch], done: GradientDone, begun_at_s: float
    ) -> list[WorkerAction]:
        """Push the gradient of the first batches of `grant` that `done` names. The gradient is in the blob store."""
        computed = tuple(
            PushedBatch(
                batch=batch.number, grant_id=number, n_samples=item.num_samples, loss_sum=item.loss_sum,
                weight=None if item.weight == item.num_samples else item.weight,
                metric_sums=item.metric_sums, dead=item.dead, gaps=batch.gaps, lost=batch.lost,
                dead_samples=item.dead_samples, dead_reasons=item.dead_reasons, compute_s=item.compute_s,
                wait_s=max(0.0, begun_at_s - batch.complete_at_s),
                version=item.version if done.is_kept or item.version != done.version else -1,
                leader_epoch=batch.leader_epoch, skipped=batch.skipped, shared_loss=item.shared_loss, times=batch.times,
                held_out=batch.held_out, held_out_score=item.held_out_score,
            )
            for batch, number, item in zip(batches, grant.grant_ids, done.batches, strict=False)
        )  # fmt: skip
        self.usual = next((item.usual for item in reversed(done.batches) if item.usual), self.usual)
        if grant.term != self.term:
            return []
        names = done.holds or tuple((item.batch, item.grant_id) for item in computed)
        again = [self._compute(order, run) for order, run in self._grants.computed(computed)]
        return [*(self._announce_if_few() if done.is_kept else self._push(names, done)), *again]

    def rest_stored(self, order: StoreRest, done: GradientDone) -> list[WorkerAction]:
        """Push the contributions that were computed but not sent. They are now in the blob store."""
        if order.term != self.term:
            return []
        self._settling_until = 0
        if done.holds:
            return self._push(done.holds, done)
        if not done.key and order.until <= self._settled_until:
            return []  # the held-back steps are in the rest that was stored before
        self._held_back_until, self._settled_until = 0, order.until
        self._rest = Push(
            worker=self.worker, session=self.session, term=self.term, version=done.version, key=done.key, batches=(),
            store_s=done.store_s, market=self.market, settles=order.until, is_on_its_way=done.is_on_its_way,
        )  # fmt: skip
        return [Send(self._rest)]

    def rest_not_stored(self, order: StoreRest) -> None:
        """Record that the blob store did not accept the rest. The rest stays held back until the server asks again."""
        if order.term == self.term:
            self._settling_until = 0

    def _on_settle(self, order: Settle) -> list[WorkerAction]:
        """Handle a Settle. A late copy of a Settle may arrive when the held-back steps belong to a newer Settle."""
        if not order.until:  # no further batch will join the push
            return [StoreRest(order.term, 0)] if self._grants.kept and not self.busy else []
        if order.until <= self._settled_until:
            return [] if self._rest is None else [Send(self._rest)]  # the server may not have it
        if order.until <= self._settling_until:
            return []
        self._settling_until = order.until
        return [StoreRest(order.term, order.until)]

    def _push(self, names: Sequence[tuple[int, int]], done: GradientDone) -> list[WorkerAction]:
        """Push the stored sum of the batches and grants `names`."""
        batches = self._grants.take_computed(names)
        if not batches:
            return []
        # If only a part of them is void, the server takes none and grants the others again, so it must get the push.
        push = Push(
            worker=self.worker, session=self.session, term=self.term, version=done.version, key=done.key,
            batches=batches, fetch_s=done.fetch_s, delta_bytes=done.delta_bytes, store_s=done.store_s,
            market=self.market, holds_back=done.holds_back, is_on_its_way=done.is_on_its_way, absent=done.absent,
        )  # fmt: skip
        self._held_back_until = batches[-1].batch + 1 if done.holds_back else 0
        self._most_at_once = max(self._most_at_once, len(batches))
        self._grants.answer(push)
        return [*self._announce_if_few(), Send(push)]

    def weights_missing(self, grant: Grant) -> list[WorkerAction]:
        """Refuse a grant whose weights are not in the blob store, because the worker never computes on other
        weights."""
        if not self.is_current(grant):
            return []
        self.not_begun(grant)
        return [self._nack(grant, "weights")]

    def not_begun(self, grant: Grant) -> None:
        """Forget the batches of this grant. They are not computed, and the worker does not owe them any more."""
        if grant.term == self.term:
            for batch, number in enumerate(grant.grant_ids, grant.first):
                self._grants.give_back(batch, number)

    def resend(self) -> list[WorkerAction]:
        """Return the records to send again, because they may be lost: pushes that are not known to be in the model, the
        rest, and Nacks. After the time limit of a grant, the server grants nothing until it has an answer."""
        answers = self._grants.unconfirmed(self._applied)
        return [Send(record) for record in (*answers, *([] if self._rest is None else [self._rest]))]

    def _void_grants(self) -> None:
        self._grants.void()
        self._granted.clear()

    def _follow(self, term: int) -> None:
        """Follow the parameter server of `term`. This server numbers its grants from 1 again, so grants of earlier
        servers are void."""
        if term > self.term:
            self.term, self._grants, self._newest = term, WorkerGrants(), None
            self._applied = self._durable = self._held_back_until = self._settling_until = self._settled_until = 0
            self._rest = None

    def _forget_durable(self, served: ServedPartition) -> list[WorkerAction]:
        before = served.durable
        while served.batches and served.durable < served.reported_durable:
            batch = served.batches.popleft()
            self._granted.discard((served.number, batch.number_in_partition))
            self.retained -= 1
        if self._new:
            self._new = [batch for batch in self._new if self._find((batch.partition, batch.number_in_partition))]
        if not served.batches:
            served.next_batch = served.skipped.passed(served.next_batch, served.reported_durable)
        if served.durable == before:
            return []
        served.cuts.forget_below(served.durable)
        left_out = served.cuts.before(served.durable)
        return [Acknowledge(served.number, served.durable, left_out), *self._announce_skipped(served)]

    def _announce_all(self) -> list[WorkerAction]:
        """Announce all held batches, in the order in which they came."""
        held = [batch for served in self.served.values() for batch in served.batches]
        self._new = sorted(held, key=attrgetter("order"))
        skipped = [action for served in self.served.values() for action in self._announce_skipped(served)]
        return [*self.announce(), *skipped]

    def _announce_if_few(self) -> list[WorkerAction]:
        """Announce new batches, unless the server has enough announced batches until the next tick."""
        waiting = self.retained - len(self._new) - len(self._granted)
        # A worker without a grant may keep the server waiting, if a group takes many batches of each worker at once.
        enough = _ENOUGH_ANNOUNCED if self.busy else max(_ENOUGH_ANNOUNCED, 2 * self._most_at_once)
        return [] if waiting >= enough else self.announce()

    def announce(self) -> list[WorkerAction]:
        if self.draining or not self._new:
            return []
        runs, self._new = self._with_cuts(_runs_of(self._new)), []
        return [Send(Announce(worker=self.worker, session=self.session, runs=runs))]

    def _with_cuts(self, runs: Iterable[BatchRange]) -> tuple[BatchRange, ...]:
        named = []
        for run in runs:
            if (cuts := self.served[run.partition].cuts).total:
                left_out, within = cuts.before(run.first), cuts.within(run.first, run.until)
                run = msgspec.structs.replace(run, left_out=left_out, cuts=within)
            named.append(run)
        return tuple(named)

    def _announce_skipped(self, served: ServedPartition) -> list[WorkerAction]:
        is_next = served.skipped and not served.batches and not self.draining
        return [Send(served.skipped.record(self.worker, self.session, served.number))] if is_next else []

    def tick(self, now: float) -> list[WorkerAction]:
        """Announce new batches, regularly repeat the announcement of batches that are not durable, and send Alive."""
        actions = self.announce()
        if now - self._alive_at_s >= ALIVE_EVERY_S:
            self._alive_at_s = now
            retained, offset = self.retained, self.next_offset
            alive = Alive(
                worker=self.worker, session=self.session, retained=retained, next_offset=offset, lag=self.lag,
                most_unread=self.most_unread, waiting_for=self.waiting_for, usual=self.usual,
            )  # fmt: skip
            actions.append(Send(alive))
        if now - self._announced_at_s >= ANNOUNCE_EVERY_S:
            self._announced_at_s = now
            actions += self._announce_all()
        return actions

    def drain(self) -> None:
        """Announce no further batches and begin none (after SIGTERM or a spot notice). The batch that is being computed
        is finished."""
        self.draining = True

    def leave(self, cause: str) -> Sequence[WorkerAction]:
        """Leave the job. The server requeues the held batches for the next process of this worker."""
        self._void_grants()
        return [Send(Leave(worker=self.worker, session=self.session, cause=cause))]


def _begun(item: Served) -> ServedPartition:
    """Return a partition from which nothing was read yet."""
    return ServedPartition(
        item.partition, item.origin, item.next_batch, item.next_batch, item.included, item.leader_epoch,
        cuts=Cuts(item.left_out, item.cuts, decided=item.decided), flush_until=item.flush_until,
    )  # fmt: skip


def _problem(served: ServedPartition, item: Served) -> str:
    """Return the reason why the server, which reports `item`, cannot use a partition's held batches; "" if it can."""
    if item.origin != served.origin:
        # The same batch number would mean other offsets, so the held batches must not be announced.
        return f"the job now begins at offset {item.origin}, not at {served.origin}"
    if item.next_batch < served.durable:
        return f"the durable model is back at {item.next_batch} of {served.durable}"
    return ""


def _runs_of(batches: Iterable[Batch]) -> list[BatchRange]:
    """Split batches, in this order, into runs of consecutive batches of one partition. The runs are without cuts."""
    runs: list[BatchRange] = []
    for batch in batches:
        if runs and (runs[-1].partition, runs[-1].until) == (batch.partition, batch.number_in_partition):
            runs[-1] = BatchRange(batch.partition, runs[-1].first, batch.number_in_partition + 1)
        else:
            runs.append(BatchRange(batch.partition, batch.number_in_partition, batch.number_in_partition + 1))
    return runs
