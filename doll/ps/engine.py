"""The parameter server's state machine: events in, actions out, no I/O, no clock.

It knows where every batch of every partition stands, lets a policy decide which batches start and which gradients are
applied together, and keeps one invariant: each batch is applied at most once and in its partition's order, so that one
integer per partition is the whole ledger.

A policy of exact versions grants a worker several batches at once, and gets their gradients as one sum: a set. A set is
taken, held, lost and applied as one (docs/decisions/0025). So is a wave, the steps of several batches (0034).

Order of effects: grant -> push -> fetched -> apply -> checkpoint -> durable -> acknowledge. A batch whose owner goes,
times out or loses its gradient returns to the front of its partition's queue, together with every later batch of the
partition that is still being computed; another batch takes its place in the group.

No event but a checkpoint takes time for every worker: counts, sets of changed workers, and queues in order of time are
kept as things change (docs/decisions/0019).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from doll.errors import IllegalEventError
from doll.ps.events import (
    AppliedBatch,
    AppliedSet,
    ApplyUpdate,
    CheckpointStored,
    EngineAction,
    Event,
    Finish,
    GradientFetched,
    GradientLost,
    GrantsLost,
    PublishWeights,
    SendDurable,
    StopRequested,
    StoreCheckpoint,
    Tick,
)
from doll.ps.message_handling import MessageHandling
from doll.ps.partitions import ActiveGrant, Partition, PushedSet
from doll.ps.policies.base import BatchId
from doll.ps.stop_rule import progress_reached, target_reached, time_reached
from doll.records import Alive, Announce, Evaluated, Join, Leave, Nack, Push

# Longer than `doll.ps.stuck.STALL_REPORT_S`: workers that wait for a stream without records are reported first.
DRY_ROUND_S: Final = 15.0


class Engine(MessageHandling):
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

    # --- progress -----------------------------------------------------------------------------------------------------

    def _advance(self, now: float, actions: list[EngineAction]) -> None:
        """Apply what belongs together and start what may start, until nothing changes."""
        granted: dict[int, list[ActiveGrant]] = {}  # at this version, not sent yet: what a worker gets is one message
        while self.finished is None:
            self._report_changes()
            if self._apply_rests(actions):
                continue
            if self.stopping is not None:
                break
            if self._offered_version != self.version:
                self._offered_version = self.version
                if recipients := tuple(self.policy.recipients(self)):
                    included = tuple(self._workers[number].applied for number in recipients)
                    actions.append(PublishWeights(self.version, recipients, included))
            if group := self.policy.collect(self) or self._end_of_dry_round(now):
                self._send_all_grants(granted, actions)
                self._apply(group, now, actions)
                continue
            # A round that is open goes on: it must end before anything can be settled.
            is_paused = self._settling.is_under_way and not self._grants
            starts = () if is_paused else self.policy.start(self)
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
        if self._settling.is_under_way and self._settling.is_settled:
            self._settling.end()
            self._advance(now, actions)  # the checkpoint is ordered: the next round can start

    def _end_of_dry_round(self, now: float) -> Sequence[BatchId]:
        """A round that a checkpoint waits for ends with those that came, where the others have had nothing for a while.

        Otherwise a stream that stops would keep what is in the model from becoming durable (docs/decisions/0035).
        """
        is_waited_for = self._settling.is_under_way and not self.num_computing and self._held
        return self.held_batches() if is_waited_for and now - self._last_held_at_s >= DRY_ROUND_S else ()

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
        elif partition.number in self._running_since_s and (grant.batch + 1) % self.policy.batches_per_push == 0:
            # Until now no push was due: the worker may have waited for this grant.
            self._running_since_s[partition.number] = now
            self._running_since_s.move_to_end(partition.number)
        self._note_change(worker)
        return grant

    def _send_all_grants(self, granted: dict[int, list[ActiveGrant]], actions: list[EngineAction]) -> None:
        for number, grants in granted.items():
            self._send_grants(self._workers[number], grants, actions)
        granted.clear()

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
                self._owner(partition).moved += grant.pushed.max_change
            pushed, applied = entry
            applied.append(AppliedBatch(lo, hi, grant.granted_at_s, pushed.push.batches[len(applied)]))
            self._note_change(self._owner(partition))
        for number, (pushed, applied) in sets.items():
            if len(applied) < len(pushed.grants):
                raise IllegalEventError(
                    f"policy {self.policy.name} applies {len(applied)} batches of a set of {len(pushed.grants)} "
                    f"(grant {number}): their gradients are one sum"
                )
        for pushed, _ in sets.values():
            self._settling.applied(self._owner(self._partitions[pushed.grants[0].partition]), pushed.push)
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

    def _apply_rests(self, actions: list[EngineAction]) -> bool:
        """Apply what workers had held back, as a version of its own: no batch under way may be computed before it."""
        if (self._grants and self.stopping is None) or not (rests := self._settling.take()):
            return False
        self.version += 1
        sets, settled = tuple(item for item, _ in rests), tuple(until for _, until in rests)
        actions.append(ApplyUpdate(self.version, sets, 1.0, self.samples_total, self.batches_total, settled))
        return True

    # --- durability, time and the end ---------------------------------------------------------------------------------

    def _save_if_due(self, now: float, actions: list[EngineAction]) -> None:
        if self.finished is None and self._durability.is_due(self.version, now, final=self.stopping is not None):
            if not self._settling.is_settled:
                self._settling.is_under_way = True
                if not self._grants or self.stopping is not None:
                    actions.extend(self._settling.ask(now))
                return
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
            if not self._is_push_due(self._partitions[number]):
                continue
            is_set = self._takes_sets and self._partitions[number].computing > 1
            if not is_set or now - since_s > timeout_s + self.settings.set_limit_s:
                late.append(number)
        return late

    def _is_push_due(self, partition: Partition) -> bool:
        """Whether its worker has been granted what it waits for before it pushes (`PolicyConfig.batches_per_push`)."""
        size = self.policy.batches_per_push
        return size == 1 or partition.granted // size > partition.received // size

    def _on_evaluated(self, event: Evaluated) -> None:
        if event.term != self.term or event.version > self.version:
            self.counters["refused_evaluated"] += 1
            return
        self._stop(target_reached(self.settings.stop, event))

    def _stop(self, reason: str | None) -> None:
        if self.stopping is None and reason is not None:
            self.stopping = reason
            self._settling.stop()
