"""Measures how long events take until they are in the model and in a checkpoint. Pure; times are Unix seconds."""

from __future__ import annotations

from collections import deque

from doll.config.freshness import FreshnessConfig
from doll.ps.engine.events import ApplyUpdate
from doll.records.event_times import NO_LATENCIES, EventTimes


class FreshnessMeter:
    """The latencies of one parameter server, since its start."""

    def __init__(self, config: FreshnessConfig) -> None:
        self.learned = self.durable = NO_LATENCIES
        self._config = config
        self._waiting: deque[tuple[int, EventTimes]] = deque()  # batches by version that are not durable

    def applied(self, update: ApplyUpdate, at_s: float) -> None:
        """Count the records of an update that has made a version."""
        limits_s = self._config.event_to_learned_s, self._config.max_ahead_s
        for item in (item for applied in update.sets for item in applied.push.batches):
            self.learned = self.learned.with_batch(item.known_times, at_s, *limits_s)
            self._waiting.append((update.version, item.known_times))

    def stored(self, version: int, at_s: float) -> None:
        """Count the records that the checkpoint of `version` has made durable."""
        limits_s = self._config.event_to_durable_s, self._config.max_ahead_s
        while self._waiting and self._waiting[0][0] <= version:
            self.durable = self.durable.with_batch(self._waiting.popleft()[1], at_s, *limits_s)
