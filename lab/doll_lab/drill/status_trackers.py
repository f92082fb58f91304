"""Counts control links and sets during a drill, from the parameter server's records. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from doll.records.control import ServerStatus, Update

from doll_lab.drill.plan import Link

ControlKind = Literal["auto", "kafka", "redis", "local"]

_LINKS: Final[Mapping[ControlKind, tuple[Link, ...]]] = {
    "auto": ("local", "redis"), "local": ("local",), "redis": ("redis",), "kafka": (),
}  # fmt: skip
_CAUSE: Final = "requeued_"
_SETS: Final = "requeued_sets"


class ControlTracker:
    """Counts links that were opened and lost. Pass it each status.

    A status is sent once per second. So counts of a killed server after its last status are missing, and a worker that
    falls back to Kafka and returns between two statuses is not seen.

    Args:
        kind: value of `control.kind`.

    Attributes:
        links: kinds of links that the job uses, the fastest first.
        updated_s: time of the newest status.
        behind: workers that, in the newest status, are down or use another link than the fastest.
    """

    def __init__(self, kind: ControlKind) -> None:
        self.links = _LINKS[kind]
        self.updated_s = 0.0
        self.behind: tuple[int, ...] = ()
        self._kind = kind
        self._counts: dict[int, Mapping[str, int]] = {}  # by term
        self._last: dict[int, tuple[int, str]] = {}  # by worker: session, kind
        self._fallen_back: set[int] = set()  # workers whose current process had a link
        self._fallbacks = self._returns = 0

    def feed(self, status: ServerStatus) -> None:
        """Process a status of the leader."""
        self.updated_s = status.time_s
        self._counts[status.term] = status.counters
        for worker in status.workers:
            session, before = self._last.get(worker.worker, (-1, "kafka"))
            if session != worker.session:
                self._fallen_back.discard(worker.worker)
            elif before != "kafka" and worker.control == "kafka" and worker.is_live:
                self._fallen_back.add(worker.worker)
                self._fallbacks += 1
            elif worker.control != "kafka" and worker.worker in self._fallen_back:
                self._fallen_back.discard(worker.worker)
                self._returns += 1
            self._last[worker.worker] = (worker.session, worker.control)
        self.behind = tuple(
            worker.worker
            for worker in status.workers
            if self.links and not (worker.is_live and worker.control == self.links[0])
        )

    def report(self) -> dict[str, Any]:
        """Return the field `control` of `report.json`."""
        total: Counter[str] = Counter()
        for counts in self._counts.values():
            total.update({name: count for name, count in counts.items() if name.startswith("control_")})
        return {
            "kind": self._kind,
            "links_opened": {link: total[f"control_{link}"] for link in get_args(Link)},
            "links_broken": total["control_broken"],
            "links_refused": total["control_refused"],
            "fallbacks": self._fallbacks,
            "returns": self._returns,
        }


class SetTracker:
    """Counts applied sets and requeued batches. Pass it each update and status."""

    def __init__(self) -> None:
        self._sizes: Counter[int] = Counter()  # sets by number of batches
        self._counters: dict[str, int] = {}

    def feed(self, record: Update | ServerStatus) -> None:
        """Process a record of the leader."""
        if isinstance(record, ServerStatus):
            # A successor starts with the counters of a checkpoint, which may be smaller.
            for name, count in record.counters.items():
                self._counters[name] = max(count, self._counters.get(name, 0))
            return
        self._sizes.update(Counter(member.set_grant_id for member in record.members).values())

    def report(self) -> dict[str, Any]:
        """Return the field `sets` of `report.json`; `requeued_together` counts requeues of several batches at once."""
        return {
            "applied": self._sizes.total(),
            "applied_with_several_batches": self._sizes.total() - self._sizes[1],
            "max_batches": max(self._sizes, default=0),
            "requeued_together": self._counters.get(_SETS, 0),
            "requeued_batches": self._counters.get("requeued", 0),
            "requeued_by_cause": {
                name.removeprefix(_CAUSE): count
                for name, count in sorted(self._counters.items())
                if name.startswith(_CAUSE) and name != _SETS
            },
        }
