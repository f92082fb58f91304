"""Whether the job advances while its machines are paid: for how long it has not, and why. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from doll.provisioner.fleets.port import Instance
from doll.provisioner.launch_state import LaunchState
from doll.provisioner.observation import Observed
from doll.provisioner.plain_values import plain, time_of
from doll.provisioner.planning.planner import slot_ranges

ALARM_S: Final = 300.0
"""Time without progress, or until a worker has joined, after which a person is told."""
_STEADY_TERM_S: Final = 600.0
_MAX_STEP_S: Final = 300.0  # a provisioner that was away, or a suspended computer, has seen no more than this


class ProgressWatch:
    """Adds up the time for which machines are paid and the model does not advance.

    Attributes:
        stalled_s: since the last progress, without times that did not count.
        progressed_s: when progress was last seen; None before the first look.
    """

    def __init__(self) -> None:
        self.stalled_s = 0.0
        self.progressed_s: float | None = None
        self._generation = 0
        self._batches = 0  # most that the model had
        self._term = (0, 0)  # the newest, and the batches in the model when it was last looked at
        self._term_since_s = math.inf
        self._seen_s = math.inf

    def observe(self, observed: Observed, now_s: float, *, counts: bool) -> None:
        """Look at the job's progress, once per turn.

        Args:
            counts: machines are paid, and it is not the market or the source that the job waits for.
        """
        term, batches = observed.term, observed.batches_done
        if term != self._term[0]:
            self._term_since_s = now_s
        # A server that crashes again and again may repeat the same updates each time, which is no progress; one that
        # runs steadily after it was reset to an old checkpoint makes some.
        steady = now_s - self._term_since_s >= _STEADY_TERM_S and batches > self._term[1]
        new_run = observed.generation != self._generation
        if self.progressed_s is None or new_run or batches > self._batches or steady:
            self.stalled_s, self.progressed_s = 0.0, now_s
            self._batches = batches if new_run else max(batches, self._batches)
        elif counts:
            self.stalled_s += min(max(0.0, now_s - self._seen_s), _MAX_STEP_S)
        self._generation, self._term, self._seen_s = observed.generation, (term, batches), now_s

    def forgive(self) -> None:
        """A person has started the job again: the time begins again."""
        self.stalled_s = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "stalled_s": self.stalled_s,
            "progressed_s": self.progressed_s,
            "generation": self._generation,
            "batches": self._batches,
            "term": list(self._term),
            "term_since_s": plain(self._term_since_s),
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue from what `to_dict` returned; the time until the next look does not count.

        Raises:
            KeyError, TypeError, ValueError: `kept` is something else.
        """
        self.stalled_s = float(kept["stalled_s"])
        self.progressed_s = None if kept["progressed_s"] is None else float(kept["progressed_s"])
        self._generation, self._batches = int(kept["generation"]), int(kept["batches"])
        self._term = (int(kept["term"][0]), int(kept["term"][1]))
        since_s = time_of(kept["term_since_s"])
        self._term_since_s = since_s if math.isfinite(since_s) else math.inf


def stall_cause(
    observed: Observed, instances: Sequence[Instance], ready: Collection[str], launch_state: LaunchState, now_s: float
) -> str:
    """Why the model does not advance, as far as the provisioner can see: one line for people, the same in each turn."""
    if observed.ps_since_s(now_s) is None:
        return server_text(observed)
    slots = range(observed.num_slots)
    if failing := [slot for slot in slots if launch_state.failures(slot)]:
        return f"machines of slots {slot_ranges(failing)} fail: {launch_state.last_failure(failing[0])}"
    alive = [instance for instance in instances if instance.is_alive]
    if not any(instance.id in ready for instance in alive):
        return "no worker has joined: the machines run, but their workers do not reach the parameter server"
    if (since_s := observed.source_silent_since_s()) is not None:
        return f"the source has sent nothing since {time_text(since_s)}"
    missing = [slot for slot in slots if not any(instance.slot == slot and instance.id in ready for instance in alive)]
    without = f", but slots {slot_ranges(missing)} have no worker" if missing else ""
    return f"workers are ready{without}, and the parameter server applies no update: see doll status and its log"


def server_text(observed: Observed) -> str:
    """That no parameter server is heard."""
    seen_s = observed.ps_last_seen_s
    since = "" if not math.isfinite(seen_s) else f" since {time_text(seen_s)}"
    return f"no parameter server has been heard{since}"


def time_text(at_s: float) -> str:
    """A Unix time for people.

    >>> time_text(1_700_000_000.0)
    '2023-11-14 22:13:20 UTC'
    """
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at_s:g} s"  # records are no proof: such a time cannot be
