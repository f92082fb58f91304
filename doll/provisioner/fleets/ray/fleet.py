"""`Fleet` of actors on a Ray cluster: Ray places them, watches their nodes and collects their logs.

An actor's identity is in its labels, and its name is derived from the order. So no state is stored outside Ray's table.
Ray never restarts an actor, because the provisioner decides on replacement. The drain of a node is an interruption
notice for the workers on it. An actor that does not end in time is killed. An actor that no provisioner has listed for
an hour ends itself.

The provisioner must run on a node of the cluster, because Ray's client connection gives no access to the tables. The
tables are read with the calls of Ray's own libraries (`ray._private.state`), because no public call returns labels and
draining nodes without the dashboard. The contract tests of fleets use a real cluster, and fail if these calls change.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, TypeVar

from doll import telemetry
from doll.config import JobConfig, RayFleetConfig
from doll.config.loader import dump
from doll.errors import ConfigError, ServiceUnavailableError
from doll.extras import lacking
from doll.provisioner.fleets.orders import LaunchGate, identity, order_name
from doll.provisioner.fleets.port import Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.fleets.ray import actors
from doll.provisioner.fleets.ray.host import KV_NAMESPACE, WorkerHost
from doll.records.bounded import short

log = telemetry.get_logger(__name__)
T = TypeVar("T")

NAMESPACE: Final = "doll"
ENDED_KEPT_S: Final = 3600.0
GRACE_S: Final = 5.0  # after the worker's own time to drain
KILL_AFTER_S: Final = 10.0  # after that; a stuck actor does not receive the request to end
RENEW_S: Final = 60.0  # for the signal that a provisioner runs
HEAD_AWAY_ENV: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
HEAD_AWAY_S: Final = 24 * 3600
"""Ray ends a process that has not reached the head of the cluster for a minute, unless a longer time is set. A
provisioner continues without the head, as it does if another owner of machines does not answer."""


class RayError(Exception):
    """Ray refused a call, or did not answer."""


class RayApi:
    """The calls of Ray that the fleet needs. Each call ends within `timeout_s`. `host_arguments` are the arguments of
    `WorkerHost` except the worker's identity. `options` are the options of each actor except name, labels and
    placement."""

    def __init__(self, host_arguments: Sequence[Any], options: Mapping[str, Any], timeout_s: float) -> None:
        import ray
        from ray._private.state import state

        self._ray: Any = ray
        self._state: Any = state
        self._host: Any = ray.remote(max_restarts=0)(WorkerHost)
        self._arguments = tuple(host_arguments)
        self._options = dict(options)
        self._timeout_s = timeout_s
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="ray")

    def create(
        self, name: str, identity: Mapping[str, str], labels: Mapping[str, str], placement: Mapping[str, str]
    ) -> None:
        """Create an actor. If an actor with this name already exists, no error is raised."""

        def call() -> None:
            options = {
                "name": name, "namespace": NAMESPACE, "lifetime": "detached", "_labels": dict(labels),
                "label_selector": dict(placement), "scheduling_strategy": "SPREAD", **self._options,
            }  # fmt: skip
            try:
                self._host.options(**options).remote(*self._arguments, dict(identity))
            except self._ray.exceptions.ActorAlreadyExistsError:
                log.info("actor_exists", id=name)  # another call of the same order was faster

        self._call(f"create actor {name}", call)

    def actors_of(self, cluster: str) -> list[actors.Actor]:
        """Return all actors of a cluster, including dead ones."""
        label = actors.LABELS.cluster
        return self._call("list actors", lambda: [row for row in self._rows() if row.labels.get(label) == cluster])

    def draining(self) -> dict[str, float]:
        """Return the deadlines of the nodes that are being drained, Unix seconds; 0: no deadline."""
        deadlines = self._call("list draining nodes", self._state.get_draining_nodes)
        return {node: deadline_ms / 1000 for node, deadline_ms in deadlines.items()}

    def end(self, name: str, grace_s: float) -> None:
        """Have the actor's worker drain and end. An actor that does not exist causes no error."""
        self._call(f"end actor {name}", lambda: self._with_actor(name, lambda actor: actor.end.remote(grace_s)))

    def kill(self, name: str) -> None:
        """End an actor at once, also an actor that has no node yet."""
        self._call(f"kill actor {name}", lambda: self._with_actor(name, self._ray.kill))

    def renew(self, key: str) -> None:
        """Signal to the actors with this key that a provisioner runs."""
        from ray.experimental.internal_kv import _internal_kv_put

        self._call(f"renew {key}", lambda: _internal_kv_put(key, str(time.time_ns()), namespace=KV_NAMESPACE))

    def close(self) -> None:
        self._caller.shutdown(wait=False)
        self._ray.shutdown()

    def _with_actor(self, name: str, do: Callable[[Any], Any]) -> None:
        try:
            actor = self._ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # there is no actor of this name
            return
        do(actor)

    def _rows(self) -> list[actors.Actor]:
        from ray.core.generated import gcs_pb2

        accessor = self._state._connect_and_get_accessor()
        rows = (gcs_pb2.ActorTableData.FromString(each) for each in accessor.get_actor_table(None, None))
        return [_actor(row) for row in rows if row.ray_namespace == NAMESPACE]

    def _call(self, what: str, call: Callable[[], T]) -> T:
        future = self._caller.submit(call)
        try:
            return future.result(self._timeout_s)
        except FutureTimeoutError as error:
            future.cancel()  # calls that wait behind an unanswered call are not made when the head returns
            raise RayError(f"{what}: Ray does not answer within {self._timeout_s:g} s") from error
        except (self._ray.exceptions.RayError, RuntimeError, OSError) as error:
            raise RayError(f"{what}: {short(error)}") from error


