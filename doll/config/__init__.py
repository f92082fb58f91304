"""The job file: one YAML file that describes a whole job, checked before anything starts.

Order of precedence: defaults < file < `--set key=value`. Secrets never stand in the file: they come from the
environment (`DOLL_KAFKA_USERNAME`, `DOLL_KAFKA_PASSWORD`, `DOLL_REDIS_PASSWORD`) and are read where a connection is
made.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from doll.bounded import MalformedError, check_size, read_text
from doll.errors import ConfigError

JOB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
# Far above any job file's: what is larger was made to fill the memory, or is no job file.
MAX_CHARS = 1_000_000
MAX_VALUES = 100_000
MAX_DEPTH = 40
S3_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/\s]+)*/?")


class Section(BaseModel):
    """A part of the job file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


# --- what is learned ------------------------------------------------------------------------------------------------


class TaskConfig(Section):
    """The user's task: a Python class and its keyword arguments."""

    cls: str = Field(alias="class", description="`module:Class`, or `file.py:Class` relative to the job file")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the class")

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @model_validator(mode="after")
    def _has_class(self) -> Self:
        module, _, name = self.cls.rpartition(":")
        if not module or not name.isidentifier():
            raise ValueError(f"expected 'module:Class' or 'file.py:Class', got {self.cls!r}")
        return self


def _tag(key: str, default: str | None) -> Discriminator:
    """Choose the member of a union by `key`; without it, the default member."""
    return Discriminator(
        lambda value: value.get(key, default) if isinstance(value, dict) else getattr(value, key, None)
    )


class SgdConfig(Section):
    """Stochastic gradient descent on the mean gradient of a group (digest D2)."""

    name: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 0.1
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0)


class AdamConfig(Section):
    """Adam on the mean gradient of a group."""

    name: Literal["adam"] = "adam"
    lr: PositiveFloat = 1e-3
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)


class DollPolicyConfig(Section):
    """Groups of K batches, all computed at the same version (the DOLL paper, Algorithms 3 and 4)."""

    name: Literal["doll"] = "doll"
    group_size: PositiveInt = Field(default=4, description="K: batches per model update")


class BspPolicyConfig(Section):
    """Bulk synchronous: one batch of every live worker per update."""

    name: Literal["bsp"]


class AspPolicyConfig(Section):
    """Asynchronous: every gradient is applied as it comes."""

    name: Literal["asp"]


PolicyConfig = Annotated[
    Annotated[DollPolicyConfig, Tag("doll")]
    | Annotated[BspPolicyConfig, Tag("bsp")]
    | Annotated[AspPolicyConfig, Tag("asp")],
    _tag("name", "doll"),
]
OptimizerConfig = Annotated[Annotated[SgdConfig, Tag("sgd")] | Annotated[AdamConfig, Tag("adam")], _tag("name", "sgd")]


class GuardConfig(Section):
    """Samples that would break the model are dead-lettered (docs/security.md)."""

    spike_factor: float = Field(
        default=100.0,
        ge=0,
        description="a sample may go when its gradient is this many times as long as is usual, if its step would "
        "break the model for ordinary samples; 0: only samples without a finite gradient go",
    )


class TrainingConfig(Section):
    policy: PolicyConfig = Field(default_factory=DollPolicyConfig)
    optimizer: OptimizerConfig = Field(default_factory=SgdConfig)
    reduction: Literal["mean", "sum"] = Field(
        default="mean",
        description="mean: step on the mean gradient of the update's samples; sum: the paper's literal rule",
    )
    clip_norm: PositiveFloat | None = Field(
        default=None, description="longest gradient of an update that the optimizer sees; a longer one is scaled down"
    )
    guard: GuardConfig = Field(default_factory=GuardConfig)


