"""From a grant to a gradient in the blob store: exactly the bytes of the gradient, at exactly the granted weights."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import parse
from doll.consumers.compute.gradient import CachedVersion, GradientComputer
from doll.consumers.compute.gradient_engine import GrantHandler
from doll.consumers.compute.guard import Guard
from doll.consumers.intake.dead_letters import DeadLetters
from doll.consumers.intake.decoding import RawRecords
from doll.consumers.protocol.worker_core import Batch
from doll.model.flat_model import build
from doll.storage.blobs import decode_blob, encode_blob
from doll.storage.contributions import Compressor
from doll.task.base import Sample, Task, load_task
from examples.synthetic.task import Gaussian
from fake_message import FakeMessage
from memory_stores import MemoryBlobs
from worker_fakes import FakeChannel
from worker_records import grant

pytestmark = pytest.mark.slow  # loads torch

JOB = """
job: unit
task: {class: "examples.synthetic.task:Gaussian", args: {features: 3}}
data: {workers: 2, batch_size: 8}
"""


def goes_on(batch: int, grant_id: int) -> bool:
    return True


class Rig:
    def __init__(self, *overrides: str, task: Task | None = None) -> None:
        self.config = parse(JOB, overrides)
        self.task = load_task(self.config) if task is None else task
        self.computer = GradientComputer(self.task, build(self.config, self.task))
        self.channel, self.blobs = FakeChannel(), MemoryBlobs()
        self.letters = DeadLetters(self.config, self.task, self.channel, 1, term=lambda: 3)
        self.handler = GrantHandler(
            self.config,
            local_model=CachedVersion("unit", self.blobs, self.computer),
            guard=Guard(self.config, self.task, self.computer),
            compressor=Compressor("unit"),
            blobs=self.blobs,
            dead_letters=self.letters,
            contribution=self.computer.new_sum(),
            held_out=self.computer.score,
        )
        self.weights = np.random.default_rng(1).normal(size=self.computer.weights.size).astype(np.float32)

    def publish(self) -> None:
        self.blobs.put("doll:unit:w:3:9", encode_blob(self.weights, job="unit", kind="w", version=9), 60.0)

    def batch(self, *bad: int, number: int = 5, partition: int = 0) -> Batch:
        """Eight samples, of batch 5 from offset 140 on; those of `bad` cannot be decoded."""
        rng = np.random.default_rng(number - 3)
        first = 100 + 8 * number
        values = [b"?" if at in bad else np.array([*rng.normal(size=3), at % 2], "<f4").tobytes() for at in range(8)]
        messages = [FakeMessage(stamp=(1, 1000 * (first + at))) for at in range(8)]
        decoded = self.letters.decode(RawRecords(range(first, first + 8), values, partition, messages))
        dead = tuple(item.offset for item in decoded.refused if item.whole)
        return Batch(
            number, decoded, decoded.num_samples, 0.0, dead=dead, partition=partition, held_out=decoded.held_out
        )  # fmt: skip


def test_the_stored_gradient_is_todays_to_the_bit() -> None:
    """The path through the ports changes no bit: the same as the computer's own answer at these weights."""
    rig = Rig()
    rig.publish()
    batch = rig.batch()
    done = rig.handler.handle(grant(5), (batch,), goes_on)
    assert done is not None
    (computed,) = done.batches
    assert (done.version, computed.num_samples, computed.dead, done.key) == (9, 8, (), "doll:{unit}:g:3:1")
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


def held_out_from(offset: int) -> str:
    """The records from this offset on are held out, by their event times."""
    at = datetime.fromtimestamp(offset, UTC).isoformat()
    return f"evaluation.holdout={{from: {at}}}"


def test_held_out_samples_are_scored_at_the_granted_weights_and_not_in_the_gradient() -> None:
    rig = Rig(held_out_from(145))
    rig.publish()
    batch = rig.batch()
    done = rig.handler.handle(grant(5), (batch,), goes_on)
    assert done is not None
    (computed,) = done.batches
    assert (batch.held_out, computed.num_samples, computed.weight) == ((145, 146, 147), 5, 5.0)
    blob = rig.blobs.get(done.key)
    assert blob is not None
    stored = decode_blob(blob, job="unit", kind="g", version=9, numel=rig.weights.size)
    torch.manual_seed(0)
    other = GradientComputer(rig.task, build(rig.config, rig.task))
    other.weights[:] = rig.weights
    expected = other.compute(batch.data.x, batch.data.y)
    assert stored.tobytes() == expected.values.tobytes(), "as if the batch had five samples"
    score = other.score(batch.data.held_out_samples, 1)
    assert computed.held_out_score == score
    assert score is not None
    assert score.n_samples == 3


