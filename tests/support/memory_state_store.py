"""The provisioner's state and journal in memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from doll.provisioner.state_store import StateStore


class MemoryStateStore:
    """`StateStore` in memory; what is saved goes through JSON as in a file.

    Attributes:
        journal: every entry, in order.
    """

    def __init__(self) -> None:
        self.journal: list[dict[str, Any]] = []
        self._kept: str | None = None

    def load(self) -> dict[str, Any] | None:
        return None if self._kept is None else json.loads(self._kept)

    def save(self, kept: Mapping[str, Any]) -> None:
        self._kept = json.dumps(kept)

    def append(self, entry: Mapping[str, Any]) -> None:
        self.journal.append(copy.deepcopy(dict(entry)))


_store: type[StateStore] = MemoryStateStore
