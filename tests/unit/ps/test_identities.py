"""Policies that must be the same for certain parameters: to the bit, with the real worker and server code."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from clock_world import RecordedWorld
from doll.config import parse
from doll.consumers.compressor import DenseCompressor, SparseCompressor
from doll.consumers.dead_letters import DeadLetters
from doll.consumers.decoding import Records
from doll.consumers.gradient import GradientComputer
from doll.consumers.grant_handler import GrantHandler
from doll.consumers.guard import Guard
from doll.consumers.local_model import CachedVersion
from doll.consumers.step_model import StepModel
from doll.consumers.worker import Batch, Compute, Offer, Send, WorkerCore
from doll.model import build
from doll.optim.optimizer import Optimizer
from doll.ps import events as ev
from doll.ps.local_host import LocalModelHost
from doll.ps.policies.asp import AspPolicyConfig
from doll.ps.policies.base import PolicyView
from doll.ps.policies.ssp import Ssp, SspPolicyConfig
from doll.ps.start import Start, make_engine
from doll.ps.updaters import make_updater
from doll.records import Announce, Grant, Join, NewVersion, Push, Welcome
from doll.task import load_task
from doll.testing import MemoryBlobs
from engine_runs import play, random_steps
from worker_fakes import FakeChannel

JOB = """
job: unit
task: {class: "doll.tasks.synthetic:Gaussian", args: {features: 6}}
data: {workers: 3, batch_size: 8}
training: {policy: %s, optimizer: {name: sgd, lr: 0.05, momentum: 0.5}}
worker: {max_pending_batches: 64}
checkpoint: {every_updates: 100000, every_s: 1000000}
blobs: {keep_versions: 100}
"""
WORKERS, BATCHES = 3, 12


class Worker:
    """One worker's protocol and computation, without I/O."""

    def __init__(self, job: Job, number: int) -> None:
        config = job.config
        self.task = load_task(config)
        model = build(config, self.task)
        computer = GradientComputer(self.task, model)
        self.letters = DeadLetters(config, self.task, FakeChannel(), number, term=lambda: 1)
        local: Any
        contribution: Any
        compressor: Any = DenseCompressor(config.job)
        if config.training.policy.sends_steps:
            local = contribution = StepModel(config.job, job.blobs, config.training, model, computer)
            compressor = SparseCompressor(config.job, model.num_parameters)
        else:
            local, contribution = CachedVersion(config.job, job.blobs, computer), computer.new_sum()
        self.local = local
        self.handler = GrantHandler(
            config, local_model=local, guard=Guard(config, self.task, computer), compressor=compressor, blobs=job.blobs,
            dead_letters=self.letters, contribution=contribution,
        )  # fmt: skip
        self.number = number
        self.core: WorkerCore | None = None
        self.orders: deque[Compute] = deque()

    def batch(self, number: int) -> Batch:
        """Its content depends on the worker and the number only."""
        rng = np.random.default_rng([self.number, number])
        values = [np.array([*rng.normal(size=6), at % 2], "<f4").tobytes() for at in range(8)]
        decoded = self.letters.decode(Records(range(8 * number, 8 * number + 8), values))
        return Batch(number, decoded, decoded.num_samples, 0.0)


