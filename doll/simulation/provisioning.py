"""The production planner inside the simulation: it sees of the simulated job what the controller sees of a real one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from doll.provisioner.planning.estimators import AvailabilityEstimator
from doll.provisioner.planning.planner import plan, start
from doll.provisioner.planning.state import PlannerSettings, PlannerState
from doll.simulation.system import System
from doll.theory.cost import Prices


class PlannerProvisioner:
    """Asks the planner every `settings.replan_s` and moves slots as it says.

    Availability is estimated from slots that are on spot; rates are those of the simulation's settings.
    """

    def __init__(self, settings: PlannerSettings) -> None:
        self.settings = settings
        self.every_s = settings.replan_s
        self._availability = AvailabilityEstimator()
        self._last_available: list[bool] = []
        self._changed_s: list[float] = []
        self._moved_s: list[float] = []

    def decide(self, system: System) -> Sequence[bool]:
        now_s, n = system.now, system.settings.num_workers
        first = not self._last_available
        if first:
            self._last_available = list(system.spot_available)
            self._changed_s, self._moved_s = [-np.inf] * n, [-np.inf] * n
        else:
            self._look(system)
        spot, there = np.asarray(system.spot), np.asarray(system.spot_available)
        self._availability.observe(now_s, there, spot)
        state = PlannerState(
            elapsed_s=now_s,
            updates_done=float(system.version),
            rates_per_s=np.asarray(system.settings.rates_per_s, float),
            on_spot=spot,
            up=np.asarray(system.up),
            alpha=self._availability.alpha(),
            prices=Prices(system.settings.spot_usd_per_hour, system.settings.on_demand_usd_per_hour),
            spent_usd=system.usd,
            spot_available=there,
            spot_changed_s=np.asarray(self._changed_s),
            moved_s=np.asarray(self._moved_s),
        )
        made = start(state, self.settings) if first else plan(state, self.settings)
        for slot in np.flatnonzero(made.moved):
            self._moved_s[slot] = now_s
        return [bool(spot) for spot in made.on_spot]

    def _look(self, system: System) -> None:
        for slot, (there, before) in enumerate(zip(system.spot_available, self._last_available, strict=True)):
            if there != before:
                self._last_available[slot] = there
                self._changed_s[slot] = system.now
