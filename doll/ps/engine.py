"""The parameter server's state machine: events in, actions out, no I/O, no clock.

It knows where every batch of every partition stands, lets a policy decide which batches start and which gradients are
applied together, and keeps one invariant: each batch is applied at most once and in its partition's order, so that one
integer per partition is the whole ledger.

A policy of exact versions grants a worker several batches at once, and gets their gradients as one sum: a set. A set is
taken, held, lost and applied as one (docs/decisions/0025).

Order of effects: grant -> push -> fetched -> apply -> checkpoint -> durable -> acknowledge. A batch whose owner goes,
times out or loses its gradient returns to the front of its partition's queue, together with every later batch of the
partition that is still being computed; another batch takes its place in the group.

No event but a checkpoint takes time for every worker: counts, sets of changed workers, and queues in order of time are
kept as things change (docs/decisions/0019).
"""

from __future__ import annotations

from collections.abc import Sequence

from doll.errors import IllegalEventError
from doll.ps.events import (
    AppliedBatch,
    AppliedSet,
    ApplyUpdate,
    CheckpointStored,
    DropGradient,
    EngineAction,
    Event,
    FetchGradient,
    Finish,
    GradientFetched,
    GradientLost,
    GrantsLost,
    PublishWeights,
    RepublishWeights,
    SendDurable,
    SendGrant,
    SendHello,
    SendWelcome,
    StopRequested,
    StoreCheckpoint,
    Tick,
)
from doll.ps.membership import Worker
from doll.ps.partitions import ActiveGrant, PushedSet
from doll.ps.policies.base import BatchId
from doll.ps.state import EngineState
from doll.ps.stop_rule import progress_reached, target_reached, time_reached
from doll.records import Alive, Announce, Evaluated, Join, Leave, Nack, Push


