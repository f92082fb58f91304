"""The six topics of a job: created with the right partitions and retention, and checked before anything runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka import topic_settings
from doll.kafka.acls import allow_producer
from doll.kafka.clients import RECORD_LIMIT_BYTES, kafka_settings
from doll.services import Services
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient

    from doll.config import JobConfig

log = get_logger(__name__)

T = TypeVar("T")
TopicKind = Literal["samples", "commands", "events", "updates", "metrics", "dead"]
TOPIC_KINDS: Final[tuple[TopicKind, ...]] = get_args(TopicKind)

_TIMEOUT_S: Final = 15.0
_NEW_TOPIC_S: Final = 10.0
# UNKNOWN_TOPIC_OR_PART, LEADER_NOT_AVAILABLE, NOT_LEADER_FOR_PARTITION: a topic in the making (all seen).
_TRANSIENT_ERRORS: Final = (3, 5, 6)
_HOUR_MS: Final = 3_600_000
_CONTROL_RETENTION_MS: Final = 6 * _HOUR_MS
_KEEP_FOREVER_MS: Final = -1
_MIN_ISR_SETTING: Final = "min.insync.replicas"
_ZERO_TOPIC_ID: Final = "AAAAAAAAAAAAAAAAAAAAAA"  # base64 of 16 bytes of zero
_MIN_SAMPLE_LIMIT_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True)
class TopicInfo:
    """One topic as the broker has it.

    Attributes:
        low: first offset still kept, for each partition.
        high: offset of the next record, for each partition.
    """

    name: str
    partitions: int
    low: tuple[int, ...]
    high: tuple[int, ...]


@dataclass(frozen=True)
class TopicPlan:
    """One topic as the job needs it."""

    name: str
    partitions: int
    settings: dict[str, str]


def plan(config: JobConfig) -> list[TopicPlan]:
    """The job's topics, in the order of `TOPIC_KINDS`. Pure."""
    # An oversized record must be able to arrive, or nobody could dead-letter it.
    sample_limit_bytes = str(max(2 * config.data.max_record_bytes, _MIN_SAMPLE_LIMIT_BYTES))
    samples = {
        "retention.ms": str(int(config.data.retention_hours * _HOUR_MS)),
        "max.message.bytes": sample_limit_bytes,
    }
    control = {"retention.ms": str(_CONTROL_RETENTION_MS)}
    # By size too: a broker may have a limit of its own for topics that do not say.
    forever = {"retention.ms": str(_KEEP_FOREVER_MS), "retention.bytes": str(_KEEP_FOREVER_MS)}
    # What is acknowledged outlives any one broker, and the loss of one stops nobody.
    in_sync = {"cleanup.policy": "delete", _MIN_ISR_SETTING: str(max(1, config.kafka.replication_factor - 1))}
    # Kafka's own limit of 1 MB is too low for a Push or an Update that names many refused records.
    long = {"max.message.bytes": str(RECORD_LIMIT_BYTES)}
    settings: dict[TopicKind, dict[str, str]] = {
        "samples": samples,
        "commands": control,
        "events": control | long,
        "updates": forever | long,
        "metrics": control,
        "dead": forever | {"max.message.bytes": sample_limit_bytes},
    }
    return [
        TopicPlan(
            config.topic(kind), config.data.workers if kind in ("samples", "commands") else 1, settings[kind] | in_sync
        )
        for kind in TOPIC_KINDS
    ]


def ensure(config: JobConfig, services: Services) -> list[str]:
    """Create the topics that are missing, wait until they can be written, check the others, and allow the external
    producers' user to write samples. It may be repeated.

    Returns:
        What is unwise about the topics, a sentence each; it is logged too.

    Raises:
        ConfigError: a topic has another number of partitions, or settings that the job cannot live with; the
            replication factor is above the number of brokers;
            `kafka.producer_user` is set and Kafka has no authorizer.
        ServiceUnavailableError: Kafka does not answer, or refuses.
    """
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import NewTopic

    admin = _admin(config, services)
    existing = _partition_counts(admin, services)
    _refuse_mismatch(config, existing)  # before anything is made that would have to be deleted again
    missing = [topic for topic in plan(config) if topic.name not in existing]
    if missing:
        requests = {
            topic.name: NewTopic(
                topic.name,
                num_partitions=topic.partitions,
                replication_factor=config.kafka.replication_factor,
                config=topic.settings,
            )
            for topic in missing
        }

        def create(wanted: list[NewTopic]) -> Any:
            return admin.create_topics(wanted, operation_timeout=_TIMEOUT_S, request_timeout=_TIMEOUT_S)

        for name, future in create(list(requests.values())).items():
            try:
                try:
                    future.result()
                except KafkaException as exc:
                    if exc.args[0].code() not in (KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION):
                        raise
                    # Some services set it themselves, and let nobody say it.
                    del requests[name].config[_MIN_ISR_SETTING]
                    create([requests[name]])[name].result()
            except KafkaException as exc:
                error = exc.args[0]
                if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                    continue  # another process of the job was faster
                if error.code() == KafkaError.INVALID_REPLICATION_FACTOR:
                    raise ConfigError(
                        f"kafka.replication_factor is {config.kafka.replication_factor}: Kafka at {services.kafka} has "
                        f"fewer brokers ({error.str()})"
                    ) from exc
                raise ServiceUnavailableError(
                    f"Kafka at {services.kafka} does not create topic {name}: {error.str()}; create it by hand, "
                    "or allow this user to"
                ) from exc
    _await_leaders(admin, config, services)
    check(config, services)
    allow_producer(admin, config, services.kafka)
    return _check_settings(admin, config, services)


