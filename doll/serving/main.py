"""The processes of a model server: one process, or several that accept connections from one socket, and the shadow's.

Several processes are forked from a parent that has loaded torch and serves no requests. The parent restarts a process
that has ended. When the parent ends for any reason, its processes also end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
import uvicorn
import uvloop

from doll import telemetry
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.local.processes import describe_exit, die_with_parent
from doll.model.flat_model import build
from doll.process.connections import (
    CERT_ENV,
    CLIENT_CA_ENV,
    KEEP_ALIVE_S,
    KEY_ENV,
    TOKEN_ENV,
    BoundedProtocol,
    BoundedServer,
    ServerAccess,
    allow_many_files,
    find_access,
)
from doll.process.health import Heartbeat, heartbeat_of
from doll.process.http_access import LOOPBACK, address_of, is_loopback, listen
from doll.process.platform import CAN_FORK, yield_to_others
from doll.process.signals import stop_requested
from doll.services import Services
from doll.serving.answer_log import AnswerLog
from doll.serving.app import ServeApp
from doll.serving.batcher import Batcher
from doll.serving.metrics import ServeMetrics
from doll.serving.model_copies import Lane, ModelCopies
from doll.serving.predictor import Predictor
from doll.serving.shadow import MAX_WAITING, TIME_LIMIT_S, ShadowLink, compute_copies
from doll.serving.tensors import Signature
from doll.serving.version_loader import VersionLoader
from doll.task.base import load_task

log = telemetry.get_logger(__name__)

_LOOK_S: Final = 0.2
_RESTART_S: Final = 1.0  # pause before a restart, so that a failing process does not load the CPU
_OBSERVE_S: Final = 1.0
_END_S: Final = 10.0  # time for a process to end, in addition to its last answers
_SWITCH_S: Final = 0.0005  # limit for other threads to hold Python's lock while a request waits


Beside = Callable[[ServeMetrics], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class ServeOptions:
    """The options of a model server.

    Attributes:
        wanted: percentage of requests for each version; a key is a number, an alias, or `latest`.
        shadow: version that also computes each request, without any effect on its user; "": none.
        name: name of the model.
        max_batch: maximum number of samples in a batch.
        max_queue: maximum number of waiting requests, in each process.
        row_bytes: memory for table rows that have changed since the checkpoint, in each process.
        time_limit_s: time limit to receive the body of a request, and for the computation of its answer.
        keep_alive_s: time after which a connection without a request is closed.
        grace_s: time to answer the remaining requests after the server is asked to end.
        log_topic: topic for the answers; "": answers are not logged.
        log_records: log each record of a request with its answer.
        split_by: header that decides which version answers; "": each request is drawn.
        token_file: file with the token for all requests. None: the token of the environment, if it has one.
        read_token_file: file with the token of those who may read metadata and metrics; None: as above.
    """

    wanted: dict[str, float]
    name: str
    host: str = LOOPBACK
    port: int = 8000
    processes: int = 1
    max_batch: int = 64
    max_queue: int = 1024
    max_body_bytes: int = 16_000_000
    row_bytes: int = 256_000_000
    time_limit_s: float = 10.0
    keep_alive_s: float = KEEP_ALIVE_S
    grace_s: float = 10.0
    shadow: str = ""
    split_by: str = ""
    log_topic: str = ""
    log_records: bool = False
    token_file: Path | None = None
    read_token_file: Path | None = None


@dataclass(frozen=True)
class ServedJob:
    """The job that is served.

    Attributes:
        find_services, has_ended: see `VersionLoader`.
    """

    config: JobConfig
    run_folder: Path
    find_services: Callable[[], Services | None]
    has_ended: Callable[[], bool]


def run_serve(
    job: ServedJob, options: ServeOptions, *, say: Callable[[str], object] = lambda text: None,
    beside: Beside = lambda metrics: contextlib.nullcontext(),
) -> int:  # fmt: skip
    """Serve until SIGTERM or SIGINT; return the exit code, 0. Must be called in the main thread.

    Args:
        say: called with the address when the server accepts connections.
        beside: context in which this process serves, if it is the only one.

    Raises:
        ConfigError: the task or the address cannot be used, the server would be open to other machines without access
            control, or this platform cannot run several processes.
    """
    access = find_access(options.token_file, options.read_token_file)
    if not (access.tokens or access.by_certificate or is_loopback(options.host)):
        raise ConfigError(
            f"--host {options.host}: other machines would reach this server, so expected a token ({TOKEN_ENV}, or "
            f"--token-file FILE), or certificates of clients ({CLIENT_CA_ENV} with {CERT_ENV} and {KEY_ENV})"
        )
    if (options.processes > 1 or options.shadow) and not CAN_FORK:
        raise ConfigError(
            "expected --processes 1 and no --shadow: a process that has loaded torch can be forked on Linux only"
        )
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH_S)
    load_task(job.config)  # report an invalid task before anything starts
    metrics = ServeMetrics(job.config.job, options.processes)
    with (
        _shadow_process(job, options, metrics) as shadow_path,
        listen(options.host, options.port, access.tokens, by_certificate=access.by_certificate) as listener,
        heartbeat_of("serve", job.config) as heartbeat,
    ):
        address = address_of(listener)
        say(address.replace("http:", "https:") if access.tls else address)
        serve = partial(serve_here, job, options, access, listener, metrics, shadow_path=shadow_path)
        if options.processes == 1:
            with stop_requested() as stop, beside(metrics):
                serve(stop, heartbeat)
            return 0
        return _serve_in_processes(range(options.processes), serve, metrics, heartbeat, options.grace_s + _END_S)


class _Served(NamedTuple):
    """The parts of a process that answers requests."""

    copies: ModelCopies
    loader: VersionLoader
    batcher: Batcher
    app: ServeApp


def _open(
    job: ServedJob, options: ServeOptions, lanes: Sequence[Lane], metrics: ServeMetrics, opened: contextlib.ExitStack,
    *, access: ServerAccess, num_here: Callable[[], int] = lambda: 2,
    on_batch: Callable[[int, float], object] = lambda samples, seconds: None, shadow: ShadowLink | None = None,
) -> _Served:  # fmt: skip
    """Return the parts of this process; `opened` closes them."""
    allow_many_files()
    config = job.config
    task = load_task(config)
    signature = Signature(task)
    copies = ModelCopies(partial(build, config, task, with_rows=False), lanes)
    predictor = Predictor(task, signature, copies, options.max_batch)
    loader = VersionLoader(
        config, job.run_folder, copies, find_services=job.find_services, has_ended=job.has_ended,
        check=predictor.check, row_bytes=options.row_bytes, on_swap=partial(metrics.count, "swaps"),
    )  # fmt: skip
    executor = opened.enter_context(ThreadPoolExecutor(1, "compute"))
    opened.enter_context(loader)
    answers = None
    if options.log_topic:
        answers = opened.enter_context(AnswerLog(
            config, job.find_services, options.log_topic, options.name, each_record=options.log_records,
            on_logged=partial(metrics.count, "logged_answers"),
            on_dropped=partial(metrics.count, "unlogged_answers"),
        ))  # fmt: skip
    batcher = Batcher(
        predictor.answer, executor, max_samples=options.max_batch, max_waiting=options.max_queue,
        time_limit_s=options.time_limit_s, num_here=num_here, on_batch=on_batch,
    )  # fmt: skip
    app = ServeApp(
        task, signature, lanes, batcher, metrics, name=options.name, newest_samples=lambda: loader.newest_samples,
        max_body_bytes=options.max_body_bytes, time_limit_s=options.time_limit_s, access=access, answers=answers,
        shadow=shadow, split_by=options.split_by,
    )  # fmt: skip
    return _Served(copies, loader, batcher, app)


def serve_here(
    job: ServedJob, options: ServeOptions, access: ServerAccess, listener: socket.socket, metrics: ServeMetrics,
    stop: threading.Event, heartbeat: Heartbeat | None, *, shadow_path: str = "",
) -> None:  # fmt: skip
    """Serve in this process. `shadow_path`: the socket of the shadow's process; "": there is none."""
    lanes = [Lane(name, share) for name, share in options.wanted.items()]
    shadow = None
    if shadow_path:
        shadow = ShadowLink(
            shadow_path, max_bytes=options.max_body_bytes, on_answered=partial(metrics.count, "shadow_answers"),
            on_skipped=partial(metrics.count, "skipped_shadow_answers"),
        )  # fmt: skip
    with contextlib.ExitStack() as opened:
        copies, loader, batcher, app = _open(
            job, options, lanes, metrics, opened, access=access, num_here=lambda: len(server.server_state.tasks),
            on_batch=metrics.computed, shadow=shadow,
        )  # fmt: skip
        uvicorn_config = uvicorn.Config(
            app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=max(1, round(options.keep_alive_s)),
            timeout_graceful_shutdown=max(1, round(options.grace_s)), **access.tls,
        )  # fmt: skip

        server = BoundedServer(uvicorn_config)

        def observe() -> None:
            metrics.observe(copies, loader.newest_samples, batcher.num_waiting, loader.row_bytes)
            if heartbeat is not None:
                heartbeat.beat("loop")
                missing = [f"version {lane.wanted}: {lane.problem}" for lane in lanes if lane.copy is None]
                heartbeat.set_waiting_for("; ".join(missing))

        if heartbeat is not None:
            heartbeat.expect("loop")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_until(server, listener, stop, observe, batcher, shadow, options.time_limit_s))


