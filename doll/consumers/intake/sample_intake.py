"""The streams of the partitions that a worker serves, from the reader to the worker's core (Algorithm 1).

`receive` cuts records into batches, `prepare` requests the decoding of batches, and `announce` passes the decoded
batches to the core, in order. Offsets are acknowledged in order, and only after the parameter server has reported them
as durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import numpy as np

from doll.config import JobConfig
from doll.consumers.channels.kafka_channel import WorkerChannel
from doll.consumers.intake.batching import BatchBuffer, PartitionBatcher, RawBatch, Value, buffer_capacity
from doll.consumers.intake.dead_letters import Decoder
from doll.consumers.intake.decoding import DecodedBatch, RawRecords
from doll.consumers.intake.deleted_records import DeletedRecords
from doll.consumers.lifecycle.departure import ProcessExit
from doll.consumers.protocol.skipped_batches import SkippedRange
from doll.consumers.protocol.worker_core import Acknowledge, Batch, ServedPartition, WorkerAction, WorkerCore
from doll.errors import ConfigError, ServiceUnavailableError, TaskError
from doll.kafka.chunk_reader import Chunk, ChunkReader, Learned, NoRecordBelow, OutOfRange, ReadFrom, Truncated
from doll.records.bounds import Bounds, Cuts
from doll.records.control import MOST_UNREAD
from doll.records.event_times import EventTimes, event_times_of
from doll.telemetry import get_logger

log = get_logger(__name__)

_ASK_AGAIN_S: Final = 1.0  # the broker does not know yet whether it holds an offset
_ENDS_ASKED_S: Final = 10.0  # Kafka was asked for the log ends within this time


@dataclass(slots=True, eq=False)
class PartitionStream:
    """The stream of one partition that a worker serves. Only its `SampleIntake` changes it.

    Attributes:
        reading: number that the reader's deliveries for this stream have. Earlier streams have other numbers.
        log_end: one above the last offset, when Kafka was last asked.
        progress_at_s: time at which a record was last read or decoded, or could not or need not arrive.
        empty_until: the log holds no record from the next offset up to this offset.
        empty: the decoded form of the first of the waiting batches without a record.
        fed_at_s: time of the last records. Times are monotonic seconds.
    """

    served: ServedPartition
    reading: int
    batcher: PartitionBatcher[Value]
    progress_at_s: float
    log_end: int = 0
    empty_until: int = 0
    empty: DecodedBatch | None = None
    fed_at_s: float = float("-inf")
    _open_batch: int | None = None
    _open_since_s: float = 0.0

    def open_for_s(self, now: float) -> float:
        """Return the seconds since a call of this method first saw a record in the open batch. Return 0 if the batch
        has no record or may not be cut."""
        number = self.batcher.open_batch
        if number is None or number != self._open_batch:
            self._open_batch, self._open_since_s = number, now
        return now - self._open_since_s


class SampleIntake:
    """The streams of a worker, and their batches between the reader and the core. The reader's deliveries come from
    its own thread through the event loop; everything except the constructor runs on this loop.

    A batch is in exactly one place: `buffer`, then `_decoding`, then `_decoded`, then the core. Only these places count
    batches.

    Attributes:
        streams: the stream of each served partition, by the partition's number.
        buffer: the batches that wait to be decoded.
    """

    def __init__(
        self, config: JobConfig, core: WorkerCore, channel: WorkerChannel, reader: ChunkReader, decoder: Decoder,
        process_exit: ProcessExit, do: Callable[[Sequence[WorkerAction]], None],
    ) -> None:  # fmt: skip
        """Create the streams of the partitions that `core` serves. `do` executes actions of the core."""
        self._config, self._core, self._channel, self._exit, self._do = config, core, channel, process_exit, do
        self.reader = reader
        self._decoder = decoder
        self._topic = config.topic("samples")
        self._size = config.data.records_per_batch
        self._max_ahead_ms = round(1000 * config.freshness.max_ahead_s)
        self._deleted_records = DeletedRecords(config, core, channel, process_exit)
        self._num_changes = -1  # how many times the served partitions have changed
        self.streams: dict[int, PartitionStream] = {}
        self.buffer = BatchBuffer(buffer_capacity(config))
        # Batches that are being decoded, including the one that `announce` waits for.
        self._decoding: deque[tuple[PartitionStream, RawBatch[Value], asyncio.Future[DecodedBatch]]] = deque()
        # By partition: decoded batches that wait, because earlier batches without a record wait.
        self._decoded: defaultdict[int, deque[tuple[RawBatch[Value], DecodedBatch]]] = defaultdict(deque)
        self._changed = asyncio.Event()  # set when `prepare` or `announce` may continue
        self._read((), list(core.served))

    def serve(self, gone: Sequence[int], new: Sequence[int]) -> None:
        """Stop reading the partitions `gone`, which other workers serve now, and read the partitions `new`."""
        self._read(gone, new)
        if self.buffer.is_half_empty:
            self.reader.resume()
        log.info(
            "serves_other_partitions", gone=list(gone), new=list(new), partitions=sorted(self.streams),
            hint="" if self.streams else "this worker is a spare: `doll scale` or fewer workers give it partitions",
        )  # fmt: skip

    def _read(self, gone: Sequence[int], new: Sequence[int]) -> None:
        config, core, size = self._config, self._core, self._size
        self._num_changes += 1
        for number in gone:
            del self.streams[number]
            self._decoded.pop(number, None)
            self.buffer.remove(number)
        reads = []
        for number in new:
            served = core.served[number]
            batcher: PartitionBatcher[Value] = PartitionBatcher(
                origin=served.origin, records_per_batch=size, next_batch=served.next_batch,
                align=config.training.policy.batches_per_push, partition=number, cuts=served.cuts,
            )  # fmt: skip
            self.streams[number] = PartitionStream(served, self._num_changes, batcher, time.monotonic())
            learned = Learned(served.bounds(size).lo(served.included), served.leader_epoch)
            reads.append(ReadFrom(number, batcher.next_offset, learned, self._num_changes))
        self.reader.change(gone, reads)
        ends = [(item, item.skipped.end(item.next_batch)) for item in core.served.values()]
        core.next_offset = sum(item.bounds(size).lo(end) for item, end in ends)
        self._changed.set()

    # --- from the reader to the core --------------------------------------------------------------------------------

    async def receive(self, delivery: Chunk | NoRecordBelow | OutOfRange | Truncated) -> None:
        """Take the next delivery of the reader. Ignore it if the worker no longer serves its partition."""
        if (stream := self._stream_of(delivery)) is None:
            return
        match delivery:
            case Chunk() | NoRecordBelow():
                self.feed(delivery)
            case Truncated(offset=offset, reason=reason):
                self._deleted_records.refuse_truncated(delivery.partition, offset, reason)
            case OutOfRange(partition, offset):
                resume_offset = await self._deleted_records.resume_offset(partition, offset, stream.batcher)
                if resume_offset == offset:
                    await asyncio.sleep(_ASK_AGAIN_S)
                if resume_offset is not None and self._stream_of(delivery) is stream:  # None: the process ends
                    self.reader.seek(partition, resume_offset)

    def _stream_of(self, delivery: Chunk | NoRecordBelow | OutOfRange | Truncated) -> PartitionStream | None:
        stream = self.streams.get(delivery.partition)
        return stream if stream is not None and stream.reading == delivery.reading else None

    def feed(self, delivery: Chunk | NoRecordBelow) -> None:
        """Cut the next records of a served partition into batches. Pause the reader if the buffer is full."""
        stream = self.streams[delivery.partition]
        if isinstance(delivery, NoRecordBelow):
            batches = stream.batcher.skip_to(delivery.offset)
        else:
            stream.fed_at_s = stream.progress_at_s = time.monotonic()
            batches = stream.batcher.feed(
                delivery.offsets, delivery.values, delivery.leader_epoch, delivery.envelopes, delivery.times_ms
            )
        if self.buffer.cut(delivery.partition, batches):
            self.reader.pause()
        self._changed.set()

    async def _until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def prepare(self) -> None:
        """Request the decoding of batches while the core has room. Resume the stream when few batches are left."""
        while True:
            await self._until(lambda: self.buffer and self._may_decode)
            raw = self.buffer.take()
            if self.buffer.is_half_empty:
                self.reader.resume()
            records = RawRecords((), ())
            if raw.count == 1:
                records = RawRecords(raw.offsets, raw.values, raw.partition, raw.envelopes)
            future = asyncio.wrap_future(self._decoder.decode(records))
            raw.values, raw.envelopes = [], []  # the decoder has them
            self._decoding.append((self.streams[raw.partition], raw, future))
            self._changed.set()

    @property
    def _may_decode(self) -> bool:
        core = self._core
        has_room = core.retained + self._num_taken < core.max_pending
        return has_room and len(self._decoding) < self._decoder.depth and not core.draining

    @property
    def _num_taken(self) -> int:
        """The number of batches that have left the buffer and are not in the core."""
        return len(self._decoding) + sum(map(len, self._decoded.values()))

    async def announce(self) -> None:
        """Pass the decoded batches to the core, in order."""
        while True:
            await self._until(lambda: self._decoding)
            stream, raw, future = self._decoding[0]
            try:
                decoded = await future
            except ServiceUnavailableError as exc:  # Kafka does not take a dead letter
                self._exit.request(1, str(exc))
                return
            except (ConfigError, TaskError) as exc:  # a restart would fail again
                self._exit.request(exc.exit_code, str(exc))
                return
            self._decoding.popleft()
            self._changed.set()
            if self.streams.get(raw.partition) is stream:  # otherwise others serve the partition by now
                self._decoded[raw.partition].append((raw, decoded))
                self._give(stream)
                stream.progress_at_s = time.monotonic()

    def _give(self, stream: PartitionStream) -> None:
        """Pass the decoded batches of a partition to the core. If batches without a record come first, later batches
        wait."""
        core, number = self._core, stream.served.number
        if self.streams.get(number) is not stream:
            return
        decoded_batches = self._decoded[number]
        while decoded_batches and not stream.served.skipped:
            raw, decoded = decoded_batches.popleft()
            self._changed.set()
            core.next_offset += raw.hi - raw.lo
            if raw.count > 1:
                stream.empty = decoded
                skipped = SkippedRange(raw.number, raw.number + raw.count, tuple(raw.gaps), tuple(raw.lost))
                self._do(core.skip(number, skipped))
            else:
                self._do(core.batch_ready(_batch(raw, decoded, self._max_ahead_ms)))
        if not decoded_batches:
            self._decoded.pop(number, None)

    def acknowledge(self, durable: Acknowledge) -> None:
        """Commit the offsets of durable batches, and continue with the batches that waited for them."""
        stream = self.streams[durable.partition]
        bounds = Bounds(stream.served.origin, self._size, Cuts(durable.left_out))
        self.reader.commit(durable.partition, bounds.lo(durable.until))
        self._changed.set()
        if self._decoded.get(durable.partition):
            asyncio.get_running_loop().call_soon(self._give, stream)

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Cut incomplete batches at the end of a source, or if they have waited longer than `data.cut_after_s` and
        there is nothing more to read. Pass batches without a record to the core if other batches wait for them."""
        now = time.monotonic()
        for number, stream in list(self.streams.items()):
            if not self._core.draining:
                self._cut_if_due(stream, now)
            if stream.served.skipped and stream.empty is not None:
                if (one := self._core.next_of_skipped(number, now, self._size)) is not None:
                    batch = Batch(one.first, stream.empty, 0, now, (), one.gaps, one.lost, partition=number)
                    self._do(self._core.batch_ready(batch))
                self._give(stream)

    def _cut_if_due(self, stream: PartitionStream, now: float) -> None:
        after_s = self._config.data.cut_after_s
        is_end = stream.batcher.must_flush(stream.served.flush_until)
        overdue_s = -1.0 if after_s is None else stream.open_for_s(now) - after_s
        is_old = overdue_s >= 0 and self._has_read_all(stream, now, overdue_s)
        if (is_end or is_old) and self.buffer.close(stream.batcher, also_gaps=is_end):
            self._changed.set()

    def _has_read_all(self, stream: PartitionStream, now: float, overdue_s: float) -> bool:
        """Return whether all known records of a partition have been read.

        While the buffer is full, the reader pauses and does not update its log ends, so only log ends that were
        requested from Kafka count. While a transaction is open, the records after it are not delivered, although the
        log is longer.
        """
        is_reading = self.buffer.is_half_empty
        if is_reading and now - stream.fed_at_s >= (self._config.data.cut_after_s or 0.0):
            return True
        is_at_end = stream.batcher.next_offset >= self._log_end(stream)
        return is_at_end and (is_reading or overdue_s > _ENDS_ASKED_S)

    def _log_end(self, stream: PartitionStream) -> int:
        return max(stream.log_end, self.reader.log_end(stream.served.number))

    # --- lag and stalls ---------------------------------------------------------------------------------------------

    def measure_lag(self) -> dict[int, int]:
        """Return the number of unread records of each partition. Records in the buffer count as lag as well."""
        unread = {
            number: max(0, self._log_end(stream) - max(stream.batcher.next_offset, stream.empty_until))
            for number, stream in self.streams.items()
        }
        waiting = len(self.buffer) + self._num_taken
        self._core.lag = sum(unread.values()) + waiting * self._size
        most = heapq.nlargest(MOST_UNREAD, unread.items(), key=itemgetter(1))
        self._core.most_unread = tuple(item for item in most if item[1])
        return unread

    def record_unreachable(self) -> None:
        """Note that Kafka does not answer, so no record can arrive."""
        for stream in self.streams.values():
            stream.progress_at_s = time.monotonic()

    async def find_stall(self, log_ends: Mapping[int, int]) -> str:
        """Note the ends of the logs, according to Kafka. Return the reason why this process must end because records
        do not arrive; "" if it need not end."""
        streams = {number: self.streams[number] for number in log_ends.keys() & self.streams.keys()}
        for number, stream in streams.items():
            stream.log_end = log_ends[number]
        unread = self.measure_lag()
        for number, stream in streams.items():
            if problem := await self._problem(stream, unread[number]):
                return problem
        return ""

    async def _problem(self, stream: PartitionStream, unread: int) -> str:
        now, number, end, core = time.monotonic(), stream.served.number, stream.log_end, self._core
        wants_none = not core.has_room or core.draining or number in self._decoded or bool(self._decoder.waiting_for)
        if not unread or wants_none:
            stream.progress_at_s = now
        if problem := stall_problem(stream.progress_at_s, self._config.worker.stall_timeout_s):
            with contextlib.suppress(ServiceUnavailableError):
                place = (self._topic, number, stream.batcher.next_offset, end)
                if not await asyncio.get_running_loop().run_in_executor(None, self._channel.holds_record, *place):
                    stream.empty_until, stream.progress_at_s, problem = end, now, ""  # only transaction markers
        return problem if self.streams.get(number) is stream else ""


