"""Faust's part of a worker, without Kafka: what its reader delivers reaches the runtime in order, and ends the process.

Each test runs the app's own loop until its end.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from doll.config import parse
from doll.consumers.faust_app import ChunkConsumer, make_app, run_faust
from doll.consumers.intake import deleted_records
from doll.consumers.intake.decoding import DecodedBatch, RawRecords
from doll.consumers.lifecycle.departure import Departure, ProcessExit
from doll.consumers.protocol.worker_core import WorkerCore
from doll.consumers.runtime import WorkerRuntime
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.chunk_reader import Chunk, ChunkReader, Delivery, NoRecordBelow, OutOfRange, ReadFrom, Truncated
from doll.process.health import Heartbeat
from doll.records.control import Durable, Stop
from doll.services import Services
from mode.services import Service
from waiting import until
from worker_fakes import FakeChannel, FakeDecoder, FakeEngine
from worker_records import welcome

pytestmark = pytest.mark.slow  # loads Faust

JOB = 'job: unit\ntask: {class: "examples.synthetic.task:Gaussian"}\ndata: {workers: 2, batch_size: 2}\n'


class ScriptedReader(ChunkReader):
    """Delivers what the test says from a thread of its own, and remembers what it was told."""

    def __init__(self, script: Callable[[ScriptedReader], None]) -> None:
        self._script = script
        self.deliver: Callable[[Delivery], object]
        self.answers = threading.Semaphore(0)
        self.sought = threading.Event()
        self.calls: list[str] = []
        self.closed = False

    def start(self, deliver: Callable[[Delivery], object]) -> None:
        self.deliver = deliver
        threading.Thread(target=self._script, args=(self,), daemon=True).start()

    def send(self, *deliveries: Delivery) -> None:
        """Deliver, and wait until each was dealt with."""
        for delivery in deliveries:
            self.deliver(delivery)
            assert self.answers.acquire(timeout=60)

    def taken(self) -> None:
        self.answers.release()

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def seek(self, partition: int, offset: int) -> None:
        self.calls.append(f"seek {offset}")
        self.sought.set()

    def change(self, gone: Iterable[int], new: Iterable[ReadFrom]) -> None:
        """It delivers what the test says."""

    def log_end(self, partition: int) -> int:
        return -1

    def commit(self, partition: int, offset: int) -> None:
        self.calls.append(f"commit {offset}")

    def close(self) -> None:
        self.closed = True


class Rig:
    """Worker 1 from batch 5 on (offset 110): two records a batch, at most four batches that are not durable."""

    def __init__(self, script: Callable[[ScriptedReader, Rig], None], *overrides: str) -> None:
        self.reader = ScriptedReader(lambda reader: script(reader, self))
        self.config = parse(JOB, ["worker.max_pending_batches=4", *overrides])
        self.channel = FakeChannel()
        self.core = WorkerCore(welcome(), max_pending=4, now=0.0)
        self.runtime = WorkerRuntime(
            self.config, core=self.core, channel=self.channel, reader=self.reader, decoder=FakeDecoder(decode),
            engine=FakeEngine(1), commands_offset=50, departure=Departure(end_within=lambda seconds, code: None),
            heartbeat=Heartbeat("worker-1"),
        )  # fmt: skip

    def durable(self, until_batch: int) -> None:
        self.channel.command(Durable(term=3, worker=1, until={1: until_batch}, batches=until_batch))

    def stop(self) -> None:
        self.channel.command(Stop(term=3, reason="tested"))


def decode(records: RawRecords) -> DecodedBatch:
    """One sample per record."""
    zeros = np.zeros((len(records.values), 1), np.float32)
    return DecodedBatch(zeros, np.zeros(len(zeros), np.int64), np.array(records.offsets, np.int64))


@pytest.fixture(autouse=True)
def _no_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessExit.__init__, "__kwdefaults__", {"end_within": lambda seconds, code: None})


def run(
    tmp_path: Path, services: Services, script: Callable[[ScriptedReader, Rig], None], *overrides: str
) -> tuple[int, ScriptedReader, Rig]:
    """Exit code, reader and rig (worker 1, from offset 110 on, two records a batch)."""
    rig = Rig(script, *overrides)
    app = make_app(rig.config, services, 1, tmp_path)
    return run_faust(app, rig.runtime, rig.config.worker.drain_s), rig.reader, rig


def test_chunks_become_batches_and_what_is_durable_is_committed(tmp_path: Path, nowhere: Services) -> None:
    def script(reader: ScriptedReader, rig: Rig) -> None:
        reader.send(
            Chunk(1, range(110, 113), [b"a", None, b"c"]), Chunk(1, [113, 115], [b"d", b"f"]), NoRecordBelow(1, 118)
        )
        until(lambda: rig.core.retained == 4, "four batches")
        rig.durable(7)
        until(lambda: "commit 114" in reader.calls, "the commit")
        rig.stop()

    code, reader, rig = run(tmp_path, nowhere, script)
    assert (code, reader.closed) == (0, True)
    assert rig.runtime.intake.streams[1].batcher.next_offset == 118
    assert [batch.number for batch in rig.core.served[1].batches] == [7, 8]


async def test_deliveries_that_are_there_come_in_one_event_up_to_an_error() -> None:
    consumer = ChunkConsumer.__new__(ChunkConsumer)
    consumer._deliveries = asyncio.Queue()
    deliveries: list[Delivery] = [*(Chunk(number, [5], [b"a"]) for number in range(100)), NoRecordBelow(3, 9)]
    for delivery in deliveries:
        consumer._deliveries.put_nowait(delivery)
    taken = [await consumer._take() for _ in range(2)]
    assert [len(items) for items in taken] == [64, 37]
    assert [*taken[0], *taken[1]] == deliveries
    consumer._deliveries.put_nowait(ServiceUnavailableError("Kafka sends nothing usable"))
    with pytest.raises(ServiceUnavailableError):
        await consumer._take()


def test_faust_waits_for_nothing_at_the_start_and_at_the_end(
    tmp_path: Path, nowhere: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, service_sleep, waits = asyncio.sleep, Service.sleep, []

    def note(seconds: float) -> None:
        caller = sys._getframe(2).f_globals["__name__"]
        if seconds > 0 and caller.startswith(("faust.tables.manager", "mode.worker")):
            waits.append((caller, seconds))

    async def slept(seconds: float, *args: object) -> None:
        note(seconds)
        await sleep(seconds, *args)

    async def service_slept(service: Service, seconds: float) -> None:
        note(seconds)
        await service_sleep(service, seconds)

    monkeypatch.setattr(asyncio, "sleep", slept)
    monkeypatch.setattr(Service, "sleep", service_slept)

    def script(reader: ScriptedReader, rig: Rig) -> None:
        reader.send(Chunk(1, [110], [b"a"]))
        rig.stop()

    assert run(tmp_path, nowhere, script)[0] == 0
    assert waits == []


def test_a_reader_that_cannot_go_on_ends_the_process(tmp_path: Path, nowhere: Services) -> None:
    def script(reader: ScriptedReader, rig: Rig) -> None:
        reader.deliver(ServiceUnavailableError("Kafka sends nothing usable"))

    code, reader, _ = run(tmp_path, nowhere, script)
    assert (code, reader.closed) == (1, True)


@pytest.mark.parametrize("low", [110, 130])
def test_an_offset_that_the_log_does_not_hold_is_asked_about(
    tmp_path: Path, nowhere: Services, monkeypatch: pytest.MonkeyPatch, low: int
) -> None:
    monkeypatch.setattr(deleted_records, "_NEWER_START_TIMEOUT_S", 0.3)

    def script(reader: ScriptedReader, rig: Rig) -> None:
        rig.channel.bounds = (low, 400)
        reader.send(OutOfRange(1, 110))
        assert reader.sought.wait(60)
        rig.stop()

    code, reader, _ = run(tmp_path, nowhere, script, "data.on_data_loss=skip")
    assert (code, [call for call in reader.calls if call.startswith("seek")]) == (0, [f"seek {low}"])


def test_a_truncated_log_ends_the_process_for_good(tmp_path: Path, nowhere: Services) -> None:
    def script(reader: ScriptedReader, rig: Rig) -> None:
        reader.send(Truncated(1, 110, "leader epoch 3"))

    code, reader, _ = run(tmp_path, nowhere, script)
    assert (code, reader.sought.is_set()) == (ConfigError.exit_code, False)


def test_the_leader_epoch_of_its_records_stays_with_a_batch(tmp_path: Path, nowhere: Services) -> None:
    def script(reader: ScriptedReader, rig: Rig) -> None:
        reader.send(Chunk(1, range(110, 112), [b"a", b"b"], 4), Chunk(1, range(112, 114), [b"c", b"d"], 5))
        until(lambda: rig.core.retained == 2, "two batches")
        rig.stop()

    _, _, rig = run(tmp_path, nowhere, script)
    assert [batch.leader_epoch for batch in rig.core.served[1].batches] == [4, 5]


def test_a_full_buffer_pauses_the_reader_and_room_resumes_it(tmp_path: Path, nowhere: Services) -> None:
    def script(reader: ScriptedReader, rig: Rig) -> None:
        reader.send(Chunk(1, range(110, 140), [b"x"] * 30))  # 15 batches; 4 fit into the core
        until(lambda: rig.core.retained == 4, "four batches")
        assert reader.calls == ["pause"]
        for batch in range(6, 16):
            rig.durable(batch)
        until(lambda: "resume" in reader.calls, "the end of the pause")
        rig.stop()

    code, _, _ = run(tmp_path, nowhere, script, "worker.stream_buffer_records=8")
    assert code == 0
