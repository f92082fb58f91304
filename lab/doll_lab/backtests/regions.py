"""Backtests of jobs that may use pools of several regions: windows, the replay, the optimum, and the planner."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from doll.errors import ConfigError
from doll.provisioner.planning.regions import NOWHERE, LifetimeEstimator, Region, SpotRegions, Traffic, plan_regions
from doll.provisioner.planning.state import Alpha, Bools, PlannerState, SlotHistory
from doll.provisioner.traces.availability import slots_up
from doll.provisioner.traces.model import Floats, Pool, TraceSet
from doll.provisioner.traces.recordings import LeftOut, no_recordings_error
from doll.theory.cost import Prices

from doll_lab.backtests.adaptive import ADAPTIVE, LIVE, PRIOR_S
from doll_lab.backtests.backtest import BacktestSettings, Outcome, job_s
from doll_lab.backtests.optimum import boot_ticks, fleet_cost, slot_costs

Machines = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RegionSettings:
    """The regions of a job: their number, the price of a GB that leaves one, and the traffic of the policy."""

    count: int
    egress_usd_per_gb: float
    traffic: Traffic


@dataclass(frozen=True)
class RegionJobs:
    """W jobs of T ticks on N equal slots, each with R pools as its regions. The first pool is the home region.

    Attributes:
        up: whether a spot machine for this slot is available in the region, bool, shape (W, R, T, N).
        usd: USD per hour of a spot machine with its traffic, shape (W, R, T).
        on_demand: USD per hour of an on-demand machine with its traffic, in the cheapest region, shape (W,).
        home_on_demand: USD per hour of an on-demand machine at home, shape (W,).
        start_usd: traffic of a start in each region and, last, on-demand, shape (W, R + 1).
        work: working ticks of all slots that finish the job.
    """

    up: Bools
    usd: Floats
    on_demand: Floats
    home_on_demand: Floats
    start_usd: Floats
    tick_s: float
    boot_s: float
    deadline_s: float
    work: int

    @property
    def num_jobs(self) -> int:
        return len(self.up)

    @property
    def num_regions(self) -> int:
        return int(self.up.shape[1])

    @property
    def num_slots(self) -> int:
        return int(self.up.shape[3])

    @property
    def on_demand_s(self) -> float:
        """θ_0: seconds of the work with all slots on-demand."""
        return self.work / self.num_slots * self.tick_s

    def at_home(self) -> RegionJobs:
        """Return the same jobs in their home region only."""
        none = np.zeros((self.num_jobs, 2))
        return replace(self, up=self.up[:, :1], usd=self.usd[:, :1], on_demand=self.home_on_demand, start_usd=none)


def regions_of(trace_set: TraceSet, count: int) -> list[list[Pool]]:
    """Return the pools of each kind of machine that has `count` pools or more; empty without a kind or with fewer."""
    kinds: dict[str, list[Pool]] = {}
    for pool in trace_set.pools:
        kinds.setdefault(pool.machine, []).append(pool)
    return [pools for pools in kinds.values() if len(pools) >= count]


def sample_jobs(trace_set: TraceSet, ratio: float, settings: BacktestSettings, regions: RegionSettings) -> RegionJobs:
    """Draw jobs: the kinds of machines in turn, their regions and start times at random; the same for all deadlines.
    Work, deadline and window are rounded to whole ticks. Raises ConfigError if the recordings have too few regions."""
    rng = np.random.default_rng((settings.seed, zlib.crc32(trace_set.name.encode()), regions.count))
    tick_s, count, slots = settings.tick_s, regions.count, len(settings.rates_per_s)
    window_s, on_demand_s = job_s(trace_set, settings)
    ticks, work = int(window_s / tick_s + 1e-9), int(on_demand_s / tick_s + 1e-9)
    kinds = _kinds(trace_set, count, ticks * tick_s)
    if not kinds:
        raise ConfigError(f"trace set {trace_set.name}: {few_regions(trace_set, settings, count)}")
    ups: list[Bools] = []
    usd, on_demand, home, starts = [], [], [], []
    while len(ups) < settings.windows:
        pools = kinds[len(ups) % len(kinds)]
        chosen = [pools[index] for index in rng.permutation(len(pools))[:count]]
        first_s, last_s = max(pool.start_s for pool in chosen), min(pool.end_s for pool in chosen)
        if last_s - first_s < ticks * tick_s:
            continue
        times = rng.uniform(first_s, last_s - ticks * tick_s) + np.arange(ticks) * tick_s
        where = [
            Region(pool.name, Prices(float(pool.price.values[0]), pool.on_demand_usd_per_hour),
                   regions.egress_usd_per_gb) for pool in chosen
        ]  # fmt: skip
        rate = settings.rates_per_s[0]
        egress = [each.egress_usd_per_h(where[0], regions.traffic, rate) for each in where]
        of_start = [each.start_usd(where[0], regions.traffic) for each in where]
        dear = [pool.on_demand_usd_per_hour + more for pool, more in zip(chosen, egress, strict=True)]
        ups.append(np.stack([slots_up(pool, times, slots, rng) for pool in chosen]))
        usd.append(np.stack([pool.price.at(times) + more for pool, more in zip(chosen, egress, strict=True)]))
        on_demand.append(min(dear))
        home.append(dear[0])
        starts.append([*of_start, of_start[int(np.argmin(dear))]])
    used = int(ratio * work + 1e-9)
    return RegionJobs(
        up=np.stack(ups)[:, :, :used], usd=np.stack(usd)[:, :, :used], on_demand=np.array(on_demand),
        home_on_demand=np.array(home), start_usd=np.array(starts), tick_s=tick_s, boot_s=settings.boot_s,
        deadline_s=used * tick_s, work=work * slots,
    )  # fmt: skip


def _overlap_s(pools: Sequence[Pool], count: int) -> float:
    """Return the longest time that `count` of the pools cover together."""
    begun = [[other.end_s for other in pools if other.start_s <= pool.start_s] for pool in pools]
    return max(
        sorted(ends, reverse=True)[count - 1] - pool.start_s
        for ends, pool in zip(begun, pools, strict=True)
        if len(ends) >= count
    )


@dataclass(frozen=True)
class Sight:
    """What a policy sees at one tick. A machine is the number of a region, R for on-demand, or `NOWHERE`.

    Attributes:
        done: working ticks done, shape (W,); `done_by_slot`: per slot, shape (W, N).
        up, usd: availability and price of spot with traffic now, shapes (W, R, N) and (W, R).
        machine: machine of the slot in the last tick, shape (W, N).
        ready: whether this machine had booted, shape (W, N).
    """

    tick: int
    now_s: float
    done: Floats
    done_by_slot: Floats
    up: Bools
    usd: Floats
    machine: Machines
    ready: Bools


class RegionPolicy(Protocol):
    """A policy that chooses a machine for every slot, tick by tick. One object serves one set of jobs."""

    name: str

    def start(self, jobs: RegionJobs) -> None:
        """Prepare for these jobs."""
        ...

    def decide(self, sight: Sight) -> Machines:
        """Return the machine of every slot; spot in a region without capacity is `NOWHERE`; shape (W, N)."""
        ...


def replay_regions(policy: RegionPolicy, jobs: RegionJobs) -> Outcome:
    """Run all jobs under one policy, as `backtest.replay` does in one region. A start in another region also costs its
    traffic. A move is a start of a machine after the first tick, unless the slot's own region has lost its machine."""
    count, _, ticks, slots = jobs.up.shape
    job, slot = np.arange(count)[:, None], np.arange(slots)
    boot = boot_ticks(jobs.boot_s, jobs.tick_s)
    tick_h = jobs.tick_s / 3600.0
    by_slot, boot_left = np.zeros((count, slots)), np.zeros((count, slots), dtype=np.int64)
    machine = np.full((count, slots), NOWHERE)
    usd, moves, finish_s = np.zeros(count), np.zeros(count), np.full(count, np.inf)
    policy.start(jobs)
    for tick in range(ticks):
        done, running = by_slot.sum(axis=1), np.isinf(finish_s)
        if not running.any():
            break
        up, price = jobs.up[:, :, tick], jobs.usd[:, :, tick]
        ready = (machine != NOWHERE) & (boot_left == 0)
        wanted = policy.decide(Sight(tick, tick * jobs.tick_s, done, by_slot, up, price, machine, ready))
        everywhere = np.concatenate([up, np.ones((count, 1, slots), np.bool_)], axis=1)
        wanted = np.where((wanted != NOWHERE) & everywhere[job, wanted, slot], wanted, NOWHERE)
        started = (wanted != machine) & (wanted != NOWHERE)
        if tick:
            boot_left = np.where(started, boot, boot_left)
            starts = np.where(started, jobs.start_usd[job, wanted], 0.0).sum(axis=1)
            usd += np.where(running, starts, 0.0)
            moves += np.where(running, started.sum(axis=1), 0)
        machine = wanted
        works = (machine != NOWHERE) & (boot_left == 0)
        boot_left = np.maximum(boot_left - 1, 0)
        gained, left = works.sum(axis=1), jobs.work - done
        finishing = running & (gained >= left - 1e-9) & (gained > 0)
        share = np.where(finishing, left / np.maximum(gained, 1), 1.0)
        prices = np.concatenate([price, jobs.on_demand[:, None]], axis=1)
        burn = np.where(machine == NOWHERE, 0.0, prices[job, machine]).sum(axis=1)
        usd += np.where(running, burn * share * tick_h, 0.0)
        finish_s = np.where(finishing, (tick + share) * jobs.tick_s, finish_s)
        by_slot = by_slot + works * np.where(running, share, 0.0)[:, None]
    late = np.isinf(finish_s)
    late_s = np.where(late, (jobs.work - by_slot.sum(axis=1)) / slots * jobs.tick_s + jobs.boot_s, 0.0)
    usd += late_s * slots * jobs.on_demand / 3600.0
    return Outcome(np.where(late, jobs.deadline_s + late_s, finish_s), usd, moves)