@dataclass(eq=False, repr=False)
class RayFleet:
    """The actors that have the labels of the cluster and of the job. Actors of another job are not touched. Actors of
    an earlier release have no job label, and count as actors of the job.

    `drain_s` is a worker's time from SIGTERM to its end. `clock` returns Unix seconds of the clock of Ray's nodes.
    """

    api: RayApi
    _: KW_ONLY
    cluster: str
    job: str = ""
    settings: RayFleetConfig
    drain_s: float
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._known: dict[str, Instance] = {}
        self._asked_s: dict[str, float] = {}  # when the provisioner has asked for its end
        self._told: set[str] = set()  # names of actors that know that their node will be taken
        self._made: set[str] = set()  # created by this process, and not yet listed as ended
        self._renewed_s = float("-inf")
        self._gate = LaunchGate(
            actors.POOL, "expected nodes with this version of doll-online and the job's packages: correct the nodes' "
            "image or fleet.runtime_env", self.clock,
        )  # fmt: skip

    def launch(self, order: Order) -> Instance:
        name = order_name(order, self.cluster)
        try:
            if (instance := self._listed().get(name)) is None:
                self._gate.check(order, name)
                self._made.add(name)
                placement = self.settings.spot if order.market == "spot" else self.settings.on_demand
                labels = actors.labels_of(order, self.cluster, self.job, self.clock())
                self.api.create(name, identity(order, name), labels, placement)
                log.info("launched", id=name, worker=order.slot, incarnation=order.incarnation, market=order.market)
                instance = self._listed().get(name)
        except RayError as error:
            raise LaunchError(f"{name}: {error}", failure=LaunchFailure.THROTTLED, code="Unavailable") from error
        if instance is None:
            raise LaunchError(
                f"{name}: an actor of this name is there, which is no worker of cluster {self.cluster}: end it, or "
                "choose another fleet.cluster",
                failure=LaunchFailure.CONFIG,
            )
        return instance

    def instances(self) -> Sequence[Instance]:
        """Return the instances. Actors that no node accepts are ended, and workers on a drained node are told to
        leave."""
        try:
            self._listed()
            now_s = self.clock()
            if now_s - self._renewed_s >= RENEW_S:
                self.api.renew(lease_key(self.cluster, self.job))
                self._renewed_s = now_s
            for id_, instance in list(self._known.items()):
                if instance.is_alive and instance.notice_s is not None and id_ not in self._told:
                    self._told.add(id_)
                    self.api.end(id_, max(0.0, min(self.drain_s, instance.notice_s - now_s)))
        except RayError as error:
            raise ServiceUnavailableError(str(error)) from error
        return [each for each in self._known.values() if each.ended_s is None or now_s - each.ended_s <= ENDED_KEPT_S]

    def terminate(self, ids: Collection[str]) -> None:
        """Send SIGTERM to each worker, which then has time to drain; a later `instances()` kills it if it still
        runs."""
        if not ids:
            return
        try:
            for id_, instance in self._listed().items():
                if id_ in ids and instance.is_alive:
                    self._asked_s[id_] = self.clock()
                    if instance.state is InstanceState.RUNNING:
                        self.api.end(id_, self.drain_s)
                    else:
                        self.api.kill(id_)
            self._listed()
        except RayError as error:
            raise ServiceUnavailableError(str(error)) from error

    def close(self) -> None:
        self.api.close()

    def _listed(self) -> dict[str, Instance]:
        """Return all instances of the cluster by name, as they are in Ray's table now."""
        now_s = self.clock()
        own = (self.job, None)
        rows = [row for row in self.api.actors_of(self.cluster) if row.labels.get(actors.LABELS.job) in own]
        draining = self.api.draining()
        for actor in rows:
            known = self._known.get(actor.name)
            instance = actors.instance_of(actor, known, draining, actor.name in self._asked_s, now_s)
            if instance is None:
                log.warning("invalid_worker_tags", id=actor.name, cluster=self.cluster)
                continue
            self._known[actor.name] = instance
            if instance.state is InstanceState.RUNNING:
                self._gate.started()
            if instance.state is InstanceState.ENDED:
                if actor.name in self._made and instance.trouble:
                    self._gate.start_failed(instance.trouble)
                self._made.discard(actor.name)
                self._asked_s.pop(actor.name, None)
            elif now_s - self._asked_s.get(actor.name, now_s) > self.drain_s + KILL_AFTER_S:
                log.warning("killed", id=actor.name, action="it has not ended since it was asked to")
                self.api.kill(actor.name)
        for id_ in self._known.keys() - {row.name for row in rows}:
            if self._known[id_].ended_s is None:  # the head has restarted without its table: its actors are gone
                del self._known[id_]
                self._asked_s.pop(id_, None)
        self._give_back(rows, now_s)
        return self._known

    def _give_back(self, rows: Sequence[actors.Actor], now_s: float) -> None:
        """End the actors that have waited too long for a node. Their market then counts as without capacity."""
        for actor in rows:
            instance = self._known.get(actor.name)
            if instance is None or instance.state is not InstanceState.PENDING or actor.started:
                continue
            if now_s - instance.launched_s < self.settings.node_timeout_s:
                continue
            placement = self.settings.spot if instance.market == "spot" else self.settings.on_demand
            wanted = ", ".join(f"{key}={value}" for key, value in placement.items())
            why = f"no node with {wanted} has {self.settings.num_cpus:g} CPUs free"
            self._asked_s[actor.name] = now_s
            self.api.kill(actor.name)
            self._gate.found_no_node(instance.market, why)
            log.warning("no_node", id=actor.name, market=instance.market, why=why)


