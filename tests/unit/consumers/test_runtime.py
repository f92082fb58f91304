"""A worker's tasks without Faust and without Kafka: what they decode, compute, send, acknowledge, and when they end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doll.config import parse
from doll.consumers import runtime
from doll.consumers.intake import sample_intake
from doll.consumers.intake.dead_letters import Decoder
from doll.consumers.intake.decoding import DecodedBatch, RawRecords, RefusedSamples
from doll.consumers.lifecycle.departure import Departure, ProcessExit
from doll.consumers.protocol.worker_core import ComputedBatch, GradientDone, Send, WorkerCore
from doll.consumers.runtime import WorkerRuntime
from doll.errors import ConfigError, DollError, ServiceUnavailableError, TaskError
from doll.kafka.chunk_reader import Chunk, NoRecordBelow
from doll.process.health import Heartbeat
from doll.records.control import Alive, Announce, AnyRecord, BatchRange, Durable, Flush, Leave, Nack, Push, Stop
from record_builders import announce
from worker_fakes import FakeChannel, FakeDecoder, FakeEngine, FakeMainLoop, FakeReader
from worker_records import grant, welcome

JOB = 'job: unit\ntask: {class: "examples.synthetic.task:Gaussian"}\ndata: {workers: 2, batch_size: 2}\n'

pytestmark = pytest.mark.slow  # loads torch


def decode_records(records: RawRecords) -> DecodedBatch:
    """One sample per record; a record without value is refused."""
    if any(value == b"away" for value in records.values):
        raise ServiceUnavailableError("Kafka does not take a dead letter")
    usable = [offset for offset, value in zip(records.offsets, records.values, strict=True) if value]
    refused = [
        RefusedSamples(offset, "empty", 1, True)
        for offset, value in zip(records.offsets, records.values, strict=True)
        if not value
    ]
    zeros = np.zeros((len(usable), 1), np.float32)
    return DecodedBatch(zeros, np.zeros(len(usable), np.int64), np.array(usable, np.int64), refused)


@dataclass
class SlowDecoder(Decoder):
    """Decodes when the test says so."""

    depth: int = 2
    waiting: deque[tuple[RawRecords, Future[DecodedBatch]]] = field(default_factory=deque)

    def decode(self, records: RawRecords) -> Future[DecodedBatch]:
        self.waiting.append((records, Future()))
        return self.waiting[-1][1]

    def finish(self) -> None:
        records, future = self.waiting.popleft()
        future.set_result(decode_records(records))

    def close(self) -> None:
        pass


class Rig:
    """Worker 1 from batch 5 on (offset 110): two records a batch, at most four batches that are not durable."""

    def __init__(self, *overrides: str, depth: int = 1, decoder: Decoder | None = None) -> None:
        self.config = parse(JOB, ["worker.max_pending_batches=4", *overrides])
        self.channel, self.reader, self.main_loop = FakeChannel(), FakeReader(), FakeMainLoop()
        self.engine = FakeEngine(depth)
        self.core = WorkerCore(welcome(), max_pending=4, now=0.0)
        self.departure = Departure(end_within=lambda seconds, code: None)
        self.heartbeat = Heartbeat("worker-1")
        self.runtime = WorkerRuntime(
            self.config, core=self.core, channel=self.channel, reader=self.reader, commands_offset=50,
            decoder=decoder or FakeDecoder(decode_records), engine=self.engine, departure=self.departure,
            heartbeat=self.heartbeat,
        )  # fmt: skip
        self.runtime.main_loop = self.main_loop

    def feed(self, *values: bytes | None) -> None:
        """The next records of the stream, as one chunk."""
        first = self.runtime.intake.streams[1].batcher.next_offset
        self.runtime.intake.feed(Chunk(1, range(first, first + len(values)), list(values)))

    async def announce(self, count: int) -> None:
        """`count` good batches, announced."""
        for _ in range(count):
            self.feed(b"x", b"x")
        await self.until(lambda: self.core.retained == count)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let the tasks run."""
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Periods are over at once, and no process ends."""
    monkeypatch.setattr(runtime, "TICK_S", 0.0)
    monkeypatch.setattr(runtime, "WATCH_EVERY_S", 0.0)
    monkeypatch.setattr(runtime, "ASK_KAFKA_EVERY_S", 0.0)
    monkeypatch.setattr(ProcessExit.__init__, "__kwdefaults__", {"end_within": lambda seconds, code: None})


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Rig]]:
    """Make a rig and run its tasks, except those named, until the test's end."""
    tasks: list[asyncio.Task[None]] = []

    def make(
        *overrides: str, depth: int = 1, decoder: Decoder | None = None, without: tuple[str, ...] = ("tick", "watch")
    ) -> Rig:
        rig = Rig(*overrides, depth=depth, decoder=decoder)
        tasks.extend(asyncio.ensure_future(task()) for task in rig.runtime.tasks() if task.__name__ not in without)
        return rig

    yield make
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert result is None or isinstance(result, asyncio.CancelledError), result


