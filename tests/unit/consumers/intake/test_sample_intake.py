"""A worker's streams of samples: every batch comes once and in order, and records that do not arrive end the worker."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from doll.config import parse
from doll.consumers.intake import sample_intake
from doll.consumers.intake.batching import MIN_RANGE, RawBatch
from doll.consumers.intake.dead_letters import Decoder
from doll.consumers.intake.decoding import DecodedBatch, RawRecords, RefusedSamples
from doll.consumers.intake.sample_intake import SampleIntake
from doll.consumers.lifecycle.departure import ProcessExit
from doll.consumers.protocol.worker_core import Acknowledge, Serve, WorkerAction, WorkerCore
from doll.errors import ServiceUnavailableError
from doll.kafka.chunk_reader import Chunk, NoRecordBelow, OutOfRange
from doll.records.control import Durable, Served, Welcome
from doll.records.event_times import EventTimes
from hypothesis import example, given
from hypothesis import strategies as st
from worker_fakes import FakeChannel, FakeReader
from worker_records import welcome

JOB = 'job: unit\ntask: {class: "examples.synthetic.task:Gaussian"}\ndata: {workers: 2, batch_size: 2}\n'
SIZE = 2  # records per batch
ROOM = 6  # batches

pytestmark = pytest.mark.slow  # loads torch


@dataclass
class SlowDecoder(Decoder):
    """Decodes when the test says so."""

    depth: int = 3
    waiting: deque[tuple[RawRecords, Future[DecodedBatch]]] = field(default_factory=deque)

    def decode(self, records: RawRecords) -> Future[DecodedBatch]:
        self.waiting.append((records, Future()))
        return self.waiting[-1][1]

    def finish(self) -> None:
        records, future = self.waiting.popleft()
        count = len(records.values)
        zeros = np.zeros((count, 1), np.float32)
        future.set_result(DecodedBatch(zeros, np.zeros(count, np.int64), np.array(records.offsets, np.int64)))

    def close(self) -> None:
        pass


class Rig:
    """A worker with room for `ROOM` batches, its intake, and a clock that the test moves."""

    now = 100.0

    def __init__(self, first: Welcome) -> None:
        self.config = parse(JOB)
        self.channel, self.reader, self.decoder = FakeChannel(), FakeReader(), SlowDecoder()
        self.core = WorkerCore(first, max_pending=ROOM, now=self.now)
        self.exit = ProcessExit(1.0, flush=lambda: None, stop=lambda: None, end_within=lambda seconds, code: None)
        self.intake = SampleIntake(
            self.config, self.core, self.channel, self.reader, self.decoder, self.exit, self.do
        )  # fmt: skip

    def do(self, actions: Sequence[WorkerAction]) -> None:
        for action in actions:
            if isinstance(action, Acknowledge):
                self.intake.acknowledge(action)
            elif isinstance(action, Serve):
                self.intake.serve(action.gone, [item.partition for item in action.new])


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Worker 1, which reads partition 1 from offset 110 on."""
    monkeypatch.setattr(sample_intake, "time", SimpleNamespace(monotonic=lambda: Rig.now))
    made = Rig(welcome())
    monkeypatch.setattr(sample_intake, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


# --- records that do not arrive ---------------------------------------------------------------------------------------


async def stall(rig: Rig, seconds: float, end: int = 200) -> str:
    """The problem that is found `seconds` later."""
    rig.now += seconds
    return await rig.intake.find_stall({1: end})


async def test_records_that_are_there_and_do_not_come_are_a_stall(rig: Rig) -> None:
    assert await stall(rig, 60.0) == ""
    assert "records are there and none has come for 62 s (worker.stall_timeout_s)" in await stall(rig, 2.0)


async def test_a_record_that_came_begins_the_time_anew(rig: Rig) -> None:
    rig.now += 5.0
    rig.intake.feed(Chunk(1, [110], [b"a"]))
    assert await stall(rig, 60.0) == ""
    assert await stall(rig, 0.5) != ""


@pytest.mark.parametrize("reason", ["draining", "full", "decoder"])
async def test_a_worker_that_wants_no_records_is_not_stalled(rig: Rig, reason: str) -> None:
    if reason == "draining":
        rig.core.drain()
    elif reason == "full":
        rig.core.retained = ROOM
    else:
        rig.decoder.waiting_for = "the registry does not answer"
    assert await stall(rig, 1000.0) == ""
    assert await stall(rig, 1000.0) == ""


async def test_nothing_unread_and_kafka_away_are_no_stall(rig: Rig) -> None:
    assert await stall(rig, 1000.0, end=110) == ""
    rig.now += 1000.0
    rig.intake.record_unreachable()
    assert await stall(rig, 1.0) == ""


async def test_offsets_without_records_are_not_unread(rig: Rig) -> None:
    rig.channel.records_left = False
    assert await stall(rig, 1000.0) == ""
    assert (rig.intake.measure_lag(), rig.core.lag, rig.core.most_unread) == ({1: 0}, 0, ())
    rig.reader.end = 203
    assert (rig.intake.measure_lag(), rig.core.lag, rig.core.most_unread) == ({1: 3}, 3, ((1, 3),))


async def test_a_partition_that_others_serve_by_now_is_no_stall(rig: Rig) -> None:
    def leave(topic: str, partition: int, lo: int, hi: int) -> bool:
        rig.intake.serve([1], [])
        return True

    rig.channel.holds_record = leave  # type: ignore[method-assign]
    assert await stall(rig, 1000.0) == ""


# --- any order of events ----------------------------------------------------------------------------------------------


class World:
    """A worker of up to three partitions, whose deliveries, decoder, durable batches and moves come in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.durable = dict.fromkeys(range(3), 0)
        self.read = dict.fromkeys(range(3), 0)  # next offset of the reader
        self.spans: dict[tuple[int, int], tuple[int, int]] = {}
        self.rig = Rig(self.welcome(range(3)))
        self.moves: list[Callable[[], object]] = [self.deliver, self.deliver, self.finish, self.finish, self.settle]
        self.moves += [self.move, self.tick]

    def welcome(self, partitions: Sequence[int]) -> Welcome:
        served = tuple(Served(partition=number, origin=0, next_batch=self.durable[number]) for number in partitions)
        return msgspec.structs.replace(welcome(), served=served)

    def deliver(self) -> None:
        if self.rig.reader.paused or not self.rig.intake.streams:
            return
        number = self.rng.choice(list(self.rig.intake.streams))
        lo = self.read[number] + self.rng.choice([0, 0, 0, 1, 3, (MIN_RANGE + 9) * SIZE])
        if self.rng.random() < 0.2:
            self.read[number] = lo
            self.rig.intake.feed(NoRecordBelow(number, lo))
        else:
            self.read[number] = hi = lo + self.rng.randrange(1, 8)
            self.rig.intake.feed(Chunk(number, range(lo, hi), [b"x"] * (hi - lo)))

    def finish(self) -> None:
        if self.rig.decoder.waiting:
            self.rig.decoder.finish()

    def settle(self, *, all_batches: bool = False) -> None:
        """Some batches are durable. A range of batches without a record becomes durable as a whole."""
        for number, served in self.rig.core.served.items():
            until = self.rng.randint(served.durable, served.next_batch)
            if all_batches or self.rng.random() < 0.3:
                until = served.skipped.end(served.next_batch)
            self.durable[number] = max(self.durable[number], until)
        ends = dict(self.durable)
        self.rig.do(self.rig.core.on_record(Durable(term=3, worker=1, until=ends, batches=sum(ends.values())), 0.0))

    def move(self) -> None:
        """Partitions go to other workers and come back."""
        if self.rng.random() < 0.7:
            return
        before = set(self.rig.intake.streams.values())
        numbers = [number for number in range(3) if self.rng.random() < 0.7]
        self.rig.do(self.rig.core.on_record(self.welcome(numbers), 0.0))
        assert sorted(self.rig.intake.streams) == numbers
        for number, stream in self.rig.intake.streams.items():
            if stream not in before:
                self.read[number] = self.rig.reader.reading[number].start

    def tick(self) -> None:
        self.rig.now += self.rng.choice([0.1, 20.0])
        self.rig.intake.tick()

    def check(self) -> None:
        """Each batch is in one place, there is room for all, and read again it has the same offsets."""
        intake, core = self.rig.intake, self.rig.core
        assert not any(task.done() for task in self.tasks), self.tasks
        held = sum(len(served.batches) for served in core.served.values())
        assert core.retained == held
        full = sum(batch.num_samples > 0 for served in core.served.values() for batch in served.batches)
        assert full + intake._num_taken <= ROOM, "only batches without a record need no room"
        assert len(intake._decoding) <= self.rig.decoder.depth
        for number, decoded in intake._decoded.items():
            assert decoded, "nothing is kept for a partition that waits for nothing"
            assert core.served[number].skipped
        assert all(stream.served is core.served[number] for number, stream in intake.streams.items())
        for number, served in core.served.items():
            for batch in served.batches:
                lo, hi = served.bounds(SIZE).span(batch.number_in_partition)
                offsets = {*range(lo, hi)} - {at for low, high in batch.gaps for at in range(low, high)}
                assert len(offsets) == batch.num_samples
                assert self.spans.setdefault((number, batch.number_in_partition), (lo, hi)) == (lo, hi)
        ends = [served.bounds(SIZE).lo(served.skipped.end(served.next_batch)) for served in core.served.values()]
        assert core.next_offset == sum(ends)

    async def run(self) -> None:
        self.tasks = [asyncio.ensure_future(task()) for task in (self.rig.intake.prepare, self.rig.intake.announce)]
        for _ in range(80):
            self.rng.choice(self.moves)()
            for _ in range(self.rng.choice([1, 2, 8])):
                await asyncio.sleep(0)
            self.check()
        while self.rig.core.retained or self.rig.intake._num_taken or len(self.rig.intake.buffer):
            self.finish()
            self.settle(all_batches=True)
            for _ in range(8):
                await asyncio.sleep(0)
            self.check()
        intake, core = self.rig.intake, self.rig.core
        assert not self.rig.reader.paused
        for number, stream in intake.streams.items():
            assert stream.batcher.next_offset == self.read[number]
            assert core.served[number].skipped.end(core.served[number].next_batch) == self.read[number] // SIZE
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@given(seed=st.integers(0, 2**32))
@example(seed=3420)  # a range gives several batches without a record, one by one, while others wait
def test_any_order_of_deliveries_moves_and_durable_batches_gives_each_batch_once(seed: int) -> None:
    async def run() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            world = World(seed)
            monkeypatch.setattr(sample_intake, "time", SimpleNamespace(monotonic=lambda: world.rig.now))
            async with asyncio.timeout(60):
                await world.run()

    asyncio.run(run())


async def test_a_delivery_of_an_earlier_reading_is_ignored() -> None:
    rig = Rig(welcome())
    rig.intake.serve([1], [])
    await rig.intake.receive(Chunk(1, [110], [b"a"]))
    rig.intake.serve([], [1])
    await rig.intake.receive(Chunk(1, range(110, 114), [b"a"] * 4))
    assert len(rig.intake.buffer) == 0
    await rig.intake.receive(Chunk(1, range(110, 114), [b"a"] * 4, reading=2))
    assert len(rig.intake.buffer) == 2
    await rig.intake.receive(NoRecordBelow(1, 900, reading=1))
    assert len(rig.intake.buffer) == 2


async def test_kafka_without_an_answer_lets_the_reader_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_intake, "_ASK_AGAIN_S", 0.0)
    rig = Rig(welcome())
    sought: list[tuple[int, int]] = []
    rig.channel.bounds = ServiceUnavailableError("no answer")
    rig.reader.seek = lambda partition, offset: sought.append((partition, offset))  # type: ignore[method-assign]
    await rig.intake.receive(OutOfRange(1, 110))
    assert (sought, rig.exit.is_requested) == ([(1, 110)], False)


# --- event times ------------------------------------------------------------------------------------------------------


def test_the_event_times_of_a_batch_are_those_of_the_records_that_can_be_learned() -> None:
    now_ms = round(1000 * time.time())
    raw: RawBatch[bytes] = RawBatch(0, 0, 10, 15, gaps=[(12, 13)], times_ms=[now_ms - 4, now_ms - 3, -1, now_ms - 1])
    zeros, all_offsets = np.zeros((4, 1), np.float32), np.array([10, 11, 13, 14])
    whole = DecodedBatch(zeros, zeros, all_offsets)
    assert sample_intake._event_times(raw, whole, 1000) == EventTimes(now_ms - 1, (0, 2, 3), 3, 1)
    partly = DecodedBatch(
        zeros, zeros, np.array([11, 11, 13]), [RefusedSamples(10, "bad", 1, True)], skipped=(("bot", 1),)
    )
    assert sample_intake._event_times(raw, partly, 1000) == EventTimes(now_ms - 3, (0,), 1, 1)
    raw.times_ms = []
    assert sample_intake._event_times(raw, whole, 1000) is None


async def test_event_times_stay_with_their_records(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks end anywhere in a batch."""
    monkeypatch.setattr(sample_intake, "time", SimpleNamespace(monotonic=lambda: rig.now, time=lambda: 1_800_000_000.0))
    base_ms = 1_700_000_000_000
    for offsets in ([110], [111, 112], [113, 114, 115]):
        times = [base_ms + offset for offset in offsets]
        rig.intake.feed(Chunk(1, offsets, [b"x"] * len(offsets), times_ms=times))
    tasks = [asyncio.create_task(rig.intake.prepare()), asyncio.create_task(rig.intake.announce())]
    for _ in range(3):
        while not rig.decoder.waiting:
            await asyncio.sleep(0)
        rig.decoder.finish()
    while len(rig.core.served[1].batches) < 3:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert [batch.times for batch in rig.core.served[1].batches] == [
        EventTimes(base_ms + 111 + 2 * number, (0, 1), 2) for number in range(3)
    ]
