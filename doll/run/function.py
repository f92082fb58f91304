"""The handler of a function on AWS Lambda: one invocation is one machine, which runs one worker and hands its place on.

The function's image starts `python -m awslambdaric doll.run.function.handle`. The worker is the same program as
everywhere, forked from a process that has loaded torch and that later invocations in the same environment use again.
The worker is told to leave if a successor is warm, if the provisioner asks, and in any case before the time limit.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import redis
import yaml

from doll import telemetry
from doll.config import JobConfig
from doll.config.loader import parse
from doll.consumers.lifecycle.handover import INVOCATION_ENV
from doll.errors import ConfigError, DollError
from doll.local.forks import ForkServer, Role
from doll.local.processes import describe_exit, tail
from doll.provisioner.fleets.orders import identity
from doll.provisioner.fleets.port import Order
from doll.records.bounded import short
from doll.run import function_boot
from doll.services import resolve
from doll.storage.invocations import Invocations
from doll.storage.redis_client import connect_redis

log = telemetry.get_logger(__name__)

MARGIN_S: Final = 2.0
"""The worker's process has ended this long before the time limit: it leaves `worker.drain_s` earlier."""
_RENEW_S: Final = 1.0
_POLL_S: Final = 0.1
_REDIS_S: Final = 5.0  # for the last word to a Redis that is away
_BORN_S: Final = time.time()
_PRELOAD: Final = (
    "torch", "torch.optim", "numpy", "redis", "confluent_kafka", "doll.task.base", "doll.run.local.roles",
    "doll.consumers.main",
)  # fmt: skip


class Context(Protocol):
    """The part of awslambdaric's context that the handler uses."""

    def get_remaining_time_in_millis(self) -> int: ...


@dataclass(frozen=True)
class Event:
    """The event of an invocation: its order, and the text of the job file without `base_folder`."""

    name: str
    slot: int
    incarnation: int
    market: str
    job: str
    base_folder: str

    @classmethod
    def read(cls, event: Any) -> Event:
        """Return the event. Raises ConfigError if a field is missing or has another type."""
        kinds = {"name": str, "slot": int, "incarnation": int, "market": str, "job": str, "base_folder": str}
        given = event if isinstance(event, Mapping) else {}
        for key, kind in kinds.items():
            if type(given.get(key)) is not kind:
                raise ConfigError(
                    f"event: expected {key} as {kind.__name__}, got {short(repr(given.get(key)))}: "
                    "only `doll provision` invokes this function"
                )
        return cls(**{key: given[key] for key in kinds})


class _Environment:
    """The process that has loaded torch, which all invocations in one environment of the function share."""

    def __init__(self) -> None:
        self._forks: ForkServer | None = None
        self._is_used = self._has_fetched = False

    def prepare(self) -> None:
        """Fetch passwords and certificates, once. Raises ConfigError if AWS refuses."""
        if not self._has_fetched:
            function_boot.fetch()
            self._has_fetched = True

    def forks(self) -> ForkServer:
        if self._forks is None or self._forks.pid is None:
            self._forks = ForkServer(Path(tempfile.gettempdir()) / f"doll-{os.getpid()}-fork.log", _PRELOAD)
            self._forks.start()
        return self._forks

    def started_s(self) -> float:
        """Return the time from which the present invocation is billed, which is that of the environment if it is
        new."""
        cold, self._is_used = not self._is_used, True
        return _BORN_S if cold else time.time()

    def close(self) -> None:
        if self._forks is not None:
            self._forks.close()


_environment: Final = _Environment()


def handle(event: Any, context: Context) -> dict[str, Any]:
    """Work as the worker that the event names, until it must leave. Return the cause of the end, the exit code of the
    worker and the billed milliseconds. An event that cannot be used is answered with `cause: refused`."""
    limit_s = time.time() + context.get_remaining_time_in_millis() / 1000
    started_s = _environment.started_s()
    try:
        order = Event.read(event)
        _environment.prepare()
        config = parse(order.job)
        with connect_redis(resolve(config), timeout_s=_REDIS_S) as client:
            outcome = _Invocation(order, config, Invocations(client, config.job, config.cluster)).run(
                started_s, limit_s
            )
    except (DollError, redis.RedisError) as error:
        log.error("event_refused", reason=short(error))
        outcome = {"cause": "refused", "trouble": short(error)}
    return {**outcome, "billed_ms": math.ceil((time.time() - started_s) * 1000)}


