"""The processes of a job: parameter server, workers, evaluator, their checkpoints, probes and blobs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, field_validator

from doll.config.section import Section

S3_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/\s]+)*/?")


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
