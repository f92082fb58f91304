"""The worker's Faust app: a thin shell around `WorkerCore`.

The agent `samples` (Algorithm 1) cuts the stream into batches; `_read_commands` and `_compute` (Algorithm 2) take grants
and durable watermarks, which come on a connection of their own, and answer with gradients.
Gradients run in a thread of their own, so the event loop stays free for heartbeats. Offsets are acknowledged in order
and only when the parameter server says that they are durable; `CrashingSupervisor` ends the process on any surprise,
because an agent that is restarted in place has lost its position (reference faust-kafka 1.1).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faust
from faust.types import TP

from doll.config import JobConfig
from doll.consumers.batching import Batcher, RawBatch
from doll.consumers.decoding import Decoded, Refused, decode_records, refuse
from doll.consumers.departure import Departure, end_within
from doll.consumers.gradient import GradientComputer
from doll.consumers.guard import Guard
from doll.consumers.kafka_channel import WorkerChannel
from doll.consumers.transport import OutOfRange
from doll.consumers.worker import Acknowledge, Batch, Compute, Exit, GradientDone, Send, WorkerAction, WorkerCore
from doll.errors import BlobError, ConfigError, DataLossError, RecordError, ServiceUnavailableError, TaskError
from doll.kafka.clients import kafka_credentials
from doll.kafka.samples_topic import lost_records, truncated_message
from doll.process.fault_points import fault_point
from doll.process.health import Heartbeat
from doll.records import Announce, DeadLetter, Grant, Push, Welcome, decode
from doll.services import Services
from doll.storage.blobs import Blobs, decode_blob, encode_blob, gradient_key
from doll.task import Task
from doll.telemetry import get_logger

log = get_logger(__name__)

_TICK_S = 0.1
_WATERMARKS_EVERY_S = 2.0
_DEAD_LETTER_BYTES = 65_536  # a dead letter keeps so much of the record; the rest is still at its offset
_NEWER_START_TIMEOUT_S = 10.0  # for the server to say that deleted records are in the durable model
_FAUST_STOP_S = 1.5  # what Faust needs to stop, taken off the time to drain


class DollApp(faust.App):  # type: ignore[misc]
    """A Faust app on the `doll://` transport."""

    fixed_partitions: dict[str, list[int]]
    start_offsets: dict[TP, int]
    fetch_max_wait_ms: int
    on_out_of_range: OutOfRange
    fetch_progress: dict[TP, tuple[int, int]]

    def on_init_dependencies(self) -> Any:
        services = super().on_init_dependencies()
        self.sensors.remove(self.monitor)  # 6 us of CPU per record, for figures that nobody reads
        return services


class WorkerShell:
    """Connects one `WorkerCore` to Faust, the blob store and the model."""

    def __init__(
        self,
        config: JobConfig,
        services: Services,
        *,
        welcome: Welcome,
        commands_offset: int,
        task: Task,
        computer: GradientComputer,
        blobs: Blobs,
        link: WorkerChannel,
        folder: Path,
        departure: Departure | None = None,
        heartbeat: Heartbeat | None = None,
        incarnation: int = 0,
    ) -> None:
        """
        Args:
            incarnation: number of this machine, as in `Join`.
            departure: tells when it must leave; told before Faust took the signals over, it counts as well.
        """
        self.exit_code = 0
        self.departure = departure or Departure()
        self._heartbeat = heartbeat or Heartbeat(f"worker-{welcome.worker}")
        self._config = config
        self._worker = welcome.worker
        self._origin = welcome.origin
        self._task = task
        self._computer = computer
        self._guard = Guard(config, task, computer)
        self._blobs = blobs
        self._channel = link
        self._core = WorkerCore(
            welcome,
            max_pending=config.worker.max_pending_batches,
            now=time.monotonic(),
            market=os.environ.get("DOLL_MARKET", ""),
            incarnation=incarnation,
        )
        self._batcher: Batcher[Any] = Batcher(
            origin=welcome.origin, records_per_batch=config.data.records_per_batch, next_batch=welcome.next_batch
        )
        self._compute_queue: asyncio.Queue[Compute] = asyncio.Queue()
        self._raw_batches: deque[RawBatch[Any]] = deque()  # read and not decoded yet
        self._raw_batches_ready = asyncio.Event()
        self._room = asyncio.Event()
        self._unacknowledged: deque[tuple[int, list[Any]]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._samples_topic = config.topic("samples")
        self._commands_topic = config.topic("commands")
        self._next_command_offset = commands_offset
        self._progress_s = time.monotonic()
        self._exiting = False
        self._commands_queue: asyncio.Queue[list[tuple[int, bytes | None]]] = asyncio.Queue()
        self.app = self._make_app(services, folder)
        self.faust_worker: _FaustWorker | None = None

    def _make_app(self, services: Services, folder: Path) -> DollApp:
        config, n = self._config, self._worker
        folder.mkdir(parents=True, exist_ok=True)
        app = DollApp(
            f"doll-{config.job}-w{n}",
            broker=[f"doll://{address}" for address in services.kafka.split(",")],
            broker_credentials=_credentials(config),
            broker_commit_interval=1.0,
            topic_allow_declare=False,
            topic_disable_leader=True,
            web_enabled=False,
            value_serializer="raw",
            key_serializer="raw",
            table_standby_replicas=0,
            stream_wait_empty=False,
            stream_buffer_maxsize=_buffer_records(config),
            consumer_max_fetch_size=max(1 << 20, config.data.max_record_bytes),
            agent_supervisor="mode.CrashingSupervisor",
            autodiscover=False,
            datadir=str(folder),
            store="memory://",
        )
        app.fixed_partitions = {self._samples_topic: [n]}
        first = self._batcher.next_offset
        app.start_offsets = {TP(self._samples_topic, n): first}
        app.fetch_progress = {TP(self._samples_topic, n): (first, first)}
        app.fetch_max_wait_ms = config.worker.fetch_max_wait_ms
        app.on_out_of_range = self._out_of_range
        samples = app.topic(self._samples_topic, value_type=bytes, value_serializer="raw")
        app.agent(samples, name="samples")(self._read_samples)
        app.task(self._read_commands)
        app.task(self._prepare)
        app.task(self._compute)
        app.task(self._tick)
        app.task(self._watch)
        return app

    # --- Algorithm 1 ------------------------------------------------------------------------------------------------

    async def _read_samples(self, stream: Any) -> None:
        """Cut the stream into batches, and never wait: what waits in `_raw_batches` is a batch, what waits in Faust's own
        queue is one event a record."""
        samples = TP(self._samples_topic, self._worker)
        batcher, cut = self._batcher, self._raw_batches
        high = _max_raw_batches(self._config)
        async for event in stream.noack().events():
            message = event.message
            self._progress_s = time.monotonic()
            self._queue_raw_batches(batcher.feed(message.offset, message))
            if len(cut) >= high:
                # Not pause_partitions: that silently drops what is fetched already and not delivered.
                self.app.consumer.on_buffer_full(samples)

    def _queue_raw_batches(self, batches: Iterable[RawBatch[Any]]) -> None:
        for raw in batches:
            self._raw_batches.append(raw)
            self._raw_batches_ready.set()

    def _skip_recordless_offsets(self) -> None:
        """Where all records that were handed out are fed, what lies between them and the next fetch holds none."""
        handed, position = self.app.fetch_progress[TP(self._samples_topic, self._worker)]
        if self._batcher.next_offset == handed < position:
            self._queue_raw_batches(self._batcher.skip_to(position))

    async def _out_of_range(self, tp: TP, offset: int) -> int | None:
        """The log does not hold the next record to be read: the offset to go on from, or None where this ends."""
        loop = asyncio.get_running_loop()
        try:
            low, high = await loop.run_in_executor(None, self._channel.watermarks, self._samples_topic, self._worker)
        except ServiceUnavailableError:
            return offset  # Kafka is away; its client has said so
        if offset > high:
            # The leader has no such offset. One that merely does not know yet that it is committed gives no error.
            self.exit(ConfigError.exit_code, truncated_message(self._samples_topic, self._worker, offset, high))
            return None
        if offset >= low or await self._has_newer_start(offset):
            return offset
        reason = lost_records(self._samples_topic, self._worker, offset, low)
        if self._config.data.on_data_loss == "stop":
            self._channel.lost(offset, low)
            self.exit(DataLossError.exit_code, reason)
            return None
        log.error("records_lost", reason=reason, action="going on without them (data.on_data_loss: skip)")
        self._batcher.mark_lost(offset, low)
        return low

    async def _has_newer_start(self, offset: int) -> bool:
        """Whether the durable model holds more by now than when this process was welcomed, so that it can start behind
        `offset`: what its predecessor had sent may have been applied since. Then this process ends, to start there.

        The server is asked, and gets time to answer: whoever deletes what is durable deletes nothing that is needed.
        """
        self._do([Send(self._core.join())])
        records_per_batch = self._config.data.records_per_batch
        deadline_s = time.monotonic() + _NEWER_START_TIMEOUT_S
        while not self._exiting and time.monotonic() < deadline_s:
            if self._origin + self._core.reported_durable * records_per_batch > offset:
                self.exit(1, f"the durable model holds offset {offset} by now: reading again from where it ends")
            await asyncio.sleep(_TICK_S)
        return self._exiting

    async def _prepare(self) -> None:
        """Decode and announce batches while there is room; read on when few are left."""
        loop = asyncio.get_running_loop()
        samples = TP(self._samples_topic, self._worker)
        core, cut, high = self._core, self._raw_batches, _max_raw_batches(self._config)
        while True:
            while not cut:
                self._raw_batches_ready.clear()
                await self._raw_batches_ready.wait()
            while not core.has_room or core.draining:
                self._room.clear()
                await self._room.wait()
            raw = cut.popleft()
            if len(cut) <= high // 2:
                self.app.consumer.on_buffer_drop(samples)
            records = [(offset, item.value) for offset, item in raw.records]
            try:
                decoded = await loop.run_in_executor(self._executor, self._decode, records)
            except ServiceUnavailableError as exc:  # Kafka does not take a dead letter
                self._do([Exit(1, str(exc))])
                return
            messages = [item for _, item in raw.records]
            for item in messages:
                item.value = None  # decoded: the bytes need not wait for the checkpoint
            self._unacknowledged.append((raw.number, messages))
            core.next_offset = raw.hi
            self._do(core.batch_ready(_batch(raw, decoded)))
            self._progress_s = time.monotonic()

    def _decode(self, records: Sequence[tuple[int, bytes | None]]) -> Decoded:
        data = self._config.data
        decoded = decode_records(
            self._task, records, samples_per_record=data.samples_per_record, max_record_bytes=data.max_record_bytes
        )
        if decoded.refused:
            values = {offset: value or b"" for offset, value in records}
            self._send_dead_letters(decoded.refused, values)
            fault_point("worker.after_dead_letter")
        return decoded

    def _send_dead_letters(self, refused: Sequence[Refused], values: Mapping[int, bytes]) -> None:
        """Tell why these records are refused; `values` are what the log holds of them."""
        letters = [
            DeadLetter(
                worker=self._worker, partition=self._worker, offset=item.offset, reason=item.reason,
                payload=values.get(item.offset, b"")[:_DEAD_LETTER_BYTES],
                payload_bytes=len(values.get(item.offset, b"")), samples=item.samples, whole=item.whole,
                time_s=time.time(), term=self._core.term,
            )
            for item in refused
        ]  # fmt: skip
        first = refused[0]
        log.warning("dead_lettered", records=len(letters), first_offset=first.offset, first_reason=first.reason)
        self._channel.send_dead_letters(letters)

    # --- Algorithm 2 ------------------------------------------------------------------------------------------------

    async def _read_commands(self) -> None:
        loop = asyncio.get_running_loop()

        def deliver(mail: list[tuple[int, bytes | None]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._commands_queue.put_nowait, mail)

        # Through a queue, and not in a callback: what goes wrong here must end this process.
        self._channel.read_commands(deliver)
        while True:
            for offset, value in await self._commands_queue.get():
                self._next_command_offset = offset + 1
                try:
                    record = decode(value)
                except RecordError as exc:
                    log.warning("record_refused", topic="commands", reason=str(exc))
                    continue
                self._do(self._core.on_record(record, time.monotonic()))

    async def _compute(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            item = await self._compute_queue.get()
            if not self._core.is_current(item.grant):
                continue
            granted_at_s = time.monotonic()
            try:
                done = await loop.run_in_executor(self._executor, self._gradient, item.grant, item.batch)
            except ServiceUnavailableError as exc:
                self._do([Exit(1, str(exc))])
                return
            except TaskError as exc:
                self._do([Exit(exc.exit_code, f"batch {item.batch.number}: {exc}")])
                return
            except Exception as exc:  # a bug, or this machine's memory or disk
                log.error("task_failed", batch=item.batch.number, error=f"{type(exc).__name__}: {exc}", exc_info=True)
                self._do([Exit(1, f"{self._config.task.cls} failed on batch {item.batch.number}: {exc}")])
                return
            if done is None:
                self._do(self._core.weights_missing(item.grant))
            else:
                self._do(self._core.gradient_done(item.grant, item.batch, done, granted_at_s))

    def _gradient(self, grant: Grant, batch: Batch) -> GradientDone | None:
        """Runs in the torch thread. None: the weights are not in the blob store."""
        if batch.num_samples == 0:
            return GradientDone("", 0.0, {}, 0.0, 0.0, 0.0, 0, batch.dead, batch.dead_samples)
        computer, job = self._computer, self._config.job
        started = time.perf_counter()
        if computer.loaded != grant.key:
            data = self._blobs.get(grant.key)
            if data is None:
                return None
            try:
                weights = decode_blob(data, job=job, kind="w", version=grant.version, numel=computer.weights.size)
            except BlobError as exc:
                log.warning("weights_refused", key=grant.key, reason=str(exc))
                return None
            computer.load(grant.key, weights)
        fetched = time.perf_counter()
        gradient, bad = self._guard.compute(batch.data.x, batch.data.y)
        counts = (
            self._dead_letter_bad_samples(batch, bad) if bad else (batch.num_samples, batch.dead, batch.dead_samples)
        )
        computed = time.perf_counter()
        if gradient is None:
            return GradientDone("", 0.0, {}, computed - fetched, fetched - started, 0.0, *counts)
        key = gradient_key(job, grant.term, grant.grant)
        parts = encode_blob(gradient.values, job=job, kind="g", version=grant.version)
        self._blobs.put(key, parts, self._config.blobs.ttl_s)
        stored = time.perf_counter()
        fault_point("worker.after_blob")
        return GradientDone(
            key, gradient.loss_sum, gradient.metric_sums, computed - fetched, fetched - started, stored - computed,
            *counts,
        )  # fmt: skip

    def _dead_letter_bad_samples(self, batch: Batch, bad: Mapping[int, str]) -> tuple[int, tuple[int, ...], int]:
        """Dead-letter the samples that the guard refuses.

        Returns:
            How many samples are left, the batch's dead offsets, and the samples refused in records that are not dead.
        """
        refused = refuse(batch.data, bad)
        offsets = [item.offset for item in refused]
        self._send_dead_letters(refused, self._channel.read_values(self._samples_topic, self._worker, offsets))
        fault_point("worker.after_guard")
        partly = {item.offset: item.samples for item in batch.data.refused if not item.whole}
        for item in refused:
            partly[item.offset] = 0 if item.whole else partly.get(item.offset, 0) + item.samples
        dead = {*batch.dead, *(item.offset for item in refused if item.whole)}
        return batch.num_samples - len(bad), tuple(sorted(dead)), sum(partly.values())

    # --- actions and time -------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[WorkerAction]) -> None:
        for action in actions:
            match action:
                case Send(record):
                    self._channel.send(record)
                    if isinstance(record, Announce):
                        fault_point("worker.after_announce", self._flush_channel)
                    elif isinstance(record, Push):
                        fault_point("worker.after_push", self._flush_channel)
                case Compute():
                    self._compute_queue.put_nowait(action)
                case Acknowledge(until):
                    fault_point("worker.after_durable")
                    self._acknowledge(until)
                case Exit(code, reason):
                    self.exit(code, reason)

    def _flush_channel(self) -> None:
        self._channel.flush(10.0)

    def _acknowledge(self, until: int) -> None:
        consumer = self.app.consumer
        while self._unacknowledged and self._unacknowledged[0][0] < until:
            for message in self._unacknowledged.popleft()[1]:
                message.ack(consumer)
        self._room.set()

    async def _tick(self) -> None:
        self._heartbeat.expect("loop")
        self._heartbeat.expect("kafka", vital=False)
        self._heartbeat.set_waiting_for("")
        while True:
            await asyncio.sleep(_TICK_S)
            self._heartbeat.beat("loop")
            self._channel.poll()
            self._skip_recordless_offsets()
            if self.departure() and self.faust_worker is not None:
                self.faust_worker.leave()
            self._do(self._core.tick(time.monotonic()))

    async def _watch(self) -> None:
        """Lag, and the watchdog: records are there and none comes, so this process is of no use (reference 1.1)."""
        loop, stall_timeout_s = asyncio.get_running_loop(), self._config.worker.stall_timeout_s
        commands_read_until, commands_progress_s = self._next_command_offset, time.monotonic()
        empty_until = 0  # the log holds no record from the next one up to here
        while True:
            await asyncio.sleep(_WATERMARKS_EVERY_S)
            try:
                _, high = await loop.run_in_executor(None, self._channel.watermarks, self._samples_topic, self._worker)
                _, commands_high = await loop.run_in_executor(
                    None, self._channel.watermarks, self._commands_topic, self._worker
                )
            except ServiceUnavailableError:
                self._progress_s = commands_progress_s = time.monotonic()  # Kafka is away; its client has said so
                continue
            now = time.monotonic()
            self._heartbeat.beat("kafka")
            next_offset = self._batcher.next_offset
            unread = max(0, high - max(next_offset, empty_until))
            self._core.lag = unread + len(self._raw_batches) * self._config.data.records_per_batch
            if self._next_command_offset != commands_read_until or commands_high <= self._next_command_offset:
                commands_read_until, commands_progress_s = self._next_command_offset, now
            waiting = not self._core.has_room or self._core.draining
            if not unread or waiting:
                self._progress_s = now
            if now - self._progress_s > stall_timeout_s:
                look = (self._samples_topic, self._worker, next_offset, high)
                with contextlib.suppress(ServiceUnavailableError):
                    if not await loop.run_in_executor(None, self._channel.holds_record, *look):
                        self._progress_s, empty_until = now, high
            stalled_s = now - min(self._progress_s, commands_progress_s)
            if stalled_s > stall_timeout_s:
                self.exit(
                    1,
                    f"records are there and none has come for {stalled_s:.0f} s (worker.stall_timeout_s): starting again",
                )

    # --- the end ----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Announce nothing more, finish the gradient under way or hand its batch back, say goodbye."""
        departure = self.departure
        self._core.drain()
        self._heartbeat.set_waiting_for("its end (draining)")
        log.info("draining", cause=departure.cause, owes_gradient=self._core.busy)
        # An earlier time may be told meanwhile.
        while self._core.busy and departure.left_s() > _FAUST_STOP_S:
            await asyncio.sleep(0.02)
        self._do(list(self._core.leave(departure.cause)))
        self._channel.flush(min(1.0, max(0.0, departure.left_s())))

    def exit(self, code: int, reason: str) -> None:
        """End this process soon, in order if Faust lets us, in any case."""
        if self._exiting:
            return
        self._exiting = True
        self.exit_code = code
        (log.error if code else log.info)("exiting", code=code, reason=reason)
        self._channel.flush(1.0)
        end_within(self._config.worker.drain_s, code)
        if self.faust_worker is not None:
            self.faust_worker.shut_down()