def done(key: str, version: int = 9, batches: int = 1) -> GradientDone:
    return GradientDone(key, version, (ComputedBatch(2, 1.0),) * batches, 0.1, 0.1)


async def test_a_batch_is_decoded_and_announced(start: Callable[..., Rig]) -> None:
    rig = start()
    rig.feed(b"a", None, b"b")
    await rig.until(lambda: rig.channel.sent)
    assert rig.channel.sent == [announce(1, 7, 5, 6)]
    assert rig.core.next_offset == 112
    assert rig.core.served[rig.core.worker].next_batch == 6
    assert rig.core.served[1].batches[0].dead == (111,)


async def test_no_more_is_decoded_than_the_core_has_room_for(start: Callable[..., Rig]) -> None:
    rig = start()
    for _ in range(6):
        rig.feed(b"x", b"x")
    await rig.until(lambda: rig.core.retained == 4)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (rig.core.retained, len(rig.runtime.intake.buffer)) == (4, 2)
    rig.channel.command(Durable(term=3, worker=1, until={1: 6}, batches=6))
    await rig.until(lambda: len(rig.runtime.intake.buffer) == 1)
    assert rig.reader.committed == [112]


async def test_batches_are_decoded_side_by_side_and_announced_in_order(start: Callable[..., Rig]) -> None:
    decoder = SlowDecoder()
    rig = start(decoder=decoder)
    for value in (b"a", b"b", b"c"):
        rig.feed(value, value)
    await rig.until(lambda: len(decoder.waiting) == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert [records.values for records, _ in decoder.waiting] == [[b"a", b"a"], [b"b", b"b"]]
    assert [records.offsets for records, _ in decoder.waiting] == [range(110, 112), range(112, 114)]
    first, second = decoder.waiting
    second[1].set_result(decode_records(second[0]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (rig.channel.sent, rig.core.retained) == ([], 0)  # the one before is not there
    first[1].set_result(decode_records(first[0]))
    await rig.until(lambda: rig.core.retained == 2)
    assert [record.runs[0].first for record in rig.channel.of(Announce)] == [5, 6]
    await rig.until(lambda: len(decoder.waiting) == 3)


async def test_what_is_being_decoded_takes_room_too(start: Callable[..., Rig]) -> None:
    decoder = SlowDecoder()
    rig = start(decoder=decoder)  # at most four that are not durable
    for _ in range(6):
        rig.feed(b"x", b"x")
    for held in range(3):
        await rig.until(lambda: decoder.waiting)
        decoder.finish()
        await rig.until(lambda held=held: rig.core.retained == held + 1)  # type: ignore[misc]
    for _ in range(20):
        await asyncio.sleep(0)
    assert (rig.core.retained, len(decoder.waiting), len(rig.runtime.intake.buffer)) == (3, 1, 2)


async def test_the_stream_pauses_when_the_buffer_is_full_and_resumes_when_it_is_half_empty(
    start: Callable[..., Rig],
) -> None:
    rig = start("worker.stream_buffer_records=8")  # four batches
    for _ in range(8):
        rig.feed(b"x", b"x")
    assert rig.reader.paused
    await rig.until(lambda: rig.core.retained == 4)
    assert rig.reader.paused  # four are left
    rig.channel.command(Durable(term=3, worker=1, until={1: 6}, batches=6))
    await rig.until(lambda: rig.core.retained == 4 and len(rig.runtime.intake.buffer) == 3)
    assert rig.reader.paused
    rig.channel.command(Durable(term=3, worker=1, until={1: 7}, batches=7))
    await rig.until(lambda: len(rig.runtime.intake.buffer) == 2)
    assert not rig.reader.paused


async def test_a_grant_is_answered_with_a_push_that_names_the_version_used(start: Callable[..., Rig]) -> None:
    rig = start()
    await rig.announce(1)
    rig.channel.command(grant(5))
    await rig.until(lambda: rig.engine.submitted)
    order, (batch,), future = rig.engine.submitted.popleft()
    assert (order, batch.number) == (grant(5), 5)
    future.set_result(done("k", version=8))
    await rig.until(lambda: rig.channel.of(Push))
    (push,) = rig.channel.of(Push)
    assert (push.version, push.key) == (8, "k")
    assert [(item.batch, item.n_samples) for item in push.batches] == [(5, 2)]


async def test_a_set_that_ends_early_is_pushed_and_the_rest_is_submitted(start: Callable[..., Rig]) -> None:
    rig = start()
    await rig.announce(3)
    rig.channel.command(grant(5, 1, 2, 3))
    await rig.until(lambda: rig.engine.submitted)
    order, batches, future = rig.engine.submitted.popleft()
    assert (order.grant_ids, [batch.number for batch in batches]) == ((1, 2, 3), [5, 6, 7])
    future.set_result(done("a", batches=2))
    await rig.until(lambda: rig.engine.submitted)
    order, batches, future = rig.engine.submitted.popleft()
    assert (order, [batch.number for batch in batches]) == (grant(7, 3), [7])
    future.set_result(done("b"))
    await rig.until(lambda: len(rig.channel.of(Push)) == 2)
    assert [[item.grant_id for item in push.batches] for push in rig.channel.of(Push)] == [[1, 2], [3]]
    assert not rig.core.busy


async def test_a_set_goes_on_while_it_is_wanted_and_the_process_stays(start: Callable[..., Rig]) -> None:
    rig = start()
    await rig.announce(2)
    rig.channel.command(grant(5, 1, 2))
    await rig.until(lambda: rig.engine.submitted)
    assert rig.engine.goes_on(6, 2)
    rig.channel.command(grant(6, 3))
    await rig.until(lambda: not rig.engine.goes_on(6, 2))
    rig.engine.submitted.popleft()[2].set_result(done("a"))
    await rig.until(lambda: rig.engine.submitted)
    assert [order.grant_ids for order, _, _ in rig.engine.submitted] == [(3,)], "what was replaced is not computed"
    assert rig.engine.goes_on(6, 3)
    rig.core.drain()
    assert not rig.engine.goes_on(6, 3)


async def test_a_set_does_not_go_on_in_a_process_that_ends(start: Callable[..., Rig]) -> None:
    rig = start()
    await rig.announce(2)
    rig.channel.command(grant(5, 1, 2))
    await rig.until(lambda: rig.engine.submitted)
    assert rig.engine.goes_on(6, 2)
    rig.channel.command(Stop(term=3, reason="updates"))
    await rig.until(lambda: not rig.engine.goes_on(6, 2))


@pytest.mark.parametrize("depth", [1, 2])
async def test_the_engine_gets_as_many_grants_at_once_as_it_takes(start: Callable[..., Rig], depth: int) -> None:
    rig = start(depth=depth)
    await rig.announce(3)
    for number, batch in enumerate((5, 6, 7), start=1):
        rig.channel.command(grant(batch, number))
    await rig.until(lambda: len(rig.engine.submitted) == depth)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(rig.engine.submitted) == depth
    for key in "abc":
        await rig.until(lambda: rig.engine.submitted)
        rig.engine.submitted.popleft()[2].set_result(done(key))
    await rig.until(lambda: len(rig.channel.of(Push)) == 3)
    assert [(push.batches[0].batch, push.key) for push in rig.channel.of(Push)] == [(5, "a"), (6, "b"), (7, "c")]


async def test_a_grant_that_was_replaced_is_not_computed(start: Callable[..., Rig]) -> None:
    rig = start()
    await rig.announce(2)
    rig.channel.command(grant(5, 1))
    await rig.until(lambda: rig.engine.submitted)
    rig.channel.command(grant(6, 2))
    rig.channel.command(grant(6, 3))
    rig.engine.submitted.popleft()[2].set_result(done("a"))
    await rig.until(lambda: rig.engine.submitted)
    assert [order.grant_ids for order, _, _ in rig.engine.submitted] == [(3,)]


async def test_missing_weights_are_reported(start: Callable[..., Rig]) -> None:
    rig = start()
    await rig.announce(1)
    rig.channel.command(grant(5))
    await rig.until(lambda: rig.engine.submitted)
    rig.engine.submitted.popleft()[2].set_result(None)
    await rig.until(lambda: rig.channel.of(Nack))
    assert rig.channel.of(Nack)[0].reason == "weights"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ServiceUnavailableError("no blobs"), 1),
        (TaskError("diverged"), TaskError.exit_code),
        (MemoryError("full"), 1),
        (DollError("a stage has ended"), 1),
    ],
)
async def test_a_gradient_that_fails_ends_the_process(start: Callable[..., Rig], error: Exception, code: int) -> None:
    rig = start()
    await rig.announce(1)
    rig.channel.command(grant(5))
    await rig.until(lambda: rig.engine.submitted)
    rig.engine.submitted.popleft()[2].set_exception(error)
    await rig.until(lambda: rig.runtime.exit.is_requested)
    assert (rig.runtime.exit.code, rig.main_loop.stopped, rig.channel.of(Push)) == (code, 1, [])