class Engine(EngineState):
    """What events do to the state; it changes only through `handle`."""

    # --- events -------------------------------------------------------------------------------------------------------

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
                if (worker := self._accept(event.worker, event.session, now, actions)) is not None:
                    worker.retained, worker.lag = event.retained, event.lag
            case Leave():
                if (worker := self._accept(event.worker, event.session, now, actions)) is not None:
                    worker.left = True
                    self._remove(worker, "leave", actions)
            case Evaluated():
                self._on_evaluated(event)
            case GradientFetched():
                self._on_fetched(event, now)
            case GradientLost():
                self._on_lost(event, actions)
            case GrantsLost():
                self._on_grants_lost(event, actions)
            case CheckpointStored():
                self._on_stored(event, actions)
            case Tick():
                self._on_tick(now, actions)
            case StopRequested():
                self._stop(event.reason)
        self._advance(now, actions)
        return actions

    # --- workers join and leave ---------------------------------------------------------------------------------------

    def _on_join(self, event: Join, now: float, actions: list[EngineAction]) -> None:
        worker = self._members.admit(event, now, actions)
        if worker is None:
            return
        self._requeue_all(worker, "rejoin", actions)
        partition = worker.partition
        partition.forget_waiting()
        self._note_change(worker)
        actions.append(
            SendWelcome(
                worker.number, worker.process, worker.session, partition.origin, partition.durable, event.incarnation
            )
        )

    def _accept(self, number: int, session: int, now: float, actions: list[EngineAction]) -> Worker | None:
        """The sender of a message, if it is of the worker's current session."""
        live = self._members.num_live
        worker = self._members.accept(number, session, now, actions)
        if worker is not None and live != self._members.num_live:  # it was silent for longer than its lease
            self._note_change(worker)
        return worker

    def _remove(self, worker: Worker, cause: str, actions: list[EngineAction]) -> None:
        self._members.remove(worker)
        self._requeue_all(worker, cause, actions)
        self._note_change(worker)

    def _requeue_all(self, worker: Worker, cause: str, actions: list[EngineAction]) -> None:
        if worker.partition.computing_grants:
            self._requeue_from(worker, worker.partition.computing_grants[0].batch, cause, actions)

    def _requeue_from(self, worker: Worker, batch: int, cause: str, actions: list[EngineAction]) -> None:
        """Return batch `batch` and every later one of this worker that has no gradient yet to the queue."""
        partition = worker.partition
        taken = partition.take_back(batch)
        if len(taken) > 1:
            self.counters["requeued_sets"] += 1
        for grant in taken:
            del self._grants[grant.number]
            self.counters["requeued"] += 1
            self.counters[f"requeued_{cause}"] += 1
            if grant.pushed is not None and grant.number == grant.pushed.number:
                self._drop(grant.pushed.push, cause, actions)
        if not partition.computing_grants:
            self._running_since_s.pop(partition.number, None)
        self._note_change(worker)

    # --- the life of a batch ------------------------------------------------------------------------------------------

    def _on_announce(self, event: Announce, now: float, actions: list[EngineAction]) -> None:
        worker = self._accept(event.worker, event.session, now, actions)
        if worker is None:
            return
        partition = worker.partition
        # A worker whose job file allows more announces the rest again later: it need not start again for that.
        allowed = partition.durable + self.settings.max_pending_batches
        hole = event.first > partition.announced and partition.announced < allowed
        if event.first < 0 or event.until < event.first or hole:
            # It is out of step: let it join again.
            self.counters["refused_announce"] += 1
            actions.append(SendHello(event.worker))
            return
        new = range(partition.announced, min(event.until, allowed))
        partition.announce(next(self._queue_positions) for _ in new)
        self._note_change(worker)

    def _find(self, worker: Worker, term: int, number: int, batch: int) -> ActiveGrant | None:
        """The grant that a worker answers, if it still stands."""
        grant = self._grants.get(number)
        if term != self.term or grant is None or grant.partition != worker.partition.number or grant.batch != batch:
            return None
        return grant

    def _on_push(self, event: Push, now: float, actions: list[EngineAction]) -> None:
        worker = self._accept(event.worker, event.session, now, actions)
        if worker is None:
            self._drop(event, "fenced", actions)
            return
        self._clear_stall(worker)
        standing = [self._find(worker, event.term, item.grant_id, item.batch) for item in event.batches]
        grants = [grant for grant in standing if grant is not None]
        if not grants:
            self.counters["refused_late"] += 1
            self._drop(event, "late", actions)
        elif grants[0].pushed is not None and tuple(standing) == grants[0].pushed.grants:
            self.counters["refused_duplicate"] += 1
        elif len(grants) < len(standing) or any(grant.pushed is not None for grant in grants):
            # A part of the set does not stand any more, and a sum cannot be taken apart: the rest is computed again.
            self.counters["refused_partly"] += 1
            if not any(grant.pushed is not None and grant.pushed.push.key == event.key for grant in grants):
                self._drop(event, "partly void", actions)
            if left := [grant.batch for grant in grants if grant.pushed is None]:
                self._requeue_from(worker, min(left), "partly_void", actions)
        elif not worker.partition.begins_with(grants):
            # An earlier push of this worker is missing: what comes after it cannot be applied before it.
            self.counters["refused_order"] += 1
            self._drop(event, "order", actions)
            self._requeue_from(worker, min(grant.batch for grant in grants), "order", actions)
        elif not self._is_allowed(event, grants):
            # Of no use, and it would be the same again: the timeout brings the batches back.
            self.counters["refused_content"] += 1
            self._drop(event, "content", actions)
        else:
            self._take(worker, PushedSet(event, tuple(grants), now), now, actions)

    def _is_allowed(self, event: Push, grants: Sequence[ActiveGrant]) -> bool:
        if event.version > self.version or (len(grants) > 1 and not self.policy.exact_version):
            return False
        for grant, item in zip(grants, event.batches, strict=True):
            if event.version < grant.min_version or item.n_samples < 0 or item.dead_samples < 0:
                return False
        return True

    def _take(self, worker: Worker, pushed: PushedSet, now: float, actions: list[EngineAction]) -> None:
        """The set's gradient is in the blob store, or it has none."""
        push = pushed.push
        worker.market = push.market
        for grant in pushed.grants:
            grant.pushed = pushed
        batch_s = (now - self._running_since_s.pop(worker.partition.number)) / len(pushed.grants)
        self._compute_mean_s += 0.2 * (batch_s - self._compute_mean_s)
        if push.key:
            actions.append(FetchGradient(pushed.number, push.key, push.version, self._is_next_in_order(pushed.number)))
        else:
            self._hold(pushed, now)

    def _is_next_in_order(self, number: int) -> bool:
        """Whether no gradient is outstanding that is added before that of grant `number`."""
        if not self.policy.exact_version:
            return False
        self._forget_answered()
        return self._computing_numbers[0] == number

    def _forget_answered(self) -> None:
        numbers = self._computing_numbers
        while numbers and ((grant := self._grants.get(numbers[0])) is None or grant.held):
            numbers.popleft()

    def _clear_stall(self, worker: Worker) -> None:
        """The worker has answered a grant, in time or late, with a gradient or without: it can take another."""
        if worker.stalled:
            worker.stalled = False
            self._note_change(worker)

    def _drop(self, event: Push, reason: str, actions: list[EngineAction]) -> None:
        if event.key:
            actions.append(DropGradient(event.key, reason))

    def _on_fetched(self, event: GradientFetched, now: float) -> None:
        grant = self._grants.get(event.grant_id)
        if grant is None:
            return  # its owner went down while the gradient was on its way: the batches are back in the queue
        if grant.pushed is None or grant.held or grant.pushed.number != event.grant_id:
            raise self._illegal(f"gradient of grant {event.grant_id} was not asked for")
        self._hold(grant.pushed, now)

    def _hold(self, pushed: PushedSet, now: float) -> None:
        partition = self._partitions[pushed.grants[0].partition]
        partition.hold(pushed)
        for grant in pushed.grants:
            self._held[grant.number] = BatchId(grant.partition, grant.batch)
        if partition.computing_grants:
            self._running_since_s[partition.number] = now  # a worker computes its sets one after the other
        self._note_change(self._owner(partition))

    def _on_lost(self, event: GradientLost, actions: list[EngineAction]) -> None:
        grant = self._grants.get(event.grant_id)
        if grant is not None:
            if grant.held:
                raise self._illegal(f"gradient of grant {event.grant_id} is held already")
            self._requeue_from(self._owner(self._partitions[grant.partition]), grant.batch, "blob_lost", actions)

    def _on_grants_lost(self, event: GrantsLost, actions: list[EngineAction]) -> None:
        if not 0 <= event.worker < len(self._workers):
            return
        worker = self._workers[event.worker]
        left = [grant for grant in worker.partition.computing_grants if grant.pushed is None]
        size = len(left) if self.policy.exact_version else 1
        for at in range(0, len(left), max(size, 1)):
            self.counters["grants_sent_again"] += 1
            self._send_grants(worker, left[at : at + size], actions)

    def _on_nack(self, event: Nack, now: float, actions: list[EngineAction]) -> None:
        worker = self._accept(event.worker, event.session, now, actions)
        if worker is None:
            return
        self._clear_stall(worker)
        grant = self._find(worker, event.term, event.grant_id, event.batch)
        if grant is None or grant.pushed is not None:
            self.counters["refused_late"] += 1
            return
        self._requeue_from(worker, event.batch, f"nack_{event.reason}", actions)
        if event.reason == "weights":
            actions.append(RepublishWeights(self.version))
        else:
            # The worker does not hold a batch that it announced: it is out of step. Nothing is granted until it has
            # joined.
            worker.partition.forget_waiting()
            self._note_change(worker)
            actions.append(SendHello(event.worker))

    def _illegal(self, problem: str) -> IllegalEventError:
        return IllegalEventError(f"{problem}; recent events: {list(self._recent_events)}")

    # --- progress -----------------------------------------------------------------------------------------------------

    def _advance(self, now: float, actions: list[EngineAction]) -> None:
        """Apply what belongs together and start what may start, until nothing changes."""
        granted: dict[int, list[ActiveGrant]] = {}  # at this version, not sent yet: what a worker gets is one message
        while self.stopping is None:
            self._report_changes()
            if self._offered_version != self.version:
                self._offered_version = self.version
                if recipients := self.policy.recipients(self):
                    actions.append(PublishWeights(self.version, tuple(recipients)))
            if group := self.policy.collect(self):
                self._send_all_grants(granted, actions)
                self._apply(group, now, actions)
                continue
            starts = self.policy.start(self)
            if not starts:
                break
            for number in starts:
                grant = self._grant(number, now)
                if self.policy.exact_version:
                    granted.setdefault(number, []).append(grant)
                else:
                    self._send_grants(self._workers[number], (grant,), actions)
        if granted:
            self._send_all_grants(granted, actions)
        self._report_changes()
        self._save_if_due(now, actions)

    def _report_changes(self) -> None:
        if self._changed:
            changed, self._changed = self._changed, {}
            self.policy.changed(self, changed.keys())

    def _grant(self, number: int, now: float) -> ActiveGrant:
        worker = self._workers[number]
        if not worker.waiting:
            raise IllegalEventError(f"policy {self.policy.name} starts worker {number}, which has no waiting batch")
        min_version = self.policy.min_version(self, number)
        if not 0 <= min_version <= self.version:
            raise IllegalEventError(
                f"policy {self.policy.name} wants version {min_version} at least, expected 0 to {self.version}"
            )
        partition = worker.partition
        grant = partition.grant(next(self._grant_numbers), self.version, min_version, now)
        self._grants[grant.number] = grant
        if self.policy.exact_version:
            self._computing_numbers.append(grant.number)
        if grant is partition.computing_grants[0]:
            self._running_since_s[partition.number] = now
        self._note_change(worker)
        return grant

    def _send_all_grants(self, granted: dict[int, list[ActiveGrant]], actions: list[EngineAction]) -> None:
        for number, grants in granted.items():
            self._send_grants(self._workers[number], grants, actions)
        granted.clear()

    def _send_grants(self, worker: Worker, grants: Sequence[ActiveGrant], actions: list[EngineAction]) -> None:
        """Consecutive batches of one worker. An older grant that is sent again names the weights that there are now."""
        first = grants[0]
        numbers = tuple(grant.number for grant in grants)
        actions.append(SendGrant(worker.number, worker.session, first.batch, numbers, self.version, first.min_version))

    def _apply(self, group: Sequence[BatchId], now: float, actions: list[EngineAction]) -> None:
        sets: dict[int, tuple[PushedSet, list[AppliedBatch]]] = {}  # by their first grants
        for batch_id in group:
            partition = self._partitions[batch_id.partition]
            grant = partition.apply(batch_id.number)
            if grant is None or grant.pushed is None:
                raise IllegalEventError(
                    f"policy {self.policy.name} applies batch {batch_id.number} of partition {batch_id.partition} "
                    "out of order"
                )
            self._durability.applied(partition)
            del self._grants[grant.number], self._held[grant.number]
            lo, hi = partition.offsets(batch_id.number, self.settings.records_per_batch)
            number = grant.pushed.grants[0].number
            if (entry := sets.get(number)) is None:
                entry = sets[number] = (grant.pushed, [])
            pushed, applied = entry
            applied.append(AppliedBatch(lo, hi, grant.granted_at_s, pushed.push.batches[len(applied)]))
            self._note_change(self._owner(partition))
        for number, (pushed, applied) in sets.items():
            if len(applied) < len(pushed.grants):
                raise IllegalEventError(
                    f"policy {self.policy.name} applies {len(applied)} batches of a set of {len(pushed.grants)} "
                    f"(grant {number}): their gradients are one sum"
                )
        if self.policy.exact_version:
            if self._grants:
                raise IllegalEventError(
                    f"policy {self.policy.name} leaves {len(self._grants)} batches of version {self.version} behind: "
                    "expected all that were granted in one update, since no later one may use their gradients"
                )
            self._forget_answered()
        in_order = [sets[number] for number in sorted(sets)]
        update_sets = tuple(AppliedSet(pushed.push, pushed.received_at_s, tuple(items)) for pushed, items in in_order)
        samples = sum(item.num_samples for item in update_sets)
        self.samples_total += samples
        self.batches_total += len(group)
        self.version += 1
        if self._first_update_at_s is None:
            self._first_update_at_s = now
        scale = 1.0 if self.settings.sum_reduction else 1.0 / max(samples, 1)
        actions.append(ApplyUpdate(self.version, update_sets, scale, self.samples_total, self.batches_total))
        self._stop(progress_reached(self.settings.stop, version=self.version, samples_total=self.samples_total))

    # --- durability, time and the end ---------------------------------------------------------------------------------

    def _save_if_due(self, now: float, actions: list[EngineAction]) -> None:
        if self.finished is None and self._durability.is_due(self.version, now, final=self.stopping is not None):
            self._durability.order(self.version, now)
            actions.append(StoreCheckpoint(self.version, self.snapshot(now)))

    def _on_stored(self, event: CheckpointStored, actions: list[EngineAction]) -> None:
        partitions = self._durability.stored(event.version)
        if partitions is None:
            raise self._illegal(f"checkpoint of version {event.version} was not ordered")
        actions.extend(SendDurable(self._owner(partition).number, partition.durable) for partition in partitions)
        if self.stopping is not None and event.version == self.version:
            self.finished = self.stopping
            actions.append(Finish(self.finished, event.version))

    def _on_tick(self, now: float, actions: list[EngineAction]) -> None:
        for worker in self._members.expired(now):
            self._remove(worker, "lease", actions)
        timeout_s = max(self.settings.grant_timeout_s, 5.0 * self._compute_mean_s)
        for number in self._running_for(timeout_s, now):
            worker = self._owner(self._partitions[number])
            worker.stalled = True
            self._requeue_all(worker, "timeout", actions)
        # A server that starts again on a finished job has nothing to add to it.
        self._stop(progress_reached(self.settings.stop, version=self.version, samples_total=self.samples_total))
        if self._first_update_at_s is not None:
            self._stop(time_reached(self.settings.stop, self._elapsed_s(now)))

    def _running_for(self, timeout_s: float, now: float) -> list[int]:
        """Partitions whose first set is due. One of several batches has the time of one batch and a set's limit."""
        late: list[int] = []
        for number, since_s in self._running_since_s.items():  # the longest running first
            if now - since_s <= timeout_s:
                break
            is_set = self.policy.exact_version and self._partitions[number].computing > 1
            if not is_set or now - since_s > timeout_s + self.settings.set_limit_s:
                late.append(number)
        return late

    def _on_evaluated(self, event: Evaluated) -> None:
        if event.term != self.term or event.version > self.version:
            self.counters["refused_evaluated"] += 1
            return
        self._stop(target_reached(self.settings.stop, event))

    def _stop(self, reason: str | None) -> None:
        if self.stopping is None:
            self.stopping = reason
