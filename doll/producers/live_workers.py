"""Which workers are live, as the parameter server reports once a second: for streams that pause with their worker."""

from __future__ import annotations

from doll.config import JobConfig
from doll.kafka.tail import Tail
from doll.records.control import ServerStatus
from doll.services import Services


class LiveWorkers:
    """Follows the `metrics` topic. A worker that was never reported is not live.

    Raises:
        ServiceUnavailableError: the topic does not exist, or the broker does not answer.
    """

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._tail = Tail(config, services, (config.topic("metrics"),))
        self._live: frozenset[int] = frozenset()

    def poll(self) -> None:
        """Take in what was reported since the last call; does not wait."""
        for timed in self._tail.poll(0.0):
            if isinstance(timed.record, ServerStatus):
                self._live = frozenset(status.worker for status in timed.record.workers if status.is_live)

    def is_live(self, stream: int) -> bool:
        """Whether the worker of this stream is live."""
        return stream in self._live

    def __enter__(self) -> LiveWorkers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tail.close()
