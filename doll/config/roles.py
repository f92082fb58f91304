"""The processes of a job: parameter server, workers, evaluator, their checkpoints, probes and blobs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, field_validator

from doll.config.pipeline import PipelineConfig
from doll.config.section import Section

CHECKPOINT_URLS: Final = {
    "s3": ("s3://bucket/prefix", re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/\s]+)*/?")),
}
"""URLs of checkpoint stores by scheme: the form for messages, and the pattern. `doll.storage.stores` opens them."""
MAX_SET_S: Final = 2.0
"""A worker adds no batch to a set that has taken so long, see `WorkerConfig.set_limit_s`."""
_URL_LIKE: Final = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*:/|({'|'.join(CHECKPOINT_URLS)}):")


class CheckpointConfig(Section):
    """The durable model. The offset of a batch is committed to Kafka only after a checkpoint contains the batch."""

    folder: Annotated[str, StringConstraints(pattern="^[a-z0-9]+://")] | Path | None = Field(
        default=None,
        description="a folder, or s3://bucket/prefix (with the default credentials of boto3); default: `checkpoints/`"
        " in "
        "the run folder",
    )
    every_updates: PositiveInt = Field(default=20, description="a checkpoint is due after this many updates")
    every_s: PositiveFloat = Field(default=2.0, description="or after this time, if there are updates")
    keep: int = Field(
        le=10_000,
        default=3,
        ge=2,
        description="number of newest checkpoints that are kept; at least 2, in case the newest one is damaged",
    )
    retry_timeout_s: PositiveFloat = Field(
        default=60.0,
        description="a checkpoint that cannot be saved is retried for this long; then the parameter server exits, to "
        "be "
        "restarted",
    )
    event_log: bool = Field(
        default=False,
        description="write every event and gradient to the run folder, for a bit-exact replay of the run (large)",
    )

    @field_validator("folder", mode="before")
    @classmethod
    def _folder_or_bucket(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str | Path) and not _URL_LIKE.match(str(value))):
            return value
        if isinstance(value, str) and any(pattern.fullmatch(value) for _, pattern in CHECKPOINT_URLS.values()):
            return value
        forms = " or ".join(["a folder", *(form for form, _ in CHECKPOINT_URLS.values())])
        raise ValueError(f"expected {forms}, got {str(value)!r}")


class EvaluationConfig(Section):
    """Held-out evaluation."""

    every_s: PositiveFloat = Field(default=1.0, description="minimum time between two held-out evaluations")
    max_samples: PositiveInt = Field(le=100_000_000, default=2000, description="maximum size of the held-out set")
    enabled: bool = Field(default=True, description="false: `doll up` starts no evaluator")


class WorkerConfig(Section):
    """The workers."""

    max_pending_batches: PositiveInt = Field(
        le=10_000_000,
        default=32,
        description="maximum number of batches of a worker that are not durable yet; at this number it stops reading",
    )
    lease_s: PositiveFloat = Field(
        default=8.0, ge=2, description="a worker that is silent for this long is considered gone"
    )
    grant_timeout_s: PositiveFloat = Field(
        ge=0.1,
        default=30.0,
        description="a granted batch that has no gradient after this time is replaced; the time limit is at least 5 "
        "times what a batch takes in the mean, and twice what it takes this worker; that of a wave is so long for each "
        "of its batches; where several batches were granted as a set, at most 2 s later. A gradient that comes later "
        "still counts if nobody else has its batch",
    )
    stall_timeout_s: PositiveFloat = Field(
        ge=1,
        default=60.0,
        description="a worker that receives no records for this long, although there are some, exits to be restarted",
    )
    drain_s: PositiveFloat = Field(
        default=8.0,
        description="time to finish or return a batch after SIGTERM; keep it below the notice time of the machines "
        "(AWS "
        "120 s, GCP 30 s)",
    )
    notice_s: PositiveFloat = Field(
        default=25.0,
        description="maximum time to finish or return a batch after a spot interruption notice (AWS: 120 s, GCP: 30 s)",
    )
    spot_notices: Literal["none", "imds"] | None = Field(
        default=None,
        description="imds: poll the EC2 instance metadata service every 5 s for an interruption notice, and leave "
        "before "
        "the interruption; default: $DOLL_SPOT_NOTICES, else imds with `doll worker --from-imds`, else none",
    )
    torch_threads: PositiveInt = Field(default=1, le=1024)
    fetch_max_wait_ms: PositiveInt = Field(
        le=300_000,
        default=200,
        description="maximum time that samples of a slow stream wait at the broker, so that a request fetches several",
    )
    stream_buffer_records: PositiveInt | None = Field(
        le=10_000_000,
        default=None,
        description="records that may wait to be decoded; default: 4096, or fewer if records hold several samples",
    )

    row_cache_bytes: PositiveInt = Field(
        default=64_000_000,
        description="memory for rows of tables (embeddings with sparse=True) that a worker keeps, all tables together; "
        "where workers step themselves, it also holds the optimizer's state of as many rows: those whose last gradient "
        "is the longest ago lose it, and begin again as rows that the worker has never seen",
    )
    pipeline: PipelineConfig | None = Field(
        default=None, description="workers that are pipelines of stages; default: each computes whole gradients"
    )

    @property
    def set_limit_s(self) -> float:
        """A worker that has computed a set of batches for so long begins no other batch of it, and sends its gradient.

        Well below the time after which a grant is replaced, and the time to drain.
        """
        return min(MAX_SET_S, self.grant_timeout_s / 4, self.drain_s / 4)


class PsConfig(Section):
    """The parameter server."""

    lease_s: PositiveFloat = Field(
        default=5.0,
        ge=2,
        description="a standby takes over from a parameter server that is silent for this long; a server that was "
        "disconnected for longer checks that it has no successor before it continues",
    )


class LogConfig(Section):
    """The log of each process, on its standard error; `doll up` writes it to `logs/` in the run folder.

    Warnings of libraries have the same form. Times are in UTC.
    """

    format: Literal["console", "json"] = Field(
        default="console",
        description="`console`: a line for people, with colours on a terminal only (not if $NO_COLOR is set); `json`: "
        "an object in each line, for programs that collect logs",
    )


class HealthConfig(Section):
    """Health probes: `/healthz` and `/readyz` of each process on 127.0.0.1."""

    base_port: int | None = Field(
        default=None,
        ge=1024,
        le=60_000,
        description="port of the parameter server; evaluator: + 1, producer: + 2, standby: + 3, provisioner: + 5, "
        "worker n: + 10 + n; default: $DOLL_HEALTH_PORT of each process, else no probes (`doll up` picks "
        "free ports, see "
        "health.json)",
    )
    liveness_timeout_s: PositiveFloat = Field(
        ge=0.5,
        default=60.0,
        description="a process whose main loop makes no progress for this long exits, to be restarted",
    )


class BlobConfig(Section):
    """The transport of weights and gradients between processes."""

    kind: Literal["auto", "redis", "shm"] = Field(
        default="auto",
        description="auto: shared memory if `doll up` starts all processes and Redis on this machine, else Redis; shm: "
        "shared memory also with a given Redis (all workers on this machine)",
    )
    ttl_s: PositiveFloat = Field(ge=1, default=600.0, description="time to live of weights and gradients")
    keep_versions: int = Field(
        le=100_000,
        default=4,
        ge=2,
        description="number of newest versions of the weights that are kept; an older one is kept while a grant that "
        "names it is not answered, at most one for each worker",
    )