class _Invocation:
    """One invocation: its claim of the order, its worker, and its end."""

    def __init__(self, event: Event, config: JobConfig, invocations: Invocations) -> None:
        self._event, self._config, self._invocations = event, config, invocations
        self._folder = Path(tempfile.mkdtemp(prefix="doll-worker-"))
        self._log = self._folder / "worker.log"
        self._copied = 0

    def run(self, started_s: float, limit_s: float) -> dict[str, Any]:
        event = self._event
        try:
            if not self._invocations.claim(event.name, uuid.uuid4().hex):
                return {"cause": "duplicate"}  # the owner has delivered the event a second time
            order = self._invocations.get(event.name)
            if order is not None and (order.asked_s is not None or order.ended_s is not None):
                self._invocations.end(event.name, time.time(), "asked")
                return {"cause": "asked"}
            self._own: dict[str, float | str] = {
                "slot": event.slot, "incarnation": event.incarnation, "market": event.market,
                "launched_s": started_s if order is None else order.launched_s, "started_s": started_s,
                "limit_s": limit_s,
            }  # fmt: skip
            self._invocations.mark(event.name, **self._own, seen_s=time.time())
            cause, code = self._work(limit_s)
            trouble = f"{describe_exit(code)}: {short(tail(self._log), 300)}" if cause == "failed" else ""
            self._end(cause, trouble)
            return {"cause": cause, "exit_code": code}
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _work(self, limit_s: float) -> tuple[str, int]:
        """Run the worker to its end. Return the cause of the end, and the exit code."""
        told, code = "", None
        end_s = limit_s - MARGIN_S
        stop = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(stop,), daemon=True)
        renewal.start()
        role = self._start()
        try:
            while (code := role.wait(_POLL_S)) is None:
                now_s = time.time()
                if not told and (told := self._cause(now_s, end_s)):
                    log.info("leaving", worker=self._event.slot, cause=told, left_s=round(limit_s - now_s, 1))
                    end_s = min(end_s, now_s + self._config.worker.drain_s + MARGIN_S)
                    role.terminate()
                if told and now_s >= end_s:
                    role.kill()
                self._copy_log()
        finally:
            stop.set()
            role.kill()
        self._copy_log()
        renewal.join()
        return told or ("failed" if code else "finished"), code

    def _cause(self, now_s: float, end_s: float) -> str:
        """Return why the worker must leave now; "" if it need not."""
        if now_s >= end_s - self._config.worker.drain_s:
            return "limit"
        try:
            order = self._invocations.get(self._event.name)
            if order is not None and (order.asked_s is not None or order.ended_s is not None):
                return "asked"
            if self._invocations.has_warm_successor(self._event.slot, self._event.incarnation, now_s):
                return "successor"
        except redis.RedisError:  # the worker waits for it, and logs it
            pass
        return ""

    def _start(self) -> Role:
        event = self._event
        job = self._folder / "job.yaml"
        job.write_text(event.job + yaml.safe_dump({"base_folder": event.base_folder}), encoding="utf-8")
        order = Order(event.slot, event.incarnation, "spot" if event.market == "spot" else "on_demand")
        return _environment.forks().start_role(
            "doll.run.local.roles:invocation_role", [str(job), str(self._folder / "run"), event.slot],
            log_path=self._log, name=event.name, env={**identity(order, event.name), INVOCATION_ENV: event.name},
        )  # fmt: skip

    def _renew(self, stop: threading.Event) -> None:
        while not stop.wait(_RENEW_S):
            with contextlib.suppress(redis.RedisError):
                self._invocations.mark(self._event.name, **self._own, seen_s=time.time())

    def _end(self, cause: str, trouble: str) -> None:
        try:
            self._invocations.end(self._event.name, time.time(), cause, trouble)
        except redis.RedisError as error:  # the provisioner counts it as lost
            log.warning("redis_unavailable", reason=str(error), action="the end of this invocation is not recorded")

    def _copy_log(self) -> None:
        """Copy what the worker has logged to standard output, which the function's owner collects."""
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(self._copied)
            new = file.read()
            self._copied += len(new)
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()