@pytest.mark.parametrize(
    ("error", "code"),
    [(TaskError("diverged"), TaskError.exit_code), (DollError("a stage has ended"), 1), (MemoryError("full"), 1)],
)
async def test_an_engine_that_ends_ends_the_process(start: Callable[..., Rig], error: Exception, code: int) -> None:
    rig = start()
    await asyncio.sleep(0)
    assert not rig.runtime.exit.is_requested
    rig.engine.ended.set_exception(error)
    await rig.until(lambda: rig.runtime.exit.is_requested)
    assert (rig.runtime.exit.code, rig.runtime.exit.is_requested) == (code, True)


async def test_an_engine_of_several_grants_gets_one_batch_at_a_time(start: Callable[..., Rig]) -> None:
    rig = start(depth=4)
    await rig.announce(3)
    rig.channel.command(grant(5, 1, 2, 3))
    await rig.until(lambda: len(rig.engine.submitted) == 3)
    orders = [(order.first, order.grant_ids, [batch.number for batch in of]) for order, of, _ in rig.engine.submitted]
    assert orders == [(5, (1,), [5]), (6, (2,), [6]), (7, (3,), [7])]


async def test_a_batch_that_was_not_begun_is_not_owed(start: Callable[..., Rig]) -> None:
    rig = start()
    await rig.announce(1)
    rig.channel.command(grant(5))
    await rig.until(lambda: rig.engine.submitted)
    assert rig.core.busy
    rig.engine.submitted.popleft()[2].set_result(GradientDone("", 0, ()))
    await rig.until(lambda: not rig.core.busy)
    assert rig.channel.of(Push) == []


