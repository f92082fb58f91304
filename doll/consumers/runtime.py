"""The tasks of a worker process outside Faust. They connect protocol, stream, decoder, gradient engine and channel.

The stream feeds `buffer` (Algorithm 1). `prepare` requests the decoding of batches, and `announce` announces them.
`read_commands` and `compute` (Algorithm 2) answer grants. Batches are decoded (`Decoder`) and gradients are computed
(`GradientEngine`) outside the event loop, so that the loop stays free for heartbeats. Offsets are acknowledged in
order, and only after the parameter server has reported them as durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, Protocol

from doll.config import JobConfig
from doll.consumers.channels.control_link import ControlLink
from doll.consumers.channels.kafka_channel import Commands, WorkerChannel
from doll.consumers.compute.gradient_engine import GradientEngine
from doll.consumers.intake.batching import BatchBuffer, PartitionBatcher, RawBatch, Value, buffer_capacity
from doll.consumers.intake.dead_letters import Decoder
from doll.consumers.intake.decoding import DecodedBatch, RawRecords
from doll.consumers.intake.deleted_records import DeletedRecords
from doll.consumers.intake.partition_intake import PartitionIntake
from doll.consumers.lifecycle.departure import Departure, ProcessExit
from doll.consumers.lifecycle.stall_watch import StallWatch
from doll.consumers.protocol.grants import part_of
from doll.consumers.protocol.skipped_batches import SkippedRange
from doll.consumers.protocol.worker_core import (
    Acknowledge,
    Batch,
    Compute,
    Exit,
    OfferWeights,
    Send,
    Serve,
    ServedPartition,
    StoreRest,
    WorkerAction,
    WorkerCore,
)
from doll.consumers.tables.row_client import RowClient
from doll.errors import ConfigError, DollError, RecordError, ServiceUnavailableError, TaskError
from doll.kafka.chunk_reader import Chunk, ChunkReader, Learned, NoRecordBelow, OutOfRange, ReadFrom, Truncated
from doll.process.data_limit import out_of_memory
from doll.process.fault_points import fault_point
from doll.process.health import Heartbeat
from doll.records.bounds import Bounds, Cuts
from doll.records.control import (
    MOST_UNREAD,
    Announce,
    AnyRecord,
    GetRows,
    Grant,
    Hello,
    Nack,
    Push,
    RowsStored,
    Welcome,
    decode,
)
from doll.telemetry import get_logger

log = get_logger(__name__)

TICK_S: Final = 0.1
WATCH_EVERY_S: Final = 1.0
# How often Kafka is asked for the log ends. Fetches return them as well, but only while there are fetches.
ASK_KAFKA_EVERY_S: Final = 5.0
_ENDS_ASKED_S: Final = 10.0  # Kafka was asked within this time
_DRAIN_POLL_S: Final = 0.02
_STREAM_STOP_S: Final = 1.5  # the time that Faust needs to stop, subtracted from the time to drain


class MainLoop(Protocol):
    """The main loop of the process, which is Faust's."""

    def leave(self) -> None:
        """Drain, then stop. This method may be called again."""

    def shut_down(self) -> None:
        """Stop now."""


