"""Jobs of one thread: the real server and workers without transport, over policies, tasks and schedules."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from doll.config import parse
from doll.consumers.compute.gradient import CachedVersion, GradientComputer
from doll.consumers.compute.gradient_engine import GrantHandler
from doll.consumers.compute.guard import Guard
from doll.consumers.compute.step_model import StepModel
from doll.consumers.compute.task_steps import OwnSteps
from doll.consumers.intake.dead_letters import DeadLetters
from doll.consumers.intake.decoding import RawRecords
from doll.consumers.protocol.worker_core import Batch, Compute, OfferWeights, Send, WorkerCore
from doll.consumers.tables.row_client import RowClient
from doll.consumers.tables.table_rows import WorkerTables
from doll.errors import BlobError
from doll.model.flat_model import build
from doll.optim.row_optimizer import row_optimizers
from doll.ps.engine import events as ev
from doll.ps.model.model_host import ModelHost
from doll.ps.model.updater import make_parts
from doll.ps.start import Start, make_engine
from doll.records.control import Announce, GetRows, Grant, Join, NewVersion, Push, RowsStored, Welcome
from doll.storage.blobs import scope_of
from doll.storage.contributions import Compressor
from doll.task.base import load_task
from memory_stores import MemoryBlobs
from worker_fakes import FakeChannel

JOB = """
job: unit
task: %s
data: {workers: %d, batch_size: 8}
training: {policy: %s, %s}
worker: {max_pending_batches: 64}
checkpoint: {every_updates: 100000, every_s: 1000000}
blobs: {keep_versions: 100}
"""
GAUSSIAN = '{class: "examples.synthetic.task:Gaussian", args: {features: 6}}'
SGD = "optimizer: {name: sgd, lr: 0.05, momentum: 0.5}"
WORKERS, BATCHES = 3, 12


class Worker:
    """One worker's protocol and computation, without I/O."""

    def __init__(self, job: Job, number: int) -> None:
        config = job.config
        self.task = load_task(config)
        model = build(config, self.task, with_rows=False)
        computer = GradientComputer(self.task, model)
        self.rows: WorkerTables | None = None
        optimizes = config.training.policy.sends_steps and not self.task.defines_step
        if model.tables is not None:
            self.client = RowClient(config, job.blobs, model.tables.shapes, job.scope)
            self.client.connect(lambda request: job.send_rows(self.client, request))
            self.rows = WorkerTables(
                self.client, config.worker.row_cache_bytes,
                max_rows={name: bounds.max_rows for name, bounds in model.tables.bounds.items()},
                optimizers=row_optimizers(config.training, self.client.tables) if optimizes else None,
            )  # fmt: skip
            model.tables.connect(self.rows.look_up)
        self.channel = FakeChannel()
        self.letters = DeadLetters(config, self.task, self.channel, number, term=lambda: 1)
        local: Any
        contribution: Any
        compressor: Any = Compressor(job.scope)
        if config.training.policy.sends_steps:
            local = contribution = StepModel(
                job.scope, job.blobs, config.training, model, computer, takes_steps=self.task.defines_step,
                rows=self.rows,
            )  # fmt: skip
        else:
            local, contribution = CachedVersion(job.scope, job.blobs, computer), computer.new_sum()
        if config.training.policy.sends_steps or model.tables is not None:
            tables = {} if model.tables is None else model.tables.shapes
            compressor = Compressor(job.scope, model.num_parameters, tables)
        self.local = local
        guard = OwnSteps(config, self.task, model) if self.task.defines_step else Guard(config, self.task, computer)
        self.handler = GrantHandler(
            config, local_model=local, guard=guard, compressor=compressor, blobs=job.blobs,
            dead_letters=self.letters, contribution=contribution, rows=self.rows, scope=job.scope,
        )  # fmt: skip
        self.number = number
        self.core: WorkerCore | None = None
        self.orders: deque[Compute] = deque()

    def batch(self, number: int) -> Batch:
        """Its content depends on the worker and the number only."""
        decoded = self.letters.decode(RawRecords(range(8 * number, 8 * number + 8), self.values(number)))
        return Batch(number, decoded, decoded.num_samples, 0.0, partition=self.number)

    def values(self, number: int) -> list[bytes]:
        """The records of batch `number`."""
        rng = np.random.default_rng([self.number, number])
        make = getattr(self.task, "make", lambda rng, at: np.array([*rng.normal(size=6), at % 2], "<f4").tobytes())
        return [make(rng, at) for at in range(8)]