async def _serve_until(
    server: BoundedServer, listener: socket.socket, stop: threading.Event, observe: Callable[[], None],
    batcher: Batcher, shadow: ShadowLink | None, time_limit_s: float,
) -> None:  # fmt: skip
    """Serve until `stop` is set, then answer the requests that have begun."""

    async def watch() -> None:
        observe_at_s = 0.0
        while not stop.is_set():
            if time.monotonic() >= observe_at_s:
                observe_at_s = time.monotonic() + _OBSERVE_S
                observe()
            await asyncio.sleep(_LOOK_S)
        server.should_exit = True

    async def expire() -> None:
        while True:
            batcher.expire()
            await asyncio.sleep(_LOOK_S)

    tasks = [asyncio.create_task(each) for each in (watch(), expire(), server.close_idle(time_limit_s))]
    if shadow is not None:
        tasks.append(asyncio.create_task(shadow.keep_connected()))
    try:
        # A copy: uvicorn closes it, and other processes use the original.
        await server.serve(sockets=[listener.dup()])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- the shadow


@contextlib.contextmanager
def _shadow_process(job: ServedJob, options: ServeOptions, metrics: ServeMetrics) -> Iterator[str]:
    """Keep the shadow's process running within the context. Yield the path of its socket; "": there is no shadow.

    Enter it before this process has other threads or listens.
    """
    if not options.shadow:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="doll-shadow-") as folder:
        path, parent, row = str(Path(folder) / "shadow.sock"), os.getpid(), options.processes
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(path)
            except OSError as exc:
                raise ConfigError(f"--shadow: cannot listen on {path}: {exc}; set $TMPDIR to another folder") from exc
            listener.listen()

            def compute(stop: threading.Event, heartbeat: Heartbeat | None) -> None:
                yield_to_others()
                compute_here(job, options, listener, metrics, stop)

            def keep(stop: threading.Event, heartbeat: Heartbeat | None) -> None:
                _serve_in_processes((row,), compute, metrics, Heartbeat("shadow"), _END_S)

            if not (pid := os.fork()):
                _child(parent, row, keep, metrics)
        try:
            yield path
        finally:
            _end({pid: row}, 2 * _END_S)


