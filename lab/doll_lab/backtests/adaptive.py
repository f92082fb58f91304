"""The production planner as a market policy of the backtest. One planner state serves a job at all ticks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from doll.provisioner.planning.pauses import MAX_HOURS, PauseSettings, before_excluded_hours, pause_reason
from doll.provisioner.planning.planner import plan, start
from doll.provisioner.planning.state import Alpha, PlannerSettings, PlannerState, SlotHistory
from doll.theory.cost import Prices

from doll_lab.backtests.baselines import (
    OFF,
    ON_DEMAND,
    SPOT,
    BacktestJob,
    Choices,
    MarketPolicy,
    Observation,
    baselines,
)

# Half a machine-hour up and half down before any observation (Jeffreys' prior, weighted in hours).
PRIOR_S = 1800.0
# In a real job, the planner runs at most every 30 s: an outage of this length may be missed, whatever the tick is.
LIVE = PlannerSettings(samples=1, batch_size=1, deadline_s=1.0, replan_s=30.0)
ADAPTIVE = "adaptive"


class Adaptive:
    """`doll.provisioner.planning.planner` as a policy: it is asked at every tick for every job.

    Availability is the up time divided by the time on spot, over all jobs: the point estimate of
    `estimators.AvailabilityEstimator`. Its interval is left out, because no rule of the planner uses it.
    """

    def __init__(
        self, name: str, settings: PlannerSettings | None = None, pauses: PauseSettings | None = None
    ) -> None:  # fmt: skip
        """
        Args:
            settings: settings of the planner. Work, deadline, boot time and tick are set from the job at the start.
            pauses: when jobs pause; times of day count from the start of a job. None: never.
        """
        self.name = name
        self._pauses = pauses
        self._given = settings or LIVE

    def start(self, job: BacktestJob) -> None:
        self._job = job
        self.settings = replace(
            self._given, samples=job.samples, batch_size=1, group_size=None, deadline_s=job.deadline_s,
            replan_s=job.tick_s, detection_delay_s=min(job.tick_s, self._given.replan_s), boot_s=job.boot_s,
        )  # fmt: skip
        shape = (job.num_jobs, job.num_slots)
        self._rates = np.broadcast_to(job.rates_per_s, shape)
        self._history = SlotHistory(shape)
        self._choice: Choices = np.full(shape, SPOT)
        self._paused = np.zeros(job.num_jobs, dtype=np.bool_)
        self._prices = [list(prices) for prices in job.earlier_price] or [[] for _ in range(job.num_jobs)]
        self._on_s = np.full(job.num_jobs, PRIOR_S)
        self._off_s = np.full(job.num_jobs, PRIOR_S)

    def decide(self, observation: Observation) -> Choices:
        job, first = self._job, observation.now_s == 0.0
        if first:
            self._history.begin(observation.up)
        self._history.observe(observation.up, observation.now_s)
        on_spot = self._choice == SPOT
        self._on_s += job.tick_s * (on_spot & observation.up).sum(axis=1)
        self._off_s += job.tick_s * (on_spot & ~observation.up).sum(axis=1)
        alpha = self._on_s / (self._on_s + self._off_s)
        if self.settings.rule == "mix":
            alpha = job.pool_alpha  # a plan that is made only once uses the stated availability
        choice = self._choice.copy()
        moved = np.zeros(choice.shape, dtype=np.bool_)
        unfinished = observation.done < job.samples * (1 - 1e-9)
        for index in np.flatnonzero(unfinished):
            state = PlannerState(
                elapsed_s=observation.now_s,
                samples_done=float(observation.done[index]),
                rates_per_s=self._rates[index],
                on_spot=on_spot[index],
                up=observation.ready[index],
                alpha=Alpha(float(alpha[index])),
                prices=Prices(float(observation.price[index]), float(job.on_demand[index])),
                **self._history.since(job=int(index)),
            )
            settings, resumes = self.settings, False
            if self._pauses is not None:
                settings, resumes = self._review_pause(state, self._pauses, int(index))
            if self._paused[index]:
                continue
            decided = start(state, settings) if first else plan(state, settings)
            choice[index] = np.where(decided.on_spot, SPOT, ON_DEMAND)
            moved[index] = decided.moved | resumes
        self._history.move(moved, observation.now_s)
        self._choice = choice
        return np.where(self._paused[:, None] & unfinished[:, None], OFF, choice)

    def _review_pause(self, state: PlannerState, pauses: PauseSettings, index: int) -> tuple[PlannerSettings, bool]:
        """Begin or end a pause of one job. Returns the planner's settings, and whether a pause has ended."""
        now_s, was_paused = state.elapsed_s, bool(self._paused[index])
        if now_s // 3600.0 > (now_s - self._job.tick_s) // 3600.0:
            self._prices[index] = [*self._prices[index], state.prices.spot_usd_per_h][-MAX_HOURS:]
        self._paused[index] = bool(
            pause_reason(
                state, self.settings, pauses, now_s, recent_usd_per_h=self._prices[index], is_paused=was_paused
            )
        )
        return before_excluded_hours(state, self.settings, pauses, now_s), was_paused and not self._paused[index]


def planners() -> list[Adaptive]:
    """Return the planner in normal use, without its guard, with the paper's rule (Theorems 4 and 5 on the rest), and
    with pauses in expensive hours."""
    return [
        Adaptive(ADAPTIVE, LIVE),
        Adaptive("adaptive-no-guard", replace(LIVE, guard=False)),
        Adaptive("adaptive-theorem", replace(LIVE, rule="theorem")),
        Adaptive("adaptive-pauses", LIVE, PauseSettings(follow_prices=True)),
    ]


def backtest_policies() -> list[MarketPolicy]:
    """Return the four forms of the planner, and the baselines for comparison."""
    return [*baselines(), *planners()]
