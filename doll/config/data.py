"""The stream of samples: its partitions, batches and records."""

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
from doll.config.join import JoinConfig
from doll.config.section import Section
from doll.errors import ConfigError

_TOPIC_NAME: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")  # Kafka's rule for topic names

MAX_DEFAULT_PLACES: Final = 64


class BadRecordsConfig(Section):
    """The limit at which refused records end a job. The job then ends with exit code 2 and lists the reasons. A dead
    letter is written for each refused record. A checkpoint contains the records that ended the job, so `doll resume`
    continues after them."""

    share: float | None = Field(default=0.99, gt=0, le=1)
    """the job ends if at least this share of its most recent records, over all workers, is refused; null: never"""
    last_records: PositiveInt = 100_000
    """number of most recent records over which the share is computed. It is large so that a job that has learned for a
    long time survives a burst of bad records: the job ends only after nearly this many bad records in a row"""
    first_records: PositiveInt = 1_000
    """minimum number of records for which the share is computed, while there are fewer than last_records: a job whose
    first records are all refused ends after this number"""

    @model_validator(mode="after")
    def _first_are_fewer(self) -> Self:
        if self.first_records > self.last_records:
            raise ValueError(
                f"first_records must not exceed last_records, got {self.first_records} and {self.last_records}"
            )
        return self


class StartConfig(Section):
    """The position in the stream at which a new job starts: either a timestamp, which Kafka converts to offsets, or one
    offset for each partition. The offsets are determined once and kept: a restart uses the same offsets."""

    timestamp: AwareDatetime | None = None
    """start at the first record of each partition with this timestamp or a later one: ISO 8601 with a time zone, as in
    2026-11-01T00:00:00Z; a partition without such a record is read from its end"""
    offsets: dict[NonNegativeInt, NonNegativeInt] | None = None
    """first offset of each partition, as in {0: 17, 1: 0}; every partition must be listed"""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.timestamp is None) == (self.offsets is None):
            raise ValueError("expected one of timestamp and offsets")
        return self

    def __str__(self) -> str:
        return str(self.offsets) if self.timestamp is None else self.timestamp.isoformat()


_WORDS: Final = ("earliest", "latest")


def _check_start(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Report a single error for a wrong value, and not one error for each form that the value may have."""
    if isinstance(value, dict):
        return StartConfig.model_validate(value)
    if isinstance(value, StartConfig) or value in _WORDS:
        return check(value)
    raise ValueError(f"expected earliest, latest, {{timestamp: ...}} or {{offsets: {{0: ...}}}}, got {value!r:.100}")


Start: TypeAlias = Annotated[Literal["earliest", "latest"] | StartConfig, WrapValidator(_check_start)]


class DataConfig(Section):
    """The stream of samples."""

    workers: PositiveInt = Field(default=4, le=10_000)
    """N: number of workers; `doll scale` changes it while the job runs"""
    max_workers: PositiveInt | None = Field(default=None, le=10_000)
    """maximum number of workers after scaling [data.partitions, at most 64, or data.workers if that is more]"""
    topic: str | None = None
    """an existing topic that belongs to somebody else: the job only reads it, with all its partitions, and has no
    source; default: the job's own samples topic, `doll.<job>.samples`"""
    partitions: PositiveInt | None = Field(default=None, le=100_000)
    """number of partitions of the samples topic when the job begins. Each partition is a stream; a worker can serve any
    number of them. Partitions that are added later are read as well [data.workers; with data.topic: its partitions]"""
    rebalance_s: NonNegativeFloat = 60.0
    """interval in seconds at which partitions may move to other workers, if a worker is behind and has much more to
    learn than others; the load of each partition is measured over this time. 0: only `doll scale` moves partitions, by
    their number"""
    batch_size: PositiveInt = Field(default=64, le=10_000_000)
    """b: samples per batch; or records, if a task makes several samples of one (`Task.max_samples_per_record`)"""
    samples_per_record: PositiveInt = 1
    """m: samples packed in one Kafka record; divides batch_size"""
    cut_after_s: PositiveFloat | None = Field(default=None, ge=0.1, le=86_400)
    """maximum age of an incomplete batch, in seconds since its first record. At this age it is learned as it is, if no
    more records are available, so a partition with few records does not delay the others; null: a batch waits until it
    is full"""
    start: Start = "earliest"
    """where a new job begins to read the stream: at the first record that the log holds, at the next record that
    arrives, or at the position that the section gives"""
    max_record_bytes: PositiveInt = Field(default=1_048_576, le=1_000_000_000)
    """maximum size of a record; a longer one is dead-lettered"""
    retention_hours: PositiveFloat = 24.0
    """retention time of the samples topic, if DOLL creates it; not used with data.topic"""
    on_data_loss: Literal["stop", "skip"] = "stop"
    """what a worker does if records are deleted from the samples topic before they are learned: stop with exit code 4,
    or skip the records (the audit counts and lists them)"""

    join: JoinConfig | None = None
    """features and labels from different topics, which `doll join` joins into the samples topic"""
    format: FormatConfig | None = None
    """how values hold the fields that a `doll.FieldsTask` learns from; default: as JSON objects. Other tasks decode the
    values themselves"""
    tombstones: Literal["dead", "skip"] = "dead"
    """what happens to records without a value (which delete a key of a compacted topic): they are dead-lettered, or
    skipped and counted (`doll status` shows the count)"""
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
        """Whether the number of partitions must be requested from Kafka
        (`doll.kafka.foreign_topic.with_partitions`)."""
        return self.topic is not None and self.partitions is None

    @property
    def num_partitions(self) -> int:
        """The number of streams (partitions of the samples topic). Raises ConfigError if Kafka has not been asked."""
        if self.asks_kafka:
            raise ConfigError(
                f"data.partitions: expected the number of partitions of topic {self.topic}, which only Kafka knows: "
                f"set it here for what runs without Kafka (--set data.partitions=12)"
            )
        return self.workers if self.partitions is None else self.partitions

    @property
    def places(self) -> int:
        """The maximum number of workers of the job; an upper bound of this number if Kafka has not been asked yet."""
        streams = MAX_DEFAULT_PLACES if self.asks_kafka else min(self.num_partitions, MAX_DEFAULT_PLACES)
        return self.max_workers or max(self.workers, streams)

    @property
    def least_places(self) -> int:
        """The minimum of `places` for a job that continues, because a foreign topic may have more partitions now."""
        return self.places if self.topic is None else self.max_workers or self.workers

    def by_worker(self, of_streams: Sequence[float]) -> list[float]:
        """Return the sum of `of_streams` for each worker, over the streams that a new job assigns to the worker."""
        return [sum(of_streams[worker :: self.workers]) for worker in range(self.workers)]

    @property
    def records_per_batch(self) -> int:
        """The number of offsets that one batch covers: b / m."""
        return self.batch_size // self.samples_per_record
