"""A job's control records, for the provisioner: `updates`, `events`, `metrics` and each partition of `commands`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from doll.kafka.reader import Partition, Reader
from doll.kafka.tail import RecordReader, TimedRecord

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services


class JobRecords(RecordReader):
    """All control records of a job. Use as a context manager.

    Args:
        positions: next offset by `topic/partition`; from the earliest that is kept for those that are not in it.

    Raises:
        ServiceUnavailableError: a topic does not exist, or the broker does not answer.
    """

    def __init__(self, config: JobConfig, services: Services, positions: Mapping[str, int]) -> None:
        self._samples = config.topic("samples")
        self._slots = config.data.workers

        def start(partition: Partition, low: int, high: int) -> int:
            # Outside of what is kept: retention has deleted it, or the topic is a new one of the same name.
            offset = positions.get(str(partition), low)
            return offset if low <= offset <= high else low

        partitions = [
            *(Partition(config.topic(kind)) for kind in ("updates", "events", "metrics")),
            *(Partition(config.topic("commands"), slot) for slot in range(self._slots)),
        ]
        super().__init__(Reader(config, services, "provision", partitions, start))

    @property
    def positions(self) -> dict[str, int]:
        """Next offset by `topic/partition`: all before it has been returned by `poll`."""
        return {str(partition): offset for partition, offset in self._reader.positions.items()}

    def read_history(self, timeout_s: float = 120.0) -> list[TimedRecord]:
        """As in `RecordReader`; a job's whole history takes longer."""
        return super().read_history(timeout_s)

    def sample_ends(self, timeout_s: float = 1.0) -> list[int] | None:
        """The end of each partition of samples; None where a broker does not answer in time."""
        return self.partition_ends(self._samples, self._slots, timeout_s)
