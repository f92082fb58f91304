"""The whole job file, and values that are derived from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from doll.config.connections import KafkaConfig, RedisConfig
from doll.config.data import DataConfig
from doll.config.drift import DriftConfig
from doll.config.fleets import FleetConfig, ProcessesFleetConfig
from doll.config.freshness import FreshnessConfig
from doll.config.gates import VersionsConfig
from doll.config.holdout import HoldoutConfig
from doll.config.join import JoinConfig
from doll.config.pipeline import PipelineConfig
from doll.config.provision import PlanConfig, ProvisionConfig
from doll.config.roles import (
    BlobConfig,
    CheckpointConfig,
    ControlConfig,
    EvaluationConfig,
    HealthConfig,
    LogConfig,
    PsConfig,
    WorkerConfig,
)
from doll.config.section import Section
from doll.config.source import ArrivalsConfig, HistorySource, SourceConfig, StdinSource
from doll.config.training import StopConfig, TaskConfig, TorchConfig, TrainingConfig

MAX_PORT: Final = 65_535
FIRST_WORKER_PORT: Final = 10  # the health port of worker n is `health.base_port` + this + n
JOB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class JobConfig(Section):
    """The whole job file."""

    job: str
    """name of the job, which is part of the names of topics, keys and folders"""
    seed: int = Field(default=0, le=2**63 - 1, ge=0)
    """seed of the initial weights and the generated streams"""
    task: TaskConfig
    data: DataConfig = Field(default_factory=DataConfig)
    source: SourceConfig | None = None
    """the source that `doll up` and `doll produce` send to the samples topic; default: an external producer sends; not
    allowed with data.topic"""
    arrivals: ArrivalsConfig = Field(default_factory=ArrivalsConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    stop: StopConfig = Field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    freshness: FreshnessConfig = Field(default_factory=FreshnessConfig)
    versions: VersionsConfig = Field(default_factory=VersionsConfig)
    drift: DriftConfig | None = None
    """changes of the stream that make the model worse; default: they are not watched"""
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    ps: PsConfig = Field(default_factory=PsConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    blobs: BlobConfig = Field(default_factory=BlobConfig)
    control: ControlConfig = Field(default_factory=ControlConfig)
    kafka: KafkaConfig = Field(default_factory=KafkaConfig)
    redis: RedisConfig = Field(default_factory=RedisConfig)
    plan: PlanConfig = Field(default_factory=PlanConfig)
    provision: ProvisionConfig = Field(default_factory=ProvisionConfig)
    fleet: FleetConfig = Field(default_factory=ProcessesFleetConfig)
    """the machines that `doll provision` launches for workers"""
    base_folder: Path = Field(default=Path("."), exclude=True)
    """folder of the job file; relative paths start there"""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problem := next(self._problems(), ""):
            raise ValueError(problem)
        if self.worker.pipeline is not None:  # server and workers read it from the policy's section alone
            policy = self.training.policy.model_copy(update={"pipelined": True})
            object.__setattr__(self, "training", self.training.model_copy(update={"policy": policy}))
        return self

    def _problems(self) -> Iterator[str]:
        """Yield the problems of keys that do not fit together. Each rule assumes that the earlier rules hold."""
        data, worker, policy = self.data, self.worker, self.training.policy
        if not JOB_NAME.fullmatch(self.job):
            yield f"job: expected 1-63 of a-z 0-9 _ - beginning with a letter or digit, got {self.job!r}"
        if self.arrivals.while_down == "pause" and isinstance(self.source, StdinSource):
            yield "arrivals.while_down: pause: expected another source than stdin"
        if self.control.kind == "local" and not isinstance(self.fleet, ProcessesFleetConfig):
            yield (
                "control.kind: local: expected workers on the parameter server's machine (fleet.kind: processes), got "
                f"fleet.kind: {self.fleet.kind}; set control.kind to auto or redis"
            )
        if self.source is not None and (problem := self.source.format_problem(data.format)):
            yield f"data.format: {problem}"
        if not self.evaluation.enabled and (self.drift is not None or self.versions.gates is not None):
            key = "drift" if self.drift is not None else "versions.gates"
            yield f"{key}: expected evaluation.enabled: true, since the evaluator does this"
        if self.drift is not None and self.drift.react is not None and policy.sends_steps:
            yield (
                f"drift.react: expected a policy whose workers send gradients, because the server's learning rate is "
                f"raised, got {policy.name}"
            )
        if data.topic is not None:
            yield from self._topic_problems(data.topic)
        if data.join is not None:
            yield from self._join_problems(data.join)
        is_json = data.samples_per_record == 1 and (data.format is None or data.format.kind == "json")
        if self.freshness.time.field is not None and not is_json:
            yield "freshness.time.field: expected records that are JSON objects, one sample in each: name a header"
        if isinstance(self.source, HistorySource):
            if data.samples_per_record != 1:
                yield f"data.samples_per_record: expected 1 with source.kind: history, got {data.samples_per_record}"
            if self.source.topic.startswith(f"doll.{self.job}."):
                yield f"source.topic: expected a topic that belongs to somebody else, got {self.source.topic}"
        if (holdout := self.evaluation.holdout) is not None:
            yield from self._holdout_problems(holdout, is_json=is_json)
        rates = self.arrivals.rate_per_s
        if isinstance(rates, list) and not data.asks_kafka and len(rates) != (streams := data.num_partitions):
            yield f"arrivals.rate_per_s: expected {streams} rates (data.partitions or data.workers), got {len(rates)}"
        if (fewest := self.provision.scale_in.min_workers) > data.workers:
            yield f"provision.scale_in.min_workers: expected at most data.workers ({data.workers}), got {fewest}"
        if (needed := self.group_size) > (room := data.workers * worker.max_pending_batches):
            yield (
                f"training.policy: the {needed} batches of an update never come together: {data.workers} workers x "
                f"worker.max_pending_batches {worker.max_pending_batches} hold {room}; raise max_pending_batches"
            )
        if (needed := policy.batches_per_push) > (room := worker.max_pending_batches):
            yield (
                f"training.policy: the {needed} batches of a push never come together: a worker holds {room} "
                "(worker.max_pending_batches); raise max_pending_batches"
            )
        yield from self._time_problems()
        if (port := self.health.base_port) is not None and port + FIRST_WORKER_PORT + data.places - 1 > MAX_PORT:
            yield (
                f"health.base_port: expected at most {MAX_PORT - FIRST_WORKER_PORT - data.places + 1}, so that "
                f"each of {data.places} workers (data.max_workers) has a port, got {port}"
            )
        if self.blobs.contributions != "float32" and policy.sparse_push is not None:
            yield (
                f"blobs.contributions: expected float32 with training.policy.density below 1, which sends "
                f"{policy.sparse_push.bits} bits of each number, got {self.blobs.contributions}"
            )
        elif self.blobs.contributions == "fp16" and policy.holds_back:
            yield (
                f"blobs.contributions: expected float32 or bf16 with training.policy {policy.name}: what rounding "
                "takes is held back number by number, and the numbers of fp16 have a common scale"
            )
        if self.ps.shards not in (1, "auto"):
            yield from self.shard_problems()
        if (addresses := len(self.redis.shard_addresses)) and addresses != self.ps.shards:
            yield f"redis.shard_addresses: expected one for each shard of ps.shards ({self.ps.shards}), got {addresses}"
        if addresses and self.blobs.kind == "shm":
            yield "redis.shard_addresses: expected blobs.kind redis or auto, got shm"
        if worker.pipeline is not None:
            yield from self._pipeline_problems(worker.pipeline)
        elif getattr(policy, "pipelined", False):
            yield "training.policy.pipelined: expected worker.pipeline, which sets it"

    def shard_problems(self) -> Iterator[str]:
        """Yield what cannot be exact if the model is divided among shards."""
        if isinstance(self.training.optimizer, TorchConfig) and not self.training.policy.sends_steps:
            yield (
                f"ps.shards: expected 1 with training.optimizer.class {self.training.optimizer.cls}, which may use all "
                f"numbers of a parameter at once, got {self.ps.shards}"
            )
        if self.blobs.contributions == "fp16":
            yield (
                "ps.shards: expected 1 with blobs.contributions fp16, whose numbers have a common scale, got "
                f"{self.ps.shards}; set blobs.contributions: bf16"
            )

    def _topic_problems(self, topic: str) -> Iterator[str]:
        """Yield the problems of keys that do not fit a topic that belongs to somebody else."""
        if self.source is not None:
            yield (
                f"source: expected none, because data.topic is {topic}: DOLL never writes to a topic that belongs to "
                "somebody else; remove source, or data.topic"
            )
        if self.arrivals.while_down == "pause":
            yield f"arrivals.while_down: expected queue, because data.topic is {topic}: nobody pauses its producers"
        if self.kafka.producer_user is not None:
            yield (
                f"kafka.producer_user: expected none, because data.topic is {topic}: its owner says who may write to it"
            )
        if topic.startswith(f"doll.{self.job}."):
            yield (
                f"data.topic: expected a topic that belongs to somebody else, got {topic}, which this job would create "
                "itself: remove data.topic, or choose another `job` name"
            )

    def _join_problems(self, join: JoinConfig) -> Iterator[str]:
        """Yield the problems of keys that do not fit a stream that `doll join` writes."""
        if self.data.topic is not None or self.source is not None:
            other = "data.topic" if self.data.topic is not None else "source"
            yield f"data.join: expected no {other}: the joined records are the samples of the job"
        if self.data.samples_per_record != 1:
            yield f"data.samples_per_record: expected 1 with data.join, got {self.data.samples_per_record}"
        if self.data.format is not None and self.data.format.kind != "json":
            yield f"data.format: expected json with data.join, which writes JSON objects, got {self.data.format.kind}"
        for topic in join.topics:
            if topic.startswith(f"doll.{self.job}."):
                yield f"data.join: expected topics that belong to somebody else, got {topic}, a topic of this job"

    def _holdout_problems(self, holdout: HoldoutConfig, *, is_json: bool) -> Iterator[str]:
        """Yield the problems of keys that do not fit held-out records."""
        topic, join, own = holdout.topic, self.data.join, (self.topic("samples"), f"doll.{self.job}.")
        if topic is not None and (topic == own[0] or topic.startswith(own[1])):
            yield f"evaluation.holdout.topic: expected a topic whose records the job does not learn, got {topic}"
        if topic is not None and self.data.samples_per_record != 1:
            yield "evaluation.holdout.topic: expected data.samples_per_record: 1"
        if holdout.by.field is not None and not is_json:
            yield "evaluation.holdout.by.field: expected records that are JSON objects, one sample each: name a header"
        if topic is None and self.worker.pipeline is not None:
            yield "evaluation.holdout: expected topic with worker.pipeline, since no stage has the whole model"
        if topic is None and join is not None and join.early_after_s is not None and not join.confirm:
            yield "evaluation.holdout: expected data.join.confirm: true, so that each early sample gets its final label"

    def _time_problems(self) -> Iterator[str]:
        """Yield the problems of times that contradict each other."""
        worker, ttl_s, boot_s = self.worker, self.blobs.ttl_s, self.plan.boot_s
        if ttl_s < worker.grant_timeout_s:
            yield (
                f"blobs.ttl_s: expected at least worker.grant_timeout_s ({worker.grant_timeout_s:g}), so that the "
                f"weights that a grant names are there until it is replaced, got {ttl_s:g}"
            )
        if worker.stall_timeout_s < 2 * (fetch_s := worker.fetch_max_wait_ms / 1000):
            yield (
                f"worker.stall_timeout_s: expected at least twice worker.fetch_max_wait_ms ({2 * fetch_s:g} s), for "
                f"which a worker of a slow stream may hear nothing, got {worker.stall_timeout_s:g}"
            )
        if self.provision.boot_timeout_s <= boot_s:
            yield (
                f"provision.boot_timeout_s: expected more than plan.boot_s ({boot_s:g}), or each machine is replaced "
                f"while it boots, got {self.provision.boot_timeout_s:g}"
            )

    def _pipeline_problems(self, pipeline: PipelineConfig) -> Iterator[str]:
        training, policy = self.training, self.training.policy
        for field, value, only in (
            ("worker.device", self.worker.device, "cpu"),
            ("worker.compile", self.worker.compile, False),
            ("training.precision", training.precision, "float32"),
            ("blobs.contributions", self.blobs.contributions, "float32"),
        ):
            if value != only:
                yield (
                    f"{field}: expected {only} with worker.pipeline, whose stages have devices of their own "
                    f"(worker.pipeline.devices) and send float32, got {value}"
                )
        if "pipelined" not in type(policy).model_fields:
            yield f"worker.pipeline: expected training.policy.name: wsp, got {policy.name}"
        if len(pipeline.devices) > 1 and len(pipeline.devices) != self.data.workers:
            yield (
                f"worker.pipeline.devices: expected one list of devices, or {self.data.workers} (data.workers), got "
                f"{len(pipeline.devices)}"
            )
        if (needed := 2 * policy.batches_per_push) > (room := self.worker.max_pending_batches):
            yield (
                f"worker.pipeline: a worker begins a wave before the one before it is applied: expected "
                f"worker.max_pending_batches of {needed} at least, got {room}"
            )
        if training.schedule or training.clip_value is not None or training.optimizer.name == "class":
            yield (
                "worker.pipeline: a stage has a part of the parameters, under other names: expected a built-in "
                "training.optimizer (sgd, adam, adagrad), no training.schedule and no training.clip_value"
            )

    def path(self, value: Path) -> Path:
        """Return the path `value`, resolved relative to the folder of the job file."""
        return value if value.is_absolute() else self.base_folder / value

    def rates_per_s(self) -> list[float]:
        """Return the samples per second of each stream (infinite if the source sends as fast as it can)."""
        if self.arrivals.process == "asap":
            return [float("inf")] * self.data.num_partitions
        rates = self.arrivals.rate_per_s
        return list(rates) if isinstance(rates, list) else [rates] * self.data.num_partitions

    @property
    def states_rate(self) -> bool:
        """Whether the job file states the arrival rate of samples; otherwise it can only be measured."""
        stated = self.arrivals.process in ("poisson", "deterministic")
        return self.source is not None and not isinstance(self.source, StdinSource | HistorySource) and stated

    def with_shards(self, shards: int) -> Self:
        """Return this job file with another `ps.shards`."""
        return self.model_copy(update={"ps": self.ps.model_copy(update={"shards": shards})})

    def worker_rates_per_s(self) -> list[float]:
        """Return the samples per second of each worker."""
        return self.data.by_worker(self.rates_per_s())

    @property
    def cluster(self) -> str:
        """The name that identifies the machines of this job."""
        return self.fleet.cluster or self.job

    @property
    def group_size(self) -> int:
        """K: the number of batches per update under the job's policy."""
        return self.training.policy.batches_per_update(self.data.workers)

    @property
    def machines_per_worker(self) -> int:
        """The number of machines that a worker gets and loses together: those of its stages, and one of its own if
        these are on other machines."""
        pipeline = self.worker.pipeline
        if self.plan.machines_per_worker is not None:
            return self.plan.machines_per_worker
        return 1 if pipeline is None else pipeline.stages + pipeline.remote

    def topic(
        self, kind: Literal["samples", "events", "commands", "updates", "metrics", "dead", "join", "joins", "history"]
    ) -> str:
        """Return the name of a topic of the job; the topic `samples` may belong to somebody else."""
        if kind == "samples" and self.data.topic is not None:
            return self.data.topic
        return f"doll.{self.job}.{kind}"
