"""A job that learns in virtual time: the production server and workers with the job's real task, model and policy.

Each worker computes its gradients or steps with the code of a live worker (`GrantHandler`), on samples of the job's own
source, and the server makes the versions with the code of a live server (`ModelHost`). Blobs are in memory. Only time
is simulated: a batch takes a given time, and a push takes a given time on its worker's link. So the accuracy and the
number of bytes of a policy can be compared without services, and two runs with one seed give the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from doll.config import JobConfig
from doll.consumers.compute.error_feedback import ErrorFeedback
from doll.consumers.compute.gradient import CachedVersion, GradientComputer
from doll.consumers.compute.gradient_engine import GrantHandler
from doll.consumers.compute.guard import Guard
from doll.consumers.compute.step_model import StepModel
from doll.consumers.compute.task_steps import OwnSteps
from doll.consumers.compute.weights_ahead import DeltaReader
from doll.consumers.intake.dead_letters import DeadLetters
from doll.consumers.intake.decoding import RawRecords
from doll.consumers.protocol.grants import part_of
from doll.consumers.protocol.worker_core import Batch, Compute, StoreRest
from doll.consumers.tables.row_client import RowClient
from doll.consumers.tables.table_rows import WorkerTables
from doll.errors import BlobError
from doll.evaluation.heldout import HeldOut, HeldOutError
from doll.model.flat_model import build
from doll.optim.row_optimizer import row_optimizers
from doll.producers.sources import open_streams
from doll.ps.engine import events as ev
from doll.ps.engine.measures import PolicyMeasures
from doll.ps.model.model_host import ModelHost
from doll.ps.model.updater import make_parts
from doll.ps.start import Start, make_engine
from doll.records.control import AnyRecord, DeadLetter, GetRows, Measures, NewVersion, RowsStored
from doll.storage.blobs import scope_of
from doll.storage.contributions import Compressor
from doll.storage.deltas import Layout
from doll.task.base import load_task

from doll_lab.simulation.memory_blobs import MemoryBlobs
from doll_lab.simulation.world import Process, World

_AHEAD: Final = 4  # batches that a worker announces beyond those of two pushes, or of two groups


class _Letters:
    """The channel of dead letters; it keeps them."""

    def __init__(self) -> None:
        self.letters: list[DeadLetter] = []

    def send_dead_letters(self, letters: list[DeadLetter]) -> None:
        self.letters += letters

    def read_values(self, topic: str, partition: int, offsets: Sequence[int]) -> dict[int, bytes]:
        """Return no values: a refused record is not read again."""
        return dict.fromkeys(offsets, b"")

    def report(self, values: dict[str, float]) -> None:
        """Drop measurements of a worker."""


class LearningProcess(Process):
    """A worker's process with its model. It computes one order at a time."""

    def __init__(self, world: LearningWorld, worker: int, name: str) -> None:
        super().__init__(worker, name)
        config, blobs, scope = world.config, world.blobs, world.scope
        task = load_task(config)
        model = build(config, task, with_rows=False)
        computer = GradientComputer(task, model)
        sends_steps = config.training.policy.sends_steps
        self._rows: WorkerTables | None = None
        if model.tables is not None:
            client = RowClient(config, blobs, model.tables.shapes, scope)
            client.connect(lambda request: world.send_rows(client, request))
            optimizes = sends_steps and not task.defines_step
            self._rows = WorkerTables(
                client, config.worker.row_cache_bytes,
                max_rows={name: bounds.max_rows for name, bounds in model.tables.bounds.items()},
                optimizers=row_optimizers(config.training, client.tables) if optimizes else None,
                threshold=config.training.policy.filter_threshold,
            )  # fmt: skip
            model.tables.connect(self._rows.look_up)
        compressor, form = Compressor(scope), config.blobs.contributions
        if sends_steps or model.tables is not None or form != "float32":
            tables = {} if model.tables is None else model.tables.shapes
            rounding = None if form == "float32" else ErrorFeedback(form).round
            compressor = Compressor(scope, model.num_parameters, tables, rounding)
        deltas = None
        if config.training.policy.publishes_deltas:
            deltas = DeltaReader(scope, blobs, Layout(computer.num_values, model.num_parameters))
        self.local: Any
        contribution: Any
        if sends_steps:
            self.local = contribution = StepModel(
                scope, blobs, config.training, model, computer, takes_steps=task.defines_step, rows=self._rows,
                deltas=deltas,
            )  # fmt: skip
        else:
            self.local, contribution = CachedVersion(scope, blobs, computer, None, deltas), computer.new_sum()
        self.letters = DeadLetters(config, task, world.channel, worker, term=lambda: world.term)  # type: ignore[arg-type]
        guard: Any = OwnSteps(config, task, model) if task.defines_step else Guard(config, task, computer)
        self.handler = GrantHandler(
            config, local_model=self.local, guard=guard, compressor=compressor, blobs=blobs, dead_letters=self.letters,
            contribution=contribution, rows=self._rows, scope=scope,
        )  # fmt: skip
        self.num_read = 0  # batches that were announced
        self.is_computing = False
        self.link_free_s = 0.0

    def offer(self, weights: NewVersion) -> None:
        self.local.offer(weights)
        if self._rows is not None:
            self._rows.offer(weights)


