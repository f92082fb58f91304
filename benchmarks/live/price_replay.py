"""Runs of DOLL's paper on recorded prices with drawn availability, and the policies that are compared on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from doll.errors import InfeasiblePlanError
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.traces.model import Pool
from doll.theory.cost import Prices
from doll.theory.planning import best_assignment

from benchmarks.paper.formulas import on_demand_runtime_s
from benchmarks.paper.setting import (
    CYCLE_S,
    RATE,
    REPLAN_S,
    SAMPLES,
    STEP_S,
    Mix,
    N,
    PaperAdaptive,
    chain,
    mixes,
    ticks_for,
    unequal,
)  # fmt: skip
from doll_lab.backtests.adaptive import Adaptive
from doll_lab.backtests.backtest import replay
from doll_lab.backtests.baselines import ON_DEMAND, SPOT, BacktestJob, Choices, MarketPolicy, Observation
from doll_lab.backtests.windows import Windows, clairvoyant_usd

Floats = npt.NDArray[np.float64]
SPEED_UP: Final = 2000.0
PLANNED_ALPHA: Final = 0.9
THETA_0: Final = on_demand_runtime_s(SAMPLES, RATE, N)


@dataclass(frozen=True)
class Runs:
    """One run for each seed, for every policy alike.

    Attributes:
        up: bool, shape (runs, ticks, N).
        price: USD per hour, shape (runs, ticks).
        mean_price, on_demand: of the run's zone, shape (runs,).
        rates_per_s: shape (runs, N).
    """

    up: npt.NDArray[np.bool_]
    price: Floats
    mean_price: Floats
    on_demand: Floats
    rates_per_s: Floats

    @classmethod
    def draw(cls, pools: Sequence[Pool], seeds: Sequence[int], alpha: float, *, equal: bool) -> Runs:
        """Zones in turn; the recording is run through again where it is shorter than the job, as in the paper."""
        ticks = ticks_for(THETA_0)
        ups, prices, rates = [], [], []
        chosen = [pools[seed % len(pools)] for seed in seeds]
        for seed, pool in zip(seeds, chosen, strict=True):
            rng = np.random.default_rng((53, seed))
            at_s = rng.uniform(0, pool.length_s) + np.arange(ticks, dtype=np.float64) * (STEP_S * SPEED_UP)
            prices.append(pool.price.at(pool.start_s + at_s % pool.length_s))
            rates.append(np.full(N, RATE) if equal else unequal(1, rng)[0])
            ups.append(chain(1, ticks, N, alpha, rng)[0])
        mean_price = np.array([pool.price.mean(pool.start_s, pool.end_s) for pool in chosen])
        on_demand = np.array([pool.on_demand_usd_per_hour for pool in chosen])
        return cls(np.stack(ups), np.stack(prices), mean_price, on_demand, np.stack(rates))

    def with_gain(self, gain: float) -> Runs:
        """The deviations of the price from its mean times `gain`, but never below 0 or above on-demand's."""
        mean = self.price.mean(axis=1, keepdims=True)
        return replace(self, price=np.clip(mean + gain * (self.price - mean), 0.0, self.on_demand[:, None]))

    @property
    def all_on_demand_usd(self) -> Floats:
        return SAMPLES / RATE * self.on_demand / 3600.0

    def windows(self) -> Windows:
        count = len(self.price)
        return Windows(
            self.up, self.price, self.on_demand, np.full(count, PLANNED_ALPHA), self.mean_price, ("",) * count,
            np.zeros(count), STEP_S,
        )  # fmt: skip

    def of(self, policy: MarketPolicy) -> tuple[Floats, Floats]:
        """Cost over that of all on-demand, and runtime over θ_0, shape (runs,) each."""
        windows = self.windows()
        job = BacktestJob(
            SAMPLES, self.up.shape[1] * STEP_S, self.rates_per_s, 0.0, STEP_S, self.on_demand,
            windows.pool_alpha, windows.pool_price,
        )  # fmt: skip
        outcome = replay(policy, job, windows)
        return outcome.usd / self.all_on_demand_usd, outcome.finish_s / THETA_0

    def mix(self, alpha: float, ratio: float) -> tuple[Mix, Floats]:
        """Theorem 4/5 for each run at its mean price, and its expected cost over that of all on-demand."""
        prices = [Prices(float(spot), float(full)) for spot, full in zip(self.mean_price, self.on_demand, strict=True)]
        each = [mixes(rates[None], SAMPLES, alpha, ratio * THETA_0, price)
                for rates, price in zip(self.rates_per_s, prices, strict=True)]  # fmt: skip
        return Mix(np.concatenate([spot for spot, _ in each])), np.concatenate([ratios for _, ratios in each])

    def oracle(self, ratio: float) -> Floats:
        """The least cost of a policy that knows the future, over that of all on-demand; equal rates only."""
        usd = clairvoyant_usd(
            self.windows(), rates_per_s=[RATE] * N, samples=SAMPLES, deadline_s=ratio * THETA_0
        )  # fmt: skip
        return usd / self.all_on_demand_usd


