"""The engine's input and output: events and actions.

Events are records of workers and of the evaluator, and the ones below, which the parameter server makes. All of them
can be encoded, so an event log can be kept and replayed. Actions are what the server does next, in this order: it sends
a command, or does what is said below. The outcome of FetchGradient and StoreCheckpoint comes back as an event.
"""

from __future__ import annotations

from typing import Any

import msgspec

from doll.records.bounds import Grid
from doll.records.control import (
    Alive,
    Announce,
    ControlRecord,
    Durable,
    Evaluated,
    Fence,
    Flush,
    Grant,
    Join,
    Leave,
    Nack,
    NewVersion,
    Push,
    PushedBatch,
    Scale,
    Settle,
    Skip,
    SourceEnded,
    Welcome,
)
from doll.records.refusals import RefusalState
from doll.records.rollbacks import Rollback

# --- events ---------------------------------------------------------------------------------------------------------


class GradientFetched(ControlRecord, frozen=True):
    """The gradient of a set is in the parameter server's memory, checked."""

    grant_id: int  # the set's first
    max_change: float = 0.0  # see `doll.optim.optimizer.Updater.max_change`


class GradientLost(ControlRecord, frozen=True):
    """The gradient of a set is not in the blob store, or is torn."""

    grant_id: int  # the set's first
    reason: str


class GrantsLost(ControlRecord, frozen=True):
    """Grants on their way to this worker, or its answers, may be lost: send again what it has not answered."""

    worker: int


class CheckpointStored(ControlRecord, frozen=True):
    """The checkpoint of this version is durable."""

    version: int


class TopicGrew(ControlRecord, frozen=True):
    """The samples topic has so many partitions by now. Those that the job does not know are read from offset 0."""

    partitions: int


class Tick(ControlRecord, frozen=True):
    """Time has passed. Leases and timeouts expire only here, so that a replay does the same."""


class StopRequested(ControlRecord, frozen=True):
    """End the job in order: Ctrl-C or SIGTERM."""

    reason: str


# Of other processes; the others are the server's own.
ReceivedEvent = Join | Announce | Skip | Push | Nack | Alive | Leave | SourceEnded | Evaluated | Scale
Event = (
    ReceivedEvent | GradientFetched | GradientLost | GrantsLost | CheckpointStored | TopicGrew | Tick | StopRequested
)  # fmt: skip

# --- actions --------------------------------------------------------------------------------------------------------

# Records on `commands`: each names the worker that it is for.
Command = Welcome | Grant | NewVersion | Flush | Settle | Durable | Fence


class Action(msgspec.Struct, frozen=True):
    """Base of what the parameter server does beside sending commands."""


class SendHello(Action, frozen=True):
    """Ask this worker to join again, by a Hello: its messages do not fit the state that the engine has of it."""

    worker: int


class PublishWeights(Action, frozen=True):
    """Put the weights of the current version into the blob store: the commands that follow name them."""

    version: int


class RepublishWeights(Action, frozen=True):
    """The weights of the current version are missing in the blob store: publish them again."""

    version: int


class ReleaseWeights(Action, frozen=True):
    """No unanswered grant names the weights of this version any more, and it is not the newest."""

    version: int


class FetchGradient(Action, frozen=True):
    """Get the gradient of a set; report GradientFetched or GradientLost.

    Attributes:
        grant_id: the set's first.
        in_order: the gradients of all lower-numbered sets of its update are in, and it will be applied.
    """

    grant_id: int
    key: str
    version: int
    in_order: bool = False


class DropGradient(Action, frozen=True):
    """A gradient that will not be applied: delete its blob, and forget its values.

    Attributes:
        held: number of the set whose values are at the server; 0: they are not.
    """

    key: str
    reason: str
    held: int = 0


class AppliedBatch(msgspec.Struct, frozen=True):
    """One batch of an update, with what its worker reported; or `count` of them, which hold no record."""

    partition: int
    number: int
    lo: int
    hi: int
    granted_at_s: float
    pushed: PushedBatch
    count: int = 1
    cut: bool = False  # it ends before it is full


