"""A worker's surroundings in memory: its channel to Kafka, its stream of samples and its gradient engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from doll.consumers.channels.kafka_channel import WorkerChannel
from doll.consumers.intake.dead_letters import Decoder
from doll.consumers.intake.decoding import DecodedBatch, RawRecords
from doll.consumers.protocol.worker_core import Batch, GradientDone
from doll.kafka.chunk_reader import ChunkReader, ReadFrom
from doll.process.metric_names import LOST_FROM, LOST_UNTIL
from doll.records.control import AnyRecord, DeadLetter, Grant, NewVersion, encode

if TYPE_CHECKING:  # it loads torch
    from doll.consumers.compute.gradient_engine import GoesOn


@dataclass
class FakeChannel(WorkerChannel):
    """What was sent; the log's bounds and values as the test sets them."""

    sent: list[AnyRecord] = field(default_factory=list)
    letters: list[DeadLetter] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    bounds: tuple[int, int] | Exception = (0, 0)
    values: dict[int, bytes] = field(default_factory=dict)
    records_left: bool = True
    flushed: int = 0
    on_send: Callable[[AnyRecord], None] = lambda record: None
    _deliver: Callable[[list[tuple[int, bytes | None]]], object] | None = None
    _next_command: int = 50

    def send(self, record: AnyRecord) -> None:
        self.sent.append(record)
        self.on_send(record)

    def of(self, kind: type[Any]) -> list[Any]:
        """What was sent of this type."""
        return [record for record in self.sent if isinstance(record, kind)]

    def send_dead_letters(self, letters: list[DeadLetter]) -> None:
        self.letters += letters

    def report(self, values: dict[str, float]) -> None:
        self.lost.append((int(values[LOST_FROM]), int(values[LOST_UNTIL])))

    def read_values(self, topic: str, partition: int, offsets: Collection[int]) -> dict[int, bytes]:
        return {offset: self.values[offset] for offset in offsets if offset in self.values}

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        if isinstance(self.bounds, Exception):
            raise self.bounds
        return self.bounds

    def bounds_of_partitions(self, topic: str, partitions: Sequence[int]) -> dict[int, tuple[int, int]]:
        return {number: self.watermarks(topic, number) for number in partitions}

    def holds_record(self, topic: str, partition: int, lo: int, hi: int) -> bool:
        return self.records_left

    def poll(self) -> None:
        pass

    def flush(self, timeout_s: float) -> None:
        self.flushed += 1

    def read_commands(self, deliver: Callable[[list[tuple[int, bytes | None]]], object]) -> None:
        self._deliver = deliver

    def command(self, record: AnyRecord | bytes) -> None:
        """The parameter server sends a command."""
        assert self._deliver is not None, "nobody reads commands"
        self._deliver([(self._next_command, record if isinstance(record, bytes) else encode(record))])
        self._next_command += 1


@dataclass
class FakeReader(ChunkReader):
    """What the runtime asked of its reader."""

    paused: bool = False
    committed: list[int] = field(default_factory=list)
    reading: dict[int, ReadFrom] = field(default_factory=dict)
    end: int = 0

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def change(self, gone: Iterable[int], new: Iterable[ReadFrom]) -> None:
        for number in gone:
            del self.reading[number]
        self.reading |= {read.partition: read for read in new}

    def commit(self, partition: int, offset: int) -> None:
        self.committed.append(offset)

    def log_end(self, partition: int) -> int:
        return self.end


@dataclass
class FakeMainLoop:
    """What the runtime asked of Faust."""

    left: int = 0
    stopped: int = 0

    def leave(self) -> None:
        self.left += 1

    def shut_down(self) -> None:
        self.stopped += 1


@dataclass
class FakeDecoder(Decoder):
    """Decodes at once."""

    decode_records: Callable[[RawRecords], DecodedBatch]
    depth: int = 1

    def decode(self, records: RawRecords) -> Future[DecodedBatch]:
        future: Future[DecodedBatch] = Future()
        try:
            future.set_result(self.decode_records(records))
        except Exception as exc:
            future.set_exception(exc)
        return future

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class FakeEngine:
    """A gradient is done when the test says so."""

    depth: int = 1
    ended: Future[None] = field(default_factory=Future)
    submitted: deque[tuple[Grant, Sequence[Batch], Future[GradientDone | None]]] = field(default_factory=deque)
    goes_on: GoesOn = lambda batch, grant_id: True
    offered: list[NewVersion] = field(default_factory=list)
    rests: deque[tuple[int, Future[GradientDone]]] = field(default_factory=deque)

    def submit(self, grant: Grant, batches: Sequence[Batch], goes_on: GoesOn) -> Future[GradientDone | None]:
        future: Future[GradientDone | None] = Future()
        self.submitted.append((grant, batches, future))
        self.goes_on = goes_on
        return future

    def offer(self, weights: NewVersion) -> None:
        self.offered.append(weights)

    def store_rest(self, until: int) -> Future[GradientDone]:
        future: Future[GradientDone] = Future()
        self.rests.append((until, future))
        return future

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass
