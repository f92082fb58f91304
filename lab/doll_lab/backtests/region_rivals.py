"""Rivals of the planner in several regions.

References: "Can't Be Late", NSDI 2024 (greedy, Uniform Progress), here with the cheapest region that has a machine;
SkyNomad, arXiv 2601.06520, after its summary: predicted lifetimes, the cost of a move and the pressure of the deadline
in one value; arXiv 2512.20967, after its summary: a policy is selected online from a pool of parametrised policies. The
formulas of the last two were not available. The selection is by exponentiated gradient, which has its regret bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from doll.provisioner.planning.regions import NOWHERE, LifetimeEstimator
from doll.provisioner.planning.state import Bools
from doll.theory.checks import Floats

from doll_lab.backtests.backtest import Outcome
from doll_lab.backtests.baselines import (
    ON_DEMAND,
    SPOT,
    AllOnDemand,
    AllSpot,
    BacktestJob,
    Choices,
    Greedy,
    MarketPolicy,
    Observation,
    UniformProgress,
    UniformProgressPerSlot,
    no_slack,
)
from doll_lab.backtests.regions import Machines, RegionJobs, RegionPolicy, Sight


def job_of(jobs: RegionJobs) -> BacktestJob:
    """Return the jobs as baselines of one region see them: a sample is a second of a slot's work."""
    return BacktestJob(
        samples=float(jobs.work) * jobs.tick_s, deadline_s=jobs.deadline_s, rates_per_s=np.ones(jobs.num_slots),
        boot_s=jobs.boot_s, tick_s=jobs.tick_s, on_demand=jobs.on_demand,
        pool_alpha=jobs.up.any(axis=1).mean(axis=(1, 2)), pool_price=jobs.usd.min(axis=1).mean(axis=1),
    )  # fmt: skip


@dataclass(kw_only=True)
class CheapestRegion:
    """A policy of one region, applied to several: a slot stays in its region until it is interrupted, and then goes to
    the cheapest region that has a machine for at most `most` of the on-demand price."""

    market: MarketPolicy
    most: float = 1.0
    name: str = ""
    _job: BacktestJob = field(init=False)
    _choice: Choices = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.name or self.market.name

    def start(self, jobs: RegionJobs) -> None:
        self._job = job_of(jobs)
        self._choice = np.full((jobs.num_jobs, jobs.num_slots), SPOT)
        self.market.start(self._job)

    def decide(self, sight: Sight) -> Machines:
        usable = sight.up & (sight.usd <= self.most * self._job.on_demand[:, None])[:, :, None]
        tick_s = self._job.tick_s
        self._choice = self.market.decide(Observation(
            sight.now_s, sight.done * tick_s, sight.done_by_slot * tick_s, np.asarray(usable.any(axis=1)), self._choice,
            sight.ready, np.where(usable.any(axis=2), sight.usd, np.inf).min(axis=1),
        ))  # fmt: skip
        spot = np.where(running(sight, usable), sight.machine, cheapest(sight, usable))
        on_spot = np.where(self._choice == SPOT, spot, NOWHERE)
        return np.where(self._choice == ON_DEMAND, sight.up.shape[1], on_spot)


def running(sight: Sight, usable: Bools) -> Bools:
    """Return the slots whose spot machine still runs, shape (W, N)."""
    count, regions, slots = usable.shape
    region = np.where(sight.machine < regions, sight.machine, NOWHERE)
    here: Bools = (region != NOWHERE) & usable[np.arange(count)[:, None], region, np.arange(slots)]
    return here


def cheapest(sight: Sight, usable: Bools) -> Machines:
    """Return the cheapest usable region of each slot, `NOWHERE` if there is none, shape (W, N)."""
    best = np.argmin(np.where(usable, sight.usd[:, :, None], np.inf), axis=1)
    return np.where(usable.any(axis=1), best, NOWHERE)