async def test_a_dead_letter_that_kafka_does_not_take_ends_the_process(start: Callable[..., Rig]) -> None:
    rig = start()
    rig.feed(b"away", b"x")
    await rig.until(lambda: rig.runtime.exit.is_requested)
    assert (rig.runtime.exit.code, rig.channel.sent) == (1, [])


@pytest.mark.parametrize("error", [TaskError("write `whole_records = True`"), ConfigError("no subject clicks-value")])
async def test_decoding_that_would_fail_again_ends_the_job(start: Callable[..., Rig], error: DollError) -> None:
    def fail(records: RawRecords) -> DecodedBatch:
        raise error

    rig = start(decoder=FakeDecoder(fail))
    rig.feed(b"x", b"x")
    await rig.until(lambda: rig.runtime.exit.is_requested)
    assert (rig.runtime.exit.code, rig.channel.sent) == (2, [])


async def test_a_worker_that_waits_to_decode_says_so_and_goes_on(start: Callable[..., Rig]) -> None:
    decoder = SlowDecoder()
    rig = start(decoder=decoder, without=("prepare",))
    rig.heartbeat.set_waiting_for("")
    rig.runtime.intake.streams[1].progress_at_s = -1000.0
    rig.channel.bounds, rig.runtime._next_command = (0, 120), 120  # records are there, and no more commands
    decoder.waiting_for = "the registry at http://registry does not answer"
    await rig.until(lambda: any(record.waiting_for for record in rig.channel.of(Alive)))
    assert rig.heartbeat.report()["reasons"] == ["the registry at http://registry does not answer"]
    assert rig.heartbeat.report()["healthy"]
    for _ in range(50):
        await asyncio.sleep(0)
    assert not rig.runtime.exit.is_requested
    decoder.waiting_for = ""
    await rig.until(lambda: not rig.heartbeat.report()["reasons"])


