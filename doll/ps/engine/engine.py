"""The parameter server's state machine, which takes events and returns actions. It has no I/O and no clock.

The engine knows the state of every batch of every partition. A policy decides which batches start and which gradients
are applied together. The engine guarantees that the batches of a partition are applied in order, each at most once.
Therefore one integer per partition, the number of applied batches, is the whole ledger.

A policy of exact versions grants a worker several batches at once. The worker returns the sum of their gradients, a
*set*. A set is received, held, lost and applied as a whole (docs/decisions/0025). The same is true of a *wave*, which
is the sum of the steps of several batches (0034).

Order of effects: grant -> push -> fetched -> apply -> checkpoint -> durable -> acknowledge. A batch returns to the
front of its worker's queue if the worker leaves, the batch's time limit passes or its gradient is lost. Every later
batch of the worker that is still being computed returns with it. The time for an event does not depend on the number of
workers, except for checkpoints (docs/decisions/0019).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from doll.errors import IllegalEventError
from doll.ps.engine import events as ev
from doll.ps.engine.batch_queue import ActiveGrant, LatePush, PushedSet, left_out_of
from doll.ps.engine.grants import is_allowed
from doll.ps.engine.membership import Worker
from doll.ps.engine.partition_state import PartitionState, behind, is_possible
from doll.ps.engine.state import EngineState
from doll.ps.engine.stopping import progress_reached, target_reached, time_reached
from doll.ps.policies.base import BatchId
from doll.records.control import (
    Alive,
    Announce,
    Drifted,
    Durable,
    Evaluated,
    Grant,
    Join,
    Leave,
    Nack,
    NewVersion,
    Push,
    PushedBatch,
    Scale,
    Skip,
    SourceEnded,
    Welcome,
)
from doll.storage.blobs import scope_of, weights_key

# This is longer than `doll.ps.engine.stopping.STALL_REPORT_S`, so that workers without records are reported first.
DRY_ROUND_S: Final = 15.0
VOID: Final = "requeued_void"  # counter of batches that are computed again because the policy made them void
# Number of a worker's newest grants that keep their weights, if the policy allows later weights. It is two, because the
# worker only knows the second newest grant while the newest one is being sent.
_NAMING_GRANTS: Final = 2


class Engine(EngineState):
    """The state machine of the parameter server. The state of the job changes only in `handle`."""

    def handle(self, event: ev.Event, now: float) -> list[ev.EngineAction]:
        """Take one event at time `now` (monotonic seconds), and return the actions in the order of their execution.

        Refused messages (late, duplicate, fenced, out of range) change only a counter.

        Raises:
            IllegalEventError: either the runner reports the outcome of an action that was never ordered, and the engine
                has not changed; or the policy demands something impossible. In the second case the engine may have
                changed, so end the process.
        """
        self._recent_events.append((now, event))
        self._now, self._actions = now, []
        if self.finished is not None:
            return self._actions
        match event:
            case Join():
                self._on_join(event)
            case Announce():
                self._on_announce(event)
            case Skip():
                self._on_skip(event)
            case Push():
                self._on_push(event)
            case Nack():
                self._on_nack(event)
            case Alive():
                if (worker := self._accept(event.worker, event.session)) is not None:
                    worker.heard(event)
                    self._members.usual = event.usual or self._members.usual
            case Leave():
                if (worker := self._accept(event.worker, event.session)) is not None:
                    worker.left = True
                    self._remove(worker, "leave")
            case SourceEnded():
                if self.ending.end(event.ends):
                    self._actions += self.ending.flushes(self._workers, self.term)
                    self._durability.keep()  # a later server must know this
            case Evaluated():
                self._on_evaluated(event)
            case Drifted():
                self._on_drifted(event)
            case Scale():
                self._on_scale(event)
            case ev.GradientFetched():
                self._on_fetched(event)
            case ev.GradientLost():
                self._on_lost(event)
            case ev.GrantsLost():
                self._on_grants_lost(event)
            case ev.CheckpointStored():
                self._on_stored(event)
            case ev.TopicGrew() if self.stopping is None:  # otherwise the next server adds the partitions
                self._welcome_again(self.moves.add_partitions(event.partitions, self._now))
            case ev.Tick():
                self._on_tick()
            case ev.StopRequested():
                self._stop(event.reason)
        self._advance()
        return self._actions

    # --- workers join and leave ---------------------------------------------------------------------------------------

    def _on_join(self, event: Join) -> None:
        session = self._workers[event.worker].session if 0 <= event.worker < len(self._workers) else 0
        worker = self._members.admit(event, self._now, self._actions)
        if worker is None:
            return
        if worker.session != session:
            self._lose_rest(worker)
        self._requeue_all(worker, "rejoin")
        self._forget_skips(worker)
        self._forget_waiting(worker)
        self._actions.append(self._welcome(worker, event.incarnation))

    def _accept(self, number: int, session: int) -> Worker | None:
        """Return the sender of a message, if the message is from the worker's current session."""
        live = self._members.num_live
        worker = self._members.accept(number, session, self._now, self._actions)
        if worker is not None and live != self._members.num_live:  # the worker was silent for longer than its lease
            self._grants.note_change(worker)
        return worker

    def _remove(self, worker: Worker, cause: str) -> None:
        self._members.remove(worker)
        self._forget_skips(worker)
        self._requeue_all(worker, cause)
        self._forget_late(worker)
        self._lose_rest(worker)
        self._grants.note_change(worker)

    def _on_scale(self, event: Scale) -> None:
        released = self.moves.released if event.released is None else frozenset(event.released)
        released &= frozenset(range(event.workers))
        if event.released is None and len(released) == event.workers:
            released = frozenset()
        if event.run_id != self.start.run_id or not len(released) < event.workers <= self.settings.places:
            self.counters["refused_content"] += 1
        elif (event.workers, released) != (self.moves.num_workers, self.moves.released):
            self._welcome_again(self.moves.scale(event.workers, released, self._now))
            self._durability.keep()  # a later server must know this

    def _freeze(self, giver: Worker, partition: PartitionState) -> None:
        """Stop grants for a partition that is to move. Requeue its first batch that is being computed, and all later
        batches of the worker. A wave is requeued as a whole, because it may never be full without this partition."""
        self._skips.pop(partition.number, None)
        self._forget_late(giver)
        takes_whole = self.policy.batches_per_push > 1
        for grant in giver.queue.computing_grants:
            if takes_whole or grant.partition is partition:
                first = grant if grant.pushed is None else grant.pushed.grants[0]
                self._requeue_from(giver, first.batch, "moved")
                break
        giver.queue.withdraw(partition)
        self._grants.note_change(giver)

    def _welcome_again(self, workers: Iterable[int]) -> None:
        """Send a Welcome to these workers, with the partitions that each serves now. Their computations continue."""
        for number in workers:
            if (worker := self._workers[number]).joined:  # otherwise the worker gets a Welcome when it joins
                self._actions.append(self._welcome(worker, worker.incarnation))

    def _lose_rest(self, worker: Worker) -> None:
        """Roll back if the worker's earlier process has ended while it held back a part of its steps."""
        if self._settling.holds_back(worker):
            self._roll_back(f"worker {worker.number} is lost with a part of its steps")

    def _roll_back(self, reason: str) -> None:
        self.finished = "rolled back"
        self._actions.append(ev.RollBack(reason))

    def _forget_skips(self, worker: Worker) -> None:
        if self._skips:
            self._skips = {at: skip for at, skip in self._skips.items() if at not in worker.queue.partitions}

    def _requeue_all(self, worker: Worker, cause: str) -> None:
        if worker.queue.computing_grants:
            self._requeue_from(worker, worker.queue.computing_grants[0].batch, cause)

    def _requeue_from(self, worker: Worker, batch: int, cause: str) -> None:
        """Return batch `batch` and every later computing batch of this worker to the queue."""
        taken = self._grants.take_back(worker, batch)
        self._limits.taken_back(worker)
        if len(taken) > 1:
            self.counters["requeued_sets"] += 1
        for grant in taken:
            self.counters["requeued"] += 1
            self.counters[f"requeued_{cause}"] += 1
            if grant.pushed is None:
                self._release(grant)
            elif grant.number == grant.pushed.number:
                self._drop(grant.pushed.push, cause)

    def _release(self, grant: ActiveGrant) -> None:
        """Note that this grant does not need its weights any more. Release them if no other grant needs them."""
        if self._grants.release(grant) and grant.version < self.version:
            self._actions.append(ev.ReleaseWeights(grant.version))

    def _forget_waiting(self, worker: Worker) -> None:
        """Forget the announced and late batches of this worker, because its process holds other batches now."""
        self._forget_late(worker)
        worker.queue.forget_waiting()
        self._grants.note_change(worker)

    # --- announcements ------------------------------------------------------------------------------------------------

    def _on_announce(self, event: Announce) -> None:
        worker = self._accept(event.worker, event.session)
        if worker is None:
            return
        # If the worker's job file allows more pending batches, the worker announces the others again later.
        queue = worker.queue
        for run in event.runs:
            if not self.moves.serves(worker, run.partition) and 0 <= run.partition < len(self._partitions):
                self.counters["refused_moved"] += 1  # the worker learns of the move from a Welcome, which is being sent
                continue
            is_hole = run.partition not in queue.partitions or not is_possible(run, self.settings.records_per_batch)
            if not is_hole:
                if queue.partitions[run.partition].lacks_room_before(run):
                    continue  # the worker regularly announces all batches that it holds again
                room = self.settings.max_pending_batches - queue.pending
                is_hole = queue.announce(run, room) is None and room > 0
            if is_hole:
                # The worker's state does not fit the engine's state, so it must join again.
                self.counters["refused_announce"] += 1
                self._actions.append(ev.SendHello(event.worker))
                break
        self._grants.note_change(worker)

    def _on_skip(self, event: Skip) -> None:
        worker = self._accept(event.worker, event.session)
        if worker is None:
            return
        partition = worker.queue.partitions.get(event.partition)
        if partition is None:
            self.counters["refused_content"] += 1
        elif event.until <= partition.applied:
            self.counters["refused_duplicate"] += 1
        elif not (event.first <= partition.applied == partition.announced and self._settling.is_whole(worker)):
            # Earlier batches must be in the model with their whole steps first. The worker sends the Skip again.
            self.counters["refused_order"] += 1
        elif not partition.is_covered(event, self.settings.records_per_batch):
            self.counters["refused_content"] += 1
        else:
            self._skips[event.partition] = event

    # --- pushes -------------------------------------------------------------------------------------------------------

    def wants(self, push: Push) -> bool:
        """Return whether this push is the first answer to a valid grant, so that its gradient would be fetched."""
        if push.term != self.term or not push.batches or not push.key:
            return False
        grant = self._grants.get(push.batches[0].grant_id)
        return grant is not None and grant.pushed is None and grant.worker == push.worker

    def _find(self, worker: Worker, term: int, number: int, batch: int) -> ActiveGrant | None:
        """Return the grant that a worker answers, if the grant is still valid."""
        grant = self._grants.get(number)
        if term != self.term or grant is None or grant.worker != worker.number or grant.batch != batch:
            return None
        return grant

    def _on_push(self, event: Push) -> None:
        worker = self._accept(event.worker, event.session)
        if worker is None:
            self._drop(event, "fenced")
            return
        self._clear_stall(worker)
        if not event.batches:
            self._on_rest(worker, event)
            return
        standing = [self._find(worker, event.term, item.grant_id, item.batch) for item in event.batches]
        grants = tuple(grant for grant in standing if grant is not None)
        if not grants:
            self._on_late(worker, event)
        elif grants[0].pushed is not None and tuple(standing) == grants[0].pushed.grants:
            self.counters["refused_duplicate"] += 1
        elif len(grants) < len(standing) or any(grant.pushed is not None for grant in grants):
            # Some grants of the set are not valid any more. A sum cannot be split: all batches are computed again.
            self.counters["refused_partly"] += 1
            if not any(grant.pushed is not None and grant.pushed.push.key == event.key for grant in grants):
                self._drop(event, "partly void")
            if left := [grant.batch for grant in grants if grant.pushed is None]:
                self._requeue_from(worker, min(left), "partly_void")
        elif not worker.queue.begins_with(grants):
            # An earlier push of this worker is missing, and must be applied before this one.
            self.counters["refused_order"] += 1
            self._drop(event, "order")
            self._requeue_from(worker, min(grant.batch for grant in grants), "order")
        elif not is_allowed(event, grants, self.policy, self.version):
            # A repetition of this useless push would be useless, too. The timeout requeues the batches.
            self.counters["refused_content"] += 1
            self._drop(event, "content")
        else:
            self._limits.learn_from(worker, len(grants), self._now)
            self._take(worker, PushedSet(event, grants, self._now))

    def _take(self, worker: Worker, pushed: PushedSet) -> None:
        """Accept a push whose gradient is in the blob store, or a push without a gradient."""
        push = pushed.push
        worker.market = push.market
        for grant in pushed.grants:
            grant.pushed = pushed
            self._release(grant)
        self._limits.answered(worker)
        if push.key:
            # Under a policy that holds back steps, rests may be applied before this set at the end of the job.
            is_ordered = self.policy.exact_version and not self.policy.holds_back
            in_order = is_ordered and self._grants.is_first_computing(pushed.number)
            self._actions.append(ev.FetchGradient(pushed.number, push.key, push.version, in_order))
        else:
            self._hold(pushed)

    def _clear_stall(self, worker: Worker) -> None:
        """End the worker's stall, because it has answered a grant. From now on it can get another grant."""
        if worker.stalled:
            worker.stalled = False
            self._grants.note_change(worker)

    def _drop(self, event: Push, reason: str) -> None:
        if event.key:
            self._actions.append(ev.DropGradient(event.key, reason))

    def _on_fetched(self, event: ev.GradientFetched) -> None:
        if event.grant_id in self._settling.rests:
            self._settling.fetched(event.grant_id)
            return
        grant = self._grants.get(event.grant_id)
        if grant is None:
            return  # the worker was lost while the gradient was being read: its batches are in the queue again
        if grant.pushed is None or grant.held or grant.pushed.number != event.grant_id:
            raise self._illegal(f"gradient of grant {event.grant_id} was not asked for")
        grant.pushed.max_change = event.max_change
        self._hold(grant.pushed)

    def _hold(self, pushed: PushedSet) -> None:
        worker = self._grants.hold(pushed)
        self._last_held_at_s = self._now
        self._limits.next_began(worker, self._now)
        self._settling.received(worker)

    def _on_lost(self, event: ev.GradientLost) -> None:
        grant = self._grants.get(event.grant_id)
        if event.grant_id in self._settling.rests:
            self._roll_back("what a worker had held back is not in the blob store")
        elif grant is not None:
            if grant.held:
                raise self._illegal(f"gradient of grant {event.grant_id} is held already")
            self._requeue_from(self._workers[grant.worker], grant.batch, "blob_lost")

    def _on_nack(self, event: Nack) -> None:
        worker = self._accept(event.worker, event.session)
        if worker is None:
            return
        self._clear_stall(worker)
        grant = self._find(worker, event.term, event.grant_id, event.batch)
        if grant is None or grant.pushed is not None:
            self.counters["refused_late"] += 1
            return
        self._requeue_from(worker, event.batch, f"nack_{event.reason}")
        if event.reason == "weights":
            self._published = self.version
            self._actions.append(ev.RepublishWeights(self.version))
        else:
            # The worker lacks a batch that it has announced, so its state does not fit the engine's state. It gets no
            # grant until it has joined again.
            self._forget_waiting(worker)
            self._actions.append(ev.SendHello(event.worker))

    def _illegal(self, problem: str) -> IllegalEventError:
        return IllegalEventError(f"{problem}; recent events: {list(self._recent_events)}")

    # --- pushes after their time limit -------------------------------------------------------------------------------

    def _on_late(self, worker: Worker, event: Push) -> None:
        """Handle a push whose grants are not valid any more. If the reason is only the time limit, and no other worker
        has got the batches, the push answers the next grants of the batches. Without this rule, a batch that always
        takes longer than the limit would never be learned.

        Some policies refuse late pushes: a held-back part may have been requested since, or the weights are too old.
        """
        queue = worker.queue
        if queue.late is not None and queue.late.push.batches == event.batches:
            self.counters["refused_duplicate"] += 1
            return
        grants = queue.answered_late(event) if event.term == self.term else ()
        if grants:
            self._limits.learn(worker, (self._now - queue.timed_out_since_s) / len(grants))
            if self.policy.takes_late_pushes:
                queue.timed_out, queue.late = (), LatePush(event, grants)
                return
        longest_s = max(item.compute_s for item in event.batches)
        if 0 <= longest_s < math.inf:
            # The reported time is limited, because a worker cannot compute for longer than it has been live.
            worker.batch_s = max(worker.batch_s, min(longest_s, self._now - worker.live_since_s))
        self._refuse_late(event)

    def _refuse_late(self, push: Push) -> None:
        self.counters["refused_late"] += 1
        self._drop(push, "late")

    def _answer_late(self, worker: Worker, late: LatePush, grants: Sequence[ActiveGrant]) -> int:
        """Use a late push as the answer to the first of the new `grants`. Return the number of answered grants, which
        is 0 or the number of grants that the push names.

        The push gets the numbers of the new grants, so it has the same effect as a push that answers them in time.
        """
        worker.queue.late = None
        new = tuple(grants[: len(late.grants)])
        if [grant.batch for grant in new] != [grant.batch for grant in late.grants]:
            self._refuse_late(late.push)
            return 0
        for grant, void in zip(new, late.grants, strict=True):
            grant.granted_at_s = void.granted_at_s
            if not self.policy.exact_version:  # the version that was allowed for the batch before is allowed again
                grant.min_version = min(grant.min_version, void.min_version)
        answers = zip(late.push.batches, new, strict=True)
        batches = tuple(msgspec.structs.replace(item, grant_id=grant.number) for item, grant in answers)
        push = msgspec.structs.replace(late.push, batches=batches)
        if not is_allowed(push, new, self.policy, self.version):
            self._refuse_late(push)
            return 0
        self.counters["accepted_late"] += 1
        self._take(worker, PushedSet(push, new, self._now))
        return len(new)

    def _forget_late(self, worker: Worker) -> None:
        """Forget the late push of this worker, and accept none for its earlier grants."""
        queue = worker.queue
        queue.timed_out = ()
        if queue.late is not None:
            self._drop(queue.late.push, "late")
            queue.late = None

    # --- what workers hold back ---------------------------------------------------------------------------------------

    def _on_rest(self, worker: Worker, event: Push) -> None:
        """Handle a rest (the held-back part of earlier batches), which a worker sends on request or before it
        leaves."""
        queue = worker.queue
        if not self.policy.holds_back:
            self.counters["refused_content"] += 1
            self._drop(event, "content")
        elif event.term != self.term or self._settling.is_known(worker, event.settles):
            self.counters["refused_duplicate"] += 1
        elif not event.key and self._settling.holds_back(worker):
            # The worker holds back a part of its steps, and this push lacks the part. Another push must contain it.
            self.counters["refused_empty_rest"] += 1
        elif not queue.applied <= event.settles <= queue.received:
            # The rest fits other batches than those at the server, and the worker does not have it any more.
            self._roll_back(
                f"worker {worker.number} settles batches below {event.settles}, and {queue.applied} to "
                f"{queue.received} can be settled"
            )
        else:
            number = self._settling.add(worker, event, self._now)
            if event.key:
                self._actions.append(ev.FetchGradient(number, event.key, event.version))

    def _apply_rests(self) -> bool:
        """Apply the rests as a separate version, if there are no valid grants. Return whether a version was made."""
        if not self._settling.rests or (self._grants and self.stopping is None):
            return False
        if not (rests := self._settling.take()):
            return False
        settled = sorted(
            (partition.number, partition.applied)
            for _, worker in rests
            for partition in worker.queue.partitions.values()
        )
        self._make_version(tuple(item for item, _ in rests), settled=tuple(settled))
        return True

    # --- progress -----------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Apply the first rule, in a fixed order, that changes something. Repeat until no rule changes anything."""
        rules = (
            self._apply_rests, self._apply_skip, self._move_partitions, self._offer_version, self._compute_again,
            self._apply_group, self._start_batches,
        )  # fmt: skip
        while self.finished is None:
            for worker in self.ending.look(self._workers, self._grants.changed):
                self._grants.note_change(worker)
            if self._grants.changed:
                self._report_changes()
            for rule in rules if self.stopping is None else rules[:1]:  # at the end: rests only
                if rule():
                    break
            else:
                break
        self._send_all_grants()
        if self._grants.changed:
            self._report_changes()
        self._save_if_due()
        if self._settling.is_under_way and self._settling.is_settled:
            self._settling.end()
            self._advance()  # the checkpoint is ordered, so the next round can start

    def _move_partitions(self) -> bool:
        # A gradient that is being fetched will soon be held. Until then its batch cannot be requeued.
        if not self.moves.targets or any(isinstance(item, ev.FetchGradient) for item in self._actions):
            return False
        self._send_all_grants()
        self._welcome_again(self.moves.carry_out(self._now, self._freeze))
        return bool(self._grants.changed)  # also if batches were only withdrawn, because the policy must learn of this

    def _offer_version(self) -> bool:
        """Send a new version to the workers that the policy names, before they get a grant. Always return False."""
        if self._offered_version != self.version:
            self._offered_version = self.version
            for number in self.policy.recipients(self):
                self._actions += self._offered(self._workers[number], self.version)
        return False

    def _compute_again(self) -> bool:
        """Return held batches to the queue if the policy makes them void. Return whether there were such batches."""
        if not (void := self.policy.void(self)):
            return False
        self._send_all_grants()
        for batch_id in void:
            pushed = self._grants.give_back(batch_id)
            self.counters["requeued"] += 1
            self.counters[VOID] += 1
            if pushed.push.key:
                self._actions.append(ev.DropGradient(pushed.push.key, "void", pushed.number))
        return True

    def _apply_group(self) -> bool:
        if not (group := self.policy.collect(self) or self._end_of_dry_round()):
            return False
        self._send_all_grants()
        self._apply(group)
        return True

    def _start_batches(self) -> bool:
        # An unfinished round continues, because it must end before rests can be settled.
        is_paused = self._settling.is_under_way and not self._grants
        starts = () if is_paused else self.policy.start(self)
        for number in starts:
            self._granted.setdefault(number, []).append(self._grant(number))
        return bool(starts) or self._send_all_grants()

    def _end_of_dry_round(self) -> Sequence[BatchId]:
        """Return the held batches, which then end the round. This happens only if a checkpoint or a move of a partition
        waits for the round's end and the other workers have had no records for a while; otherwise return no batches.

        Without this rule, a stream that stops would prevent checkpoints (docs/decisions/0035), and a worker that is to
        leave would stay until records come again. A worker whose partitions are to move cannot contribute a batch, so
        the round of a checkpoint does not wait for this worker.
        """
        if self.num_computing or not self.num_held:
            return ()
        is_dry = self._now - self._last_held_at_s >= DRY_ROUND_S
        if self._settling.is_under_way:
            is_over = is_dry or bool(self.moves.frozen)
        else:
            is_over = is_dry and self.moves.waits_for_held
        return self.held_batches() if is_over else ()

    def _report_changes(self) -> None:
        changed, self._grants.changed = self._grants.changed, {}
        self.policy.changed(self, changed.keys())

    def _grant(self, number: int) -> ActiveGrant:
        worker = self._workers[number]
        if not worker.waiting:
            raise IllegalEventError(f"policy {self.policy.name} starts worker {number}, which has no waiting batch")
        min_version = self.policy.min_version(self, number)
        if not 0 <= min_version <= self.version:
            raise IllegalEventError(
                f"policy {self.policy.name} wants version {min_version} at least, expected 0 to {self.version}"
            )
        grant = self._grants.grant(worker, self.version, min_version, self._now)
        self._limits.granted(worker, grant, self._now)
        standing = worker.queue.computing_grants
        if self.policy.takes_later_weights and len(standing) > _NAMING_GRANTS:
            self._release(standing[-1 - _NAMING_GRANTS])
        return grant

    def _send_all_grants(self) -> bool:
        """Send the new grants, except those that a late push answers. Return whether a late push answers any."""
        is_answered = False
        granted, self._granted = self._granted, {}
        for number, grants in granted.items():
            worker, count = self._workers[number], 0
            if worker.queue.late is not None:
                count = self._answer_late(worker, worker.queue.late, grants)
                is_answered |= count > 0
            self._actions += self._grant_records(worker, grants[count:])
        return is_answered

    def _on_grants_lost(self, event: ev.GrantsLost) -> None:
        if 0 <= event.worker < len(self._workers):
            worker = self._workers[event.worker]
            self._clear_stall(worker)  # the grant whose time limit has passed may never have reached the worker
            if left := [grant for grant in worker.queue.computing_grants if grant.pushed is None]:
                messages = tuple(self._grant_records(worker, left))
                self.counters["grants_sent_again"] += len(messages)
                self._actions += messages

    def _apply(self, group: Sequence[BatchId]) -> None:
        sets = tuple(self._applied_set(pushed) for pushed in self._grants.apply(group))
        samples = sum(item.num_samples for item in sets)
        self.samples_total += samples
        self.batches_total += len(group)
        if not samples:
            self.empty_updates += 1
        elif self._first_update_at_s is None:
            self._first_update_at_s = self._now
        weight = sum(item.weight for item in sets)
        self._make_version(sets, 1.0 if self.settings.sum_reduction or not weight else 1.0 / weight)
        self._stop_by_progress()
        self._stop_by_refusals()

    def _applied_set(self, pushed: PushedSet) -> ev.AppliedSet:
        worker, push, size = self._workers[pushed.grants[0].worker], pushed.push, self.settings.records_per_batch
        applied = []
        for grant, item in zip(pushed.grants, push.batches, strict=True):
            partition, number = grant.batch_id
            lo, hi = grant.partition.offsets(number, size)
            applied.append(ev.AppliedBatch(partition, number, lo, hi, grant.granted_at_s, item, cut=hi - lo < size))
            grant.partition.leader_epoch = item.leader_epoch
            self.events = self.events.with_batch(item.known_times)
            absent = sum(until - begin for begin, until in (*item.gaps, *item.lost)) if item.gaps or item.lost else 0
            self.refusals.add(hi - lo - absent, len(item.dead), item.dead_reasons)
            for reason, samples in item.skipped:
                self.refusals.skipped.add(reason, samples)
            if item.held_out:
                self.counters["held_out_records"] += len(item.held_out)
        worker.moved += pushed.max_change
        self._durability.applied(worker, len(applied))
        self._settling.applied(worker, push)
        return ev.AppliedSet(push, pushed.received_at_s, tuple(applied))

    def _make_version(
        self, sets: tuple[ev.AppliedSet, ...], scale: float = 1.0, settled: tuple[tuple[int, int], ...] = ()
    ) -> None:  # fmt: skip
        self.version += 1
        lr_factor = 1 / max(1, self.num_live) if self.settings.divides_lr else 1.0
        ema_factor = 1.0
        if self.settings.drift_reaction is not None and self.version <= self.raised_until:
            lr_factor *= self.settings.drift_reaction.lr_factor
            ema_factor = self.settings.drift_reaction.ema_factor
        self._actions.append(
            ev.ApplyUpdate(
                self.version, sets, scale, self.samples_total, self.batches_total, settled, lr_factor, self.events,
                ema_factor,
            )
        )  # fmt: skip

    def _apply_skip(self) -> bool:
        """Count batches without a record as applied. They make a separate version with unchanged weights (ADR 47)."""
        if not self._skips or (self.policy.exact_version and self._grants):
            return False
        number, skip = self._skips.popitem()
        worker, size = self._owners[number], self.settings.records_per_batch
        partition, first = self._partitions[number], self._partitions[number].applied
        if not (first == partition.announced < skip.until and self._settling.is_whole(worker)):
            return False  # other batches have arrived since, so the worker sends the Skip again
        lo, hi = partition.offsets(first, size)[0], partition.offsets(skip.until, size)[0]
        pushed = PushedBatch(
            batch=-1, grant_id=self._grants.next_number(), n_samples=0, loss_sum=0.0,
            gaps=behind(skip.gaps, lo), lost=behind(skip.lost, lo),
        )  # fmt: skip
        push = Push(
            worker=worker.number, session=worker.session, term=self.term, version=self.version, key="",
            batches=(pushed,), market=worker.market,
        )  # fmt: skip
        count = worker.queue.skip(partition, skip.until)
        worker.applied += count
        self._durability.applied(worker, count)
        self.policy.skipped(worker.number, count)
        self._grants.note_change(worker)
        self.batches_total += count
        self.empty_updates += 1
        self._make_version(
            (ev.AppliedSet(push, self._now, (ev.AppliedBatch(number, first, lo, hi, self._now, pushed, count),)),)
        )
        return True

    # --- records for workers; weights are published before the first record that names them --------------------------

    def _welcome(self, worker: Worker, incarnation: int) -> Welcome:
        served = tuple(part.served(self.ending.end_of(at)) for at, part in sorted(worker.queue.partitions.items()))
        return Welcome(
            term=self.term, worker=worker.number, process=worker.process, session=worker.session, served=served,
            fingerprint=self.settings.fingerprint, incarnation=incarnation, samples_id=self.start.samples_id,
            generation=self.start.generation, run_id=self.start.run_id, usual=self._members.usual,
            grid=self.start.grid,
        )  # fmt: skip

    def _grant_records(self, worker: Worker, grants: Sequence[ActiveGrant]) -> Iterator[ev.EngineAction]:
        """Yield the messages for grants of consecutive batches of one worker. Under a policy of exact versions this is
        one message. A repeated grant names the same weights as before, because they are still kept."""
        size = max(1, len(grants)) if self.policy.exact_version else 1
        for at in range(0, len(grants), size):
            first, sent = grants[at], grants[at : at + size]
            yield from self._publish(first.version)
            yield Grant(
                term=self.term, worker=worker.number, session=worker.session, first=first.batch,
                grant_ids=tuple(grant.number for grant in sent), batches=tuple(grant.batch_id for grant in sent),
                version=first.version, min_version=first.min_version, key=self._key(first.version),
                included=first.included, left_out=left_out_of(sent),
                num_live=max(1, self.num_live) if self.settings.divides_steps else 1,
            )  # fmt: skip

    def _offered(self, worker: Worker, version: int) -> Iterator[ev.EngineAction]:
        yield from self._publish(version)
        yield NewVersion(
            term=self.term, worker=worker.number, version=version, key=self._key(version),
            included=worker.queue.applied,
        )  # fmt: skip

    def _publish(self, version: int) -> Iterator[ev.EngineAction]:
        """Publish this version, unless it or a newer one was published before."""
        if version > self._published:
            self._published = version
            yield ev.PublishWeights(version)

    def _key(self, version: int) -> str:
        return weights_key(scope_of(self.settings.job, self.start.run_id), self.term, version)

    # --- durability, time and the end ---------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        is_last = self.stopping is not None
        is_due = self._durability.is_due(self.version, self._now, final=is_last, events=self.events)
        if self.finished is not None or not is_due:
            return
        if self._settling.is_settled:
            self._durability.order(self.version, self._now, self.events)
            self._actions.append(ev.StoreCheckpoint(self.version, self.snapshot(self._now)))
            return
        self._settling.is_under_way = True
        if not self._grants or is_last:
            self._actions.extend(self._settling.ask(self._now))

    def _on_stored(self, event: ev.CheckpointStored) -> None:
        advanced = self._durability.stored(event.version)
        if advanced is None:
            raise self._illegal(f"checkpoint of version {event.version} was not ordered")
        for worker, (until, batches, cut) in advanced.items():
            durable = Durable(term=self.term, worker=worker.number, until=until, batches=batches, left_out=cut)
            self._actions.append(durable)
        if event.version == self.version:
            # On a quiet stream no worker asks for the last version, but evaluator and model server need it.
            self._actions += self._publish(self.version)
        # A checkpoint that was ordered before the target was met lacks the evaluation; the next one contains it.
        if self.stopping is not None and event.version == self.version and self._durability.is_kept:
            self.finished = self.stopping
            self._actions.append(ev.Finish(self.finished, event.version, self.error))

    def _on_tick(self) -> None:
        self.moves.balance(self._now)
        for worker in self._members.expired(self._now):
            self._remove(worker, "lease")
        for worker, since_s in self._limits.overdue(self._now):
            worker.stalled = True
            void = tuple(worker.queue.computing_grants)
            self._requeue_all(worker, "timeout")
            worker.queue.timed_out, worker.queue.timed_out_since_s = void, since_s
        if self.policy.batches_per_push > 1:
            self._actions += self.ending.asks(self._workers, self.term, self._now)
        # A server that is started on a finished job must end at once.
        self._stop_by_progress()
        if self.reached is not None:
            self._stop(target_reached(self.settings.stop, self.reached))
        if self._first_update_at_s is not None:
            self._stop(time_reached(self.settings.stop, self._elapsed_s(self._now)))

    def _on_evaluated(self, event: Evaluated) -> None:
        if event.term != self.term or event.version > self.version:
            self.counters["refused_evaluated"] += 1
            return
        if (reason := target_reached(self.settings.stop, event)) is not None:
            self.reached = event
            self._durability.keep()  # a later server must know this
            self._stop(reason)

    def _on_drifted(self, event: Drifted) -> None:
        """React to a change of the stream. An evaluator that was started again reports earlier changes once more."""
        reaction = self.settings.drift_reaction
        if reaction is None:
            return
        if event.term > self.term or event.version > self.version:
            self.counters["refused_drifted"] += 1
            return
        until = event.version + reaction.updates
        if until > max(self.raised_until, self.version):
            self.raised_until = until
            self.counters["drift_reactions"] += 1
            self._durability.keep()  # a later server must know this

    def _stop_by_progress(self) -> None:
        updates = self.version - self.empty_updates
        self._stop(progress_reached(self.settings.stop, updates=updates, samples_total=self.samples_total))

    def _stop_by_refusals(self) -> None:
        """End the job if too many of its records are refused. Otherwise nobody might notice."""
        limit = self.settings.on_bad_records
        problem = self.refusals.problem(limit.share, limit.first_records)
        if problem is not None and self.stopping is None:
            self.error = problem
            self.refusals.forget_recent()  # after a resume, the same records must not end the job again
            self._stop("bad records")

    def _stop(self, reason: str | None) -> None:
        if self.stopping is None and reason is not None:
            self.stopping = reason
            self._settling.stop()
