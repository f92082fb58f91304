"""The context of one run: its job, folder, display and services, how its roles are started, and its hook."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from doll.config import JobConfig, StdinSource
from doll.ledger.admission import AFTER_TERM_ENV, ENDED_TERM_ENV, RUN_ID_ENV, new_run_id
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
    """Code that runs beside a run, from its first process to its report. This class leaves workers to the supervisor.

    Subclasses override some of the methods. The hook of a spot market also manages the workers.
    """

    standby = False  # whether a second parameter server waits as a standby

    @property
    def advertised_ports(self) -> Sequence[Mapping[str, int]]:
        """Return the ports that each local broker advertises to single roles; see `LocalKafka`."""
        return ({},)

    def services(self, role: str, stack: Stack) -> Services:
        """Return the addresses of Kafka and Redis for a role."""
        return stack.services

    def environment(self, role: str) -> Mapping[str, str]:
        """Return additional environment variables for a role."""
        return {}

    def start_workers(self, run: LocalRun, supervisor: Supervisor) -> None:
        """Start the workers; called when the parameter server is starting."""
        for slot in range(run.config.data.workers):
            supervisor.start(run.worker(slot))

    def workers_ready(self, model: ProgressModel, waited_s: float) -> bool:
        """Return whether the producer may start, `waited_s` seconds after the workers."""
        return waited_s > WORKERS_START_TIMEOUT_S or all(line.is_live or line.is_spare for line in model.worker_lines())

    def pids(self) -> dict[str, int]:
        """Return the process ids of workers that the supervisor does not manage, by name."""
        return {}

    def with_status(self, snapshot: JobSnapshot) -> JobSnapshot:
        """Return the job's snapshot with additions of the hook."""
        return snapshot

    def feed(self, record: AnyRecord) -> None:
        """Process a record of the topics `updates` and `metrics`."""

    def tick(self, supervisor: Supervisor, stack: Stack) -> str | None:
        """Do periodic work, several times a second during learning. Return the reason to end the run now, or None."""
        return None

    def close(self) -> None:
        """End the work of the hook after learning. May be called more than once."""

    def report_fields(self) -> dict[str, Any]:
        """Return fields to add to `report.json`."""
        return {}

    def files(self) -> dict[str, Path]:
        """Return files that the hook has written to the run folder, by description; called when the job has ended."""
        return {}


@dataclass(frozen=True)
class LocalRun:
    """One run whose services answer. Its methods define how each role is started.

    Attributes:
        after_term: terms up to this one belong to earlier runs on the same topics.
        ended_term: terms up to this one have ended before this run, which may continue them.
        run_id: id of this session; a copy of the folder that runs at the same time has another id.
    """

    config: JobConfig
    folder: RunFolder
    display: Display
    interrupts: Interrupts
    hook: RunHook
    forks: ForkServer
    stack: Stack
    after_term: int = 0
    ended_term: int = 0
    run_id: str = field(default_factory=new_run_id)
    _health_ports: dict[str, int] = field(default_factory=dict)

    def parameter_servers(self) -> list[RoleSpec]:
        """Return one parameter server, or two standbys: each takes over only if the other is silent."""
        if self.hook.standby:
            return [self._spec(name, "ps_standby_role") for name in PARAMETER_SERVERS]
        return [self._spec("ps", "ps_role")]

    def shards(self) -> list[RoleSpec]:
        """Return the shards of `ps.shards`; none if the parameter server has the whole model."""
        count = self.config.ps.num_shards if self.config.ps.num_shards > 1 else 0
        return [self._spec(f"shard-{number}", "shard_role", number) for number in range(count)]

    def worker(self, slot: int) -> RoleSpec:
        return self._spec(f"worker-{slot}", "worker_role", slot)

    def stages(self, slot: int) -> list[RoleSpec]:
        """Return the stages of one worker that are processes of their own; none if it starts its stages itself."""
        pipeline = self.config.worker.pipeline
        count = pipeline.stages if pipeline is not None and pipeline.remote else 0
        return [self._spec(f"stage-{slot}-{number}", "stage_role", slot, number) for number in range(count)]

    def instance(self, instance: Instance) -> RoleSpec:
        """Return a worker on a machine of a fleet. Its name has two numbers: two machines of a slot may overlap."""
        return self._spec(f"worker-{instance.slot}.{instance.incarnation}", "worker_role", instance.slot)

    def evaluator(self) -> RoleSpec:
        return self._spec("evaluator", "evaluator_role")

    def provisioner(self, ray_address: str, *, is_own: bool) -> RoleSpec:
        """Return the provisioner of actors on a Ray cluster; `is_own`: whether this run has started the cluster."""
        return self._spec(PROVISIONER, "provisioner_role", ray_address, is_own)

    def producer(self) -> RoleSpec:
        return self._spec("producer", "producer_role")

    def joiners(self) -> list[RoleSpec]:
        """Return the joiners of `data.join`; none if the job has no such section."""
        count = 0 if self.config.data.join is None else self.config.data.join.joiners
        return [self._spec(f"joiner-{number}", "joiner_role", number) for number in range(count)]

    def launch(self, spec: RoleSpec) -> Handle:
        """Fork a role. A producer that reads standard input is started as a separate program."""
        if spec.name == "producer" and isinstance(self.config.source, StdinSource):
            argv = [sys.executable, "-m", "doll", "produce", "--job", str(self.folder.path), "--stdin"]
            return spawn(argv, spec.log_path, spec.env, stdin=sys.stdin.fileno())
        return self.forks.launch(spec)

    def _spec(self, name: str, role: str, *more: int | str) -> RoleSpec:
        services = self.hook.services(name, self.stack)
        args = [str(self.folder.job), services.kafka, services.redis, str(self.folder.path), *more]
        env = {PORT_ENV: str(self._health_port(name)), BLOBS_ENV: services.blobs, CONTROL_ENV: services.control}
        env |= {RUN_ID_ENV: self.run_id, AFTER_TERM_ENV: str(self.after_term), ENDED_TERM_ENV: str(self.ended_term)}
        env |= self.hook.environment(name)
        return RoleSpec(name, f"doll.run.local.roles:{role}", self.folder.logs / f"{name}.log", args, env)

    def _health_port(self, name: str) -> int:
        """Return the port of this role's probes: from `health.base_port`, or a free one. It survives restarts."""
        if name not in self._health_ports:
            process = name.partition(".")[0]  # two machines of a slot have the same assigned port
            self._health_ports[name] = assigned_port(self.config, process) or free_port()
            write_json(self.folder.health, self._health_ports)
        return self._health_ports[name]


def taken_health_ports(config: JobConfig) -> str | None:
    """Return a warning if other programs use ports of `health.base_port`; None if no port is in use."""
    names = ["ps", "evaluator", "producer", *(f"worker-{slot}" for slot in range(config.data.workers))]
    ports = {name: port for name in names if (port := assigned_port(config, name)) is not None}
    taken = ", ".join(f"{port} ({name})" for name, port in ports.items() if not is_free(port))
    return f"health.base_port: taken by another program: {taken}: no probes there" if taken else None
