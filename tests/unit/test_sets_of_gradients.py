"""A group whose gradients come as sets: from grants to the new version, with the real engine, host and workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from doll.config import JobConfig, parse
from doll.consumers.compute.gradient import CachedVersion, GradientComputer
from doll.consumers.compute.gradient_engine import GrantHandler
from doll.consumers.compute.guard import Guard
from doll.consumers.intake.dead_letters import DeadLetters
from doll.consumers.intake.decoding import RawRecords
from doll.consumers.protocol.grants import part_of
from doll.consumers.protocol.worker_core import Batch, Compute, Send, WorkerCore
from doll.model.flat_model import FlatModel, build, fingerprint
from doll.optim.optimizer import Optimizer
from doll.ps.model.model_host import ModelHost
from doll.ps.model.updater import make_parts
from doll.ps.server import ParameterServer
from doll.ps.start import Start, make_engine
from doll.records.control import AnyRecord, Join, ServerStatus, Welcome
from doll.storage.contributions import Compressor
from doll.task.base import Task
from examples.synthetic.task import Gaussian
from memory_stores import MemoryBlobs, MemoryCheckpointStore
from worker_fakes import FakeChannel

pytestmark = pytest.mark.slow  # loads torch

JOB = """
job: unit
task: {class: "examples.synthetic.task:Gaussian", args: {features: 6}}
data: {workers: 2, batch_size: 16}
training: {policy: {name: doll, group_size: 6}, optimizer: {name: sgd, lr: 0.1}}
"""
WORKERS, GROUP, BATCH = 2, 6, 16


class Normed(Gaussian):
    """With batch norm: two float buffers of four, and a counter of 64 bits."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def records(worker: int, batch: int) -> RawRecords:
    rng = np.random.default_rng((worker, batch))
    rows = [np.array([*rng.normal(size=6), at % 2], "<f4").tobytes() for at in range(BATCH)]
    return RawRecords(range(BATCH * batch, BATCH * (batch + 1)), rows)


