"""Which workers are up, as the parameter server says once a second: for streams that pause with their worker."""

from __future__ import annotations

from doll.config import JobConfig
from doll.kafka.tail import Tail
from doll.records import Metric
from doll.services import Services


class LiveWorkers:
    """Follows the `metrics` topic. A worker of which nothing is known is down.

    Raises:
        ServiceUnavailableError: the topic is not there, or the broker does not answer.
    """

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._tail = Tail(config, services, (config.topic("metrics"),))
        self._live: frozenset[int] = frozenset()
        self._count = config.data.workers

    def poll(self) -> None:
        """Take in what has been said; does not wait."""
        for timed in self._tail.poll(0.0):
            if isinstance(timed.record, Metric) and timed.record.source == "ps":
                values = timed.record.values
                self._live = frozenset(n for n in range(self._count) if values.get(f"worker_{n}_live", 0.0) > 0)

    def is_down(self, stream: int) -> bool:
        """Whether the worker of this stream is down."""
        return stream not in self._live

    def __enter__(self) -> LiveWorkers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tail.__exit__()
