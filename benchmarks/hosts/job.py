"""One job whose roles are on hosts of their own: started, watched while its network changes, stopped, audited."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from doll import config as jobfile
from doll.config import JobConfig
from doll.kafka import topics
from doll.kafka.reader import Partition, Reader, from_end
from doll.ledger.audit import audit
from doll.ledger.balance import LedgerReport
from doll.local.forks import ForkServer
from doll.local.kafka_broker import LocalKafka
from doll.local.redis_server import LocalRedis
from doll.local.supervisor import Restart, RoleSpec, Supervisor
from doll.records.control import Update
from doll.services import Services
from doll.storage.stores import open_store

from benchmarks.harness import image_records, job
from benchmarks.hosts.network import Network
from benchmarks.intake import fill_topic

OPERATOR: Final = "operator"  # the host of this process, which no cut reaches
SERVICES: Final = ("kafka", "redis")
_POOL_RECORDS: Final = 4096
_POLL_S: Final = 0.1
_ROLES: Final = "doll.run.local.roles"
_STOPS: Final = ("worker-*", "stage-*", "server")
_ON_HOST: Final = "benchmarks.hosts.network:role_on_host"


def host_names(workers: int, stages: int = 0) -> tuple[str, ...]:
    """A host for each role and service, and one for whoever looks on."""
    numbers = range(workers)
    apart = (f"stage-{number}-{stage}" for number in numbers for stage in range(stages))
    return (OPERATOR, *SERVICES, "server", *(f"worker-{number}" for number in numbers), *apart)


def paced_job(name: str, policy: Mapping[str, Any], *, workers: int, batch_s: float, **sections: Any) -> JobConfig:
    """A job with nothing local to one host: its grants, weights and gradients go through Redis."""
    batch_size = 64
    return job(
        name, task="benchmarks.hosts.task:PacedImages", args={"batch_s": batch_s, "batch_size": batch_size},
        data={"workers": workers, "batch_size": batch_size}, training={"policy": dict(policy)},
        blobs={"kind": "redis", **sections.pop("blobs", {})}, control={"kind": "redis"},
        evaluation={"enabled": False}, **sections,
    )  # fmt: skip


class Site:
    """Kafka and Redis on hosts of their own, and the process that roles are forked from. A context manager.

    This thread moves to the operator's host, and stays there.
    """

    def __init__(self, network: Network, folder: Path, say: Callable[[str], None]) -> None:
        self.network, self.folder = network, folder
        self._say = say
        self._open = ExitStack()
        self.forks: ForkServer
        self.services: Services

    def __enter__(self) -> Self:
        try:
            self.forks = self._open.enter_context(ForkServer(self.folder / "forkserver.log"))
            self.forks.start()
            self.network.enter(OPERATOR)
            redis = LocalRedis(self.folder / "redis", host=self.network.host("redis"))
            kafka = LocalKafka(self.folder / "kafka", say=self._say, host=self.network.host("kafka"))
            for server in (redis, kafka):
                self._open.enter_context(server)
            self.services = Services(kafka.address, redis.address)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def fill(self, config: JobConfig, samples: int) -> None:
        """Write so many samples to each partition of the job's stream."""
        topics.ensure(config, self.services)
        fill_topic(config, self.services, image_records(_POOL_RECORDS), samples)


class RunningJob:
    """The roles of one job, restarted where they fail. A context manager; call `follow` or `tick` often.

    Attributes:
        updates: that have come, with the time of this process's clock.
        restarts: of roles.
    """

    def __init__(self, site: Site, config: JobConfig, targets: Mapping[str, str] | None = None) -> None:
        """`targets`: entry points in place of `ps_role` and `worker_role`; a benchmark's log what happens in them."""
        self.site, self.config = site, config
        self.folder = site.folder / config.job
        self.updates: list[tuple[float, Update]] = []
        self.restarts: list[Restart] = []
        self._targets = {"ps": f"{_ROLES}:ps_role", "worker": f"{_ROLES}:worker_role", **(targets or {})}
        self.supervisor = Supervisor(site.forks.launch, on_restart=self.restarts.append)
        self._open = ExitStack()
        self._tail: Reader

    def __enter__(self) -> Self:
        self.folder.mkdir()
        path = self.folder / "job.yaml"
        path.write_text(jobfile.dump(self.config), encoding="utf-8")
        topic = Partition(self.config.topic("updates"))
        self._tail = self._open.enter_context(Reader(self.config, self.site.services, "hosts", [topic], from_end))
        self._open.callback(self.supervisor.stop, _STOPS)
        services = self.site.services
        arguments = [str(path), services.kafka, services.redis, str(self.folder)]
        try:
            self._start("server", self._targets["ps"], arguments)
            for number in range(self.config.data.workers):
                self._start(f"worker-{number}", self._targets["worker"], [*arguments, number])
                self._start_stages(number, arguments)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def _start_stages(self, worker: int, arguments: Sequence[Any]) -> None:
        """The stages of a worker, each on the host of its name, if they are processes of their own."""
        pipeline = self.config.worker.pipeline
        for stage in range(pipeline.stages if pipeline is not None and pipeline.remote else 0):
            host = f"stage-{worker}-{stage}"
            listen = f"{self.site.network.address(host)}:0"
            self._start(host, f"{_ROLES}:stage_role", [*arguments, worker, stage, listen])

    def _start(self, host: str, target: str, arguments: Sequence[Any]) -> None:
        log_path = self.folder / "logs" / f"{host}.log"
        placed = [self.site.network.namespace(host), target, *arguments]
        self.supervisor.start(RoleSpec(host, _ON_HOST, log_path, placed))

    def tick(self) -> None:
        """Read what has come, restart what has failed.

        Raises:
            RoleFailedError: a role keeps failing; the message ends with its log.
        """
        for entry in self._tail.poll(_POLL_S):
            if isinstance(entry.record, Update):
                self.updates.append((time.monotonic(), entry.record))
        self.supervisor.poll()

    def follow(self, seconds: float) -> None:
        """`tick` for so long."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.tick()

    def wait_for_updates(self, count: int, timeout_s: float = 120.0) -> float:
        """Until so many more updates have come; how many seconds the first one took.

        Raises:
            TimeoutError: they did not come.
        """
        begun_s, before = time.monotonic(), len(self.updates)
        while len(self.updates) < before + count:
            if time.monotonic() - begun_s > timeout_s:
                raise TimeoutError(f"{len(self.updates) - before} of {count} updates within {timeout_s:g} s")
            self.tick()
        return self.updates[before][0] - begun_s

    def rate(self, seconds: float, settle_updates: int = 3) -> float:
        """Samples per second in the model, from an update to one that comes at least so many seconds later."""
        self.wait_for_updates(settle_updates)
        first_s, first = self.updates[-1]
        while self.updates[-1][0] < first_s + seconds:
            self.wait_for_updates(1)
        last_s, last = self.updates[-1]
        return (last.samples_total - first.samples_total) / (last_s - first_s)

    def stop(self) -> LedgerReport:
        """End the roles, workers first, and audit what is durable."""
        self.supervisor.stop(_STOPS, grace_s=30.0)
        return audit(self.config, self.site.services, open_store(self.config, self.folder))