class Job:
    """A server and its workers in one thread; which worker computes next is drawn from a seed."""

    worker_class: type[Worker] = Worker

    def __init__(
        self, policy: str, seed: int, *, task: str = GAUSSIAN, training: str = SGD, workers: int = WORKERS,
        keep_versions: int = 100, blobs: MemoryBlobs | None = None, run_id: str = "",
    ) -> None:  # fmt: skip
        """
        Args:
            blobs: of several jobs, which are then run by `step`; None: its own, and the job is run to its end.
        """
        self.config = parse(JOB % (task, workers, policy, training), [f"blobs.keep_versions={keep_versions}"])
        self.blobs = blobs or MemoryBlobs()
        self.scope = scope_of(self.config.job, run_id)
        self.row_bytes = self.row_request_bytes = 0
        self.order: list[tuple[int, int]] = []  # batches in the order of their updates: (worker, number)
        model = build(self.config, load_task(self.config))
        parts = make_parts(self.config.training, model)
        self.host = ModelHost(self.config, 1, parts.updater, self.blobs, parts.tables, run_id=run_id)
        self.engine = make_engine(self.config, Start(1, 0.0, (0,) * workers, run_id=run_id), self.host.load)
        self.workers = [self.worker_class(self, number) for number in range(workers)]
        for worker in self.workers:
            self.feed(Join(worker=worker.number, process=f"p{worker.number}"))
        for number in range(BATCHES):
            for worker in self.workers:
                assert worker.core is not None
                self.do(worker, worker.core.batch_ready(worker.batch(number)))
        self._rng = random.Random(seed)
        while blobs is None and self.step():
            pass

    def step(self) -> bool:
        """One worker computes; False: none has anything to compute."""
        if busy := self.busy():
            self.compute(self._rng.choice(busy))
        return bool(busy)

    def busy(self) -> list[Worker]:
        """The workers that have something to compute, perhaps after the tick in which workers announce the batches that
        the server did not need at once."""
        if not any(worker.orders for worker in self.workers):
            for worker in self.workers:
                assert worker.core is not None
                self.do(worker, worker.core.announce())
        return [worker for worker in self.workers if worker.orders]

    def replace(self, number: int, process: str) -> None:
        """Worker `number` is lost with all that it has, and a new process takes its place."""
        worker = self.workers[number] = self.worker_class(self, number)
        self.feed(Join(worker=number, process=process))
        assert worker.core is not None
        for batch in range(worker.core.served[worker.core.worker].next_batch, BATCHES):
            self.do(worker, worker.core.batch_ready(worker.batch(batch)))

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        weights: npt.NDArray[np.float32] = self.host.tensors()["weights"]
        return weights

    def feed(self, event: ev.Event) -> None:
        events = deque([event])
        while events:
            for action in self.engine.handle(events.popleft(), 0.0):
                match action:
                    case Welcome():
                        self.workers[action.worker].core = WorkerCore(action, max_pending=64, now=0.0)
                    case Grant():
                        self.receive(action.worker, action)
                    case NewVersion():
                        if (rows := self.host.changed_rows(action.worker, action.version)) is not None:
                            action = msgspec.structs.replace(action, rows_key=rows.key, rows_since=rows.since)
                        self.receive(action.worker, action)
                    case ev.PublishWeights(version):
                        self.host.publish(version)
                    case ev.FetchGradient():
                        events.append(self.host.fetch(action).event)
                    case ev.ReleaseWeights(version):
                        self.host.release(version)
                    case ev.ApplyUpdate():
                        self.host.apply(action)
                        self.host.tidy(self.engine.named_versions)
                        self.order += (
                            (item.push.worker, batch.batch) for item in action.sets for batch in item.push.batches
                        )

    def send_rows(self, client: RowClient, request: GetRows) -> None:
        try:
            stored = self.host.store_rows(request, self.engine.version, subscribes=self.engine.policy.sends_versions)
        except BlobError:
            return
        self.row_bytes += stored.size.coded_bytes
        self.row_request_bytes += stored.request_bytes
        client.deliver(
            RowsStored(
                term=1, worker=request.worker, session=request.session, number=request.number,
                version=self.engine.version, key=stored.key,
                included=self.engine.worker(request.worker).queue.applied,
            )
        )  # fmt: skip

    def receive(self, number: int, record: Grant | NewVersion) -> None:
        worker = self.workers[number]
        assert worker.core is not None
        self.do(worker, worker.core.on_record(record, 0.0))

    def do(self, worker: Worker, actions: Any) -> None:
        for action in actions:
            match action:
                case Send(record) if isinstance(record, Push | Announce):
                    self.feed(record)
                case Compute():
                    worker.orders.append(action)
                case OfferWeights(weights):
                    worker.local.offer(weights)
                    if worker.rows is not None:
                        worker.rows.offer(weights)

    def compute(self, worker: Worker) -> None:
        order = worker.orders.popleft()
        assert worker.core is not None
        grant = worker.core.begin(order.grant)
        assert grant is not None
        done = worker.handler.handle(grant, order.batches, lambda batch, grant_id: True)
        assert done is not None
        assert len(done.batches) == len(order.batches)
        self.do(worker, worker.core.gradient_done(order.grant, order.batches, done, 0.0))