class StopConfig(Section):
    """The job ends at the first of these that is met; with none it runs until it is stopped."""

    updates: PositiveInt | None = None
    samples: PositiveInt | None = Field(default=None, description="samples applied")
    seconds: PositiveFloat | None = Field(
        default=None, description="wall-clock seconds since the first update of the job"
    )
    accuracy: float | None = Field(default=None, gt=0, le=1, description="held-out accuracy reached")
    loss: float | None = Field(default=None, description="held-out loss reached (at or below)")


# --- the stream -----------------------------------------------------------------------------------------------------


class DataConfig(Section):
    workers: PositiveInt = Field(
        default=4, description="N: datastreams = partitions of the samples topic = worker slots"
    )
    batch_size: PositiveInt = Field(default=64, description="b: samples per batch")
    samples_per_record: PositiveInt = Field(
        default=1, description="m: samples packed in one Kafka record; divides batch_size"
    )
    start: Literal["earliest", "latest"] = Field(default="earliest", description="where a new job begins in the stream")
    max_record_bytes: PositiveInt = Field(default=1_048_576, description="a longer record is dead-lettered")
    retention_hours: PositiveFloat = Field(
        default=24.0, description="how long the samples topic keeps records, if DOLL creates it"
    )
    on_data_loss: Literal["stop", "skip"] = Field(
        default="stop",
        description="what a worker does when records are deleted from the samples topic before they are learned: stop "
        "with exit code 4, or skip them (they are counted, and named by the audit)",
    )

    @model_validator(mode="after")
    def _packs_evenly(self) -> Self:
        if self.batch_size % self.samples_per_record:
            raise ValueError(
                f"samples_per_record must divide batch_size, got {self.samples_per_record} and {self.batch_size}"
            )
        return self

    @property
    def records_per_batch(self) -> int:
        """Offsets that one batch covers: b / m."""
        return self.batch_size // self.samples_per_record


class ArrivalsConfig(Section):
    """When samples arrive at each stream."""

    process: Literal["poisson", "deterministic", "asap", "trace"] = "poisson"
    rate_per_s: PositiveFloat | list[PositiveFloat] = Field(
        default=125.0, description="samples per second and stream; a list gives each stream its own rate"
    )
    trace: Path | None = Field(
        default=None, description="text file: one gap in seconds per line, repeated when it ends"
    )
    while_down: Literal["queue", "pause"] = Field(
        default="queue",
        description="what `doll produce` does with a stream whose worker is down: send on, or send nothing until it is "
        "up again (the DOLL paper's model; the formulas of cost and runtime hold only so)",
    )

    @model_validator(mode="after")
    def _pausable(self) -> Self:
        if self.while_down == "pause" and self.process == "asap":
            raise ValueError("while_down: pause: expected a process that keeps time, got asap")
        return self

    @model_validator(mode="after")
    def _trace_given(self) -> Self:
        if (self.process == "trace") != (self.trace is not None):
            raise ValueError("expected 'trace' (a file of gaps in seconds) exactly when process is 'trace'")
        return self


class _Source(Section):
    limit_samples: PositiveInt | None = Field(
        default=None, description="end the stream after this many samples; default: endless"
    )


class DigitsSource(_Source):
    """scikit-learn's handwritten digits, each passed through a random affine and perspective transform."""

    kind: Literal["digits"]


class IdxSource(_Source):
    """Images and labels in IDX files (MNIST's format), .gz or plain; optionally transformed at random."""

    kind: Literal["idx"]
    images: Path
    labels: Path
    augment: bool = True
    skip: int = Field(default=0, ge=0, description="leave out the first images (for a held-out set)")


class CsvSource(_Source):
    """Lines of a CSV file in order, as they stand; sample i goes to stream i mod N."""

    kind: Literal["csv"]
    path: Path
    header: bool = Field(default=False, description="the first line names the columns and is not a sample")
    repeat: bool = Field(default=False, description="begin again at the end of the file")


class JsonlSource(_Source):
    """Lines of a JSON-lines file in order, as they stand; sample i goes to stream i mod N."""

    kind: Literal["jsonl"]
    path: Path
    repeat: bool = False


