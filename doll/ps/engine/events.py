"""The engine's input and output: events and actions.

An event is a record of a worker or of the evaluator, or one of the classes below, which the parameter server makes. All
events can be encoded, so an event log can be written and replayed. The server executes the actions in their order. An
action is a command that the server sends, or one of the classes below, whose docstring says what the server does. The
outcomes of FetchGradient and StoreCheckpoint are reported as events.
"""

from __future__ import annotations

from typing import Any

import msgspec

from doll.records.bounds import Grid
from doll.records.control import (
    Alive,
    Announce,
    ControlRecord,
    Drifted,
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
from doll.records.event_times import NO_EVENTS, EventSpan
from doll.records.refusals import RefusalState
from doll.records.rollbacks import Rollback

# --- events ---------------------------------------------------------------------------------------------------------


class GradientFetched(ControlRecord, frozen=True):
    """The gradient of a set is in the parameter server's memory and has been checked."""

    grant_id: int  # the first one of the set
    max_change: float = 0.0  # see `doll.optim.optimizer.Updater.max_change`


class GradientLost(ControlRecord, frozen=True):
    """The gradient of a set is not in the blob store, or its blob is incomplete."""

    grant_id: int  # the first one of the set
    reason: str


class GrantsLost(ControlRecord, frozen=True):
    """Grants to this worker, or its answers, may have been lost. The engine sends the unanswered grants again."""

    worker: int


class CheckpointStored(ControlRecord, frozen=True):
    """The checkpoint of this version is durable."""

    version: int


class TopicGrew(ControlRecord, frozen=True):
    """The samples topic has `partitions` partitions now. New partitions are read from offset 0."""

    partitions: int


class Tick(ControlRecord, frozen=True):
    """Time has passed. Leases and timeouts expire only at this event, so they expire at the same events in a replay."""


class StopRequested(ControlRecord, frozen=True):
    """The job is to end in order: Ctrl-C or SIGTERM."""

    reason: str


# Records of other processes; all other events are made by the server itself.
ReceivedEvent = Join | Announce | Skip | Push | Nack | Alive | Leave | SourceEnded | Drifted | Evaluated | Scale
Event = (
    ReceivedEvent | GradientFetched | GradientLost | GrantsLost | CheckpointStored | TopicGrew | Tick | StopRequested
)  # fmt: skip

# --- actions --------------------------------------------------------------------------------------------------------

# Records on `commands`; each names its recipient.
Command = Welcome | Grant | NewVersion | Flush | Settle | Durable | Fence


class Action(msgspec.Struct, frozen=True):
    """Base class of the server's actions other than commands."""


class SendHello(Action, frozen=True):
    """Ask this worker with a Hello to join again, because its messages do not fit the engine's state of the worker."""

    worker: int


class PublishWeights(Action, frozen=True):
    """Put the weights of the current version into the blob store. The commands that follow name these weights."""

    version: int


class RepublishWeights(Action, frozen=True):
    """The weights of the current version are missing in the blob store: publish them again."""

    version: int


class ReleaseWeights(Action, frozen=True):
    """Release the weights of this version, which is not the newest one. No unanswered grant names them."""

    version: int


class FetchGradient(Action, frozen=True):
    """Get the gradient of a set, and report GradientFetched or GradientLost.

    Attributes:
        grant_id: first grant id of the set.
        in_order: True if this set will be applied, and the gradients of all lower-numbered sets of its update have
            arrived.
    """

    grant_id: int
    key: str
    version: int
    in_order: bool = False


class DropGradient(Action, frozen=True):
    """Delete the blob of a gradient that will not be applied, and forget its values.

    Attributes:
        held: number of the set whose values are at the server; 0: the values are not at the server.
    """

    key: str
    reason: str
    held: int = 0


class AppliedBatch(msgspec.Struct, frozen=True):
    """One batch of an update with its worker's report, or `count` consecutive batches that contain no record."""

    partition: int
    number: int
    lo: int
    hi: int
    granted_at_s: float
    pushed: PushedBatch
    count: int = 1
    cut: bool = False  # whether the batch ends before it is full


class AppliedSet(msgspec.Struct, frozen=True):
    """Batches of one worker whose gradients came as one sum."""

    push: Push
    received_at_s: float
    batches: tuple[AppliedBatch, ...]
    number: int = 0  # of a rest, which has no batches; 0: not a rest

    @property
    def grant_id(self) -> int:
        """The first grant id of the set, which names the set."""
        return self.number or self.push.batches[0].grant_id

    @property
    def base_version(self) -> int:
        """The oldest version of the weights that a batch of this set was computed on."""
        versions = (item.pushed.version for item in self.batches if item.pushed.version >= 0)
        return min(versions, default=self.push.version)

    @property
    def num_samples(self) -> int:
        """The number of usable samples in all batches of the set."""
        return sum(item.n_samples for item in self.push.batches)

    @property
    def weight(self) -> float:
        """The sum of the weights of these samples."""
        return sum(item.total_weight for item in self.push.batches)


class ApplyUpdate(Action, frozen=True):
    """Make `version`: add the gradients of the sets in this order, scale the sum, make a step, and count the batches.

    Attributes:
        sets: the sets of the update, in the order of their first grants.
        lr_factor: factor of the learning rate of the step.
        ema_factor: by how much shorter the window of the moving average of the weights is.
    """

    version: int
    sets: tuple[AppliedSet, ...]
    scale: float
    samples_total: int
    batches_total: int
    settled: tuple[tuple[int, int], ...] = ()  # as in doll.records.control.Update
    lr_factor: float = 1.0
    events: EventSpan = NO_EVENTS  # as in doll.records.control.Update
    ema_factor: float = 1.0


class StoreCheckpoint(Action, frozen=True):
    """Save weights, optimizer state and `snapshot` together, and report CheckpointStored."""

    version: int
    snapshot: EngineSnapshot


class RollBack(Action, frozen=True):
    """Begin again from the newest checkpoint, because the only copy of a part of a step is lost."""

    reason: str


class Finish(Action, frozen=True):
    """Tell all processes that the job has ended, and exit. The last version is durable."""

    reason: str
    version: int
    error: str = ""  # as in doll.records.control.Finished


EngineAction = (
    Command | SendHello | PublishWeights | RepublishWeights | ReleaseWeights | FetchGradient | DropGradient
    | ApplyUpdate | StoreCheckpoint | RollBack | Finish
)  # fmt: skip


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's part of a checkpoint. It lacks batches that are not applied; workers announce them again."""

    version: int
    origins: tuple[int, ...]
    records_per_batch: int
    applied: tuple[int, ...]  # number of batches of each partition in the model; these are always its first batches
    assignment: tuple[int, ...]  # worker of each partition
    sessions: tuple[int, ...]  # of each worker; the following fields also have one item per worker
    processes: tuple[str, ...]
    samples_total: int
    elapsed_s: float  # since the job's first update that learned a sample
    counters: dict[str, int]
    policy: str  # name of the policy that made `policy_state`
    policy_state: dict[str, Any] | None  # see `doll.ps.policies.base.Policy.state`
    incarnations: tuple[int, ...]  # highest incarnation of each worker's machine so far
    restarts: tuple[int, ...]  # number of restarts of each worker's process
    generation: int = 0  # see `doll.ledger.lineage`
    samples_id: str = ""  # Kafka's id of the samples topic; "": not known
    run_id: str = ""  # see `doll.records.control.TermStarted`; "": written by an earlier release
    # Number of versions that learned no sample, plus the number of versions that rollbacks have left out.
    empty_updates: int = 0
    refusals: RefusalState = RefusalState()
    # The job's number of workers; 0: the length of `sessions`. `sessions` etc. may have items for more workers.
    num_workers: int = 0
    job_workers: int = 0  # number in the job file when `num_workers` was set; another number there replaces both
    released: tuple[int, ...] = ()  # workers below `num_workers` that must serve nothing
    # Batches in the model that each worker has computed or skipped; (): those of its assigned partitions.
    by_worker: tuple[int, ...] = ()
    leader_epochs: tuple[int, ...] = ()  # of each partition's last applied batch (`PushedBatch`); (): not known
    source_ends: tuple[int, ...] = ()  # end offsets of the source in each partition (`doll.ps.engine.ending`)
    left_out: tuple[int, ...] = ()  # by partition: records that cuts of applied batches have left out; (): all 0
    earlier_grids: tuple[Grid, ...] = ()  # in their order; `origins` and `applied` are of the current grid
    init_from: str = ""  # file or version of the first weights, and their sha256; "": the task has made them
    rollbacks: tuple[Rollback, ...] = ()  # in their order
    reached: Evaluated | None = None  # the evaluation that met the stop rule; None: no evaluation has met it
    events: EventSpan = NO_EVENTS  # event times of the records in the model, since a release that knows them
    raised_until: int = 0  # the last version whose step has the learning rate of `drift.react`

    @property
    def grid(self) -> int:
        return len(self.earlier_grids)

    @property
    def earlier_batches(self) -> int:
        """The number of batches in the earlier grids, in batches of the current size."""
        return sum(grid.num_records for grid in self.earlier_grids) // self.records_per_batch

    @property
    def rolled_back_to(self) -> int:
        """The version that a rollback has restored to make this version; -1 if an update made this version."""
        is_again = bool(self.rollbacks) and self.rollbacks[-1].version == self.version
        return self.rollbacks[-1].to if is_again else -1
