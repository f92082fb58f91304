"""How each role of a local run is started: entry point, arguments, environment, health port, log."""

from __future__ import annotations

import sys
from collections.abc import Callable

from doll.config import JobConfig, StdinSource
from doll.ledger.admission import AFTER_TERM_ENV
from doll.local.forks import ForkServer
from doll.local.processes import free_port, is_free, spawn
from doll.local.stack import Stack
from doll.local.supervisor import Handle, RoleSpec
from doll.process.files import write_json
from doll.process.health import PORT_ENV, assigned_port
from doll.provisioner.fleets.port import Instance
from doll.run.folder import RunFolder
from doll.run.local.hooks import RunHook
from doll.services import BLOBS_ENV, CONTROL_ENV

PARAMETER_SERVERS = ("ps", "ps-standby")


class RoleSpecs:
    """The specs of one run's roles.

    Args:
        after_term: terms up to this one belong to earlier runs on the same topics.
    """

    def __init__(self, config: JobConfig, run: RunFolder, stack: Stack, hook: RunHook, after_term: int) -> None:
        self._config = config
        self._run = run
        self._stack = stack
        self._hook = hook
        self._after_term = after_term
        self._health_ports: dict[str, int] = {}

    def parameter_servers(self) -> list[RoleSpec]:
        """One, or two standbys: each takes over only when the other is silent, also after a restart."""
        if self._hook.standby:
            return [self._spec(name, "ps_standby_role") for name in PARAMETER_SERVERS]
        return [self._spec("ps", "ps_role")]

    def worker(self, slot: int) -> RoleSpec:
        return self._spec(f"worker-{slot}", "worker_role", slot)

    def instance(self, instance: Instance) -> RoleSpec:
        """A worker on a machine of a fleet. Its name has two numbers, since two machines of a slot may overlap."""
        return self._spec(f"worker-{instance.slot}.{instance.incarnation}", "worker_role", instance.slot)

    def evaluator(self) -> RoleSpec:
        return self._spec("evaluator", "evaluator_role")

    def producer(self) -> RoleSpec:
        return self._spec("producer", "producer_role")

    def _spec(self, name: str, role: str, *more: int) -> RoleSpec:
        services = self._hook.services(name, self._stack)
        args = [str(self._run.job), services.kafka, services.redis, str(self._run.path), *more]
        env = {PORT_ENV: str(self._health_port(name)), BLOBS_ENV: services.blobs, CONTROL_ENV: services.control}
        if self._after_term:
            env |= {AFTER_TERM_ENV: str(self._after_term)}
        env |= self._hook.environment(name)
        return RoleSpec(name, f"doll.run.local.roles:{role}", self._run.logs / f"{name}.log", args, env)

    def _health_port(self, name: str) -> int:
        """A port for the probes of this role, the same after a restart: by `health.base_port`, else a free one."""
        if name not in self._health_ports:
            process = name.partition(".")[0]  # two machines of a slot have one name there
            self._health_ports[name] = assigned_port(self._config, process) or free_port()
            write_json(self._run.health, self._health_ports)
        return self._health_ports[name]


def taken_health_ports(config: JobConfig) -> str | None:
    """What to say where other programs hold ports of `health.base_port`; None: nothing."""
    names = ["ps", "evaluator", "producer", *(f"worker-{slot}" for slot in range(config.data.workers))]
    ports = {name: port for name in names if (port := assigned_port(config, name)) is not None}
    taken = ", ".join(f"{port} ({name})" for name, port in ports.items() if not is_free(port))
    return f"health.base_port: taken by another program: {taken}: no probes there" if taken else None


def launcher(config: JobConfig, run: RunFolder, forks: ForkServer) -> Callable[[RoleSpec], Handle]:
    """Starts roles by a fork. A producer that reads our standard input is started as a program of its own."""

    def launch(spec: RoleSpec) -> Handle:
        if spec.name == "producer" and isinstance(config.source, StdinSource):
            argv = [sys.executable, "-m", "doll", "produce", "--job", str(run.path), "--stdin"]
            return spawn(argv, spec.log_path, spec.env, stdin=sys.stdin.fileno())
        return forks.launch(spec)

    return launch
