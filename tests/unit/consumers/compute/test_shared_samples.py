"""The samples on which all workers evaluate their replicas: the same at the same version, and the replica stays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import parse
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.compute.gradient_engine import GrantHandler
from doll.consumers.compute.guard import Guard
from doll.consumers.compute.shared_samples import SharedSamples
from doll.consumers.compute.step_model import StepModel
from doll.consumers.intake.dead_letters import DeadLetters
from doll.consumers.intake.decoding import RawRecords
from doll.consumers.protocol.worker_core import Batch
from doll.errors import BlobError, ServiceUnavailableError
from doll.model.flat_model import build
from doll.storage.blobs import encode_blob
from doll.storage.contributions import Compressor
from doll.task.base import Sample
from examples.synthetic.task import Gaussian
from memory_stores import MemoryBlobs
from worker_fakes import FakeChannel
from worker_records import grant

pytestmark = pytest.mark.slow  # loads torch

JOB = """
job: unit
task: {class: "examples.synthetic.task:Gaussian", args: {features: 3}}
data: {workers: 2, batch_size: 8}
training: {policy: {name: isp, significance: 100.0}}
"""


class Held(Gaussian):
    """Ten held-out samples: evaluations have two samples each, a quarter of a batch."""

    given = 10
    error: Exception | None = None
    seen: list[list[float]]

    def holdout(self) -> Iterable[Sample]:
        return [Sample(np.array([at, 1.0, -1.0], np.float32), np.int64(at % 2)) for at in range(self.given)]

    def forward(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x[:, 0].tolist())
        if self.error is not None:
            raise self.error
        output: torch.Tensor = model(x)
        return output


class Worker:
    def __init__(self) -> None:
        self.config = parse(JOB)
        self.task = Held(features=3)
        self.task.seen = []
        self.model = build(self.config, self.task)
        self.computer = GradientComputer(self.task, self.model)
        self.shared = SharedSamples(self.config, self.task, self.computer)


def test_workers_evaluate_the_same_samples_at_the_same_version_and_all_of_them_in_turn() -> None:
    one, other = Worker(), Worker()
    other.computer.weights[:] = 2 * one.computer.weights
    losses = {version: one.shared.loss(version) for version in range(40)}
    assert [version for version, loss in losses.items() if loss is not None] == list(range(0, 40, 4))
    assert one.task.seen == 2 * [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert other.shared.loss(32) != losses[32]
    assert other.task.seen == [one.task.seen[8]]
    other.computer.weights[:] = one.computer.weights
    assert other.shared.loss(32) == losses[32] == losses[12], "of the same samples"


def test_without_held_out_samples_nothing_is_evaluated() -> None:
    worker = Worker()
    worker.task.given = 0
    assert worker.shared.loss(0) is worker.shared.loss(4) is None


def test_rows_that_do_not_arrive_cost_one_evaluation_and_a_fault_of_the_task_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()
    worker.task.error = BlobError("gone")
    assert worker.shared.loss(0) is None
    worker.task.error = None
    assert worker.shared.loss(0) is not None
    worker.task.error = ServiceUnavailableError("the worker leaves")
    with pytest.raises(ServiceUnavailableError):
        worker.shared.loss(4)
    worker.task.error = None
    worker.computer.weights[:] = np.nan
    assert worker.shared.loss(8) is None
    worker.computer.weights[:] = 1.0
    worker.task.error = ValueError("of the user's code")
    assert worker.shared.loss(8) is None
    seen, worker.task.error = len(worker.task.seen), None
    assert worker.shared.loss(12) is None
    assert len(worker.task.seen) == seen, "it is not tried again"


def handled(*, is_shared: bool, weights: float = 0.25) -> tuple[Worker, list[Any], bytes]:
    """A worker that has computed two batches, at versions 8 and 9, and its last push."""
    worker, blobs = Worker(), MemoryBlobs()
    letters = DeadLetters(worker.config, worker.task, FakeChannel(), 1, term=lambda: 3)
    steps = StepModel("unit", blobs, worker.config.training, worker.model, worker.computer)
    handler = GrantHandler(
        worker.config, local_model=steps, guard=Guard(worker.config, worker.task, worker.computer),
        compressor=Compressor("unit", worker.model.num_parameters), blobs=blobs, dead_letters=letters,
        contribution=steps, shared=worker.shared if is_shared else None,
    )  # fmt: skip
    done = []
    for number, version in ((5, 8), (6, 9)):
        key = f"doll:unit:w:3:{version}"
        published = np.full(worker.computer.weights.size, weights, np.float32)
        blobs.put(key, encode_blob(published, job="unit", kind="w", version=version), 60.0)
        rng, first = np.random.default_rng(number), 100 + 8 * number
        values = [np.array([*rng.normal(size=3), at % 2], "<f4").tobytes() for at in range(8)]
        decoded = letters.decode(RawRecords(range(first, first + 8), values))
        order = grant(number, version, version=version, min_version=version, key=key)
        batch = Batch(number, decoded, decoded.num_samples, 0.0, dead=(), partition=0)
        done.append(handler.handle(order, (batch,), lambda batch, grant_id: True))
    rest = handler.store_rest(7)
    blob = blobs.get(rest.key)
    assert blob is not None
    return worker, done, bytes(blob)


def test_a_worker_evaluates_its_own_weights_before_it_computes_and_its_step_does_not_change() -> None:
    worker, done, stored = handled(is_shared=True)
    other = Worker()
    other.computer.weights[:] = 0.25
    assert [item.batches[0].shared_loss for item in done] == [other.shared.loss(8), None]
    plain, without, same = handled(is_shared=False)
    assert [item.batches[0].shared_loss for item in without] == [None, None]
    assert stored == same
    assert np.array_equal(worker.computer.weights, plain.computer.weights)
