"""Control records: what crosses Kafka between DOLL's own processes.

Each record is one msgspec struct, encoded as MessagePack after two bytes: a magic byte and the schema version. Unknown
magic, version or type raises `RecordError`; the reader counts and drops such a record. Sample records are the user's
own bytes (see `doll.records.packing` for the packed form).

Each topic carries the records below its heading. A control link (`doll.control`) also carries Grant, NewVersion,
RowsStored, Push, Nack and GetRows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeVar

import msgspec

from doll.errors import RecordError, SchemaVersionError
from doll.records.bounded import printable

MAGIC: Final = 0xD0
SCHEMA_VERSION: Final = 9
READABLE: Final = (8, SCHEMA_VERSION)  # 9 adds the weights of samples: a release of 8 would divide by their number
_PREFIX: Final = bytes([MAGIC, SCHEMA_VERSION])
MOST_UNREAD: Final = 8  # partitions that an Alive names


class ControlRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower
):
    """Base of all control records. Times are Unix seconds of the writer's clock, for people only."""


class WorkerRecord(ControlRecord, frozen=True):
    """Base of what the process of a worker sends in its session."""

    worker: int
    session: int


class ServerRecord(ControlRecord, frozen=True):
    """Base of what the parameter server of a term sends to one worker."""

    term: int
    worker: int


# --- events: worker -> parameter server -------------------------------------------------------------------------------


class Join(ControlRecord, frozen=True, omit_defaults=True):
    """A worker process has started, or answers a Hello: `session` is 0 in a new process, else the one it holds."""

    worker: int
    process: str  # tells two processes apart: [name of the machine, ":",] random id
    session: int = 0
    incarnation: int = 0  # of the worker's machine, from the provisioner; 0: no number


class BatchRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, omit_defaults=True):
    """Batches [first, until) of one partition."""

    partition: int
    first: int
    until: int
    left_out: int = 0  # records that cuts of batches before `first` have left out (`doll.records.bounds`)
    cuts: tuple[tuple[int, int], ...] = ()  # of these batches: (batch, records left out)


class Announce(WorkerRecord, frozen=True):
    """These batches are complete and retained, in this order: they may be granted (Algorithm 1)."""

    runs: tuple[BatchRange, ...]


class Skip(WorkerRecord, frozen=True):
    """Batches [first, until) of a partition hold no record, and all before them are durable: they need no gradient."""

    partition: int
    first: int
    until: int
    gaps: tuple[tuple[int, int], ...] = ()  # offset ranges [lo, hi) in which the log holds no record
    lost: tuple[tuple[int, int], ...] = ()  # offset ranges [lo, hi) that were deleted before this worker read them


class BatchOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The counts and times of one batch that was computed."""

    n_samples: int  # usable samples in the batch; 0: it adds nothing to the gradient
    dead: tuple[int, ...] = ()  # offsets that went to the dead-letter topic
    gaps: tuple[tuple[int, int], ...] = ()  # offset ranges [lo, hi) in which the log holds no record
    lost: tuple[tuple[int, int], ...] = ()  # offset ranges [lo, hi) that were deleted before this worker read them
    dead_samples: int = 0  # samples lost inside records that are otherwise usable (packed records)
    compute_s: float = 0.0
    wait_s: float = 0.0  # from the batch's completion to the start of its set
    weight: float | None = None  # sum of the weights of its usable samples; None: their number
    packed: tuple[bytes, ...] = ()  # in encoded records only, if shorter: `dead`, `gaps` and `lost` as bits

    @property
    def total_weight(self) -> float:
        return float(self.n_samples) if self.weight is None else self.weight


class PushedBatch(BatchOutcome, frozen=True, kw_only=True):
    """One batch of a Push. Losses are taken before learning."""

    batch: int  # its worker's number of it, as in its Grant
    grant_id: int
    loss_sum: float  # each sample's times its weight, as the metrics
    metric_sums: Mapping[str, float] = {}
    version: int = -1  # of the weights that it was computed on; -1: as its Push says
    dead_reasons: tuple[tuple[str, int], ...] = ()  # of its dead letters, and how many have each
    skipped: tuple[tuple[str, int], ...] = ()  # why its task has left samples out, and how many for each reason
    leader_epoch: int = -1  # Kafka's, of the log: nothing up to the batch's end had a higher one; -1: not known


class Push(WorkerRecord, frozen=True, omit_defaults=True):
    """The gradient of one set is in the blob store: the sum over consecutive granted batches (Algorithm 2).

    Under policies whose workers send steps, it is the sum of the steps that the worker's optimizer made of them.
    """

    term: int
    version: int  # of the weights that the gradients were computed on, of the last batch if they differ
    key: str  # blob key; "" when no batch holds a usable sample (the gradient is zero)
    batches: tuple[PushedBatch, ...]  # in the order of their numbers; none if it is the answer to a Settle
    fetch_s: float = 0.0  # weights, of the whole set
    delta_bytes: int = 0  # of what was read instead of the whole weights of `version`; 0: the whole was read
    store_s: float = 0.0  # gradient, of the whole set
    market: str = ""
    holds_back: bool = False  # a part of the steps of these batches, or of earlier ones, is still at the worker
    is_on_its_way: bool = False  # to the blob store, which is far away: it may come there after this
    settles: int = -1  # if it has no batches: of the worker's batches below this one nothing is held back any more
    absent: bytes = b""  # parameters that none of its samples has used: a bit each, the lowest of the first byte first


class Nack(WorkerRecord, frozen=True):
    """A grant cannot be carried out, from batch `batch` on: the weights blob is gone, or a batch is not held here."""

    batch: int
    term: int
    grant_id: int  # of `batch`
    reason: Literal["weights", "batch"]


class GetRows(WorkerRecord, frozen=True):
    """GET: the worker needs rows of tables; which ones is in the blob store (`doll.storage.sections`)."""

    term: int
    number: int  # of the request; counts up in each process
    key: str  # blob key of the request


class Alive(WorkerRecord, frozen=True):
    """Sent every second from the worker's event loop: the process is live and its loop turns."""

    retained: int = 0  # batches held and not yet durable
    next_offset: int = 0  # next sample offsets that this worker will read, added up over its partitions
    lag: int = 0  # records in its partitions that this worker has not read yet
    most_unread: tuple[tuple[int, int], ...] = ()  # (partition, records not read) of the `MOST_UNREAD` with the most
    waiting_for: str = ""  # why it cannot decode records at present; "" while it can
    usual: tuple[float, ...] = ()  # of its batches, see `doll.consumers.compute.guard.Guard.usual`; (): not known


class Leave(WorkerRecord, frozen=True):
    """The worker leaves: its batches are not granted; its next process announces them again."""

    cause: str


class Scale(ControlRecord, frozen=True):
    """The job is to go on with other workers: `doll scale`, and scale-in by the provisioner."""

    workers: int
    run_id: str  # of the run that is meant, see `TermStarted`
    released: tuple[int, ...] | None = None  # of these, workers that serve nothing; None: those that there are


class SourceEnded(ControlRecord, frozen=True):
    """A source has sent its last record: what the partitions hold is learned, also what fills no batch or group."""

    ends: tuple[int, ...]  # of each partition: one above its last offset then


class Evaluated(ControlRecord, frozen=True):
    """Held-out metrics of one published version, from the evaluator."""

    term: int
    version: int
    loss: float
    accuracy: float | None = None


# --- commands: parameter server -> worker n ---------------------------------------------------------------------------


