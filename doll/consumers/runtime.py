"""The tasks of a worker process outside Faust. They connect protocol, samples, gradient engine and channel.

`SampleIntake` reads the samples and announces batches (Algorithm 1). `read_commands` and `compute` (Algorithm 2) answer
grants. Batches are decoded (`Decoder`) and gradients are computed (`GradientEngine`) outside the event loop, so that
the loop stays free for heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, Protocol

from doll.config import JobConfig
from doll.consumers.channels.control_link import ControlLink
from doll.consumers.channels.kafka_channel import Commands, WorkerChannel
from doll.consumers.compute.gradient_engine import GradientEngine
from doll.consumers.intake.dead_letters import Decoder
from doll.consumers.intake.sample_intake import SampleIntake, stall_problem
from doll.consumers.lifecycle.departure import Departure, ProcessExit
from doll.consumers.protocol.grants import part_of
from doll.consumers.protocol.worker_core import (
    Acknowledge,
    Compute,
    Exit,
    OfferWeights,
    Send,
    Serve,
    StoreRest,
    WorkerAction,
    WorkerCore,
)
from doll.consumers.tables.row_client import RowClient
from doll.errors import DollError, RecordError, ServiceUnavailableError, TaskError
from doll.kafka.chunk_reader import ChunkReader
from doll.process.data_limit import out_of_memory
from doll.process.fault_points import fault_point
from doll.process.health import Heartbeat
from doll.records.control import (
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
        self._link = link
        self._row_client = row_client
        self._decoder = decoder
        self._engine = engine
        self._next_command = commands_offset
        self.departure = departure
        self._heartbeat = heartbeat
        self.exit = ProcessExit(
            config.worker.drain_s, flush=lambda: channel.flush(1.0), stop=lambda: self.main_loop.shut_down()
        )
        self.intake = SampleIntake(config, core, channel, reader, decoder, self.exit, self._do)
        self._commands: asyncio.Queue[Commands | list[AnyRecord]] = asyncio.Queue()
        self._orders: asyncio.Queue[Compute | StoreRest] = asyncio.Queue()

    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Return the coroutines that run concurrently with the stream until the end."""
        tasks = [self.intake.prepare, self.intake.announce, self.read_commands, *[self.compute] * self._engine.depth]
        tasks += [self.tick, self.watch, self.watch_engine]
        return tasks if self._link is None else [*tasks, self.keep_link]

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
                case Acknowledge():
                    fault_point("worker.after_durable")
                    self.intake.acknowledge(action)
                case Serve(gone, new):
                    self.intake.serve(gone, [item.partition for item in new])
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
            self.intake.tick()
            if self.departure():
                self.main_loop.leave()
            self._do(self._core.tick(time.monotonic()))

    def _show_waiting(self) -> None:
        """Report to the probes and the server the reason why decoding waits."""
        if self._core.waiting_for != (waiting_for := self._decoder.waiting_for):
            self._core.waiting_for = waiting_for
            self._heartbeat.set_waiting_for(waiting_for)

    async def watch(self) -> None:
        """Measure the lag. End the process if there are records but none arrives."""
        loop, stall_timeout_s = asyncio.get_running_loop(), self._config.worker.stall_timeout_s
        asked_at_s, commands_at_s, seen_command = float("-inf"), time.monotonic(), self._next_command
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if time.monotonic() - asked_at_s < min(ASK_KAFKA_EVERY_S, stall_timeout_s / 4):
                self.intake.measure_lag()
                continue
            asked_at_s = time.monotonic()
            try:
                ends, commands_end = await loop.run_in_executor(None, self._ask_log_ends, list(self.intake.streams))
            except ServiceUnavailableError:  # the client has logged it
                commands_at_s = time.monotonic()
                self.intake.record_unreachable()
                continue
            self._heartbeat.beat("kafka")
            if self._next_command != seen_command or commands_end <= self._next_command:
                commands_at_s, seen_command = time.monotonic(), self._next_command
            problem = await self.intake.find_stall(ends) or stall_problem(commands_at_s, stall_timeout_s)
            if problem and self.intake.streams:
                self.exit.request(1, problem)

    def _ask_log_ends(self, partitions: list[int]) -> tuple[dict[int, int], int]:
        """Ask Kafka for the ends of these partitions and of the commands. Runs in another thread."""
        bounds = self._channel.bounds_of_partitions(self._config.topic("samples"), partitions)
        commands_end = self._channel.watermarks(self._config.topic("commands"), self._core.worker)[1]
        return {number: end for number, (_, end) in bounds.items()}, commands_end

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
