"""The newest updates of a job with their batches: bounded. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

from doll.records.control import Update

MAX_UPDATES: Final = 200
MAX_MEMBERS: Final = 20_000  # batches of these updates: one of a job with 1,000 workers may have as many


class NewestUpdates:
    """The last ones.

    Attributes:
        updates: oldest first.
    """

    def __init__(self) -> None:
        self.updates: deque[Update] = deque()
        self._members = 0

    def add(self, update: Update) -> None:
        self.updates.append(update)
        self._members += len(update.members)
        while len(self.updates) > MAX_UPDATES or (self._members > MAX_MEMBERS and len(self.updates) > 1):
            self._members -= len(self.updates.popleft().members)
