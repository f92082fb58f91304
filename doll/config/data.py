"""The stream: its partitions, batches and records."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from doll.config.section import Section


class DataConfig(Section):
    """The stream."""

    workers: PositiveInt = Field(
        default=4, description="N: number of streams; each is a partition of the samples topic and has one worker slot"
    )
    batch_size: PositiveInt = Field(default=64, description="b: samples per batch")
    samples_per_record: PositiveInt = Field(
        default=1, description="m: samples packed in one Kafka record; divides batch_size"
    )
    start: Literal["earliest", "latest"] = Field(
        default="earliest", description="where a new job begins to read the stream"
    )
    max_record_bytes: PositiveInt = Field(
        default=1_048_576, description="maximum size of a record; a longer one is dead-lettered"
    )
    retention_hours: PositiveFloat = Field(
        default=24.0, description="retention time of the samples topic, if DOLL creates it"
    )
    on_data_loss: Literal["stop", "skip"] = Field(
        default="stop",
        description="what a worker does if records are deleted from the samples topic before they are learned: stop "
        "with "
        "exit code 4, or skip them (the audit counts and lists them)",
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
