"""Baselines: other market policies, to compare the planner with. All are vectorised over W jobs and N slots.

References: "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024 (greedy, Uniform Progress);
the DOLL paper, Theorems 4 and 5 (static).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from doll.errors import InfeasiblePlanError
from doll.provisioner.planning.state import Bools
from doll.theory.checks import Floats
from doll.theory.cost import Prices
from doll.theory.planning import best_assignment

Choices = npt.NDArray[np.int8]

ON_DEMAND, SPOT, OFF = np.int8(0), np.int8(1), np.int8(2)


@dataclass(frozen=True)
class BacktestJob:
    """The facts that are known before the start, for W jobs that differ only in their market.

    Attributes:
        samples: J K b, the work in samples.
        deadline_s: θ, the deadline in seconds.
        rates_per_s: λ_n, shape (N,). Shape (W, N): jobs whose streams also differ, which the baselines do not accept.
        boot_s: time from the choice of a machine until its worker works, in seconds.
        on_demand: on-demand price in USD per hour, shape (W,).
        pool_alpha, pool_price: means over the whole recordings, shape (W,); only static plans may use them.
        earlier_price: of each job, the recorded spot prices of the hours before its start, the newest last; may be
            empty.
    """

    samples: float
    deadline_s: float
    rates_per_s: Floats
    boot_s: float
    tick_s: float
    on_demand: Floats
    pool_alpha: Floats
    pool_price: Floats
    earlier_price: Sequence[Floats] = ()

    @property
    def num_jobs(self) -> int:
        return len(self.on_demand)

    @property
    def num_slots(self) -> int:
        return int(self.rates_per_s.shape[-1])

    @property
    def on_demand_s(self) -> float:
        """θ_0: seconds of the work with all slots on-demand."""
        return self.samples / float(self.rates_per_s.sum())


@dataclass(frozen=True)
class Observation:
    """The observation at one tick.

    Attributes:
        now_s: seconds since the start.
        done: learned samples, shape (W,); `done_by_slot`: per slot, shape (W, N).
        up: whether a spot machine for this slot runs or is available, shape (W, N).
        choice: last choice, shape (W, N).
        ready: whether the slot's machine has booted and works, shape (W, N).
        price: spot price in USD per hour, shape (W,).
    """

    now_s: float
    done: Floats
    done_by_slot: Floats
    up: Bools
    choice: Choices
    ready: Bools
    price: Floats


class MarketPolicy(Protocol):
    """A policy that chooses a market for every slot, tick by tick. One object serves one set of jobs."""

    name: str

    def start(self, job: BacktestJob) -> None:
        """Prepare for these jobs; called once before the first tick."""
        ...

    def decide(self, observation: Observation) -> Choices:
        """Return ON_DEMAND, SPOT (wait if there is no capacity) or OFF for every slot; shape (W, N)."""
        ...


class _Fixed:
    """A policy that chooses one market for all slots, once at the start."""

    market: ClassVar[np.int8]

    def start(self, job: BacktestJob) -> None:
        self._choice: Choices = np.full((job.num_jobs, job.num_slots), self.market)

    def decide(self, observation: Observation) -> Choices:
        return self._choice


class AllOnDemand(_Fixed):
    """The policy without risk: all slots on-demand."""

    name, market = "on-demand", ON_DEMAND


class AllSpot(_Fixed):
    """The policy that never pays on-demand prices; the market determines its delay."""

    name, market = "all-spot", SPOT


class Static(_Fixed):
    """Theorems 4 and 5, once at the start, with the mean availability and price of the recording."""

    name, market = "static", ON_DEMAND

    def start(self, job: BacktestJob) -> None:
        super().start(job)
        for index in range(job.num_jobs):
            prices = Prices(float(job.pool_price[index]), float(job.on_demand[index]))
            alpha = float(job.pool_alpha[index])
            try:
                plan = best_assignment(job.samples, job.rates_per_s, alpha, job.deadline_s, prices)
            except InfeasiblePlanError:
                continue
            self._choice[index, plan.spot] = SPOT


class _Committing:
    """A policy whose committed slots stay on-demand until the end."""

    def start(self, job: BacktestJob) -> None:
        self._job = job
        self._late = np.zeros(job.num_jobs, dtype=np.bool_)
        self._committed = np.zeros((job.num_jobs, job.num_slots), dtype=np.bool_)


class Greedy(_Committing):
    """Use spot while there is slack, and wait without capacity; then on-demand to the end (the NSDI paper's greedy)."""

    name = "greedy"

    def decide(self, observation: Observation) -> Choices:
        self._late |= no_slack(self._job, observation)
        # A slot that runs on spot stays there until it is preempted; idle slots go to on-demand permanently.
        self._committed |= self._late[:, None] & ~observation.up
        return np.where(self._committed, ON_DEMAND, SPOT)


class UniformProgress(_Committing):
    """Uniform Progress of "Can't Be Late", with the fleet as one task whose progress is that of all slots together.

    Rules: a slot that is idle and behind the line of uniform progress goes to on-demand. A slot on on-demand stays
    until it is ahead of the line by two change-over delays. A slot on spot stays until it is preempted. Otherwise a
    slot uses spot if available, or waits. Without slack, it stays on-demand to the end.
    """

    name = "uniform-progress"

    def decide(self, observation: Observation) -> Choices:
        job = self._job
        line = job.samples / job.deadline_s
        behind = observation.done < line * observation.now_s
        ahead = observation.done >= line * (observation.now_s + 2 * job.boot_s)
        return self._choose(observation, behind[:, None], ahead[:, None], no_slack(job, observation)[:, None])

    def _choose(self, observation: Observation, behind: Bools, ahead: Bools, late: Bools) -> Choices:
        self._committed |= late & ~observation.up
        on_demand = observation.choice == ON_DEMAND if observation.now_s > 0 else np.zeros_like(observation.up)
        stay = on_demand & ~ahead
        rescue = ~on_demand & ~observation.up & behind
        return np.where(self._committed | stay | rescue, ON_DEMAND, SPOT)


class UniformProgressPerSlot(UniformProgress):
    """Uniform Progress as published, for one machine; each slot applies it to its own share of the work."""

    name = "uniform-progress-per-slot"

    def decide(self, observation: Observation) -> Choices:
        job = self._job
        share = job.samples * job.rates_per_s / job.rates_per_s.sum()
        line = share / job.deadline_s
        behind = observation.done_by_slot < line * observation.now_s
        ahead = observation.done_by_slot >= line * (observation.now_s + 2 * job.boot_s)
        left_s = (share - observation.done_by_slot) / job.rates_per_s
        late = job.deadline_s - observation.now_s < left_s + 2 * job.boot_s + job.tick_s
        choice = self._choose(observation, behind, ahead, late)
        return np.where(observation.done_by_slot >= share, OFF, choice)


def no_slack(job: BacktestJob, observation: Observation) -> Bools:
    """Return whether the time left only suffices for the rest on-demand, two change-overs and the next decision."""
    left_s = (job.samples - observation.done) / job.rates_per_s.sum()
    return np.asarray(job.deadline_s - observation.now_s < left_s + 2 * job.boot_s + job.tick_s)


def baselines() -> list[MarketPolicy]:
    """Return a new object of each baseline."""
    return [AllOnDemand(), AllSpot(), Static(), Greedy(), UniformProgress(), UniformProgressPerSlot()]
