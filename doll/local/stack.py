"""Find Kafka and Redis for a job, or start them on this machine for the duration of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.clients import kafka_problem
from doll.local import kafka_jars, redis_server, shared_memory
from doll.local.kafka_broker import KafkaCluster, LocalKafka, nodes_with_data
from doll.local.redis_server import LocalRedis
from doll.service_checks import require_services
from doll.services import KAFKA_ENV, REDIS_ENV, Services, kafka_address, redis_address
from doll.storage.redis_client import redis_problem

if TYPE_CHECKING:
    from doll.config import JobConfig

Kind = Literal["given", "environment", "local"]

_REACHABLE_S: Final = 5.0


@dataclass(frozen=True)
class Stack:
    """The services of a run."""

    services: Services  # addresses for all roles
    kafka_kind: Kind  # origin of Kafka: the job file, $DOLL_KAFKA, or a local broker
    redis_kind: Kind  # the same for Redis
    # What was chosen, and why nothing better; each line was passed to `say`.
    notes: list[str] = field(default_factory=list)
    kafka: LocalKafka | KafkaCluster | None = None  # the broker or cluster that this run has started, if any
    redis: LocalRedis | None = None  # the server that this run has started, if any


@contextlib.contextmanager
def local_stack(
    config: JobConfig,
    run_folder: Path,
    say: Callable[[str], None],
    *,
    advertised_ports: Sequence[Mapping[str, int]] = ({},),
) -> Iterator[Stack]:
    """Yield services of the job that answer. The services that it starts are stopped at the exit of the context.

    Kafka is the first one available of: the address in the job file; a local broker on the data of an earlier run in
    `run_folder`; $DOLL_KAFKA if it answers; a local broker (`kafka_jars`). Redis is the first one available of: the
    address in the job file; $DOLL_REDIS if it answers; a local server (`redis_server`).

    Args:
        run_folder: run folder; its folder `services/` gets data and logs of the started services.
        advertised_ports: one mapping for each local broker, as in `LocalKafka`; several start a local cluster.

    Raises:
        ConfigError: an address is malformed; or security is configured without an address; or a requirement of a local
            service is not installed.
        ServiceUnavailableError: an address in the job file does not answer, or a service cannot be started.
    """
    if config.kafka.security != "plaintext" and kafka_address(config) is None:
        raise ConfigError(f"kafka.security is {config.kafka.security}: set kafka.address or {KAFKA_ENV} too")
    with contextlib.ExitStack() as started:
        chooser = _Chooser(config, run_folder / "services", say, started, advertised_ports)
        redis_url, redis_kind, redis = chooser.redis()
        blobs = chooser.blobs(redis_kind)
        address, kafka_kind, kafka = chooser.kafka()
        services = Services(address, redis_url, blobs)
        require_services(config, services, hint="")
        yield Stack(services, kafka_kind, redis_kind, chooser.notes, kafka, redis)


def has_kafka_data(run_folder: Path) -> bool:
    """Return whether this run folder contains the data of an earlier run's local broker."""
    folder = run_folder / "services" / "kafka"
    return (folder / "data" / "meta.properties").is_file() or nodes_with_data(folder) > 0


