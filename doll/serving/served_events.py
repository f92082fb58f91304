"""Counts how long events take until the served version has learned them. Pure; times are Unix seconds."""

from __future__ import annotations

from collections import deque
from typing import Final

from doll.config.freshness import FreshnessConfig
from doll.evaluation.stored_weights import Place
from doll.ledger.lineage import UpdatesRecord
from doll.records.control import TermStarted, Update
from doll.records.event_times import NO_LATENCIES, EventTimes

_KEPT: Final = 100_000  # batches that no served version has


class ServedEvents:
    """Counts the events of each update when a version with this update is served, whichever is known first. Those of
    the first version do not count, because they may have been served before."""

    def __init__(self, config: FreshnessConfig) -> None:
        self.served = NO_LATENCIES
        self._limits_s = config.event_to_served_s, config.max_ahead_s
        self._swaps: deque[tuple[Place, float]] = deque(maxlen=1_000)
        self._waiting: deque[tuple[Place, EventTimes]] = deque()
        self._newest = Place(0, 0)

    def feed(self, record: UpdatesRecord) -> None:
        """Process a record of `updates`."""
        place = Place(record.term, record.version if isinstance(record, Update) else 0)
        if isinstance(record, TermStarted) and place > self._newest:
            self._newest = Place(record.term, record.resumed_version)
            self._waiting = deque(item for item in self._waiting if item[0].version <= record.kept_version)
        if not isinstance(record, Update) or place <= self._newest:
            return
        self._newest = place
        at_s = next((at_s for swapped, at_s in self._swaps if swapped >= place), None)
        for times in (member.known_times for member in record.members):
            if at_s is not None:
                self._count(times, at_s)
            else:
                self._waiting.append((place, times))
        while len(self._waiting) > _KEPT:  # nothing newer is served: these are late, however they end
            times = self._waiting.popleft()[1]
            self._count(EventTimes(bad=times.count + times.bad), 0.0)

    def swapped(self, place: Place, at_s: float) -> None:
        """Note that this version is served from `at_s` on."""
        is_first = not self._swaps
        self._swaps.append((place, at_s))
        while self._waiting and self._waiting[0][0] <= place:
            times = self._waiting.popleft()[1]
            if not is_first:
                self._count(times, at_s)
        self._newest = max(self._newest, place) if is_first else self._newest

    def _count(self, times: EventTimes, at_s: float) -> None:
        self.served = self.served.with_batch(times, at_s, *self._limits_s)