class StdinSource(_Source):
    """Lines of standard input, as they stand; sample i goes to stream i mod N."""

    kind: Literal["stdin"]


class SyntheticSource(_Source):
    """Gaussian classes in `features` dimensions as packed little-endian float32, then the class as one float32."""

    kind: Literal["synthetic"]
    features: PositiveInt = 20
    classes: PositiveInt = 2
    drift_per_sample: float = Field(default=0.0, ge=0, description="how far class means walk with each sample")


SourceConfig = Annotated[
    DigitsSource | IdxSource | CsvSource | JsonlSource | StdinSource | SyntheticSource, Field(discriminator="kind")
]


# --- the machinery --------------------------------------------------------------------------------------------------


class CheckpointConfig(Section):
    """The durable model. A batch is acknowledged to Kafka only when it is in a checkpoint."""

    folder: Annotated[str, StringConstraints(pattern="^s3://")] | Path | None = Field(
        default=None,
        description="a folder, or s3://bucket/prefix (credentials as boto3 finds them); default: `checkpoints/` in the "
        "run folder",
    )
    every_updates: PositiveInt = 20
    every_s: PositiveFloat = 2.0
    keep: int = Field(
        default=3, ge=2, description="newest checkpoints kept; at least 2, so that a torn one has a predecessor"
    )
    retry_timeout_s: PositiveFloat = Field(
        default=60.0,
        description="a checkpoint that cannot be saved is tried again for this long; then the parameter server ends, "
        "to be started again",
    )
    event_log: bool = Field(
        default=False,
        description="keep every event and gradient in the run folder, to replay the run to the bit (large)",
    )

    @field_validator("folder", mode="before")
    @classmethod
    def _folder_or_bucket(cls, value: Any) -> Any:
        malformed = isinstance(value, str) and value.startswith("s3:") and not S3_URL.fullmatch(value)
        if malformed or not isinstance(value, str | Path | None):
            raise ValueError(f"expected a folder or s3://bucket/prefix, got {value!r}")
        return value


class EvaluationConfig(Section):
    every_s: PositiveFloat = Field(default=1.0, description="at most one held-out evaluation in this time")
    max_samples: PositiveInt = Field(default=2000, description="size of the held-out set, if the task offers more")
    enabled: bool = True


class WorkerConfig(Section):
    max_pending_batches: PositiveInt = Field(
        default=32, description="batches a worker holds that are not durable yet; then it stops reading"
    )
    lease_s: PositiveFloat = Field(default=8.0, description="a worker that is silent for this long is treated as gone")
    grant_timeout_s: PositiveFloat = Field(
        default=30.0, description="a granted batch without gradient after this (or 5 mean gradient times) is replaced"
    )
    stall_timeout_s: PositiveFloat = Field(
        default=60.0, description="a worker that has records to read and gets none for this long exits, to be restarted"
    )
    drain_s: PositiveFloat = Field(
        default=8.0,
        description="time to finish or hand back after SIGTERM; below the notice of the machines (AWS 120 s, GCP 30 s)",
    )
    notice_s: PositiveFloat = Field(
        default=25.0,
        description="time to finish or hand back after a spot notice, at most: AWS gives 120 s and says when, GCP 30 s",
    )
    spot_notices: Literal["none", "imds"] | None = Field(
        default=None,
        description="imds: ask the EC2 instance metadata service every 5 s whether spot takes this machine, and leave "
        "before it does; default: $DOLL_SPOT_NOTICES, else imds with `doll worker --from-imds`, else none",
    )
    torch_threads: PositiveInt = 1
    fetch_max_wait_ms: PositiveInt = Field(
        default=200,
        description="samples of a slow stream may wait at the broker for so long, so that one request fetches many",
    )
    stream_buffer_records: PositiveInt | None = Field(
        default=None, description="records that Faust buffers; default: 4096, fewer when samples are packed"
    )


