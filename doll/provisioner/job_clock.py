"""When the job's clock began, and to which run on the job's topics the provisioner's state belongs. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from doll.provisioner.fleets.port import Instance
from doll.provisioner.kept_state import KeptState
from doll.provisioner.observation import Observed


class JobClock(KeptState):
    """The clock of one run of a job.

    Args:
        started_s: when the clock began, Unix seconds, where the job's settings state it.

    Attributes:
        started_s: None before the first turn.
        generation: of the job's run on its topics.
        begun_s: instances that ended before belong to an earlier run, and were billed there.
    """

    KEPT: ClassVar = {"started_s": float, "generation": int, "begun_s": float}

    def __init__(self, started_s: float | None) -> None:
        self.started_s = started_s
        self.generation = 0
        self.begun_s = -math.inf
        self._ignores_earlier_runs = False

    def ignore_earlier_runs(self) -> None:
        """The stored state is another run's: the next turn begins a run of its own."""
        self._ignores_earlier_runs = True

    def begin_run(self, observed: Observed, now_s: float, stated_s: float | None) -> bool:
        """Follow the job's generation; True where one has begun after a run with state, so that its bill must go.

        Args:
            stated_s: when the clock began, where the job's settings state it.
        """
        if self._ignores_earlier_runs:
            self._ignores_earlier_runs, self.begun_s = False, now_s
            self.started_s = now_s if self.started_s is None else self.started_s
        if observed.generation <= self.generation:
            return False
        self.generation, began_s = observed.generation, observed.generation_s
        self.begun_s = began_s if 0 < began_s <= now_s else now_s
        if self.started_s is None:
            return False
        self.started_s = self.begun_s if stated_s is None else stated_s
        return True

    def start(self, observed: Observed, listed: Sequence[Instance], now_s: float) -> None:
        """Start the clock without state: now, at the first launch of this run, or when a published decision says."""
        launched_s = [
            instance.launched_s
            for instance in listed
            if instance.is_alive or (instance.ended_s or now_s) > self.begun_s
        ]
        self.started_s = max(min([now_s, *launched_s]), min(now_s, self.begun_s))
        announced = observed.last_decision
        # Records are no proof: a start in the future is ignored.
        if announced is not None and 0 < announced.started_s <= now_s:
            self.started_s = announced.started_s

    def restore(self, kept: Mapping[str, Any]) -> None:
        """As `KeptState`; a start that the settings state wins over the kept one."""
        stated_s = self.started_s
        super().restore(kept)
        self.started_s = self.started_s if stated_s is None else stated_s


def run_of(job: str, topics_id: str, generation: int) -> str:
    """`Order.run`: derived from what a successor without state knows too, so that it repeats orders word by word."""
    return hashlib.sha256(f"{job} {topics_id} {generation}".encode()).hexdigest()[:10] if job else ""
