"""Control records: the records that DOLL's own processes exchange over Kafka.

Each record is one msgspec struct, encoded as MessagePack after two bytes: a magic byte and the schema version. An
unknown magic byte, version or type raises `RecordError`; the reader counts such a record and drops it. Sample records
are the user's own bytes (see `doll.records.packing` for the packed form).

Each topic carries the records below its heading. A control link (`doll.control`) also carries Grant, NewVersion,
RowsStored, Push, Nack and GetRows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from doll.errors import RecordError, SchemaVersionError
from doll.records.bounded import printable
from doll.records.event_times import NO_EVENTS, EventSpan, EventTimes, LatencyCounts

MAGIC: Final = 0xD0
SCHEMA_VERSION: Final = 11
# 9 adds sample weights: a release with 8 would divide by the number of samples. 10 adds the number of workers that
# divides a step: a release with 9 would make the whole step. 11 adds event times, which a release with 10 refuses.
READABLE: Final = range(8, SCHEMA_VERSION + 1)
_PREFIX: Final = bytes([MAGIC, SCHEMA_VERSION])
MOST_UNREAD: Final = 8  # maximum number of partitions in `Alive.most_unread`


class ControlRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower
):
    """The base of all control records. Times are Unix seconds of the writer's clock, only for people."""


class WorkerRecord(ControlRecord, frozen=True):
    """The base of the records that a worker's process sends in its session."""

    worker: int
    session: int


class ServerRecord(ControlRecord, frozen=True):
    """The base of the records that the parameter server of a term sends to one worker."""

    term: int
    worker: int


# --- events: worker -> parameter server -------------------------------------------------------------------------------


class Join(ControlRecord, frozen=True, omit_defaults=True):
    """A worker process has started, or it answers a Hello. `session` is 0 in a new process, otherwise its session."""

    worker: int
    process: str  # unique name of the process: [name of the machine, ":",] random id
    session: int = 0
    incarnation: int = 0  # number of the worker's machine, from the provisioner; 0: not numbered


class BatchRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, omit_defaults=True):
    """The batches [first, until) of one partition."""

    partition: int
    first: int
    until: int
    left_out: int = 0  # number of records left out by the cuts of batches before `first` (`doll.records.bounds`)
    cuts: tuple[tuple[int, int], ...] = ()  # cuts of these batches: (batch, records left out)


class Announce(WorkerRecord, frozen=True):
    """The worker has these complete batches and retains them. They may be granted, in this order (Algorithm 1)."""

    runs: tuple[BatchRange, ...]


class Skip(WorkerRecord, frozen=True):
    """Batches [first, until) of a partition contain no record and need no gradient. All earlier batches are durable."""

    partition: int
    first: int
    until: int
    gaps: tuple[tuple[int, int], ...] = ()  # offset ranges [lo, hi) in which the log holds no record
    lost: tuple[tuple[int, int], ...] = ()  # offset ranges [lo, hi) that were deleted before this worker read them


class BatchOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The counts and times of one computed batch."""

    n_samples: int  # usable samples in the batch; 0: the batch adds nothing to the gradient
    dead: tuple[int, ...] = ()  # offsets of records that were sent to the dead-letter topic
    gaps: tuple[tuple[int, int], ...] = ()  # offset ranges [lo, hi) in which the log holds no record
    lost: tuple[tuple[int, int], ...] = ()  # offset ranges [lo, hi) that were deleted before this worker read them
    dead_samples: int = 0  # refused samples inside packed records whose other samples are usable
    compute_s: float = 0.0
    wait_s: float = 0.0  # from the batch's completion to the start of its set
    weight: float | None = None  # sum of the weights of the usable samples; None: each weight is 1
    # Mean loss of the worker's weights on the samples that all workers evaluate. The short name keeps updates small.
    shared_loss: float | None = msgspec.field(default=None, name="sl")
    times: EventTimes | None = msgspec.field(default=None, name="t")  # of its learned records; None: not known
    held_out: tuple[int, ...] = ()  # offsets of records that are not learned (`evaluation.holdout`), without the dead
    packed: tuple[bytes, ...] = ()  # `dead`, `gaps`, `lost`, `held_out` as bits: only when encoded, and if shorter

    @property
    def total_weight(self) -> float:
        return float(self.n_samples) if self.weight is None else self.weight

    @property
    def known_times(self) -> EventTimes:
        """The event times; without times if a worker of an earlier release has sent the batch."""
        return self.times or EventTimes(bad=self.n_samples)


class HeldOutScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The loss and the metrics of samples that are held out of the stream, in the model's evaluation mode."""

    n_samples: int
    weight: float  # sum of the weights of the samples
    loss_sum: float  # sum over the samples of loss times weight; `metric_sums` likewise
    metric_sums: Mapping[str, float | bytes] = {}  # bytes: a state (`doll.metrics.states`)