class PsConfig(Section):
    lease_s: PositiveFloat = Field(
        default=5.0,
        description="a parameter server that is silent for this long is succeeded by its standby; away for longer, it "
        "makes sure that it has no successor before it goes on",
    )


class HealthConfig(Section):
    """Probes: `/healthz` and `/readyz` of each process on 127.0.0.1."""

    base_port: int | None = Field(
        default=None,
        ge=1024,
        le=60_000,
        description="the parameter server answers here, evaluator + 1, producer + 2, standby + 3, provisioner + 5, "
        "worker n + 10 + n; default: $DOLL_HEALTH_PORT of each process, else no probes (`doll up` picks free ports: "
        "health.json)",
    )
    liveness_timeout_s: PositiveFloat = Field(
        default=60.0, description="a process whose main loop does not turn for this long ends, to be started again"
    )


class BlobConfig(Section):
    """Weights and gradients on their way between processes."""

    kind: Literal["auto", "redis", "shm"] = Field(
        default="auto",
        description="auto: shared memory between the processes that `doll up` starts on this machine with a Redis of "
        "its own, else Redis; shm: as auto, also with a Redis that is given (all workers on this machine)",
    )
    ttl_s: PositiveFloat = Field(default=600.0, description="time to live of weights and gradients there")
    keep_versions: int = Field(default=4, ge=2)


class KafkaConfig(Section):
    address: str | None = Field(
        default=None, description="host:port[,host:port]; default: $DOLL_KAFKA, else a local broker is started"
    )
    replication_factor: PositiveInt = 1
    security: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    producer_user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._=,@/ -]+$")] | None = Field(
        default=None,
        description="user of Kafka's that may write to `samples` and nothing else: allowed, by ACLs, when the topics "
        "are made or checked",
    )

    @model_validator(mode="after")
    def _no_secret(self) -> Self:
        if self.address and "@" in self.address:
            raise ValueError("no credentials in the job file: set DOLL_KAFKA_USERNAME and DOLL_KAFKA_PASSWORD instead")
        return self


class RedisConfig(Section):
    address: str | None = Field(
        default=None, description="redis://host:port/db; default: $DOLL_REDIS, else a local server is started"
    )

    @model_validator(mode="after")
    def _no_secret(self) -> Self:
        if self.address and ("@" in self.address or "?" in self.address):
            raise ValueError(
                "no credentials in the job file: set DOLL_REDIS_PASSWORD (and DOLL_REDIS_USERNAME) instead"
            )
        return self


class PlanConfig(Section):
    """What the job is worth: error target, deadline, budget and prices. Read by `doll plan` and the provisioner."""

    updates: PositiveInt | None = Field(default=None, description="J: updates that meet the error target")
    target_error: PositiveFloat | None = Field(
        default=None, description="error to reach, in the unit of `measure`; J then comes from `pilot`"
    )
    measure: Literal["error_rate", "loss"] = Field(
        default="error_rate", description="held-out error: 1 - accuracy, or the task's loss"
    )
    pilot: Path | None = Field(default=None, description="run folder from which `doll plan` takes J and `service_s`")
    deadline_s: PositiveFloat | None = Field(default=None, description="seconds from the start of the job")
    budget_usd: PositiveFloat | None = Field(default=None, description="most that the workers may cost")
    spot_usd_per_h: float | None = Field(default=None, ge=0, description="price of a worker on spot while it is up")
    on_demand_usd_per_h: PositiveFloat | None = Field(default=None, description="price of a worker on-demand")
    alpha: float = Field(default=0.9, ge=0, le=1, description="fraction of the time that a spot worker is up")
    cycle_s: PositiveFloat = Field(default=36000.0, description="mean up and down time of a spot worker together")
    risk: float | None = Field(
        default=None,
        gt=0,
        le=0.5,
        description="accepted probability of missing the deadline; default: plan on the mean",
    )
    boot_s: float = Field(default=90.0, ge=0, description="from a change of market to a worker that is ready")
    margin: float = Field(default=0.005, ge=0, lt=1, description="fraction of the deadline held back")
    service_s: PositiveFloat | None = Field(
        default=None,
        description="mean seconds to compute and upload one batch's gradient; `doll calibrate` measures it",
    )

    @model_validator(mode="after")
    def _one_goal(self) -> Self:
        if self.updates is not None and self.target_error is not None:
            raise ValueError("expected updates or target_error, got both")
        return self


