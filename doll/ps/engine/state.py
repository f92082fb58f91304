"""The engine's state of a job, and the views of this state for policies and the server. Pure.

The methods here change nothing: only `doll.ps.engine.engine` changes the state. Snapshots and views that are used once
a second look at every worker or partition; no other view does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from doll.ps.engine.assignment import as_they_stand, first_snapshot, for_workers, partitions_by_worker, require_fit
from doll.ps.engine.batch_queue import ActiveGrant, BatchQueue
from doll.ps.engine.durability import Durability, Settling
from doll.ps.engine.ending import Ending
from doll.ps.engine.events import EngineAction, EngineSnapshot, Event
from doll.ps.engine.grants import Grants
from doll.ps.engine.membership import Membership, Worker
from doll.ps.engine.moves import Moves
from doll.ps.engine.partition_state import PartitionState
from doll.ps.engine.settings import EngineSettings
from doll.ps.engine.time_limits import TimeLimits
from doll.ps.policies.base import BatchId, Offer, Policy
from doll.records.control import Skip
from doll.records.refusals import Refusals

_RECENT_EVENTS: Final = 30


class EngineState:
    """The state of an engine. For the engine's policy, this object is the `PolicyView`.

    Attributes:
        moves: the job's number of workers, and the partitions that move to other workers.
        ending: the batches that are left of a source that has ended.
        start: snapshot with which this engine began.
        events: event times of the records in the model.
        raised_until: the last version whose step has the learning rate of `drift.react`.
        reached: the evaluation that met the stop rule, in this engine or an earlier one; None: no such evaluation.
        stopping: reason why the job ends after the current checkpoint; None: the job continues.
        finished: reason why this engine has ended; then it ignores all events. None: it has not ended.
        error: the problem that ends the job; "": no problem.
    """

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
        run_id: str = "",
    ) -> None:
        """Begin a new job (with `origins`: first offset of the job in each partition), or restore from `snapshot`.

        `generation`, `samples_id` and `run_id` are used for a new job only, see `EngineSnapshot`.

        Raises:
            ValueError: neither or both of `origins` and `snapshot` are given, or the snapshot has no state of this
                policy.
        """
        if (origins is None) == (snapshot is None):
            raise ValueError("expected either origins (a new job) or a snapshot (a resumed one)")
        if snapshot is None:
            snapshot = first_snapshot(
                settings, origins or (), policy=policy.name, generation=generation, samples_id=samples_id, run_id=run_id
            )
        require_fit(snapshot, settings.records_per_batch)
        snapshot = for_workers(snapshot, settings.num_workers, settings.places)
        self.settings = settings
        self.policy = policy
        self.term = term
        self.start = snapshot
        self.version = snapshot.version
        self.samples_total = snapshot.samples_total
        self.batches_total = snapshot.earlier_batches + sum(snapshot.applied)
        self.empty_updates = snapshot.empty_updates
        self.counters: Counter[str] = Counter(snapshot.counters)
        self.reached = snapshot.reached
        self.events = snapshot.events
        self.raised_until = snapshot.raised_until
        self.refusals = Refusals(settings.on_bad_records.last_records, snapshot.refusals)
        self.finished: str | None = None
        self.stopping: str | None = None
        self.error = ""

        num_partitions = len(snapshot.origins)
        known = snapshot.leader_epochs or (-1,) * num_partitions, snapshot.left_out or (0,) * num_partitions
        self._partitions = list(map(PartitionState, range(num_partitions), snapshot.origins, snapshot.applied, *known))
        served = partitions_by_worker(snapshot.assignment, self._partitions, len(snapshot.sessions))
        kept = zip(
            snapshot.sessions, snapshot.processes, snapshot.incarnations, snapshot.restarts, snapshot.by_worker,
            strict=True,
        )  # fmt: skip
        # This includes workers of slots that existed before. They serve nothing, and may not join.
        self._workers = [
            Worker(number, BatchQueue(served[number], of_process[-1]), *of_process)
            for number, of_process in enumerate(kept)
        ]
        self._owners = [self._workers[number] for number in snapshot.assignment]  # of each partition
        may_join = self._workers[: settings.places]
        self._members = Membership(may_join, term=term, lease_s=settings.lease_s, counters=self.counters)
        self._grants = Grants(self._workers, self._owners, policy)
        self._limits = TimeLimits(policy, grant_timeout_s=settings.grant_timeout_s, set_limit_s=settings.set_limit_s)
        self._settling = Settling(term)
        self._durability = Durability(
            self._partitions, self._owners, version=snapshot.version, now=now,
            every_updates=settings.checkpoint_every_updates, every_s=settings.checkpoint_every_s,
            every_event_s=settings.checkpoint_every_event_s, events=snapshot.events,
            max_pending_batches=settings.max_pending_batches, costs_rests=policy.holds_back,
        )  # fmt: skip
        self.moves = Moves(
            self._workers, self._owners, self._partitions, snapshot.num_workers, snapshot.released, settings=settings,
            members=self._members, grants=self._grants, settling=self._settling, durability=self._durability,
        )  # fmt: skip

        self.ending = Ending(self._partitions, settings.records_per_batch, snapshot.source_ends)
        self._published = -1  # the newest version that this server has put into the blob store
        self._skips: dict[int, Skip] = {}  # by partition, until they can be applied
        # Grants of this version that are not sent yet. Each worker gets its grants in one message.
        self._granted: dict[int, list[ActiveGrant]] = {}
        self._last_held_at_s = now  # arrival time of the newest held gradient
        self._offered_version = snapshot.version  # the newest version for which the policy has named recipients
        self._first_update_at_s = None if snapshot.samples_total == 0 else now
        # The time and the actions of the event that is being handled.
        self._now = now
        self._actions: list[EngineAction] = []
        self._recent_events: deque[tuple[float, Event]] = deque(maxlen=_RECENT_EVENTS)
        if snapshot.policy_state is not None and snapshot.policy == policy.name:
            policy.restore(snapshot.policy_state)

    # --- what policies see (doll.ps.policies.base.PolicyView) ---------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self._now

    @property
    def num_live(self) -> int:
        return self._members.num_live

    @property
    def num_held(self) -> int:
        return self._grants.num_held

    @property
    def num_computing(self) -> int:
        return self._grants.num_computing

    @property
    def num_waiting(self) -> int:
        return self._grants.num_waiting

    @property
    def is_settling(self) -> bool:
        return self._settling.is_under_way

    @property
    def num_left(self) -> int | None:
        return self.ending.num_left

    def worker(self, number: int) -> Worker:
        return self._workers[number]

    def held_batches(self) -> Sequence[BatchId]:
        return self._grants.held_batches()

    # --- what the server sees -----------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the model has the whole steps of all applied batches. Only then a checkpoint may be stored."""
        return self._settling.is_settled

    @property
    def named_versions(self) -> Collection[int]:
        """Versions that unanswered grants name. The workers may still have to read the weights of these versions."""
        return self._grants.named_versions.keys()

    @property
    def durable_version(self) -> int:
        return self._durability.version

    @property
    def is_kept(self) -> bool:
        return self._durability.is_kept

    def workers(self) -> Iterable[Worker]:
        """Return the worker of every slot, in order."""
        return self._workers[: self.settings.places]

    def time_limit_s(self, worker: Worker) -> float:
        """Return the time limit of a push of this worker, in seconds; for a set, `set_limit_s` is added to it."""
        return self._limits.limit_s(worker)

    def shortfall(self) -> int:
        """Return how many batches the next update lacks beyond those that the live workers can offer; at least 0.

        A worker can offer its announced batches, and as many further batches as it has room for. The next checkpoint
        makes room for as many batches as it adds to the durable model.
        """
        offers = [
            Offer(
                worker.held, worker.computing, worker.waiting, worker.stalled, worker.lag,
                self.settings.max_pending_batches - (worker.held + worker.computing + len(worker.queue.waiting)),
            )
            for worker in self._workers
            if worker.is_live
        ]  # fmt: skip
        return self.policy.shortfall(self, offers)

    def snapshot(self, now: float) -> EngineSnapshot:
        return msgspec.structs.replace(
            as_they_stand(self.start, self._partitions, self._owners, self._workers),
            version=self.version,
            num_workers=self.moves.num_workers,
            released=tuple(sorted(self.moves.released)),
            samples_total=self.samples_total,
            elapsed_s=self._elapsed_s(now),
            counters=dict(self.counters),
            policy=self.policy.name,
            policy_state=self.policy.state(),
            empty_updates=self.empty_updates,
            refusals=self.refusals.state(),
            source_ends=self.ending.ends,
            reached=self.reached,
            raised_until=self.raised_until,
            events=self.events,
        )

    def _elapsed_s(self, now: float) -> float:
        """Return the seconds since the job's first update with a sample."""
        return self.start.elapsed_s + (0.0 if self._first_update_at_s is None else now - self._first_update_at_s)
