"""Counts how long events take until the served version has learned them. Pure; times are Unix seconds."""

from __future__ import annotations

from collections import deque
from typing import Final

from doll.evaluation.stored_weights import Place
from doll.ledger.lineage import UpdatesRecord
from doll.records.control import TermStarted, Update
from doll.records.event_times import EventTimes, Latencies

_KEPT: Final = 10_000  # updates that no served version has, and swaps


class ServedEvents:
    """Counts the events of each update when a version with this update is served, whichever is known first.

    Args:
        begun: the version that was served at first, from a checkpoint. Its events do not count, because they may have
            been served before.
    """

    def __init__(self, latencies: Latencies, begun: Place | None) -> None:
        self._latencies = latencies
        self._swaps: deque[tuple[Place, float]] = deque(maxlen=_KEPT)
        self._waiting: deque[tuple[Place, list[EventTimes]]] = deque()
        self._begun = begun or Place(0, 0)
        self._newest = Place(0, 0)

    def feed(self, record: UpdatesRecord) -> None:
        """Process a record of `updates` of the newest term."""
        if isinstance(record, TermStarted):
            kept = record.kept_version
            self._waiting = deque(item for item in self._waiting if item[0].version <= kept)
        elif isinstance(record, Update) and (place := Place(record.term, record.version)) > max(
            self._begun, self._newest
        ):
            self._newest = place
            all_times = [item.times or EventTimes(untimed=item.n_samples) for item in record.members]
            at_s = next((at_s for swapped, at_s in self._swaps if swapped >= place), None)
            if at_s is not None:
                self._count(all_times, at_s)
                return
            self._waiting.append((place, all_times))
            if len(self._waiting) > _KEPT:  # nothing newer is served: these are late, however they end
                for times in self._waiting.popleft()[1]:
                    self._latencies.add(EventTimes(untimed=times.count + times.untimed + times.ahead), 0.0)

    def swapped(self, place: Place, at_s: float) -> None:
        """Note that this version is served from `at_s` on."""
        self._swaps.append((place, at_s))
        while self._waiting and self._waiting[0][0] <= place:
            self._count(self._waiting.popleft()[1], at_s)

    def _count(self, all_times: list[EventTimes], at_s: float) -> None:
        for times in all_times:
            self._latencies.add(times, at_s)