def compute_here(
    job: ServedJob, options: ServeOptions, listener: socket.socket, metrics: ServeMetrics, stop: threading.Event
) -> None:
    """Compute the copied requests of all servers in this process, until `stop` is set."""
    options = dataclasses.replace(options, max_queue=MAX_WAITING * options.processes, time_limit_s=TIME_LIMIT_S)
    with contextlib.ExitStack() as opened:
        served = _open(job, options, [Lane(options.shadow)], metrics, opened, access=ServerAccess())
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(compute_copies(listener, served.app.compute_copy, stop, served.batcher.expire))


# --- several processes


def _serve_in_processes(
    rows: Sequence[int], serve: Callable[[threading.Event, Heartbeat | None], None], metrics: ServeMetrics,
    heartbeat: Heartbeat, grace_s: float,
) -> int:  # fmt: skip
    """Keep one process for each of these rows of the metrics running until SIGTERM or SIGINT, or until one of them
    reports an invalid job."""
    parent = os.getpid()
    running: dict[int, int] = {}  # process id -> number of its row in the metrics
    heartbeat.expect("loop")
    heartbeat.set_waiting_for("")
    with stop_requested() as stop:
        due_s = dict.fromkeys(rows, 0.0)
        while not stop.is_set():
            heartbeat.beat("loop")
            for number in [number for number, at_s in due_s.items() if time.monotonic() >= at_s]:
                del due_s[number]
                if not (pid := os.fork()):
                    _child(parent, number, serve, metrics)
                running[pid] = number
            for pid, code in _ended(running):
                number = running.pop(pid)
                if code == ConfigError.exit_code:
                    _end(running, grace_s)
                    return code
                log.error("process_ended", process=number, pid=pid, exit=describe_exit(code), action="started again")
                due_s[number] = time.monotonic() + _RESTART_S
            stop.wait(_LOOK_S)
    _end(running, grace_s)
    return 0


def _end(running: dict[int, int], grace_s: float) -> None:
    """End these child processes, after `grace_s` seconds with SIGKILL."""
    deadline_s = time.monotonic() + grace_s
    while running:
        number = signal.SIGTERM if time.monotonic() < deadline_s else signal.SIGKILL
        for pid in running:
            os.kill(pid, number)  # repeated, because a new process does not handle the signal yet
        time.sleep(_LOOK_S)
        for pid, _ in _ended(running):
            del running[pid]


def _child(
    parent: int, number: int, serve: Callable[[threading.Event, Heartbeat | None], None], metrics: ServeMetrics
) -> None:  # fmt: skip
    """Run a forked process; does not return."""
    code = 1
    try:
        die_with_parent(parent)
        metrics.use_row(number)
        with stop_requested() as stop:
            serve(stop, None)
        code = 0
    except ConfigError as exc:
        sys.stderr.write(f"doll: {exc}\n")
        code = exc.exit_code
    except Exception as exc:
        log.error("process_failed", process=number, exc_info=exc)
    finally:
        os._exit(code)


def _ended(pids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Return the child processes that have ended, with their exit codes."""
    for pid in list(pids):
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                yield pid, os.waitstatus_to_exitcode(status)
