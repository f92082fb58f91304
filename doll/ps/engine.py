"""The parameter server's state machine: events in, actions out, no I/O, no clock.

It knows where every batch of every worker stands, lets a policy decide which batches start and which gradients are
applied together, and keeps the one invariant: each batch is applied at most once, in its stream's order, so what is
applied of a stream is always a prefix and one integer per partition is the whole ledger (digest 1.2, "Batches as
offset ranges").

Order of effects (design, section 5): grant -> push -> fetched -> apply -> checkpoint -> durable -> acknowledge. A
batch whose owner goes, times out or loses its gradient goes back to the front of its owner's queue together with
every later batch of the same owner that is still being computed; its place in the group is taken by another (digest
D3).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop
from itertools import count

from doll.config import StopConfig
from doll.errors import IllegalEventError
from doll.ps.events import (
    AppliedBatch,
    ApplyUpdate,
    CheckpointStored,
    DropGradient,
    EngineAction,
    EngineSnapshot,
    Event,
    FetchGradient,
    Finish,
    GradientFetched,
    GradientLost,
    RepublishWeights,
    SendDurable,
    SendFence,
    SendGrant,
    SendHello,
    SendWelcome,
    StopRequested,
    StoreCheckpoint,
    Tick,
)
from doll.ps.policies.base import BatchId, Policy
from doll.records import Alive, Announce, Evaluated, Join, Leave, Nack, Push

# Sessions handed out by one parameter server lie in [term << 20, (term + 1) << 20): a later server's are always
# higher, so it need not remember what its predecessor handed out after the last checkpoint.
_SESSION_BITS = 20
_FENCED_REMEMBERED = 16
_RECENT_EVENTS = 30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine is told once. Times in seconds."""

    num_workers: int
    records_per_batch: int
    max_pending_batches: int  # a worker holds at most so many batches that are not durable
    lease_s: float
    grant_timeout_s: float
    checkpoint_every_updates: int
    checkpoint_every_s: float
    sum_reduction: bool = False  # apply the sum of the sample gradients, not their mean (the paper's literal rule)
    stop: StopConfig = field(default_factory=StopConfig)


@dataclass(slots=True)
class _Grant:
    number: int
    batch: int
    version: int
    queue_position: int  # place in the order of announcements, kept when the batch goes back to the queue
    granted_at_s: float
    push: Push | None = None  # set once the push is accepted; the gradient is then being fetched
    held: bool = False
    received_at_s: float = 0.0


class Slot:
    """One worker slot: four counters over its stream (see `doll.ps.policies.base`) and who embodies it now."""

    __slots__ = (
        "announced",
        "applied",
        "computing_grants",
        "durable",
        "fenced",
        "held_grants",
        "incarnation",
        "instance",
        "joined",
        "lag",
        "last_heard_s",
        "left",
        "live_since_s",
        "market",
        "present",
        "restarts",
        "retained",
        "session",
        "stalled",
        "waiting",
        "waiting_positions",
    )

    def __init__(self, applied: int, session: int, instance: str, incarnation: int, restarts: int) -> None:
        self.applied = applied
        self.durable = applied
        self.announced = applied
        self.held_grants: deque[_Grant] = deque()
        self.computing_grants: deque[_Grant] = deque()
        self.waiting_positions: deque[int] = deque()
        self.waiting = 0  # batches that may be granted; the engine keeps it with `_update_waiting`
        self.session = session
        self.instance = instance
        self.incarnation = incarnation  # the highest that has joined: machines of lower ones are fenced
        self.fenced: deque[str] = deque(maxlen=_FENCED_REMEMBERED)
        self.joined = False  # this server has seen its Join
        self.present = False  # heard of within its lease
        self.left = False  # said goodbye: only a new Join brings it back
        self.stalled = False  # let a grant time out: gets nothing more until it is heard to have finished something
        self.last_heard_s = 0.0
        self.live_since_s = 0.0
        self.restarts = restarts
        self.market = ""  # of its machine, from its last gradient
        self.retained = 0
        self.lag = 0

    @property
    def is_live(self) -> bool:
        return self.present and not self.left

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