def _check_settings(admin: AdminClient, config: JobConfig, services: Services) -> list[str]:
    """What is unwise about the topics, a sentence each.

    Raises:
        ConfigError: they have settings that the job cannot live with.
    """
    wanted = {topic.name: (kind, topic) for kind, topic in zip(TOPIC_KINDS, plan(config), strict=True)}
    metadata = _metadata(admin, services)
    if not _has_controller(metadata):
        return []
    there = {name: topic for name, topic in metadata.topics.items() if name in wanted}
    findings = [
        finding
        for name, found in topic_settings.fetch(admin, there, _TIMEOUT_S).items()
        for finding in topic_settings.find_problems(
            wanted[name][1], wanted[name][0], found, config.kafka.replication_factor
        )
    ]
    if fatal := [finding.text for finding in findings if finding.fatal]:
        raise ConfigError("; and ".join(fatal))
    for finding in findings:
        log.warning("topic_settings", problem=finding.text)
    return [finding.text for finding in findings]


def check(config: JobConfig, services: Services) -> None:
    """Return if every topic of the job exists with exactly its number of partitions.

    Raises:
        ConfigError: a topic has another number of partitions.
        ServiceUnavailableError: Kafka does not answer, or a topic does not exist.
    """
    existing = _partition_counts(_admin(config, services), services)
    for topic in plan(config):
        if topic.name not in existing:
            raise ServiceUnavailableError(
                f"topic {topic.name} does not exist on Kafka at {services.kafka}: start the job's parameter server, "
                "which creates it, or correct `job` in the job file"
            )
    _refuse_mismatch(config, existing)


def exists(config: JobConfig, services: Services, name: str) -> bool:
    """Whether Kafka has a topic of this name.

    Raises:
        ServiceUnavailableError: Kafka does not answer.
    """
    return name in _partition_counts(_admin(config, services), services)


def topic_id(config: JobConfig, services: Services, kind: TopicKind) -> str:
    """Kafka's own id of one of the job's topics: another one once the topic was deleted and created again.

    "" where Kafka does not say: it is older than 2.8, or is librdkafka's mock.

    Raises:
        ServiceUnavailableError: the topic does not exist, or Kafka does not answer.
    """
    from confluent_kafka import KafkaError, KafkaException, TopicCollection

    name = config.topic(kind)
    try:
        admin = _admin(config, services)  # the answer comes only while it lives
        if not _has_controller(_metadata(admin, services)):
            return ""
        wanted = TopicCollection([name])
        found = retry_while_leaderless(lambda: admin.describe_topics(wanted, request_timeout=_TIMEOUT_S)[name].result())
        told = str(found.topic_id)
    except KafkaException as exc:
        if exc.args[0].code() == KafkaError._UNSUPPORTED_FEATURE:
            return ""
        raise ServiceUnavailableError(f"Kafka at {services.kafka} does not describe topic {name}: {exc}") from exc
    return "" if told == _ZERO_TOPIC_ID else told


def _has_controller(metadata: Any) -> bool:
    """Without one (librdkafka's mock names none) nobody answers what is asked of it, and the asker waits in vain."""
    return metadata.controller_id in metadata.brokers


def _refuse_mismatch(config: JobConfig, existing: Mapping[str, int]) -> None:
    """Return if those topics of the job that exist have the right number of partitions.

    Raises:
        ConfigError: one has not; says the way out.
    """
    per_worker = [existing[name] for name in (config.topic("samples"), config.topic("commands")) if name in existing]
    for topic in plan(config):
        actual = existing.get(topic.name, topic.partitions)
        if actual == topic.partitions:
            continue
        told = f"topic {topic.name}: expected {topic.partitions} partitions, found {actual}"
        other_name = f"choose another `job` name (--set job={config.job}-2)"
        if topic.name not in (config.topic("samples"), config.topic("commands")):
            raise ConfigError(f"{told}; delete the topic, or {other_name}")
        told += f" (data.workers is {config.data.workers})"
        if len(set(per_worker)) == 1:
            raise ConfigError(f"{told}; set data.workers to {actual}, or {other_name}")
        # Kafka adds partitions but never removes one, and a number of workers that one of them fits the other refuses.
        raise ConfigError(
            f"{told}, and of samples and commands {per_worker[0]} and {per_worker[1]}: the number of partitions was "
            f"changed since the job began, and no data.workers fits both; {other_name}"
        )


