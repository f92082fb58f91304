"""A world in virtual time: one queue of events, and workers that take a time for each batch.

Gradients carry no numbers. Subclasses add the origin of batches, links that take time, and measurements:
`doll_lab.simulation.system` adds the streams and machines of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush

from doll.config import StopConfig
from doll.config.policy import PolicyConfig
from doll.config.roles import MAX_SET_S
from doll.consumers.protocol.grants import part_of
from doll.consumers.protocol.worker_core import Batch, Compute, ComputedBatch, GradientDone, StoreRest
from doll.ps.engine.engine import Engine
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies import Policy, make_policy
from doll.records.control import NewVersion

from doll_lab.simulation.world import Process, World

# Larger than any simulated queue, so that workers are not held back and an unstable queue becomes visible.
UNBOUNDED = 1 << 40
FOREVER_S = 1e18

# Kinds of events. At the same moment, lower kinds come first.
BATCH, COMPUTED, SPAN, BOOTED, PLAN, MESSAGE = range(6)


class TimedProcess(Process):
    """A process that computes batch by batch.

    Attributes:
        done: computed batches of the first order.
        kept: (batch, grant id) of computed batches that are pushed together with later ones.
        cached: version of the weights that it has.
        offered: newest version that was sent to it.
    """

    def __init__(self, worker: int, name: str, incarnation: int = 0) -> None:
        super().__init__(worker, name, incarnation)
        self.done: list[ComputedBatch] = []
        self.kept: list[tuple[int, int]] = []
        self.is_computing = False
        self.set_begun_s = self.batch_begun_s = 0.0
        self.cached = self.offered = -1

    def offer(self, weights: NewVersion) -> None:
        self.offered = weights.version

    def stop(self) -> None:
        """Lose the gradients in progress, and the weights that the process has."""
        self.done, self.is_computing = [], False
        self.cached = self.offered = -1

    def take(self, count: int) -> Compute:
        """Remove the first `count` batches of the first order and return them; their grant still names all batches."""
        order = self.first_order
        grant, batches = order.grant, order.batches
        if count == len(batches):
            self.orders.popleft()
            return order
        self.orders[0] = Compute(part_of(grant, count), batches[count:])
        return Compute(grant, batches[:count])


class TimedWorld(World[TimedProcess]):
    """N workers and one server, in virtual time.

    Attributes:
        up: for each worker, whether it is up. The process of a worker that is down does nothing.
    """

    def __init__(
        self,
        config: PolicyConfig,
        *,
        num_workers: int,
        on: Mapping[int, Callable[[int, int], None]],
        seconds_of: Callable[[int, int], float] = lambda worker, batch: 0.0,
        batch_size: int = 1,
        policy: Policy | None = None,
        updates: int | None = None,
        checkpoint_every_updates: int = 100,
    ) -> None:
        """
        Args:
            on: by kind of event, the function to call with the worker and the number of the event in the queue.
            seconds_of: function (worker, batch) that returns the seconds of its gradient.
            batch_size: samples per batch.
            policy: policy to use instead of the policy of `config`.
            updates: number of model updates after which the run ends; None: no limit.
        """
        n = num_workers
        settings = EngineSettings(
            num_workers=n, records_per_batch=batch_size, max_pending_batches=UNBOUNDED, lease_s=FOREVER_S,
            grant_timeout_s=FOREVER_S, checkpoint_every_updates=checkpoint_every_updates,
            checkpoint_every_s=FOREVER_S, stop=StopConfig(updates=updates),
        )  # fmt: skip
        super().__init__(
            n,
            make_engine=lambda: Engine(
                settings, policy or make_policy(config), term=self.term, now=0.0, origins=[0] * n
            ),
            make_process=TimedProcess,
            max_pending=UNBOUNDED,
        )
        self.up = [True] * n
        self._seconds_of = seconds_of
        self._on = {COMPUTED: self._on_computed, **on}
        self._batch_size = batch_size
        self._batches_per_push = config.batches_per_push
        self._compute_event = [0] * n  # number of the current event: earlier ones are void
        self._queue: list[tuple[float, int, int, int]] = []  # (time, kind, worker, number)
        self.start_server()

    @property
    def version(self) -> int:
        """J: the number of applied updates."""
        return self.engine.version

    def process(self, worker: int) -> TimedProcess:
        """Return the process of a worker that has one."""
        return self.processes[worker][-1]

    def run_until(self, end_s: float = FOREVER_S, progress: Callable[[int, float], None] | None = None) -> None:
        """Run to the end of the job, or to this time. `progress(updates, seconds)` is called every 4096 events."""
        queue, engine, on = self._queue, self.engine, self._on
        count = 0
        while queue and engine.finished is None:
            time, kind, worker, number = heappop(queue)
            if time > end_s:
                self.now = end_s
                break
            self.now = time
            on[kind](worker, number)
            count += 1
            if progress is not None and not count & 0xFFF:
                progress(engine.version, time)
        if progress is not None:
            progress(engine.version, self.now)

    # --- a worker ---------------------------------------------------------------------------------------------------

    def end(self, process: TimedProcess, code: int = 0) -> None:
        raise AssertionError(f"a process of worker {process.worker} ends itself with code {code}")

    def _read(self, worker: int, until: int) -> None:
        """Announce the batches below `until`, which are complete, together."""
        process = self.process(worker)
        core = process.protocol
        for number in range(core.served[worker].next_batch, until):
            core.hold(Batch(number, None, self._batch_size, self.now, partition=worker))
        self.do(process, core.announce())

    def order(self, process: TimedProcess, order: Compute | StoreRest) -> None:
        process.orders.append(order)
        self._go_on(process)

    def _go_on(self, process: TimedProcess) -> None:
        """Begin the next batch, if there is one and the worker is free."""
        if process.orders and not process.is_computing and self.up[process.worker]:
            self._begin(process)

    def _begin(self, process: TimedProcess) -> None:
        """Begin the next batch of the current set, or the first batch of a set."""
        if not process.done and not process.kept:
            process.set_begun_s = self.now
        process.batch_begun_s = self.now
        process.is_computing = True
        worker, order = process.worker, process.first_order
        grant = order.grant
        if process.cached < max(grant.min_version, process.offered):
            process.cached = max(process.protocol.newest(grant).version, process.offered)
        seconds = self._seconds_of(worker, order.batches[len(process.done)].number)
        heappush(self._queue, (self.now + seconds, COMPUTED, worker, self._compute_event[worker]))

    def _on_computed(self, worker: int, number: int) -> None:
        if number != self._compute_event[worker]:
            return
        process = self.process(worker)
        process.is_computing = False
        seconds = self.now - process.batch_begun_s
        process.done.append(ComputedBatch(self._batch_size, compute_s=seconds, version=process.cached))
        count = len(process.done)
        is_last = count == len(process.first_order.batches)
        if self._batches_per_push == 1 and not is_last and self.now - process.set_begun_s < MAX_SET_S:
            self._begin(process)
            return
        order = process.take(count)
        last = order.batches[-1].number
        names = zip(order.batches, order.grant.grant_ids, strict=False)
        process.kept += [(batch.number, grant_id) for batch, grant_id in names]
        is_kept = (last + 1) % self._batches_per_push != 0
        done = GradientDone(
            "" if is_kept else self._key_of(worker, last), process.cached, tuple(process.done), is_kept=is_kept,
            holds_back=not is_kept and self._holds_back(worker), holds=() if is_kept else tuple(process.kept),
        )  # fmt: skip
        process.done = []
        if not is_kept:
            process.kept = []
        begun_s = process.set_begun_s
        self._go_on(process)
        self.do(process, process.protocol.gradient_done(order.grant, order.batches, done, begun_s))

    def _key_of(self, worker: int, batch: int) -> str:
        """Return the key of the blob with a set that ends with this batch."""
        return ""

    def _holds_back(self, worker: int) -> bool:
        """Return whether the worker's filter holds back a part of its computed steps."""
        return False
