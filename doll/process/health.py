"""Report the health of this process: heartbeats, two HTTP probes, and a watchdog that ends a stuck process.

A loop calls `beat` in each iteration; code that receives answers of Kafka also calls it. `/healthz` answers 200 unless
a vital beat is overdue: a restart may repair this. `/readyz` answers 200 unless any beat is overdue or the process
waits for something. If a vital beat is overdue for a long time, the process exits with code 1, and its supervisor
restarts it. Time in which the process itself did not run (SIGSTOP, a suspended machine) does not count.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from doll.errors import ConfigError
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.config import JobConfig

log = get_logger(__name__)

PORT_ENV: Final = "DOLL_HEALTH_PORT"
HOST_ENV: Final = "DOLL_HEALTH_HOST"
HOST: Final = "127.0.0.1"  # the probes have no access control, so other machines reach them only if HOST_ENV is set
BEAT_TIMEOUT_S: Final = 15.0  # beats come several times a second, but may be seconds late on a loaded machine
_CHECK_S: Final = 1.0
_REQUEST_S: Final = 5.0
_MAX_REQUESTS: Final = 64  # each request takes a thread, and thousands of requests must not end the process
_OFFSETS: Final = {
    "ps": 0, "evaluator": 1, "producer": 2, "ps-standby": 3, "prometheus": 4, "provisioner": 5, "serve": 6,
    "provisioner-standby": 7, "notifier": 8, "otel": 9,
}  # fmt: skip
_FIRST_WORKER: Final = 10


@dataclass(slots=True)
class _ExpectedBeat:
    within_s: float
    vital: bool
    at_s: float


class Heartbeat:
    """The progress of this process. Safe to use from any thread; a beat is cheap.

    Args:
        process: name of the process, as in the logs.
        clock: function that returns monotonic seconds.

    Attributes:
        pages: functions that return content type and content of further pages, by path.
    """

    def __init__(self, process: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.process = process
        self.pages: dict[str, Callable[[], tuple[str, bytes]]] = {}
        self._clock = clock
        self._beats: dict[str, _ExpectedBeat] = {}
        self._waiting = "starting"

    def expect(self, name: str, *, within_s: float = BEAT_TIMEOUT_S, vital: bool = True) -> None:
        """Expect `name` to beat at least once in `within_s` seconds.

        `vital`: the process is unhealthy if the beat is overdue, since a restart may fix the cause.
        """
        self._beats = {**self._beats, name: _ExpectedBeat(within_s, vital, self._clock())}

    def beat(self, name: str) -> None:
        """Record that `name` has made progress. A beat that is not expected is ignored."""
        if (expected := self._beats.get(name)) is not None:
            expected.at_s = self._clock()

    def set_waiting_for(self, what: str) -> None:
        """Report that the process is healthy but not ready, because it waits for `what`. "": the process is ready."""
        self._waiting = what

    def overdue(self, *, vital: bool) -> dict[str, float]:
        """Return the seconds since the last beat of each overdue name, either of the vital names or of the others."""
        now = self._clock()
        return {
            name: now - expected.at_s
            for name, expected in self._beats.items()
            if expected.vital == vital and now - expected.at_s > expected.within_s
        }

    def report(self) -> dict[str, Any]:
        """Return the answer of the probes: healthy, ready, and the reasons if not."""
        now = self._clock()
        unhealthy = [f"{name}: no progress for {age_s:.0f} s" for name, age_s in self.overdue(vital=True).items()]
        late = [f"{name}: no beat for {age_s:.0f} s" for name, age_s in self.overdue(vital=False).items()]
        reasons = [*unhealthy, *late, *([self._waiting] if self._waiting else [])]
        return {
            "process": self.process,
            "healthy": not unhealthy,
            "ready": not reasons,
            "reasons": reasons,
            "ages_s": {name: round(now - expected.at_s, 3) for name, expected in self._beats.items()},
        }


class Watchdog:
    """A counter of the seconds in which a vital beat was overdue. Call `check` about once a second."""

    def __init__(
        self, heartbeat: Heartbeat, liveness_timeout_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._heartbeat = heartbeat
        self._timeout_s = liveness_timeout_s
        self._clock = clock
        self._checked_s = clock()
        self._unhealthy_s = 0.0

    def check(self) -> str:
        """Return the reason why this process must exit; empty if there is none."""
        now = self._clock()
        awake_s = min(now - self._checked_s, 2 * _CHECK_S)
        self._checked_s = now
        overdue = self._heartbeat.overdue(vital=True)
        self._unhealthy_s = self._unhealthy_s + awake_s if overdue else 0.0
        if self._unhealthy_s <= self._timeout_s:
            return ""
        return "; ".join(f"{name}: no progress for {age_s:.0f} s" for name, age_s in overdue.items())


def port_of(config: JobConfig, process: str) -> int | None:
    """Return the port of the process's probes, from $DOLL_HEALTH_PORT or `health.base_port`; None if neither is set.
    Raise ConfigError if the variable is not a port."""
    if given := os.environ.get(PORT_ENV):
        if not given.isdecimal() or not 0 < int(given) < 65_536:
            raise ConfigError(f"{PORT_ENV}: expected a port, 1 to 65535, got {given!r}")
        return int(given)
    if process == "worker":  # it has no slot yet
        return None
    return assigned_port(config, process)


def assigned_port(config: JobConfig, process: str) -> int | None:
    """Return the port of the process's probes according to `health.base_port`; None if it is not set."""
    if config.health.base_port is None:
        return None
    kind, _, number = process.rpartition("-")
    # The ports do not allow any number of joiners, shards or stages; none is left.
    if kind in ("joiner", "shard") or kind.startswith("stage") or process in ("lineage", "shard"):
        return None
    offset = _FIRST_WORKER + int(number) if kind == "worker" else _OFFSETS[process]
    return config.health.base_port + offset


