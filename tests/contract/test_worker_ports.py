"""The contracts of a worker's decoder and of its ports: `GradientEngine`, `LocalModel` and `Compressor`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from doll.consumers.compute.gradient import CachedVersion, GradientComputer, LocalModel
from doll.consumers.compute.gradient_engine import GoesOn, GradientEngine, Handle, ThreadGradientEngine
from doll.consumers.compute.weights_ahead import DeltaReader
from doll.consumers.intake.dead_letters import Decoder
from doll.consumers.intake.decoding import DecodedBatch, RawRecords
from doll.consumers.protocol.worker_core import Batch, ComputedBatch, GradientDone
from doll.errors import RetryLater, ServiceUnavailableError, TaskError
from doll.model.flat_model import FlatModel
from doll.records.control import Grant
from doll.storage.blobs import decode_blob, encode_blob
from doll.storage.contributions import Compressor
from doll.storage.deltas import Layout
from doll.task.base import Task
from memory_stores import MemoryBlobs
from worker_records import grant

pytestmark = pytest.mark.slow  # loads torch

NOTHING = DecodedBatch(np.zeros((0,), np.float32), np.zeros((0,), np.float32), np.zeros((0,), np.int64))

# --- Decoder --------------------------------------------------------------------------------------------------------


def test_batches_are_decoded_in_order_and_not_in_the_callers_thread() -> None:
    seen: list[tuple[RawRecords, int]] = []

    def decode(records: RawRecords) -> DecodedBatch:
        seen.append((records, threading.get_ident()))
        return NOTHING

    decoder = Decoder(decode)
    assert decoder.depth >= 1
    finished: list[int] = []
    batches = [RawRecords([number], [b"x"]) for number in range(5)]
    futures = [decoder.decode(records) for records in batches]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: finished.append(number))  # type: ignore[misc]
    assert [future.result(60) for future in futures] == [NOTHING] * 5
    decoder.close()
    assert finished == [0, 1, 2, 3, 4]
    assert [records for records, _ in seen] == batches
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_a_batch_that_cannot_be_decoded_yet_is_waited_for() -> None:
    answers: list[Exception | DecodedBatch] = [RetryLater("no key"), RetryLater("no key"), RetryLater("")]
    answers += [NOTHING, NOTHING]
    waited: list[tuple[float, str]] = []

    def decode(records: RawRecords) -> DecodedBatch:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(seconds: float) -> bool:
        waited.append((seconds, decoder.waiting_for))
        return False

    decoder = Decoder(decode, wait)
    first, second = decoder.decode(RawRecords([0], [b"x"])), decoder.decode(RawRecords([1], [b"x"]))
    assert (first.result(60), second.result(60), decoder.waiting_for) == (NOTHING, NOTHING, "")
    decoder.close()
    assert waited == [(0.25, "no key"), (0.5, "no key"), (1.0, "the task cannot decode now")]


def test_waiting_ends_with_the_decoder() -> None:
    asked = threading.Event()

    def decode(records: RawRecords) -> DecodedBatch:
        asked.set()
        raise RetryLater("never")

    decoder = Decoder(decode)
    future = decoder.decode(RawRecords([0], [b"x"]))
    assert asked.wait(60)
    decoder.close()
    with pytest.raises(RetryLater):
        future.result(60)


def test_a_batch_that_cannot_be_decoded_fails_alone() -> None:
    def decode(records: RawRecords) -> DecodedBatch:
        if records.offsets == [1]:
            raise ServiceUnavailableError("Kafka does not take a dead letter")
        return NOTHING

    decoder = Decoder(decode)
    first, second = (decoder.decode(RawRecords([number], [b"x"])) for number in (1, 2))
    with pytest.raises(ServiceUnavailableError, match="does not take"):
        first.result(60)
    assert second.result(60) is NOTHING
    decoder.close()


def test_closing_a_decoder_waits_for_the_batch_under_way() -> None:
    entered, release = threading.Event(), threading.Event()

    def decode(records: RawRecords) -> DecodedBatch:
        entered.set()
        assert release.wait(60)
        return NOTHING

    decoder = Decoder(decode)
    first = decoder.decode(RawRecords([1], [b"x"]))
    assert entered.wait(60)
    closing = threading.Thread(target=decoder.close)
    closing.start()
    assert not first.done()
    release.set()
    closing.join(60)
    assert not closing.is_alive()
    assert first.result(0) is NOTHING


def test_a_gradient_does_not_wait_for_a_batch_that_is_being_decoded() -> None:
    entered, release = threading.Event(), threading.Event()

    def decode(records: RawRecords) -> DecodedBatch:
        entered.set()
        assert release.wait(60)
        return NOTHING

    decoder, engine = Decoder(decode), ThreadGradientEngine(lambda order, of, _: done(of[0].number))
    decoding = decoder.decode(RawRecords([1], [b"x"]))
    assert entered.wait(60)
    assert engine.submit(grant(1), (batch(1),), goes_on).result(60) == done(1)
    assert not decoding.done()
    release.set()
    decoder.close()
    engine.close()


# --- GradientEngine -------------------------------------------------------------------------------------------------

ENGINES: dict[str, Callable[[Handle], GradientEngine]] = {"thread": ThreadGradientEngine}


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest) -> Callable[[Handle], GradientEngine]:
    return ENGINES[request.param]


def batch(number: int) -> Batch:
    return Batch(number, NOTHING, 0, 0.0)


def goes_on(batch: int, grant_id: int) -> bool:
    return True


def done(number: int) -> GradientDone:
    return GradientDone(f"k{number}", 9, (ComputedBatch(0),))


def test_every_grant_is_answered_in_order_and_not_in_the_callers_thread(
    make_engine: Callable[[Handle], GradientEngine],
) -> None:
    threads: set[int] = set()

    def handle(order: Grant, of: Sequence[Batch], goes_on: GoesOn) -> GradientDone | None:
        threads.add(threading.get_ident())
        return done(of[0].number) if order.grant_ids != (2,) else None

    engine = make_engine(handle)
    assert engine.depth >= 1
    finished: list[int] = []
    futures = [engine.submit(grant(number, number), (batch(number),), goes_on) for number in range(1, 6)]
    for number, future in enumerate(futures, start=1):
        future.add_done_callback(lambda _, number=number: finished.append(number))  # type: ignore[misc]
    assert [future.result(60) for future in futures] == [done(1), None, done(3), done(4), done(5)]
    engine.close()
    assert finished == [1, 2, 3, 4, 5]
    assert threading.get_ident() not in threads


def test_what_fails_fails_alone(make_engine: Callable[[Handle], GradientEngine]) -> None:
    def handle(order: Grant, of: Sequence[Batch], goes_on: GoesOn) -> GradientDone | None:
        if of[0].number == 1:
            raise TaskError("diverged")
        return done(of[0].number)

    engine = make_engine(handle)
    first, second = (engine.submit(grant(number), (batch(number),), goes_on) for number in (1, 2))
    with pytest.raises(TaskError, match="diverged"):
        first.result(60)
    assert second.result(60) == done(2)
    engine.close()


def test_closing_waits_for_what_is_under_way(make_engine: Callable[[Handle], GradientEngine]) -> None:
    entered, release = threading.Event(), threading.Event()

    def handle(order: Grant, of: Sequence[Batch], goes_on: GoesOn) -> GradientDone | None:
        entered.set()
        assert release.wait(60)
        return done(of[0].number)

    engine = make_engine(handle)
    future = engine.submit(grant(1), (batch(1),), goes_on)
    assert entered.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert not future.done()
    release.set()
    closing.join(60)
    assert not closing.is_alive()
    assert future.result(0) == done(1)


def test_the_thread_computes_one_at_a_time() -> None:
    """Two of torch's at once would take each other's cores."""
    running, most = 0, 0

    def handle(order: Grant, of: Sequence[Batch], goes_on: GoesOn) -> GradientDone | None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        running -= 1
        return None

    engine = ThreadGradientEngine(handle)
    for future in [engine.submit(grant(number), (batch(number),), goes_on) for number in range(50)]:
        future.result(60)
    engine.close()
    assert most == 1


# --- LocalModel -----------------------------------------------------------------------------------------------------

LOCAL_MODELS: dict[str, Callable[[MemoryBlobs, GradientComputer], LocalModel]] = {
    "cached version": lambda blobs, computer: CachedVersion("unit", blobs, computer),
    "cached version, with deltas": lambda blobs, computer: CachedVersion(
        "unit", blobs, computer, deltas=DeltaReader("unit", blobs, Layout(computer.weights.size, 12))
    ),
}


class Replica:
    def __init__(self, make: Callable[[MemoryBlobs, GradientComputer], LocalModel]) -> None:
        torch.manual_seed(0)
        self.blobs = MemoryBlobs()
        self.computer = GradientComputer(Task(), FlatModel(torch.nn.Linear(4, 3)))
        self.local_model = make(self.blobs, self.computer)

    def publish(self, version: int) -> Grant:
        """A grant of `version`, whose weights are all equal to it."""
        weights = np.full(self.computer.weights.size, version, np.float32)
        key = f"doll:{{unit}}:w:3:{version}"
        self.blobs.put(key, encode_blob(weights, job="unit", kind="w", version=version), 60.0)
        return grant(5, version, version=version, min_version=version, key=key)


@pytest.fixture(params=LOCAL_MODELS)
def replica(request: pytest.FixtureRequest) -> Replica:
    return Replica(LOCAL_MODELS[request.param])


def test_the_replica_holds_the_weights_of_the_version_that_is_returned(replica: Replica) -> None:
    for version in (4, 9, 5):
        order = replica.publish(version)
        used = replica.local_model.load(order)
        assert used is not None
        assert order.min_version <= used <= order.version
        assert (replica.computer.weights == used).all()


def test_weights_that_are_there_are_not_fetched_again(replica: Replica) -> None:
    order = replica.publish(4)
    replica.local_model.load(order)
    replica.blobs.wipe()
    assert replica.local_model.load(order) == 4
    assert (replica.computer.weights == 4).all()


@pytest.mark.parametrize("damage", ["missing", "torn", "another version"])
def test_weights_that_are_not_whole_are_never_used(replica: Replica, damage: str) -> None:
    assert replica.local_model.load(replica.publish(4)) == 4
    order = replica.publish(9)
    blob = replica.blobs.get(order.key)
    assert blob is not None
    replica.blobs.delete(order.key)
    if damage == "torn":
        replica.blobs.put(order.key, [blob[:-1]], 60.0)
    elif damage == "another version":
        other = replica.blobs.get("doll:{unit}:w:3:4")
        assert other is not None
        replica.blobs.put(order.key, [other], 60.0)
    assert replica.local_model.load(order) is None
    assert (replica.computer.weights == 4).all()
    assert replica.local_model.load(replica.publish(9)) == 9


# --- Compressor -----------------------------------------------------------------------------------------------------

COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "dense": lambda: Compressor("unit"),
    "sparse": lambda: Compressor("unit", 90),
}


@pytest.fixture(params=COMPRESSORS)
def compressor(request: pytest.FixtureRequest) -> Compressor:
    return COMPRESSORS[request.param]()


def test_compressing_does_not_change_the_gradient(compressor: Compressor) -> None:
    gradient = np.random.default_rng(0).normal(size=100).astype(np.float32)
    before = gradient.tobytes()
    for version in (1, 2):
        assert compressor.compress(gradient, version=version, rows={})
    assert gradient.tobytes() == before


def test_the_dense_form_is_the_gradient_to_the_bit_and_names_its_version() -> None:
    gradient = np.random.default_rng(0).normal(size=100).astype(np.float32)
    parts = Compressor("unit").compress(gradient, version=9, rows={})
    assert np.shares_memory(np.frombuffer(parts[-1], np.float32), gradient), "the hot path copies nothing"
    stored = decode_blob(b"".join(parts), job="unit", kind="g", version=9, numel=100)
    assert stored.tobytes() == gradient.tobytes()