def optimum_usd(jobs: RegionJobs) -> Floats:
    """Return the cost of the clairvoyant optimum of each job, shape (W,)."""
    tick_h, boot = jobs.tick_s / 3600.0, boot_ticks(jobs.boot_s, jobs.tick_s)
    return np.array([
        fleet_cost(
            slot_costs(jobs.up[job], jobs.usd[job] * tick_h, jobs.on_demand[job] * tick_h, jobs.start_usd[job], boot),
            jobs.work,
        )
        for job in range(jobs.num_jobs)
    ])  # fmt: skip


class AdaptiveRegions:
    """`doll.provisioner.planning.regions.plan_regions` as a policy: it is asked at every tick for every job."""

    def __init__(self, name: str = ADAPTIVE) -> None:
        self.name = name

    def start(self, jobs: RegionJobs) -> None:
        self._jobs = jobs
        shape = (jobs.num_jobs, jobs.num_slots)
        self.settings = replace(
            LIVE, samples=float(jobs.work) * jobs.tick_s, batch_size=1, group_size=None, deadline_s=jobs.deadline_s,
            replan_s=jobs.tick_s, detection_delay_s=min(jobs.tick_s, LIVE.replan_s), boot_s=jobs.boot_s,
        )  # fmt: skip
        self._history = SlotHistory(shape)
        self._lives = [LifetimeEstimator(jobs.num_regions) for _ in range(jobs.num_jobs)]
        self._on_spot = np.ones(shape, dtype=np.bool_)
        self._on_s, self._off_s = np.full(jobs.num_jobs, PRIOR_S), np.full(jobs.num_jobs, PRIOR_S)

    def decide(self, sight: Sight) -> Machines:
        jobs, first = self._jobs, sight.tick == 0
        available = sight.up & (sight.usd < jobs.on_demand[:, None])[:, :, None]
        anywhere = available.any(axis=1)
        if first:
            self._history.begin(anywhere)
        self._history.observe(anywhere, sight.now_s)
        self._on_s += jobs.tick_s * (self._on_spot & anywhere).sum(axis=1) * (not first)
        self._off_s += jobs.tick_s * (self._on_spot & ~anywhere).sum(axis=1) * (not first)
        choice = np.full(self._on_spot.shape, jobs.num_regions)
        rates = np.ones(jobs.num_slots)
        for job in np.flatnonzero(sight.done < jobs.work):
            on_spot = self._on_spot[job]
            region = np.where(on_spot, sight.machine[job], NOWHERE)
            self._lives[job].observe(available[job], jobs.tick_s)
            alive = (region != NOWHERE) & available[job][region, np.arange(jobs.num_slots)]
            spot = SpotRegions(
                usd_per_h=np.repeat(sight.usd[job][:, None], jobs.num_slots, axis=1), available=available[job],
                start_usd=jobs.start_usd[job, :-1], life_s=self._lives[job].life_s,
            )  # fmt: skip
            state = PlannerState(
                elapsed_s=sight.now_s, samples_done=float(sight.done[job]) * jobs.tick_s, rates_per_s=rates,
                on_spot=on_spot, up=sight.ready[job] & (alive | ~on_spot),
                alpha=Alpha(float(self._on_s[job] / (self._on_s[job] + self._off_s[job]))),
                prices=Prices(0.0, float(jobs.on_demand[job])), **self._history.since(job=int(job)),
            )  # fmt: skip
            decided = plan_regions(state, self.settings, spot, region, first=first)
            choice[job] = np.where(decided.on_spot, decided.region, jobs.num_regions)
            started = (choice[job] != sight.machine[job]) & (choice[job] != NOWHERE) & (not first)
            self._history.moved_s[job, started] = sight.now_s
            self._on_spot[job] = decided.on_spot
        return choice