@contextmanager
def heartbeat_of(process: str, config: JobConfig, *, default_port: int | None = None) -> Iterator[Heartbeat]:
    """Yield the heartbeat of this process. A watchdog runs and, if a port is given, probes on loopback. A process that
    always needs probes passes a `default_port`. Raise ConfigError if $DOLL_HEALTH_PORT is not a port."""
    heartbeat = Heartbeat(process)
    port = port_of(config, process) or default_port
    ended = threading.Event()
    threading.Thread(
        target=_watch, args=(heartbeat, config.health.liveness_timeout_s, ended), name="watchdog", daemon=True
    ).start()
    server = None if port is None else _serve(heartbeat, port)
    try:
        yield heartbeat
    finally:
        ended.set()
        if server is not None:
            server.shutdown()
            server.server_close()


def _watch(heartbeat: Heartbeat, liveness_timeout_s: float, ended: threading.Event) -> None:
    watchdog = Watchdog(heartbeat, liveness_timeout_s)
    while not ended.wait(_CHECK_S):
        if reason := watchdog.check():
            log.error("main_loop_stuck", reason=reason, action="exiting, to be restarted")
            os._exit(1)  # a stuck process may not handle signals


def _serve(heartbeat: Heartbeat, port: int) -> ThreadingHTTPServer | None:
    try:
        server = _HealthServer((os.environ.get(HOST_ENV) or HOST, port), heartbeat)
    except OSError as exc:  # the process works without its probes, too
        log.warning("health_probe_unavailable", port=port, reason=exc.strerror or str(exc))
        return None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.5}, name="health", daemon=True).start()
    return server


class _HealthServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], heartbeat: Heartbeat) -> None:
        super().__init__(address, _Handler)
        self.heartbeat = heartbeat
        self._free = threading.BoundedSemaphore(_MAX_REQUESTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    server: _HealthServer
    timeout = _REQUEST_S
    server_version = "doll"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        heartbeat = self.server.heartbeat
        if (page := heartbeat.pages.get(path)) is not None:
            self._answer(200, *page())
            return
        report = heartbeat.report()
        good = {"/healthz": report["healthy"], "/readyz": report["ready"]}.get(path)
        status, content = (
            (404, {"expected": ["/healthz", "/readyz", *heartbeat.pages]})
            if good is None
            else (200 if good else 503, report)
        )
        self._answer(status, "application/json", json.dumps(content).encode() + b"\n")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log probes, which come every few seconds."""