def connect(config: JobConfig) -> RayFleet:
    """Return the fleet of a job file, on the cluster of this machine.

    Raises:
        ConfigError: the fleet is of another kind, the package ray is missing, or the cluster has another version.
        ServiceUnavailableError: the cluster does not answer. The head node may return soon, so a restart may succeed.
    """
    settings = config.fleet
    if not isinstance(settings, RayFleetConfig):
        raise ConfigError(f"fleet.kind: expected ray, got {settings.kind}")
    os.environ.setdefault(HEAD_AWAY_ENV, str(HEAD_AWAY_S))  # before ray reads it
    try:
        import ray
    except ImportError as error:
        raise lacking("fleet.kind: ray", "ray") from error
    runtime_env = dict(settings.runtime_env)
    if settings.working_dir is not None:
        folder = config.path(settings.working_dir)
        if not folder.is_dir():
            raise ConfigError(f"fleet.working_dir: expected a folder, got {folder}")
        runtime_env["working_dir"] = str(folder)
    _check_address(settings.address, settings.timeout_s)
    try:
        with _own_sigterm():
            ray.init(
                settings.address,
                namespace=NAMESPACE,
                runtime_env=runtime_env,
                log_to_driver=False,
                ignore_reinit_error=True,
            )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if (other := _other_version(str(error))) is not None:
            raise ConfigError(f"fleet.address: {settings.address}: {other}") from error
        raise ServiceUnavailableError(
            f"fleet.address: expected a Ray cluster of this machine at {settings.address}: {short(error)}; start one "
            "with `ray start --head`, or run this on a node of the cluster, e.g. by `ray job submit`"
        ) from error
    lease = lease_key(config.cluster, config.job)
    base_folder = None if settings.working_dir is not None else str(config.base_folder.resolve())
    options: dict[str, Any] = {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus}
    if settings.memory_bytes is not None:
        options["memory"] = settings.memory_bytes
    arguments = (settings.command, dump(config), base_folder, settings.env, lease)
    return RayFleet(
        RayApi(arguments, options, settings.timeout_s), cluster=config.cluster, job=config.job, settings=settings,
        drain_s=config.worker.drain_s + GRACE_S,
    )  # fmt: skip


