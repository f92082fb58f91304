"""Predictions of a backtest for one job on one spot market, with the market, planner and prices of the run."""

from __future__ import annotations

import numpy as np
from doll.provisioner.planning.state import Bools, PlannerSettings
from doll.provisioner.traces.market import SpotMarket
from doll.provisioner.traces.model import Floats
from doll.theory.cost import SECONDS_PER_HOUR

from doll_lab.backtests.adaptive import ADAPTIVE, Adaptive
from doll_lab.backtests.backtest import replay
from doll_lab.backtests.baselines import (
    SPOT,
    AllOnDemand,
    AllSpot,
    BacktestJob,
    Choices,
    MarketPolicy,
    Observation,
)
from doll_lab.backtests.windows import Windows
from doll_lab.spot.spot_history import Prediction

_TICKS = 2000
_SHORTEST_TICK_S = 0.5


def predict(
    market: SpotMarket, planner: PlannerSettings, rates_per_s: Floats, *, leave_s: float = 0.0,
    policy: MarketPolicy | None = None,
) -> Prediction:  # fmt: skip
    """Replay the job under the production planner, in ticks of `planner.replan_s` (longer for a job of days).

    Arrivals have no noise, and pause while their worker is down. A slot works until its machine is preempted; the next
    machine works `planner.boot_s` after its launch. The work includes half a batch of each stream and half a group,
    which are pending when the job ends.

    Args:
        rates_per_s: λ_n, samples per second, shape (N,).
        leave_s: billed seconds of a machine with a notice while its worker leaves.
        policy: policy to replay instead of the planner.
    """
    rates = np.asarray(rates_per_s, dtype=np.float64)
    tick_s = max(planner.replan_s, planner.deadline_s / _TICKS, _SHORTEST_TICK_S)
    windows = _window(market, planner.deadline_s, tick_s)
    job = BacktestJob(
        samples=planner.samples + 0.5 * planner.batch_size * (len(rates) + (planner.group_size or 1)),
        deadline_s=planner.deadline_s, rates_per_s=rates, boot_s=planner.boot_s, tick_s=tick_s,
        on_demand=windows.on_demand, pool_alpha=windows.pool_alpha, pool_price=windows.pool_price,
    )  # fmt: skip
    recorder = _PreemptionRecorder(policy or Adaptive(ADAPTIVE, planner))
    outcome = replay(recorder, job, windows)
    finish_s, usd = float(outcome.finish_s[0]), float(outcome.usd[0])
    preempted = [(slot, at_s) for slot, at_s in recorder.preempted if at_s <= finish_s]
    with_notice = sum(not market.interval(slot, at_s - tick_s).without_notice for slot, at_s in preempted)
    usd += with_notice * min(leave_s, market.notice_s) * float(windows.pool_price[0]) / SECONDS_PER_HOUR
    return Prediction(recorder.name, finish_s, usd, int(outcome.moves[0]), len(preempted))


class _PreemptionRecorder:
    """A policy for one job; it records the preemptions of machines that it used.

    Attributes:
        preempted: (slot, time in seconds of the tick at which the machine was gone).
    """

    def __init__(self, policy: MarketPolicy) -> None:
        self.name = policy.name
        self.preempted: list[tuple[int, float]] = []
        self._policy = policy
        self._used: Bools | None = None

    def start(self, job: BacktestJob) -> None:
        self._policy.start(job)

    def decide(self, observation: Observation) -> Choices:
        if self._used is not None:
            lost = np.flatnonzero(self._used & ~observation.up[0])
            self.preempted += [(int(slot), observation.now_s) for slot in lost]
        choice = self._policy.decide(observation)
        self._used = (choice[0] == SPOT) & observation.up[0]
        return choice


def reference_policies() -> list[MarketPolicy]:
    """Return the policies all on-demand and all on spot, which need no plan."""
    return [AllOnDemand(), AllSpot()]


def _window(market: SpotMarket, length_s: float, tick_s: float) -> Windows:
    """Return the market in the form for a backtest: one job, a row per tick."""
    times_s = np.arange(int(np.ceil(length_s / tick_s - 1e-9))) * tick_s
    # A slot pays for all of its machines.
    price = np.array([market.spot_usd_per_h(float(at_s)) * market.machines_per_slot for at_s in times_s])
    return Windows(
        up=np.array([[[market.is_up(slot, float(at_s)) for slot in range(market.num_slots)] for at_s in times_s]]),
        price=price[None],
        on_demand=np.array([market.on_demand_usd_per_h * market.machines_per_slot]),
        pool_alpha=np.array([market.alpha]),
        pool_price=np.array([price.mean()]),
        pools=(market.name,),
        start_s=np.zeros(1),
        tick_s=tick_s,
    )