class AppliedSet(msgspec.Struct, frozen=True):
    """Batches of one worker whose gradients came as one sum."""

    push: Push
    received_at_s: float
    batches: tuple[AppliedBatch, ...]
    number: int = 0  # if it has no batches: it is what a worker had held back of earlier ones

    @property
    def grant_id(self) -> int:
        """The first of its grants: the set's name."""
        return self.number or self.push.batches[0].grant_id

    @property
    def base_version(self) -> int:
        """The version of the oldest weights that a batch of it was computed on."""
        versions = (item.pushed.version for item in self.batches if item.pushed.version >= 0)
        return min(versions, default=self.push.version)

    @property
    def num_samples(self) -> int:
        """Usable samples of all its batches."""
        return sum(item.n_samples for item in self.push.batches)

    @property
    def weight(self) -> float:
        """Sum of the weights of these samples."""
        return sum(item.total_weight for item in self.push.batches)


class ApplyUpdate(Action, frozen=True):
    """Sum these sets' gradients in this order, scale, step: the model becomes `version`, their batches are applied.

    Attributes:
        sets: in the order of their first grants.
    """

    version: int
    sets: tuple[AppliedSet, ...]
    scale: float
    samples_total: int
    batches_total: int
    settled: tuple[tuple[int, int], ...] = ()  # as in doll.records.control.Update


class StoreCheckpoint(Action, frozen=True):
    """Save weights, optimizer and `snapshot` together; report CheckpointStored."""

    version: int
    snapshot: EngineSnapshot


class RollBack(Action, frozen=True):
    """Begin again from the newest checkpoint: a part of a step is lost that no other process has."""

    reason: str


class Finish(Action, frozen=True):
    """The job has ended and its last version is durable: tell all processes, and exit."""

    reason: str
    version: int
    error: str = ""  # as in doll.records.control.Finished


EngineAction = (
    Command | SendHello | PublishWeights | RepublishWeights | ReleaseWeights | FetchGradient | DropGradient
    | ApplyUpdate | StoreCheckpoint | RollBack | Finish
)  # fmt: skip


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's part of a checkpoint. Batches that are not applied are announced again by their workers."""

    version: int
    origins: tuple[int, ...]
    records_per_batch: int
    applied: tuple[int, ...]  # batches of each partition in the model: always a prefix
    assignment: tuple[int, ...]  # worker that serves each partition
    sessions: tuple[int, ...]  # of each worker, as are the following
    processes: tuple[str, ...]
    samples_total: int
    elapsed_s: float  # since the first update of the job that learned a sample
    counters: dict[str, int]
    policy: str  # name of the policy that made `policy_state`
    policy_state: dict[str, Any] | None  # see `doll.ps.policies.base.Policy.state`
    incarnations: tuple[int, ...]  # of each worker's machine, the highest seen
    restarts: tuple[int, ...]  # of each worker's process
    generation: int = 0  # see `doll.ledger.lineage`
    samples_id: str = ""  # Kafka's id of the samples topic; "": not known
    run_id: str = ""  # see `doll.records.control.TermStarted`; "": of an earlier release
    # Of `version`, those that learned no sample, and the numbers that rollbacks have left out.
    empty_updates: int = 0
    refusals: RefusalState = RefusalState()
    # Of the job; `sessions` and what follows may be of more, for which it has place, or had. 0: of as many.
    num_workers: int = 0
    job_workers: int = 0  # of the job file when that number was set: one that is changed since then counts instead
    released: tuple[int, ...] = ()  # workers below `num_workers` that are to serve nothing
    # Batches in the model that each worker has computed or skipped; (): those of the partitions assigned to it.
    by_worker: tuple[int, ...] = ()
    leader_epochs: tuple[int, ...] = ()  # of each partition's last applied batch (`PushedBatch`); (): not known
    source_ends: tuple[int, ...] = ()  # of each partition, where sources had ended (`doll.ps.engine.ending`); (): none
    left_out: tuple[int, ...] = ()  # records that cuts of each partition's applied batches have left out; (): none
    earlier_grids: tuple[Grid, ...] = ()  # in their order; `origins` and `applied` are of the present one
    init_from: str = ""  # the file or version that its first weights are of, and their sha256; "": of the task
    rollbacks: tuple[Rollback, ...] = ()  # in their order
    reached: Evaluated | None = None  # the evaluation that met the stop rule; None: none has

    @property
    def grid(self) -> int:
        return len(self.earlier_grids)

    @property
    def earlier_batches(self) -> int:
        """How many batches of today's size the earlier grids hold: progress in the streams."""
        return sum(grid.num_records for grid in self.earlier_grids) // self.records_per_batch

    @property
    def rolled_back_to(self) -> int:
        """The version that this one is again; -1: it was made by an update."""
        is_again = bool(self.rollbacks) and self.rollbacks[-1].version == self.version
        return self.rollbacks[-1].to if is_again else -1
