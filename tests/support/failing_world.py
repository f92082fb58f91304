"""A job in virtual time whose parts can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from doll.provisioner.settings import ControllerSettings
from doll.records.control import Alive
from job_world import JobWorld, World

RATE = 10.0  # samples per second and stream


class FailingWorld(JobWorld):
    """A job that can fail.

    Attributes:
        server: the parameter server runs.
        learns: it applies what workers send.
        joins: workers reach it.
        source: samples come.
        ends: of the partitions.
    """

    server = learns = joins = source = True

    def __init__(self, clock: Callable[[], float], fleet: World, settings: ControllerSettings) -> None:
        # Workers read all there is, and do not depend on a rate of their own.
        super().__init__(clock, fleet, replace(settings, rates_per_s=np.zeros(settings.num_slots)))
        self.ends = np.zeros(settings.num_slots)

    def pass_time(self, seconds: float) -> None:
        self._join_s = 0.0 if self.joins else 1e12
        self.ends += RATE * seconds * self.source
        for slot in self.working() if self.learns and self.server else ():
            self._read[slot] = self.ends[slot]
        if self.server:
            super().pass_time(seconds)
            return
        for slot in self.working():
            alive = Alive(worker=slot, session=self._holders[slot][2], next_offset=int(self._read[slot]))
            self.log.append((alive, self._now()))
