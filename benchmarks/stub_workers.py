"""Many stub workers in one process, and the parameter server with a clock on its loop: roles of `benchmarks.fleets`.

A stub worker speaks the real protocol (`WorkerCore`) over its own real channel, fetches the weights of each version
that it computes at, and stores a gradient blob of the model's size. Only the stream and the gradient are simulated: a
batch is always there, and computing one is a pause.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from doll.config import JobConfig, load
from doll.consumers.channels.control_link import ControlLink
from doll.consumers.channels.kafka_channel import JobEndedError, WorkerChannel
from doll.consumers.protocol.grants import part_of
from doll.consumers.protocol.worker_core import (
    Acknowledge,
    Batch,
    Compute,
    ComputedBatch,
    Exit,
    GradientDone,
    Send,
    WorkerAction,
    WorkerCore,
)
from doll.consumers.runtime import TICK_S
from doll.records.control import AnyRecord, Grant, Nack, Push, Welcome, decode
from doll.services import BLOBS_ENV, Services
from doll.storage.blobs import Blobs, blob_info, encode_blob, gradient_key, scope_of
from doll.storage.stores import open_blobs

_SPREAD: Final = 0.1  # of the compute time: uniform, plus or minus
# Machines do not boot in the same second either: a broker that all of them ask at once answers few of them in time.
_JOINS_AT_ONCE: Final = 4
# Workers have machines of their own: their clients' thousands of threads must not take the server's turn.
_NICENESS: Final = 10
_POLL_S: Final = 0.01  # for the file that starts all processes at once
_CLOCK_S: Final = 0.5


class _Set(NamedTuple):
    """Batches of one grant that are being computed, simulated, and how many of them make the set."""

    grant: Grant
    batches: Sequence[Batch]
    count: int
    begun_s: float
    fetch_s: float
    compute_s: float  # of one batch


class StubWorker:
    """One worker. Everything but `join` runs on the process's event loop."""

    def __init__(self, config: JobConfig, services: Services, number: int, process: StubProcess) -> None:
        self.number = number
        self.joined_s = 0.0  # monotonic
        self.is_done = False
        self._config = config
        self._services = services
        self._process = process
        self._channel = WorkerChannel(config, services, number)
        self._link: ControlLink | None = None
        self._core: WorkerCore | None = None
        self._grants: deque[tuple[Grant, Sequence[Batch]]] = deque()
        self._computing: _Set | None = None
        self._weights_key = ""
        self._scope = config.job

    def join(self) -> None:
        """Wait for the Welcome, then pass commands to the loop. Blocks; runs in a thread of its own."""
        name = f"stub-{os.getpid()}-{self.number}"
        try:
            with self._process.joining:
                joined = self._channel.join(name, lambda: False, after_term=self._process.after_term)
        except JobEndedError:
            os._exit(1)  # a benchmark without this worker would measure another fleet
        assert joined is not None
        self.joined_s = time.monotonic()
        call = self._process.loop.call_soon_threadsafe
        call(self._begin, joined[0])
        self._channel.read_commands(lambda commands: call(self._receive, [decode(value) for _, value in commands]))

    def _begin(self, welcome: Welcome) -> None:
        self._scope = scope_of(self._config.job, welcome.run_id)
        self._core = WorkerCore(welcome, max_pending=self._config.worker.max_pending_batches, now=time.monotonic())
        if self._config.control.kind != "kafka":
            self._link = link = ControlLink(self._services, self._config.control.kind)
            self._process.keep(link.run(self._receive, self._resend))
            link.welcome(welcome)
        self._fill()

    def _resend(self) -> None:
        assert self._core is not None
        self._do(self._core.resend())

    def _receive(self, records: Sequence[AnyRecord]) -> None:
        assert self._core is not None
        for record in records:
            self._do(self._core.on_record(record, time.monotonic()))
            if self._link is not None and isinstance(record, Welcome) and record.process == self._core.process:
                self._link.welcome(record)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._core is not None and not self.is_done:
            self._channel.poll()
            self._do(self._core.tick(now))

    def _fill(self) -> None:
        """The stream never runs dry: the worker always holds as many batches as it may."""
        assert self._core is not None
        core = self._core
        while core.has_room:
            batch = Batch(
                core.served[core.worker].next_batch, None, self._config.data.batch_size, time.monotonic(),
                partition=core.worker,
            )  # fmt: skip
            core.next_offset = (batch.number + 1) * self._config.data.records_per_batch
            self._do(core.batch_ready(batch))

    def _do(self, actions: Sequence[WorkerAction]) -> None:
        for action in actions:
            match action:
                case Send(record):
                    if not (self._link is not None and isinstance(record, Push | Nack) and self._link.send(record)):
                        self._channel.send(record)
                case Compute(grant, batches):
                    self._grants.append((grant, batches))
                    self._start_next()
                case Acknowledge():
                    self._fill()
                case Exit():
                    self.is_done = True

    def _start_next(self) -> None:
        """Begin the next grant that still stands, if none is being computed."""
        core = self._core
        assert core is not None
        while self._grants and self._computing is None:
            grant, batches = self._grants.popleft()
            if not batches or not core.is_current(grant):
                continue
            begun_s = time.monotonic()
            if grant.key != self._weights_key:
                weights = self._process.blobs.get(grant.key)
                if weights is None:
                    self._do(core.weights_missing(grant))
                    continue
                self._weights_key = grant.key
                self._process.num_values = blob_info(weights).numel
            fetched_s = time.monotonic()
            compute_s = self._process.compute_s * random.uniform(1.0 - _SPREAD, 1.0 + _SPREAD)
            # As `GrantHandler`: no batch is begun once the set has taken as long as a set may take.
            count = min(len(batches), 1 + int(self._config.worker.set_limit_s / compute_s))
            self._computing = _Set(grant, batches, count, begun_s, fetched_s - begun_s, compute_s)
            self._process.loop.call_later(count * compute_s, self.finish)

    def finish(self) -> None:
        """The pause is over: store the sum of the set and push it; what is left of the grant is another set."""
        assert self._core is not None
        assert self._computing is not None
        (grant, batches, count, begun_s, fetch_s, compute_s), self._computing = self._computing, None
        if self._core.is_current(grant) and not self.is_done:
            stored_s = time.monotonic()
            key = gradient_key(self._scope, grant.term, grant.grant_ids[0])
            self._process.store_gradient(key, grant.version, self._scope)
            computed = tuple(
                ComputedBatch(batch.num_samples, 0.5 * batch.num_samples, {"accuracy": 0.5}, compute_s=compute_s)
                for batch in batches[:count]
            )
            done = GradientDone(key, grant.version, computed, fetch_s, time.monotonic() - stored_s)
            self._do(self._core.gradient_done(grant, batches, done, begun_s))
        rest = part_of(grant, count)
        self._grants.appendleft((rest, batches[count:]))
        self._start_next()


