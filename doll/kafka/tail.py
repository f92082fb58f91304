"""Following a job's topics as records, for those who only watch: evaluator, progress, status, provisioner."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from doll.kafka.reader import Partition, Reader, TimedRecord, from_earliest, from_end
from doll.records.control import Finished
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

log = get_logger(__name__)

_POLL_S: Final = 0.5


class Tail(Reader):
    """Records of `topics` (full names, one partition each) from the earliest that is kept, or from now on.

    Raises:
        ServiceUnavailableError: a topic does not exist, or the broker does not answer.
    """

    def __init__(
        self, config: JobConfig, services: Services, topics: Iterable[str], *, from_now_on: bool = False
    ) -> None:
        start = from_end if from_now_on else from_earliest
        super().__init__(config, services, "watch", map(Partition, topics), start)


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


class JobRecords(Reader):
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
        super().__init__(config, services, "provision", partitions, start)

    def named_positions(self) -> dict[str, int]:
        """Next offset by `topic/partition`: all before it has been returned by `poll`."""
        return {str(partition): offset for partition, offset in self.positions.items()}

    def read_history(self, timeout_s: float = 120.0) -> list[TimedRecord]:
        """As in `Reader`; a job's whole history takes longer."""
        return super().read_history(timeout_s)

    def sample_ends(self, timeout_s: float = 1.0) -> list[int] | None:
        """The end of each partition of samples; None where a broker does not answer in time."""
        return self.partition_ends(self._samples, self._slots, timeout_s)
