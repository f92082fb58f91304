"""Can the workers that are up make the next update at all? Pure; a job that waits in vain must not look idle."""

from __future__ import annotations

from typing import Final

from doll.ps.engine import Engine, Slot
from doll.ps.policies.bsp import Bsp

# A worker that dies and comes back leaves the others short for a while: that is no news.
STALL_REPORT_S: Final = 10.0


def shortfall(engine: Engine) -> int:
    """How many batches the next update needs beyond all that the workers that are up can offer; 0: it can be made.

    A worker offers what it has announced and what it still has room to announce: batches in the group count already,
    and batches in the model make room with the next checkpoint. Under `bsp` each worker that is up owes one batch.
    """
    live = [slot for _, slot in engine.workers() if slot.is_live]
    if isinstance(engine.policy, Bsp) and live:
        return _owed(engine, live)
    needed = getattr(engine.policy, "group_size", 1) - engine.num_held - engine.num_computing
    for slot in live:
        if not slot.stalled:
            needed -= slot.waiting + max(0, _room(engine, slot))
    return max(0, needed)


def _owed(engine: Engine, live: list[Slot]) -> int:
    """Workers that keep a round from its end and will not give a batch: they let a grant time out, or their streams
    have nothing to read while every other worker is full."""
    absent = [slot for slot in live if not slot.held and not slot.computing]
    stalled = sum(slot.stalled for slot in absent)
    empty = [slot for slot in absent if not slot.stalled and not slot.waiting and not slot.lag]
    others = [slot for slot in live if slot not in absent]
    full = bool(others) and all(_room(engine, slot) <= 0 for slot in others)
    return stalled + (len(empty) if full else 0)


def _room(engine: Engine, slot: Slot) -> int:
    return engine.settings.max_pending_batches - (slot.announced - slot.applied)


def reason(policy: str, missing: float, live: int, workers: int, max_pending: int) -> str:
    """What to tell people where `missing` batches cannot come."""
    if policy == Bsp.name and live:
        return (
            f"no update can be made: policy bsp needs a batch of every worker that is up, and {missing:.0f} of {live} "
            "give none (no gradient within worker.grant_timeout_s, or a stream without records while the others are "
            "full); restart these workers, see that their streams get records, or choose another policy"
        )
    return (
        f"no update can be made: {missing:.0f} batches more are needed than the {live} of {workers} workers that are up "
        f"can hold (worker.max_pending_batches {max_pending}); start the missing workers, or restart with a larger "
        "worker.max_pending_batches or a smaller group"
    )


class StallDetector:
    """Since when no update can be made. Feed it the time a few times a second."""

    def __init__(self, now: float) -> None:
        self._last_possible_s = now
        self._reported = False

    def check(self, engine: Engine, now: float) -> str | None:
        """What to tell people: once, when it has lasted for `STALL_REPORT_S`; then again only after it was over."""
        missing = shortfall(engine)
        if not missing:
            self._last_possible_s, self._reported = now, False
            return None
        if self._reported or now - self._last_possible_s < STALL_REPORT_S:
            return None
        self._reported = True
        live = sum(slot.is_live for _, slot in engine.workers())
        settings = engine.settings
        return reason(engine.policy.name, missing, live, settings.num_workers, settings.max_pending_batches)

    def stalled_s(self, now: float) -> float:
        """For how long no update has been possible; 0 while one is."""
        return now - self._last_possible_s