class _FaustWorker(faust.Worker):  # type: ignore[misc]
    """Drains before it stops."""

    shell: WorkerShell
    _leaving: asyncio.Future[None] | None = None

    def _on_sigterm(self) -> None:
        self.shell.departure.leave_within(self.shell._config.worker.drain_s, "sigterm")
        self.leave()

    _on_sigint = _on_sigterm

    def leave(self) -> None:
        """Drain and stop; it may be repeated."""
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._drain_and_stop(), loop=self.loop)

    async def _drain_and_stop(self) -> None:
        await self.shell.drain()
        super()._on_sigterm()

    def shut_down(self) -> None:
        super()._on_sigterm()


def run_shell(shell: WorkerShell) -> int:
    """Run the Faust app until the worker's end; its exit code."""
    loop = _new_loop()
    asyncio.set_event_loop(loop)
    worker = _FaustWorker(
        shell.app, loop=loop, quiet=True, loglevel="WARN", override_logging=False, redirect_stdouts=False, daemon=True
    )
    worker.shell = shell
    shell.faust_worker = worker
    try:
        worker.execute_from_commandline()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
        return shell.exit_code or code
    return shell.exit_code


def _batch(raw: RawBatch[Any], decoded: Decoded) -> Batch:
    return Batch(
        number=raw.number, data=decoded, num_samples=decoded.num_samples, complete_at_s=time.monotonic(),
        dead=tuple(item.offset for item in decoded.refused if item.whole), gaps=tuple(raw.gaps), lost=tuple(raw.lost),
        dead_samples=sum(item.samples for item in decoded.refused if not item.whole),
    )  # fmt: skip


def _buffer_records(config: JobConfig) -> int:
    return config.worker.stream_buffer_records or max(64, 4096 // config.data.samples_per_record)


def _max_raw_batches(config: JobConfig) -> int:
    """Batches that may wait to be decoded before reading stops."""
    return max(2, _buffer_records(config) // config.data.records_per_batch)


def _credentials(config: JobConfig) -> Any:
    import ssl

    ca = os.environ.get("DOLL_KAFKA_CA")
    context = ssl.create_default_context(cafile=ca) if config.kafka.security.endswith("ssl") else None
    credentials = kafka_credentials(config)
    if credentials is not None:
        username, password = credentials
        return faust.SASLCredentials(
            username=username, password=password, ssl_context=context, mechanism="SCRAM-SHA-512"
        )
    return None if context is None else faust.SSLCredentials(context)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()  # type: ignore[no-any-return]
