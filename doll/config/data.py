"""The stream: its partitions, batches and records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from doll.config.section import Section

MAX_DEFAULT_PLACES: Final = 64


class BadRecordsConfig(Section):
    """When refused records end a job, with exit code 2 and the reasons. All refused records are dead-lettered; the ones
    that end a job are in a checkpoint, so that `doll resume` goes on behind them."""

    share: float | None = Field(default=0.99, gt=0, le=1)
    """the job ends if at least this share of its last records, of all workers, is refused; null: never"""
    last_records: PositiveInt = 100_000
    """over how many of the last records the share is taken. It is large so that a job that has learned for long
    survives a burst of bad records: it ends only after nearly as many bad records in a row"""
    first_records: PositiveInt = 1_000
    """the share is taken once there are so many records, before last_records are reached: a job whose first records are
    all refused ends after these"""

    @model_validator(mode="after")
    def _first_are_fewer(self) -> Self:
        if self.first_records > self.last_records:
            raise ValueError(
                f"first_records must not exceed last_records, got {self.first_records} and {self.last_records}"
            )
        return self


class DataConfig(Section):
    """The stream."""

    workers: PositiveInt = Field(default=4, le=10_000)
    """N: number of workers; `doll scale` changes it while the job runs"""
    max_workers: PositiveInt | None = Field(default=None, le=10_000)
    """to how many workers the job may be scaled [data.partitions, at most 64, or data.workers where that is more]"""
    partitions: PositiveInt | None = Field(default=None, le=100_000)
    """partitions of the samples topic, each a stream of its own; a worker serves any number of them [data.workers]"""
    batch_size: PositiveInt = Field(default=64, le=10_000_000)
    """b: samples per batch"""
    samples_per_record: PositiveInt = 1
    """m: samples packed in one Kafka record; divides batch_size"""
    start: Literal["earliest", "latest"] = "earliest"
    """where a new job begins to read the stream"""
    max_record_bytes: PositiveInt = Field(default=1_048_576, le=1_000_000_000)
    """maximum size of a record; a longer one is dead-lettered"""
    retention_hours: PositiveFloat = 24.0
    """retention time of the samples topic, if DOLL creates it"""
    on_data_loss: Literal["stop", "skip"] = "stop"
    """what a worker does if records are deleted from the samples topic before they are learned: stop with exit code 4,
    or skip them (the audit counts and lists them)"""

    on_bad_records: BadRecordsConfig = BadRecordsConfig()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max_workers is not None and self.max_workers < self.workers:
            raise ValueError(f"max_workers: expected at least data.workers ({self.workers}), got {self.max_workers}")
        if self.batch_size % self.samples_per_record:
            raise ValueError(
                f"samples_per_record must divide batch_size, got {self.samples_per_record} and {self.batch_size}"
            )
        return self

    @property
    def num_partitions(self) -> int:
        """Streams: partitions of the samples topic."""
        return self.workers if self.partitions is None else self.partitions

    @property
    def places(self) -> int:
        """For how many workers there is place: to so many the job may be scaled."""
        return self.max_workers or max(self.workers, min(self.num_partitions, MAX_DEFAULT_PLACES))

    def by_worker(self, of_streams: Sequence[float]) -> list[float]:
        """The sum over the streams of each worker, as a new job gives these to its workers."""
        return [sum(of_streams[worker :: self.workers]) for worker in range(self.workers)]

    @property
    def records_per_batch(self) -> int:
        """Offsets that one batch covers: b / m."""
        return self.batch_size // self.samples_per_record
