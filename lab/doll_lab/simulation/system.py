"""One simulated job: the workers and the server of the world, with streams, machines, and a provisioner.

A batch takes two events, its completion at the worker and the end of its gradient. Samples are not simulated one by
one, because the time in which b samples arrive is one draw. Gradients carry no numbers, unless a learner
(`benchmarks.paper.learning`) computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappush
from typing import Protocol

import numpy as np
from doll.consumers.protocol.worker_core import Compute
from doll.provisioner.traces.availability import Preemption
from doll.ps.engine.events import ApplyUpdate, EngineAction, Event
from doll.ps.engine.measures import PolicyMeasures
from doll.ps.policies import Policy
from doll.records.control import Grant

from doll_lab.simulation.randomness import Draw, compute_time, samples_time
from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.timed_world import BATCH, BOOTED, FOREVER_S, PLAN, SPAN, TimedProcess, TimedWorld


@dataclass
class Trajectory:
    """The time series of a run: one entry per update."""

    time_s: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # number of batches in the queue at the update
    up: list[int] = field(default_factory=list)  # number of workers up at the update
    group_s: list[float] = field(default_factory=list)  # seconds from the group's first grant to its update
    usd: list[float] = field(default_factory=list)  # cost until the update


class Provisioner(Protocol):
    """A provisioner that chooses markets while the job runs."""

    every_s: float

    def decide(self, system: System) -> Sequence[bool]:
        """Return, for each slot, whether it is preemptible from now on."""
        ...


class Gradients(Protocol):
    """Real gradients for the grants of the engine."""

    def grant(self, grant: Grant) -> None:
        """Compute this batch at the weights of this version, which are the current weights."""
        ...

    def drop(self, grant: Grant) -> None:
        """Drop this grant, because the worker was lost: no gradient of it follows."""
        ...

    def apply(self, update: ApplyUpdate) -> None:
        """Make the next version from these batches' gradients."""
        ...