class StubProcess:
    """One process: its workers, one blob store, one event loop."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, config: JobConfig, services: Services, compute_s: float, after_term: int) -> None:
        self.compute_s = compute_s
        self.after_term = after_term
        self.num_values = 0
        self.joining = threading.Semaphore(_JOINS_AT_ONCE)
        self.blobs: Blobs = open_blobs(config, services, give_up=lambda: False)
        self.workers: list[StubWorker] = []
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        self._gradient: npt.NDArray[np.float32] = np.zeros(0, np.float32)

    def keep(self, task: Coroutine[Any, Any, None]) -> None:
        """Run `task` until the end."""
        self._tasks.append(self.loop.create_task(task))

    def store_gradient(self, key: str, version: int, scope: str) -> None:
        """A gradient of the model's size, whatever is in it."""
        if self._gradient.size != self.num_values:
            self._gradient = np.full(self.num_values, 1e-6, np.float32)
        blob = encode_blob(self._gradient, job=scope, kind="g", version=version)
        self.blobs.put(key, blob, self._config.blobs.ttl_s)

    async def run(self) -> None:
        """Join with every worker, and work until each has been told to stop."""
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(_end_process)
        for worker in self.workers:
            threading.Thread(target=worker.join, name=f"join-{worker.number}", daemon=True).start()
        while not all(worker.is_done for worker in self.workers):
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for worker in self.workers:
                worker.tick(now)
            if failed := [task for task in self._tasks if task.done()]:
                failed[0].result()


def _end_process(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What fails in a callback of the loop ends this process: without it another fleet would be measured."""
    loop.default_exception_handler(context)
    os._exit(1)


def stub_workers(
    job_path: str, kafka: str, redis: str, run_folder: str, first: int, until: int, compute_s: float, after_term: int
) -> None:
    """Workers [first, until): connect, wait for the file `go` in the run folder, join a few at a time, work until
    Stop.

    Writes `joined-<first>.json`: the monotonic time at which each worker had its Welcome.
    """
    os.nice(_NICENESS)
    config, folder = load(Path(job_path)), Path(run_folder)
    services = Services(kafka, redis, os.environ.get(BLOBS_ENV, ""))
    process = StubProcess(config, services, compute_s, after_term)
    process.workers = [StubWorker(config, services, number, process) for number in range(first, until)]
    (folder / f"ready-{first}").touch()
    while not (folder / "go").exists():
        time.sleep(_POLL_S)
    threading.Thread(target=_report_joined, args=(process, folder / f"joined-{first}.json"), daemon=True).start()
    asyncio.run(process.run())


def _report_joined(process: StubProcess, path: Path) -> None:
    while not all(worker.joined_s for worker in process.workers):
        time.sleep(_POLL_S)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps([worker.joined_s for worker in process.workers]), encoding="utf-8")
    partial.rename(path)


def clocked_ps(job_path: str, kafka: str, redis: str, run_folder: str, clock_path: str, profile_path: str) -> Any:
    """The role of the parameter server; its loop's processor time goes to `clock_path`, its profile to `profile_path`.

    `clock_path`: a line each half second: monotonic seconds, processor seconds of the main thread, of the process.
    `profile_path`: what cProfile saw of the main thread, for `pstats`; "": no profile.
    """
    from doll.run.local.roles import ps_role

    threading.Thread(target=_write_clock, args=(Path(clock_path),), name="clock", daemon=True).start()
    if not profile_path:
        return ps_role(job_path, kafka, redis, run_folder)
    profile = cProfile.Profile()
    try:
        return profile.runcall(ps_role, job_path, kafka, redis, run_folder)
    finally:
        profile.dump_stats(profile_path)


def _write_clock(path: Path) -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    clock = time.pthread_getcpuclockid(main_thread)
    with path.open("a", encoding="utf-8") as file:
        while True:
            file.write(f"{time.monotonic():.3f} {time.clock_gettime(clock):.4f} {time.process_time():.4f}\n")
            file.flush()
            time.sleep(_CLOCK_S)
