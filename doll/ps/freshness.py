"""Measures how long events take until they are in the model and in a checkpoint. Pure; times are Unix seconds."""

from __future__ import annotations

from collections import deque

from doll.config.freshness import FreshnessConfig
from doll.ps.engine.events import ApplyUpdate
from doll.records.event_times import EventTimes, Latencies


class FreshnessMeter:
    """The latencies of one parameter server, since its start."""

    def __init__(self, config: FreshnessConfig) -> None:
        self.learned = Latencies(config.event_to_learned_s, config.max_ahead_s)
        self.durable = Latencies(config.event_to_durable_s, config.max_ahead_s)
        # Event times of the versions that are not durable. Workers hold no more batches than these.
        self._waiting: deque[tuple[int, list[EventTimes]]] = deque()

    def applied(self, update: ApplyUpdate, at_s: float) -> None:
        """Count the records of an update that has made a version."""
        batches = [item for applied in update.sets for item in applied.push.batches]
        all_times = [item.times or EventTimes(untimed=item.n_samples) for item in batches]
        for times in all_times:
            self.learned.add(times, at_s)
        self._waiting.append((update.version, all_times))

    def stored(self, version: int, at_s: float) -> None:
        """Count the records of the versions that the checkpoint of `version` has made durable."""
        while self._waiting and self._waiting[0][0] <= version:
            for times in self._waiting.popleft()[1]:
                self.durable.add(times, at_s)