def few_regions(trace_set: TraceSet, settings: BacktestSettings, count: int) -> str:
    """Return why no job of a set can have so many regions; "" if one can."""
    window_s = int(job_s(trace_set, settings)[0] / settings.tick_s + 1e-9) * settings.tick_s
    if _kinds(trace_set, count, window_s):
        return ""
    most = max(len(pools) for pools in regions_of(trace_set, 1))
    return (
        f"expected {count} pools of one kind of machine that cover the same {window_s:.0f} s, for --regions {count}; "
        f"got {most} of one kind"
    )


def with_regions(
    folder: Path, sets: Sequence[TraceSet], skipped: Sequence[LeftOut], settings: BacktestSettings, count: int
) -> tuple[list[TraceSet], list[LeftOut]]:
    """Return the sets with enough regions, and everything that is skipped. Raises ConfigError if there is no set."""
    reasons = {each.name: few_regions(each, settings, count) for each in sets}
    left_out = [*skipped, *(LeftOut(f"trace set {name}", why) for name, why in reasons.items() if why)]
    chosen = [each for each in sets if not reasons[each.name]]
    if not chosen:
        raise no_recordings_error(folder, left_out)
    return chosen, left_out


def _kinds(trace_set: TraceSet, count: int, window_s: float) -> list[list[Pool]]:
    return [pools for pools in regions_of(trace_set, count) if _overlap_s(pools, count) >= window_s]