class ProvisionConfig(Section):
    """How `doll provision` buys machines for the workers."""

    every_s: PositiveFloat | None = Field(
        default=None,
        description="seconds between two turns; default: 30, or a 200th of the deadline where that is less, but 1",
    )
    rule: Literal["pace", "theorem"] = Field(
        default="pace",
        description="pace: wait for spot while the slack allows; theorem: the mix of Theorem 4/5 on what is left",
    )
    deadline_guard: bool = Field(
        default=True, description="keep so much on-demand that the deadline holds even if all of spot went down now"
    )
    spot_stable_s: float | None = Field(
        default=None,
        ge=0,
        description="how long spot must have been available before a worker returns to it; "
        "default: 2 boots, at least 5 turns",
    )
    re_estimate: bool = Field(
        default=False,
        description="estimate the updates to `plan.target_error` anew from the job's own held-out errors as it runs",
    )
    launches_per_min: PositiveInt = Field(default=120, description="launches of the whole fleet, at most")
    fallbacks_per_min: PositiveInt = Field(
        default=60, description="of these, from spot to on-demand while the deadline is not in danger"
    )
    pool_backoff_s: float | None = Field(
        default=None,
        ge=0,
        description="a pool that was dry, or took a machine back, is avoided so long; default: 180, processes: 0",
    )
    heartbeat_timeout_s: PositiveFloat = Field(
        default=30.0, description="a worker that is not heard for so long, while others are, does not work"
    )
    replace_after_s: PositiveFloat = Field(
        default=300.0, description="a machine whose worker is silent for so long is replaced"
    )
    boot_timeout_s: PositiveFloat = Field(
        default=900.0, description="a machine whose worker has not joined by then is replaced"
    )


class _Fleet(Section):
    cluster: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] | None = Field(
        default=None,
        description="marks the machines of this job, and no others are touched; jobs may share it one after the other; "
        "default: the job's name",
    )


class ProcessesFleetConfig(_Fleet):
    """Worker processes of this machine as instances, on a spot market that is replayed."""

    kind: Literal["processes"] = "processes"
    trace: Path | None = Field(
        default=None,
        description="folder of recorded prices and availability (docs/traces.md); default: two states, up and down, by "
        "`plan.alpha` and `plan.cycle_s`, at the prices of `plan`",
    )
    pool: str | None = Field(default=None, description="pool of the trace; default: its first")
    speed_up: PositiveFloat = Field(
        default=1.0, description="seconds of the market, which is what is billed, per second of this machine"
    )
    notice_s: float = Field(
        default=2.0,
        ge=0,
        description="seconds of this machine from a notice to SIGKILL; `speed_up` does not shorten it",
    )
    no_notice_share: float = Field(
        default=0.0, ge=0, le=1, description="share of the preemptions that come without notice, as they do on EC2"
    )
    boot_s: float = Field(
        default=0.0, ge=0, description="seconds of this machine from a launch until its worker joins the job"
    )


class ComposeFleetConfig(_Fleet):
    """Containers of a docker compose project as instances."""

    kind: Literal["compose"]
    project: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$")] = Field(
        default="doll", description="name of the compose project, whose network and worker image are used"
    )
    service: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")] = Field(
        default="worker", description="service of the project that a worker's image, command and environment come from"
    )
    file: Path = Field(default=Path("docker-compose.yml"), description="the compose file")
    docker: str = Field(default="docker", description="the docker program")
    timeout_s: PositiveFloat = Field(default=60.0, description="a docker command that takes longer has failed")