class SkyNomadLike:
    """The machine with the largest value of its progress minus its cost, per hour; none if all are negative.

    The value of an hour of progress is the on-demand price times the share of the time left that the work needs. A
    start loses a boot and its traffic per predicted lifetime. Without slack, slots stay on-demand to the end.
    """

    name = "skynomad-like"

    def start(self, jobs: RegionJobs) -> None:
        self._jobs, self._job = jobs, job_of(jobs)
        self._lives = [LifetimeEstimator(jobs.num_regions) for _ in range(jobs.num_jobs)]
        self._committed = np.zeros((jobs.num_jobs, jobs.num_slots), dtype=np.bool_)

    def decide(self, sight: Sight) -> Machines:
        jobs, count = self._jobs, self._jobs.num_regions
        for life, up in zip(self._lives, sight.up, strict=True):
            life.observe(up, jobs.tick_s)
        life_s = np.stack([life.life_s for life in self._lives])  # (W, R)
        runs = running(sight, sight.up)
        observed = Observation(
            sight.now_s, sight.done * jobs.tick_s, sight.done_by_slot, np.asarray(sight.up.any(axis=1)),
            np.empty(0, np.int8), sight.ready, sight.usd.min(axis=1),
        )  # fmt: skip
        self._committed |= no_slack(self._job, observed)[:, None] & ~runs
        left_s = np.maximum(jobs.deadline_s - sight.now_s, 1.0)
        needed_s = (jobs.work - sight.done) / jobs.num_slots * jobs.tick_s + 2 * jobs.boot_s
        value = (jobs.on_demand * np.minimum(1.0, needed_s / left_s))[:, None]
        new = value * (1 - np.minimum(1.0, jobs.boot_s / life_s)) - sight.usd - jobs.start_usd[:, :-1] * 3600.0 / life_s
        gain = np.where(sight.up, new[:, :, None], -np.inf)
        stays = runs[:, None] & (sight.machine[:, None] == np.arange(count)[:, None])
        gain = np.where(stays, (value - sight.usd)[:, :, None], gain)
        best = np.argmax(gain, axis=1)
        spot = np.where(gain.max(axis=1) > 0, best, NOWHERE)
        return np.where(self._committed, count, spot)


class PacedProgress(UniformProgress):
    """Uniform Progress with a line that is `pace` times as steep, one parametrised policy of the pool."""

    def __init__(self, pace: float) -> None:
        self._pace = pace

    def decide(self, observation: Observation) -> Choices:
        job = self._job
        line = self._pace * job.samples / job.deadline_s
        behind = observation.done < line * observation.now_s
        ahead = observation.done >= line * (observation.now_s + 2 * job.boot_s)
        return self._choose(observation, behind[:, None], ahead[:, None], no_slack(job, observation)[:, None])


def pool() -> list[RegionPolicy]:
    """Return the pool of the selector: 4 paces with 2 limits of the spot price, and greedy."""
    paced = [CheapestRegion(market=PacedProgress(pace), most=most)
             for pace in (0.8, 0.9, 1.0, 1.1) for most in (0.7, 1.0)]  # fmt: skip
    return [*paced, CheapestRegion(market=Greedy())]


def selected(
    outcomes: Sequence[Outcome], full_usd: Floats, deadline_s: float, rng: np.random.Generator
) -> tuple[Outcome, Outcome]:
    """Return the outcome of the online selection, one job after the other, and that of the best policy in hindsight.

    The policy of a job is drawn by the weights. After the job, each weight is multiplied by exp(η u): u is the saving
    of its policy on this job as a share of all on-demand, 0 if late, and η = sqrt(8 ln P / W) for P policies and W
    jobs.
    """
    usd, finish_s, moves = (
        np.stack([getattr(each, name) for each in outcomes]) for name in ("usd", "finish_s", "moves")
    )
    gain = np.where(finish_s <= deadline_s * (1 + 1e-9), np.clip(1 - usd / full_usd, 0.0, 1.0), 0.0)  # (P, W)
    policies, count = gain.shape
    log_weights, chosen = np.zeros(policies), np.zeros(count, dtype=np.int64)
    for job in range(count):
        weights = np.exp(log_weights - log_weights.max())
        chosen[job] = rng.choice(policies, p=weights / weights.sum())
        log_weights += np.sqrt(8 * np.log(policies) / count) * gain[:, job]
    best, jobs = np.full(count, int(np.argmax(gain.sum(axis=1)))), np.arange(count)
    online, hindsight = (Outcome(finish_s[at, jobs], usd[at, jobs], moves[at, jobs]) for at in (chosen, best))
    return online, hindsight


def rivals() -> list[RegionPolicy]:
    """Return a new object of each rival, without the selector."""
    markets: list[MarketPolicy] = [AllOnDemand(), AllSpot(), Greedy(), UniformProgress(), UniformProgressPerSlot()]
    return [*(CheapestRegion(market=market) for market in markets), SkyNomadLike()]