async def test_commands_that_are_none_are_skipped_and_stop_ends_the_process(start: Callable[..., Rig]) -> None:
    rig = start()
    await rig.until(lambda: rig.channel._deliver is not None)
    rig.channel.command(b"garbage")
    rig.channel.command(Stop(term=3, reason="updates: 10 reached"))
    await rig.until(lambda: rig.runtime.exit.is_requested)
    assert (rig.runtime.exit.code, rig.main_loop.stopped) == (0, 1)


async def test_each_tick_beats_and_leaves_in_time_and_offsets_without_records_are_skipped(
    start: Callable[..., Rig],
) -> None:
    rig = start(without=("watch",))
    rig.runtime.intake.feed(NoRecordBelow(1, 113))  # three offsets without a record
    await rig.until(lambda: rig.core.served[rig.core.worker].next_batch == 6)
    assert rig.runtime.intake.streams[1].batcher.next_offset == 113
    assert rig.heartbeat.report()["ready"]
    assert rig.main_loop.left == 0
    rig.departure.leave_within(100.0, "notice")
    await rig.until(lambda: rig.main_loop.left)


class OpenLink:
    """A control link that takes everything while `is_open`."""

    def __init__(self) -> None:
        self.is_open = True
        self.sent: list[AnyRecord] = []

    def send(self, record: AnyRecord) -> bool:
        if self.is_open:
            self.sent.append(record)
        return self.is_open


async def test_grants_are_answered_over_the_link_and_the_rest_goes_through_kafka() -> None:
    """A worker that cannot reach Kafka has to lose its lease, although its link is open."""
    rig, link = Rig(), OpenLink()
    rig.runtime._link = link  # type: ignore[assignment]
    rig.runtime._do(rig.core.tick(1.0))
    leave, announced = Leave(worker=1, session=7, cause="x"), announce(1, 7, 5, 6)
    nack = Nack(worker=1, session=7, batch=5, term=3, grant_id=1, reason="batch")
    rig.runtime._do([Send(leave), Send(announced), Send(nack)])
    assert (link.sent, rig.channel.sent) == ([nack], [Alive(worker=1, session=7, next_offset=110), leave, announced])
    link.is_open = False
    rig.runtime._do([Send(nack)])
    assert rig.channel.sent[-1] == nack


