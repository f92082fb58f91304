"""Following a job's topics as records, for those who only watch: evaluator, progress, status, provisioner."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from doll.errors import ServiceUnavailableError
from doll.kafka.reader import Message, Partition, Reader, RecordDecoder, from_earliest, from_end
from doll.records.control import AnyRecord, Finished
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

log = get_logger(__name__)

_POLL_S: Final = 0.5


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


@contextlib.contextmanager
def on_finish(config: JobConfig, services: Services, call: Callable[[], None]) -> Iterator[None]:
    """Within the context: `call` is called, in a thread, once when the job finishes.

    A Finished record from before is ignored: this process was started because the job goes on.

    Raises:
        ServiceUnavailableError: Kafka does not answer at the start. Later it is waited for.
    """
    exited = threading.Event()

    def watch() -> None:
        while not exited.is_set():
            for timed in tail.poll(_POLL_S):
                if isinstance(timed.record, Finished):
                    log.info("job_finished", version=timed.record.version, reason=timed.record.reason)
                    call()
                    return

    with Tail(config, services, (config.topic("updates"),), from_now_on=True) as tail:
        thread = threading.Thread(target=watch, name="finish", daemon=True)
        thread.start()
        try:
            yield
        finally:
            exited.set()
            thread.join()


class JobRecords(RecordReader):
    """All control records of a job. Use as a context manager.

    Args:
        positions: next offset by `topic/partition`; from the earliest kept offset for partitions that are not in it.

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