class Ec2FleetConfig(_Fleet):
    """EC2 instances, one per worker slot (docs/aws.md). Credentials as boto3 finds them."""

    kind: Literal["ec2"]
    region: Annotated[str, StringConstraints(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")] | None = Field(
        default=None, description="e.g. us-east-1; default: as boto3 finds it"
    )
    launch_template: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9().\-/_]{3,128}$")] = Field(
        description="id (lt-...) or name of the workers' launch template; it names no market and no instance type"
    )
    launch_template_version: PositiveInt = Field(
        description="a number: what runs must not change because somebody edits the template"
    )
    subnets: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^subnet-[0-9a-f]{8,17}$")]], Field(min_length=1)
    ] = Field(
        description="in order of preference, the parameter server's zone first: traffic between zones costs 0.02 $/GB"
    )
    instance_types: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*\.[a-z0-9-]+$")]], Field(min_length=1)
    ] = Field(description="of about one size; 6 or more keep spot available")
    queue_url: Annotated[str, StringConstraints(pattern=r"^https?://\S+$")] | None = Field(
        default=None, description="SQS queue that gets the interruption notices; default: no early notice"
    )
    api_calls_per_s: float = Field(
        default=2.0, gt=0, le=20, description="launches and terminations per second, at most"
    )
    price_cache: Path | None = Field(
        default=None, description="file that keeps on-demand prices; default: `prices.json` in the run folder"
    )
    placement_scores: bool = Field(
        default=False,
        description="ask EC2 at the start and hourly how likely each zone is to have all workers on spot, 1 to 10: "
        "logged, and shown by `doll provision status`; advice, nothing is decided by it",
    )

    @model_validator(mode="after")
    def _scored(self) -> Self:
        if self.placement_scores and len(set(self.instance_types)) < 3:
            raise ValueError("placement_scores: expected 3 or more instance_types: with fewer EC2 always scores low")
        return self

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for name in ("subnets", "instance_types"):
            given = getattr(self, name)
            if twice := sorted({one for one in given if given.count(one) > 1}):
                raise ValueError(f"{name}: expected each once, got {', '.join(twice)} twice")
        return self


FleetConfig = Annotated[
    Annotated[ProcessesFleetConfig, Tag("processes")]
    | Annotated[ComposeFleetConfig, Tag("compose")]
    | Annotated[Ec2FleetConfig, Tag("ec2")],
    _tag("kind", "processes"),
]