async def test_draining_finishes_what_is_owed_and_says_leave(start: Callable[..., Rig]) -> None:
    rig = start()
    await rig.announce(1)
    rig.channel.command(grant(5))
    await rig.until(lambda: rig.engine.submitted)
    rig.departure.leave_within(100.0, "notice")
    drained = asyncio.ensure_future(rig.runtime.drain())
    await asyncio.sleep(0)
    rig.feed(b"x", b"x")
    assert not drained.done()
    rig.engine.submitted.popleft()[2].set_result(done("k"))
    await drained
    assert [type(record) for record in rig.channel.sent] == [Announce, Push, Leave]
    assert rig.channel.of(Leave)[0].cause == "notice"
    assert len(rig.runtime.intake.buffer) == 1, "nothing more is decoded"


async def test_draining_gives_back_what_is_not_begun(start: Callable[..., Rig]) -> None:
    rig = start()
    await rig.announce(3)
    for number in (5, 6, 7):
        rig.channel.command(grant(number, number))
    await rig.until(lambda: rig.engine.submitted)
    rig.departure.leave_within(100.0, "notice")
    drained = asyncio.ensure_future(rig.runtime.drain())
    await asyncio.sleep(0)
    rig.engine.submitted.popleft()[2].set_result(done("k"))
    await drained
    assert [[item.batch for item in push.batches] for push in rig.channel.of(Push)] == [[5]]
    assert not rig.engine.submitted
    assert isinstance(rig.channel.sent[-1], Leave)


async def test_draining_without_time_gives_up_the_gradient(start: Callable[..., Rig]) -> None:
    rig = start()
    await rig.announce(1)
    rig.channel.command(grant(5))
    await rig.until(lambda: rig.engine.submitted)
    rig.departure.leave_within(1.0, "notice")
    await rig.runtime.drain()
    assert [type(record) for record in rig.channel.sent] == [Announce, Leave]


async def test_the_lag_is_what_the_log_holds_and_this_worker_has_not_decoded(start: Callable[..., Rig]) -> None:
    rig = start(without=("tick", "prepare"))
    rig.channel.bounds = (0, 120)
    rig.feed(b"x", b"x", b"x")
    await rig.until(lambda: rig.core.lag)
    assert rig.core.lag == 7 + 2
    assert not rig.runtime.exit.is_requested


