"""The end of a job, and a report when it cannot go on. Pure.

`doll.records.refusals` has the rule by which bad records end a job.
"""

from __future__ import annotations

from typing import Final

from doll.config import StopConfig
from doll.ps.engine.events import EngineSnapshot
from doll.records.control import Evaluated

# A worker that dies and comes back leaves the others short for a while: that is not reported.
STALL_REPORT_S: Final = 10.0


def progress_reached(stop: StopConfig, *, updates: int, samples_total: int) -> str | None:
    """The reason why the job ends after these updates, each of at least one sample, and samples; None: it goes on."""
    if stop.updates is not None and updates >= stop.updates:
        return f"updates: {updates} reached"
    if stop.samples is not None and samples_total >= stop.samples:
        return f"samples: {samples_total} reached"
    return None


def time_reached(stop: StopConfig, elapsed_s: float) -> str | None:
    """The reason why the job ends after these seconds since its first update with a sample; None: it goes on."""
    if stop.seconds is not None and elapsed_s >= stop.seconds:
        return f"seconds: {elapsed_s:.1f} passed"
    return None


def target_reached(stop: StopConfig, evaluation: Evaluated) -> str | None:
    """The reason why the job ends with this evaluation; None: it goes on."""
    accuracy, loss, version = evaluation.accuracy, evaluation.loss, evaluation.version
    if stop.accuracy is not None and accuracy is not None and accuracy >= stop.accuracy:
        return f"accuracy: {accuracy:.4f} at version {version} reached {stop.accuracy}"
    if stop.loss is not None and loss <= stop.loss:
        return f"loss: {loss:.4f} at version {version} reached {stop.loss}"
    return None


def reached_before(stop: StopConfig, snapshot: EngineSnapshot) -> str | None:
    """Why a job that goes on from `snapshot` with this rule ends before anything is learned; None: it goes on."""
    updates = snapshot.version - snapshot.empty_updates
    return (
        progress_reached(stop, updates=updates, samples_total=snapshot.samples_total)
        or (time_reached(stop, snapshot.elapsed_s) if snapshot.samples_total else None)
        or (None if snapshot.reached is None else target_reached(stop, snapshot.reached))
    )


def is_target(reason: str) -> bool:
    """Whether a job that ended for this reason has reached its loss or accuracy: what work was left is not needed."""
    return reason.startswith(("accuracy: ", "loss: "))


class StallDetector:
    """Since when no update can be made. Call `check` about once a second."""

    def __init__(self, now: float) -> None:
        self._last_possible_s = now
        self._reported = False

    def check(self, missing: int, now: float) -> bool:
        """Whether to report that the next update lacks `missing` batches (`Engine.shortfall`).

        Once, after `STALL_REPORT_S`; again only after an update was possible.
        """
        if not missing:
            self._last_possible_s, self._reported = now, False
        elif not self._reported and now - self._last_possible_s >= STALL_REPORT_S:
            self._reported = True
            return True
        return False

    def stalled_s(self, now: float) -> float:
        """The time for which no update has been possible; 0 while one is."""
        return now - self._last_possible_s
