"""The context of the steps of one run: its job, folder, display and services, how its roles start, and its hook."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from doll.config import JobConfig, StdinSource
from doll.ledger.admission import AFTER_TERM_ENV, RUN_ID_ENV, new_run_id
from doll.local.forks import ForkServer
from doll.local.processes import free_port, is_free, spawn
from doll.local.stack import Stack
from doll.local.supervisor import Handle, RoleSpec, Supervisor
from doll.monitor.state.progress import JobSnapshot, ProgressModel
from doll.monitor.views.display import Display
from doll.process.files import write_json
from doll.process.health import PORT_ENV, assigned_port
from doll.process.signals import Interrupts
from doll.provisioner.fleets.port import Instance
from doll.records.control import AnyRecord
from doll.run.folder import RunFolder
from doll.services import BLOBS_ENV, CONTROL_ENV, Services

PARAMETER_SERVERS: Final = ("ps", "ps-standby")
PROVISIONER: Final = "provisioner"
WORKERS_START_TIMEOUT_S: Final = 20.0


class RunHook:
    """Accompanies a run from its first process to its report. This one changes nothing: the supervisor has the workers.

    A drill and a benchmark override what they need; a spot market owns the workers.
    """

    standby = False  # whether a second parameter server waits as a standby

    @property
    def advertised_ports(self) -> Sequence[Mapping[str, int]]:
        """The ports that each local broker advertises to single roles; see `LocalKafka`."""
        return ({},)

    def services(self, role: str, stack: Stack) -> Services:
        """The addresses of Kafka and Redis for a role."""
        return stack.services

    def environment(self, role: str) -> Mapping[str, str]:
        """Additions to the environment of a role."""
        return {}

    def start_workers(self, run: LocalRun, supervisor: Supervisor) -> None:
        """The parameter server is starting: start the workers."""
        for slot in range(run.config.data.workers):
            supervisor.start(run.worker(slot))

    def workers_ready(self, model: ProgressModel, waited_s: float) -> bool:
        """Whether the producer may start, `waited_s` after the workers."""
        return waited_s > WORKERS_START_TIMEOUT_S or all(line.is_live or line.is_spare for line in model.worker_lines())

    def pids(self) -> dict[str, int]:
        """The process ids, by name, of workers that the supervisor does not have."""
        return {}

    def with_status(self, snapshot: JobSnapshot) -> JobSnapshot:
        """The job's snapshot, with what the hook adds to it."""
        return snapshot

    def feed(self, record: AnyRecord) -> None:
        """A record of the topics `updates` and `metrics`."""

    def tick(self, supervisor: Supervisor, stack: Stack) -> str | None:
        """Called several times a second while the job learns. Returns why the run must end now, or None."""
        return None

    def close(self) -> None:
        """The job has stopped learning. May be called more than once."""

    def report_fields(self) -> dict[str, Any]:
        """Fields to add to `report.json`."""
        return {}

    def files(self) -> dict[str, Path]:
        """Files that the hook has written to the run folder, by description; called when the job has ended."""
        return {}


@dataclass(frozen=True)
class LocalRun:
    """One run whose services answer; its methods say how each role is started.

    Attributes:
        after_term: terms up to this one belong to earlier runs on the same topics.
        run_id: of this session: a copy of the folder that runs at the same time has another one.
    """

    config: JobConfig
    folder: RunFolder
    display: Display
    interrupts: Interrupts
    hook: RunHook
    forks: ForkServer
    stack: Stack
    after_term: int = 0
    run_id: str = field(default_factory=new_run_id)
    _health_ports: dict[str, int] = field(default_factory=dict)

    def parameter_servers(self) -> list[RoleSpec]:
        """One, or two standbys: each takes over only when the other is silent, also after a restart."""
        if self.hook.standby:
            return [self._spec(name, "ps_standby_role") for name in PARAMETER_SERVERS]
        return [self._spec("ps", "ps_role")]

    def worker(self, slot: int) -> RoleSpec:
        return self._spec(f"worker-{slot}", "worker_role", slot)

    def instance(self, instance: Instance) -> RoleSpec:
        """A worker on a machine of a fleet. Its name has two numbers, since two machines of a slot may overlap."""
        return self._spec(f"worker-{instance.slot}.{instance.incarnation}", "worker_role", instance.slot)

    def evaluator(self) -> RoleSpec:
        return self._spec("evaluator", "evaluator_role")

    def provisioner(self, ray_address: str, *, is_own: bool) -> RoleSpec:
        """The provisioner of actors on a Ray cluster; `is_own`: this run has started the cluster."""
        return self._spec(PROVISIONER, "provisioner_role", ray_address, is_own)

    def producer(self) -> RoleSpec:
        return self._spec("producer", "producer_role")

    def launch(self, spec: RoleSpec) -> Handle:
        """Fork a role. A producer that reads our standard input is started as a program of its own."""
        if spec.name == "producer" and isinstance(self.config.source, StdinSource):
            argv = [sys.executable, "-m", "doll", "produce", "--job", str(self.folder.path), "--stdin"]
            return spawn(argv, spec.log_path, spec.env, stdin=sys.stdin.fileno())
        return self.forks.launch(spec)

    def _spec(self, name: str, role: str, *more: int | str) -> RoleSpec:
        services = self.hook.services(name, self.stack)
        args = [str(self.folder.job), services.kafka, services.redis, str(self.folder.path), *more]
        env = {PORT_ENV: str(self._health_port(name)), BLOBS_ENV: services.blobs, CONTROL_ENV: services.control}
        env |= {RUN_ID_ENV: self.run_id, AFTER_TERM_ENV: str(self.after_term)}
        env |= self.hook.environment(name)
        return RoleSpec(name, f"doll.run.local.roles:{role}", self.folder.logs / f"{name}.log", args, env)

    def _health_port(self, name: str) -> int:
        """A port for the probes of this role, the same after a restart: by `health.base_port`, else a free one."""
        if name not in self._health_ports:
            process = name.partition(".")[0]  # two machines of a slot have one name there
            self._health_ports[name] = assigned_port(self.config, process) or free_port()
            write_json(self.folder.health, self._health_ports)
        return self._health_ports[name]


def taken_health_ports(config: JobConfig) -> str | None:
    """A warning if other programs hold ports of `health.base_port`; None if none does."""
    names = ["ps", "evaluator", "producer", *(f"worker-{slot}" for slot in range(config.data.workers))]
    ports = {name: port for name in names if (port := assigned_port(config, name)) is not None}
    taken = ", ".join(f"{port} ({name})" for name, port in ports.items() if not is_free(port))
    return f"health.base_port: taken by another program: {taken}: no probes there" if taken else None
