"""The settings of an engine, which hold for its whole life."""

from __future__ import annotations

from dataclasses import dataclass, field

from doll.config import StopConfig
from doll.config.data import BadRecordsConfig


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Fixed for the life of an engine. Times in seconds."""

    num_workers: int  # of the job file
    records_per_batch: int
    max_pending_batches: int  # how many batches that are not durable a worker holds at most
    lease_s: float
    grant_timeout_s: float
    checkpoint_every_updates: int
    checkpoint_every_s: float
    set_limit_s: float = 0.0  # a worker that has computed a set for so long begins no other batch of it
    sum_reduction: bool = False  # apply the sum of the sample gradients, not their mean (the paper's literal rule)
    stop: StopConfig = field(default_factory=StopConfig)
    on_bad_records: BadRecordsConfig = field(default_factory=BadRecordsConfig)
    job: str = ""  # its name, for the keys of weights
    fingerprint: str = ""  # see `doll.config.fingerprint`: what a Welcome says
    rebalance_s: float = 0.0  # how often partitions may move to balance the workers' loads; 0: never
    max_workers: int = 0  # for so many there is place; 0: for as many as the job file has

    @property
    def places(self) -> int:
        return max(self.num_workers, self.max_workers)
