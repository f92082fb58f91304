"""From a grant to a gradient in the blob store: exactly the bytes of the gradient, at exactly the granted weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from doll.config import parse
from doll.consumers.compressor import DenseCompressor
from doll.consumers.dead_letters import DeadLetters
from doll.consumers.decoding import Records
from doll.consumers.gradient import GradientComputer
from doll.consumers.grant_handler import GrantHandler
from doll.consumers.guard import Guard
from doll.consumers.local_model import GrantedVersion
from doll.consumers.worker import Batch
from doll.model import build
from doll.storage.blobs import decode_blob, encode_blob
from doll.task import Sample, load_task
from doll.testing import MemoryBlobs
from worker_fakes import FakeChannel, grant

JOB = """
job: unit
task: {class: "doll.tasks.synthetic:Gaussian", args: {features: 3}}
data: {workers: 2, batch_size: 8}
"""


def goes_on(batch: int, grant_id: int) -> bool:
    return True


class Rig:
    def __init__(self) -> None:
        self.config = parse(JOB)
        self.task = load_task(self.config)
        self.computer = GradientComputer(self.task, build(self.config, self.task))
        self.channel, self.blobs = FakeChannel(), MemoryBlobs()
        self.letters = DeadLetters(self.config, self.task, self.channel, 1, term=lambda: 3)
        self.handler = GrantHandler(
            self.config,
            local_model=GrantedVersion("unit", self.blobs, self.computer),
            guard=Guard(self.config, self.task, self.computer),
            compressor=DenseCompressor("unit"),
            blobs=self.blobs,
            dead_letters=self.letters,
            gradient_sum=self.computer.new_sum(),
        )
        self.weights = np.random.default_rng(1).normal(size=self.computer.weights.size).astype(np.float32)

    def publish(self) -> None:
        self.blobs.put("doll:unit:w:3:9", encode_blob(self.weights, job="unit", kind="w", version=9), 60.0)

    def batch(self, *bad: int) -> Batch:
        """Eight samples from offset 140 on; those of `bad` cannot be decoded."""
        rng = np.random.default_rng(2)
        values = [b"?" if at in bad else np.array([*rng.normal(size=3), at % 2], "<f4").tobytes() for at in range(8)]
        decoded = self.letters.decode(Records(range(140, 148), values))
        dead = tuple(item.offset for item in decoded.refused if item.whole)
        return Batch(5, decoded, decoded.num_samples, 0.0, dead=dead)


def test_the_stored_gradient_is_todays_to_the_bit() -> None:
    """The path through the ports changes no bit: the same as the computer's own answer at these weights."""
    rig = Rig()
    rig.publish()
    batch = rig.batch()
    done = rig.handler.handle(grant(5), (batch,), goes_on)
    assert done is not None
    (computed,) = done.batches
    assert (done.version, computed.num_samples, computed.dead, done.key) == (9, 8, (), "doll:unit:g:3:1")
    blob = rig.blobs.get(done.key)
    assert blob is not None
    stored = decode_blob(blob, job="unit", kind="g", version=9, numel=rig.weights.size)
    torch.manual_seed(0)
    other = GradientComputer(rig.task, build(rig.config, rig.task))
    other.weights[:] = rig.weights
    expected = other.compute(batch.data.x, batch.data.y)
    assert stored.tobytes() == expected.values.tobytes()
    assert (computed.loss_sum, computed.metric_sums) == (expected.loss_sum, expected.metric_sums)


def test_missing_weights_compute_nothing() -> None:
    rig = Rig()
    assert rig.handler.handle(grant(5), (rig.batch(),), goes_on) is None
    assert rig.blobs.keys() == []


def test_a_batch_without_usable_samples_needs_no_weights() -> None:
    rig = Rig()
    done = rig.handler.handle(grant(5), (rig.batch(*range(8)),), goes_on)
    assert done is not None
    (computed,) = done.batches
    assert (done.key, done.version, computed.num_samples, computed.dead) == ("", 9, 0, tuple(range(140, 148)))
    assert [letter.offset for letter in rig.channel.letters] == list(range(140, 148))


def test_samples_that_the_guard_refuses_are_dead_lettered_with_what_the_log_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.publish()
    batch = rig.batch(2)
    rig.channel.values = {147: b"from the log"}
    compute = rig.computer.compute
    x_last = batch.data.x[6].copy()

    def fails_on_the_last(x: np.ndarray, y: np.ndarray, **options: Any) -> Any:
        if (x == x_last).all(axis=-1).any():
            raise ValueError("cannot learn this")
        return compute(x, y, **options)

    monkeypatch.setattr(rig.computer, "compute", fails_on_the_last)
    done = rig.handler.handle(grant(5), (batch,), goes_on)
    assert done is not None
    assert [(item.num_samples, item.dead) for item in done.batches] == [(6, (142, 147))]
    letter = rig.channel.letters[-1]
    assert (letter.offset, letter.payload, letter.whole, letter.term) == (147, b"from the log", True, 3)
    assert "cannot learn this" in letter.reason
    assert (batch.num_samples, batch.dead) == (7, (142,)), "the batch stays as it is: another version may differ"


def test_the_decoder_dead_letters_what_it_refuses() -> None:
    rig = Rig()
    decoded = rig.letters.decode(
        Records([140, 141, 142], [b"?" * 70_000, np.array([1, 2, 3, 0], "<f4").tobytes(), None])
    )
    assert decoded.num_samples == 1
    assert [(item.offset, item.payload_bytes, len(item.payload)) for item in rig.channel.letters] == [
        (140, 70_000, 65_536),
        (142, 0, 0),
    ]


def test_sample_is_what_the_task_decodes() -> None:
    """The rig's records are the task's own: else every test here would be about refused samples."""
    task = Rig().task
    assert isinstance(task.decode(np.array([1, 2, 3, 1], "<f4").tobytes()), Sample | tuple)