async def test_between_two_questions_to_kafka_the_lag_follows_what_fetches_say(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start(without=("tick", "prepare"))
    rig.channel.bounds = (0, 120)
    await rig.until(lambda: rig.core.lag == 10)
    monkeypatch.setattr(runtime, "ASK_KAFKA_EVERY_S", 1000.0)
    rig.channel.bounds = (0, 500)
    rig.reader.end = 130
    await rig.until(lambda: rig.core.lag == 20)
    rig.reader.end = 115  # of a fetch before Kafka was asked
    await rig.until(lambda: rig.core.lag == 10)


@pytest.mark.parametrize("records_left", [True, False])
async def test_records_that_do_not_come_end_the_process(start: Callable[..., Rig], records_left: bool) -> None:
    rig = start(without=("tick", "watch"))
    rig.runtime.intake.streams[1].progress_at_s = -1000.0
    rig.channel.bounds, rig.channel.records_left = (0, 120), records_left
    task = asyncio.ensure_future(rig.runtime.watch())
    await rig.until(lambda: rig.runtime.exit.is_requested or (rig.core.lag == 0 and not records_left))
    assert rig.runtime.exit.is_requested is records_left
    task.cancel()


# --- batches that are cut ---------------------------------------------------------------------------------------------


class Cutting:
    """A worker whose batches are cut after 5 s of a clock that the test moves. The log ends behind what was fed."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig, self.now = rig, 100.0
        monkeypatch.setattr(sample_intake, "time", SimpleNamespace(monotonic=lambda: self.now))

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.rig.runtime.intake.tick()

    @property
    def spans(self) -> list[tuple[int, int]]:
        served = self.rig.core.served[1]
        return [served.bounds(2).span(number) for number in range(5, served.next_batch)]


async def test_a_batch_that_waits_for_records_is_cut(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start("data.cut_after_s=5")
    world = Cutting(rig, monkeypatch)
    world.after(100.0)
    rig.feed(b"a")
    world.after(0.1)
    rig.reader.end = 111
    world.after(4.9)
    assert rig.core.retained == 0
    world.after(0.2)
    await rig.until(lambda: rig.channel.sent)
    assert rig.channel.sent == [Announce(worker=1, session=7, runs=(BatchRange(1, 5, 6, 0, ((5, 1),)),))]
    assert world.spans == [(110, 111)]
    world.after(100.0)
    rig.feed(b"b", b"c", b"d")
    await rig.until(lambda: rig.core.retained == 2)
    assert world.spans == [(110, 111), (111, 113)]
    assert rig.core.next_offset == 113


async def test_a_batch_is_not_cut_while_more_records_are_there(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start("data.cut_after_s=5")
    world = Cutting(rig, monkeypatch)
    rig.feed(b"a")
    rig.reader.end = 200
    world.after(0.1)
    for _ in range(8):
        rig.runtime.intake.streams[1].fed_at_s = world.now
        world.after(1.0)
    assert rig.runtime.intake.streams[1].batcher.next_offset == 111, "it stays open"
    world.after(5.0)  # nothing has come: the log may be longer by records of a transaction that is open
    await rig.until(lambda: rig.core.retained == 1)
    assert world.spans == [(110, 111)]


async def test_a_batch_is_not_cut_where_the_reader_stands_still_for_want_of_room(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start("data.cut_after_s=5", "worker.stream_buffer_records=4", decoder=SlowDecoder())
    world = Cutting(rig, monkeypatch)
    rig.feed(*[b"x"] * 17)
    await rig.until(lambda: rig.reader.paused)
    world.after(0.1)
    world.after(6.0)
    assert rig.runtime.intake.streams[1].batcher.open_batch == 13
    world.after(10.0)  # by now Kafka was asked where the log ends
    assert rig.runtime.intake.streams[1].batcher.open_batch is None


async def test_no_batch_is_cut_by_default_or_while_the_worker_leaves(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    for overrides in ((), ("data.cut_after_s=5",)):
        rig = start(*overrides)
        world = Cutting(rig, monkeypatch)
        rig.feed(b"a")
        world.after(0.1)
        if overrides:
            rig.core.drain()
        world.after(1000.0)
        assert rig.runtime.intake.streams[1].batcher.open_batch == 5


async def test_the_end_of_a_source_is_announced_at_once(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()
    world = Cutting(rig, monkeypatch)
    rig.feed(b"a", b"b", b"c")
    await rig.until(lambda: rig.core.retained == 1)
    rig.runtime._do(rig.core.on_record(Flush(term=3, worker=1, until={1: 114}), 0.0))
    world.after(1.0)
    assert rig.core.retained == 1, "one more record is to come"
    rig.runtime.intake.feed(NoRecordBelow(1, 114))  # a marker of a transaction
    await rig.until(lambda: rig.core.retained == 2)
    assert world.spans == [(110, 112), (112, 114)], "the batch is full"
    rig.feed(b"e")
    world.after(1.0)
    assert rig.core.retained == 2
    rig.runtime._do(rig.core.on_record(Flush(term=3, worker=1, until={1: 115}), 0.0))
    world.after(1.0)
    await rig.until(lambda: rig.core.retained == 3)
    assert world.spans[-1] == (114, 115)