class PushedBatch(BatchOutcome, frozen=True, kw_only=True):
    """One batch of a Push. Losses are measured before the model learns from the samples."""

    batch: int  # number of the batch at its worker, as in the Grant
    grant_id: int
    loss_sum: float  # sum over the samples of loss times weight; `metric_sums` likewise
    metric_sums: Mapping[str, float | bytes] = {}  # bytes: a state (`doll.metrics.states`)
    version: int = -1  # version of the weights used for the batch; -1: the `version` of the Push
    dead_reasons: tuple[tuple[str, int], ...] = ()  # (reason, dead letters) of this batch
    skipped: tuple[tuple[str, int], ...] = ()  # (reason, samples) of the samples that the task has left out
    leader_epoch: int = -1  # highest leader epoch (Kafka) in the log up to the batch's end; -1: unknown
    held_out_score: HeldOutScore | None = None  # of the samples of `held_out`, by the weights that the gradient used


class Push(WorkerRecord, frozen=True, omit_defaults=True):
    """The gradient of one set of batches is in the blob store: the sum over consecutive granted batches (Algorithm 2).

    Under policies whose workers send steps, the blob is the sum of the steps that the worker's optimizer made of the
    gradients.
    """

    term: int
    version: int  # version of the weights used for the last gradient; earlier ones may differ
    key: str  # blob key; "" when no batch holds a usable sample (the gradient is zero)
    batches: tuple[PushedBatch, ...]  # in ascending order of their numbers; () in the answer to a Settle
    fetch_s: float = 0.0  # time to read the weights, for the whole set
    delta_bytes: int = 0  # size of the deltas read instead of the complete weights; 0: complete weights were read
    store_s: float = 0.0  # time to store the gradient, for the whole set
    market: str = ""
    holds_back: bool = False  # the worker holds back a part of the steps of these or of earlier batches
    is_on_its_way: bool = False  # the blob may arrive in a remote blob store after this record
    settles: int = -1  # in a push without batches: nothing is held back any more of batches below this number
    absent: bytes = b""  # parameters that no sample has used, one bit each; first: lowest bit of the first byte


class Nack(WorkerRecord, frozen=True):
    """The worker cannot compute batch `batch` and later ones of a grant: the blob of weights or a batch is missing."""

    batch: int
    term: int
    grant_id: int  # the grant of `batch`
    reason: Literal["weights", "batch"]


class GetRows(WorkerRecord, frozen=True):
    """A GET request: the worker needs rows of tables. The ids are in the blob store (`doll.storage.sections`)."""

    term: int
    number: int  # number of the request, ascending in each process
    key: str  # blob key of the request


class Alive(WorkerRecord, frozen=True):
    """A heartbeat, sent every second from the worker's event loop: the process runs and the loop is not blocked."""

    retained: int = 0  # batches that are held and not yet durable
    next_offset: int = 0  # sum over the worker's partitions of the next offset to read
    lag: int = 0  # records in its partitions that this worker has not read yet
    most_unread: tuple[tuple[int, int], ...] = ()  # (partition, unread records) of the `MOST_UNREAD` largest
    waiting_for: str = ""  # the reason why the worker cannot decode records now; "": it can
    usual: tuple[float, ...] = ()  # state of `doll.consumers.compute.guard.Guard.usual`; (): unknown


class Leave(WorkerRecord, frozen=True):
    """The worker leaves the job. Its batches are not granted; the next process of this worker announces them again."""

    cause: str


