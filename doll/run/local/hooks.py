"""What can accompany a run: a hook (a drill, a benchmark), or a pool that owns the workers (a spot market)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from doll.local.forks import ForkServer
from doll.local.stack import Stack
from doll.local.supervisor import RoleSpec, Supervisor
from doll.monitor.state.progress import JobSnapshot
from doll.provisioner.fleets.port import Instance
from doll.records.control import AnyRecord
from doll.services import Services


class RunHook(Protocol):
    """Accompanies a run from its first process to its report, as a drill does."""

    standby: bool  # whether a second parameter server waits as a standby

    @property
    def advertised_ports(self) -> Sequence[Mapping[str, int]]:
        """For each local broker, the ports that it advertises to single roles; see `LocalKafka`."""

    def services(self, role: str, stack: Stack) -> Services:
        """The addresses of Kafka and Redis for a role."""

    def environment(self, role: str) -> Mapping[str, str]:
        """Additions to the environment of a role."""

    def feed(self, record: AnyRecord) -> None:
        """A record of the topics `updates` and `metrics`."""

    def tick(self, supervisor: Supervisor, stack: Stack) -> str | None:
        """Called several times a second while the job learns. Returns why the run must end now, or None."""

    def close(self) -> None:
        """The job has stopped learning. May be called more than once."""

    def report_fields(self) -> dict[str, Any]:
        """Fields to add to `report.json`."""


class WorkerPool(RunHook, Protocol):
    """A hook that owns the workers: nothing else starts or ends them."""

    def start_workers(self, forks: ForkServer, stack: Stack, spec: Callable[[Instance], RoleSpec]) -> None:
        """The parameter server is starting: launch the workers, each by its `spec`."""

    @property
    def workers_ready(self) -> bool:
        """Whether the producer may start."""

    def pids(self) -> dict[str, int]:
        """The process ids of the workers by name."""

    def with_status(self, snapshot: JobSnapshot) -> JobSnapshot:
        """The job's snapshot, with the markets of its workers."""

    def files(self) -> dict[str, Path]:
        """The files that the pool has written to the run folder, by description; called when the job has ended."""


class NoHook:
    """A run without a hook."""

    standby = False
    advertised_ports: Sequence[Mapping[str, int]] = ({},)

    def services(self, role: str, stack: Stack) -> Services:
        return stack.services

    def environment(self, role: str) -> Mapping[str, str]:
        return {}

    def feed(self, record: AnyRecord) -> None:
        pass

    def tick(self, supervisor: Supervisor, stack: Stack) -> str | None:
        return None

    def close(self) -> None:
        pass

    def report_fields(self) -> dict[str, Any]:
        return {}
