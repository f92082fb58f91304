"""The newest records of a job's stream, for the watches on the alias's version and on what comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from doll.config import JobConfig
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.kafka.range_reader import RangeReader
from doll.services import Services
from doll.task.base import Task
from doll.task.batches import SampleBatch


class LiveRecords:
    """Reads what comes to the samples topic after `begin`. Methods raise ServiceUnavailableError if Kafka does not
    answer."""

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._config = config
        self._topic = config.topic("samples")
        self._reader = RangeReader(config, services, stall_timeout_s=5.0)
        self._next: dict[int, int] = {}

    def close(self) -> None:
        self._reader.__exit__()

    @property
    def positions(self) -> Mapping[int, int]:
        """The offset after the last record that was taken or left out, by partition."""
        return self._next

    def begin(self) -> None:
        """Leave out the records that there are."""
        self._next = {partition: high for partition, (_, high) in self._bounds().items()}

    def take(self, task: Task, most: int) -> SampleBatch:
        """Return the samples of the newest records since the last call, `most` at most, in equal parts of the
        partitions. Records that cannot be decoded are left out: workers refuse and count them."""
        return samples_of(self._config, task, self.take_raw(most))

    def take_raw(self, most: int) -> RawRecords:
        """Return the records of `take`. Their offsets are numbers from 0 on, since they are of several partitions."""
        bounds = self._bounds()
        share = -(-most // max(1, len(bounds)))
        messages: list[Any] = []
        for partition, (low, high) in bounds.items():
            begin = max(low, self._next.get(partition, 0), high - share)
            messages += self._reader.client_messages(self._topic, partition, begin, high)
            self._next[partition] = high
        return RawRecords(range(len(messages)), [message.value() for message in messages], 0, messages)

    def _bounds(self) -> dict[int, tuple[int, int]]:
        count = self._reader.num_partitions(self._topic)
        return dict(self._reader.bounds_of_partitions(self._topic, range(count)))


def samples_of(config: JobConfig, task: Task, records: RawRecords) -> SampleBatch:
    """Return the samples of records, as a worker of the job decodes them."""
    data = config.data
    return decode_records(
        task, records if task.reads_envelopes else records._replace(envelopes=()),
        samples_per_record=data.samples_per_record, max_record_bytes=data.max_record_bytes,
        skip_tombstones=data.tombstones == "skip",
    ).samples  # fmt: skip
