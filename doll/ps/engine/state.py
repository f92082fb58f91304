"""What the engine knows of a job: its partitions, workers and grants, and what others see of them. Pure.

A snapshot of it is the engine's part of a checkpoint.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from doll.config import StopConfig
from doll.config.data import BadRecordsConfig
from doll.ps.engine.durability import Durability
from doll.ps.engine.events import EngineSnapshot, Event
from doll.ps.engine.membership import Membership, Worker
from doll.ps.engine.partition_state import ActiveGrant, Assignment, Partition
from doll.ps.engine.settling import Settling
from doll.ps.policies.base import BatchId, Policy
from doll.records.control import Skip
from doll.records.refusals import Refusals
from doll.storage.blobs import scope_of

_RECENT_EVENTS = 30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Fixed for the life of an engine. Times in seconds."""

    num_workers: int
    records_per_batch: int
    max_pending_batches: int  # how many batches that are not durable a worker holds at most
    lease_s: float
    grant_timeout_s: float
    checkpoint_every_updates: int
    checkpoint_every_s: float
    set_limit_s: float = 0.0  # a worker that has computed a set for so long begins no other batch of it
    sum_reduction: bool = False  # apply the sum of the sample gradients, not their mean (the paper's literal rule)
    stop: StopConfig = field(default_factory=StopConfig)
    on_bad_records: BadRecordsConfig = field(default_factory=BadRecordsConfig)
    job: str = ""  # its name, for the keys of weights
    fingerprint: str = ""  # see `doll.config.fingerprint`: what a Welcome says


