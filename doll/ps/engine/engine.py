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
from doll.ps.engine.events import (
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
    StopRequested,
    StoreCheckpoint,
    Tick,
)
from doll.ps.engine.message_handling import MessageHandling
from doll.ps.engine.partition_state import ActiveGrant, Partition, PushedSet
from doll.ps.engine.stop_rule import progress_reached, target_reached, time_reached
from doll.ps.policies.base import BatchId
from doll.records.control import (
    Alive,
    Announce,
    Durable,
    Evaluated,
    Join,
    Leave,
    Nack,
    NewVersion,
    Push,
    PushedBatch,
    Skip,
)

# Longer than `doll.ps.engine.stuck.STALL_REPORT_S`: workers that wait for a stream without records are reported first.
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
            case Skip():
                self._on_skip(event, now, actions)
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
            if self._apply_skip(now, actions):
                continue
            if self._offered_version != self.version:
                self._offered_version = self.version
                self._offer(actions)
            if group := self.policy.collect(self) or self._end_of_dry_round(now):
                self._send_all_grants(granted, now, actions)
                self._apply(group, now, actions)
                continue
            # A round that is open goes on: it must end before anything can be settled.
            is_paused = self._settling.is_under_way and not self._grants
            starts = () if is_paused else self.policy.start(self)
            if not starts and not self._send_all_grants(granted, now, actions):
                break
            for number in starts:
                granted.setdefault(number, []).append(self._grant(number, now))
        self._send_all_grants(granted, now, actions)
        self._report_changes()
        self._save_if_due(now, actions)
        if self._settling.is_under_way and self._settling.is_settled:
            self._settling.end()
            self._advance(now, actions)  # the checkpoint is ordered: the next round can start

    def _offer(self, actions: list[EngineAction]) -> None:
        """Send the current version to the workers that the policy names, before a grant asks for it."""
        for number in self.policy.recipients(self):
            key = self._publish(self.version, actions)
            included = self._workers[number].applied
            actions.append(NewVersion(term=self.term, worker=number, version=self.version, key=key, included=included))

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
        self._named[self.version] = self._named.get(self.version, 0) + 1
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

    def _send_all_grants(
        self, granted: dict[int, list[ActiveGrant]], now: float, actions: list[EngineAction]
    ) -> bool:  # fmt: skip
        """Send these grants, but for those that a late push answers; whether one did."""
        is_answered = False
        for number, grants in granted.items():
            worker = self._workers[number]
            if worker.partition.late is not None:
                count = self._answer_late(worker, worker.partition.late, grants, now, actions)
                is_answered |= count > 0
                grants = grants[count:]
            size = len(grants) if self.policy.exact_version else 1
            for at in range(0, len(grants), max(size, 1)):
                self._send_grants(worker, grants[at : at + size], actions)
        granted.clear()
        return is_answered

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
            item = pushed.push.batches[len(applied)]
            applied.append(AppliedBatch(lo, hi, grant.granted_at_s, item))
            partition.leader_epoch = item.leader_epoch
            absent = sum(until - begin for begin, until in (*item.gaps, *item.lost)) if item.gaps or item.lost else 0
            self.refusals.add(hi - lo - absent, len(item.dead), item.dead_reasons)
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
        if not samples:
            self.empty_updates += 1
        elif self._first_update_at_s is None:
            self._first_update_at_s = now
        scale = 1.0 if self.settings.sum_reduction else 1.0 / max(samples, 1)
        actions.append(ApplyUpdate(self.version, update_sets, scale, self.samples_total, self.batches_total))
        self._stop_by_progress()
        self._stop_by_refusals()

    def _stop_by_progress(self) -> None:
        updates = self.version - self.empty_updates
        self._stop(progress_reached(self.settings.stop, updates=updates, samples_total=self.samples_total))

    def _stop_by_refusals(self) -> None:
        """End a job whose records are refused: nobody may notice otherwise."""
        limit = self.settings.on_bad_records
        problem = self.refusals.problem(limit.share, limit.first_records)
        if problem is not None and self.stopping is None:
            self.error = problem
            self.refusals.forget_recent()  # whoever resumes the job has read why it ended
            self._stop("bad records")

    def _apply_rests(self, actions: list[EngineAction]) -> bool:
        """Apply what workers had held back, as a version of its own: no batch under way may be computed before it."""
        if (self._grants and self.stopping is None) or not (rests := self._settling.take()):
            return False
        self.version += 1
        sets, settled = tuple(item for item, _ in rests), tuple(until for _, until in rests)
        actions.append(ApplyUpdate(self.version, sets, 1.0, self.samples_total, self.batches_total, settled))
        return True

    def _apply_skip(self, now: float, actions: list[EngineAction]) -> bool:
        """Count batches without a record as applied, as a version of its own that changes nothing (ADR 47)."""
        if not self._skips or (self.policy.exact_version and self._grants):
            return False
        number, skip = self._skips.popitem()
        worker, size = self._workers[number], self.settings.records_per_batch
        partition, first = worker.partition, worker.partition.applied
        if not (first == partition.announced < skip.until and self._settling.is_whole(worker)):
            return False  # something came meanwhile: the worker sends it again
        lo, hi = partition.offsets(first, size)[0], partition.offsets(skip.until, size)[0]
        grant_id, count = next(self._grant_numbers), skip.until - first
        pushed = PushedBatch(
            batch=first, grant_id=grant_id, n_samples=0, loss_sum=0.0,
            gaps=_behind(skip.gaps, lo), lost=_behind(skip.lost, lo),
        )  # fmt: skip
        push = Push(
            worker=number, session=worker.session, term=self.term, version=self.version, key="", batches=(pushed,),
            market=worker.market,
        )  # fmt: skip
        partition.skip_to(skip.until)
        self._durability.applied(partition)
        self.policy.skipped(number, count)
        self._note_change(worker)
        self.batches_total += count
        self.version += 1
        self.empty_updates += 1
        applied = AppliedSet(push, now, (AppliedBatch(lo, hi, now, pushed, count),))
        actions.append(ApplyUpdate(self.version, (applied,), 1.0, self.samples_total, self.batches_total))
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
        actions.extend(
            Durable(term=self.term, worker=self._owner(partition).number, until=partition.durable)
            for partition in partitions
        )
        if self.stopping is not None and event.version == self.version:
            self.finished = self.stopping
            self._publish(self.version, actions)  # the evaluator's last measurement is of this version
            actions.append(Finish(self.finished, event.version, self.error))

    def _on_tick(self, now: float, actions: list[EngineAction]) -> None:
        for worker in self._members.expired(now):
            self._remove(worker, "lease", actions)
        for number in self._late_partitions(now):
            partition = self._partitions[number]
            worker = self._owner(partition)
            worker.stalled = True
            void, since_s = tuple(partition.computing_grants), self._running_since_s[number]
            self._requeue_all(worker, "timeout", actions)
            partition.timed_out, partition.timed_out_since_s = void, since_s
        # A server that starts again on a finished job has nothing to add to it.
        self._stop_by_progress()
        if self._first_update_at_s is not None:
            self._stop(time_reached(self.settings.stop, self._elapsed_s(now)))

    def _late_partitions(self, now: float) -> list[int]:
        """Partitions whose first push is due, and has not come within the time limit of their workers.

        A set ends when it has taken `set_limit_s`, with the batch under way: it has the time of one batch more. A wave
        does not end early: it has the time of all its batches.
        """
        late: list[int] = []
        least_s = self._least_limit_s
        for number, since_s in self._running_since_s.items():  # the longest running first
            if now - since_s <= least_s:
                break
            partition = self._partitions[number]
            if not self._is_push_due(partition):
                continue
            is_set = self.policy.exact_version and partition.computing > 1
            limit_s = self.time_limit_s(self._owner(partition)) + (self.settings.set_limit_s if is_set else 0.0)
            if now - since_s > limit_s:
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


def _behind(spans: Sequence[tuple[int, int]], offset: int) -> tuple[tuple[int, int], ...]:
    """What of these ranges of offsets is not below `offset`."""
    return tuple((max(lo, offset), hi) for lo, hi in spans if hi > offset)