def lease_key(cluster: str, job: str) -> str:
    """Return the key with which the job's provisioner signals to its actors that it runs."""
    return f"doll-provisioner/{cluster}/{job}"


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, because Ray's handler would end the provisioner within a turn."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _other_version(text: str) -> str | None:
    """Return the remedy if Ray refuses a cluster because of its versions, which must be exactly the same."""
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if len(versions) != 2:
        return None
    there, here = (f"Python {python} and Ray {ray}" for ray, python in versions)
    return (
        f"the cluster has {there}, this machine {here}: expected the same; start this with the cluster's Python and "
        "`pip install ray==` its version, or the cluster with this Python"
    )


def _check_address(address: str, timeout_s: float) -> None:
    """Raise ServiceUnavailableError if no process listens at the address; Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except (OSError, OverflowError) as error:
        raise ServiceUnavailableError(
            f"fleet.address: expected the head of a Ray cluster at {address}: {short(error)}; `ray status` on a node "
            "of the cluster shows its address"
        ) from error


def _actor(row: Any) -> actors.Actor:
    """Convert a row of Ray's table of actors."""
    state = row.DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number[row.state].name
    cause, detail = _death(row) if state == "DEAD" else ("", "")
    return actors.Actor(
        name=row.name, labels=dict(row.labels), state=state, node=row.address.node_id.hex(), started=row.pid != 0,
        start_s=row.start_time / 1000 if row.start_time else None,
        end_s=row.end_time / 1000 if row.end_time else None, cause=cause, detail=detail,
    )  # fmt: skip


def _death(row: Any) -> tuple[actors.Cause, str]:
    """Return the cause of an actor's death, and Ray's message on it."""
    kind = row.death_cause.WhichOneof("context")
    if kind == "creation_task_failure_context":
        return "start", _last_line(row.death_cause.creation_task_failure_context.formatted_exception_string)
    if kind == "runtime_env_failed_context":
        return "start", _last_line(row.death_cause.runtime_env_failed_context.error_message)
    if kind != "actor_died_error_context":
        return "failed", kind or ""
    died = row.death_cause.actor_died_error_context
    reasons = died.DESCRIPTOR.fields_by_name["reason"].enum_type.values_by_number
    reason = reasons[died.reason].name
    if row.preempted:
        return "preempted", short(died.error_message)
    if reason == "RAY_KILL":
        return "killed", ""
    if reason == "NODE_DIED":
        return "node", short(died.error_message)
    return ("exited" if "INTENDED_USER_EXIT" in died.error_message else "failed"), short(died.error_message)


def _last_line(text: str) -> str:
    """Return the last line of a traceback, which contains the error."""
    return short(next((line for line in reversed(text.splitlines()) if line.strip()), ""))
