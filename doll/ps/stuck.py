"""Can the workers that are up fill a group at all? Pure; a job that waits in vain must say so, not look idle."""

from __future__ import annotations

from typing import Final

from doll.ps.engine import Engine

# A worker that dies and comes back leaves the others short for a while: that is no news.
PATIENCE_S: Final = 10.0


def shortfall(engine: Engine) -> int:
    """How many batches the next update needs beyond all that the workers that are up can offer; 0: it can be made.

    A worker offers what it has announced and what it still has room to announce: batches in the group count already,
    and batches in the model make room with the next checkpoint.
    """
    needed = getattr(engine.policy, "group_size", 1) - engine.num_held - engine.num_computing
    for _, slot in engine.workers():
        if slot.up and not slot.stalled:
            room = engine.settings.max_pending_batches - (slot.announced - slot.applied)
            needed -= slot.waiting + max(0, room)
    return max(0, needed)


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
        return (
            f"no update can be made: {missing} batches more are needed than the {up} of {engine.settings.num_workers} "
            f"workers that are up can hold (worker.max_pending_batches {engine.settings.max_pending_batches}); start "
            "the missing workers, or restart with a larger worker.max_pending_batches or a smaller group"
        )

    def lasted_s(self, now: float) -> float:
        """For how long no update has been possible; 0 while one is."""
        return now - self._possible_s
