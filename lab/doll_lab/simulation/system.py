"""One simulated job: the world's workers and server, with streams, machines, and a provisioner.

A batch takes two events, its completion at the worker and the end of its gradient; samples are not simulated one by
one, since the time in which b samples arrive is one draw. Gradients carry no numbers, unless a learner
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
    """Time series of a run: one entry per update."""

    time_s: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # batches queued at the update
    up: list[int] = field(default_factory=list)  # workers up at the update
    group_s: list[float] = field(default_factory=list)  # from the group's first grant to its update
    usd: list[float] = field(default_factory=list)  # spent until the update


class Provisioner(Protocol):
    """Decides markets while the job runs."""

    every_s: float

    def decide(self, system: System) -> Sequence[bool]:
        """True for each slot that is to be preemptible from now on."""
        ...


class Gradients(Protocol):
    """Real gradients for the grants of the engine, in place of none."""

    def grant(self, grant: Grant) -> None:
        """A worker is to compute this batch at the weights of this version, which are the current ones."""
        ...

    def drop(self, grant: Grant) -> None:
        """The worker was lost: no gradient of this grant follows."""
        ...

    def apply(self, update: ApplyUpdate) -> None:
        """These batches' gradients make the next version."""
        ...


class System(TimedWorld):
    """N workers, their machines and one engine.

    Attributes:
        spot: which slots are preemptible.
        spot_available: slots for which a preemptible machine is available, used or not.
        moves: changes of market after the start.
        measures: staleness and blocked time, where they are measured.
        preemptions: slots that lost the machines that they used; those of a worker go together.
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
            spot: preemptible slots; default: none.
            preemption: when preemptible machines are available; required where a slot is or may become preemptible.
            provisioner: moves slots between the markets while the job runs.
            boot_s: from a machine's start to a working worker; it is billed.
            learner: learns from the batches that make the updates.
            measure: follow staleness and blocked time.
            policy: in place of the one that the settings name.
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
        # Where each stream stands. Its next batch is complete at `_complete_at`; `_remaining_s` of that were left when
        # arrivals paused.
        self.complete = [0] * n
        self._complete_at = [0.0] * n
        self._remaining_s = [0.0] * n
        self._batch_event = [0] * n  # number of the current one: earlier ones are void
        self.num_up = n
        self.spot_available = [True] * n
        self._booted_at = [0.0] * n
        # Money and up-time until `_accrued_at`.
        self._accrued_at = 0.0
        self._usd = 0.0
        self._up_worker_s = 0.0
        self._num_on_demand = n - sum(self.spot)
        self._num_spot_available = sum(self.spot)
        self._up_s = [0.0] * n  # of each slot, until `_up_since` where it is up
        self._up_since = [0.0] * n
        self.measures = PolicyMeasures(self.engine) if measure else None
        self._spans = [preemption.spans(slot) if preemption is not None else None for slot in range(n)]
        self._start()

    # --- what a provisioner sees ------------------------------------------------------------------------------------

    @property
    def usd(self) -> float:
        """Spent until now."""
        return self._usd + self._usd_per_s * (self.now - self._accrued_at)

    @property
    def up_worker_s(self) -> float:
        """Integral of the number of workers up, worker-seconds."""
        return self._up_worker_s + self.num_up * (self.now - self._accrued_at)

    def slot_up_s(self, worker: int) -> float:
        """Seconds for which this worker has been up."""
        return self._up_s[worker] + (self.now - self._up_since[worker] if self.up[worker] else 0.0)

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[int, float], None] | None = None) -> Trajectory:
        """Run to the end that the settings name. `progress(updates, seconds)` is called every 4096 events."""
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
        """Time to the first complete batch, in mean gaps: of b samples less the ones that are there already."""
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
        """On-demand machines cost until the end, preemptible ones only while they are there."""
        settings = self.settings
        usd_per_hour = (
            self._num_on_demand * settings.on_demand_usd_per_hour
            + self._num_spot_available * settings.spot_usd_per_hour
        )
        return usd_per_hour * settings.machines_per_worker / 3600.0

    def _accrue(self) -> None:
        """Add the cost and the up-time since the last change; call it before a change."""
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
        """Start or stop the worker as its machine starts or stops."""
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
                self.moves += self.now > 0  # the first choice is no move
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
        self._compute_event[worker] += 1  # a gradient under way is lost, and those of the same set
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
