"""The production planner in the simulation: it sees the same of a simulated job as the controller of a real one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from doll.provisioner.planning.estimators import AvailabilityEstimator
from doll.provisioner.planning.planner import plan, start
from doll.provisioner.planning.state import PlannerSettings, PlannerState, SlotHistory

from doll_lab.simulation.system import System


class PlannerProvisioner:
    """Asks the planner every `settings.replan_s` seconds, and moves slots between the markets accordingly.

    Availability is estimated from slots that are on spot; rates come from the settings of the simulation.
    """

    def __init__(self, settings: PlannerSettings) -> None:
        self.settings = settings
        self.every_s = settings.replan_s
        self._availability = AvailabilityEstimator()
        self._history: SlotHistory | None = None

    def decide(self, system: System) -> Sequence[bool]:
        settings, now_s = system.settings, system.now
        on_spot, available = np.asarray(system.spot), np.asarray(system.spot_available)
        first = self._history is None
        if self._history is None:
            self._history = SlotHistory((settings.num_workers,))
            self._history.begin(available)
        self._history.observe(available, now_s)
        self._availability.observe(now_s, available, on_spot)
        state = PlannerState(
            elapsed_s=now_s,
            samples_done=float(system.engine.batches_total * settings.batch_size),
            rates_per_s=np.asarray(settings.rates_per_s),
            on_spot=on_spot,
            up=np.asarray(system.up),
            alpha=self._availability.alpha(),
            prices=settings.worker_prices,
            spent_usd=system.usd,
            **self._history.since(),
        )
        decided = start(state, self.settings) if first else plan(state, self.settings)
        self._history.move(decided.moved, now_s)
        return [bool(spot) for spot in decided.on_spot]
