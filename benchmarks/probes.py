"""Measures inside the processes that a benchmark starts: gradient CPU, grants and pushes. Production code has none.

Times are seconds of `time.monotonic()`, which all processes of one machine share. A process keeps its log in memory and
writes it when it ends.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from doll.process.platform import lower_priority

P = ParamSpec("P")
R = TypeVar("R")


class GradientClock:
    """CPU time of the gradients that one process computes, or of its other calls of one kind.

    Attributes:
        rows: (begin_s, end_s, cpu_s) of each call; `cpu_s` by the clock of the thread that called.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []

    def timed(self, call: Callable[P, R]) -> Callable[P, R]:
        """`call`, which adds a row."""

        @functools.wraps(call)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            begin_s, cpu_s = time.monotonic(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.rows.append((begin_s, time.monotonic(), time.thread_time() - cpu_s))

        return run


class MessageClock:
    """When the parameter server sends grants, receives pushes and sends updates.

    Attributes:
        rows: (kind, worker, number, time_s) in order. kind "grant" or "push": the number is the last of its grant ids,
            which increase. kind "update": the number is the version, the worker -1.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int, float]] = []

    def install(self) -> None:
        """Have all parameter servers of this process log to this clock."""
        from doll.ps.server import ParameterServer
        from doll.records.control import Push

        create, feed = ParameterServer.__init__, ParameterServer.feed

        def timed_create(server: ParameterServer, config: Any, *, outbox: Any, **more: Any) -> None:
            create(server, config, outbox=_TimedOutbox(outbox, self), **more)

        def timed_feed(server: ParameterServer, event: Any) -> None:
            if isinstance(event, Push):
                self.rows.append(("push", event.worker, event.batches[-1].grant_id, time.monotonic()))
            feed(server, event)

        # setattr, as these are methods.
        setattr(ParameterServer, "__init__", timed_create)  # noqa: B010
        setattr(ParameterServer, "feed", timed_feed)  # noqa: B010


class _TimedOutbox:
    """An `Outbox` that logs each grant and update just before it is sent."""

    def __init__(self, outbox: Any, clock: MessageClock) -> None:
        from doll.records.control import Grant, Update

        self._outbox = outbox
        self._grant = Grant
        self._update = Update
        self._clock = clock

    def send_command(self, worker: int, record: Any) -> None:
        if isinstance(record, self._grant):
            self._clock.rows.append(("grant", worker, record.grant_ids[-1], time.monotonic()))
        self._outbox.send_command(worker, record)

    def send_update(self, record: Any) -> None:
        if isinstance(record, self._update):
            self._clock.rows.append(("update", -1, record.version, time.monotonic()))
        self._outbox.send_update(record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outbox, name)


# --- roles ------------------------------------------------------------------------------------------------------------


def worker_role(out: str, *args: Any) -> int:
    """`doll.run.local.roles:worker_role`, whose gradients and fetches of weights are logged in `out`, in this order."""
    name_threads()
    from doll.consumers.compute.gradient import CachedVersion, GradientComputer
    from doll.run.local import roles

    gradients, fetches = GradientClock(), GradientClock()
    setattr(GradientComputer, "compute", gradients.timed(GradientComputer.compute))  # noqa: B010
    setattr(CachedVersion, "load", fetches.timed(CachedVersion.load))  # noqa: B010
    try:
        return roles.worker_role(*args)
    finally:
        _write(out, [gradients.rows, fetches.rows])


def otel_role(job_path: str, kafka: str, redis: str, run_folder: str, endpoint: str) -> int:
    """`doll otel`."""
    lower_priority()
    from doll.monitor.otel import export_job
    from doll.run.local.roles import JobProcess

    process = JobProcess.forked("otel", job_path, kafka, redis, run_folder)
    return export_job(process.config, process.services, endpoint, max_per_s=5.0, interval_s=15.0)


def ps_role(out: str, *args: Any) -> int:
    """`doll.run.local.roles:ps_role`, whose grants and pushes are logged in `out`."""
    name_threads()
    from doll.run.local import roles

    clock = MessageClock()
    clock.install()
    try:
        return roles.ps_role(*args)
    finally:
        _write(out, clock.rows)


def name_threads() -> None:
    """Give threads that Python starts from now on their names in the kernel too, as Python does from 3.14 on."""
    if sys.version_info >= (3, 14):
        return
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def named(thread: threading.Thread) -> None:
        set_kernel_name(threading.get_native_id(), thread.name)
        bootstrap(thread)

    setattr(threading.Thread, "_bootstrap_inner", named)  # noqa: B010


def set_kernel_name(thread_id: int, name: str) -> None:
    """The name of a thread of this process, as `top -H` shows it: its first 15 bytes. Linux only."""
    path = Path(f"/proc/self/task/{thread_id}/comm")
    if path.exists():
        path.write_bytes(name.encode()[:15])


def _write(out: str, rows: Sequence[Any]) -> None:
    Path(out).write_text(json.dumps(rows), encoding="utf-8")


def read(out: str) -> list[Any]:
    """The rows of a process that has ended.

    Raises:
        RuntimeError: it was killed before it wrote them.
    """
    path = Path(out)
    if not path.exists():
        raise RuntimeError(f"expected the log of a process in {path}: it was killed before it could write it")
    rows: list[Any] = json.loads(path.read_text(encoding="utf-8"))
    return rows
