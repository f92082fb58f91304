"""Which workers are up, as the parameter server says once a second: for streams that pause with their worker."""

from __future__ import annotations

from doll.config import JobConfig
from doll.kafka.tail import Tail
from doll.records import Metric
from doll.services import Services


class Workers:
    """Follows the `metrics` topic. A worker of which nothing is known is down.

    Raises:
        ServiceUnavailableError: the topic is not there, or the broker does not answer.
    """

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._tail = Tail(config, services, (config.topic("metrics"),))
        self._up: frozenset[int] = frozenset()
        self._count = config.data.workers

    def look(self) -> None:
        """Take in what has been said; does not wait."""
        for one in self._tail.poll(0.0):
            if isinstance(one.record, Metric) and one.record.source == "ps":
                values = one.record.values
                self._up = frozenset(n for n in range(self._count) if values.get(f"worker_{n}_up", 0.0) > 0)

    def is_down(self, stream: int) -> bool:
        """Whether the worker of this stream is down."""
        return stream not in self._up

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tail.__exit__()
