"""What became of sets during a drill, by the parameter server's records. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from doll.records.control import ServerStatus, Update

_CAUSE: Final = "requeued_"
_SETS: Final = "requeued_sets"


class SetTracker:
    """Counts sets that were applied, and batches that were requeued. Feed it each update and status."""

    def __init__(self) -> None:
        self._sizes: Counter[int] = Counter()  # sets by number of batches
        self._counters: dict[str, int] = {}

    def feed(self, record: Update | ServerStatus) -> None:
        """Take a record of the leader."""
        if isinstance(record, ServerStatus):
            # A successor starts with the counters of a checkpoint: it may have counted less.
            for name, count in record.counters.items():
                self._counters[name] = max(count, self._counters.get(name, 0))
            return
        self._sizes.update(Counter(member.set_grant_id for member in record.members).values())

    def report(self) -> dict[str, Any]:
        """The field `sets` of `report.json`; `requeued_together` counts requeues of several batches at once."""
        return {
            "applied": self._sizes.total(),
            "applied_with_several_batches": self._sizes.total() - self._sizes[1],
            "max_batches": max(self._sizes, default=0),
            "requeued_together": self._counters.get(_SETS, 0),
            "requeued_batches": self._counters.get("requeued", 0),
            "requeued_by_cause": _by_cause(self._counters),
        }


def _by_cause(counters: Mapping[str, int]) -> dict[str, int]:
    return {
        name.removeprefix(_CAUSE): count
        for name, count in sorted(counters.items())
        if name.startswith(_CAUSE) and name != _SETS
    }