def describe(config: JobConfig, services: Services) -> list[TopicInfo]:
    """The job's topics that exist, in the order of `TOPIC_KINDS`, with their watermarks.

    Raises:
        ServiceUnavailableError: Kafka does not answer.
    """
    from confluent_kafka import KafkaException, TopicPartition
    from confluent_kafka.admin import OffsetSpec

    admin = _admin(config, services)
    counts = _partition_counts(admin, services)
    names = [topic.name for topic in plan(config) if topic.name in counts]
    partitions = [TopicPartition(name, number) for name in names for number in range(counts[name])]

    def offsets(spec: OffsetSpec) -> dict[tuple[str, int], int]:
        if not partitions:
            return {}
        futures = admin.list_offsets(dict.fromkeys(partitions, spec), request_timeout=_TIMEOUT_S)
        return {(key.topic, key.partition): future.result().offset for key, future in futures.items()}

    try:
        low, high = retry_while_leaderless(lambda: offsets(OffsetSpec.earliest())), offsets(OffsetSpec.latest())
    except KafkaException as exc:
        raise _unavailable(services, exc) from exc
    return [
        TopicInfo(
            name,
            counts[name],
            tuple(low[name, number] for number in range(counts[name])),
            tuple(high[name, number] for number in range(counts[name])),
        )
        for name in names
    ]


def watermarks(
    consumer: Consumer, address: str, topic: str, partition: int, timeout_s: float = _TIMEOUT_S
) -> tuple[int, int]:
    """(low, high): the first offset that a partition still holds, and the one that its next record gets.

    Raises:
        ServiceUnavailableError: Kafka does not answer, or the topic is not there.
    """
    from confluent_kafka import KafkaException, TopicPartition

    def fetch() -> tuple[int, int]:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=timeout_s, cached=False)
        return int(low), int(high)

    try:
        return retry_while_leaderless(fetch)
    except KafkaException as exc:
        raise ServiceUnavailableError(
            f"Kafka at {address} does not say where {topic}/{partition} begins and ends ({exc.args[0].str()}): "
            "is it up, and the address right?"
        ) from exc


def retry_while_leaderless(call: Callable[[], T]) -> T:
    """What `call` returns; a topic that is a moment old may lack its leader still, which is waited for.

    Raises:
        KafkaException: as `call` raises it, when waiting does not help.
    """
    from confluent_kafka import KafkaException

    deadline_s = time.monotonic() + _NEW_TOPIC_S
    while True:
        try:
            return call()
        except KafkaException as exc:
            if exc.args[0].code() not in _TRANSIENT_ERRORS or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def _admin(config: JobConfig, services: Services) -> AdminClient:
    from confluent_kafka.admin import AdminClient

    return AdminClient(kafka_settings(config, services))


def _metadata(admin: AdminClient, services: Services) -> Any:
    from confluent_kafka import KafkaException

    try:
        # All topics at once: to ask for one by name would create it where the broker creates topics on demand.
        return admin.list_topics(timeout=_TIMEOUT_S)
    except KafkaException as exc:
        raise _unavailable(services, exc) from exc


def _partition_counts(admin: AdminClient, services: Services) -> dict[str, int]:
    return {name: len(topic.partitions) for name, topic in _metadata(admin, services).topics.items()}


def _await_leaders(admin: AdminClient, config: JobConfig, services: Services) -> None:
    """Wait until each partition has a leader: a topic is created some 100 ms before it can be written."""
    wanted = {topic.name for topic in plan(config)}
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        topics = _metadata(admin, services).topics
        led = {
            name
            for name in wanted & topics.keys()
            if topics[name].partitions and all(partition.leader >= 0 for partition in topics[name].partitions.values())
        }
        if led == wanted:
            return
        if time.monotonic() > deadline_s:
            raise ServiceUnavailableError(
                f"topics without a leader after {_TIMEOUT_S:g} s on Kafka at {services.kafka}: "
                f"{', '.join(sorted(wanted - led))}"
            )
        time.sleep(0.05)


def _unavailable(services: Services, exc: Exception) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        f"Kafka at {services.kafka} does not answer ({exc.args[0]}): start it, or correct the address"
    )
