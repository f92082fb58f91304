"""The Faust app of a worker: it reads the worker's partitions of `samples` in chunks of records, and runs the main
loop.

The app's agent passes the reader's deliveries to the worker's `SampleIntake`, which runs in the same event loop.
`CrashingSupervisor` ends the process on any unexpected error, because an agent that is restarted inside the process has
lost its position (ADR 0002).

The app has its own transport. It reads the partitions that the parameter server names, and does not use a consumer
group: a group would stop all workers whenever a worker joins or leaves (ADR 0002). The partitions change while the app
runs. Faust therefore knows only one partition, `_LANE`, and each delivery on it names its own partition.

`doll.kafka.chunk_reader` reads the records. One Faust event contains all deliveries that are available (ADR 0027).
Faust itself sends nothing and commits nothing: the intake tells the reader which offset is durable. If the log no
longer contains the position, the position is never reset silently. All records below the position were delivered
before, so the intake knows exactly which offsets it will not get.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import faust
from faust.tables import TableManager
from faust.transport import base
from faust.types import TP, ConsumerMessage

from doll.config import JobConfig
from doll.consumers.runtime import WorkerRuntime
from doll.kafka.chunk_reader import Delivery
from doll.process.signals import note
from doll.services import Services

_WAITING_EVENTS: Final = 2  # number of events between Faust's consumer and its agent
_EVENT_DELIVERIES: Final = 64  # maximum number of deliveries in one event
_LANE: Final = 0  # the only partition that Faust knows: everything is delivered on it


class ChunkConsumer(base.Consumer):  # type: ignore[misc]
    """Faust's consumer. It assigns the partitions, and passes the reader's deliveries to the conductor."""

    _generation = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._assigned: set[TP] = set()
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self._is_reading = False

    # --- life cycle -------------------------------------------------------------------------------------------------

    async def subscribe(self, topics: Iterable[str]) -> None:
        partitions = self.app.partitions if self.app.samples_topic in topics else set()
        if self._generation and partitions == self._assigned:
            return
        self.app.on_rebalance_start()
        self._assigned = partitions
        self._generation += 1
        self.app.consumer_generation_id = self._generation
        # Not awaited: on_partitions_assigned waits until this subscribe() has returned.
        self._assigning = asyncio.ensure_future(self.on_partitions_assigned(partitions, self._generation))

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Start reading at the position that the reader chooses: the server's durable watermark is authoritative.

        Kafka's committed offset may be older, or it may have expired.
        """
        if not self._is_reading:
            self._is_reading = True
            loop = asyncio.get_running_loop()

            def deliver(delivery: Delivery) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._deliveries.put_nowait, delivery)

            self.app.runtime.intake.reader.start(deliver)
        return dict.fromkeys(self.app.partitions, 0)

    async def on_stop(self) -> None:
        await super().on_stop()
        await asyncio.get_running_loop().run_in_executor(None, self.app.runtime.intake.reader.close)

    # --- records ----------------------------------------------------------------------------------------------------

    async def _drain_messages(self, fetcher: Any) -> None:
        """Pass on the deliveries until the app stops. Faust's fetcher runs this method."""
        try:
            while not (self.should_stop or fetcher.should_stop):
                deliveries = await self._take()
                message = self._to_message(TP(self.app.samples_topic, _LANE), deliveries)
                await self.wait_first(self.callback(message), self.suspend_flow.wait())
                for _ in deliveries:
                    self.app.runtime.intake.reader.taken()
        except asyncio.CancelledError:
            if not self.app.should_stop:
                raise

    async def _take(self) -> list[Delivery]:
        """Remove and return the next deliveries. If the last one is the error that has ended the reader, raise it."""
        deliveries = [await self._deliveries.get()]
        while len(deliveries) < _EVENT_DELIVERIES and not self._deliveries.empty():
            deliveries.append(self._deliveries.get_nowait())
        if isinstance(deliveries[-1], Exception):
            raise deliveries[-1]
        return deliveries

    def _to_message(self, tp: TP, deliveries: list[Delivery]) -> ConsumerMessage:
        return ConsumerMessage(
            tp.topic, tp.partition, 0, 0.0, 0, None, None, deliveries, None, 0, 0, tp, generation_id=self._generation
        )

    # --- Faust's interface: implemented differently here, or not at all ---------------------------------------------

    async def commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:
        """Do nothing: the reader commits the offsets that the app reports as durable."""
        return False

    def on_buffer_full(self, tp: TP) -> None:
        """Do nothing: the reader is at most a few chunks ahead."""

    def on_buffer_drop(self, tp: TP) -> None:
        """See `on_buffer_full`."""

    def assignment(self) -> set[TP]:
        return self._assigned

    def highwater(self, tp: TP) -> int:
        return 0

    async def position(self, tp: TP) -> int | None:
        return 0

    def topic_partitions(self, topic: str) -> int | None:
        return None

    def _new_topicpartition(self, topic: str, partition: int) -> TP:
        return TP(topic, partition)

    def _unused(self, *_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError. Faust requires these methods for tables, `seek` and topics. No DOLL app uses them."""
        raise RuntimeError("the doll:// transport reads partitions in order: it has no tables and no seek")

    _commit = _getmany = _seek = seek_wait = create_topic = earliest_offsets = highwaters = key_partition = _unused


class Transport(base.Transport):  # type: ignore[misc]
    """The transport of a DOLL app, created by `DollApp`. Its URLs begin with `doll://`.

    The producer is Faust's base class: it starts as a service, but it cannot send.
    """

    Consumer = ChunkConsumer
    default_port = 9092
    driver_version = "doll"


class DollApp(faust.App):  # type: ignore[misc]
    """A Faust app whose transport is `Transport`."""

    samples_topic: str
    partitions: set[TP]  # Faust's assignment; the reader of `runtime` knows the real partitions
    runtime: WorkerRuntime

    def on_init_dependencies(self) -> Any:
        services = super().on_init_dependencies()
        self.sensors.remove(self.monitor)  # it needs 6 us of CPU per event, and nobody reads its values
        return services

    def _new_transport(self) -> Any:
        return Transport(self.conf.broker_consumer, self)

    def _new_producer_transport(self) -> Any:
        return Transport(self.conf.broker_producer, self)


class _NoTables(TableManager):  # type: ignore[misc]
    """A table manager that starts immediately. Faust's own table manager waits a second for the app to add tables, but
    this app has no tables."""

    async def on_start(self) -> None:
        if not self.should_stop:
            await self._update_channels()
            await self.recovery.start()


def run_faust(app: DollApp, runtime: WorkerRuntime, drain_s: float) -> int:
    """Run a worker's app until the worker ends, and return the exit code. After SIGTERM, the worker has `drain_s`
    seconds to leave the job."""
    app.runtime = runtime
    for task in runtime.tasks():
        app.task(task)
    worker = _FaustWorker(
        app, loop=app.loop, quiet=True, loglevel="WARN", override_logging=False, redirect_stdouts=False, daemon=True
    )
    worker.spinner = None  # it writes control sequences, even if the output is not a terminal
    worker.runtime, worker.drain_s = runtime, drain_s
    runtime.main_loop = worker
    try:
        worker.execute_from_commandline()
    except SystemExit as exc:
        return runtime.exit.code or (exc.code if isinstance(exc.code, int) else 1)
    return runtime.exit.code


def make_app(config: JobConfig, services: Services, worker: int, folder: Path) -> DollApp:
    """Return a worker's app with its own event loop. `folder` is the folder for Faust's own data.

    This function does most of the work of Faust's start, which takes time. Call it before the worker has partitions,
    because their records would have to wait.
    """
    loop = _new_loop()
    asyncio.set_event_loop(loop)
    folder.mkdir(parents=True, exist_ok=True)
    app = DollApp(
        f"doll-{config.job}-w{worker}",
        loop=loop,
        broker=[f"doll://{address}" for address in services.kafka.split(",")],
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        value_serializer="raw",
        key_serializer="raw",
        table_standby_replicas=0,
        stream_wait_empty=False,
        stream_buffer_maxsize=_WAITING_EVENTS,
        agent_supervisor="mode.CrashingSupervisor",
        autodiscover=False,
        datadir=str(folder),
        store="memory://",
        TableManager=_NoTables,
    )

    async def read_samples(stream: Any) -> None:
        async for event in stream.noack().events():
            for delivery in event.value:
                await app.runtime.intake.receive(delivery)

    app.samples_topic = config.topic("samples")
    app.partitions = {TP(app.samples_topic, _LANE)}
    app.agent(app.topic(app.samples_topic, value_serializer="raw"), name="samples")(read_samples)
    return app


class _FaustWorker(faust.Worker):  # type: ignore[misc]
    """A Faust worker that drains before it stops."""

    runtime: WorkerRuntime
    drain_s: float
    _leaving: asyncio.Future[None] | None = None

    def _on_sigterm(self) -> None:
        note(signal.SIGTERM)
        self.runtime.departure.leave_within(self.drain_s, "sigterm")
        self.leave()

    _on_sigint = _on_sigterm

    def leave(self) -> None:
        """Drain, then stop. This method may be called again."""
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._drain_and_stop(), loop=self.loop)

    async def _drain_and_stop(self) -> None:
        await self.runtime.drain()
        super()._on_sigterm()

    def shut_down(self) -> None:
        super()._on_sigterm()

    async def _sentinel_task(self) -> None:
        """Close the loop immediately instead of after a second, because all records are flushed already."""


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()  # type: ignore[no-any-return]