class EngineState:
    """The state of one parameter server. It is the `PolicyView` of its policy, and only `Engine` changes it."""

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
        """A fresh engine (with `origins`: first offset of the job in each partition) or one restored from `snapshot`.

        `generation`, `samples_id` and `run_id` are a fresh engine's, see `EngineSnapshot`.

        Raises:
            ValueError: neither or both are given, they are not for `settings.num_workers` workers, or the policy's
                state is not one of this policy.
        """
        if (origins is None) == (snapshot is None):
            raise ValueError("expected either origins (a new job) or a snapshot (a resumed one)")
        n = settings.num_workers
        if snapshot is None:
            snapshot = EngineSnapshot(
                version=0, origins=tuple(origins or ()), records_per_batch=settings.records_per_batch, applied=(0,) * n,
                assignment=Assignment.identity(n).worker_of, sessions=(0,) * n, processes=("",) * n,
                incarnations=(0,) * n, restarts=(0,) * n, samples_total=0, elapsed_s=0.0, counters={},
                policy=policy.name, policy_state=None, generation=generation, samples_id=samples_id, run_id=run_id,
            )  # fmt: skip
        if {len(snapshot.origins), len(snapshot.applied), len(snapshot.assignment), len(snapshot.sessions)} != {n}:
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
        self.run_id = snapshot.run_id
        self.samples_total = snapshot.samples_total
        self.batches_total = sum(snapshot.applied)
        self.counters: Counter[str] = Counter(snapshot.counters)
        self.empty_updates = snapshot.empty_updates
        self.refusals = Refusals(settings.on_bad_records.last_records, snapshot.refusals)
        self.finished: str | None = None
        self.stopping: str | None = None
        self.error = ""  # why the job cannot go on, where that stops it
        self.assignment = Assignment(snapshot.assignment)
        self._partitions = [
            Partition(number, origin, applied, leader_epoch)
            for number, (origin, applied, leader_epoch) in enumerate(
                zip(snapshot.origins, snapshot.applied, snapshot.leader_epochs or (-1,) * n, strict=True)
            )
        ]
        self._workers = [
            Worker(
                number, self._partitions[self.assignment.partition_of(number)], session=session,
                process=snapshot.processes[number], incarnation=snapshot.incarnations[number],
                restarts=snapshot.restarts[number],
            )
            for number, session in enumerate(snapshot.sessions)
        ]  # fmt: skip
        self._durability = Durability(
            self._partitions, version=snapshot.version, now=now, every_updates=settings.checkpoint_every_updates,
            every_s=settings.checkpoint_every_s, max_pending_batches=settings.max_pending_batches,
        )  # fmt: skip
        self._members = Membership(self._workers, term=term, lease_s=settings.lease_s, counters=self.counters)
        self._grants: dict[int, ActiveGrant] = {}  # computing or held, by number
        self._held: dict[int, BatchId] = {}  # of these, the held ones
        self._named: dict[int, int] = {}  # version -> unanswered grants that name it
        self._running_since_s: OrderedDict[int, float] = OrderedDict()  # partitions whose first grant has no push yet
        # Of a policy of exact versions: numbers of grants, increasing, also of those that are not computing any more.
        self._computing_numbers: deque[int] = deque()
        self._grant_numbers = count(1)
        self._queue_positions = count()
        self._num_waiting = 0
        self._settling = Settling(term)
        self._skips: dict[int, Skip] = {}  # by worker, until they can be applied
        self._last_held_at_s = now  # when the newest gradient came that was held
        self._changed: dict[int, None] = dict.fromkeys(range(n))  # workers whose counters the policy does not know yet
        self._scope = scope_of(settings.job, self.run_id)
        self._published_version = -1  # the newest that is in the blob store, by this server
        self._offered_version = snapshot.version  # the newest of which the policy has named the recipients
        self._elapsed_before_s = snapshot.elapsed_s
        self._first_update_at_s: float | None = None if snapshot.samples_total == 0 else now
        self._compute_mean_s = 0.0  # of one batch
        self._recent_events: deque[tuple[float, Event]] = deque(maxlen=_RECENT_EVENTS)
        if snapshot.policy_state is not None and snapshot.policy == policy.name:
            policy.restore(snapshot.policy_state)

    # --- what policies see (doll.ps.policies.base.PolicyView) ---------------------------------------------------------

    @property
    def num_live(self) -> int:
        return self._members.num_live

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_computing(self) -> int:
        return len(self._grants) - len(self._held)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def worker(self, number: int) -> Worker:
        return self._workers[number]

    def held_batches(self) -> Sequence[BatchId]:
        return [self._held[number] for number in sorted(self._held)]

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the model has the whole steps of all applied batches: only then it may be stored."""
        return self._settling.is_settled

    @property
    def named_versions(self) -> Collection[int]:
        """Versions that unanswered grants name: their workers may still have to read these weights."""
        return self._named.keys()

    @property
    def durable_version(self) -> int:
        """Of the newest stored checkpoint."""
        return self._durability.version

    def workers(self) -> Iterable[Worker]:
        """Every worker, in order."""
        return self._workers

    def snapshot(self, now: float) -> EngineSnapshot:
        """What a checkpoint keeps of the engine."""
        return EngineSnapshot(
            version=self.version,
            origins=self.origins,
            records_per_batch=self.settings.records_per_batch,
            applied=tuple(partition.applied for partition in self._partitions),
            assignment=self.assignment.worker_of,
            sessions=tuple(worker.session for worker in self._workers),
            processes=tuple(worker.process for worker in self._workers),
            incarnations=tuple(worker.incarnation for worker in self._workers),
            restarts=tuple(worker.restarts for worker in self._workers),
            samples_total=self.samples_total,
            elapsed_s=self._elapsed_s(now),
            counters=dict(self.counters),
            policy=self.policy.name,
            policy_state=self.policy.state(),
            generation=self.generation,
            samples_id=self.samples_id,
            run_id=self.run_id,
            empty_updates=self.empty_updates,
            refusals=self.refusals.state(),
            leader_epochs=tuple(partition.leader_epoch for partition in self._partitions),
        )

    def time_limit_s(self, worker: Worker) -> float:
        """After so long a push of this worker is not waited for any more; of a set, `set_limit_s` later."""
        return max(self._least_limit_s, 2.0 * worker.batch_s * self.policy.batches_per_push)

    @property
    def _least_limit_s(self) -> float:
        """The time limit of workers that are not slow."""
        return max(self.settings.grant_timeout_s, 5.0 * self._compute_mean_s) * self.policy.batches_per_push

    def check_invariants(self) -> None:
        """Assert what must hold after every event; for tests."""
        self._members.check_invariants()
        for partition in self._partitions:
            partition.check_invariants()
        assert self.num_held == sum(partition.held for partition in self._partitions)
        assert self.num_computing == sum(partition.computing for partition in self._partitions)
        assert list(self._grants) == sorted(self._grants)
        assert set(self._held) == {number for number, grant in self._grants.items() if grant.held}
        assert self._durability.max_unsaved == max(partition.unsaved for partition in self._partitions)
        assert self.batches_total == sum(partition.applied for partition in self._partitions)
        assert self._num_waiting == sum(worker.waiting for worker in self._workers)
        for worker in self._workers:
            assert worker.waiting == _grantable(worker)
            assert worker.is_live or not worker.computing, "nobody waits for a worker that is gone"
        named = Counter(grant.version for grant in self._grants.values() if grant.pushed is None)
        assert self._named == named, "the weights of a grant live until it is answered or void, and no longer"
        running = {
            partition.number
            for partition in self._partitions
            if partition.computing and partition.computing_grants[0].pushed is None
        }
        assert set(self._running_since_s) == running
        assert self.finished or self.stopping or not self._changed, "the policy knows of every change"
        for grant in self._grants.values():
            assert grant.min_version <= grant.version <= self.version
            is_exact = self.policy.exact_version and self.stopping is None  # at the end only rests are applied
            assert not is_exact or grant.version == grant.min_version == self.version, (
                "a group's gradients are all of one version"
            )

    def _elapsed_s(self, now: float) -> float:
        return self._elapsed_before_s + (0.0 if self._first_update_at_s is None else now - self._first_update_at_s)

    def _note_change(self, worker: Worker) -> None:
        """Whatever may have changed a worker's counters ends with this."""
        waiting = _grantable(worker)
        self._num_waiting += waiting - worker.waiting
        worker.waiting = waiting
        self._changed[worker.number] = None

    def _owner(self, partition: Partition) -> Worker:
        return self._workers[self.assignment.worker_of[partition.number]]


def _grantable(worker: Worker) -> int:
    """Batches of this worker that may be granted now."""
    return len(worker.partition.waiting) if worker.is_live and not worker.stalled else 0