class Point(NamedTuple):
    """The held-out error of one version. `time_s`: virtual seconds since the start. `samples`: samples in the model.
    `push_bytes`: bytes of all pushes until then."""

    time_s: float
    version: int
    samples: int
    error: HeldOutError
    push_bytes: int = 0


def jittered(mean_s: Sequence[float] | float, *, sigma: float, seed: int) -> Callable[[int, int], float]:
    """Return a function of worker and batch: log-normal seconds of computation with this mean, for each worker or for
    all, and `sigma` of their logarithm. A batch takes the same time under every policy."""
    mean = _constant(mean_s)

    def compute_s(worker: int, batch: int) -> float:
        random = np.random.default_rng((seed, worker, batch))
        return mean(worker, batch) * float(np.exp(sigma * random.standard_normal() - sigma * sigma / 2))

    return compute_s


def _constant(compute_s: Sequence[float] | float) -> Callable[[int, int], float]:
    each = [compute_s] if isinstance(compute_s, float | int) else list(compute_s)
    return lambda worker, batch: each[worker % len(each)]


class LearningWorld(World[LearningProcess]):
    """The workers and the server of one job, which learn until the job's stop rule or the end of its streams.

    Attributes:
        blobs, scope: the blob store, and the scope of the job's keys in it.
        points: held-out errors after every `evaluate_every` samples, and at the end.
        push_bytes: bytes of all pushes.
        row_bytes: bytes of rows that workers have read.
    """

    def __init__(
        self,
        config: JobConfig,
        *,
        compute_s: Callable[[int, int], float] | Sequence[float] | float = 1.0,
        message_s: Callable[[int], float] = lambda size_bytes: 0.0,
        evaluate_every: int = 0,
    ) -> None:
        """
        Args:
            compute_s: seconds of one batch: for all workers, for each, or a function of the worker and of the number
                of the batch in its stream, such as `jittered`.
            message_s: function that returns the seconds of a push of so many bytes on its worker's link.
            evaluate_every: samples between two held-out evaluations; 0: only at the end.
        """
        # The limit is in seconds of this machine, on which the computation of a batch takes any time.
        patient = config.worker.model_copy(update={"set_limit_s": math.inf})
        self.config = config = config.model_copy(update={"worker": patient})
        self.blobs, self.scope = MemoryBlobs(), scope_of(config.job, "")
        self.channel = _Letters()
        workers = config.data.workers
        super().__init__(
            workers, make_engine=self._engine, make_process=lambda worker, name, _: LearningProcess(self, worker, name),
            max_pending=config.worker.max_pending_batches,
        )  # fmt: skip
        self._compute_s = compute_s if callable(compute_s) else _constant(compute_s)
        self._message_s = message_s
        self._evaluate_every = evaluate_every
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._size = config.data.records_per_batch
        self._streams: list[Iterator[bytes]] = open_streams(config, [0] * config.data.num_partitions)
        policy = config.training.policy
        self._ahead = _AHEAD + 2 * max(policy.batches_per_push, policy.batches_per_update(workers))
        self._task = load_task(config)
        self._model = build(config, self._task)
        self._held_out = HeldOut(self._task, config.evaluation.max_samples)
        parts = make_parts(config.training, build(config, load_task(config)))
        self._host = ModelHost(config, 1, parts.updater, self.blobs, parts.tables)
        self.points: list[Point] = []
        self.push_bytes = self.row_bytes = 0
        self.start_server()
        self.measures = PolicyMeasures(self.engine, weights_bytes=4 * self._host.num_values)
        for worker in range(workers):
            self.start_process(worker)

    def _engine(self) -> Any:
        if self.term > 1:
            raise RuntimeError("a simulated job without faults began again from a checkpoint")
        return make_engine(self.config, Start(1, 0.0, (0,) * self.config.data.num_partitions), self._host.load)

    @property
    def num_values(self) -> int:
        """The number of values of the model's flat vector."""
        return self._host.num_values

    # --- time -------------------------------------------------------------------------------------------------------

    def run(self) -> Point:
        """Run the job to its end, and return the held-out error of its last version.

        Raises:
            DivergedError: the model is not finite.
        """
        for process in self.live():
            self._read(process)
        while self._events and self.engine.finished is None:
            self.now, _, act = heappop(self._events)
            act()
        return self._evaluate()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heappush(self._events, (self.now + seconds, next(self._numbers), act))

    # --- workers ----------------------------------------------------------------------------------------------------

    def _read(self, process: LearningProcess) -> None:
        """Announce further batches of the worker's stream, if few are left."""
        core, worker = process.protocol, process.worker
        ahead = self.engine.worker(worker).announced
        while core.has_room and ahead < self._ahead:
            ahead += 1
            values = list(islice(self._streams[worker], self._size))
            if len(values) < self._size:
                return
            number = process.num_read
            process.num_read += 1
            decoded = process.letters.decode(
                RawRecords(range(number * self._size, (number + 1) * self._size), values, worker)
            )
            core.hold(Batch(number, decoded, decoded.num_samples, self.now, partition=worker))
        self.do(process, core.announce())

    def acknowledge(self, process: LearningProcess, partition: int, until: int) -> None:
        self._after(0.0, lambda: self._read(process))

    def order(self, process: LearningProcess, order: Compute | StoreRest) -> None:
        super().order(process, order)
        self._after(0.0, lambda: self._go_on(process))

    def _go_on(self, process: LearningProcess) -> None:
        """Begin the next order if the worker is free. It is computed on the weights of now, and is ready later."""
        if process.is_computing or not process.orders:
            return
        core, order = process.protocol, process.orders.popleft()
        if isinstance(order, StoreRest):
            done = process.handler.store_rest(order.until)
            self._send(process, done.key, lambda: self.do(process, core.rest_stored(order, done)))
            self._after(0.0, lambda: self._go_on(process))
            return
        grant = core.begin(order.grant)
        if grant is None:
            self._after(0.0, lambda: self._go_on(process))
            return
        outcome = process.handler.handle(grant, order.batches, lambda batch, grant_id: True)
        if outcome is None:
            self.do(process, core.weights_missing(order.grant))
            return
        process.is_computing = True
        began_s, num_computed = self.now, len(outcome.batches)
        if num_computed < len(order.batches):  # the set has ended early, because this machine is slow
            process.orders.appendleft(Compute(part_of(order.grant, num_computed), order.batches[num_computed:]))

        def computed() -> None:
            process.is_computing = False
            self._read(process)
            self._send(
                process,
                outcome.key,
                lambda: self.do(process, core.gradient_done(order.grant, order.batches, outcome, began_s)),
            )
            self._go_on(process)

        computed_batches = order.batches[:num_computed]
        self._after(sum(self._compute_s(process.worker, batch.number) for batch in computed_batches), computed)

    def _send(self, process: LearningProcess, key: str, act: Callable[[], None]) -> None:
        """Send a push on the worker's link, which carries one after the other."""
        size = len(self.blobs.get(key) or b"") if key else 0
        self.push_bytes += size
        process.link_free_s = max(self.now, process.link_free_s) + (self._message_s(size) if size else 0.0)
        self._after(process.link_free_s - self.now, act)

    # --- the server -------------------------------------------------------------------------------------------------

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        match action:
            case ev.PublishWeights(version):
                self._host.publish(version)
            case ev.FetchGradient():
                return self._host.fetch(action).event
            case ev.ReleaseWeights(version):
                self._host.release(version)
            case ev.ApplyUpdate():
                self._host.apply(action)
                self._host.tidy(self.engine.named_versions)
                self.measures.applied(action)
                before = self.points[-1].samples if self.points else 0
                if self._evaluate_every and action.samples_total - before >= self._evaluate_every:
                    self._evaluate()
            case _:
                return super().perform(action)
        return None

    def to_worker(self, worker: int, record: AnyRecord) -> None:
        if isinstance(record, NewVersion) and (rows := self._host.changed_rows(worker, record.version)) is not None:
            record = msgspec.structs.replace(record, rows_key=rows.key, rows_since=rows.since)
        super().to_worker(worker, record)

    def send_rows(self, client: RowClient, request: GetRows) -> None:
        """Answer a worker's request for rows, at once."""
        try:
            stored = self._host.store_rows(request, self.engine.version, subscribes=self.engine.policy.sends_versions)
        except BlobError:
            return
        self.row_bytes += stored.size.coded_bytes
        client.deliver(
            RowsStored(
                term=1, worker=request.worker, session=request.session, number=request.number,
                version=self.engine.version, key=stored.key,
                included=self.engine.worker(request.worker).queue.applied,
            )
        )  # fmt: skip

    def report(self) -> Measures:
        return self.measures.report()

    def _evaluate(self) -> Point:
        self._model.load_weights(self._host.tensors()["weights"])
        error = self._held_out.evaluate(self._model.module)
        point = Point(self.now, self.engine.version, self.engine.samples_total, error, self.push_bytes)
        self.points.append(point)
        return point
