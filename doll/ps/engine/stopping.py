"""The end of a job, and the detection of a job that cannot continue. Pure.

`doll.records.refusals` has the rule that ends a job with too many bad records.
"""

from __future__ import annotations

import math
from typing import Final

from doll.config import StopConfig
from doll.ps.engine.events import EngineSnapshot
from doll.records.control import Evaluated

# While a dead worker is being restarted, updates lack batches for a while. This is not reported.
STALL_REPORT_S: Final = 10.0


def progress_reached(stop: StopConfig, *, updates: int, samples_total: int) -> str | None:
    """Return why the job ends after this progress; None if it continues. `updates`: number of updates with a sample."""
    if stop.updates is not None and updates >= stop.updates:
        return f"updates: {updates} reached"
    if stop.samples is not None and samples_total >= stop.samples:
        return f"samples: {samples_total} reached"
    return None


def time_reached(stop: StopConfig, elapsed_s: float) -> str | None:
    """Return why the job ends `elapsed_s` seconds after its first update with a sample; None: it continues."""
    if stop.seconds is not None and elapsed_s >= stop.seconds:
        return f"seconds: {elapsed_s:.1f} passed"
    return None


def target_reached(stop: StopConfig, evaluation: Evaluated) -> str | None:
    """Return why the job ends with this evaluation; None: it continues."""
    accuracy, loss, version = evaluation.accuracy, evaluation.loss, evaluation.version
    if stop.accuracy is not None and accuracy is not None and accuracy >= stop.accuracy:
        return f"accuracy: {accuracy:.4f} at version {version} reached {stop.accuracy}"
    if stop.loss is not None and loss <= stop.loss:
        return f"loss: {loss:.4f} at version {version} reached {stop.loss}"
    value = evaluation.metrics.get(stop.metric or "", math.nan)
    if (stop.at_least is not None and value >= stop.at_least) or (stop.at_most is not None and value <= stop.at_most):
        return f"metric: {stop.metric} {value:.4f} at version {version} reached {stop.bound}"
    return None


def reached_before(stop: StopConfig, snapshot: EngineSnapshot) -> str | None:
    """Return why a job that continues from `snapshot` ends at once by this rule; None if it does not end."""
    updates = snapshot.version - snapshot.empty_updates
    return (
        progress_reached(stop, updates=updates, samples_total=snapshot.samples_total)
        or (time_reached(stop, snapshot.elapsed_s) if snapshot.samples_total else None)
        or (None if snapshot.reached is None else target_reached(stop, snapshot.reached))
    )


def is_target(reason: str) -> bool:
    """Return whether this reason is a reached loss or metric, so that the remaining work is not needed."""
    return reason.startswith(("accuracy: ", "loss: ", "metric: "))


class StallDetector:
    """Detects that no update is possible any more. Call `check` about once a second."""

    def __init__(self, now: float) -> None:
        self._last_possible_s = now
        self._reported = False

    def check(self, missing: int, now: float) -> bool:
        """Return whether to report that the next update lacks `missing` batches (`Engine.shortfall`).

        A stall is reported once, after `STALL_REPORT_S` seconds. It ends when an update is possible again.
        """
        if not missing:
            self._last_possible_s, self._reported = now, False
        elif not self._reported and now - self._last_possible_s >= STALL_REPORT_S:
            self._reported = True
            return True
        return False

    def stalled_s(self, now: float) -> float:
        """Return the seconds for which no update has been possible; 0 while an update is possible."""
        return now - self._last_possible_s