class WorkerRuntime:
    """The tasks of one worker. Everything except the constructor runs on one event loop."""

    main_loop: MainLoop  # set before the loop starts

    def __init__(
        self,
        config: JobConfig,
        *,
        core: WorkerCore,
        channel: WorkerChannel,
        reader: ChunkReader,
        decoder: Decoder,
        engine: GradientEngine,
        commands_offset: int,
        departure: Departure,
        heartbeat: Heartbeat,
        link: ControlLink | None = None,
        row_client: RowClient | None = None,
    ) -> None:
        """Create the tasks. `link` is a control link, which carries grants, pushes and heartbeats while it is open.
        None: Kafka carries them. `departure` states when this process must leave; the departure may have begun before
        this call."""
        self._config = config
        self._core = core
        self._channel = channel
        self.reader = reader  # the stream starts it and passes its deliveries on
        self._link = link
        self._row_client = row_client
        self._decoder = decoder
        self._engine = engine
        self._next_command = commands_offset
        self.departure = departure
        self._heartbeat = heartbeat
        self._samples_topic = config.topic("samples")
        self._commands_topic = config.topic("commands")
        self._filled = asyncio.Event()  # set when records were fed
        self.exit = ProcessExit(
            config.worker.drain_s, flush=lambda: channel.flush(1.0), stop=lambda: self.main_loop.shut_down()
        )
        self._num_changes = 0  # how many times the served partitions have changed
        self.intakes = {number: self._intake_of(served) for number, served in core.served.items()}
        self.buffer = BatchBuffer(
            {number: intake.batcher for number, intake in self.intakes.items()}, buffer_capacity(config)
        )
        reader.change((), [self._read_of(number) for number in self.intakes])
        self._sum_next_offsets()
        self._commands: asyncio.Queue[Commands | list[AnyRecord]] = asyncio.Queue()
        self._decoding: asyncio.Queue[tuple[PartitionIntake, RawBatch[bytes | None], asyncio.Future[DecodedBatch]]] = (
            asyncio.Queue()
        )
        self._num_decoding = 0  # batches being decoded, including the one that `announce` waits for
        self._num_behind = 0  # decoded batches that wait behind batches without a record
        self._orders: asyncio.Queue[Compute | StoreRest] = asyncio.Queue()
        self._room = asyncio.Event()

    def _intake_of(self, served: ServedPartition) -> PartitionIntake:
        config = self._config
        batcher: PartitionBatcher[Value] = PartitionBatcher(
            origin=served.origin, records_per_batch=config.data.records_per_batch, next_batch=served.next_batch,
            align=config.training.policy.batches_per_push, partition=served.number, cuts=served.cuts,
        )  # fmt: skip
        return PartitionIntake(
            served.number,
            self._num_changes,
            batcher,
            DeletedRecords(config, self._core, served.number, batcher, self._channel, self.exit),
            StallWatch(config.worker.stall_timeout_s, self._next_command, time.monotonic()),
        )

    def _read_of(self, number: int) -> ReadFrom:
        intake, served = self.intakes[number], self._core.served[number]
        included = served.bounds(self._config.data.records_per_batch).lo(served.included)
        return ReadFrom(number, intake.batcher.next_offset, Learned(included, served.leader_epoch), intake.reading)

    def intake_of(self, delivery: Chunk | NoRecordBelow | OutOfRange | Truncated) -> PartitionIntake | None:
        """Return the intake that a delivery belongs to. None: the worker no longer serves the partition."""
        intake = self.intakes.get(delivery.partition)
        return intake if intake is not None and intake.reading == delivery.reading else None

    def _serve(self, gone: Sequence[int], new: Sequence[int]) -> None:
        """Stop reading the partitions `gone`, which other workers serve now, and read the partitions `new`."""
        self._num_changes += 1
        for number in gone:
            self._num_behind -= len(self.intakes.pop(number).decoded)
            self.buffer.remove(number)
        for number in new:
            intake = self.intakes[number] = self._intake_of(self._core.served[number])
            self.buffer.add(number, intake.batcher)
        self.reader.change(gone, [self._read_of(number) for number in new])
        self._sum_next_offsets()
        self._room.set()
        if self.buffer.is_half_empty:
            self.reader.resume()
        log.info(
            "serves_other_partitions", gone=list(gone), new=list(new), partitions=sorted(self.intakes),
            hint="" if self.intakes else "this worker is a spare: `doll scale` or fewer workers give it partitions",
        )  # fmt: skip

    def _sum_next_offsets(self) -> None:
        size = self._config.data.records_per_batch
        self._core.next_offset = sum(item.bounds(size).lo(item.next_batch) for item in self._core.served.values())

    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Return the coroutines that run concurrently with the stream until the end."""
        answer = [self.compute] * self._engine.depth
        tasks = [self.read_commands, self.prepare, self.announce, *answer, self.tick, self.watch, self.watch_engine]
        return tasks if self._link is None else [*tasks, self.keep_link]

    # --- Algorithm 1 ------------------------------------------------------------------------------------------------

    def feed(self, chunk: Chunk) -> None:
        if (intake := self.intake_of(chunk)) is None:
            return
        intake.watch.samples_at_s = intake.fed_at_s = time.monotonic()
        if self.buffer.feed(chunk.partition, chunk.offsets, chunk.values, chunk.leader_epoch, chunk.envelopes):
            self.reader.pause()
        self._filled.set()

    async def prepare(self) -> None:
        """Request the decoding of batches while the core has room. Resume the stream when few batches are left."""
        buffer = self.buffer
        while True:
            while not buffer:
                self._filled.clear()
                await self._filled.wait()
            while not self._may_decode:
                self._room.clear()
                await self._room.wait()
            if not buffer:
                continue
            raw = buffer.take()
            if buffer.is_half_empty:
                self.reader.resume()
            self._num_decoding += 1
            records = RawRecords((), ())
            if raw.count == 1:
                records = RawRecords(raw.offsets, raw.values, raw.partition, raw.envelopes)
            future = asyncio.wrap_future(self._decoder.decode(records))
            raw.values, raw.envelopes = [], []  # the decoder has them
            self._decoding.put_nowait((self.intakes[raw.partition], raw, future))

    @property
    def _may_decode(self) -> bool:
        core = self._core
        held = core.retained + self._num_decoding + self._num_behind
        return held < core.max_pending and self._num_decoding < self._decoder.depth and not core.draining

    async def announce(self) -> None:
        """Pass the decoded batches to the core, in order."""
        while True:
            intake, raw, future = await self._decoding.get()
            try:
                decoded = await future
            except ServiceUnavailableError as exc:  # Kafka does not take a dead letter
                self.exit.request(1, str(exc))
                return
            except (ConfigError, TaskError) as exc:  # a restart would fail again
                self.exit.request(exc.exit_code, str(exc))
                return
            self._num_decoding -= 1
            if self.intakes.get(raw.partition) is not intake:
                self._room.set()
                continue  # others serve the partition by now
            intake.decoded.append((raw, decoded))
            self._num_behind += 1
            self._give(intake)
            intake.watch.samples_at_s = time.monotonic()

    def _give(self, intake: PartitionIntake) -> None:
        """Pass the decoded batches of a partition to the core. If batches without a record come first, later batches
        wait."""
        if self.intakes.get(intake.number) is not intake:
            return
        core, served = self._core, self._core.served[intake.number]
        while intake.decoded and not served.skipped:
            raw, decoded = intake.decoded.popleft()
            self._num_behind -= 1
            self._room.set()
            core.next_offset += raw.hi - raw.lo
            if raw.count > 1:
                intake.empty = decoded
                skipped = SkippedRange(raw.number, raw.number + raw.count, tuple(raw.gaps), tuple(raw.lost))
                self._do(core.skip(intake.number, skipped))
            else:
                self._do(core.batch_ready(_batch(raw, decoded)))

    def _give_skipped(self) -> None:
        """Pass batches without a record to the core if other batches wait for them."""
        now, size = time.monotonic(), self._config.data.records_per_batch
        for number, intake in list(self.intakes.items()):
            if self._core.served[number].skipped and intake.empty is not None:
                if (one := self._core.next_of_skipped(number, now, size)) is not None:
                    batch = Batch(one.first, intake.empty, 0, now, (), one.gaps, one.lost, partition=number)
                    self._do(self._core.batch_ready(batch))
                self._give(intake)

    # --- Algorithm 2 ------------------------------------------------------------------------------------------------

    async def read_commands(self) -> None:
        """Pass every command to the core."""
        loop = asyncio.get_running_loop()
        if self._row_client is not None:

            def ask(request: GetRows) -> None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._send, request)

            self._row_client.connect(ask)

        def deliver(commands: Commands) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._commands.put_nowait, commands)

        # Through a queue and not in a callback, because an error here must end this process.
        self._channel.read_commands(deliver)
        while True:
            for item in await self._commands.get():
                if isinstance(item, tuple):
                    offset, value = item
                    self._next_command = offset + 1
                    try:
                        record = decode(value)
                    except RecordError as exc:
                        log.warning("record_refused", topic="commands", reason=str(exc))
                        continue
                else:
                    record = item
                if isinstance(record, RowsStored):
                    if self._row_client is not None:
                        self._row_client.deliver(record)
                    continue
                self._do(self._core.on_record(record, time.monotonic()))
                if self._row_client is not None and isinstance(record, Hello | Welcome | Grant):
                    self._row_client.look_again()
                if self._link is not None and isinstance(record, Welcome) and record.process == self._core.process:
                    self._link.welcome(record)

    async def keep_link(self) -> None:
        """Keep a control link open. When a link opens or fails, send again the records that the server may not have
        received."""
        assert self._link is not None
        await self._link.run(self._commands.put_nowait, lambda: self._do(self._core.resend()))

    async def compute(self) -> None:
        """Answer grants, one at a time. One such task runs for each grant that the engine accepts at the same time."""
        core = self._core
        while True:
            order = await self._orders.get()
            if isinstance(order, StoreRest):
                await self._store_rest(order)
                continue
            grant, batches = order.grant, order.batches
            while batches and (begun := core.begin(grant)) is not None:
                grant, begun_at_s = begun, time.monotonic()
                first, last = batches[0].number, batches[-1].number
                what = f"batch {first}" if first == last else f"batches {first} to {last}"
                try:
                    done = await asyncio.wrap_future(
                        self._engine.submit(grant, batches, partial(self._goes_on, grant.term))
                    )
                except Exception as exc:
                    self._fail(exc, what)
                    return
                if done is None:
                    self._do(core.weights_missing(grant))
                    break
                if not done.batches:
                    core.not_begun(grant)
                    break
                self._do(core.gradient_done(grant, batches, done, begun_at_s))
                # The set ended early: the remaining batches form another set.
                count = len(done.batches)
                batches = batches[count:]
                grant = part_of(grant, count)

    async def watch_engine(self) -> None:
        """Wait for the end of the engine, and end the process if the engine has failed."""
        try:
            await asyncio.wrap_future(self._engine.ended)
        except Exception as exc:
            self._fail(exc)

    def _fail(self, error: Exception, what: str = "") -> None:
        """End the process because the engine has failed, or because computing `what` has failed."""
        error = out_of_memory(error, self._config.worker.memory_bytes) or error
        if isinstance(error, DollError):
            place = f"{what}: " if what and not isinstance(error, ServiceUnavailableError) else ""
            self.exit.request(error.exit_code if isinstance(error, TaskError) else 1, f"{place}{error}")
        else:  # a bug, or this machine's memory or disk
            event = "task_failed" if what else "engine_failed"
            log.error(event, what=what, error=f"{type(error).__name__}: {error}", exc_info=error)
            self.exit.request(1, f"{self._config.task.cls} failed on {what}: {error}" if what else str(error))

    def _goes_on(self, term: int, batch: int, grant_id: int) -> bool:
        ends = self._core.draining or self.exit.is_requested
        return not ends and self._core.is_wanted(term, batch, grant_id)

    # --- actions and time -------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[WorkerAction]) -> None:
        for action in actions:
            match action:
                case Send(record):
                    self._send(record)
                    if isinstance(record, Announce):
                        fault_point("worker.after_announce", self._flush_channel)
                    elif isinstance(record, Push):
                        fault_point("worker.after_push", self._flush_channel)
                case Compute():
                    for order in _one_by_one(action) if self._engine.depth > 1 else [action]:
                        self._orders.put_nowait(order)
                case StoreRest():
                    self._orders.put_nowait(action)
                case OfferWeights(weights):
                    self._engine.offer(weights)
                case Acknowledge(partition, until, left_out):
                    fault_point("worker.after_durable")
                    origin, size = self._core.served[partition].origin, self._config.data.records_per_batch
                    self.reader.commit(partition, Bounds(origin, size, Cuts(left_out)).lo(until))
                    self._room.set()
                    if (intake := self.intakes[partition]).decoded:
                        asyncio.get_running_loop().call_soon(self._give, intake)
                case Serve(gone, new):
                    self._serve(gone, [item.partition for item in new])
                case Exit(code, reason):
                    if self._link is not None:
                        self._link.close(reason)
                    self.exit.request(code, reason)

    def _send(self, record: AnyRecord) -> None:
        link = self._link
        if link is None or not (isinstance(record, Push | Nack | GetRows) and link.send(record)):
            self._channel.send(record)

    def _flush_channel(self) -> None:
        self._channel.flush(10.0)

    async def tick(self) -> None:
        """Send heartbeats and due announcements, and leave when it is time."""
        self._heartbeat.expect("loop")
        self._heartbeat.expect("kafka", vital=False)
        self._heartbeat.set_waiting_for("")
        while True:
            await asyncio.sleep(TICK_S)
            self._show_waiting()
            self._heartbeat.beat("loop")
            self._channel.poll()
            self._skip_recordless_offsets()
            self._cut_batches()
            if self.departure():
                self.main_loop.leave()
            self._give_skipped()
            self._do(self._core.tick(time.monotonic()))

    def _show_waiting(self) -> None:
        """Report to the probes and the server the reason why decoding waits."""
        if self._core.waiting_for != (waiting_for := self._decoder.waiting_for):
            self._core.waiting_for = waiting_for
            self._heartbeat.set_waiting_for(waiting_for)

    def _skip_recordless_offsets(self) -> None:
        for number, intake in self.intakes.items():
            if (offset := intake.recordless_until) is not None:
                self.buffer.skip_to(number, offset)
                self._filled.set()

    def _cut_batches(self) -> None:
        """Cut and announce incomplete batches at the end of a source, or if they have waited longer than
        `data.cut_after_s` and there is nothing more to read."""
        now, after_s = time.monotonic(), self._config.data.cut_after_s
        if self._core.draining:
            return
        for number, intake in self.intakes.items():
            is_end = intake.batcher.must_flush(self._core.served[number].flush_until)
            overdue_s = -1.0 if after_s is None else intake.open_for_s(now) - after_s
            is_old = overdue_s >= 0 and self._has_read_all(intake, now, overdue_s)
            if (is_end or is_old) and self.buffer.close(number, also_gaps=is_end):
                self._filled.set()

    def _has_read_all(self, intake: PartitionIntake, now: float, overdue_s: float) -> bool:
        """Return whether all known records of a partition have been read.

        While the buffer is full, the reader pauses and does not update its log ends, so only log ends that were
        requested from Kafka count. While a transaction is open, the records after it are not delivered, although the
        log is longer.
        """
        is_reading = self.buffer.is_half_empty
        if is_reading and now - intake.fed_at_s >= (self._config.data.cut_after_s or 0.0):
            return True
        is_at_end = intake.batcher.next_offset >= max(intake.log_end, self.reader.log_end(intake.number))
        return is_at_end and (is_reading or overdue_s > _ENDS_ASKED_S)

    async def watch(self) -> None:
        """Measure the lag. End the process if there are records but none arrives."""
        asked_at_s = float("-inf")
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if time.monotonic() - asked_at_s < min(ASK_KAFKA_EVERY_S, self._config.worker.stall_timeout_s / 4):
                self._measure_lag()
                continue
            asked_at_s = time.monotonic()
            try:
                commands_high = await loop.run_in_executor(None, self._ask_log_ends)
            except ServiceUnavailableError:  # the client has logged it
                for intake in self.intakes.values():
                    intake.watch.record_unreachable(time.monotonic())
                continue
            self._heartbeat.beat("kafka")
            unread = self._measure_lag()
            for number, intake in list(self.intakes.items()):
                if self.intakes.get(number) is intake:
                    await self._watch_partition(intake, unread[number], commands_high)

    def _ask_log_ends(self) -> int:
        """Ask Kafka for the ends of the logs, and return the end of the commands. Runs in another thread."""
        intakes = self.intakes.copy()
        for number, (_, end) in self._channel.bounds_of_partitions(self._samples_topic, list(intakes)).items():
            intakes[number].log_end = end
        return self._channel.watermarks(self._commands_topic, self._core.worker)[1]

    async def _watch_partition(self, intake: PartitionIntake, unread: int, commands_high: int) -> None:
        now, watch, high = time.monotonic(), intake.watch, intake.log_end
        watch.observe(
            unread=unread, is_waiting=self._wants_no_records(intake),
            next_command=self._next_command, commands_high=commands_high, now=now,
        )  # fmt: skip
        if watch.samples_stalled(now):
            with contextlib.suppress(ServiceUnavailableError):
                place = (self._samples_topic, intake.number, intake.batcher.next_offset, high)
                if not await asyncio.get_running_loop().run_in_executor(None, self._channel.holds_record, *place):
                    watch.record_empty(high, now)
        if self.intakes.get(intake.number) is intake and (problem := watch.problem(now)):
            self.exit.request(1, problem)

    def _wants_no_records(self, intake: PartitionIntake) -> bool:
        core = self._core
        return not core.has_room or core.draining or bool(intake.decoded) or bool(self._decoder.waiting_for)

    def _measure_lag(self) -> dict[int, int]:
        """Return the number of unread records of each partition. Records in the buffer count as lag as well."""
        unread = {
            number: intake.watch.unread(intake.batcher.next_offset, max(intake.log_end, self.reader.log_end(number)))
            for number, intake in self.intakes.items()
        }
        waiting = len(self.buffer) + self._num_decoding + self._num_behind
        self._core.lag = sum(unread.values()) + waiting * self._config.data.records_per_batch
        most = heapq.nlargest(MOST_UNREAD, unread.items(), key=itemgetter(1))
        self._core.most_unread = tuple(item for item in most if item[1])
        return unread

    # --- the end ----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Announce nothing more, finish the current gradient or return its batch, and send Leave."""
        departure = self.departure
        self._core.drain()
        self._engine.stop()
        self._heartbeat.set_waiting_for("its end (draining)")
        log.info("draining", cause=departure.cause, owes_gradient=self._core.busy)
        # The remaining time may become shorter during the loop.
        while self._core.busy and departure.left_s() > _STREAM_STOP_S:
            await asyncio.sleep(_DRAIN_POLL_S)
        # If a gradient is not done in time, storing the rest would be too late.
        if (rest := self._core.rest) is not None and not self._core.busy:
            await self._store_rest(rest)
        self._do(self._core.leave(departure.cause))
        self._channel.flush(min(1.0, max(0.0, departure.left_s())))
        if self._link is not None:
            self._link.close(f"the worker leaves ({departure.cause})")

    async def _store_rest(self, order: StoreRest) -> None:
        try:
            done = await asyncio.wrap_future(self._engine.store_rest(order.until))
        except DollError as exc:
            log.warning("rest_not_stored", reason=str(exc), action="stored when the server asks again")
            self._core.rest_not_stored(order)
            return
        self._do(self._core.rest_stored(order, done))


def _one_by_one(order: Compute) -> list[Compute]:
    """Return the batches of a set as separate orders."""
    grant = order.grant
    return [Compute(part_of(grant, at, at + 1), (batch,)) for at, batch in enumerate(order.batches)]


def _batch(raw: RawBatch[Any], decoded: DecodedBatch) -> Batch:
    return Batch(
        number=raw.number, data=decoded, num_samples=decoded.num_samples, complete_at_s=time.monotonic(),
        dead=tuple(item.offset for item in decoded.refused if item.whole), gaps=tuple(raw.gaps), lost=tuple(raw.lost),
        dead_samples=sum(item.samples for item in decoded.refused if not item.whole), leader_epoch=raw.leader_epoch,
        partition=raw.partition, skipped=decoded.skipped,
    )  # fmt: skip
