"""`Fleet` of containers: each instance is one `docker compose run` of the project's worker service.

Compose gives it the service's image, network, volumes and environment, and drops its restart policy: who dies is
replaced by the provisioner, not started again by the engine. Who it is stands in its labels and its name, so there is
no state outside the engine: containers that have ended stay in it for an hour, then they are removed.

Written for docker 27 with compose v2, and tested against a likeness of their command line only
(tests/support/fake_docker.py): no engine was at hand. Run it where `docker compose` finds the variables that the
compose file asks for.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from doll import telemetry
from doll.config import ComposeFleetConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.provisioner.fleets.orders import identity
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.planning.state import Market
from doll.records.bounded import MalformedError, json_object, json_value, short

if TYPE_CHECKING:
    from doll.config import JobConfig

log = telemetry.get_logger(__name__)

POOL: Final = "container/engine"
CLUSTER_LABEL, JOB_LABEL, WORKER_LABEL, INCARNATION_LABEL, MARKET_LABEL = (
    "doll.cluster",
    "doll.job",
    "doll.worker",
    "doll.incarnation",
    "doll.market",
)
ENDED_KEPT_S: Final = 3600.0
GRACE_S: Final = 30.0
"""From SIGTERM to SIGKILL, for a worker that does not end by itself."""

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
    """A docker command failed. `message`: its standard error, in lower case."""

    def __init__(self, command: Sequence[str], message: str) -> None:
        super().__init__(f"`{' '.join(command[:4])} ...` failed: {message or 'without a message'}")
        self.message = message.lower()

    @property
    def failure(self) -> LaunchFailure:
        """What does not fit the table will not work the next time either: a person must look."""
        return next((failure for words, failure in _FAILURES if words in self.message), LaunchFailure.CONFIG)


class ComposeFleet:
    """The containers of one compose project that carry our cluster label.

    Args:
        cluster: value of the label `doll.cluster`.
        job: value of the label `doll.job`. Containers of another job are left alone; those of an earlier release, which
            gave none, are the job's.
        project, file, service: which service of which compose file under which project name.
        timeout_s: a docker command that takes longer has failed.
        clock: Unix seconds, as the engine's.
        environment: of the docker commands; default: ours.
    """

    def __init__(
        self,
        *,
        cluster: str,
        job: str = "",
        project: str,
        file: Path,
        service: str = "worker",
        docker: str = "docker",
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.time,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._cluster = cluster
        self._job = job
        self._compose = [docker, "compose", "--project-name", project, "--file", str(file)]
        self._service = service
        self._docker = docker
        self._timeout_s = timeout_s
        self._clock = clock
        self._environment = dict(environment) if environment is not None else None
        self._sigterm_s: dict[str, float] = {}  # when an instance got SIGTERM

    def launch(self, order: Order) -> Instance:
        """As the port. Everything that keeps it from an instance is a `LaunchError`, the engine being away too."""
        name = self._name(order)
        if POOL in order.avoid:
            raise LaunchError(f"{name}: the only pool is to be avoided", failure=LaunchFailure.CAPACITY, pools=[POOL])
        try:
            if (instances := self._inspect([name])) and instances[0].state is not InstanceState.PENDING:
                return instances[0]
            if instances:
                self._run([self._docker, "start", name])  # its creator crashed before it started it
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
        """As the port. What should have ended by now is killed; what ended an hour ago is removed.

        Raises:
            ConfigError: docker cannot be used.
            ServiceUnavailableError: the engine does not answer.
        """
        try:
            instances = self._listed()
            now_s = self._clock()
            late = [
                instance.id
                for instance in instances
                if instance.state is InstanceState.ENDING and self._is_late(instance.id, now_s)
            ]
            old = [
                instance.id
                for instance in instances
                if instance.ended_s is not None and now_s - instance.ended_s > ENDED_KEPT_S
            ]
            if late:
                self._run_over([self._docker, "kill"], late)
            if old:
                self._run_over([self._docker, "rm", "--force"], old)
        except DockerError as error:
            raise _unusable(error) from error
        for id_ in set(self._sigterm_s) - {instance.id for instance in instances} | set(old):
            self._sigterm_s.pop(id_, None)
        return [instance for instance in instances if instance.id not in old]

    def terminate(self, ids: Collection[str]) -> None:
        """As the port: SIGTERM now, SIGKILL at a later `instances()` where that did not help.

        Raises:
            ConfigError: docker cannot be used.
            ServiceUnavailableError: the engine does not answer.
        """
        if not ids:
            return
        try:
            own = {instance.id: instance for instance in self._listed() if instance.id in ids}
            running = [id_ for id_, instance in own.items() if instance.state is InstanceState.RUNNING]
            if running:
                self._run_over([self._docker, "kill", "--signal", "SIGTERM"], running)
                for id_ in running:
                    self._sigterm_s[id_] = self._clock()
            never_started = [id_ for id_, instance in own.items() if instance.state is InstanceState.PENDING]
            if never_started:
                self._run_over([self._docker, "rm", "--force"], never_started)
        except DockerError as error:
            raise _unusable(error) from error

    def close(self) -> None:
        pass

    # --- docker -----------------------------------------------------------------------------------------------------

    def _name(self, order: Order) -> str:
        name = f"{self._cluster}-w{order.slot}-i{order.incarnation}-{order.market}-a{order.attempt}"
        return f"{name}-r{order.run}" if order.run else name

    def _start(self, order: Order, name: str) -> None:
        labels = {
            CLUSTER_LABEL: self._cluster,
            WORKER_LABEL: str(order.slot),
            INCARNATION_LABEL: str(order.incarnation),
            MARKET_LABEL: order.market,
            JOB_LABEL: self._job,
        }
        try:
            self._run([
                *self._compose, "run", "--detach", "--no-deps", "--name", name,
                *(word for key, value in labels.items() for word in ("--label", f"{key}={value}")),
                *(word for key, value in identity(order, name).items() for word in ("--env", f"{key}={value}")),
                self._service,
            ])  # fmt: skip
        except DockerError as error:
            if "is already in use" not in error.message:  # the name: another call of the same order was faster
                raise
        log.info("launched", id=name, worker=order.slot, incarnation=order.incarnation, market=order.market)

    def _listed(self) -> list[Instance]:
        """All containers of the cluster, in all states."""
        label = f"label={CLUSTER_LABEL}={self._cluster}"
        completed = self._run([self._docker, "ps", "--all", "--no-trunc", "--filter", label, "--format", "json"])
        return self._inspect([_id_of(line) for line in completed.splitlines() if line.strip()])

    def _inspect(self, names: Sequence[str]) -> list[Instance]:
        """Those of these containers that are there, and are workers of the cluster."""
        if not names:
            return []
        command = [self._docker, "inspect", "--type", "container", *names]
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
        now_s = self._clock()
        for description in raw:
            name, labels, state = (
                description["Name"].lstrip("/"),
                description["Config"].get("Labels") or {},
                description["State"],
            )
            market, worker, incarnation = (
                labels.get(key, "") for key in (MARKET_LABEL, WORKER_LABEL, INCARNATION_LABEL)
            )
            if labels.get(JOB_LABEL, self._job) != self._job:
                continue
            ours = labels.get(CLUSTER_LABEL) == self._cluster
            if not ours or market not in get_args(Market) or not worker.isdecimal() or not incarnation.isdecimal():
                log.warning("invalid_worker_tags", id=name, cluster=self._cluster)
                continue
            instance = Instance(
                id=name, slot=int(worker), incarnation=int(incarnation), market=cast("Market", market), pool=POOL,
                state=_STATES.get(state["Status"], InstanceState.ENDING), launched_s=_unix_s(description["Created"]),
                job=labels.get(JOB_LABEL, ""),
            )  # fmt: skip
            if instance.state is InstanceState.ENDED:
                ended_s = _unix_s(state["FinishedAt"])
                by_us = name in self._sigterm_s or (state["ExitCode"] in _BY_SIGNAL and not state.get("OOMKilled"))
                instance = replace(
                    instance,
                    ended_s=ended_s if ended_s > 0 else now_s,
                    end_reason=EndReason.TERMINATED if by_us else EndReason.FAILED,
                )
            elif name in self._sigterm_s:
                instance = replace(instance, state=InstanceState.ENDING)
            yield instance

    def _is_late(self, id_: str, now_s: float) -> bool:
        return id_ in self._sigterm_s and now_s - self._sigterm_s[id_] > GRACE_S

    def _run_over(self, command: Sequence[str], ids: Sequence[str]) -> None:
        """One command on several containers; some of them may have ended meanwhile."""
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
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=self._timeout_s, check=False,
                env=self._environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise DockerError(command, f"context deadline exceeded: no end within {self._timeout_s:g} s") from error
        except OSError as error:
            raise DockerError(command, f"cannot run {command[0]}: {error}") from error


def connect(config: JobConfig) -> ComposeFleet:
    """The fleet that a job file describes.

    Raises:
        ConfigError: another kind of fleet, or the compose file is not there.
    """
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
    """A time as docker writes it; "0001-01-01T00:00:00Z" (never) is far below 0."""
    at = datetime.fromisoformat(text)
    return at.timestamp() if at.year > 1 else float("-inf")


def _unusable(error: DockerError) -> ConfigError | ServiceUnavailableError:
    return (ConfigError if error.failure is LaunchFailure.CONFIG else ServiceUnavailableError)(str(error))