def stall_problem(progress_at_s: float, timeout_s: float) -> str:
    """Return the reason why this process must end, because records exist but do not arrive; "" if it need not end. A
    worker in this state is useless; a restart helps."""
    stalled_s = time.monotonic() - progress_at_s
    if stalled_s <= timeout_s:
        return ""
    return f"records are there and none has come for {stalled_s:.0f} s (worker.stall_timeout_s): starting again"


def _batch(raw: RawBatch[Any], decoded: DecodedBatch, max_ahead_ms: int) -> Batch:
    return Batch(
        number=raw.number, data=decoded, num_samples=decoded.num_samples, complete_at_s=time.monotonic(),
        dead=tuple(item.offset for item in decoded.refused if item.whole), gaps=tuple(raw.gaps), lost=tuple(raw.lost),
        dead_samples=sum(item.samples for item in decoded.refused if not item.whole), leader_epoch=raw.leader_epoch,
        partition=raw.partition, skipped=decoded.skipped, times=_event_times(raw, decoded, max_ahead_ms),
        held_out=decoded.held_out,
    )  # fmt: skip


def _event_times(raw: RawBatch[Any], decoded: DecodedBatch, max_ahead_ms: int) -> EventTimes | None:
    """Return the event times of the records with a sample to learn."""
    if not raw.times_ms:
        return None
    times_ms = np.array(raw.times_ms, np.int64)
    if decoded.refused or decoded.skipped or decoded.held_out:
        times_ms = times_ms[np.isin(np.array(raw.offsets), decoded.offsets)]
    return event_times_of(times_ms, round(1000 * time.time()), max_ahead_ms)
