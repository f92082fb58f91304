"""One world in virtual time: the production engine and worker protocol, links between them, and one queue of events.

A worker is `WorkerCore` and a time that each of its batches takes; the server is `Engine` and a policy. They exchange
the records of a real job. A record takes no time unless a subclass says so (`_to_server`, `_to_worker`). Gradients
carry no numbers, and a checkpoint is durable immediately. Subclasses add where batches come from and what is measured:
`doll.simulation.system` has the streams and machines of a job (docs/decisions/0057).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import msgspec

from doll.config import StopConfig
from doll.config.policy import PolicyConfig
from doll.config.roles import MAX_SET_S
from doll.consumers.protocol.worker_core import (
    Batch,
    Compute,
    ComputedBatch,
    Exit,
    GradientDone,
    OfferWeights,
    Send,
    WorkerAction,
    WorkerCore,
)
from doll.ps.engine.engine import Engine
from doll.ps.engine.events import (
    ApplyUpdate,
    CheckpointStored,
    Command,
    Event,
    FetchGradient,
    Finish,
    RollBack,
    StoreCheckpoint,
)
from doll.ps.engine.state import EngineSettings
from doll.ps.policies import Policy, make_policy
from doll.records.control import Durable, Grant, Join, NewVersion, Welcome

# Larger than any simulated queue: workers of the simulation are not held back, so that an unstable queue shows.
UNBOUNDED = 1 << 40
FOREVER_S = 1e18
_TERM = 1

# Kinds of events. Of one moment, lower kinds come first.
BATCH, COMPUTED, SPAN, BOOTED, PLAN, MESSAGE = range(6)


class Process:
    """One process of a worker: the production protocol, and what it computes.

    Attributes:
        orders: grants that are to be computed, in order. Of the first, the batches that `done` names are computed.
        kept: (batch, grant id) that are computed, and pushed with later ones.
        cached: the version of the weights that it has.
        offered: the newest version that it was sent.
    """

    __slots__ = ("batch_begun_s", "cached", "core", "done", "is_computing", "kept", "offered", "orders", "set_begun_s")

    def __init__(self, core: WorkerCore) -> None:
        self.core = core
        self.orders: deque[Compute] = deque()
        self.done: list[ComputedBatch] = []
        self.kept: list[tuple[int, int]] = []
        self.is_computing = False
        self.set_begun_s = self.batch_begun_s = 0.0
        self.cached = self.offered = -1

    def stop(self) -> None:
        """What it computes is lost, and the weights that it has."""
        self.done, self.is_computing = [], False
        self.cached = self.offered = -1

    def take(self, count: int) -> Compute:
        """Take the first `count` batches of the first order off. The grant with them still names all."""
        order = self.orders[0]
        grant, batches = order.grant, order.batches
        if count == len(batches):
            return self.orders.popleft()
        rest = msgspec.structs.replace(grant, first=grant.first + count, grant_ids=grant.grant_ids[count:])
        self.orders[0] = Compute(rest, batches[count:])
        return Compute(grant, batches[:count])


class World:
    """N workers and one engine.

    Attributes:
        now: virtual seconds since the start.
        processes: of each worker; None: it has none.
        up: which workers are up. A process of a worker that is down does nothing.
    """

    def __init__(
        self,
        config: PolicyConfig,
        *,
        num_workers: int,
        batch_size: int = 1,
        policy: Policy | None = None,
        updates: int | None = None,
        checkpoint_every_updates: int = 100,
    ) -> None:
        """
        Args:
            batch_size: samples per batch.
            policy: in place of the one that `config` names.
            updates: the run ends after so many model updates; None: it does not.
        """
        n = num_workers
        settings = EngineSettings(
            num_workers=n, records_per_batch=batch_size, max_pending_batches=UNBOUNDED, lease_s=FOREVER_S,
            grant_timeout_s=FOREVER_S, checkpoint_every_updates=checkpoint_every_updates,
            checkpoint_every_s=FOREVER_S, stop=StopConfig(updates=updates),
        )  # fmt: skip
        self.now = 0.0
        self.processes: list[Process | None] = [None] * n
        self.up = [True] * n
        self._batch_size = batch_size
        self._batches_per_push = config.batches_per_push
        self._num_processes = [0] * n
        self._compute_event = [0] * n  # number of the current one: earlier ones are void
        self._queue: list[tuple[float, int, int, int]] = []  # (time, kind, worker, number)
        self.engine = Engine(settings, policy or make_policy(config), term=_TERM, now=0.0, origins=[0] * n)

    @property
    def version(self) -> int:
        """J: updates applied."""
        return self.engine.version

    # --- the run ----------------------------------------------------------------------------------------------------

    def run_until(self, end_s: float = FOREVER_S, progress: Callable[[int, float], None] | None = None) -> None:
        """Run to the end of the job, or to this time. `progress(updates, seconds)` is called every 4096 events."""
        queue, engine = self._queue, self.engine
        count = 0
        while queue and engine.finished is None:
            time, kind, worker, number = heappop(queue)
            if time > end_s:
                self.now = end_s
                break
            self.now = time
            if kind == COMPUTED:
                if number == self._compute_event[worker]:
                    self._on_computed(worker)
            else:
                self._on_event(kind, worker, number)
            count += 1
            if progress is not None and not count & 0xFFF:
                progress(engine.version, time)
        if progress is not None:
            progress(engine.version, self.now)

    def _on_event(self, kind: int, worker: int, number: int) -> None:
        """Something else than the end of a batch's gradient has happened."""
        raise NotImplementedError

    # --- the server -------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        """The server handles an event and does what the engine says."""
        for action in self.engine.handle(event, self.now):
            match action:
                case Grant():
                    self._on_grant(action)
                case ApplyUpdate():
                    self._on_update(action)
                case FetchGradient():
                    self._on_fetch(action)
                case NewVersion() | Durable():
                    self._to_worker(action)
                case StoreCheckpoint():
                    self._handle(CheckpointStored(version=action.version))
                case Welcome():
                    self._on_welcome(action)
                case RollBack():
                    self._on_roll_back(action)
                case Finish():
                    break

    def _on_grant(self, grant: Grant) -> None:
        self._to_worker(grant)

    def _on_update(self, update: ApplyUpdate) -> None:
        """The model is another version."""

    def _on_roll_back(self, action: RollBack) -> None:
        """The server would begin again from a checkpoint: a worker has gone with a part of its steps."""

    def _on_fetch(self, fetch: FetchGradient) -> None:
        raise AssertionError("pushes of this class name no blob: there is nothing to fetch")

    # --- the links --------------------------------------------------------------------------------------------------

    def _to_server(self, worker: int, record: Event) -> None:
        """A worker has sent this."""
        self._handle(record)

    def _to_worker(self, record: Command) -> None:
        """The server has sent this."""
        self._receive(record)

    def _receive(self, record: Command) -> None:
        process = self.processes[record.worker]
        if process is not None:
            self._do(record.worker, process, process.core.on_record(record, self.now))

    # --- a worker ---------------------------------------------------------------------------------------------------

    def _join(self, worker: int) -> None:
        """A new process of this worker."""
        self._num_processes[worker] += 1
        self._handle(Join(worker=worker, process=f"{worker}.{self._num_processes[worker]}"))

    def _on_welcome(self, welcome: Welcome) -> None:
        self.processes[welcome.worker] = Process(WorkerCore(welcome, max_pending=UNBOUNDED, now=self.now))

    def process(self, worker: int) -> Process:
        """The process of a worker that has one."""
        process = self.processes[worker]
        assert process is not None, f"worker {worker} has no process"
        return process

    def _read(self, worker: int, until: int) -> None:
        """The batches below `until` are complete, and announced together."""
        process = self.process(worker)
        core = process.core
        for number in range(core.next_batch, until):
            core.hold(Batch(number, None, self._batch_size, self.now))
        self._do(worker, process, core.announce())

    def _do(self, worker: int, process: Process, actions: Sequence[WorkerAction]) -> None:
        for action in actions:
            match action:
                case Send(record):
                    self._to_server(worker, record)  # type: ignore[arg-type]
                case Compute():
                    process.orders.append(action)
                    self._go_on(worker, process)
                case OfferWeights(weights):
                    process.offered = weights.version
                case Exit(_, reason):
                    raise AssertionError(f"worker {worker} exits: {reason}")

    def _go_on(self, worker: int, process: Process) -> None:
        """Begin the next batch, if there is one and the worker is free."""
        if process.orders and not process.is_computing and self.up[worker]:
            self._begin(worker, process)

    def _begin(self, worker: int, process: Process) -> None:
        """The next batch of the set under way, or the first of a set."""
        if not process.done and not process.kept:
            process.set_begun_s = self.now
        process.batch_begun_s = self.now
        process.is_computing = True
        order = process.orders[0]
        grant = order.grant
        if process.cached < max(grant.min_version, process.offered):
            process.cached = max(grant.version, process.offered)
        seconds = self._seconds_of(worker, order.batches[len(process.done)].number)
        heappush(self._queue, (self.now + seconds, COMPUTED, worker, self._compute_event[worker]))

    def _seconds_of(self, worker: int, batch: int) -> float:
        """How long this batch's gradient takes."""
        raise NotImplementedError

    def _on_computed(self, worker: int) -> None:
        process = self.process(worker)
        process.is_computing = False
        seconds = self.now - process.batch_begun_s
        process.done.append(ComputedBatch(self._batch_size, compute_s=seconds, version=process.cached))
        order, count = process.orders[0], len(process.done)
        is_last = count == len(order.batches)
        if self._batches_per_push == 1 and not is_last and self.now - process.set_begun_s < MAX_SET_S:
            self._begin(worker, process)
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
        self._go_on(worker, process)
        self._do(worker, process, process.core.gradient_done(order.grant, order.batches, done, begun_s))

    def _key_of(self, worker: int, batch: int) -> str:
        """Of the blob with a set that ends with this batch."""
        return ""

    def _holds_back(self, worker: int) -> bool:
        """A part of the steps that were computed last stays in the worker."""
        return False
