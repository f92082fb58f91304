"""The sections for the processes of a job, and for their checkpoints, probes, blobs and control channel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, StringConstraints, field_validator

from doll.config.holdout import HoldoutConfig
from doll.config.pipeline import PipelineConfig
from doll.config.section import LONGEST_S, Section
from doll.records.bounded import short

CHECKPOINT_URLS: Final = {
    "s3": ("s3://bucket/prefix", re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/\s]+)*/?"))
}
"""The URLs of checkpoint stores by scheme: the form for messages, and the pattern. `doll.storage.stores` opens them."""
_DEVICE: Final = re.compile(r"auto|cpu(:0)?|cuda(:[0-9]{1,3})?|mps")
MAX_SET_S: Final = 2.0  # after this time, a worker adds no batch to a set; see `WorkerConfig.set_limit_s`
_URL_LIKE: Final = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*:/|({'|'.join(CHECKPOINT_URLS)}):")


def _is_device(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError(f"expected auto, cpu, cuda, cuda:N (such as cuda:0) or mps, got {value!r}")
    return value


class CheckpointConfig(Section):
    """The durable state of the model. A batch's offset is committed to Kafka only after a checkpoint contains the
    batch."""

    folder: Annotated[str, StringConstraints(pattern="^[a-z0-9]+://")] | Path | None = None
    """a folder, or s3://bucket/prefix (with the default credentials of boto3); default: `checkpoints/` in the run
    folder"""
    every_updates: PositiveInt = 20
    """a checkpoint is due after this many updates"""
    every_s: PositiveFloat = 2.0
    """a checkpoint is also due after this time, if there are new updates"""
    every_event_s: PositiveFloat | None = Field(default=None, le=LONGEST_S)
    """a checkpoint is also due when the newest event in the model is this much newer, by event time, than the newest
    one in the last checkpoint; null: only the other rules apply"""
    keep: int = Field(default=3, le=10_000, ge=2)
    """number of newest checkpoints that are kept; at least 2, in case the newest one is damaged. Versions with an alias
    or a pin (`doll versions`) are kept in addition, until the alias and the pin are removed"""
    history_s: float = Field(default=0.0, ge=0, le=LONGEST_S)
    """time for which older checkpoints are kept, one for each `history_every_s`; 0: none are kept"""
    history_every_s: PositiveFloat = Field(default=3600.0, ge=1, le=LONGEST_S)
    """interval of the checkpoints that `history_s` keeps: 3600 keeps one version of each hour"""
    retry_timeout_s: PositiveFloat = 60.0
    """time for which saving a checkpoint is retried; then the parameter server exits, to be restarted"""
    event_log: bool = False
    """write every event and gradient to the run folder, for a bit-exact replay of the run (large)"""

    @field_validator("folder", mode="before")
    @classmethod
    def _folder_or_bucket(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str | Path) and not _URL_LIKE.match(str(value))):
            return value
        if isinstance(value, str) and any(pattern.fullmatch(value) for _, pattern in CHECKPOINT_URLS.values()):
            return value
        forms = " or ".join(["a folder", *(form for form, _ in CHECKPOINT_URLS.values())])
        raise ValueError(f"expected {forms}, got {short(value)!r}")


class EvaluationConfig(Section):
    """Held-out evaluation."""

    every_s: PositiveFloat = 1.0
    """minimum time between two held-out evaluations"""
    max_samples: PositiveInt = Field(default=2000, le=100_000_000)
    """maximum size of the held-out set"""
    enabled: bool = True
    """false: `doll up` does not start an evaluator"""
    half_life_updates: float | None = Field(default=None, ge=1, le=10_000)
    """also publish the prequential metrics with the weight of an update halved after this number of updates, so that
    they fade; default: only those of the last 50 updates and of all"""
    holdout: HoldoutConfig | None = None
    """records that are never learned; default: only those of `Task.holdout`, which are not in the stream"""


class WorkerConfig(Section):
    """The workers of the job."""

    max_pending_batches: PositiveInt = Field(default=32, le=10_000_000)
    """maximum number of batches of a worker that are not durable yet; when it is reached, the worker stops reading"""
    lease_s: PositiveFloat = Field(default=8.0, ge=2)
    """a worker that is silent for this long is considered failed"""
    grant_timeout_s: PositiveFloat = Field(default=30.0, ge=0.1)
    """a granted batch without a gradient after this time is replaced. The time limit is at least 5 times the mean time
    for a batch, and twice the time that this worker takes; for a wave, it is this time for each of its batches; if
    several batches were granted as a set, it is at most 2 s longer. A gradient that arrives later still counts if no
    other worker has its batch"""
    stall_timeout_s: PositiveFloat = Field(default=60.0, ge=1)
    """a worker that receives no records for this long, although records exist, exits to be restarted"""
    drain_s: PositiveFloat = 8.0
    """time to finish or return a batch after SIGTERM; must be less than the notice time of the machines (AWS 120 s, GCP
    30 s)"""
    notice_s: PositiveFloat = 25.0
    """maximum time to finish or return a batch after a spot interruption notice (AWS: 120 s, GCP: 30 s)"""
    spot_notices: Literal["none", "imds"] | None = None
    """imds: poll the EC2 instance metadata service every 5 s for an interruption notice, and leave the job before the
    interruption; default: $DOLL_SPOT_NOTICES, otherwise imds with `doll worker --from-imds`, otherwise none"""
    device: Annotated[str, AfterValidator(_is_device)] = "cpu"
    """device on which workers compute gradients: cpu, cuda:N, mps; cuda: the CUDA devices of the machine in turn, by
    the worker's number; auto: CUDA devices if there are any, otherwise mps, otherwise the CPU. Everything else, such as
    evaluation, runs on the CPU"""
    compile: bool = False
    """compile the model with torch.compile, which can take minutes at the start of each worker; if the compilation
    fails, the worker continues without it"""
    torch_threads: PositiveInt = Field(default=1, le=1024)
    memory_bytes: PositiveFloat | None = Field(default=None, ge=1e6)
    """memory that each process of a worker may use in addition to the interpreter and its libraries (RLIMIT_DATA, which
    also counts the stacks of threads: 8 MB each); a process that needs more ends the job with an error; default: no
    limit"""
    fetch_max_wait_ms: PositiveInt = Field(default=200, le=300_000)
    """maximum time that samples of a slow stream wait at the broker, so that one request fetches several samples"""
    stream_buffer_records: PositiveInt | None = Field(default=None, le=10_000_000)
    """maximum number of records that wait to be decoded; default: 4096, or fewer if records hold several samples"""

    row_cache_bytes: PositiveInt = 64_000_000
    """memory for the rows of tables (embeddings with sparse=True) that a worker keeps, for all tables together. If
    workers run the optimizer, it also holds the optimizer's state of the same number of rows: the rows whose last
    gradient is oldest lose their state, and start with a new state later"""
    pipeline: PipelineConfig | None = None
    """workers that are pipelines of stages; default: each worker computes whole gradients"""

    @property
    def set_limit_s(self) -> float:
        """The time after which a worker begins no further batch of a set, and sends the gradient of the set.

        This time is well below the timeout of a grant, and below the time to drain.
        """
        return min(MAX_SET_S, self.grant_timeout_s / 4, self.drain_s / 4)


class PsConfig(Section):
    """The parameter server."""

    lease_s: PositiveFloat = Field(default=5.0, ge=2)
    """a standby takes over from a parameter server that is silent for this long; a server that was disconnected for
    longer checks that no successor exists before it continues"""
    shards: Literal["auto"] | Annotated[PositiveInt, Field(le=256)] = 1
    """number of processes, at most 256, among which the model is divided (`doll shard`); 1: the parameter server has
    the whole model. Each shard has at least 262,144 values of the model, unless the model has tables. The number may
    change when a run is resumed.
    auto: one shard for each GB of the model as float32, or for each GB/s of contributions at the rate of `arrivals`,
    whichever are more, but none below 100 MB; 1 if the model cannot be divided or has tables.
    `doll plan` says the number, and `doll up` writes it to the job file of the run"""

    @property
    def num_shards(self) -> int:
        """The number of shards, where `auto` was replaced by it (`doll.model.flat_model.counted`)."""
        assert self.shards != "auto", "the caller has replaced it"
        return self.shards


class LogConfig(Section):
    """The log of each process, written to its standard error; `doll up` writes it to `logs/` in the run folder.

    Warnings of libraries have the same format. Times are in UTC.
    """

    format: Literal["console", "json"] = "console"
    """`console`: lines for people, with colours only on a terminal (not if $NO_COLOR is set); `json`: one JSON object
    per line, for programs that collect logs"""


class HealthConfig(Section):
    """Health probes: `/healthz` and `/readyz` of each process on 127.0.0.1."""

    base_port: int | None = Field(default=None, ge=1024, le=60_000)
    """port of the parameter server; evaluator: + 1, producer: + 2, standby: + 3, provisioner: + 5, model server: + 6,
    standby of the provisioner: + 7, worker n: + 10 + n; default: $DOLL_HEALTH_PORT of each process, otherwise no probes
    (`doll up` picks free ports, see health.json)"""
    liveness_timeout_s: PositiveFloat = Field(default=60.0, ge=0.5)
    """a process whose main loop makes no progress for this long exits, to be restarted"""


class BlobConfig(Section):
    """The transport of weights and gradients between processes."""

    kind: Literal["auto", "redis", "shm"] = "auto"
    """auto: shared memory if `doll up` starts all processes and Redis on this machine, otherwise Redis; shm: shared
    memory also with an existing Redis (all workers must run on this machine)"""
    contributions: Literal["float32", "bf16", "fp16"] = "float32"
    """format of the dense gradients and steps that workers send: bf16 and fp16 need half the bytes, and the rounding
    error of a contribution is added to the worker's next one (error feedback). Under isp, bf16 rounds rows of tables
    too, and fp16 is refused; otherwise rows, and statistics in any case, stay float32"""
    ttl_s: PositiveFloat = Field(default=600.0, ge=1)
    """time to live of weights and gradients"""
    keep_versions: int = Field(default=4, le=100_000, ge=2)
    """number of newest versions of the weights that are kept. An older version is kept while a grant that names it is
    not answered: at most one for each worker, or two under ssp and essp with several batches under way"""


class ControlConfig(Section):
    """The channel for grants and pushes between parameter server and workers. Everything else goes through Kafka."""

    kind: Literal["auto", "kafka", "redis", "local"] = "auto"
    """auto: the fastest channel that connects: a socket on the parameter server's machine, otherwise Redis, otherwise
    Kafka; local: the socket, otherwise Kafka; redis: streams in Redis, otherwise Kafka; kafka: always Kafka"""