class Served(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A partition that a worker serves, and where to read on in it."""

    partition: int
    origin: int  # offset at which the job began on this partition
    next_batch: int  # first that is not in the durable model: where to read on
    included: int = 0  # its batches that are in the model, durable or not
    leader_epoch: int = -1  # of the last one of these, as in a PushedBatch
    decided: int = 0  # batches below it are in the model, or their gradients are at the server: they stay as they are
    left_out: int = 0  # records that cuts of batches before `next_batch` have left out (`doll.records.bounds`)
    cuts: tuple[tuple[int, int], ...] = ()  # of batches [next_batch, decided): (batch, records left out)
    flush_until: int = 0  # as in a Flush


class Welcome(ServerRecord, frozen=True, omit_defaults=True):
    """Answer to Join: the session to use, and the partitions to serve. It comes again when these change."""

    process: str
    session: int
    served: tuple[Served, ...]  # in the order of their numbers
    fingerprint: str  # see `doll.config.fingerprint`: a worker of another job file ends
    incarnation: int = 0  # as in the Join
    samples_id: str = ""  # Kafka's id of the samples topic; "": not known
    generation: int = 0  # see `TermStarted`
    run_id: str = ""  # of the server's run, see `TermStarted`; a worker of another one ends
    endpoints: tuple[str, ...] = ()  # of control links, the fastest first: "local:PATH", "redis:STREAM"
    usual: tuple[float, ...] = ()  # as in the Alive that came last
    grid: int = 0  # see `TermStarted`; a worker of another one ends


class Grant(ServerRecord, frozen=True):
    """Compute the gradients of consecutive batches, at weights that are not older than `min_version`.

    Batch `first + i` of the worker is granted by `grant_ids[i]`, and is `batches[i]`. The Push says which version was
    used, and may come in parts.
    """

    session: int
    first: int  # a worker numbers its batches in the order of their grants
    grant_ids: tuple[int, ...]  # increasing, at least one
    batches: tuple[tuple[int, int], ...]  # (partition, its number there) of each
    version: int  # the newest published
    min_version: int
    key: str  # blob key of the weights of `version`
    included: int = 0  # how many of this worker's batches are in `version`: the first so many
    # Of each of `batches`: records that cuts of earlier ones of its partition have left out, and its own; (): nowhere.
    left_out: tuple[tuple[int, int], ...] = ()


class NewVersion(ServerRecord, frozen=True):
    """Weights were published that no grant has asked for yet: policies that send versions to their workers."""

    version: int
    key: str
    included: int = 0  # as in a Grant
    rows_key: str = ""  # of those rows that the worker has asked for and that have changed after `rows_since`
    rows_since: int = 0


class RowsStored(ServerRecord, frozen=True):
    """Answer to GetRows: the rows are in the blob store."""

    session: int
    number: int  # of the request
    version: int  # that the rows are of
    key: str
    included: int  # as in a Grant


class Flush(ServerRecord, frozen=True):
    """A source has ended: announce what was read below these offsets, also if it fills no batch."""

    until: dict[int, int]  # offsets, by partition


class Settle(ServerRecord, frozen=True):
    """Push what is held back of the steps of the worker's batches below `until`: they are to become durable. 0: push
    what is computed and kept for a push of more batches; no more will come."""

    session: int
    until: int


class Durable(ServerRecord, frozen=True):
    """Batches below `until` of each partition are in a checkpoint: acknowledge them to Kafka and release them."""

    until: dict[int, int]  # by partition
    batches: int  # how many of this worker's batches are in it: the first so many
    left_out: dict[int, int] = {}  # by partition, if there are any: records that cuts of these batches have left out


class Hello(ControlRecord, frozen=True):
    """A parameter server has started: answer with Join."""

    term: int


class Fence(ServerRecord, frozen=True):
    """This process has been replaced by a newer one of the same worker: exit."""

    process: str


class Stop(ControlRecord, frozen=True):
    """The job has ended."""

    term: int
    reason: str


# --- control links: parameter server <-> worker, beside Kafka ---------------------------------------------------------


class Attach(ControlRecord, frozen=True):
    """First record of a worker on a control link: which process it is, and of which term and run its server."""

    worker: int
    session: int
    term: int
    run_id: str = ""


class Attached(ServerRecord, frozen=True):
    """Answer to Attach: from now on this link carries the worker's grants."""

    session: int
    run_id: str = ""


class Ping(ControlRecord, frozen=True):
    """The sender is live and had nothing else to send for a second."""


class Detach(ControlRecord, frozen=True):
    """Last record of a control link."""

    reason: str


# --- updates: lineage and audit ---------------------------------------------------------------------------------------


class TermStarted(ControlRecord, frozen=True, omit_defaults=True):
    """A parameter server started from the checkpoint of `resumed_version`; see `kept_version`."""

    term: int
    resumed_version: int
    origins: tuple[int, ...]  # per partition
    records_per_batch: int
    time_s: float
    generation: int = 0  # term of the generation's first server; 0: the first (`doll.ledger.lineage`)
    resumed_batches: int = 0  # batches in the resumed model
    run_id: str = ""  # random; of all terms of a session of `doll up`, or of a generation elsewhere
    grid: int = 0  # how often the generation was regridded before (docs/decisions/0085)
    init_from: str = ""  # whose weights the generation began with, see `EngineSnapshot.init_from`
    rolled_back_to: int = -1  # the version that `resumed_version` is again (docs/decisions/0090); -1: none

    @property
    def kept_version(self) -> int:
        """Later versions of lower terms are void."""
        return self.resumed_version if self.rolled_back_to < 0 else self.rolled_back_to


class Member(BatchOutcome, frozen=True, kw_only=True):
    """One batch of an update: offsets [lo, hi) of a partition; or `batches` of them, which hold no record."""

    worker: int
    partition: int
    batch: int  # its number in its partition
    lo: int
    hi: int
    base_version: int
    fetch_s: float = 0.0
    store_s: float = 0.0
    grant_to_push_s: float = 0.0
    market: str = ""
    held_back: bool = False  # a part of its step is not in this update; a later one settles it
    set_grant_id: int = 0  # first grant of the set that it was pushed in; `fetch_s` and `store_s` are its share of both
    batches: int = 1
    cut: bool = False  # it ends before it is full
    loss_sum: float = 0.0  # of its usable samples, before learning from them, on its worker's weights


class Update(ControlRecord, frozen=True):
    """One applied update: version `version` is version - 1 plus these batches, and what of earlier ones it settles."""

    term: int
    version: int
    members: tuple[Member, ...]
    n_samples: int
    loss: float  # mean prequential loss of the samples, by their weights, before learning from them
    metrics: Mapping[str, float] = {}  # means over the samples, by their weights, prequential
    samples_total: int = 0  # usable samples in the model
    batches_total: int = 0  # batches in the model, unusable samples included: progress in the streams
    apply_s: float = 0.0  # parameter server time for this update: fetch, add, step, publish
    grant_to_update_s: float = 0.0  # from the first grant of the group to the new weights
    time_s: float = 0.0
    settled: tuple[tuple[int, int], ...] = ()  # (partition, until): nothing is held back of its batches below `until`

    @property
    def total_weight(self) -> float:
        if all(member.weight is None for member in self.members):
            return float(self.n_samples)
        return sum(member.total_weight for member in self.members)


class Finished(ControlRecord, frozen=True):
    """The job has ended; `version` is the last one and is in a checkpoint."""

    term: int
    version: int
    reason: str
    time_s: float
    error: str = ""  # why it cannot go on, if that ended it: no stop rule was met


# --- dead and metrics -------------------------------------------------------------------------------------------------


# No value; above data.max_record_bytes; its batch unreadable; not packed; `decode` failed; harmful; sent again.
DeadLetterCode = Literal["empty", "too_long", "unreadable", "not_packed", "undecodable", "harmful", "replayed"]


class DeadLetter(ControlRecord, frozen=True):
    """A user record that could not be learned. `payload` is the record, cut to `payload_bytes` if it was longer."""

    worker: int
    partition: int
    offset: int
    reason: str  # for people; programs read `code`
    payload: bytes
    payload_bytes: int  # full size of the record
    code: DeadLetterCode = "undecodable"
    replayed_as: int = -1  # of code `replayed`: the new record's offset, in the same partition
    samples: int = 1  # samples refused; a packed record can be refused in part
    whole: bool = True  # the whole record was refused, so its offset is dead-lettered
    time_s: float = 0.0
    term: int = 0  # of the server that its worker knew, which tells the generation

    def __post_init__(self) -> None:
        # Of its making and of its reading: a reason repeats what was in a record.
        msgspec.structs.force_setattr(self, "reason", printable(" ".join(self.reason.split())))


class Metric(ControlRecord, frozen=True):
    """Measurements of one process; every name ends in its unit or counts something (`_total`)."""

    source: str  # "worker-3", "ps", "evaluator", "producer"
    values: Mapping[str, float]
    time_s: float


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker as the parameter server sees it."""

    worker: int
    is_live: bool  # its lease has not run out and it has not left
    session: int = 0  # 0: no process of this worker has joined yet
    incarnation: int = 0  # of its machine, from the provisioner; 0: no number
    restarts: int = 0  # processes that have taken over from an earlier one of this worker
    live_since_s: float = 0.0  # Unix seconds; 0 while it is not live
    silent_s: float = 0.0  # since its last record; 0 while it is not live
    market: str = ""  # of its machine, from its last gradient
    retained_batches: int = 0  # batches held and not yet durable
    lag_records: int = 0  # records in its partition that it has not read yet
    control: str = "kafka"  # what carries its grants and pushes: "kafka", "redis" or "local"
    batch_s: float = 0.0  # that one of its batches takes, from grant to push; 0: not known
    time_limit_s: float = 0.0  # after which its push is not waited for any more
    is_stalled: bool = False  # that limit has passed, and it has not answered since
    partitions: int = 0  # that it serves
    is_spare: bool = False  # it is here and serves none: other workers serve all
    waiting_for: str = ""  # as in its last Alive


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limit of the job (`doll.ps.engine.limit`).

    `dry`: others wait for a worker whose partitions hold no record to read. `slow`: others wait for a worker that takes
    longer for a batch. `partition`: one partition has most of the unread records, and its worker computes all the time.
    `workers`: all of them compute most of the time, and records are unread. `updates`: they have batches, and wait for
    weights most of the time.
    """

    kind: Literal["dry", "slow", "partition", "workers", "updates"]
    worker: int = -1  # that is waited for, or serves the partition; -1: all
    partitions: tuple[int, ...] = ()  # that one; of a dry worker, its first ones
    num_partitions: int = 0  # that the worker serves
    unread: int = 0  # records, of all partitions
    share: float = 0.0  # of these in that partition; of `updates`: of the workers' time in which they compute


class Measures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gain and cost of the consistency policy since its server began the term (`doll.ps.engine.measures`)."""

    staleness: Mapping[int, int] = {}  # reads by their difference, see `doll.theory.staleness`
    staleness_total: int = 0  # sum of the differences
    older_reads: int = 0  # of versions too old to be compared
    blocked_s: float = 0.0  # workers held a complete batch, were idle and had no grant; added up over the workers
    computing_s: float = 0.0  # they read weights, computed and stored gradients
    idle_s: float = 0.0  # between two pushes, the rest of the time: blocked, or without a batch
    gradient_bytes: int = 0  # as sent
    gradient_values: int = 0  # numbers sent
    dense_gradient_bytes: int = 0  # of the same gradients, before coding
    weights_bytes: int = 0  # of the versions that workers have read
    row_bytes: int = 0  # of tables' rows that workers were sent, as sent
    row_request_bytes: int = 0  # of the ids that workers have asked for
    plain_row_bytes: int = 0  # the same before coding: 8 bytes for each key
    void_batches: int = 0  # that the policy let be computed again (`doll.ps.policies.base.Policy.void`)


class TableStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bounded table, since the job began."""

    name: str
    rows: int  # that there are now
    admitted: int  # ids that have got a row
    evicted: int  # that have lost it, because others needed room
    expired: int  # that have lost it, because no push named them (`training.tables.*.ttl_updates`)
    refused: int  # gradients of ids without a row, which were dropped


class ServerStatus(ControlRecord, frozen=True):
    """The parameter server's state, on `metrics` once a second: also its heartbeat, from which a standby elects."""

    term: int
    time_s: float
    leader_since_s: float  # Unix seconds
    pid: int
    version: int
    durable_version: int
    samples_total: int
    batches_total: int
    waiting_batches: int  # complete at live workers, not granted
    computing_batches: int  # granted, no gradient yet
    shortfall_batches: int  # beyond what the live workers can hold, for the next update; 0: it can be made
    stalled_s: float  # for how long no update has been possible; 0 while one is
    workers: tuple[WorkerStatus, ...]  # one per worker, in order
    counters: Mapping[str, int] = {}  # of the engine: what was refused, requeued, ...
    measures: Measures | None = None
    limit: Limit | None = None  # None: nothing waits, or it is not known
    dead_reasons: tuple[tuple[str, int], ...] = ()  # of the applied batches' dead letters, and how many have each
    recent_records: int = 0  # the last ones, of which `data.on_bad_records` takes the share
    recent_refused: int = 0  # of these
    num_workers: int = 0  # that the job is to have; 0: as many as the job file says
    released: tuple[int, ...] = ()  # of these, workers that are to serve nothing
    moving_partitions: int = 0  # that are still to go to another worker
    is_kept: bool = True  # what was decided beside updates, as the number of workers, is in a checkpoint
    run_id: str = ""  # see `TermStarted`
    source_ended: bool = False  # this server knows where a source has ended
    skipped: tuple[tuple[str, int], ...] = ()  # of the applied batches: why samples were left out, and how many
    tables: tuple[TableStatus, ...] = ()  # bounded ones


class ProvisionDecision(ControlRecord, frozen=True):
    """The decision of the provisioner in one turn: for people, dashboards, and a successor without its state file.

    It goes to `metrics`, whose readers skip records that they do not know; the audit treats an unknown record on
    `updates` as damage.
    """

    turn: int
    time_s: float
    started_s: float  # when the job's clock began
    phase: str  # as `doll.provisioner.decision.Decision.phase`
    binding: str  # what decides, see `doll.provisioner.planning.planner.Plan.binding`, or "budget"
    feasible: bool  # the deadline can still be met
    markets: tuple[str, ...] = ()  # wanted, per slot: "spot", "on_demand" or "" for no machine
    reasons: tuple[str, ...] = ()  # each once
    reason_of: tuple[int, ...] = ()  # per slot, index in `reasons`
    incarnations: tuple[int, ...] = ()  # highest used, per slot
    actions: tuple[str, ...] = ()  # what was done, in words
    alarms: tuple[str, ...] = ()  # what a person must fix
    instances: int = 0  # alive
    num_spot: int = 0  # of those on spot
    samples_done: float = 0.0  # in the model
    target_samples: float = 0.0
    updates_done: int = 0
    spent_usd: float = 0.0
    expected_cost_usd: float = 0.0
    expected_finish_s: float = 0.0  # on the job's clock


AnyRecord = (
    Join | Announce | Skip | Push | Nack | GetRows | Alive | Leave | SourceEnded | Evaluated | Scale
    | Welcome | Grant | NewVersion | RowsStored | Flush | Settle | Durable | Hello | Fence | Stop
    | Attach | Attached | Ping | Detach
    | TermStarted | Update | Finished
    | DeadLetter | Metric | ServerStatus | ProvisionDecision
)  # fmt: skip

_Batch = TypeVar("_Batch", bound=BatchOutcome)
_FEW: Final = 16  # offsets and ranges, which are not packed
_MAX_BITS: Final = 10_000_000  # of one batch, as `data.batch_size`
_BASE_BYTES: Final = 8
_ONES: Final = re.compile("1+")


# --- offsets as bits: their size depends on the distance between the first and the last, not on how many there are ----


def num_bytes(first: int, until: int) -> int:
    """The size of the result of `bits_of` for ranges of offsets between these."""
    return _BASE_BYTES + (until - first + 7) // 8


def bits_of(ranges: Sequence[tuple[int, int]]) -> bytes:
    """Ranges [lo, hi) of offsets, at least one, in any order."""
    first, until = min(lo for lo, _ in ranges), max(hi for _, hi in ranges)
    digits = bytearray(b"0") * (until - first)  # the last one is of the first offset
    for lo, hi in ranges:
        digits[until - hi : until - lo] = b"1" * (hi - lo)
    size = num_bytes(first, until) - _BASE_BYTES
    return first.to_bytes(_BASE_BYTES, "little") + int(digits, 2).to_bytes(size, "little")


def ranges_of(data: bytes) -> tuple[tuple[int, int], ...]:
    """The ranges [lo, hi) of offsets of `bits_of`, in their order, as few as possible; raises RecordError if the bits
    are too short, or longer than a batch can be."""
    if not _BASE_BYTES < len(data) <= num_bytes(0, _MAX_BITS):
        raise RecordError(f"offsets as bits: expected 9 to {num_bytes(0, _MAX_BITS)} bytes, got {len(data)}")
    first = int.from_bytes(data[:_BASE_BYTES], "little")
    digits = f"{int.from_bytes(data[_BASE_BYTES:], 'little'):b}"[::-1]
    return tuple((first + run.start(), first + run.end()) for run in _ONES.finditer(digits))


def offsets_of(ranges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """All offsets of these ranges."""
    return tuple(offset for lo, hi in ranges for offset in range(lo, hi))


def _names_many(item: BatchOutcome) -> bool:
    return len(item.dead) + len(item.gaps) + len(item.lost) > _FEW


def _packed(item: _Batch) -> _Batch:
    """A batch as it is encoded: a record must not become too long for Kafka, whatever a worker is sent."""
    if not _names_many(item):
        return item
    names: list[tuple[tuple[int, int], ...]] = [tuple((at, at + 1) for at in item.dead), item.gaps, item.lost]
    packed = tuple(_bits_if_shorter(ranges, 5 if at == 0 else 11) for at, ranges in enumerate(names))
    if not any(packed):
        return item
    dead, gaps, lost = (() if bits else kept for bits, kept in zip(packed, (item.dead, *names[1:]), strict=True))
    return msgspec.structs.replace(item, dead=dead, gaps=gaps, lost=lost, packed=packed)


def _bits_if_shorter(ranges: Sequence[tuple[int, int]], bytes_each: int) -> bytes:
    """The bits of these ranges, if they are shorter than the ranges, each of which is encoded in `bytes_each`."""
    if not ranges or any(lo >= hi for lo, hi in ranges):  # the last: of a worker that is not to be trusted
        return b""
    first, until = min(lo for lo, _ in ranges), max(hi for _, hi in ranges)
    is_shorter = first >= 0 and until - first <= _MAX_BITS and num_bytes(first, until) < bytes_each * len(ranges)
    return bits_of(ranges) if is_shorter else b""


def _unpacked(item: _Batch) -> _Batch:
    if not item.packed:
        return item
    if len(item.packed) != 3:
        raise RecordError(f"offsets as bits: expected those of dead, gaps and lost, got {len(item.packed)}")
    dead, gaps, lost = (ranges_of(bits) if bits else () for bits in item.packed)
    return msgspec.structs.replace(
        item, dead=offsets_of(dead) or item.dead, gaps=gaps or item.gaps, lost=lost or item.lost, packed=()
    )


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def encode(record: AnyRecord) -> bytes:
    """Bytes of one control record, with magic and schema version in front."""
    if isinstance(record, Push) and any(map(_names_many, record.batches)):
        record = msgspec.structs.replace(record, batches=tuple(map(_packed, record.batches)))
    elif isinstance(record, Update) and any(map(_names_many, record.members)):
        record = msgspec.structs.replace(record, members=tuple(map(_packed, record.members)))
    return _PREFIX + _encoder.encode(record)


def decode(data: bytes | memoryview | None) -> AnyRecord:
    """The control record in `data`. Raises SchemaVersionError if it is of another schema version, and RecordError if
    it is empty, of another magic or an unknown type, or its fields do not fit the type."""
    if not data or len(data) < 3:
        raise RecordError(f"expected a control record, got {0 if data is None else len(data)} bytes")
    if data[0] != MAGIC:
        raise RecordError(f"expected a control record (first byte 0x{MAGIC:02x}), got first byte 0x{data[0]:02x}")
    if data[1] not in READABLE:
        raise SchemaVersionError(
            f"expected control record schema {' or '.join(map(str, READABLE))}, got {data[1]}: upgrade the older side"
        )
    try:
        record = _decoder.decode(memoryview(data)[2:])
        if isinstance(record, Push) and any(item.packed for item in record.batches):
            record = msgspec.structs.replace(record, batches=tuple(map(_unpacked, record.batches)))
        elif isinstance(record, Update) and any(item.packed for item in record.members):
            record = msgspec.structs.replace(record, members=tuple(map(_unpacked, record.members)))
        return record
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RecordError(f"control record does not fit schema {SCHEMA_VERSION}: {exc}") from exc
