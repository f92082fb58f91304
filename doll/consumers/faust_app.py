"""Faust's part of a worker: it reads partition n of `samples`, in chunks of records, and owns the main loop.

The app's agent feeds `WorkerRuntime`, whose tasks run beside it. `CrashingSupervisor` ends the process on any
unexpected error: an agent that is restarted in place has lost its position (ADR 0002).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

import faust
from faust.tables import TableManager
from faust.types import TP

from doll.config import JobConfig
from doll.consumers.intake.batch_buffer import stream_buffer_records
from doll.consumers.intake.transport import OutOfRangeHandler, TruncatedHandler
from doll.consumers.runtime import WorkerRuntime
from doll.kafka.chunk_reader import NOTHING_LEARNED, ChunkReader, Learned
from doll.kafka.reader import Partition
from doll.services import Services

_WAITING_CHUNKS: Final = 2  # between Faust's consumer and its agent


class DollApp(faust.App):  # type: ignore[misc]
    """A Faust app on the `doll://` transport."""

    reader: ChunkReader
    partition: TP
    on_out_of_range: OutOfRangeHandler
    on_truncated: TruncatedHandler
    fetch_progress: tuple[int, int]

    def on_init_dependencies(self) -> Any:
        services = super().on_init_dependencies()
        self.sensors.remove(self.monitor)  # 6 us of CPU per event, for figures that nobody reads
        return services


class _NoTables(TableManager):  # type: ignore[misc]
    """Starts at once: Faust waits a second for an app to add its tables, and this one has none."""

    async def on_start(self) -> None:
        if not self.should_stop:
            await self._update_channels()
            await self.recovery.start()


class FaustStream:
    """`SampleStream` of one worker: partition n of `samples` through a Faust app."""

    def __init__(
        self, config: JobConfig, services: Services, runtime: WorkerRuntime, folder: Path,
        learned: Learned = NOTHING_LEARNED,
    ) -> None:  # fmt: skip
        """
        Args:
            folder: Faust's own data folder.
            learned: what is in the model of this partition.
        """
        self._config = config
        self._runtime = runtime
        self._tp = TP(config.topic("samples"), runtime.worker)
        self._faust_worker: _FaustWorker | None = None
        self._app = self._make_app(services, folder, learned)
        runtime.stream = self

    def run(self) -> int:
        """Run the app until the worker's end; its exit code."""
        loop = _new_loop()
        asyncio.set_event_loop(loop)
        worker = _FaustWorker(
            self._app, loop=loop, quiet=True, loglevel="WARN", override_logging=False, redirect_stdouts=False,
            daemon=True,
        )  # fmt: skip
        worker.spinner = None  # it writes control sequences, also to what is no terminal
        worker.runtime, worker.drain_s = self._runtime, self._config.worker.drain_s
        self._faust_worker = worker
        try:
            worker.execute_from_commandline()
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
            return self._runtime.exit.code or code
        return self._runtime.exit.code

    def pause(self) -> None:
        self._app.reader.pause()

    def resume(self) -> None:
        self._app.reader.resume()

    def acknowledge(self, until: int) -> None:
        self._app.reader.commit(until)

    def fetch_progress(self) -> tuple[int, int]:
        return self._app.fetch_progress

    def fetched_log_end(self) -> int:
        return int(self._app.reader.log_end)

    def leave(self) -> None:
        if self._faust_worker is not None:
            self._faust_worker.leave()

    def shut_down(self) -> None:
        if self._faust_worker is not None:
            self._faust_worker.shut_down()

    def _make_app(self, services: Services, folder: Path, learned: Learned) -> DollApp:
        config, runtime = self._config, self._runtime
        folder.mkdir(parents=True, exist_ok=True)
        name = f"doll-{config.job}-w{runtime.worker}"
        app = DollApp(
            name,
            broker=[f"doll://{address}" for address in services.kafka.split(",")],
            topic_allow_declare=False,
            topic_disable_leader=True,
            web_enabled=False,
            value_serializer="raw",
            key_serializer="raw",
            table_standby_replicas=0,
            stream_wait_empty=False,
            stream_buffer_maxsize=_WAITING_CHUNKS,
            agent_supervisor="mode.CrashingSupervisor",
            autodiscover=False,
            datadir=str(folder),
            store="memory://",
            TableManager=_NoTables,
        )
        first = runtime.buffer.batcher.next_offset
        app.partition = self._tp
        app.reader = ChunkReader(
            config, services, Partition(*self._tp), group=name, start=first,
            fetch_max_wait_ms=config.worker.fetch_max_wait_ms,
            max_chunk_records=max(1, stream_buffer_records(config) // 2), learned=learned,
        )  # fmt: skip
        app.fetch_progress = (first, first)
        app.on_out_of_range = self._on_out_of_range
        app.on_truncated = runtime.deleted_records.refuse_truncated
        samples = app.topic(self._tp.topic, value_serializer="raw")
        app.agent(samples, name="samples")(self._read_samples)
        for task in runtime.tasks():
            app.task(task)
        return app

    async def _read_samples(self, stream: Any) -> None:
        feed, watch = self._runtime.buffer.feed, self._runtime.stall_watch
        async for event in stream.noack().events():
            chunk = event.value
            watch.samples_at_s = time.monotonic()
            if feed(chunk.offsets, chunk.values, chunk.leader_epoch):
                self.pause()

    async def _on_out_of_range(self, tp: TP, offset: int) -> int | None:
        return await self._runtime.deleted_records.resume_offset(offset)


class _FaustWorker(faust.Worker):  # type: ignore[misc]
    """Drains before it stops."""

    runtime: WorkerRuntime
    drain_s: float
    _leaving: asyncio.Future[None] | None = None

    def _on_sigterm(self) -> None:
        self.runtime.departure.leave_within(self.drain_s, "sigterm")
        self.leave()

    _on_sigint = _on_sigterm

    def leave(self) -> None:
        """Drain and stop; it may be repeated."""
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._drain_and_stop(), loop=self.loop)

    async def _drain_and_stop(self) -> None:
        await self.runtime.drain()
        super()._on_sigterm()

    def shut_down(self) -> None:
        super()._on_sigterm()

    async def _sentinel_task(self) -> None:
        """The loop closes at once: all that this process sends has been flushed before, and Faust waits a second."""


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()  # type: ignore[no-any-return]
