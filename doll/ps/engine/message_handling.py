"""What workers' messages do to the state: they join and leave, announce batches and answer grants. Pure.

`doll.ps.engine.engine.Engine` adds what follows from it: updates, grants and checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from doll.errors import IllegalEventError
from doll.ps.engine.events import (
    DropGradient,
    EngineAction,
    FetchGradient,
    GradientFetched,
    GradientLost,
    GrantsLost,
    PublishWeights,
    ReleaseWeights,
    RepublishWeights,
    RollBack,
    SendHello,
)
from doll.ps.engine.membership import Worker
from doll.ps.engine.partition_state import ActiveGrant, LatePush, PushedSet
from doll.ps.engine.state import EngineState
from doll.ps.policies.base import BatchId
from doll.records.control import Announce, Grant, Join, Nack, Push, Skip, Welcome
from doll.storage.blobs import weights_key


class MessageHandling(EngineState):
    """The handlers of the messages of workers, and of the outcomes of fetching."""

    # --- workers join and leave ---------------------------------------------------------------------------------------

    def _on_join(self, event: Join, now: float, actions: list[EngineAction]) -> None:
        session = self._workers[event.worker].session if 0 <= event.worker < len(self._workers) else 0
        worker = self._members.admit(event, now, actions)
        if worker is None:
            return
        if worker.session != session:
            self._lose_rest(worker, actions)
        self._requeue_all(worker, "rejoin", actions)
        self._skips.pop(worker.number, None)
        partition = worker.partition
        self._forget_late(worker, actions)
        partition.forget_waiting()
        self._note_change(worker)
        actions.append(
            Welcome(
                term=self.term, worker=worker.number, process=worker.process, session=worker.session,
                origin=partition.origin, next_batch=partition.durable, fingerprint=self.settings.fingerprint,
                incarnation=event.incarnation, samples_id=self.samples_id, generation=self.generation,
                run_id=self.run_id, included=partition.applied, leader_epoch=partition.leader_epoch,
            )
        )  # fmt: skip

    def _accept(self, number: int, session: int, now: float, actions: list[EngineAction]) -> Worker | None:
        """The sender of a message, if it is of the worker's current session."""
        live = self._members.num_live
        worker = self._members.accept(number, session, now, actions)
        if worker is not None and live != self._members.num_live:  # it was silent for longer than its lease
            self._note_change(worker)
        return worker

    def _remove(self, worker: Worker, cause: str, actions: list[EngineAction]) -> None:
        self._members.remove(worker)
        self._skips.pop(worker.number, None)
        self._requeue_all(worker, cause, actions)
        self._forget_late(worker, actions)
        self._lose_rest(worker, actions)
        self._note_change(worker)

    def _lose_rest(self, worker: Worker, actions: list[EngineAction]) -> None:
        """The process that this worker was is gone."""
        if self._settling.holds_back(worker):
            self._roll_back(f"worker {worker.number} is lost with a part of its steps", actions)

    def _roll_back(self, reason: str, actions: list[EngineAction]) -> None:
        self.finished = "rolled back"
        actions.append(RollBack(reason))

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
            if grant.pushed is None:
                self._release(grant, actions)
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

    def _on_skip(self, event: Skip, now: float, actions: list[EngineAction]) -> None:
        worker = self._accept(event.worker, event.session, now, actions)
        if worker is None:
            return
        partition = worker.partition
        if event.until <= partition.applied:
            self.counters["refused_duplicate"] += 1
        elif not (event.first <= partition.applied == partition.announced and self._settling.is_whole(worker)):
            # What is before it must be applied, with its whole steps: the worker sends it again.
            self.counters["refused_order"] += 1
        elif not partition.is_covered(event, self.settings.records_per_batch):
            self.counters["refused_content"] += 1
        else:
            self._skips[worker.number] = event

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
        if not event.batches:
            self._on_rest(worker, event, now, actions)
            return
        standing = [self._find(worker, event.term, item.grant_id, item.batch) for item in event.batches]
        grants = [grant for grant in standing if grant is not None]
        if not grants:
            self._on_late(worker, event, now, actions)
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
            running_s = now - self._running_since_s[worker.partition.number]
            self._learn(worker, running_s / len(grants))
            self._take(worker, PushedSet(event, tuple(grants), now), now, actions)

    # --- pushes behind their time limit -------------------------------------------------------------------------------

    def _on_late(self, worker: Worker, event: Push, now: float, actions: list[EngineAction]) -> None:
        """No grant stands that `event` answers. Where only a time limit has passed since, and nobody else has its
        batches, it answers their next grants: else a batch that takes longer than the limit would never be learned.

        Not where a part of the steps stays at the worker: that may have been asked for since.
        """
        partition = worker.partition
        if partition.late is not None and partition.late.push.batches == event.batches:
            self.counters["refused_duplicate"] += 1
            return
        grants = partition.answered_late(event) if event.term == self.term else ()
        if grants:
            self._learn(worker, (now - partition.timed_out_since_s) / len(grants))
            if not self.policy.holds_back:
                partition.timed_out, partition.late = (), LatePush(event, grants)
                return
        compute_s = [item.compute_s for item in event.batches]
        if 0 <= (longest_s := max(compute_s)) < math.inf:
            # What a worker says: it has not computed for longer than it has been here.
            worker.batch_s = max(worker.batch_s, min(longest_s, now - worker.live_since_s))
        self.counters["refused_late"] += 1
        self._drop(event, "late", actions)

    def _answer_late(
        self, worker: Worker, late: LatePush, grants: Sequence[ActiveGrant], now: float, actions: list[EngineAction]
    ) -> int:
        """Take a late push as the answer to the first of `grants`, which are new; how many it answers: all that it
        names, or none.

        It is taken under their numbers: what is added and in which order is as if it had been asked for now.
        """
        worker.partition.late = None
        size = len(late.grants)
        new = tuple(grants[:size])
        push = msgspec.structs.replace(
            late.push,
            batches=tuple(
                msgspec.structs.replace(item, grant_id=grant.number)
                for item, grant in zip(late.push.batches, new, strict=False)
            ),
        )
        if [grant.batch for grant in new] == [grant.batch for grant in late.grants]:
            for grant, void in zip(new, late.grants, strict=True):
                grant.granted_at_s = void.granted_at_s
                if not self.policy.exact_version:  # what was allowed for the batch is allowed
                    grant.min_version = min(grant.min_version, void.min_version)
            if self._is_allowed(push, new):
                self.counters["accepted_late"] += 1
                self._take(worker, PushedSet(push, new, now), now, actions)
                return size
        self.counters["refused_late"] += 1
        self._drop(push, "late", actions)
        return 0

    def _forget_late(self, worker: Worker, actions: list[EngineAction]) -> None:
        """What this worker has pushed late, or may yet, does not count: its process holds other batches now."""
        partition = worker.partition
        partition.timed_out = ()
        if partition.late is not None:
            self._drop(partition.late.push, "late", actions)
            partition.late = None

    def _learn(self, worker: Worker, batch_s: float) -> None:
        """A batch of this worker has taken so long."""
        self._compute_mean_s += 0.2 * (batch_s - self._compute_mean_s)
        worker.batch_s = max(batch_s, worker.batch_s + 0.2 * (batch_s - worker.batch_s))

    def _is_allowed(self, event: Push, grants: Sequence[ActiveGrant]) -> bool:
        if event.version > self.version or (len(grants) > 1 and not self._takes_sets):
            return False
        if event.holds_back and not self.policy.holds_back:
            return False
        for grant, item in zip(grants, event.batches, strict=True):
            version = event.version if item.version < 0 else item.version
            if not grant.min_version <= version <= self.version or item.n_samples < 0 or item.dead_samples < 0:
                return False
        return True

    @property
    def _takes_sets(self) -> bool:
        return self.policy.exact_version or self.policy.batches_per_push > 1

    def _take(self, worker: Worker, pushed: PushedSet, now: float, actions: list[EngineAction]) -> None:
        """The set's gradient is in the blob store, or it has none."""
        push = pushed.push
        worker.market = push.market
        for grant in pushed.grants:
            grant.pushed = pushed
            self._release(grant, actions)
        del self._running_since_s[worker.partition.number]
        if push.key:
            actions.append(FetchGradient(pushed.number, push.key, push.version, self._is_next_in_order(pushed.number)))
        else:
            self._hold(pushed, now)

    def _release(self, grant: ActiveGrant, actions: list[EngineAction]) -> None:
        """This grant is answered or void: its worker reads no weights for it any more."""
        self._named[grant.version] -= 1
        if not self._named[grant.version]:
            del self._named[grant.version]
            if grant.version < self.version:
                actions.append(ReleaseWeights(grant.version))

    def _is_next_in_order(self, number: int) -> bool:
        """Whether no gradient is outstanding that is added before that of grant `number`."""
        if not self.policy.exact_version or self.policy.holds_back:  # rests may be applied before it at the end
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
        if self._settling.has(event.grant_id):
            self._settling.fetched(event.grant_id)
            return
        if grant is None:
            return  # its owner went down while the gradient was on its way: the batches are back in the queue
        if grant.pushed is None or grant.held or grant.pushed.number != event.grant_id:
            raise self._illegal(f"gradient of grant {event.grant_id} was not asked for")
        grant.pushed.max_change = event.max_change
        self._hold(grant.pushed, now)

    def _hold(self, pushed: PushedSet, now: float) -> None:
        partition = self._partitions[pushed.grants[0].partition]
        partition.hold(pushed)
        self._last_held_at_s = now
        for grant in pushed.grants:
            self._held[grant.number] = BatchId(grant.partition, grant.batch)
        if partition.computing_grants:
            self._running_since_s[partition.number] = now  # a worker computes its sets one after the other
        owner = self._owner(partition)
        self._settling.received(owner)
        self._note_change(owner)

    def _on_rest(self, worker: Worker, event: Push, now: float, actions: list[EngineAction]) -> None:
        """What a worker had held back of earlier batches: it leaves, or was asked."""
        partition = worker.partition
        if not self.policy.holds_back:
            self.counters["refused_content"] += 1
            self._drop(event, "content", actions)
            return
        if event.term != self.term or self._settling.is_known(worker, event.settles):
            self.counters["refused_duplicate"] += 1
            return
        if not event.key and self._settling.holds_back(worker):
            # It has pushed steps of which it holds a part back: that part is in another push, and must not be missed.
            self.counters["refused_empty_rest"] += 1
            return
        if not partition.applied <= event.settles <= partition.received:
            # The worker has given it away, and it is of other batches than those that are here.
            self._roll_back(
                f"worker {worker.number} settles batches below {event.settles}, and {partition.applied} to "
                f"{partition.received} can be settled", actions,
            )  # fmt: skip
            return
        number = self._settling.add(worker, event, now)
        if event.key:
            actions.append(FetchGradient(number, event.key, event.version))

    def _on_lost(self, event: GradientLost, actions: list[EngineAction]) -> None:
        grant = self._grants.get(event.grant_id)
        if self._settling.has(event.grant_id):
            self._roll_back("what a worker had held back is not in the blob store", actions)
        elif grant is not None:
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
            self._published_version = self.version
            actions.append(RepublishWeights(self.version))
        else:
            # The worker does not hold a batch that it announced: it is out of step. Nothing is granted until it has
            # joined.
            self._forget_late(worker, actions)
            worker.partition.forget_waiting()
            self._note_change(worker)
            actions.append(SendHello(event.worker))

    def _illegal(self, problem: str) -> IllegalEventError:
        return IllegalEventError(f"{problem}; recent events: {list(self._recent_events)}")

    def _send_grants(self, worker: Worker, grants: Sequence[ActiveGrant], actions: list[EngineAction]) -> None:
        """Consecutive batches of one worker. A grant that is sent again is the same message: its weights still live."""
        first = grants[0]
        actions.append(
            Grant(
                term=self.term, worker=worker.number, session=worker.session, first=first.batch,
                grant_ids=tuple(grant.number for grant in grants), version=first.version,
                min_version=first.min_version, key=self._publish(first.version, actions), included=first.included,
            )
        )  # fmt: skip

    def _publish(self, version: int, actions: list[EngineAction]) -> str:
        """The key of the weights of `version`, which are published once; an older one is already, or was."""
        if version > self._published_version:
            self._published_version = version
            actions.append(PublishWeights(version))
        return weights_key(self._scope, self.term, version)
