"""What a backtest says of one job on one spot market, before it is run there: the same market, planner and money."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from doll.provisioner.market import SpotMarket
from doll.provisioner.rivals import AllOnDemand, AllSpot, Job, MarketPolicy
from doll.provisioner.state import PlannerSettings
from doll.provisioner.traces import Floats
from doll.simulation.adaptive import ADAPTIVE, Adaptive
from doll.simulation.backtest import replay
from doll.simulation.windows import Windows

_TICKS = 2000
_SHORTEST_TICK_S = 0.5


@dataclass(frozen=True)
class Prediction:
    """One policy on one market. Seconds of the wall since the market's opening.

    Attributes:
        finish_s: when the work is done.
        cost_usd: until then.
        moves: slots that changed their market.
    """

    policy: str
    finish_s: float
    cost_usd: float
    moves: int


def predict(
    market: SpotMarket, planner: PlannerSettings, rates_per_s: Floats, *, policy: MarketPolicy | None = None
) -> Prediction:
    """Replay the job tick by tick, `planner.replan_s` long (longer for a job of days), under the planner as it is live.

    Arrivals have no noise here, and pause while their worker is down. A slot whose machine is taken works until then;
    the next one works `planner.boot_s` after it was launched.

    Args:
        rates_per_s: λ_n, shape (N,).
        policy: another policy in place of the planner.
    """
    rates = np.asarray(rates_per_s, dtype=np.float64)
    tick_s = max(planner.replan_s, planner.deadline_s / _TICKS, _SHORTEST_TICK_S)
    windows = _window(market, planner.deadline_s, tick_s)
    job = Job(
        samples=planner.samples, deadline_s=planner.deadline_s, rates_per_s=rates, boot_s=planner.boot_s,
        tick_s=tick_s, on_demand=windows.on_demand, pool_alpha=windows.pool_alpha, pool_price=windows.pool_price,
    )  # fmt: skip
    chosen = policy or Adaptive(ADAPTIVE, planner)
    outcome = replay(chosen, job, windows)
    return Prediction(chosen.name, float(outcome.finish_s[0]), float(outcome.usd[0]), int(outcome.moves[0]))


def rivals() -> list[MarketPolicy]:
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