class ToTheLetter:
    """Section V-C as printed: all on spot at first, and Theorem 4/5 on what is left whenever the spot price changes.

    α is the share of the time on spot, of all slots and so far, in which a machine was there.
    """

    name = "to the letter"

    def __init__(self, ratio: float) -> None:
        self._deadline_s = ratio * THETA_0

    def start(self, job: BacktestJob) -> None:
        self._job = job
        self._choice: Choices = np.full((job.num_jobs, job.num_slots), SPOT)
        self._price = np.full(job.num_jobs, np.nan)
        self._up_ticks, self._ticks = np.zeros(job.num_jobs), np.zeros(job.num_jobs)

    def decide(self, observation: Observation) -> Choices:
        job, on_spot = self._job, self._choice == SPOT
        self._ticks += on_spot.sum(axis=1)
        self._up_ticks += (on_spot & observation.up).sum(axis=1)
        changed = (observation.price != self._price) & ~np.isnan(self._price)
        left = job.samples - observation.done
        self._price = observation.price
        for run in np.flatnonzero(changed & (left > job.samples * 1e-9)).tolist():
            prices = Prices(float(observation.price[run]), float(job.on_demand[run]))
            alpha = float(self._up_ticks[run] / max(self._ticks[run], 1.0))
            try:
                left_s = self._deadline_s - observation.now_s
                spot = best_assignment(float(left[run]), job.rates_per_s[run], alpha, left_s, prices).spot
                self._choice[run] = np.where(spot, SPOT, ON_DEMAND)
            except (InfeasiblePlanError, ValueError):  # the deadline is lost, or has passed
                self._choice[run] = ON_DEMAND
        return self._choice.copy()


def planner(ratio: float) -> MarketPolicy:
    """DOLL's own planner as it is used: it waits for spot while the slack allows, and keeps a guard and a margin."""
    return WithDeadline(PlannerSettings(samples=1, batch_size=1, deadline_s=1.0, boot_s=0.0, cycle_s=CYCLE_S), ratio)


class WithDeadline(Adaptive):
    """The planner with a deadline that is sooner than the end of the replay, asked once a minute."""

    def __init__(self, settings: PlannerSettings, ratio: float) -> None:
        super().__init__("planner", settings)
        self._deadline_s = ratio * THETA_0

    def start(self, job: BacktestJob) -> None:
        super().start(replace(job, deadline_s=self._deadline_s, tick_s=REPLAN_S))

    def decide(self, observation: Observation) -> Choices:
        if round(observation.now_s / STEP_S) % round(REPLAN_S / STEP_S) == 0:
            self._kept = super().decide(observation)
        return self._kept


POLICIES: Final[dict[str, Callable[[float], MarketPolicy]]] = {
    "theorem, every minute": lambda ratio: PaperAdaptive(ratio * THETA_0),
    "to the letter": ToTheLetter,
    "DOLL's planner": planner,
}


def saving(cost: Floats, base: Floats) -> Floats:
    """Per run, the part of `base` that is saved."""
    return 1 - cost / base