def test_a_batch_of_which_all_samples_are_held_out_is_scored_without_a_gradient() -> None:
    rig = Rig(held_out_from(100))
    assert rig.handler.handle(grant(5), (rig.batch(),), goes_on) is None, "it needs the weights"
    rig.publish()
    done = rig.handler.handle(grant(5), (rig.batch(1),), goes_on)
    assert done is not None
    (computed,) = done.batches
    assert (done.key, done.version, computed.num_samples, computed.dead) == ("", 9, 0, (141,))
    assert computed.held_out_score is not None
    assert computed.held_out_score.n_samples == 7


def test_samples_that_the_guard_refuses_are_dead_lettered_with_what_the_log_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.publish()
    batch = rig.batch(2)
    rig.channel.values = {147: b"from the log"}
    compute = rig.computer.compute
    x_last = batch.data.x[6].copy()

    def fails_on_the_last(x: np.ndarray, *others: Any, **options: Any) -> Any:
        if (x == x_last).all(axis=-1).any():
            raise ValueError("cannot learn this")
        return compute(x, *others, **options)

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
        RawRecords([140, 141, 142], [b"?" * 70_000, np.array([1, 2, 3, 0], "<f4").tobytes(), None])
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


# --- sets -------------------------------------------------------------------------------------------------------------


def stored(rig: Rig, key: str) -> np.ndarray:
    blob = rig.blobs.get(key)
    assert blob is not None
    return decode_blob(blob, job="unit", kind="g", version=9, numel=rig.weights.size)


def alone(rig: Rig, batch: Batch) -> np.ndarray:
    """The gradient of this batch, by itself."""
    rig.computer.load(rig.weights)
    return rig.computer.compute(batch.data.x, batch.data.y).values.copy()


def test_a_set_is_the_float32_sum_in_the_order_of_its_batches_under_one_key() -> None:
    rig = Rig()
    rig.publish()
    batches = [rig.batch(number=number) for number in (5, 6, 7)]
    for number in (4, 5):  # the memory of the sum is used again
        done = rig.handler.handle(grant(5, number, 6, 9), batches, goes_on)
        assert done is not None
        assert (done.key, done.version, [item.num_samples for item in done.batches]) == (
            f"doll:{{unit}}:g:3:{number}", 9, [8, 8, 8]
        )  # fmt: skip
        first, second, third = (alone(rig, batch) for batch in batches)
        assert stored(rig, done.key).tobytes() == ((first + second) + third).tobytes()
        assert [key for key in rig.blobs.keys() if ":g:" in key] == [done.key]  # noqa: SIM118 - not a dict
        rig.blobs.delete(done.key)
        assert len({item.loss_sum for item in done.batches}) == 3, "losses are each batch's own"
        assert all(item.compute_s > 0 for item in done.batches)


@pytest.mark.parametrize("empty", [5, 6, 7])
def test_a_batch_without_usable_samples_adds_nothing_to_its_set(empty: int) -> None:
    rig = Rig()
    rig.publish()
    batches = [rig.batch(*(range(8) if number == empty else ()), number=number) for number in (5, 6, 7)]
    done = rig.handler.handle(grant(5, 1, 2, 3), batches, goes_on)
    assert done is not None
    assert [item.num_samples for item in done.batches] == [0 if number == empty else 8 for number in (5, 6, 7)]
    assert len(done.batches[empty - 5].dead) == 8
    first, second = (alone(rig, batch) for batch in batches if batch.num_samples)
    assert stored(rig, done.key).tobytes() == (first + second).tobytes()


def test_a_set_without_any_usable_sample_has_no_gradient() -> None:
    rig = Rig()
    done = rig.handler.handle(grant(5, 1, 2), [rig.batch(*range(8), number=number) for number in (5, 6)], goes_on)
    assert done is not None
    assert (done.key, len(done.batches), rig.blobs.keys()) == ("", 2, [])


@pytest.mark.parametrize("until", [6, 7])
def test_a_set_ends_before_a_batch_that_is_not_wanted(until: int) -> None:
    rig = Rig()
    rig.publish()
    asked: list[tuple[int, int]] = []

    def wanted(batch: int, grant_id: int) -> bool:
        asked.append((batch, grant_id))
        return batch < until

    batches = [rig.batch(number=number) for number in (5, 6, 7)]
    done = rig.handler.handle(grant(5, 1, 2, 3), batches, wanted)
    assert done is not None
    assert len(done.batches) == until - 5
    assert asked == [(6, 2), (7, 3)][: until - 5]
    expected = alone(rig, batches[0]) if until == 6 else alone(rig, batches[0]) + alone(rig, batches[1])
    assert stored(rig, done.key).tobytes() == expected.tobytes()


