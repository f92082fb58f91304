"""Can the workers that are up make the next update at all? Pure; a job that waits in vain must not look idle."""

from __future__ import annotations

from typing import Final

from doll.ps.engine import Engine, Slot
from doll.ps.policies import Bsp

# A worker that dies and comes back leaves the others short for a while: that is no news.
PATIENCE_S: Final = 10.0


def shortfall(engine: Engine) -> int:
    """How many batches the next update needs beyond all that the workers that are up can offer; 0: it can be made.

    A worker offers what it has announced and what it still has room to announce: batches in the group count already,
    and batches in the model make room with the next checkpoint. Under `bsp` each worker that is up owes one batch.
    """
    up = [slot for _, slot in engine.workers() if slot.up]
    if isinstance(engine.policy, Bsp) and up:
        return _owed(engine, up)
    needed = getattr(engine.policy, "group_size", 1) - engine.num_held - engine.num_computing
    for slot in up:
        if not slot.stalled:
            needed -= slot.waiting + max(0, _room(engine, slot))
    return max(0, needed)


def _owed(engine: Engine, up: list[Slot]) -> int:
    """Workers that keep a round from its end and will not give a batch: they let a grant time out, or their streams
    have nothing to read while every other worker is full."""
    absent = [slot for slot in up if not slot.held and not slot.computing]
    stalled = sum(slot.stalled for slot in absent)
    empty = [slot for slot in absent if not slot.stalled and not slot.waiting and not slot.lag]
    others = [slot for slot in up if slot not in absent]
    full = bool(others) and all(_room(engine, slot) <= 0 for slot in others)
    return stalled + (len(empty) if full else 0)


def _room(engine: Engine, slot: Slot) -> int:
    return engine.settings.max_pending_batches - (slot.announced - slot.applied)


def reason(policy: str, missing: float, up: int, workers: int, max_pending: int) -> str:
    """What to tell people where `missing` batches cannot come."""
    if policy == Bsp.name and up:
        return (
            f"no update can be made: policy bsp needs a batch of every worker that is up, and {missing:.0f} of {up} "
            "give none (no gradient within worker.grant_timeout_s, or a stream without records while the others are "
            "full); restart these workers, see that their streams get records, or choose another policy"
        )
    return (
        f"no update can be made: {missing:.0f} batches more are needed than the {up} of {workers} workers that are up "
        f"can hold (worker.max_pending_batches {max_pending}); start the missing workers, or restart with a larger "
        "worker.max_pending_batches or a smaller group"
    )


class Stuck:
    """Since when no update can be made. Feed it the time a few times a second."""

    def __init__(self, now: float) -> None:
        self._possible_s = now
        self._said = False

    def look(self, engine: Engine, now: float) -> str | None:
        """What to tell people: once, when it has lasted for `PATIENCE_S`; then again only after it was over."""
        missing = shortfall(engine)
        if not missing:
            self._possible_s, self._said = now, False
            return None
        if self._said or now - self._possible_s < PATIENCE_S:
            return None
        self._said = True
        up = sum(slot.up for _, slot in engine.workers())
        settings = engine.settings
        return reason(engine.policy.name, missing, up, settings.num_workers, settings.max_pending_batches)

    def lasted_s(self, now: float) -> float:
        """For how long no update has been possible; 0 while one is."""
        return now - self._possible_s
