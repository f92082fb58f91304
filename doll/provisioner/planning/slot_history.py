"""What the planner needs of the past: since when spot has machines for each slot, and when each slot last moved. Pure.

The controller, the simulated provisioner and the backtest build their `PlannerState` here.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import numpy.typing as npt

from doll.provisioner.planning.state import Alpha, Bools, PlannerState
from doll.theory.checks import Floats
from doll.theory.cost import Prices


class SlotHistory:
    """Spot's availability per slot and its changes, and the slots' moves, in seconds of any one clock.

    Args:
        shape: (N,) for one job of N slots, (M, N) for M jobs.

    Attributes:
        spot_available: whether spot has a machine for the slot, at the last observation; True before the first.
        spot_changed_s: when that last changed; -inf before the first change.
        moved_s: when the slot last changed its market; -inf before the first move.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.spot_available: Bools = np.ones(shape, dtype=np.bool_)
        self.spot_changed_s: Floats = np.full(shape, -math.inf)
        self.moved_s: Floats = np.full(shape, -math.inf)

    def copy(self) -> SlotHistory:
        """A history that changes without this one."""
        return copy.deepcopy(self)

    def begin(self, spot_available: npt.ArrayLike) -> None:
        """Availability as it is found at the start: no change."""
        self.spot_available = np.array(spot_available, dtype=np.bool_)

    def observe(self, spot_available: npt.ArrayLike, now_s: float) -> None:
        """Availability at `now_s`; array of the history's shape."""
        observed = np.array(spot_available, dtype=np.bool_)
        self.spot_changed_s[observed != self.spot_available] = now_s
        self.spot_available = observed

    def move(self, moved: Bools, now_s: float) -> None:
        """These slots change their market at `now_s`; array of the history's shape."""
        self.moved_s[moved] = now_s

    def state(
        self,
        *,
        now_s: float,
        samples_done: float,
        rates_per_s: npt.ArrayLike,
        on_spot: npt.ArrayLike,
        up: npt.ArrayLike,
        alpha: Alpha,
        prices: Prices,
        spent_usd: float = 0.0,
        started_s: float = 0.0,
        job: int | None = None,
    ) -> PlannerState:
        """Where one job stands at `now_s`; other arguments as of `PlannerState`.

        Args:
            started_s: when the job began.
            job: which of M jobs; None for a history of one.
        """
        at = slice(None) if job is None else job
        return PlannerState(
            elapsed_s=max(0.0, now_s - started_s),
            samples_done=samples_done,
            rates_per_s=np.asarray(rates_per_s, dtype=np.float64),
            on_spot=np.asarray(on_spot, dtype=np.bool_),
            up=np.asarray(up, dtype=np.bool_),
            alpha=alpha,
            prices=prices,
            spent_usd=spent_usd,
            spot_available=self.spot_available[at],
            spot_changed_s=self.spot_changed_s[at] - started_s,
            moved_s=self.moved_s[at] - started_s,
        )
