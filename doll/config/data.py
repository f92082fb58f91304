"""The stream: its partitions, batches and records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    AwareDatetime,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from doll.config.format import FormatConfig
from doll.config.section import Section
from doll.errors import ConfigError

_TOPIC_NAME: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")  # Kafka's own rule

MAX_DEFAULT_PLACES: Final = 64


class BadRecordsConfig(Section):
    """When refused records end a job, with exit code 2 and the reasons. All refused records are dead-lettered; the ones
    that end a job are in a checkpoint, so that `doll resume` goes on after them."""

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


class StartConfig(Section):
    """The start position of a new job, as a timestamp, which Kafka resolves, or as one offset for each partition: one
    of these keys. The offsets are decided once and kept: a restart does not decide again."""

    timestamp: AwareDatetime | None = None
    """the first record of each partition whose timestamp is this one or later: ISO 8601 with a time zone, as in
    2026-11-01T00:00:00Z; a partition without one is read from its end"""
    offsets: dict[NonNegativeInt, NonNegativeInt] | None = None
    """the first offset of each partition, as in {0: 17, 1: 0}; every partition is named"""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.timestamp is None) == (self.offsets is None):
            raise ValueError("expected one of timestamp and offsets")
        return self

    def __str__(self) -> str:
        return str(self.offsets) if self.timestamp is None else self.timestamp.isoformat()


_WORDS: Final = ("earliest", "latest")


def _check_start(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """One error for a wrong value, not one for each form that it might have."""
    if isinstance(value, dict):
        return StartConfig.model_validate(value)
    if isinstance(value, StartConfig) or value in _WORDS:
        return check(value)
    raise ValueError(f"expected earliest, latest, {{timestamp: ...}} or {{offsets: {{0: ...}}}}, got {value!r:.100}")


Start: TypeAlias = Annotated[Literal["earliest", "latest"] | StartConfig, WrapValidator(_check_start)]


class DataConfig(Section):
    """The stream."""

    workers: PositiveInt = Field(default=4, le=10_000)
    """N: number of workers; `doll scale` changes it while the job runs"""
    max_workers: PositiveInt | None = Field(default=None, le=10_000)
    """to how many workers the job may be scaled [data.partitions, at most 64, or data.workers where that is more]"""
    topic: str | None = None
    """a topic that exists and belongs to somebody else: the job only reads it, with all its partitions, and has no
    source; default: a samples topic of the job's own, `doll.<job>.samples`"""
    partitions: PositiveInt | None = Field(default=None, le=100_000)
    """partitions of the samples topic when the job begins, each a stream of its own; a worker serves any number of
    them, and those that are added later are read as well [data.workers; with data.topic: as many as that topic has]"""
    rebalance_s: NonNegativeFloat = 60.0
    """how often partitions may go to other workers, where a worker that is behind has much more to learn than others
    (seconds); as long is measured what each partition brings; 0: only `doll scale` moves partitions, by their number"""
    batch_size: PositiveInt = Field(default=64, le=10_000_000)
    """b: samples per batch; records, where a task makes several samples of one (`Task.max_samples_per_record`)"""
    samples_per_record: PositiveInt = 1
    """m: samples packed in one Kafka record; divides batch_size"""
    cut_after_s: PositiveFloat | None = Field(default=None, ge=0.1, le=86_400)
    """after so many seconds a batch that has got a record and is not full is learned as it is, where no more records
    are there: a partition with few records does not hold up the others; null: it waits until it is full"""
    start: Start = "earliest"
    """where a new job begins to read the stream: with the first record that the log holds, with the next record that
    comes, or as the section says"""
    max_record_bytes: PositiveInt = Field(default=1_048_576, le=1_000_000_000)
    """maximum size of a record; a longer one is dead-lettered"""
    retention_hours: PositiveFloat = 24.0
    """retention time of the samples topic, if DOLL creates it; of no effect with data.topic"""
    on_data_loss: Literal["stop", "skip"] = "stop"
    """what a worker does if records are deleted from the samples topic before they are learned: stop with exit code 4,
    or skip them (the audit counts and lists them)"""

    format: FormatConfig | None = None
    """how values hold the fields that a `doll.FieldsTask` learns from; default: as JSON objects. Any other task decodes
    values itself"""
    tombstones: Literal["dead", "skip"] = "dead"
    """records without a value, which delete a key of a compacted topic: they are dead-lettered, or skipped and counted
    (`doll status` shows how many)"""
    on_bad_records: BadRecordsConfig = BadRecordsConfig()

    @field_validator("topic")
    @classmethod
    def _topic_name(cls, value: str | None) -> str | None:
        if value is not None and not _TOPIC_NAME.fullmatch(value):
            raise ValueError(f"expected the name of a topic, 1-249 of a-z A-Z 0-9 . _ -, got {value!r:.300}")
        return value

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
    def asks_kafka(self) -> bool:
        """Only Kafka knows how many partitions there are (`doll.kafka.foreign_topic.with_partitions`)."""
        return self.topic is not None and self.partitions is None

    @property
    def num_partitions(self) -> int:
        """Streams: partitions of the samples topic. Raises ConfigError if Kafka was not asked."""
        if self.asks_kafka:
            raise ConfigError(
                f"data.partitions: expected the number of partitions of topic {self.topic}, which only Kafka knows: "
                f"set it here for what runs without Kafka (--set data.partitions=12)"
            )
        return self.workers if self.partitions is None else self.partitions

    @property
    def places(self) -> int:
        """The number of workers to which the job can be scaled; an upper bound before Kafka was asked."""
        streams = MAX_DEFAULT_PLACES if self.asks_kafka else min(self.num_partitions, MAX_DEFAULT_PLACES)
        return self.max_workers or max(self.workers, streams)

    @property
    def least_places(self) -> int:
        """Fewest places that a job which goes on may have: a topic of somebody else may have grown since it began."""
        return self.places if self.topic is None else self.max_workers or self.workers

    def by_worker(self, of_streams: Sequence[float]) -> list[float]:
        """The sum over the streams of each worker, as a new job gives these to its workers."""
        return [sum(of_streams[worker :: self.workers]) for worker in range(self.workers)]

    @property
    def records_per_batch(self) -> int:
        """Offsets that one batch covers: b / m."""
        return self.batch_size // self.samples_per_record
