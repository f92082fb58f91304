"""A worker's process without Faust: the tasks that connect protocol, stream, decoder, gradient engine and channel.

The stream feeds `buffer` (Algorithm 1); `prepare` has its batches decoded, `announce` announces them; `read_commands`
and `compute` (Algorithm 2) answer grants. Batches are decoded (`Decoder`) and gradients computed (`GradientEngine`)
elsewhere, so the event loop stays free for heartbeats. Offsets are acknowledged in order and only when the parameter
server reports them durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, Protocol

from msgspec import structs

from doll.config import JobConfig
from doll.consumers.channels.control_link import ControlLink
from doll.consumers.channels.kafka_channel import Commands, WorkerChannel
from doll.consumers.compute.gradient_engine import GradientEngine
from doll.consumers.intake.batching import BatchBuffer, Batcher, RawBatch, buffer_capacity
from doll.consumers.intake.dead_letters import Decoder
from doll.consumers.intake.decoding import Decoded, Records
from doll.consumers.intake.deleted_records import DeletedRecords
from doll.consumers.lifecycle.departure import Departure, ProcessExit
from doll.consumers.lifecycle.stall_watch import StallWatch
from doll.consumers.protocol.skipped_batches import Skipped
from doll.consumers.protocol.worker_core import (
    Acknowledge,
    Batch,
    Compute,
    Exit,
    OfferWeights,
    Send,
    StoreRest,
    WorkerAction,
    WorkerCore,
)
from doll.consumers.tables.row_client import RowClient
from doll.errors import DollError, RecordError, ServiceUnavailableError, TaskError
from doll.kafka.chunk_reader import Chunk, ChunkReader
from doll.process.data_limit import out_of_memory
from doll.process.fault_points import fault_point
from doll.process.health import Heartbeat
from doll.records.control import Announce, AnyRecord, GetRows, Grant, Hello, Nack, Push, RowsStored, Welcome, decode
from doll.telemetry import get_logger

log = get_logger(__name__)

TICK_S: Final = 0.1
WATCH_EVERY_S: Final = 1.0
# How often Kafka itself is asked where the logs end; fetches say so as well, but only while there are fetches.
ASK_KAFKA_EVERY_S: Final = 5.0
_DRAIN_POLL_S: Final = 0.02
_STREAM_STOP_S: Final = 1.5  # what Faust needs to stop, taken off the time to drain


class MainLoop(Protocol):
    """The process's main loop: Faust's."""

    def leave(self) -> None:
        """Drain, then stop; may be repeated."""

    def shut_down(self) -> None:
        """Stop now."""


class WorkerRuntime:
    """One worker's tasks. Everything but the constructor runs on one event loop."""

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
        """Args:
        link: carries grants, pushes and heartbeats while it is open; None: Kafka does.
        departure: tells when this process must leave; one that began before counts as well.
        """
        self._config = config
        self._core = core
        self._channel = channel
        self.reader = reader  # of this worker's partition; the stream starts it, and passes on what it delivers
        self._link = link
        self._row_client = row_client
        self._decoder = decoder
        self._engine = engine
        self._next_command = commands_offset
        self.departure = departure
        self._heartbeat = heartbeat
        self._samples_topic = config.topic("samples")
        self._commands_topic = config.topic("commands")
        batcher: Batcher[bytes | None] = Batcher(
            origin=core.origin,
            records_per_batch=config.data.records_per_batch,
            next_batch=core.next_batch,
            align=config.training.policy.batches_per_push,
        )
        self.buffer = BatchBuffer(batcher, buffer_capacity(config))
        # (delivered, position), kept by the stream: the records below `delivered` have been fed, and from there to
        # `position` there is no record (markers of transactions, for instance).
        self.fetch_progress = (batcher.next_offset, batcher.next_offset)
        self._filled = asyncio.Event()  # something was fed
        self._stall_watch = StallWatch(config.worker.stall_timeout_s, commands_offset, time.monotonic())
        self.exit = ProcessExit(
            config.worker.drain_s, flush=lambda: channel.flush(1.0), stop=lambda: self.main_loop.shut_down()
        )
        self.deleted_records = DeletedRecords(config, core, batcher, channel, self.exit)
        self._commands: asyncio.Queue[Commands | list[AnyRecord]] = asyncio.Queue()
        self._decoding: asyncio.Queue[tuple[RawBatch[bytes | None], asyncio.Future[Decoded]]] = asyncio.Queue()
        self._num_decoding = 0  # with the one that `announce` waits for
        self._orders: asyncio.Queue[Compute | StoreRest] = asyncio.Queue()
        self._room = asyncio.Event()

    @property
    def worker(self) -> int:
        """Number of this worker."""
        return self._core.worker

    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Coroutines that run beside the stream, until the end."""
        answer = [self.compute] * self._engine.depth
        tasks = [self.read_commands, self.prepare, self.announce, *answer, self.tick, self.watch, self.watch_engine]
        return tasks if self._link is None else [*tasks, self.keep_link]

    # --- Algorithm 1 ------------------------------------------------------------------------------------------------

    def feed(self, chunk: Chunk) -> None:
        """Take the next records of the stream."""
        self._stall_watch.samples_at_s = time.monotonic()
        if self.buffer.feed(*chunk):
            self.reader.pause()
        self._filled.set()

    async def prepare(self) -> None:
        """Have batches decoded while the core has room; resume the stream when few are left."""
        buffer = self.buffer
        while True:
            while not buffer:
                self._filled.clear()
                await self._filled.wait()
            while not self._may_decode:
                self._room.clear()
                await self._room.wait()
            raw = buffer.take()
            if buffer.is_half_empty:
                self.reader.resume()
            self._num_decoding += 1
            records = Records(raw.offsets, raw.values) if raw.count == 1 else Records((), ())
            future = asyncio.wrap_future(self._decoder.decode(records))
            raw.values = []  # the decoder has them
            self._decoding.put_nowait((raw, future))

    @property
    def _may_decode(self) -> bool:
        core = self._core
        held = core.retained + self._num_decoding
        return held < core.max_pending and self._num_decoding < self._decoder.depth and not core.draining

    async def announce(self) -> None:
        """Give the core what is decoded, in order."""
        core = self._core
        while True:
            raw, future = await self._decoding.get()
            try:
                decoded = await future
            except ServiceUnavailableError as exc:  # Kafka does not take a dead letter
                self.exit.request(1, str(exc))
                return
            self._num_decoding -= 1
            self._room.set()
            core.next_offset = raw.hi
            if raw.count > 1:
                skipped = Skipped(raw.number, raw.number + raw.count, tuple(raw.gaps), tuple(raw.lost))
                self._do(core.skip(skipped))
                while core.skipped:
                    self._room.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._room.wait(), TICK_S)
                    now = time.monotonic()
                    if (one := core.next_of_skipped(now, self._config.data.records_per_batch)) is not None:
                        self._do(core.batch_ready(Batch(one.first, decoded, 0, now, (), one.gaps, one.lost)))
            else:
                self._do(core.batch_ready(_batch(raw, decoded)))
            self._stall_watch.samples_at_s = time.monotonic()

    # --- Algorithm 2 ------------------------------------------------------------------------------------------------

    async def read_commands(self) -> None:
        """Give every command to the core."""
        loop = asyncio.get_running_loop()
        if self._row_client is not None:

            def ask(request: GetRows) -> None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._send, request)

            self._row_client.connect(ask)

        def deliver(commands: Commands) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._commands.put_nowait, commands)

        # Through a queue, and not in a callback: what goes wrong here must end this process.
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
        """Keep a control link open; whenever one opens or fails, send again what the server may not have."""
        assert self._link is not None
        await self._link.run(self._commands.put_nowait, lambda: self._do(self._core.resend()))

    async def compute(self) -> None:
        """Answer grants, one at a time. As many of these tasks run as the engine takes grants at once."""
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
                # A set that ended early: the others are another set.
                count = len(done.batches)
                batches = batches[count:]
                grant = structs.replace(grant, first=grant.first + count, grant_ids=grant.grant_ids[count:])

    async def watch_engine(self) -> None:
        """End when the engine has ended."""
        try:
            await asyncio.wrap_future(self._engine.ended)
        except Exception as exc:
            self._fail(exc)

    def _fail(self, error: Exception, what: str = "") -> None:
        """End because the engine, or `what` it has computed, has failed."""
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
                case Acknowledge(until):
                    fault_point("worker.after_durable")
                    self.reader.commit(self._core.origin + until * self._config.data.records_per_batch)
                    self._room.set()
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
        """Heartbeats, announcements that are due, and the end when it is time to leave."""
        self._heartbeat.expect("loop")
        self._heartbeat.expect("kafka", vital=False)
        self._heartbeat.set_waiting_for("")
        while True:
            await asyncio.sleep(TICK_S)
            self._heartbeat.beat("loop")
            self._channel.poll()
            self._skip_recordless_offsets()
            if self.departure():
                self.main_loop.leave()
            self._do(self._core.tick(time.monotonic()))

    def _skip_recordless_offsets(self) -> None:
        """Where all delivered records are fed, there is no record between them and the next fetch."""
        delivered, position = self.fetch_progress
        if self.buffer.batcher.next_offset == delivered < position:
            self.buffer.skip_to(position)
            self._filled.set()

    async def watch(self) -> None:
        """Measure the lag, and end where records are there and none comes."""
        watch = self._stall_watch
        high, asked_at_s = 0, float("-inf")
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if time.monotonic() - asked_at_s < min(ASK_KAFKA_EVERY_S, self._config.worker.stall_timeout_s / 4):
                self._measure_lag(max(high, self.reader.log_end))
                continue
            asked_at_s = time.monotonic()
            try:
                high = await self._log_end(self._samples_topic)
                commands_high = await self._log_end(self._commands_topic)
            except ServiceUnavailableError:  # the client has logged it
                watch.record_unreachable(time.monotonic())
                continue
            now = time.monotonic()
            self._heartbeat.beat("kafka")
            next_offset = self.buffer.batcher.next_offset
            unread = self._measure_lag(high)
            watch.observe(
                unread=unread, is_waiting=not self._core.has_room or self._core.draining,
                next_command=self._next_command, commands_high=commands_high, now=now,
            )  # fmt: skip
            if watch.samples_stalled(now):
                with contextlib.suppress(ServiceUnavailableError):
                    place = (self._samples_topic, self.worker, next_offset, high)
                    if not await asyncio.get_running_loop().run_in_executor(None, self._channel.holds_record, *place):
                        watch.record_empty(high, now)
            if problem := watch.problem(now):
                self.exit.request(1, problem)

    def _measure_lag(self, high: int) -> int:
        """Records that are not read, where the log of samples ends at `high`; those in the buffer are lag as well."""
        unread = self._stall_watch.unread(self.buffer.batcher.next_offset, high)
        self._core.lag = unread + (len(self.buffer) + self._num_decoding) * self._config.data.records_per_batch
        return unread

    async def _log_end(self, topic: str) -> int:
        loop = asyncio.get_running_loop()
        _, high = await loop.run_in_executor(None, self._channel.watermarks, topic, self.worker)
        return high

    # --- the end ----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Announce nothing more, finish the gradient under way or return its batch, and send Leave."""
        departure = self.departure
        self._core.drain()
        self._engine.stop()
        self._heartbeat.set_waiting_for("its end (draining)")
        log.info("draining", cause=departure.cause, owes_gradient=self._core.busy)
        # The time that is left may become shorter meanwhile.
        while self._core.busy and departure.left_s() > _STREAM_STOP_S:
            await asyncio.sleep(_DRAIN_POLL_S)
        # Behind a gradient that is not done in time it would come too late.
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
    """The batches of a set, each by itself."""
    grant = order.grant
    return [
        Compute(structs.replace(grant, first=grant.first + at, grant_ids=(number,)), (batch,))
        for at, (number, batch) in enumerate(zip(grant.grant_ids, order.batches, strict=True))
    ]


def _batch(raw: RawBatch[Any], decoded: Decoded) -> Batch:
    return Batch(
        number=raw.number, data=decoded, num_samples=decoded.num_samples, complete_at_s=time.monotonic(),
        dead=tuple(item.offset for item in decoded.refused if item.whole), gaps=tuple(raw.gaps), lost=tuple(raw.lost),
        dead_samples=sum(item.samples for item in decoded.refused if not item.whole), leader_epoch=raw.leader_epoch,
    )  # fmt: skip