class JobConfig(Section):
    """The whole job file."""

    job: str = Field(description="name of the job: part of topic names, keys and folders")
    seed: int = Field(default=0, ge=0)
    task: TaskConfig
    data: DataConfig = Field(default_factory=DataConfig)
    source: SourceConfig | None = Field(
        default=None, description="what `doll up` and `doll produce` send; default: somebody else's producer"
    )
    arrivals: ArrivalsConfig = Field(default_factory=ArrivalsConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    stop: StopConfig = Field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    ps: PsConfig = Field(default_factory=PsConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    blobs: BlobConfig = Field(default_factory=BlobConfig)
    kafka: KafkaConfig = Field(default_factory=KafkaConfig)
    redis: RedisConfig = Field(default_factory=RedisConfig)
    plan: PlanConfig = Field(default_factory=PlanConfig)
    provision: ProvisionConfig = Field(default_factory=ProvisionConfig)
    fleet: FleetConfig = Field(
        default_factory=ProcessesFleetConfig, description="the machines that `doll provision` starts workers on"
    )
    base_folder: Path = Field(
        default=Path("."), exclude=True, description="folder of the job file; relative paths start there"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not JOB_NAME.fullmatch(self.job):
            raise ValueError(f"job: expected 1-63 of a-z 0-9 _ - beginning with a letter or digit, got {self.job!r}")
        if self.arrivals.while_down == "pause" and isinstance(self.source, StdinSource):
            raise ValueError("arrivals.while_down: pause: expected a source of one's own pace, got stdin")
        rates = self.arrivals.rate_per_s
        if isinstance(rates, list) and len(rates) != self.data.workers:
            raise ValueError(
                f"arrivals.rate_per_s: expected {self.data.workers} rates (data.workers), got {len(rates)}"
            )
        policy = self.training.policy
        if isinstance(policy, DollPolicyConfig):
            room = self.data.workers * self.worker.max_pending_batches
            if policy.group_size > room:
                raise ValueError(
                    f"training.policy.group_size: {policy.group_size} batches never come together: "
                    f"{self.data.workers} workers x worker.max_pending_batches {self.worker.max_pending_batches} "
                    f"hold {room}; raise max_pending_batches"
                )
        return self

    def path(self, value: Path) -> Path:
        """`value`, taken relative to the job file's folder."""
        return value if value.is_absolute() else self.base_folder / value

    def rates_per_s(self) -> list[float]:
        """Samples per second of each stream (infinite when the source sends as fast as it can)."""
        if self.arrivals.process == "asap":
            return [float("inf")] * self.data.workers
        rates = self.arrivals.rate_per_s
        return list(rates) if isinstance(rates, list) else [rates] * self.data.workers

    @property
    def cluster(self) -> str:
        """What marks the machines of this job."""
        return self.fleet.cluster or self.job

    @property
    def group_size(self) -> int:
        """K: batches per update under the job's policy."""
        policy = self.training.policy
        match policy:
            case DollPolicyConfig():
                return policy.group_size
            case BspPolicyConfig():
                return self.data.workers
            case AspPolicyConfig():
                return 1
            case _:
                typing.assert_never(policy)

    def topic(self, kind: Literal["samples", "events", "commands", "updates", "metrics", "dead"]) -> str:
        return f"doll.{self.job}.{kind}"


def load(path: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """The job file at `path` with `key.sub=value` overrides, checked.

    Raises:
        ConfigError: the file is not there, is not YAML, or a key is unknown, missing or has a wrong value. The message
            names the key, what was expected and what came.
    """
    try:
        text = read_text(path, max_bytes=4 * MAX_CHARS)
    except (OSError, MalformedError) as exc:
        raise ConfigError(f"cannot read job file {path}: {getattr(exc, 'strerror', None) or exc}") from exc
    return parse(text, overrides, origin=str(path), base_folder=path.resolve().parent)


def parse(
    text: str, overrides: Sequence[str] = (), *, origin: str = "job file", base_folder: Path = Path(".")
) -> JobConfig:
    """As `load`, from the text of a job file.

    Raises:
        ConfigError: as in `load`.
    """
    data = _plain_values(text, f"{origin}:")
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}: expected keys and values (job:, task:, data:, ...), got {type(data).__name__}")
    for override in overrides:
        _override(data, override)
    try:
        # A resolved job file (of a run folder) names the folder that its relative paths start from.
        named = data.get("base_folder")
        folder = base_folder / named if isinstance(named, str) else base_folder
        return JobConfig.model_validate({**data, "base_folder": folder})
    except ValidationError as exc:
        raise ConfigError("\n".join(f"{origin}: {line}" for line in _explain(exc))) from exc


def dump(config: JobConfig) -> str:
    """The effective job file as YAML; `parse(dump(c))` equals `c` but for the base folder."""
    text: str = yaml.safe_dump(config.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=False)
    return text


class _Loader(yaml.SafeLoader):
    """YAML's plain values only. Merged keys (`<<`) are counted: a few lines of them can stand for 10^9 keys."""

    merged = 0

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (KeyError, IndexError, AttributeError, TypeError) as exc:  # `!!bool x`, `!!int ""`
            raise yaml.constructor.ConstructorError(
                None, None, f"expected a value of {node.tag}, got {node.value!r}", node.start_mark
            ) from exc

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self.merged += len(node.value)
        if self.merged > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES} keys")


# A job file holds text, numbers, lists and keys. Dates stay text, since no key is one.
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_Loader.yaml_constructors = {
    tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag in _PLAIN
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _plain_values(text: str, origin: str) -> Any:
    """What stands in a YAML text, bounded in size and depth with all its references followed.

    Raises:
        ConfigError: it is not YAML, or beyond what any job needs: it would only fill the memory.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{origin} not a job file's: expected at most {MAX_CHARS} characters, got {len(text)}")
    try:
        loader = _Loader(text)
        try:
            data = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError, MemoryError) as exc:
        raise ConfigError(f"{origin} not YAML: {_short(str(exc))}") from exc
    try:
        check_size(data, max_values=MAX_VALUES, max_depth=MAX_DEPTH)
    except MalformedError as exc:
        raise ConfigError(f"{origin} not a job file's: {exc}: does an anchor refer to itself?") from exc
    return data


def _override(data: dict[Any, Any], override: str) -> None:
    key, sep, value = override.partition("=")
    if not sep or not key.strip():
        raise ConfigError(f"--set: expected key.sub=value, got {override!r}")
    at = data
    parts = key.strip().split(".")
    for part in parts[:-1]:
        inner = at.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {part!r} is a value, not a section")
        at = inner
    at[parts[-1]] = _plain_values(value, f"--set {override:.80}: value is")


def _explain(error: ValidationError) -> Iterator[str]:
    """One line per wrong key: the key, what was expected, what came."""
    for item in error.errors():
        loc = _location(item["loc"])
        key = ".".join(loc) or "job file"
        came = item.get("input")
        shown = _shown(came)
        match item["type"]:
            case "extra_forbidden":
                known = [name for name in _keys_beside(loc) if name != loc[-1]]
                near = difflib.get_close_matches(loc[-1], known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                yield f"{key}: unknown key{hint}"
            case "missing":
                yield f"{key}: expected a value, got nothing: add this key"
            case "union_tag_invalid" | "union_tag_not_found":
                expected = str(item.get("ctx", {}).get("expected_tags", "")).replace("'", "")
                name = str(item.get("ctx", {}).get("discriminator", "kind")).strip("'")
                given = came.get(_TAG_KEY.get(loc[-1], name)) if isinstance(came, dict) else came
                wanted = expected or "the documented kinds"
                yield f"{key}.{_TAG_KEY.get(loc[-1], name)}: expected one of {wanted}, got {_shown(given)}"
            case "value_error":
                message = item["msg"].removeprefix("Value error, ")
                yield f"{key}: {message}" if loc else message
            case _:
                message = item["msg"][:1].lower() + item["msg"][1:]
                yield f"{key}: {message}, got {shown}"


def _shown(value: Any) -> str:
    """A value for a message, short whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return type(value).__name__
    return type(value).__name__ if isinstance(value, dict | list) and len(text) >= 60 else _short(text)


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."


_TYPE_NAME = re.compile(r"constrained-\w+|list\[.*\]")
_TAG_KEY = {"policy": "name", "optimizer": "name", "source": "kind", "fleet": "kind"}


def _location(loc: Sequence[str | int]) -> list[str]:
    """The key as it stands in the file: without the union tags and type names that pydantic puts in."""
    parts = [str(part) for part in loc if not _TYPE_NAME.fullmatch(str(part))]
    return [part for before, part in zip(["", *parts], parts, strict=False) if before not in _TAG_KEY]


def _keys_beside(loc: Sequence[str]) -> list[str]:
    """Names that would have been right where the last part of `loc` stands."""
    models: list[type[BaseModel]] = [JobConfig]
    for part in loc[:-1]:
        found = [
            inner
            for model in models
            for name, field in model.model_fields.items()
            if part in (name, field.alias)
            for inner in _models_in(field.annotation)
        ]
        models = found or models
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return [model for arg in typing.get_args(annotation) for model in _models_in(arg)]
    return []
