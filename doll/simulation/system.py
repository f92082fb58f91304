"""One simulated job: the production engine and policy, driven by an event queue in virtual time.

A batch takes two events, its completion at the worker and the end of its gradient; samples are not simulated one by
one, since the time in which b samples arrive is one draw. The engine gets the records of a real job: Join, Announce,
Push and Leave. There is no blob to fetch, and a checkpoint is durable immediately. Gradients carry no numbers, unless a
learner (`benchmarks.paper.learning`) computes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

import msgspec
import numpy as np

from doll.config import StopConfig
from doll.config.roles import MAX_SET_S
from doll.provisioner.traces.availability import Preemption
from doll.ps.engine.engine import Engine
from doll.ps.engine.events import (
    ApplyUpdate,
    CheckpointStored,
    EngineAction,
    Event,
    FetchGradient,
    Finish,
    StoreCheckpoint,
)
from doll.ps.engine.measures import PolicyMeasures
from doll.ps.engine.state import EngineSettings
from doll.ps.policies import Policy, make_policy
from doll.records.control import Announce, Grant, Join, Leave, NewVersion, Push, PushedBatch, Welcome
from doll.simulation.randomness import Draw, compute_time, samples_time
from doll.simulation.settings import SimulationSettings
from doll.simulation.trajectory import Trajectory

# Larger than any simulated queue: workers of the simulation are not held back, so that an unstable queue shows.
_UNBOUNDED = 1 << 40
_FOREVER_S = 1e18
_TERM = 1

_BATCH, _COMPUTED, _SPAN, _BOOTED, _PLAN, MESSAGE = range(6)


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


class System:
    """N workers, their machines and one engine.

    Attributes:
        now: virtual seconds since the start.
        spot: which slots are preemptible.
        up: which workers are up.
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
        self.settings = settings
        self.now = 0.0
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
        self._seeds = np.random.SeedSequence(settings.seed)
        rng = np.random.default_rng(self._seeds)
        self._rng = rng
        self._fill: Draw = samples_time(rng, settings.batch_size, settings.arrival_scv)
        self._compute: Draw = compute_time(rng, settings.compute_s, settings.compute)
        self._mean_gap_s = [1.0 / rate for rate in settings.rates_per_s]
        # Where each stream stands. Its next batch is complete at `_complete_at`; `_remaining_s` of that were left when
        # arrivals paused.
        self.complete = [0] * n
        self._announced = [0] * n
        self._complete_at = [0.0] * n
        self._remaining_s = [0.0] * n
        self._batch_event = [0] * n  # number of the current one: earlier ones are void
        # What each worker computes: grants in order; of the first, the batches that are done and not pushed yet.
        self._granted: list[deque[Grant]] = [deque() for _ in range(n)]
        self._done: list[list[PushedBatch]] = [[] for _ in range(n)]
        self._set_begun_s = [0.0] * n
        self._batch_begun_s = [0.0] * n
        self._ready_at_s: dict[tuple[int, int], float] = {}  # when a batch was complete, while that is measured
        # The weights that each worker has, and the newest that it was sent.
        self._cached = [-1] * n
        self._offered = [-1] * n
        self._compute_event = [0] * n  # as above
        self.up = [True] * n
        self.num_up = n
        self.spot_available = [True] * n
        self._booted_at = [0.0] * n
        self._session = [0] * n
        self._num_processes = [0] * n
        # Money and up-time until `_accrued_at`.
        self._accrued_at = 0.0
        self._usd = 0.0
        self._up_worker_s = 0.0
        self._num_on_demand = n - sum(self.spot)
        self._num_spot_available = sum(self.spot)
        self._up_s = [0.0] * n  # of each slot, until `_up_since` where it is up
        self._up_since = [0.0] * n
        self._queue: list[tuple[float, int, int, int]] = []  # (time, kind, worker, number)
        engine_settings = EngineSettings(
            num_workers=n, records_per_batch=settings.batch_size, max_pending_batches=_UNBOUNDED, lease_s=_FOREVER_S,
            grant_timeout_s=_FOREVER_S, checkpoint_every_updates=settings.checkpoint_every_updates,
            checkpoint_every_s=_FOREVER_S, stop=StopConfig(updates=settings.updates),
        )  # fmt: skip
        self.engine = Engine(
            engine_settings, policy or make_policy(settings.policy), term=_TERM, now=0.0, origins=[0] * n
        )
        self.measures = PolicyMeasures(self.engine) if measure else None
        self._spans = [preemption.spans(slot) if preemption is not None else None for slot in range(n)]
        self._start()

    # --- what a provisioner sees ------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """J: updates applied."""
        return self.engine.version

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
        end_s = self.settings.seconds if self.settings.seconds is not None else _FOREVER_S
        queue, engine = self._queue, self.engine
        count = 0
        while queue and engine.finished is None:
            time, kind, worker, number = heappop(queue)
            if time > end_s:
                self.now = end_s
                break
            self.now = time
            if kind == _BATCH:
                if number == self._batch_event[worker]:
                    self._on_batch(worker)
            elif kind == _COMPUTED:
                if number == self._compute_event[worker]:
                    self._on_computed(worker)
            elif kind == _SPAN:
                self._on_span(worker)
            elif kind == _BOOTED:
                self._update_worker(worker)
            elif kind == _PLAN:
                self._on_plan()
            else:
                self._on_message(worker, number)
            count += 1
            if progress is not None and not count & 0xFFF:
                progress(engine.version, time)
        if progress is not None:
            progress(engine.version, self.now)
        return self.trajectory

    def _start(self) -> None:
        settings = self.settings
        b, n = settings.batch_size, settings.num_workers
        for worker in range(n):
            spans = self._spans[worker]
            if spans is not None:
                available, seconds = next(spans)
                self.spot_available[worker] = available
                self._queue.append((seconds, _SPAN, worker, 0))
            self._remaining_s[worker] = self._first_batch_s(b) * self._mean_gap_s[worker]
            self._complete_at[worker] = self._remaining_s[worker]
            if self.spot[worker] and not self.spot_available[worker]:
                self.up[worker] = False
                self.num_up -= 1
                self._num_spot_available -= 1
            if self.up[worker] or not settings.arrivals_pause:
                self._queue.append((self._complete_at[worker], _BATCH, worker, 0))
        heapify(self._queue)
        for worker in range(n):
            if self.up[worker] or not settings.replacement:
                self._join(worker)
        if self._provisioner is not None:
            heappush(self._queue, (0.0, _PLAN, 0, 0))

    def _first_batch_s(self, b: int) -> float:
        """Time to the first complete batch, in mean gaps: of b samples less the ones that are there already."""
        if not self.settings.random_phase:
            return self._fill()
        missing = b - int(self._rng.integers(b))
        scv = self.settings.arrival_scv
        if scv == 0.0:
            return missing - float(self._rng.random())
        return float(self._rng.standard_gamma(missing / scv)) * scv

    def _handle(self, event: Event) -> list[EngineAction]:
        actions = self.engine.handle(event, self.now)
        for action in actions:
            kind = type(action)
            if kind is Grant:
                self._on_grant(action)  # type: ignore[arg-type]
            elif kind is ApplyUpdate:
                self._on_update(action)  # type: ignore[arg-type]
            elif kind is NewVersion:
                self._on_offer(action)  # type: ignore[arg-type]
            elif kind is FetchGradient:
                self._on_fetch(action)  # type: ignore[arg-type]
            elif kind is StoreCheckpoint:
                self._handle(CheckpointStored(version=action.version))  # type: ignore[union-attr]
            elif kind is Finish:
                break
        return actions

    # --- the life of a batch ----------------------------------------------------------------------------------------

    def _on_batch(self, worker: int) -> None:
        if self.measures is not None:
            self._ready_at_s[worker, self.complete[worker]] = self.now
        self.complete[worker] += 1
        at = self.now + self._fill() * self._mean_gap_s[worker]
        self._complete_at[worker] = at
        heappush(self._queue, (at, _BATCH, worker, self._batch_event[worker]))
        if self.up[worker]:
            self._announce(worker)

    def _announce(self, worker: int) -> None:
        first, until = self._announced[worker], self.complete[worker]
        if first < until:
            self._announced[worker] = until
            self._handle(Announce(worker=worker, session=self._session[worker], first=first, until=until))

    def _on_grant(self, grant: Grant) -> None:
        worker = grant.worker
        if self._learner is not None:
            self._learner.grant(grant)
        granted = self._granted[worker]
        granted.append(grant)
        if len(granted) == 1 and self.up[worker]:
            self._begin(worker)

    def _on_offer(self, offer: NewVersion) -> None:
        self._offered[offer.worker] = offer.version

    def _on_fetch(self, fetch: FetchGradient) -> None:
        raise AssertionError("pushes of this class name no blob: there is nothing to fetch")

    def _on_message(self, worker: int, number: int) -> None:
        raise AssertionError("records of this class take no time: none is on its way")

    def _begin(self, worker: int) -> None:
        """The next batch of the set under way, or the first of a set."""
        if not self._done[worker]:
            self._set_begun_s[worker] = self.now
        self._batch_begun_s[worker] = self.now
        grant = self._granted[worker][0]
        if self._cached[worker] < max(grant.min_version, self._offered[worker]):
            self._cached[worker] = max(grant.version, self._offered[worker])
        seconds = self._seconds_of(worker, grant.first)
        heappush(self._queue, (self.now + seconds, _COMPUTED, worker, self._compute_event[worker]))

    def _seconds_of(self, worker: int, batch: int) -> float:
        return self._compute()

    def _on_computed(self, worker: int) -> None:
        granted, done = self._granted[worker], self._done[worker]
        grant = granted[0]
        ready_at_s = self._ready_at_s.get((worker, grant.first), self.now)
        batch = PushedBatch(
            batch=grant.first, grant_id=grant.grant_ids[0], n_samples=self.settings.batch_size, loss_sum=0.0,
            compute_s=self.now - self._batch_begun_s[worker],
            wait_s=max(0.0, self._set_begun_s[worker] - ready_at_s),
            version=self._cached[worker],
        )  # fmt: skip
        done.append(batch)
        if len(grant.grant_ids) > 1:
            granted[0] = msgspec.structs.replace(grant, first=grant.first + 1, grant_ids=grant.grant_ids[1:])
        else:
            granted.popleft()
        size = self.settings.policy.batches_per_push
        if size > 1:
            is_over = (batch.batch + 1) % size == 0
        else:
            is_over = len(grant.grant_ids) == 1 or self.now - self._set_begun_s[worker] >= MAX_SET_S
        if is_over:
            self._done[worker] = []
        if granted:
            self._begin(worker)
        if is_over:
            self._send(grant.session, worker, tuple(done))

    def _send(self, session: int, worker: int, done: tuple[PushedBatch, ...], key: str = "") -> None:
        """These batches are done."""
        version = done[-1].version
        self._handle(Push(worker=worker, session=session, term=_TERM, version=version, key=key, batches=done))

    def _on_update(self, update: ApplyUpdate) -> None:
        if self._learner is not None:
            self._learner.apply(update)
        if self.measures is not None:
            self.measures.applied(update)
            for item in update.sets:
                for pushed in item.push.batches:
                    del self._ready_at_s[item.push.worker, pushed.batch]
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

    def _on_span(self, worker: int) -> None:
        spans = self._spans[worker]
        assert spans is not None
        available, seconds = next(spans)
        heappush(self._queue, (self.now + seconds, _SPAN, worker, 0))
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
            heappush(self._queue, (self._booted_at[worker], _BOOTED, worker, 0))

    def _update_worker(self, worker: int) -> None:
        """Start or stop the worker as its machine starts or stops."""
        available = self.spot_available[worker] if self.spot[worker] else True
        wanted = available and self.now >= self._booted_at[worker]
        if wanted != self.up[worker]:
            (self._worker_started if wanted else self._worker_lost)(worker)

    def _on_plan(self) -> None:
        provisioner = self._provisioner
        assert provisioner is not None
        heappush(self._queue, (self.now + provisioner.every_s, _PLAN, 0, 0))
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
        self._compute_event[worker] += 1  # a gradient under way is lost, and those of the same set
        self._cached[worker] = self._offered[worker] = -1
        if self.settings.policy.batches_per_push > 1:
            if self.settings.replacement:
                self._done[worker] = []
        elif done := self._done[worker]:
            left = self._granted[worker][0]
            ids = tuple(batch.grant_id for batch in done) + left.grant_ids
            self._granted[worker][0] = msgspec.structs.replace(left, first=done[0].batch, grant_ids=ids)
            self._done[worker] = []
        if self.settings.arrivals_pause:
            self._batch_event[worker] += 1
            self._remaining_s[worker] = self._complete_at[worker] - self.now
        if self.settings.replacement:
            if self._learner is not None:
                for grant in self._granted[worker]:
                    self._learner.drop(grant)
            self._granted[worker].clear()
            self._handle(Leave(worker=worker, session=self._session[worker], cause="preempted"))

    def _worker_started(self, worker: int) -> None:
        self._accrue()
        self._up_since[worker] = self.now
        self.up[worker] = True
        self.num_up += 1
        if self.settings.arrivals_pause:
            at = self.now + self._remaining_s[worker]
            self._complete_at[worker] = at
            heappush(self._queue, (at, _BATCH, worker, self._batch_event[worker]))
        if self.settings.replacement:
            self._join(worker)
        elif self._granted[worker]:
            self._begin(worker)
        self._announce(worker)

    def _join(self, worker: int) -> None:
        """A new machine runs this worker: it announces again what is not durable."""
        self._num_processes[worker] += 1
        for action in self._handle(Join(worker=worker, process=f"{worker}.{self._num_processes[worker]}")):
            if type(action) is Welcome:
                self._session[worker] = action.session
                if self.measures is not None:
                    self.measures.joined(worker)
                self._announced[worker] = action.next_batch