class Engine:
    """The state of one parameter server; it changes only through `handle`."""

    def __init__(
        self,
        settings: EngineSettings,
        policy: Policy,
        *,
        term: int,
        now: float,
        origins: Sequence[int] | None = None,
        snapshot: EngineSnapshot | None = None,
        generation: int = 0,
        samples_id: str = "",
    ) -> None:
        """A fresh engine (with `origins`: first offset of the job in each partition) or one restored from `snapshot`.

        `generation` and `samples_id` are a fresh engine's, see `EngineSnapshot`.

        Raises:
            ValueError: neither or both are given, or they are not for `settings.num_workers` workers.
        """
        if (origins is None) == (snapshot is None):
            raise ValueError("expected either origins (a new job) or a snapshot (a resumed one)")
        n = settings.num_workers
        if snapshot is None:
            snapshot = EngineSnapshot(
                version=0, origins=tuple(origins or ()), records_per_batch=settings.records_per_batch, applied=(0,) * n,
                sessions=(0,) * n, instances=("",) * n, incarnations=(0,) * n, restarts=(0,) * n,
                samples_total=0, elapsed_s=0.0, counters={}, generation=generation, samples_id=samples_id,
            )  # fmt: skip
        if len(snapshot.origins) != n or len(snapshot.applied) != n:
            raise ValueError(f"expected {n} workers, got origins {snapshot.origins} and applied {snapshot.applied}")
        if snapshot.records_per_batch != settings.records_per_batch:
            raise ValueError(
                f"expected {snapshot.records_per_batch} records per batch, got {settings.records_per_batch}"
            )
        self.settings = settings
        self.policy = policy
        self.term = term
        self.version = snapshot.version
        self.origins = snapshot.origins
        self.generation = snapshot.generation
        self.samples_id = snapshot.samples_id
        self.samples_total = snapshot.samples_total
        self.batches_total = sum(snapshot.applied)
        self.counters: Counter[str] = Counter(snapshot.counters)
        self.finished: str | None = None
        self.stopping: str | None = None
        self.durable_version = snapshot.version
        self._slots = [
            Slot(*args)
            for args in zip(
                snapshot.applied, snapshot.sessions, snapshot.instances, snapshot.incarnations, snapshot.restarts,
                strict=True,
            )
        ]  # fmt: skip
        self._grants: dict[int, tuple[int, _Grant]] = {}  # grant number -> (worker, grant): computing or held
        self._grant_numbers = count(1)
        self._queue_positions = count()
        self._session_counter = 0
        self._saving: tuple[int, tuple[int, ...]] | None = None  # (version, applied) of the checkpoint under way
        self._saved_at_s = now
        self._elapsed_before_s = snapshot.elapsed_s
        self._first_update_at_s: float | None = None if snapshot.version == 0 else now
        self._compute_mean_s = 0.0
        self._num_held = 0
        self._num_computing = 0
        # Kept rather than looked for: nothing that happens at every event may cost time for every worker.
        self._num_waiting = 0
        self._ready: set[int] = set()  # workers with batches that may be granted
        self._max_unsaved = 0  # of any worker: batches that are in the model and not durable
        self._recent_events: deque[tuple[float, Event]] = deque(maxlen=_RECENT_EVENTS)

    # --- what policies see (doll.ps.policies.base.PolicyView) -------------------------------------------------------------

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_computing(self) -> int:
        return self._num_computing

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def workers(self) -> Iterable[tuple[int, Slot]]:
        return enumerate(self._slots)

    def waiting_batches(self) -> Iterator[tuple[int, int]]:
        slots = self._slots
        place = 0
        workers: Iterable[int] = self._ready
        while heap := [(slots[worker].waiting_positions[place], worker) for worker in workers]:
            heapify(heap)  # a policy that wants the first few pays for those only
            taken = []
            while heap:
                _, worker = heappop(heap)
                taken.append(worker)
                yield worker, place
            place += 1
            workers = [worker for worker in taken if slots[worker].waiting > place]

    def held_batches(self) -> Sequence[BatchId]:
        # Grants are numbered as they are made, and a dictionary keeps that order.
        return [BatchId(worker, grant.batch) for worker, grant in self._grants.values() if grant.held]

    # --- one way in -------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[EngineAction]:
        """Take one event at time `now` (seconds, monotonic) and say what is to be done, in this order.

        Refused messages (late, duplicate, fenced, out of range) change nothing but a counter.

        Raises:
            IllegalEventError: the runner reports the outcome of something that was never ordered, or the policy wants
                what cannot be. The engine may have changed: end the process.
        """
        self._recent_events.append((now, event))
        actions: list[EngineAction] = []
        if self.finished is not None:
            return actions
        match event:
            case Join():
                self._on_join(event, now, actions)
            case Announce():
                self._on_announce(event, now, actions)
            case Push():
                self._on_push(event, now, actions)
            case Nack():
                self._on_nack(event, now, actions)
            case Alive():
                if self._accept(event.worker, event.session, now, actions):
                    slot = self._slots[event.worker]
                    slot.retained, slot.lag = event.retained, event.lag
            case Leave():
                if self._accept(event.worker, event.session, now, actions):
                    self._slots[event.worker].left = True
                    self._mark_gone(event.worker, "leave", actions)
            case Evaluated():
                self._on_evaluated(event)
            case GradientFetched():
                self._on_fetched(event, now)
            case GradientLost():
                self._on_lost(event, actions)
            case CheckpointStored():
                self._on_stored(event, now, actions)
            case Tick():
                self._on_tick(now, actions)
            case StopRequested():
                self._stop(event.reason)
        self._advance(now, actions)
        return actions

    def snapshot(self, now: float) -> EngineSnapshot:
        """What a checkpoint keeps of the engine."""
        return EngineSnapshot(
            version=self.version,
            origins=self.origins,
            records_per_batch=self.settings.records_per_batch,
            applied=tuple(slot.applied for slot in self._slots),
            sessions=tuple(slot.session for slot in self._slots),
            instances=tuple(slot.instance for slot in self._slots),
            samples_total=self.samples_total,
            elapsed_s=self._elapsed_s(now),
            counters=dict(self.counters),
            incarnations=tuple(slot.incarnation for slot in self._slots),
            restarts=tuple(slot.restarts for slot in self._slots),
            generation=self.generation,
            samples_id=self.samples_id,
        )

    def check_invariants(self) -> None:
        """Assert what must hold after every event; for tests."""
        assert self._num_held == sum(slot.held for slot in self._slots)
        assert self._num_computing == sum(slot.computing for slot in self._slots)
        assert len(self._grants) == self._num_held + self._num_computing
        assert list(self._grants) == sorted(self._grants)
        assert self._max_unsaved == max(slot.applied - slot.durable for slot in self._slots)
        assert self._num_waiting == sum(slot.waiting for slot in self._slots)
        assert self._ready == {worker for worker, slot in enumerate(self._slots) if slot.waiting}
        for slot in self._slots:
            assert slot.durable <= slot.applied <= slot.announced
            assert slot.granted + len(slot.waiting_positions) == slot.announced
            batches = [grant.batch for grant in (*slot.held_grants, *slot.computing_grants)]
            assert batches == list(range(slot.applied, slot.granted)), (
                "a stream's batches are in flight in order, without a hole"
            )
            assert slot.waiting == (len(slot.waiting_positions) if slot.is_live and not slot.stalled else 0)
            assert slot.is_live or not slot.computing, "nobody waits for a worker that is gone"
            assert all(grant.push is not None and grant.held for grant in slot.held_grants)
            assert not any(grant.held for grant in slot.computing_grants)
        if self.policy.exact_version:
            versions = {grant.version for _, grant in self._grants.values()}
            assert versions <= {self.version}, "a group's gradients are all of one version"

    # --- workers come and go ----------------------------------------------------------------------------------------

    def _on_join(self, event: Join, now: float, actions: list[EngineAction]) -> None:
        if not 0 <= event.worker < len(self._slots):
            self.counters["refused_unknown_worker"] += 1
            return
        slot = self._slots[event.worker]
        # A later machine wins whatever session it holds: a server that has lost the memory of it may have given a higher
        # one to an older machine since.
        later = event.incarnation > slot.incarnation
        # The one that counts may hold a session of an earlier server, whose Welcome came before ours.
        replaced = event.instance != slot.instance and (
            0 < event.incarnation < slot.incarnation or (0 < event.session < slot.session and not later)
        )
        if event.instance in slot.fenced or replaced:
            self.counters["refused_fenced"] += 1
            actions.append(SendFence(event.worker, event.instance))
            return
        slot.incarnation = max(slot.incarnation, event.incarnation)
        former = slot.instance
        if event.instance != slot.instance:
            if slot.instance:
                self._fence(event.worker, actions)
                slot.restarts += 1
            slot.instance = event.instance
            # A process that already holds a session (its server died before a checkpoint kept it) goes on with it.
            slot.session = event.session if event.session >= max(slot.session, 1) else self._new_session()
            self.counters["joined"] += 1
        elif not slot.session:
            slot.session = self._new_session()
        self._mark_gone(event.worker, "rejoin", actions)
        slot.announced = slot.granted
        slot.waiting_positions.clear()
        if event.instance != former or not slot.is_live:
            slot.live_since_s = now
        slot.joined = slot.present = True
        slot.left = slot.stalled = False
        slot.last_heard_s = now
        self._update_waiting(event.worker)
        actions.append(SendWelcome(event.worker, slot.instance, slot.session, slot.durable, event.incarnation))

    def _fence(self, worker: int, actions: list[EngineAction]) -> None:
        slot = self._slots[worker]
        slot.fenced.append(slot.instance)
        actions.append(SendFence(worker, slot.instance))

    def _new_session(self) -> int:
        self._session_counter += 1
        return (self.term << _SESSION_BITS) + self._session_counter

    def _accept(self, worker: int, session: int, now: float, actions: list[EngineAction]) -> bool:
        """A message from a worker came: is it from the incarnation that counts? Then it is alive."""
        if not 0 <= worker < len(self._slots):
            self.counters["refused_unknown_worker"] += 1
            return False
        slot = self._slots[worker]
        if session != slot.session or slot.left:
            self.counters["refused_fenced"] += 1
            return False
        if not slot.joined:
            # This server has restarted and the worker has not joined it yet: its Hello is on the way or was missed.
            self.counters["refused_not_joined"] += 1
            actions.append(SendHello(worker))
            return False
        if not slot.present:
            slot.present = True
            slot.live_since_s = now
            self._update_waiting(worker)
        slot.last_heard_s = now
        return True

    def _update_waiting(self, worker: int) -> None:
        """Whatever may have changed how many batches of this worker can be granted ends with this."""
        slot = self._slots[worker]
        waiting = len(slot.waiting_positions) if slot.present and not slot.left and not slot.stalled else 0
        if waiting != slot.waiting:
            self._num_waiting += waiting - slot.waiting
            slot.waiting = waiting
            (self._ready.add if waiting else self._ready.discard)(worker)

    def _mark_gone(self, worker: int, cause: str, actions: list[EngineAction]) -> None:
        slot = self._slots[worker]
        if slot.computing_grants:
            self._requeue_from(worker, slot.computing_grants[0].batch, cause, actions)
        if cause != "rejoin":
            self.counters["workers_lost"] += 1
            slot.present = False
            self._update_waiting(worker)

    def _requeue_from(self, worker: int, batch: int, cause: str, actions: list[EngineAction]) -> None:
        """Take batch `batch` and every later one of this worker that has no gradient yet back into the queue."""
        slot = self._slots[worker]
        while slot.computing_grants and slot.computing_grants[-1].batch >= batch:
            grant = slot.computing_grants.pop()
            del self._grants[grant.number]
            self._num_computing -= 1
            slot.waiting_positions.appendleft(grant.queue_position)
            self.counters["requeued"] += 1
            self.counters[f"requeued_{cause}"] += 1
            if grant.push is not None and grant.push.key:
                actions.append(DropGradient(grant.push.key, cause))
        self._update_waiting(worker)

    # --- the life of a batch ----------------------------------------------------------------------------------------

    def _on_announce(self, event: Announce, now: float, actions: list[EngineAction]) -> None:
        if not self._accept(event.worker, event.session, now, actions):
            return
        slot = self._slots[event.worker]
        # A worker whose job file allows more says the rest again in a while: it need not start again for that.
        allowed = slot.durable + self.settings.max_pending_batches
        hole = event.first > slot.announced and slot.announced < allowed
        if event.first < 0 or event.until < event.first or hole:
            # It is out of step: let it join again.
            self.counters["refused_announce"] += 1
            actions.append(SendHello(event.worker))
            return
        for _ in range(slot.announced, min(event.until, allowed)):
            slot.waiting_positions.append(next(self._queue_positions))
            slot.announced += 1
        self._update_waiting(event.worker)

    def _find(self, worker: int, term: int, number: int, batch: int) -> _Grant | None:
        """The grant that a worker answers, if it still stands."""
        known = self._grants.get(number)
        if term != self.term or known is None or known[0] != worker or known[1].batch != batch:
            return None
        return known[1]

    def _on_push(self, event: Push, now: float, actions: list[EngineAction]) -> None:
        if not self._accept(event.worker, event.session, now, actions):
            self._drop(event, "fenced", actions)
            return
        slot = self._slots[event.worker]
        if slot.stalled:
            slot.stalled = False
            self._update_waiting(event.worker)
        grant = self._find(event.worker, event.term, event.grant, event.batch)
        if grant is None:
            self.counters["refused_late"] += 1
            self._drop(event, "late", actions)
        elif grant.push is not None:
            self.counters["refused_duplicate"] += 1
        elif grant is not slot.computing_grants[0] or event.version != grant.version or event.n_samples < 0:
            # Out of its stream's order, or of another version: never apply it; the timeout brings the batch back.
            self.counters["refused_order"] += 1
            self._drop(event, "order", actions)
        else:
            slot.market = event.market
            grant.push, grant.received_at_s = event, now
            self._compute_mean_s += 0.2 * ((now - grant.granted_at_s) - self._compute_mean_s)
            if event.key:
                actions.append(FetchGradient(grant.number, event.key, event.version))
            else:
                self._hold(event.worker, grant)

    def _drop(self, event: Push, reason: str, actions: list[EngineAction]) -> None:
        if event.key:
            actions.append(DropGradient(event.key, reason))

    def _on_fetched(self, event: GradientFetched, now: float) -> None:
        known = self._grants.get(event.grant)
        if known is None:
            return  # its owner went down while the gradient was on its way: the batch is back in the queue
        worker, grant = known
        if grant.push is None or grant is not self._slots[worker].computing_grants[0]:
            raise IllegalEventError(
                f"gradient of grant {event.grant} was not asked for; recent events: {list(self._recent_events)}"
            )
        self._hold(worker, grant)

    def _hold(self, worker: int, grant: _Grant) -> None:
        slot = self._slots[worker]
        slot.computing_grants.popleft()
        slot.held_grants.append(grant)
        grant.held = True
        self._num_computing -= 1
        self._num_held += 1

    def _on_lost(self, event: GradientLost, actions: list[EngineAction]) -> None:
        known = self._grants.get(event.grant)
        if known is not None:
            worker, grant = known
            if grant.held:
                raise IllegalEventError(
                    f"gradient of grant {event.grant} is held already; recent events: {list(self._recent_events)}"
                )
            self._requeue_from(worker, grant.batch, "blob_lost", actions)

    def _on_nack(self, event: Nack, now: float, actions: list[EngineAction]) -> None:
        if not self._accept(event.worker, event.session, now, actions):
            return
        grant = self._find(event.worker, event.term, event.grant, event.batch)
        if grant is None or grant.push is not None:
            self.counters["refused_late"] += 1
            return
        self._requeue_from(event.worker, event.batch, f"nack_{event.reason}", actions)
        if event.reason == "weights":
            actions.append(RepublishWeights(self.version))
        else:
            # The worker does not hold a batch that it announced: it is out of step. Nothing is granted until it has
            # joined.
            slot = self._slots[event.worker]
            slot.announced = slot.granted
            slot.waiting_positions.clear()
            self._update_waiting(event.worker)
            actions.append(SendHello(event.worker))

    # --- forward ----------------------------------------------------------------------------------------------------

    def _advance(self, now: float, actions: list[EngineAction]) -> None:
        """Apply what belongs together and start what may start, until nothing changes."""
        while self.stopping is None:
            group = self.policy.collect(self)
            if group:
                self._apply(group, now, actions)
                continue
            starts = self.policy.start(self)
            if not starts:
                break
            for worker in starts:
                self._grant(worker, now, actions)
        self._save_if_due(now, actions)

    def _grant(self, worker: int, now: float, actions: list[EngineAction]) -> None:
        slot = self._slots[worker]
        if not slot.waiting:
            raise IllegalEventError(f"policy {self.policy.name} starts worker {worker}, which has no waiting batch")
        grant = _Grant(next(self._grant_numbers), slot.granted, self.version, slot.waiting_positions.popleft(), now)
        self._update_waiting(worker)
        slot.computing_grants.append(grant)
        self._num_computing += 1
        self._grants[grant.number] = (worker, grant)
        actions.append(SendGrant(worker, slot.session, grant.batch, grant.number, self.version))

    def _apply(self, group: Sequence[BatchId], now: float, actions: list[EngineAction]) -> None:
        applied: list[AppliedBatch] = []
        for worker, batch in group:
            slot = self._slots[worker]
            grant = slot.held_grants[0] if slot.held_grants else None
            if grant is None or grant.batch != batch or batch != slot.applied or grant.push is None:
                raise IllegalEventError(
                    f"policy {self.policy.name} applies batch {batch} of worker {worker} out of order"
                )
            slot.held_grants.popleft()
            slot.applied += 1
            self._max_unsaved = max(self._max_unsaved, slot.applied - slot.durable)
            del self._grants[grant.number]
            lo = self.origins[worker] + batch * self.settings.records_per_batch
            hi = lo + self.settings.records_per_batch
            applied.append(AppliedBatch(grant.number, lo, hi, grant.granted_at_s, grant.received_at_s, grant.push))
        self._num_held -= len(applied)
        samples = sum(item.push.n_samples for item in applied)
        self.samples_total += samples
        self.batches_total += len(applied)
        self.version += 1
        if self._first_update_at_s is None:
            self._first_update_at_s = now
        scale = 1.0 if self.settings.sum_reduction else 1.0 / max(samples, 1)
        actions.append(ApplyUpdate(self.version, tuple(applied), scale, self.samples_total, self.batches_total))
        self._stop_if_enough()

    def _stop_if_enough(self) -> None:
        stop = self.settings.stop
        if stop.updates is not None and self.version >= stop.updates:
            self._stop(f"updates: {self.version} reached")
        elif stop.samples is not None and self.samples_total >= stop.samples:
            self._stop(f"samples: {self.samples_total} reached")

    def _elapsed_s(self, now: float) -> float:
        return self._elapsed_before_s + (0.0 if self._first_update_at_s is None else now - self._first_update_at_s)

    # --- durability and the end -------------------------------------------------------------------------------------

    def _save_if_due(self, now: float, actions: list[EngineAction]) -> None:
        if self._saving is not None or self.finished is not None:
            return
        unsaved = self.version - self.durable_version
        final = self.stopping is not None
        if not unsaved and not final:
            return
        # Half of what a worker may hold: it must not come to a halt only because a checkpoint is not due yet.
        crowded = self._max_unsaved >= max(1, self.settings.max_pending_batches // 2)
        overdue = now - self._saved_at_s >= self.settings.checkpoint_every_s
        if final or crowded or overdue or unsaved >= self.settings.checkpoint_every_updates:
            snapshot = self.snapshot(now)
            self._saving = (self.version, snapshot.applied)
            self._saved_at_s = now
            actions.append(StoreCheckpoint(self.version, snapshot))

    def _on_stored(self, event: CheckpointStored, now: float, actions: list[EngineAction]) -> None:
        if self._saving is None or self._saving[0] != event.version:
            raise IllegalEventError(
                f"checkpoint of version {event.version} was not ordered; recent events: {list(self._recent_events)}"
            )
        version, applied = self._saving
        self._saving = None
        self.durable_version = version
        for worker, (slot, until) in enumerate(zip(self._slots, applied, strict=True)):
            if until > slot.durable:
                slot.durable = until
                actions.append(SendDurable(worker, until))
        self._max_unsaved = max(slot.applied - slot.durable for slot in self._slots)
        if self.stopping is not None and version == self.version:
            self.finished = self.stopping
            actions.append(Finish(self.finished, version))

    def _on_tick(self, now: float, actions: list[EngineAction]) -> None:
        timeout_s = max(self.settings.grant_timeout_s, 5.0 * self._compute_mean_s)
        for worker, slot in enumerate(self._slots):
            if slot.is_live and now - slot.last_heard_s > self.settings.lease_s:
                self._mark_gone(worker, "lease", actions)
            elif slot.computing_grants and slot.computing_grants[0].push is None:
                first = slot.computing_grants[0]
                # The clock of a batch starts when the worker could start on it: batches of one worker are serial.
                if (
                    now - max(first.granted_at_s, slot.held_grants[-1].received_at_s if slot.held_grants else 0.0)
                    > timeout_s
                ):
                    self._requeue_from(worker, first.batch, "timeout", actions)
                    slot.stalled = True
                    self._update_waiting(worker)
        self._stop_if_enough()  # a server that starts again on a finished job has nothing to add to it
        stop_s = self.settings.stop.seconds
        if stop_s is not None and self._first_update_at_s is not None and self._elapsed_s(now) >= stop_s:
            self._stop(f"seconds: {self._elapsed_s(now):.1f} passed")

    def _on_evaluated(self, event: Evaluated) -> None:
        if event.term != self.term or event.version > self.version:
            self.counters["refused_evaluated"] += 1
            return
        stop = self.settings.stop
        if stop.accuracy is not None and event.accuracy is not None and event.accuracy >= stop.accuracy:
            self._stop(f"accuracy: {event.accuracy:.4f} at version {event.version} reached {stop.accuracy}")
        elif stop.loss is not None and event.loss <= stop.loss:
            self._stop(f"loss: {event.loss:.4f} at version {event.version} reached {stop.loss}")

    def _stop(self, reason: str) -> None:
        if self.stopping is None:
            self.stopping = reason