def test_a_set_ends_with_the_batch_that_reaches_the_time_limit() -> None:
    rig = Rig("worker.drain_s=0.001")
    rig.publish()
    done = rig.handler.handle(grant(5, 1, 2), [rig.batch(number=number) for number in (5, 6)], goes_on)
    assert done is not None
    assert len(done.batches) == 1


def test_the_time_limit_is_well_below_the_timeout_and_the_time_to_drain() -> None:
    limits = [parse(JOB, item).worker.set_limit_s for item in ([], ["worker.grant_timeout_s=2"], ["worker.drain_s=4"])]
    assert limits == [2.0, 0.5, 1.0]


def test_one_batch_is_stored_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own memory goes to the store; a set of several is stored from the memory of the sum."""
    rig = Rig()
    rig.publish()
    for number in range(5, 25):  # the guard looks at the first batches more closely, and copies their gradients
        rig.handler.handle(grant(number, 1), [rig.batch(number=number)], goes_on)
    seen: list[bool] = []
    put = rig.blobs.put

    def look(key: str, parts: Any, ttl_s: float) -> None:
        seen.append(np.shares_memory(np.frombuffer(parts[-1], np.float32), rig.computer._model.grad.numpy()))
        put(key, parts, ttl_s)

    monkeypatch.setattr(rig.blobs, "put", look)
    rig.handler.handle(grant(5, 1), [rig.batch()], goes_on)
    rig.handler.handle(grant(5, 2, 3), [rig.batch(), rig.batch(number=6)], goes_on)
    assert seen == [True, False]


def test_the_guard_judges_each_batch_of_a_set_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.publish()
    batches = [rig.batch(number=number) for number in (5, 6, 7)]
    rig.channel.values = {149: b"from the log"}
    compute = rig.computer.compute
    x_bad = batches[1].data.x[1].copy()

    def fails_on_one(x: np.ndarray, *others: Any, **options: Any) -> Any:
        if (x == x_bad).all(axis=-1).any():
            raise ValueError("cannot learn this")
        return compute(x, *others, **options)

    monkeypatch.setattr(rig.computer, "compute", fails_on_one)
    letters_before_the_blob: list[int] = []
    put = rig.blobs.put

    def look(key: str, parts: Any, ttl_s: float) -> None:
        letters_before_the_blob.append(len(rig.channel.letters))
        put(key, parts, ttl_s)

    monkeypatch.setattr(rig.blobs, "put", look)
    done = rig.handler.handle(grant(5, 1, 2, 3), batches, goes_on)
    assert done is not None
    assert [(item.num_samples, item.dead) for item in done.batches] == [(8, ()), (7, (149,)), (8, ())]
    assert letters_before_the_blob == [1]
    monkeypatch.undo()
    left = [at for at in range(8) if at != 1]
    middle = rig.computer.compute(batches[1].data.x[left], batches[1].data.y[left]).values.copy()
    expected = (alone(rig, batches[0]) + middle) + alone(rig, batches[2])
    assert stored(rig, done.key).tobytes() == expected.tobytes()


class Dropping(Gaussian):
    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Dropout(0.5), super().build_model(), torch.nn.Dropout(0.5))


def test_a_batch_draws_the_same_numbers_at_any_worker_after_anything_and_another_batch_others() -> None:
    def computed(*numbers: int, partition: int = 0, seed: int = 0) -> bytes:
        """The gradient of the last one of these batches, all with the same samples."""
        rig = Rig(f"seed={seed}", task=Dropping(features=3))
        rig.publish()
        samples = rig.batch(number=5).data
        for number in numbers:
            batch = rig.batch(number=number, partition=partition)
            batch.data.x, batch.data.y = samples.x, samples.y
            done = rig.handler.handle(grant(number), (batch,), goes_on)
        assert done is not None
        blob = rig.blobs.get(done.key)
        assert blob is not None
        return decode_blob(blob, job="unit", kind="g", version=9, numel=rig.weights.size).tobytes()

    first = computed(5)
    assert computed(3, 4, 5) == first
    others = [computed(6), computed(5, 6), computed(5, partition=1), computed(5, seed=1)]
    assert others[0] == others[1]
    assert len({first, *others}) == 4
