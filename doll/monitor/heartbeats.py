"""Signs of life: when each role of a job was last heard, and which of them is silent. Pure: time is an argument.

Every measurement on the topic `metrics` is a sign of life of its source; one without values is nothing else. A process
that ends by itself says so in its last one (`LEFT`): from then on nobody waits for it. Of the workers the parameter
server tells, which hears them each second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from doll.process.heartbeats import LEFT
from doll.records import AnyRecord, Metric, TermStarted

HEARTBEAT_TIMEOUTS_S: Final[Mapping[str, float]] = {
    "ps": 30.0,
    "producer": 60.0,
    "evaluator": 120.0,
    "provisioner": 120.0,
}
"""So long a role may be silent; the evaluator is while it evaluates, the provisioner while its fleet answers."""
_WORKER_HEARTBEAT_TIMEOUT_S: Final = 30.0
_WORKER_METRIC: Final = re.compile(r"worker_(\d{1,6})_silent_s")


class RoleHeartbeats:
    """Feed it records of `metrics` and `updates`; ask it who is silent."""

    def __init__(self) -> None:
        self._last_seen_s: dict[str, float] = {}
        self._generation = 0

    def feed(self, record: AnyRecord) -> None:
        """Take in one record; others than measurements and starts of terms are passed over."""
        if isinstance(record, TermStarted) and record.generation > self._generation:
            self._generation, self._last_seen_s = record.generation, {}
        if not isinstance(record, Metric) or record.source not in HEARTBEAT_TIMEOUTS_S:
            return
        if record.values.get("term", self._generation) < self._generation:
            return  # of an earlier run
        if record.values.get(LEFT):
            self._last_seen_s.pop(record.source, None)
            return
        self._last_seen_s[record.source] = max(record.time_s, self._last_seen_s.get(record.source, record.time_s))
        for name, silent_s in record.values.items():
            if record.source == "ps" and (match := _WORKER_METRIC.fullmatch(name)) is not None:
                self._last_seen_s[f"worker-{match[1]}"] = record.time_s - silent_s

    def ages_s(self, now_s: float) -> dict[str, float]:
        """Seconds since the last sign of life of each role that was heard and has not left; `now_s` is Unix time."""
        return {role: max(0.0, now_s - at_s) for role, at_s in sorted(self._last_seen_s.items())}

    def silent(self, now_s: float) -> dict[str, float]:
        """Those of `ages_s` that are above what their role is allowed."""
        ages_s = self.ages_s(now_s)
        return {
            role: age_s
            for role, age_s in ages_s.items()
            if age_s > HEARTBEAT_TIMEOUTS_S.get(role, _WORKER_HEARTBEAT_TIMEOUT_S)
        }
