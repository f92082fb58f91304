"""What a backtest predicts for one job on one spot market: with the same market, planner and prices as the run."""

from __future__ import annotations

import numpy as np

from doll.monitor.spot_history import Prediction
from doll.provisioner.planning.baselines import (
    SPOT,
    AllOnDemand,
    AllSpot,
    BacktestJob,
    Choices,
    MarketPolicy,
    Observation,
)
from doll.provisioner.planning.state import Bools, PlannerSettings
from doll.provisioner.traces.market import SpotMarket
from doll.provisioner.traces.model import Floats
from doll.provisioner.traces.windows import Windows
from doll.simulation.adaptive import ADAPTIVE, Adaptive
from doll.simulation.backtest import replay
from doll.theory.cost import SECONDS_PER_HOUR

_TICKS = 2000
_SHORTEST_TICK_S = 0.5


def predict(
    market: SpotMarket, planner: PlannerSettings, rates_per_s: Floats, *, leave_s: float = 0.0,
    policy: MarketPolicy | None = None,
) -> Prediction:  # fmt: skip
    """Replay the job tick by tick, `planner.replan_s` long (longer for a job of days), under the planner as it is live.

    Arrivals have no noise here, and pause while their worker is down. A slot whose machine is taken works until then;
    the next one works `planner.boot_s` after it was launched. To the work belong half a batch of each stream and half
    a group, which are there in the end and not learned.

    Args:
        rates_per_s: λ_n, shape (N,).
        leave_s: for so long a machine that got its notice is still billed, while its worker leaves.
        policy: another policy in place of the planner.
    """
    rates = np.asarray(rates_per_s, dtype=np.float64)
    tick_s = max(planner.replan_s, planner.deadline_s / _TICKS, _SHORTEST_TICK_S)
    windows = _window(market, planner.deadline_s, tick_s)
    job = BacktestJob(
        samples=planner.samples + 0.5 * planner.batch_size * (len(rates) + (planner.group_size or 1)),
        deadline_s=planner.deadline_s, rates_per_s=rates, boot_s=planner.boot_s, tick_s=tick_s,
        on_demand=windows.on_demand, pool_alpha=windows.pool_alpha, pool_price=windows.pool_price,
    )  # fmt: skip
    seen = _PreemptionRecorder(policy or Adaptive(ADAPTIVE, planner))
    outcome = replay(seen, job, windows)
    finish_s, usd = float(outcome.finish_s[0]), float(outcome.usd[0])
    taken = [(slot, at_s) for slot, at_s in seen.taken if at_s <= finish_s]
    with_notice = sum(not market.interval(slot, at_s - tick_s).without_notice for slot, at_s in taken)
    usd += with_notice * min(leave_s, market.notice_s) * float(windows.pool_price[0]) / SECONDS_PER_HOUR
    return Prediction(seen.name, finish_s, usd, int(outcome.moves[0]), len(taken))


class _PreemptionRecorder:
    """A policy for one job, and the machines that were taken from it.

    Attributes:
        taken: (slot, tick at which it was gone, in seconds).
    """

    def __init__(self, policy: MarketPolicy) -> None:
        self.name = policy.name
        self.taken: list[tuple[int, float]] = []
        self._policy = policy
        self._used: Bools | None = None

    def start(self, job: BacktestJob) -> None:
        self._policy.start(job)

    def decide(self, observation: Observation) -> Choices:
        if self._used is not None:
            self.taken += [(int(slot), observation.now_s) for slot in np.flatnonzero(self._used & ~observation.up[0])]
        choice = self._policy.decide(observation)
        self._used = (choice[0] == SPOT) & observation.up[0]
        return choice


def reference_policies() -> list[MarketPolicy]:
    """The two that need no plan."""
    return [AllOnDemand(), AllSpot()]


def _window(market: SpotMarket, length_s: float, tick_s: float) -> Windows:
    """The market as a backtest sees it: one job, a row per tick."""
    times_s = np.arange(int(np.ceil(length_s / tick_s - 1e-9))) * tick_s
    price = np.array([market.spot_usd_per_h(float(at_s)) for at_s in times_s])
    return Windows(
        up=np.array([[[market.is_up(slot, float(at_s)) for slot in range(market.num_slots)] for at_s in times_s]]),
        price=price[None],
        on_demand=np.array([market.on_demand_usd_per_h]),
        pool_alpha=np.array([market.alpha]),
        pool_price=np.array([price.mean()]),
        pools=(market.name,),
        start_s=np.zeros(1),
        tick_s=tick_s,
    )
