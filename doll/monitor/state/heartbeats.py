"""The time of the last heartbeat of each role of a job, and the roles that are silent. Pure: time is an argument.

Every record on the topic `metrics` is a heartbeat of its source, even if it has no values. A process that ends normally
reports this in its last record (`LEFT`). From then on, no heartbeats are expected from it. The parameter server reports
the time of the last heartbeat of each worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from doll.ledger.lineage import Lineage, LineageChange
from doll.process.metric_names import EVALUATOR, LEFT, PRODUCER, PROVISIONER, TERM, joiner_of, worker_source
from doll.records.control import AnyRecord, Finished, Metric, ServerStatus, TermStarted, Update

HEARTBEAT_TIMEOUTS_S: Final[Mapping[str, float]] = {
    "ps": 30.0,
    PRODUCER: 60.0,
    EVALUATOR: 120.0,
    PROVISIONER: 120.0,
}
"""The allowed silence of each role in seconds: the evaluator is silent while it evaluates, the provisioner while it
waits for its fleet."""
_WORKER_HEARTBEAT_TIMEOUT_S: Final = 30.0
_JOINER_HEARTBEAT_TIMEOUT_S: Final = 120.0  # it sends nothing while it reads the state of its partitions


class RoleHeartbeats:
    """The last heartbeats of a job's roles, from its records of `metrics` and `updates`."""

    def __init__(self) -> None:
        self._last_seen_s: dict[str, float] = {}
        self._lineage = Lineage()

    def feed(self, record: AnyRecord) -> None:
        """Process a record; types other than metrics, the server's status and the starts of terms are ignored."""
        match record:
            case TermStarted() | Update() | Finished():
                if self._lineage.feed(record) is LineageChange.GENERATION:
                    self._last_seen_s = {}
            case ServerStatus() if self._lineage.is_current(record.term):
                self._seen("ps", record.time_s)
                for worker in record.workers:
                    if worker.is_live:
                        self._last_seen_s[worker_source(worker.worker)] = record.time_s - worker.silent_s
            case Metric() if record.source in HEARTBEAT_TIMEOUTS_S or joiner_of(record.source) is not None:
                if record.values.get(TERM, self._lineage.generation) < self._lineage.generation:
                    return  # the record is from an earlier run
                if record.values.get(LEFT):
                    self._last_seen_s.pop(record.source, None)
                else:
                    self._seen(record.source, record.time_s)
            case _:
                pass

    def _seen(self, role: str, time_s: float) -> None:
        self._last_seen_s[role] = max(time_s, self._last_seen_s.get(role, time_s))

    def ages_s(self, now_s: float) -> dict[str, float]:
        """Return the seconds since the last heartbeat of each role that has not left; `now_s` is Unix time."""
        return {role: max(0.0, now_s - at_s) for role, at_s in sorted(self._last_seen_s.items())}

    def silent(self, now_s: float) -> dict[str, float]:
        """Return the `ages_s` that exceed the timeout of their role."""
        ages_s = self.ages_s(now_s)
        return {role: age_s for role, age_s in ages_s.items() if age_s > _timeout_s(role)}


def _timeout_s(role: str) -> float:
    if joiner_of(role) is not None:
        return _JOINER_HEARTBEAT_TIMEOUT_S
    return HEARTBEAT_TIMEOUTS_S.get(role, _WORKER_HEARTBEAT_TIMEOUT_S)
