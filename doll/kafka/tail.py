"""Following a job's topics as records, for those who only watch: evaluator, progress, status, provisioner."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Self

from doll import telemetry
from doll.errors import ServiceUnavailableError
from doll.kafka.reader import Message, Partition, Reader, RecordDecoder, from_earliest, from_end
from doll.records.control import AnyRecord

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

log = telemetry.get_logger(__name__)


class TimedRecord(NamedTuple):
    """A record, when it was written (Unix seconds), and where it stands."""

    record: AnyRecord
    at_s: float
    topic: str
    offset: int


class RecordReader:
    """Records of some partitions, in order within each. Records that do not decode are counted and skipped.

    An unreachable broker is waited for: `poll` then returns nothing. Use as a context manager.

    Args:
        reader: of the partitions; closed with this object.
    """

    def __init__(self, reader: Reader) -> None:
        self._decoder = RecordDecoder()
        self._reader = reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()

    @property
    def refused(self) -> int:
        """Records that did not decode."""
        return self._decoder.refused

    def poll(self, timeout_s: float, limit: int = 1000) -> list[TimedRecord]:
        """The next records; as soon as there are any, at the latest after `timeout_s`."""
        records = []
        for message in self._reader.poll(timeout_s, limit):
            record = self._decoder.decode(message.partition.topic, message.offset, message.value)
            if record is not None:
                at_s = self._written_s(message)
                records.append(TimedRecord(record, at_s, message.partition.topic, message.offset))
        return records

    def read_history(self, timeout_s: float = 30.0) -> list[TimedRecord]:
        """Everything that the partitions held when this reader was opened.

        Raises:
            ServiceUnavailableError: the broker did not send it within `timeout_s`.
        """
        records: list[TimedRecord] = []
        deadline_s = time.monotonic() + timeout_s
        while unread := [partition for partition in self._reader.ends if not self._reader.has_read_history(partition)]:
            if time.monotonic() > deadline_s:
                raise ServiceUnavailableError(
                    f"Kafka did not send all records of {', '.join(map(str, unread))} within {timeout_s:g} s: is it "
                    "overloaded, or a broker down?"
                )
            records += self.poll(0.2)
        return records

    def read_to_end(self, timeout_s: float = 10.0) -> list[TimedRecord]:
        """What the partitions hold by now and was not returned yet; less of it if `timeout_s` is over before."""
        records: list[TimedRecord] = []
        deadline_s = time.monotonic() + timeout_s
        try:
            ends = {partition: self._reader.bounds(partition)[1] for partition in self._reader.ends}
        except ServiceUnavailableError as exc:
            log.warning("topic_error", reason=str(exc))
            return records
        positions = self._reader.positions
        while any(positions[partition] < end for partition, end in ends.items()) and time.monotonic() < deadline_s:
            records += self.poll(0.2)
        return records

    def is_caught_up(self) -> bool:
        """Whether the partitions hold nothing that was not returned yet.

        Raises:
            ServiceUnavailableError: the broker does not answer.
        """
        return self._reader.is_caught_up()

    def partition_bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """First offset that a partition of any topic still holds, and one above its last.

        Raises:
            ServiceUnavailableError: the broker does not answer, or the topic does not exist.
        """
        return self._reader.bounds(Partition(topic, partition))

    def partition_ends(self, topic: str, partitions: int, timeout_s: float = 1.0) -> list[int] | None:
        """The end (high watermark) of each partition of any topic; None where a broker does not answer in time."""
        return self._reader.partition_ends(topic, partitions, timeout_s)

    def _written_s(self, message: Message) -> float:
        """Of history the writer's clock; of what comes while we read our own, because clocks need not agree."""
        now_s = time.time()
        if message.offset >= self._reader.ends[message.partition] or not message.written_s:
            return now_s
        return min(now_s, message.written_s)


class Tail(RecordReader):
    """Records of `topics` (full names, one partition each) from the earliest that is kept, or from now on.

    Attributes:
        ends: per topic, the offset behind its last record when this tail was opened: what came before is history.

    Raises:
        ServiceUnavailableError: a topic does not exist, or the broker does not answer.
    """

    def __init__(
        self, config: JobConfig, services: Services, topics: Iterable[str], *, from_now_on: bool = False
    ) -> None:
        start = from_end if from_now_on else from_earliest
        super().__init__(Reader(config, services, "watch", map(Partition, topics), start))
        self.ends: dict[str, int] = {partition.topic: end for partition, end in self._reader.ends.items()}

    def has_read_history(self, topic: str) -> bool:
        """Whether everything that `topic` held when this tail was opened has been returned."""
        return self._reader.has_read_history(Partition(topic))
