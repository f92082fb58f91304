"""What carries each worker's grants and pushes during a drill, by the parameter server's status. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from doll.drill.plan import Link
from doll.records.control import ServerStatus

ControlKind = Literal["auto", "kafka", "redis", "local"]

_LINKS: Final[Mapping[ControlKind, tuple[Link, ...]]] = {
    "auto": ("local", "redis"), "local": ("local",), "redis": ("redis",), "kafka": (),
}  # fmt: skip


class ControlTracker:
    """Counts links that were opened and lost. Feed it each status.

    A status comes once a second: what a killed server counted after its last one is missing, and a worker that falls
    back to Kafka and returns between two of them is not seen.

    Args:
        kind: `control.kind`.

    Attributes:
        links: kinds of links that the job uses, the fastest first.
        updated_s: time of the newest status.
        behind: workers that are down or use another link than the fastest, by that status.
    """

    def __init__(self, kind: ControlKind) -> None:
        self.links = _LINKS[kind]
        self.updated_s = 0.0
        self.behind: tuple[int, ...] = ()
        self._kind = kind
        self._counts: dict[int, Mapping[str, int]] = {}  # by term
        self._last: dict[int, tuple[int, str]] = {}  # by worker: session, kind
        self._fallen_back: set[int] = set()  # workers whose present process had a link
        self._fallbacks = self._returns = 0

    def feed(self, status: ServerStatus) -> None:
        """Take a status of the leader."""
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
        """The field `control` of `report.json`."""
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