class Scale(ControlRecord, frozen=True):
    """A request to continue with another number of workers: `doll scale`, or the provisioner (scale-in)."""

    workers: int
    run_id: str  # the run that the request applies to, see `TermStarted`
    released: tuple[int, ...] | None = None  # workers that must serve no partition; None: no change


class SourceEnded(ControlRecord, frozen=True):
    """A source has sent its last record. All of its records must be learned, even if they fill no batch or group."""

    ends: tuple[int, ...]  # for each partition, one above its last offset at that time


class Drifted(ControlRecord, frozen=True, omit_defaults=True):
    """A metric of the updates has become worse because the stream has changed, noticed at update `version`."""

    term: int  # of the server that made this update
    version: int
    metric: str
    since: int = 0  # the version at which the metric most likely changed


class Evaluated(ControlRecord, frozen=True, omit_defaults=True):
    """The evaluator's metrics of one published version on held-out samples."""

    term: int
    version: int
    loss: float  # NaN: the task has no held-out samples
    accuracy: float | None = None
    metrics: Mapping[str, float] = {}  # only that of `stop.metric`


# --- commands: parameter server -> worker n ---------------------------------------------------------------------------


class Served(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A partition that a worker serves, and the position at which the worker continues to read."""

    partition: int
    origin: int  # offset at which the job began on this partition
    next_batch: int  # first batch that is not in the durable model; reading continues here
    included: int = 0  # number of its batches in the model, durable or not
    leader_epoch: int = -1  # leader epoch of the last of these batches, as in a PushedBatch
    decided: int = 0  # bounds of batches below this are final: the model or the server has their gradients
    left_out: int = 0  # number of records left out by the cuts of batches before `next_batch`
    cuts: tuple[tuple[int, int], ...] = ()  # cuts of batches [next_batch, decided): (batch, records left out)
    flush_until: int = 0  # as in a Flush


class Welcome(ServerRecord, frozen=True, omit_defaults=True):
    """The answer to Join, with the session and the partitions to serve. It is sent again when the partitions change."""

    process: str
    session: int
    served: tuple[Served, ...]  # in ascending order
    fingerprint: str  # see `doll.config.fingerprint`; a worker with another job file ends
    incarnation: int = 0  # as in the Join
    samples_id: str = ""  # Kafka's id of the samples topic; "": unknown
    generation: int = 0  # see `TermStarted`
    run_id: str = ""  # run of the server, see `TermStarted`; a worker of another run ends
    endpoints: tuple[str, ...] = ()  # control links, the fastest first: "local:PATH", "redis:STREAM"
    usual: tuple[float, ...] = ()  # as in the last Alive
    grid: int = 0  # see `TermStarted`; a worker of another grid ends


class Grant(ServerRecord, frozen=True):
    """An order to compute the gradients of consecutive batches, with weights of version `min_version` or newer.

    The worker's batch number `first + i` is batch `batches[i]`, and its grant has the id `grant_ids[i]`. The Push names
    the version that was used; the worker may answer with several Push records.
    """

    session: int
    first: int  # a worker numbers its batches in the order of their grants
    grant_ids: tuple[int, ...]  # ascending, at least one
    batches: tuple[tuple[int, int], ...]  # (partition, number in the partition) of each batch
    version: int  # the newest published version
    min_version: int
    key: str  # blob key of the weights of `version`
    included: int = 0  # number of this worker's batches in `version`, always the first ones
    # For each of `batches`, the records left out by the cuts before it in its partition, and by its own; (): no cuts.
    left_out: tuple[tuple[int, int], ...] = ()
    num_live: int = 1  # number of live workers, if each step is divided by it (`PolicyConfig.share`); otherwise 1


class NewVersion(ServerRecord, frozen=True):
    """A new version was published, and no grant has named it yet. Only some policies send this record."""

    version: int
    key: str
    included: int = 0  # as in a Grant
    rows_key: str = ""  # blob key of rows that the worker has requested and that changed after `rows_since`
    rows_since: int = 0


class RowsStored(ServerRecord, frozen=True):
    """The answer to GetRows: the rows are in the blob store."""

    session: int
    number: int  # number of the request
    version: int  # version of the rows
    key: str
    included: int  # as in a Grant


class Flush(ServerRecord, frozen=True):
    """A source has ended: announce the records below these offsets, even if they fill no batch."""

    until: dict[int, int]  # offsets, by partition


class Settle(ServerRecord, frozen=True):
    """Push the held-back parts of the steps of the worker's batches below `until`, so that these batches can become
    durable. `until` 0: no further batch will come, so push the computed batches without waiting for others."""

    session: int
    until: int


class Durable(ServerRecord, frozen=True):
    """The batches below `until` of each partition are in a checkpoint. Acknowledge them to Kafka and release them."""

    until: dict[int, int]  # by partition
    batches: int  # number of this worker's batches in the checkpoint, always the first ones
    left_out: dict[int, int] = {}  # by partition, if not 0: records left out by the cuts of these batches


class Hello(ControlRecord, frozen=True):
    """A parameter server has started. Workers answer with Join."""

    term: int


class Fence(ServerRecord, frozen=True):
    """A newer process of the same worker has replaced this process. Exit."""

    process: str


class Stop(ControlRecord, frozen=True):
    """The job has ended."""

    term: int
    reason: str


# --- control links: parameter server <-> worker, in addition to Kafka -------------------------------------------------


class Attach(ControlRecord, frozen=True):
    """The first record that a worker sends on a control link: its process, and the term and run of its server."""

    worker: int
    session: int
    term: int
    run_id: str = ""


class Attached(ServerRecord, frozen=True):
    """The answer to Attach: from now on, this link carries the worker's grants."""

    session: int
    run_id: str = ""


class Ping(ControlRecord, frozen=True):
    """A heartbeat: the sender is live and has sent no other record for a second."""


class Detach(ControlRecord, frozen=True):
    """The last record on a control link."""

    reason: str


# --- updates: lineage and audit ---------------------------------------------------------------------------------------


class TermStarted(ControlRecord, frozen=True, omit_defaults=True):
    """A parameter server has started from the checkpoint of `resumed_version`; see `kept_version`."""

    term: int
    resumed_version: int
    origins: tuple[int, ...]  # per partition
    records_per_batch: int
    time_s: float
    generation: int = 0  # term of the generation's first server; 0: the first (`doll.ledger.lineage`)
    resumed_batches: int = 0  # batches in the resumed model
    run_id: str = ""  # random; the same in all terms of a `doll up`, or of a generation if started otherwise
    grid: int = 0  # number of earlier grids of the generation (docs/decisions/0085)
    init_from: str = ""  # source of the generation's first weights, see `EngineSnapshot.init_from`
    rolled_back_to: int = -1  # version that `resumed_version` has restored (docs/decisions/0090); -1: none

    @property
    def kept_version(self) -> int:
        """The last version of lower terms that is kept. Later versions of lower terms are void."""
        return self.resumed_version if self.rolled_back_to < 0 else self.rolled_back_to


class Member(BatchOutcome, frozen=True, kw_only=True):
    """One batch of an update, with the offsets [lo, hi) of a partition. If `batches` > 1: several batches without a
    record."""

    worker: int
    partition: int
    batch: int  # number in its partition
    lo: int
    hi: int
    base_version: int
    fetch_s: float = 0.0
    store_s: float = 0.0
    grant_to_push_s: float = 0.0
    market: str = ""
    held_back: bool = False  # a part of its step is not in this update, but in a later one
    set_grant_id: int = 0  # first grant of its pushed set; `fetch_s` and `store_s` are its shares of the set's
    batches: int = 1
    cut: bool = False  # the batch ends before it is full
    loss_sum: float = 0.0  # sum over its usable samples, before learning, with its worker's weights
    # From its grant to the new weights; 0: an earlier release. The short name keeps updates small.
    grant_to_update_s: float = msgspec.field(default=0.0, name="gu")


class Update(ControlRecord, frozen=True):
    """An applied update. Version `version` is version - 1, plus these batches, plus the parts that settle earlier
    batches."""

    term: int
    version: int
    members: tuple[Member, ...]
    n_samples: int
    loss: float  # weighted mean of the samples' loss before learning from them (prequential)
    metrics: Mapping[str, float | bytes] = {}  # prequential; weighted means over the samples, or merged states
    samples_total: int = 0  # usable samples in the model
    batches_total: int = 0  # batches in the model, also without usable samples: the progress in the streams
    apply_s: float = 0.0  # parameter server time for this update: fetch, add, step, publish
    grant_to_update_s: float = 0.0  # from the first grant of the group to the new weights
    time_s: float = 0.0
    settled: tuple[tuple[int, int], ...] = ()  # (partition, until): batches below `until` are complete
    events: EventSpan = NO_EVENTS  # the event times of all records in the version
    held_out_score: HeldOutScore | None = None  # of the samples of all `held_out`; None: there are none
    lr_factor: float = 1.0  # factor of the learning rate of the step
    ema_factor: float = 1.0  # factor of 1 - decay of the moving average of the weights
    chain: bytes = b""  # hash of this record and of the update before it (`doll.records.chain`); b"": earlier release

    @property
    def total_weight(self) -> float:
        if all(member.weight is None for member in self.members):
            return float(self.n_samples)
        return sum(member.total_weight for member in self.members)


class Finished(ControlRecord, frozen=True):
    """The job has ended. `version` is the last version, and it is in a checkpoint."""

    term: int
    version: int
    reason: str
    time_s: float
    error: str = ""  # the error that ended the job; "": a stop rule was met


# --- dead and metrics -------------------------------------------------------------------------------------------------


# No value; above data.max_record_bytes; Kafka batch unreadable; not packed; `decode` failed; harmful; replayed.
DeadLetterCode = Literal["empty", "too_long", "unreadable", "not_packed", "undecodable", "harmful", "replayed"]


class DeadLetter(ControlRecord, frozen=True):
    """A user record that could not be learned. `payload` is the record, cut if `payload_bytes`, its full size, is
    larger."""

    worker: int
    partition: int
    offset: int
    reason: str  # for people; programs read `code`
    payload: bytes
    payload_bytes: int  # full size of the record
    code: DeadLetterCode = "undecodable"
    replayed_as: int = -1  # for code `replayed`: the new record's offset in the same partition
    samples: int = 1  # refused samples; a packed record can be refused in part
    whole: bool = True  # the whole record was refused, so its offset is dead-lettered
    time_s: float = 0.0
    term: int = 0  # term of the server that the worker knew; it identifies the generation

    def __post_init__(self) -> None:
        # A reason can contain text of a record, so it is made printable when a letter is created and when it is read.
        msgspec.structs.force_setattr(self, "reason", printable(" ".join(self.reason.split())))


class Metric(ControlRecord, frozen=True):
    """Measurements of one process. A key of `values` ends in the unit, unless it names a count. A counter that only
    grows ends in `_total`."""

    source: str  # "worker-3", "ps", "evaluator", "producer"
    values: Mapping[str, float]
    time_s: float


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The state of one worker, as the parameter server knows it."""

    worker: int
    is_live: bool  # its lease is valid and it has not left
    session: int = 0  # 0: no process of this worker has joined yet
    incarnation: int = 0  # number of its machine, from the provisioner; 0: not numbered
    restarts: int = 0  # number of processes that replaced an earlier process of this worker
    live_since_s: float = 0.0  # Unix seconds; 0 while it is not live
    silent_s: float = 0.0  # seconds since its last record; 0 while it is not live
    market: str = ""  # market of its machine, from its last gradient
    retained_batches: int = 0  # batches that are held and not yet durable
    lag_records: int = 0  # records in its partitions that it has not read yet
    control: str = "kafka"  # transport of its grants and pushes: "kafka", "redis" or "local"
    batch_s: float = 0.0  # seconds for one of its batches, from grant to push; 0: unknown
    time_limit_s: float = 0.0  # time after which the server does not wait for its push any more
    is_stalled: bool = False  # a time limit has passed, and the worker has not answered since then
    partitions: int = 0  # number of partitions that it serves
    is_spare: bool = False  # it is live and serves no partition, because other workers serve all
    waiting_for: str = ""  # as in its last Alive


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The cause that limits the speed of the job (`doll.ps.engine.limit`).

    `dry`: the other workers wait for a worker whose partitions hold no unread record. `slow`: the other workers wait
    for a worker that needs more time for a batch. `partition`: most unread records are in one partition, and its worker
    computes all the time. `workers`: there are unread records, and all workers compute most of the time. `updates`: the
    workers have batches, and wait for weights most of the time.
    """

    kind: Literal["dry", "slow", "partition", "workers", "updates"]
    worker: int = -1  # the worker that the others wait for, or that serves the partition; -1: all
    partitions: tuple[int, ...] = ()  # the partition; for `dry`, the first partitions of the worker
    num_partitions: int = 0  # number of partitions that the worker serves
    unread: int = 0  # unread records of all partitions
    share: float = 0.0  # `partition`: share of these records in it; `updates`: share of time in which workers compute


class Measures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gain and the cost of the consistency policy since the server's term began (`doll.ps.engine.measures`)."""

    staleness: Mapping[int, int] = {}  # number of reads by their staleness, see `doll.theory.staleness`
    staleness_total: int = 0  # sum of the staleness of all reads
    older_reads: int = 0  # differences that are not counted, because the version that was read is too old
    blocked_s: float = 0.0  # sum over the workers: time with a complete batch, idle and without a grant
    computing_s: float = 0.0  # sum over the workers: time to read weights, compute and store gradients
    idle_s: float = 0.0  # sum over the workers: other time between two pushes, blocked or without a batch
    gradient_bytes: int = 0  # size of the gradients as sent
    gradient_values: int = 0  # number of values sent
    dense_gradient_bytes: int = 0  # size of the same gradients before coding
    weights_bytes: int = 0  # size of the versions that workers have read
    row_bytes: int = 0  # size of the tables' rows as sent to the workers
    row_request_bytes: int = 0  # size of the ids that workers have requested, as sent
    plain_row_bytes: int = 0  # size of these rows before coding, with 8 bytes for each key
    void_batches: int = 0  # batches computed again because of the policy (`doll.ps.policies.base.Policy.void`)


class TableStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The counts of a bounded table since the job began."""

    name: str
    rows: int  # number of rows now
    admitted: int  # ids that received a row
    evicted: int  # rows removed to make room for other ids
    expired: int  # rows removed because no push contained their id (`training.tables.*.ttl_updates`)
    refused: int  # dropped gradients of ids without a row


class ShardStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The state of one shard of the model (`ps.shards`), as it said last."""

    shard: int
    is_alive: bool = True  # it has said so within the last 6 s, and serves this server
    host: str = ""
    pid: int = 0
    version: int = 0  # newest version that it has made
    slice_bytes: int = 0  # its weights, without the optimizer's state
    memory_bytes: int = 0  # resident memory of its process; 0: unknown
    part_version: int = -1  # version of its newest part of a checkpoint; -1: it has stored none in this term


class ServerStatus(ControlRecord, frozen=True):
    """The parameter server's state, sent once a second to `metrics`. Without it, a standby takes over."""

    term: int
    time_s: float
    leader_since_s: float  # Unix seconds
    pid: int
    version: int
    durable_version: int
    samples_total: int
    batches_total: int
    waiting_batches: int  # number of complete batches at live workers, not granted
    computing_batches: int  # number of granted batches without a gradient yet
    shortfall_batches: int  # batches that the next update lacks after live workers have offered all; 0: none
    stalled_s: float  # how long no update has been possible; 0: an update is possible
    workers: tuple[WorkerStatus, ...]  # one per worker, in order
    counters: Mapping[str, int] = {}  # counters of the engine: refused, requeued, ...
    measures: Measures | None = None
    limit: Limit | None = None  # None: nothing waits, or the limit is unknown
    dead_reasons: tuple[tuple[str, int], ...] = ()  # (reason, dead letters) of the applied batches
    recent_records: int = 0  # number of recent records in the share of `data.on_bad_records`
    recent_refused: int = 0  # number of refused records among these
    num_workers: int = 0  # requested number of workers; 0: the number in the job file
    released: tuple[int, ...] = ()  # workers that must serve no partition
    moving_partitions: int = 0  # partitions that are not yet moved to their new worker
    is_kept: bool = True  # decisions that make no update, such as the number of workers, are in a checkpoint
    run_id: str = ""  # see `TermStarted`
    source_ended: bool = False  # this server knows where a source has ended
    skipped: tuple[tuple[str, int], ...] = ()  # (reason, samples left out) of the applied batches
    tables: tuple[TableStatus, ...] = ()  # the bounded tables
    shards: tuple[ShardStatus, ...] = ()  # in order; none: the server has the whole model
    learned: LatencyCounts | None = None  # from the events to the model, since this term began; None: not measured
    durable: LatencyCounts | None = None  # from the events to a checkpoint, likewise


class ServedStatus(ControlRecord, frozen=True):
    """The freshness of a model server's process, sent once a second to `metrics`."""

    server: str  # random name of the process
    time_s: float
    term: int  # of the served version
    served: LatencyCounts  # from the events to a version that answers, since the process began


class ProvisionDecision(ControlRecord, frozen=True):
    """The decision of the provisioner in one turn. It is for people, dashboards, and a successor without the
    provisioner's state file.

    The record is sent to `metrics`, whose readers skip unknown records. On `updates`, the audit would treat an unknown
    record as damage.
    """

    turn: int
    time_s: float
    started_s: float  # when the job's clock began
    phase: str  # as `doll.provisioner.decision.Decision.phase`
    binding: str  # the deciding limit, see `doll.provisioner.planning.planner.Plan.binding`, or "budget"
    feasible: bool  # the deadline can still be met
    markets: tuple[str, ...] = ()  # wanted market of each slot: "spot", "on_demand" or "" for no machine
    reasons: tuple[str, ...] = ()  # the distinct reasons
    reason_of: tuple[int, ...] = ()  # for each slot, the index in `reasons`
    incarnations: tuple[int, ...] = ()  # highest used incarnation of each slot
    actions: tuple[str, ...] = ()  # the actions taken, in words
    alarms: tuple[str, ...] = ()  # problems that a person must fix
    instances: int = 0  # number of live instances
    num_spot: int = 0  # number of these on spot
    samples_done: float = 0.0  # samples in the model
    target_samples: float = 0.0
    updates_done: int = 0
    spent_usd: float = 0.0
    expected_cost_usd: float = 0.0
    expected_finish_s: float = 0.0  # on the job's clock


AnyRecord = (
    Join | Announce | Skip | Push | Nack | GetRows | Alive | Leave | SourceEnded | Drifted | Evaluated | Scale
    | Welcome | Grant | NewVersion | RowsStored | Flush | Settle | Durable | Hello | Fence | Stop
    | Attach | Attached | Ping | Detach
    | TermStarted | Update | Finished
    | DeadLetter | Metric | ServerStatus | ServedStatus | ProvisionDecision
)  # fmt: skip

_Batch = TypeVar("_Batch", bound=BatchOutcome)
_OFFSETS: Final = ("dead", "held_out")
_PACKED: Final = ("dead", "gaps", "lost", "held_out")
_FEW: Final = 16  # this many offsets and ranges, or fewer, are not packed
_MAX_BITS: Final = 10_000_000  # maximum for one batch, as for `data.batch_size`
_BASE_BYTES: Final = 8
_ONES: Final = re.compile("1+")


# --- offsets as bits: their size depends on the distance between the first and the last, not on how many there are ----


def num_bytes(first: int, until: int) -> int:
    """Return the size in bytes of the result of `bits_of` for ranges within [first, until)."""
    return _BASE_BYTES + (until - first + 7) // 8


def bits_of(ranges: Sequence[tuple[int, int]]) -> bytes:
    """Encode ranges [lo, hi) of offsets as bits. The ranges may have any order; at least one is needed."""
    first, until = min(lo for lo, _ in ranges), max(hi for _, hi in ranges)
    digits = bytearray(b"0") * (until - first)  # the last digit belongs to the first offset
    for lo, hi in ranges:
        digits[until - hi : until - lo] = b"1" * (hi - lo)
    size = num_bytes(first, until) - _BASE_BYTES
    return first.to_bytes(_BASE_BYTES, "little") + int(digits, 2).to_bytes(size, "little")


def ranges_of(data: bytes) -> tuple[tuple[int, int], ...]:
    """Decode the result of `bits_of`. Return the ranges [lo, hi) in ascending order, with touching ranges joined. Raise
    RecordError if `data` is too short, or longer than a batch needs."""
    if not _BASE_BYTES < len(data) <= num_bytes(0, _MAX_BITS):
        raise RecordError(f"offsets as bits: expected 9 to {num_bytes(0, _MAX_BITS)} bytes, got {len(data)}")
    first = int.from_bytes(data[:_BASE_BYTES], "little")
    digits = f"{int.from_bytes(data[_BASE_BYTES:], 'little'):b}"[::-1]
    return tuple((first + run.start(), first + run.end()) for run in _ONES.finditer(digits))


def offsets_of(ranges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return all offsets of these ranges."""
    return tuple(offset for lo, hi in ranges for offset in range(lo, hi))


def _names_many(item: BatchOutcome) -> bool:
    return len(item.dead) + len(item.gaps) + len(item.lost) + len(item.held_out) > _FEW


def _packed(item: _Batch) -> _Batch:
    """Return a batch in its encoded form, with offsets as bits if the bits are shorter. So a record is not too long for
    Kafka, even if most records of its batches are refused."""
    if not _names_many(item):
        return item
    offsets = {name: tuple((at, at + 1) for at in getattr(item, name)) for name in _OFFSETS}
    ranges = offsets | {"gaps": item.gaps, "lost": item.lost}
    packed = tuple(_bits_if_shorter(ranges[name], 5 if name in _OFFSETS else 11) for name in _PACKED)
    kept: dict[str, Any] = {name: () for name, bits in zip(_PACKED, packed, strict=True) if bits}
    return msgspec.structs.replace(item, packed=packed, **kept) if kept else item


def _bits_if_shorter(ranges: Sequence[tuple[int, int]], bytes_each: int) -> bytes:
    """Return the bits of these ranges if the bits are shorter than the ranges, which need `bytes_each` bytes each;
    otherwise b""."""
    if not ranges or any(lo >= hi for lo, hi in ranges):  # lo >= hi: from a faulty or malicious worker
        return b""
    first, until = min(lo for lo, _ in ranges), max(hi for _, hi in ranges)
    is_shorter = first >= 0 and until - first <= _MAX_BITS and num_bytes(first, until) < bytes_each * len(ranges)
    return bits_of(ranges) if is_shorter else b""


def _unpacked(item: _Batch) -> _Batch:
    if not item.packed:
        return item
    if len(item.packed) not in (3, 4):  # 3: from a release without held-out records
        raise RecordError(f"offsets as bits: expected those of {', '.join(_PACKED)}, got {len(item.packed)}")
    ranges = {name: ranges_of(bits) for name, bits in zip(_PACKED, item.packed, strict=False) if bits}
    named: dict[str, Any] = {name: offsets_of(at) if name in _OFFSETS else at for name, at in ranges.items()}
    return msgspec.structs.replace(item, packed=(), **named)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def encode(record: AnyRecord) -> bytes:
    """Encode one control record, with the magic byte and the schema version in front."""
    if isinstance(record, Push) and any(map(_names_many, record.batches)):
        record = msgspec.structs.replace(record, batches=tuple(map(_packed, record.batches)))
    elif isinstance(record, Update) and any(map(_names_many, record.members)):
        record = msgspec.structs.replace(record, members=tuple(map(_packed, record.members)))
    return _PREFIX + _encoder.encode(record)


def decode(data: bytes | memoryview | None) -> AnyRecord:
    """Decode a control record. Raise SchemaVersionError if it has an unreadable schema version. Raise RecordError if
    `data` is empty, has another magic byte or an unknown type, or has fields that do not fit the type."""
    if not data or len(data) < 3:
        raise RecordError(f"expected a control record, got {0 if data is None else len(data)} bytes")
    if data[0] != MAGIC:
        raise RecordError(f"expected a control record (first byte 0x{MAGIC:02x}), got first byte 0x{data[0]:02x}")
    if data[1] not in READABLE:
        raise SchemaVersionError(
            f"expected control record schema {READABLE[0]} to {READABLE[-1]}, got {data[1]}: upgrade the older side"
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
