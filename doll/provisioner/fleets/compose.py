"""`Fleet` of containers: each instance is one `docker compose run` of the project's worker service.

The container has the service's image, network, volumes and environment. It does not have the service's restart policy,
because the provisioner replaces a worker that dies. The labels and the name of a container state its identity, so all
state is in the docker engine.

Written for docker 27 with compose v2, and tested only with a substitute for their command line
(tests/support/fake_docker.py). Run this in an environment with the variables that the compose file requires.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from doll import telemetry
from doll.config import ComposeFleetConfig, JobConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.provisioner.fleets.orders import WorkerLabels, identity
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.records.bounded import MalformedError, json_object, json_value, short

log = telemetry.get_logger(__name__)

POOL: Final = "container/engine"
LABELS: Final = WorkerLabels("doll.")
ENDED_KEPT_S: Final = 3600.0
GRACE_S: Final = 30.0
"""Seconds from SIGTERM to SIGKILL for a worker that does not end by itself."""

_STATES: Final[Mapping[str, InstanceState]] = {
    "created": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "restarting": InstanceState.RUNNING,
    "paused": InstanceState.RUNNING,
    "removing": InstanceState.ENDING,
    "exited": InstanceState.ENDED,
    "dead": InstanceState.ENDED,
}
_BY_SIGNAL: Final = (137, 143)  # 128 + SIGKILL, 128 + SIGTERM
# Docker's messages, in lower case, and what to do about them; the first match counts.
_FAILURES: Final = (
    ("cannot connect to the docker daemon", LaunchFailure.THROTTLED),
    ("error during connect", LaunchFailure.THROTTLED),
    ("i/o timeout", LaunchFailure.THROTTLED),
    ("context deadline exceeded", LaunchFailure.THROTTLED),
    ("no space left on device", LaunchFailure.CAPACITY),
    ("cannot allocate memory", LaunchFailure.CAPACITY),
    ("resource temporarily unavailable", LaunchFailure.CAPACITY),
    ("could not find an available", LaunchFailure.CAPACITY),  # no address left in the network
)
_GONE: Final = ("no such container", "no such object", "is not running", "is already in progress")


class DockerError(Exception):
    """A docker command has failed. `message`: its standard error, in lower case."""

    def __init__(self, command: Sequence[str], message: str) -> None:
        super().__init__(f"`{' '.join(command[:4])} ...` failed: {message or 'without a message'}")
        self.message = message.lower()

    @property
    def failure(self) -> LaunchFailure:
        """The kind of failure, from a table of messages. A message that is not in the table needs a person."""
        return next((failure for words, failure in _FAILURES if words in self.message), LaunchFailure.CONFIG)


@dataclass(kw_only=True, eq=False, repr=False)
class ComposeFleet:
    """The containers of one compose project that have our cluster label. Containers of another job are not touched.
    Containers of an earlier release have no job label, and count as containers of the job.

    Args:
        cluster, job: values of the labels `doll.cluster` and `doll.job`.
        timeout_s: a docker command that takes longer counts as failed.
        clock: function that returns Unix seconds, with the same clock as the engine's.
        environment: environment of the docker commands. None: our own environment.
    """

    cluster: str
    job: str = ""
    project: str
    file: Path
    service: str = "worker"
    docker: str = "docker"
    timeout_s: float = 60.0
    clock: Callable[[], float] = time.time
    environment: Mapping[str, str] | None = None
    _sigterm_s: dict[str, float] = field(default_factory=dict, init=False)  # when an instance got SIGTERM

    def launch(self, order: Order) -> Instance:
        name = self._name(order)
        if POOL in order.avoid:
            raise LaunchError(f"{name}: the only pool is to be avoided", failure=LaunchFailure.CAPACITY, pools=[POOL])
        try:
            if (instances := self._inspect([name])) and instances[0].state is not InstanceState.PENDING:
                return instances[0]
            if instances:
                self._run([self.docker, "start", name])  # its creator crashed before it started it
            else:
                self._start(order, name)
            (made,) = self._inspect([name])
        except DockerError as error:
            pools = [POOL] if error.failure is LaunchFailure.CAPACITY else []
            raise LaunchError(str(error), failure=error.failure, code="docker", pools=pools) from error
        except ValueError as error:
            raise LaunchError(
                f"{name} was started, and is not there: is somebody removing containers?",
                failure=LaunchFailure.THROTTLED,
            ) from error
        return made

    def instances(self) -> Sequence[Instance]:
        """Return the instances. Also kills containers that are overdue, and removes containers that ended an hour
        ago."""
        try:
            instances = self._listed()
            now_s = self.clock()
            late = [
                instance.id
                for instance in instances
                if instance.state is InstanceState.ENDING and now_s - self._sigterm_s.get(instance.id, now_s) > GRACE_S
            ]
            old = [
                instance.id
                for instance in instances
                if instance.ended_s is not None and now_s - instance.ended_s > ENDED_KEPT_S
            ]
            if late:
                self._run_over([self.docker, "kill"], late)
            if old:
                self._run_over([self.docker, "rm", "--force"], old)
        except DockerError as error:
            raise _unusable(error) from error
        for id_ in set(self._sigterm_s) - {instance.id for instance in instances} | set(old):
            self._sigterm_s.pop(id_, None)
        return [instance for instance in instances if instance.id not in old]

    def terminate(self, ids: Collection[str]) -> None:
        """Send SIGTERM; a later `instances()` sends SIGKILL if a container has not ended."""
        if not ids:
            return
        try:
            own = {instance.id: instance for instance in self._listed() if instance.id in ids}
            running = [id_ for id_, instance in own.items() if instance.state is InstanceState.RUNNING]
            if running:
                self._run_over([self.docker, "kill", "--signal", "SIGTERM"], running)
                for id_ in running:
                    self._sigterm_s[id_] = self.clock()
            never_started = [id_ for id_, instance in own.items() if instance.state is InstanceState.PENDING]
            if never_started:
                self._run_over([self.docker, "rm", "--force"], never_started)
        except DockerError as error:
            raise _unusable(error) from error

    def close(self) -> None:
        pass

    def _name(self, order: Order) -> str:
        name = f"{self.cluster}-w{order.slot}-i{order.incarnation}-{order.market}-a{order.attempt}"
        return f"{name}-r{order.run}" if order.run else name

    def _start(self, order: Order, name: str) -> None:
        labels = LABELS.write(order, self.cluster, self.job)
        try:
            self._run([
                self.docker, "compose", "--project-name", self.project, "--file", str(self.file),
                "run", "--detach", "--no-deps", "--name", name,
                *(word for key, value in labels.items() for word in ("--label", f"{key}={value}")),
                *(word for key, value in identity(order, name).items() for word in ("--env", f"{key}={value}")),
                self.service,
            ])  # fmt: skip
        except DockerError as error:
            if "is already in use" not in error.message:  # the name: another call of the same order was faster
                raise
        log.info("launched", id=name, worker=order.slot, incarnation=order.incarnation, market=order.market)

    def _listed(self) -> list[Instance]:
        """Return all containers of the cluster, in all states."""
        label = f"label={LABELS.cluster}={self.cluster}"
        completed = self._run([self.docker, "ps", "--all", "--no-trunc", "--filter", label, "--format", "json"])
        return self._inspect([_id_of(line) for line in completed.splitlines() if line.strip()])

    def _inspect(self, names: Sequence[str]) -> list[Instance]:
        """Return the containers with these names that exist and are workers of the cluster."""
        if not names:
            return []
        command = [self.docker, "inspect", "--type", "container", *names]
        completed = self._call(command)
        if completed.returncode != 0 and not any(words in completed.stderr.lower() for words in _GONE):
            raise DockerError(command, completed.stderr.strip())
        try:
            raw = json_value(completed.stdout or "[]")
            if not isinstance(raw, list):
                raise MalformedError(f"expected a list, got {type(raw).__name__}")
            return list(self._readable(raw))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            why = f"{type(error).__name__}: {short(error)}"
            raise DockerError(
                command, f"expected containers as JSON ({why}), got {completed.stdout[:200]!r}"
            ) from error

    def _readable(self, raw: Sequence[Mapping[str, Any]]) -> Iterator[Instance]:
        now_s = self.clock()
        for description in raw:
            name, state = description["Name"].lstrip("/"), description["State"]
            labels = description["Config"].get("Labels") or {}
            if labels.get(LABELS.job, self.job) != self.job:
                continue
            worker = LABELS.read(labels)
            if worker is None or labels.get(LABELS.cluster) != self.cluster:
                log.warning("invalid_worker_tags", id=name, cluster=self.cluster)
                continue
            instance = Instance(
                id=name, pool=POOL, state=_STATES.get(state["Status"], InstanceState.ENDING),
                launched_s=_unix_s(description["Created"]), **worker,
            )  # fmt: skip
            if instance.state is InstanceState.ENDED:
                ended_s = _unix_s(state["FinishedAt"])
                by_us = name in self._sigterm_s or (state["ExitCode"] in _BY_SIGNAL and not state.get("OOMKilled"))
                reason = EndReason.TERMINATED if by_us else EndReason.FAILED
                instance = instance.ended(ended_s if ended_s > 0 else now_s, reason)
            elif name in self._sigterm_s:
                instance = replace(instance, state=InstanceState.ENDING)
            yield instance

    def _run_over(self, command: Sequence[str], ids: Sequence[str]) -> None:
        """Run one command on several containers, some of which may have ended in the meantime."""
        completed = self._call([*command, *ids])
        lines = [line for line in completed.stderr.lower().splitlines() if line.strip()]
        if completed.returncode != 0 and not all(any(words in line for words in _GONE) for line in lines):
            raise DockerError(command, completed.stderr.strip())

    def _run(self, command: Sequence[str]) -> str:
        completed = self._call(command)
        if completed.returncode != 0:
            raise DockerError(command, completed.stderr.strip())
        return completed.stdout

    def _call(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=self.timeout_s, check=False,
                env=self.environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise DockerError(command, f"context deadline exceeded: no end within {self.timeout_s:g} s") from error
        except OSError as error:
            raise DockerError(command, f"cannot run {command[0]}: {error}") from error


def connect(config: JobConfig) -> ComposeFleet:
    """Return the fleet of a job file. Raises ConfigError for another kind of fleet, or if there is no compose file."""
    settings = config.fleet
    if not isinstance(settings, ComposeFleetConfig):
        raise ConfigError(f"fleet.kind: expected compose, got {settings.kind}")
    file = config.path(settings.file)
    if not file.is_file():
        raise ConfigError(f"fleet.file: expected a compose file, got {file}, which does not exist or is no file")
    return ComposeFleet(
        cluster=config.cluster, job=config.job, project=settings.project, file=file, service=settings.service,
        docker=settings.docker, timeout_s=settings.timeout_s,
    )  # fmt: skip


def _id_of(line: str) -> str:
    try:
        id_ = json_object(line)["ID"]
        if not isinstance(id_, str) or not id_.isalnum():
            raise MalformedError(f"expected an id, got {short(id_)!r}")
    except (ValueError, KeyError) as error:
        raise DockerError(
            ["docker", "ps"], f"expected containers as JSON ({short(error)}), got {line[:200]!r}"
        ) from error
    return id_


def _unix_s(text: str) -> float:
    """Convert a time in docker's format; "0001-01-01T00:00:00Z" (never) is far below 0."""
    at = datetime.fromisoformat(text)
    return at.timestamp() if at.year > 1 else float("-inf")


def _unusable(error: DockerError) -> ConfigError | ServiceUnavailableError:
    return (ConfigError if error.failure is LaunchFailure.CONFIG else ServiceUnavailableError)(str(error))