@dataclass(frozen=True)
class _Chooser:
    """A chooser of the best available Kafka, Redis and blob store. Services that it starts end when `started` is
    closed."""

    config: JobConfig
    folder: Path
    say: Callable[[str], None]
    started: contextlib.ExitStack
    advertised_ports: Sequence[Mapping[str, int]]
    notes: list[str] = field(default_factory=list)

    def blobs(self, redis_kind: Kind) -> str:
        """Return the folder in shared memory for weights and gradients; empty if they go through Redis."""
        kind = self.config.blobs.kind
        # Processes on other machines can use a given Redis, so its blobs must be there; a local Redis is used by local
        # processes only.
        if kind == "redis" or (kind == "auto" and redis_kind in ("given", "environment")):
            return ""
        if (problem := shared_memory.obstacle()) is not None:
            if kind == "shm":
                raise ServiceUnavailableError(
                    f"blobs.kind is shm, and {problem}: free some space, or set blobs.kind: redis"
                )
            self._note(f"blobs: through Redis, because {problem}")
            return ""
        folder = self.started.enter_context(shared_memory.run_folder())
        self._note(f"blobs: {folder}, shared memory")
        return str(folder)

    def redis(self) -> tuple[str, Kind, LocalRedis | None]:
        """Return URL, kind, and the server if this run has started one."""
        reasons_against: list[str] = []
        url = redis_address(self.config)
        if url is not None:
            is_given = bool(self.config.redis.address)
            if (problem := redis_problem(Services("", url))) is None:
                return url, self._found("Redis", url, is_given), None
            if is_given:
                raise ServiceUnavailableError(problem)
            reasons_against.append(f"{REDIS_ENV}={url} does not answer")
        if redis_server.find_executable() is None:
            raise ConfigError(f"no Redis: {'; '.join((*reasons_against, redis_server.MISSING))}")
        server = self.started.enter_context(LocalRedis(self.folder / "redis"))
        self._note(f"Redis: {server.address}, started on this machine", reasons_against)
        return server.address, "local", server

    def kafka(self) -> tuple[str, Kind, LocalKafka | KafkaCluster | None]:
        """Return bootstrap servers, kind, and the broker or cluster if this run has started one."""
        address, is_given = kafka_address(self.config), bool(self.config.kafka.address)
        if address is not None and len(self.advertised_ports) > 1:
            raise ConfigError(
                f"cannot start {len(self.advertised_ports)} brokers, because an address of Kafka is configured: "
                f"unset kafka.address and {KAFKA_ENV}"
            )
        if address is None or (not is_given and has_kafka_data(self.folder.parent)):
            return self._local_broker(())
        if (problem := kafka_problem(self.config, Services(address, ""), _REACHABLE_S)) is None:
            return address, self._found("Kafka", address, is_given), None
        if is_given or self.config.kafka.security != "plaintext" or self.config.data.topic is not None:
            raise ServiceUnavailableError(problem)  # no other Kafka will do
        return self._local_broker([f"{KAFKA_ENV}={address} does not answer"])

    def _local_broker(self, reasons_against: Sequence[str]) -> tuple[str, Kind, LocalKafka | KafkaCluster]:
        if (missing := kafka_jars.unavailable_reason()) is not None:
            raise ConfigError(f"no Kafka: {'; '.join((*reasons_against, missing))}; {kafka_jars.advice()}")
        folder = self.folder / "kafka"
        # The data of several nodes needs as many brokers.
        advertised_ports = (*self.advertised_ports, *({},) * (nodes_with_data(folder) - len(self.advertised_ports)))
        if len(advertised_ports) > 1:
            self.say(f"Kafka: starting {len(advertised_ports)} brokers on this machine (about 15 s)")
            cluster = self.started.enter_context(KafkaCluster(folder, advertised_ports, say=self.say))
            self._note(
                f"Kafka: {cluster.address}, {len(advertised_ports)} brokers started on this machine", reasons_against
            )
            return cluster.address, "local", cluster
        self.say("Kafka: starting a broker on this machine (about 6 s)")
        broker = self.started.enter_context(LocalKafka(folder, say=self.say, advertised_ports=advertised_ports[0]))
        self._note(f"Kafka: {broker.address}, a broker started on this machine", reasons_against)
        return broker.address, "local", broker

    def _found(self, name: str, address: str, is_given: bool) -> Kind:
        self._note(f"{name}: {address}, from the {'job file' if is_given else 'environment'}")
        return "given" if is_given else "environment"

    def _note(self, text: str, reasons_against: Sequence[str] = ()) -> None:
        note = f"{text} (alternatives not available: {'; '.join(reasons_against)})" if reasons_against else text
        self.notes.append(note)
        self.say(note)
