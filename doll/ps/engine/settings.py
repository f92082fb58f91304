"""The settings of an engine, which stay the same as long as the engine exists."""

from __future__ import annotations

from dataclasses import dataclass, field

from doll.config import StopConfig
from doll.config.data import BadRecordsConfig
from doll.config.drift import ReactionConfig


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of an engine. Times are in seconds."""

    num_workers: int  # as in the job file
    records_per_batch: int
    max_pending_batches: int  # maximum number of batches that a worker holds and that are not durable
    lease_s: float
    grant_timeout_s: float
    checkpoint_every_updates: int
    checkpoint_every_s: float
    set_limit_s: float = 0.0  # if a set has taken this time, its worker begins no further batch of the set
    sum_reduction: bool = False  # apply the sum of the sample gradients, not their mean (the paper's literal rule)
    divides_steps: bool = False  # workers divide their steps by the number of live workers, which grants then name
    divides_lr: bool = False  # the server divides the learning rate of each update by the number of live workers
    stop: StopConfig = field(default_factory=StopConfig)
    on_bad_records: BadRecordsConfig = field(default_factory=BadRecordsConfig)
    job: str = ""  # name of the job, for the keys of weights
    fingerprint: str = ""  # sent in each Welcome, see `doll.config.fingerprint`
    rebalance_s: float = 0.0  # time between two moves of partitions that balance the workers' loads; 0: no moves
    max_workers: int = 0  # number of worker slots; 0: as many as `num_workers`
    checkpoint_every_event_s: float | None = None  # see `CheckpointConfig.every_event_s`
    drift_reaction: ReactionConfig | None = None  # see `DriftConfig.react`

    @property
    def places(self) -> int:
        return max(self.num_workers, self.max_workers)
