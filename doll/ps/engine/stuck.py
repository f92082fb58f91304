"""Whether the live workers can make the next update at all, and a report when they cannot. Pure."""

from __future__ import annotations

from typing import Final

from doll.config.policy import PolicyConfig
from doll.ps.engine.engine import Engine
from doll.ps.policies.base import Offer

# A worker that dies and comes back leaves the others short for a while: that is not reported.
STALL_REPORT_S: Final = 10.0


def shortfall(engine: Engine) -> int:
    """How many batches the next update needs beyond all that the live workers can offer; 0: it can be made.

    A worker offers what it has announced and what it still has room to announce; batches in the model make room with
    the next checkpoint.
    """
    offers = [
        Offer(
            worker.held, worker.computing, worker.waiting, worker.stalled, worker.lag,
            engine.settings.max_pending_batches - (worker.partition.announced - worker.partition.applied),
        )
        for worker in engine.workers()
        if worker.is_live
    ]  # fmt: skip
    return engine.policy.shortfall(engine, offers)


class StallDetector:
    """Since when no update can be made. Call `check` about once a second."""

    def __init__(self, policy: PolicyConfig, now: float) -> None:
        self._policy = policy
        self._last_possible_s = now
        self._reported = False

    def check(self, engine: Engine, now: float) -> str | None:
        """What to report: once, after `STALL_REPORT_S`; again only after an update was possible."""
        missing = shortfall(engine)
        if not missing:
            self._last_possible_s, self._reported = now, False
            return None
        if self._reported or now - self._last_possible_s < STALL_REPORT_S:
            return None
        self._reported = True
        settings = engine.settings
        return self._policy.shortfall_text(
            missing, live=engine.num_live, workers=settings.num_workers,
            max_pending_batches=settings.max_pending_batches,
        )  # fmt: skip

    def stalled_s(self, now: float) -> float:
        """For how long no update has been possible; 0 while one is."""
        return now - self._last_possible_s