class Experts(torch.nn.Module):
    """Which of its experts a batch uses depends on it, and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(6, 2) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.experts[int(x[0, 0] * 10) % 9](x)
        return output


class Mixed(Gaussian):
    def build_model(self) -> torch.nn.Module:
        return Experts()


class Job:
    """A server and two workers in one process; each has a model of its own, and they share a blob store."""

    def __init__(self, task: Task, *overrides: str, whole_sets: bool) -> None:
        self.config: JobConfig = parse(JOB, overrides)
        self.whole_sets = whole_sets
        self.blobs, self.store, self.sent = MemoryBlobs(), MemoryCheckpointStore("unit"), list[AnyRecord]()
        model = build(self.config, task)
        self.num_parameters, self.num_floats = model.num_parameters, model.num_floats
        self.updater = make_parts(self.config.training, model).updater
        host = ModelHost(self.config, self.store.claim_term(), self.updater, self.blobs)
        engine = make_engine(self.config, Start(1, 0.0, (0,) * WORKERS), host.load, fingerprint(self.config, model))
        self.server = ParameterServer(
            self.config, engine=engine, host=host, store=self.store, outbox=self,
            clock=lambda: 0.0,
        )  # fmt: skip
        self.server.open()
        self.workers = [self.worker(number, task) for number in range(WORKERS)]

    def worker(self, number: int, task: Task) -> tuple[WorkerCore, GrantHandler, DeadLetters]:
        self.server.feed(Join(worker=number, process=f"w{number}"))
        welcome = self.sent[-1]
        assert isinstance(welcome, Welcome)
        computer = GradientComputer(task, build(self.config, task))
        letters = DeadLetters(self.config, task, FakeChannel(), number, term=lambda: 1)
        handler = GrantHandler(
            self.config, local_model=CachedVersion("unit", self.blobs, computer),
            guard=Guard(self.config, task, computer), compressor=Compressor("unit"), blobs=self.blobs,
            dead_letters=letters, contribution=computer.new_sum(),
        )  # fmt: skip
        return WorkerCore(welcome, max_pending=8, now=0.0), handler, letters

    def run(self, updates: int) -> None:
        """`updates` updates; a worker computes its granted batches either as one set or as sets of one batch."""
        for batch in range(updates * GROUP // WORKERS):
            for number, (core, _, letters) in enumerate(self.workers):
                decoded = letters.decode(records(number, batch))
                for action in core.batch_ready(Batch(batch, decoded, BATCH, 0.0, partition=core.worker)):
                    assert isinstance(action, Send)
                    self.server.feed(action.record)  # type: ignore[arg-type]
                self.deliver()
        assert self.server.engine.version == updates
        self.server.close()

    def deliver(self) -> None:
        while self.sent:
            record = self.sent.pop(0)
            core, handler, _ = self.workers[getattr(record, "worker", 0)]
            for action in core.on_record(record, 0.0):
                if not isinstance(action, Compute):
                    continue
                grant, batches = action.grant, action.batches
                while batches:
                    done = handler.handle(grant, batches, lambda batch, grant_id: self.whole_sets)
                    assert done is not None
                    for answer in core.gradient_done(grant, batches, done, 0.0):
                        assert isinstance(answer, Send)
                        self.server.feed(answer.record)  # type: ignore[arg-type]
                    batches = batches[len(done.batches) :]
                    grant = part_of(grant, len(done.batches))

    # --- the server's outbox --------------------------------------------------------------------------------------

    def send_command(self, worker: int, record: AnyRecord) -> None:
        self.sent.append(record)

    def send_update(self, record: AnyRecord) -> None:
        pass

    def send_status(self, record: ServerStatus) -> None:
        pass

    def updates_acknowledged(self) -> int:
        return 1 << 30

    def flush(self, timeout_s: float) -> int:
        return 0


def one_process(task: Task, config: JobConfig, updates: int) -> np.ndarray:
    """The same updates by one process: the gradients of a group one after the other, their mean, a step."""
    computer = GradientComputer(task, build(config, task))
    model: FlatModel = build(config, task)
    optimizer = Optimizer(model, config.training.optimizer)
    for update in range(updates):
        computer.load(optimizer.weights)
        gradients = []
        for batch in range(3 * update, 3 * update + 3):
            for worker in range(WORKERS):
                rows = np.array([np.frombuffer(value or b"", "<f4") for value in records(worker, batch).values])
                gradients.append(computer.compute(rows[:, :-1], rows[:, -1].astype(np.int64)).values.copy())
        optimizer.apply(gradients, 1 / (GROUP * BATCH), GROUP * BATCH)
    return optimizer.weights


@pytest.mark.parametrize("task", [Gaussian(features=6), Normed(features=6)], ids=["linear", "batch norm"])
@pytest.mark.parametrize("whole_sets", [True, False])
def test_a_group_computed_as_sets_makes_the_step_of_the_mean_gradient(task: Any, whole_sets: bool) -> None:
    job = Job(task, whole_sets=whole_sets)
    job.run(3)
    expected = one_process(task, job.config, 3)
    floats, weights = slice(job.num_floats), job.updater.weights
    # The order of addition differs, within a set and between sets: a few units in the last place of float32.
    np.testing.assert_allclose(weights[floats], expected[floats], rtol=1e-5, atol=1e-6)
    assert weights[job.num_floats :].tobytes() == expected[job.num_floats :].tobytes()
    if isinstance(task, Normed):
        counter = weights[job.num_floats :].view(np.int64)
        assert counter.tolist() == [3], "batches seen: one per version, as of a single batch"
        assert np.abs(weights[job.num_parameters : job.num_floats]).max() > 0.1, "the statistics have moved"


@pytest.mark.parametrize("whole_sets", [True, False])
def test_a_parameter_that_no_sample_of_an_update_has_used_stays_as_torch_leaves_it(whole_sets: bool) -> None:
    """As a loop of torch's: weight decay and momentum are for parameters with a gradient."""
    optimizer = "{name: adam, lr: 0.01, weight_decay: 0.3}"
    job = Job(Mixed(features=6), f"training.optimizer={optimizer}", whole_sets=whole_sets)
    job.run(4)
    module = build(job.config, Mixed(features=6)).module
    parameters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in module.parameters()]
    plain, num_absent = torch.optim.Adam(parameters, lr=0.01, weight_decay=0.3), 0
    for update in range(4):
        theirs = Experts()
        theirs.load_state_dict(dict(zip(theirs.state_dict(), parameters, strict=True)))
        for batch in range(3 * update, 3 * update + 3):
            for worker in range(WORKERS):
                rows = torch.tensor(
                    np.array([np.frombuffer(raw or b"", "<f4") for raw in records(worker, batch).values])
                )
                loss = torch.nn.functional.cross_entropy(theirs(rows[:, :-1]), rows[:, -1].long())
                torch.autograd.backward(loss / GROUP)
        for parameter, with_gradient in zip(parameters, theirs.parameters(), strict=True):
            parameter.grad = with_gradient.grad
            num_absent += with_gradient.grad is None
        plain.step()
    assert 2 * 4 < num_absent < 2 * 4 * 8
    expected = torch.cat([parameter.detach().flatten() for parameter in parameters])
    np.testing.assert_allclose(job.updater.weights, expected, atol=1e-5)