class Job:
    """A server and its workers in one thread; which worker computes next is drawn from a seed."""

    def __init__(self, policy: str, seed: int) -> None:
        self.config = parse(JOB % policy)
        self.blobs = MemoryBlobs()
        self.order: list[tuple[int, int]] = []  # batches in the order of their updates: (worker, number)
        model = build(self.config, load_task(self.config))
        self.host = LocalModelHost(self.config, 1, make_updater(self.config.training, model), self.blobs)
        self.engine = make_engine(self.config, Start(1, 0.0, (0,) * WORKERS), self.host)
        self.workers = [Worker(self, number) for number in range(WORKERS)]
        for worker in self.workers:
            self.feed(Join(worker=worker.number, process=f"p{worker.number}"))
        for number in range(BATCHES):
            for worker in self.workers:
                assert worker.core is not None
                self.do(worker, worker.core.batch_ready(worker.batch(number)))
        rng = random.Random(seed)
        while busy := [worker for worker in self.workers if worker.orders]:
            self.compute(rng.choice(busy))

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        weights: npt.NDArray[np.float32] = self.host.tensors()["weights"]
        return weights

    def feed(self, event: ev.Event) -> None:
        events = deque([event])
        while events:
            for action in self.engine.handle(events.popleft(), 0.0):
                match action:
                    case ev.SendWelcome(worker, process, session, origin, next_batch):
                        welcome = Welcome(
                            term=1, worker=worker, process=process, session=session, origin=origin,
                            next_batch=next_batch, fingerprint="",
                        )  # fmt: skip
                        self.workers[worker].core = WorkerCore(welcome, max_pending=64, now=0.0)
                    case ev.SendGrant(worker, session, first, grant_ids, version, min_version, included):
                        grant = Grant(
                            term=1, worker=worker, session=session, first=first, grant_ids=grant_ids, version=version,
                            min_version=min_version, key=self.host.publish(version), included=included,
                        )  # fmt: skip
                        self.receive(worker, grant)
                    case ev.PublishWeights(version, workers, included):
                        for worker, count in zip(workers, included, strict=True):
                            key = self.host.publish(version)
                            self.receive(
                                worker, NewVersion(term=1, worker=worker, version=version, key=key, included=count)
                            )
                    case ev.FetchGradient():
                        events.append(self.host.fetch(action).event)
                    case ev.ApplyUpdate():
                        self.host.apply(action)
                        self.host.tidy()
                        self.order += (
                            (item.push.worker, batch.batch) for item in action.sets for batch in item.push.batches
                        )

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
                case Offer(weights):
                    worker.local.offer(weights)

    def compute(self, worker: Worker) -> None:
        order = worker.orders.popleft()
        done = worker.handler.handle(order.grant, order.batches, lambda batch, grant_id: True)
        assert done is not None
        assert worker.core is not None
        assert len(done.batches) == len(order.batches)
        self.do(worker, worker.core.gradient_done(order.grant, order.batches, done, 0.0))


@pytest.mark.parametrize("seed", range(5))
def test_isp_that_holds_nothing_back_is_bsp(seed: int) -> None:
    isp, bsp = Job("{name: isp, significance: 0}", seed), Job("{name: bsp, contribution: step}", seed)
    assert isp.engine.version == bsp.engine.version == BATCHES
    assert isp.weights.tobytes() == bsp.weights.tobytes()
    assert Job("{name: isp, significance: 5}", seed).weights.tobytes() != bsp.weights.tobytes()


@pytest.mark.parametrize("seed", range(5))
def test_doll_with_groups_of_one_batch_of_each_worker_is_bsp(seed: int) -> None:
    doll, bsp = Job(f"{{name: doll, group_size: {WORKERS}}}", seed), Job("{name: bsp}", seed)
    assert doll.engine.version == bsp.engine.version == BATCHES
    assert doll.weights.tobytes() == bsp.weights.tobytes()


def test_doll_with_groups_of_one_is_stochastic_gradient_descent_one_batch_after_the_other() -> None:
    job = Job("{name: doll, group_size: 1}", 0)
    assert job.engine.version == WORKERS * BATCHES
    task = load_task(job.config)
    model = build(job.config, task)
    computer, optimizer = GradientComputer(task, model), Optimizer(model, job.config.training.optimizer)
    assert len(set(job.order)) == WORKERS * BATCHES
    for number, batch in job.order:
        data = job.workers[number].batch(batch).data
        optimizer.apply([computer.compute(data.x, data.y).values], 1 / 8, 8)
    assert job.weights.tobytes() == optimizer.weights.tobytes()


@pytest.mark.parametrize(
    "policy",
    [
        "{name: ssp, staleness: 2}",
        "{name: essp, staleness: 2}",
        "{name: vap}",
        "{name: wsp, wave_batches: 2, clock_distance: 1}",
        "{name: asp, contribution: step}",
    ],
)
def test_every_batch_is_learned_and_the_same_order_makes_the_same_model(policy: str) -> None:
    job = Job(policy, 3)
    assert [worker.applied for worker in job.engine.workers()] == [BATCHES] * WORKERS
    other = Job(policy, 3)
    assert job.weights.tobytes() == other.weights.tobytes()
    first = build(job.config, load_task(job.config)).flat.detach().numpy()
    assert np.isfinite(job.weights).all()
    assert np.abs(job.weights - first).max() > 0.01


class PullingSsp(Ssp):
    """Fetches the newest weights for each batch."""

    def min_version(self, view: PolicyView, worker: int) -> int:
        return view.version


def test_ssp_without_a_bound_that_always_pulls_is_asp() -> None:
    count = 0
    for seed in range(15):
        ssp, asp = (
            RecordedWorld(SspPolicyConfig(staleness=10_000), lambda: PullingSsp(10_000)),
            RecordedWorld(AspPolicyConfig(contribution="step")),
        )
        for world in (ssp, asp):
            play(world, random_steps(seed, 1500))
        assert ssp.actions == asp.actions
        count += len(ssp.actions)
    assert count > 1000