class System(TimedWorld):
    """N workers with their machines, and one engine.

    Attributes:
        spot: for each slot, whether it is preemptible.
        spot_available: slots for which a preemptible machine is available, used or not.
        moves: number of changes of market after the start.
        measures: staleness and blocked time, if they are measured.
        preemptions: number of slots that lost the machines that they used; a worker loses its machines together.
    """

    def __init__(
        self,
        settings: SimulationSettings,
        *,
        spot: Sequence[bool] | None = None,
        preemption: Preemption | None = None,
        provisioner: Provisioner | None = None,
        boot_s: float = 0.0,
        learner: Gradients | None = None,
        measure: bool = False,
        policy: Policy | None = None,
    ) -> None:
        """
        Args:
            spot: for each slot, whether it is preemptible; None: no slot is.
            preemption: availability of preemptible machines; required if a slot is or may become preemptible.
            provisioner: provisioner that moves slots between the markets while the job runs.
            boot_s: seconds from the start of a machine until its worker works; they are billed.
            learner: learner that computes gradients of the batches of updates.
            measure: whether to measure staleness and blocked time.
            policy: policy to use instead of the policy of the settings.
        """
        n = settings.num_workers
        self._seeds = np.random.SeedSequence(settings.seed)
        self._rng = rng = np.random.default_rng(self._seeds)
        self._fill: Draw = samples_time(rng, settings.batch_size, settings.arrival_scv)
        compute = compute_time(rng, settings.compute_s, settings.compute)
        super().__init__(
            settings.policy,
            num_workers=n,
            seconds_of=lambda worker, batch: compute(),
            on={BATCH: self._on_batch, SPAN: self._on_span, BOOTED: self._update_worker, PLAN: self._on_plan},
            batch_size=settings.batch_size,
            policy=policy,
            updates=settings.updates,
            checkpoint_every_updates=settings.checkpoint_every_updates,
        )
        self.settings = settings
        self.spot = list(spot) if spot is not None else [False] * n
        if len(self.spot) != n:
            raise ValueError(f"expected {n} slots, got {len(self.spot)}")
        if preemption is None and (provisioner is not None or any(self.spot)):
            raise ValueError("expected a preemption model: some slots are or may become preemptible")
        self.trajectory = Trajectory()
        self.moves = 0
        self.preemptions = 0
        self.boot_s = boot_s
        self._provisioner = provisioner
        self._learner = learner
        self._mean_gap_s = [1.0 / rate for rate in settings.rates_per_s]
        # The position of each stream. Its next batch is complete at `_complete_at`; `_remaining_s` of this time were
        # left when arrivals paused.
        self.complete = [0] * n
        self._complete_at = [0.0] * n
        self._remaining_s = [0.0] * n
        self._batch_event = [0] * n  # number of the current event: earlier ones are void
        self.num_up = n
        self.spot_available = [True] * n
        self._booted_at = [0.0] * n
        # Cost and up time until `_accrued_at`.
        self._accrued_at = 0.0
        self._usd = 0.0
        self._up_worker_s = 0.0
        self._num_on_demand = n - sum(self.spot)
        self._num_spot_available = sum(self.spot)
        self._up_s = [0.0] * n  # up time of each slot, until `_up_since` if it is up
        self._up_since = [0.0] * n
        self.measures = PolicyMeasures(self.engine) if measure else None
        self._spans = [preemption.spans(slot) if preemption is not None else None for slot in range(n)]
        self._start()

    # --- what a provisioner sees ------------------------------------------------------------------------------------

    @property
    def usd(self) -> float:
        """The cost until now in USD."""
        return self._usd + self._usd_per_s * (self.now - self._accrued_at)

    @property
    def up_worker_s(self) -> float:
        """The integral of the number of workers up over time, in worker-seconds."""
        return self._up_worker_s + self.num_up * (self.now - self._accrued_at)

    def slot_up_s(self, worker: int) -> float:
        """Return the seconds for which this worker has been up."""
        return self._up_s[worker] + (self.now - self._up_since[worker] if self.up[worker] else 0.0)

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[int, float], None] | None = None) -> Trajectory:
        """Run to the end that the settings define. `progress(updates, seconds)` is called every 4096 events."""
        self.run_until(FOREVER_S if self.settings.seconds is None else self.settings.seconds, progress)
        return self.trajectory

    def _start(self) -> None:
        settings = self.settings
        b, n = settings.batch_size, settings.num_workers
        for worker in range(n):
            spans = self._spans[worker]
            if spans is not None:
                available, seconds = next(spans)
                self.spot_available[worker] = available
                self._queue.append((seconds, SPAN, worker, 0))
            self._remaining_s[worker] = self._first_batch_s(b) * self._mean_gap_s[worker]
            self._complete_at[worker] = self._remaining_s[worker]
            if self.spot[worker] and not self.spot_available[worker]:
                self.up[worker] = False
                self.num_up -= 1
                self._num_spot_available -= 1
            if self.up[worker] or not settings.arrivals_pause:
                self._queue.append((self._complete_at[worker], BATCH, worker, 0))
        heapify(self._queue)
        for worker in range(n):
            if self.up[worker] or not settings.replacement:
                self.start_process(worker)
        if self._provisioner is not None:
            heappush(self._queue, (0.0, PLAN, 0, 0))

    def _first_batch_s(self, b: int) -> float:
        """Return the time to the first complete batch in mean gaps, for b samples minus the samples already there."""
        if not self.settings.random_phase:
            return self._fill()
        missing = b - int(self._rng.integers(b))
        scv = self.settings.arrival_scv
        if scv == 0.0:
            return missing - float(self._rng.random())
        return float(self._rng.standard_gamma(missing / scv)) * scv

    # --- the life of a batch ----------------------------------------------------------------------------------------

    def _on_batch(self, worker: int, number: int) -> None:
        if number != self._batch_event[worker]:
            return
        self.complete[worker] += 1
        at = self.now + self._fill() * self._mean_gap_s[worker]
        self._complete_at[worker] = at
        heappush(self._queue, (at, BATCH, worker, self._batch_event[worker]))
        if self.up[worker]:
            self._read(worker, self.complete[worker])

    def perform(self, action: EngineAction) -> Event | None:
        if isinstance(action, ApplyUpdate):
            self._on_update(action)
        elif isinstance(action, Grant) and self._learner is not None:
            self._learner.grant(action)
        return super().perform(action)

    def _on_update(self, update: ApplyUpdate) -> None:
        if self._learner is not None:
            self._learner.apply(update)
        if self.measures is not None:
            self.measures.applied(update)
        trajectory = self.trajectory
        trajectory.time_s.append(self.now)
        trajectory.waiting.append(self.engine.num_waiting)
        trajectory.up.append(self.num_up)
        trajectory.group_s.append(self.now - update.sets[0].batches[0].granted_at_s)
        trajectory.usd.append(self.usd)

    # --- machines come and go ---------------------------------------------------------------------------------------

    @property
    def _usd_per_s(self) -> float:
        """Return the cost per second: on-demand machines always cost, preemptible ones only while available."""
        settings = self.settings
        usd_per_hour = (
            self._num_on_demand * settings.on_demand_usd_per_hour
            + self._num_spot_available * settings.spot_usd_per_hour
        )
        return usd_per_hour * settings.machines_per_worker / 3600.0

    def _accrue(self) -> None:
        """Add the cost and the up time since the last change. Call it before a change."""
        self._usd, self._up_worker_s, self._accrued_at = self.usd, self.up_worker_s, self.now

    def _on_span(self, worker: int, number: int) -> None:
        spans = self._spans[worker]
        assert spans is not None
        available, seconds = next(spans)
        heappush(self._queue, (self.now + seconds, SPAN, worker, 0))
        if available == self.spot_available[worker]:
            return
        self.spot_available[worker] = available
        if self.spot[worker]:
            self._accrue()
            self._num_spot_available += 1 if available else -1
            if available:
                self._boot(worker)
            else:
                self.preemptions += 1
            self._update_worker(worker)

    def _boot(self, worker: int) -> None:
        self._booted_at[worker] = self.now + self.boot_s
        if self.boot_s > 0:
            heappush(self._queue, (self._booted_at[worker], BOOTED, worker, 0))

    def _update_worker(self, worker: int, number: int = 0) -> None:
        """Start or stop the worker when its machine starts or stops."""
        available = self.spot_available[worker] if self.spot[worker] else True
        wanted = available and self.now >= self._booted_at[worker]
        if wanted != self.up[worker]:
            (self._worker_started if wanted else self._worker_lost)(worker)

    def _on_plan(self, worker: int, number: int) -> None:
        provisioner = self._provisioner
        assert provisioner is not None
        heappush(self._queue, (self.now + provisioner.every_s, PLAN, 0, 0))
        for worker, spot in enumerate(provisioner.decide(self)):
            if spot != self.spot[worker]:
                # The old machine is terminated first; then the new one boots.
                self._accrue()
                self.moves += self.now > 0  # the first choice is not a move
                self.spot[worker] = spot
                self._num_on_demand += -1 if spot else 1
                if self.spot_available[worker]:
                    self._num_spot_available += 1 if spot else -1
                if self.now > 0:
                    self._boot(worker)
                self._update_worker(worker)

    def _worker_lost(self, worker: int) -> None:
        self._accrue()
        self._up_s[worker] += self.now - self._up_since[worker]
        self.up[worker] = False
        self.num_up -= 1
        process = self.process(worker)
        self._compute_event[worker] += 1  # the current gradient and the other gradients of its set are lost
        process.stop()
        if self.settings.arrivals_pause:
            self._batch_event[worker] += 1
            self._remaining_s[worker] = self._complete_at[worker] - self.now
        if self.settings.replacement:
            if self._learner is not None:
                for order in process.orders:
                    assert isinstance(order, Compute)
                    self._learner.drop(order.grant)
            self.processes[worker].clear()
            self.do(process, process.protocol.leave("preempted"))

    def _worker_started(self, worker: int) -> None:
        self._accrue()
        self._up_since[worker] = self.now
        self.up[worker] = True
        self.num_up += 1
        if self.settings.arrivals_pause:
            at = self.now + self._remaining_s[worker]
            self._complete_at[worker] = at
            heappush(self._queue, (at, BATCH, worker, self._batch_event[worker]))
        if self.settings.replacement:
            self.start_process(worker)
        self._go_on(self.process(worker))
        self._read(worker, self.complete[worker])

    def start_process(self, worker: int, incarnation: int = 0) -> TimedProcess:
        process = super().start_process(worker, incarnation)
        if self.measures is not None:
            self.measures.joined(worker)
        return process
