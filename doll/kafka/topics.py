"""Create, check and describe a job's topics at the broker.

Calls raise ServiceUnavailableError if Kafka does not answer, or refuses.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
)

from doll.config import JobConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka import foreign_topic
from doll.kafka.clients import (
    ADMIN_S,
    describe_denial,
    error_of,
    list_offsets,
    make_admin,
    retry_while_leaderless,
    setting_values,
    translate_errors,
)
from doll.kafka.logins import own_user
from doll.kafka.permissions import Permission, needed
from doll.kafka.topic_plan import (
    JOIN_KINDS,
    MIN_ISR_SETTING,
    SIZE_SETTING,
    TIME_SETTING,
    TOPIC_KINDS,
    ActualTopic,
    TopicKind,
    TopicPlan,
    find_problems,
    plan_topics,
)
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

_PARTITION_S: Final = 0.05  # time in which a broker on a loaded machine opens a new log
_DELETE_S: Final = 5.0
_BROKER_S: Final = 2.0  # maximum wait for one broker, because another may answer


def _allow_users(admin: AdminClient, config: JobConfig, address: str) -> None:
    """Grant the users `kafka.worker_user` and `kafka.producer_user`, if they are set, only the permissions that a
    worker and an external producer need. The call may be repeated.

    An ACL's resource pattern is one topic or a prefix, and `doll.*.samples` is neither, so each job adds ACLs for its
    own topics. If Kafka allows everyone to use a topic without ACLs (`allow.everyone.if.no.acl.found`), the first ACL
    excludes all other users. So DOLL's own user gets an ACL in the same request, and a foreign topic gets no ACL: its
    owner must allow the workers' user to read it.
    """
    users: dict[str, list[Permission]] = {}
    if (user := config.kafka.worker_user) is not None:
        users[user] = [item for item in needed(config, "worker") if item.name != config.data.topic]
    if (user := config.kafka.producer_user) is not None:
        samples = config.topic("samples")
        users.setdefault(user, []).extend(Permission("topic", samples, name) for name in ("Describe", "Write"))
    if not users:
        return

    if (own := own_user(config.kafka)) is not None:
        every = {dataclasses.replace(item, operation="All") for items in users.values() for item in items}
        users[own] = sorted(every)
    wanted = [
        AclBinding(
            ResourceType[item.resource.upper()], item.name,
            ResourcePatternType.PREFIXED if item.is_prefix else ResourcePatternType.LITERAL,
            f"User:{user}", "*", AclOperation[item.operation.upper()], AclPermissionType.ALLOW,
        )
        for user, items in users.items() for item in items
    ]  # fmt: skip
    try:
        for future in admin.create_acls(wanted, request_timeout=ADMIN_S).values():
            future.result()
    except KafkaException as exc:
        error = error_of(exc)
        if error.code() == KafkaError.SECURITY_DISABLED:
            name = "producer_user" if config.kafka.worker_user is None else "worker_user"
            raise ConfigError(
                f"kafka.{name} is {getattr(config.kafka, name)}, but Kafka at {address} has no authorizer "
                f"(authorizer.class.name), so that every user may do everything: set one, or remove {name}"
            ) from exc
        raise ServiceUnavailableError(
            f"Kafka at {address} does not let DOLL allow {', '.join(sorted(users))} what they need: {error.str()}; "
            f"DOLL's own user must be a super user, or have Alter on the cluster"
        ) from exc


@dataclass(frozen=True)
class TopicInfo:
    """The state of a topic at the broker."""

    name: str
    partitions: int
    low: tuple[int, ...]  # first offset still kept, for each partition
    high: tuple[int, ...]  # offset of the next record, for each partition


def ensure(config: JobConfig, services: Services, *, begins: bool = False) -> list[str]:
    """Create the missing topics, wait until they can be written, and check the other topics. Grant the users of workers
    and of external producers their permissions. The call may be repeated. A samples topic that belongs to somebody else
    is only checked, before anything is created.

    Args:
        begins: True: the job begins now, and its own samples topic must have the number of partitions in the job file.
            False: it may have more.

    Returns:
        Warnings about the topics, one sentence each; they are logged too.

    Raises:
        ConfigError: a topic has a wrong number of partitions, or settings with which the job cannot run; or the
            replication factor is larger than the number of brokers; or `kafka.worker_user` or `producer_user` is set
            and Kafka has no authorizer; or `data.topic` is missing or may not be read.
        ServiceUnavailableError: a partition of `data.topic` has no leader.
    """
    notes = [] if config.data.topic is None else foreign_topic.require(config, services)
    for note in notes:
        log.warning("samples_topic", problem=note)
    admin = make_admin(config, services)
    existing = _partition_counts(admin, services)
    commands = config.topic("commands")
    places = config.data.places
    lacks = existing.get(commands, places) < places  # the topic had partitions for fewer workers
    # Checked before anything is created, so that nothing has to be deleted again.
    fixed = {name: count for name, count in existing.items() if not (lacks and name == commands)}
    _refuse_mismatch(config, fixed, begins=begins)
    if lacks:
        _add_partitions(admin, services, commands, places)
    missing = [topic for topic in plan_topics(config) if topic.name not in existing]
    _create(admin, config, services, missing)
    _await_topics(admin, config, services)
    _await_leaders(admin, services, missing)
    check(config, services)
    _allow_users(admin, config, services.kafka)
    return [*notes, *_check_settings(admin, config, services)]


def _create(admin: AdminClient, config: JobConfig, services: Services, missing: Sequence[TopicPlan]) -> None:
    """Create the topics in one request. If Kafka refuses a topic, retry it without `min.insync.replicas`, then without
    `max.message.bytes`, and then without `message.timestamp.type`.

    Some managed services set `min.insync.replicas` themselves and refuse it, or refuse records of 32 MiB.
    """
    refusals: tuple[int, ...] = (KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION)
    wanted, replicas = list(missing), config.kafka.replication_factor
    for dropped in (MIN_ISR_SETTING, SIZE_SETTING, TIME_SETTING, ""):
        if not wanted:
            return
        refused: list[TopicPlan] = []
        new = [NewTopic(topic.name, topic.partitions, replicas, config=topic.settings) for topic in wanted]
        futures = admin.create_topics(new, operation_timeout=ADMIN_S, request_timeout=ADMIN_S)
        for topic in wanted:
            if not _is_created(futures[topic.name], topic, config, services, refusals if dropped else ()):
                settings = {name: value for name, value in topic.settings.items() if name != dropped}
                refused.append(dataclasses.replace(topic, settings=settings))
        wanted = refused


def _add_partitions(admin: AdminClient, services: Services, topic: str, count: int) -> None:
    """Increase the partitions of a topic to `count`, and wait until Kafka reports them."""
    advice = "add them by hand, or allow this user to"
    with translate_errors(services.kafka, f"add partitions to topic {topic}", advice):
        wanted = [NewPartitions(topic, count)]
        admin.create_partitions(wanted, operation_timeout=ADMIN_S, request_timeout=ADMIN_S)[topic].result()
    deadline_s = time.monotonic() + ADMIN_S
    while _partition_counts(admin, services)[topic] < count and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _is_created(
    future: Future[None], topic: TopicPlan, config: JobConfig, services: Services, refusals: Collection[int]
) -> bool:
    """Return whether the topic exists now; False if Kafka answers with one of the codes `refusals`."""
    with translate_errors(services.kafka, f"create topic {topic.name}", "create it by hand, or allow this user to"):
        try:
            future.result()
        except KafkaException as exc:
            error = error_of(exc)
            if error.code() in refusals:
                return False
            if error.code() == KafkaError.INVALID_REPLICATION_FACTOR:
                raise ConfigError(
                    f"kafka.replication_factor is {config.kafka.replication_factor}: Kafka at {services.kafka} "
                    f"has fewer brokers ({error.str()})"
                ) from exc
            if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:  # if it exists, another process of the job was faster
                raise
    return True


def _check_settings(admin: AdminClient, config: JobConfig, services: Services) -> list[str]:
    """Return warnings about the settings of the topics, one sentence each."""
    wanted = {topic.name: topic for topic in plan_topics(config)}
    metadata = _metadata(admin, services)
    existing = {name: topic for name, topic in metadata.topics.items() if name in wanted}
    findings = [
        finding
        for name, actual in _settings_of(admin, existing).items()
        for finding in find_problems(wanted[name], actual, config.kafka.replication_factor)
    ]
    if fatal := [finding.text for finding in findings if finding.fatal]:
        raise ConfigError("; and ".join(fatal))
    for finding in findings:
        log.warning("topic_settings", problem=finding.text)
    return [finding.text for finding in findings]


def _settings_of(admin: AdminClient, topics: Mapping[str, Any]) -> dict[str, ActualTopic]:
    """Return the settings of `topics` (name -> metadata), by name. If the broker refuses, log it and return none."""
    resources = {name: ConfigResource(ResourceType.TOPIC, name) for name in topics}
    if not resources:
        return {}
    actual = {}
    try:
        futures = admin.describe_configs(list(resources.values()), request_timeout=ADMIN_S)
        for name, resource in resources.items():
            entries = futures[resource].result()
            parts = topics[name].partitions.values()
            actual[name] = ActualTopic(
                setting_values(entries),
                min((len(part.replicas) for part in parts), default=0),
                min((len(part.isrs) for part in parts), default=0),
            )
    except (KafkaException, KeyError) as exc:
        log.warning(
            "topic_settings_unknown", reason=str(exc.args[0]), hint="allow DescribeConfigs, so that they are checked"
        )
        return {}
    return actual


def check(config: JobConfig, services: Services) -> None:
    """Check that every topic of the job exists with its number of partitions; samples may have more. Raise ConfigError
    if a topic has another number, or `data.topic` does not exist. Raise ServiceUnavailableError if Kafka does not
    answer, a topic does not exist, or `commands` has too few partitions."""
    if config.data.topic is not None:
        foreign_topic.refuse_partitions(config, foreign_topic.look_up(config, services))
    admin = make_admin(config, services)
    existing = _partition_counts(admin, services)
    for topic in plan_topics(config):
        if topic.name not in existing:
            if (denial := describe_denial(admin, config.kafka, topic.name)) is not None:
                raise ServiceUnavailableError(f"Kafka at {services.kafka} does not show topic {topic.name}: {denial}")
            raise ServiceUnavailableError(
                f"topic {topic.name} does not exist on Kafka at {services.kafka}: start the job's parameter server, "
                "which creates it, or correct `job` in the job file"
            )
    _refuse_mismatch(config, existing)


def exists(config: JobConfig, services: Services, name: str) -> bool:
    """Return whether Kafka has a topic of this name."""
    return name in _partition_counts(make_admin(config, services), services)


def topic_id(config: JobConfig, services: Services, kind: TopicKind) -> str:
    """Return Kafka's id of one of the job's topics; a topic that is deleted and created again gets another id. Return
    "" if Kafka is older than 2.8 and has no ids. Raise ServiceUnavailableError if the topic does not exist, or Kafka
    does not answer."""
    name = config.topic(kind)
    with translate_errors(services.kafka, f"describe topic {name}"):
        admin = make_admin(config, services)  # the answer arrives only while this client exists
        try:
            return foreign_topic.known_id(retry_while_leaderless(lambda: foreign_topic.describe_topic(admin, name)))
        except KafkaException as exc:
            if error_of(exc).code() == KafkaError._UNSUPPORTED_FEATURE:
                return ""
            raise


def cluster_id(config: JobConfig, services: Services) -> str:
    """Return Kafka's id of the cluster; "" if it has none."""
    with translate_errors(services.kafka, "ask for the cluster's id"):
        return str(_metadata(make_admin(config, services), services).cluster_id or "")


def _refuse_mismatch(config: JobConfig, existing: Mapping[str, int], *, begins: bool = False) -> None:
    """Check that the existing topics of the job have the right number of partitions; `commands` may have more, and so
    may the samples of a job that has begun. Raise an error otherwise."""
    samples, commands = config.topic("samples"), config.topic("commands")
    for topic in plan_topics(config):
        actual = existing.get(topic.name, topic.partitions)
        if actual == topic.partitions or (topic.name == commands and actual >= config.data.least_places):
            continue
        if topic.name == samples and actual > topic.partitions and not begins:
            continue
        mismatch = f"topic {topic.name}: expected {topic.partitions} partitions, found {actual}"
        other_name = f"choose another `job` name (--set job={config.job}-2)"
        if topic.name == commands:
            # A temporary state: a server with more workers than before may be starting.
            raise ServiceUnavailableError(f"{mismatch} (data.max_workers): start the parameter server, which adds them")
        if topic.name != samples:
            raise ConfigError(f"{mismatch}; delete the topic, or {other_name}")
        raise ConfigError(f"{mismatch}; set data.partitions to {actual}, or {other_name}")


def describe(config: JobConfig, services: Services) -> list[TopicInfo]:
    """Return the job's existing topics, in the order of `TOPIC_KINDS`, with their watermarks."""
    admin = make_admin(config, services)
    counts = _partition_counts(admin, services)
    names = [config.topic(kind) for kind in (*TOPIC_KINDS, *JOIN_KINDS, "history") if config.topic(kind) in counts]
    partitions = [TopicPartition(name, number) for name in names for number in range(counts[name])]
    with translate_errors(services.kafka, "say where its partitions begin and end"):
        low = retry_while_leaderless(lambda: list_offsets(admin, partitions, OffsetSpec.earliest()))
        high = list_offsets(admin, partitions, OffsetSpec.latest())
    return [
        TopicInfo(
            name,
            counts[name],
            tuple(low[name, number] for number in range(counts[name])),
            tuple(high[name, number] for number in range(counts[name])),
        )
        for name in names
    ]


def delete_records(config: JobConfig, services: Services, topic: str, partition: int, until: int) -> bool:
    """Delete the records of a partition below offset `until`. Return False if Kafka does not do so within seconds, or
    the topic belongs to somebody else."""
    if topic == config.data.topic:
        return False
    admin = make_admin(config, services)
    where = TopicPartition(topic, partition, until)
    try:
        for future in admin.delete_records([where], request_timeout=_DELETE_S).values():
            future.result(2 * _DELETE_S)
    except (KafkaException, TimeoutError):
        return False
    return True


def _metadata(admin: AdminClient, services: Services) -> Any:
    with translate_errors(services.kafka, "answer", "start it, or correct the address"):
        # All topics in one request: a request for one topic may create it, if the broker creates topics on demand.
        return admin.list_topics(timeout=ADMIN_S)


def _partition_counts(admin: AdminClient, services: Services) -> dict[str, int]:
    return {name: len(topic.partitions) for name, topic in _metadata(admin, services).topics.items()}


def _await_topics(admin: AdminClient, config: JobConfig, services: Services) -> None:
    """Wait until every broker lists each topic, with a leader for each of its partitions.

    A topic is created about 100 ms before it can be written, and the brokers learn of it one after the other. Without
    this wait, another process of the job, or the next call, may ask a broker that does not know the topic. The wait
    excludes brokers that do not answer, because their clients try another broker.
    """
    wanted = {topic.name for topic in plan_topics(config)}
    deadline_s = time.monotonic() + ADMIN_S
    brokers = _metadata(admin, services).brokers.values()
    addresses = {f"{broker.host}:{broker.port}" for broker in brokers} if len(brokers) > 1 else {services.kafka}
    waiting = {address: make_admin(config, dataclasses.replace(services, kafka=address)) for address in addresses}
    without: dict[str, set[str]] = {}  # by address of a broker that has answered: the topics that it lacks
    while waiting:
        for address, client in list(waiting.items()):
            try:
                metadata = client.list_topics(timeout=_BROKER_S)
            except KafkaException:
                without.pop(address, None)
                continue
            without[address] = wanted - _led(metadata)
            if not without[address]:
                del waiting[address]
        if time.monotonic() > deadline_s:
            break
        if waiting:
            time.sleep(0.05)
    if lacking := {address: sorted(names) for address, names in without.items() if names}:
        said = "; ".join(f"{address} lacks {', '.join(names)}" for address, names in sorted(lacking.items()))
        raise ServiceUnavailableError(
            f"Kafka at {services.kafka}: after {ADMIN_S:g} s, expected every broker to know the job's topics and "
            f"their leaders, but {said}: see the log of these brokers and of Kafka's controller, then start again"
        )
    if waiting:
        log.warning("broker_silent", addresses=sorted(waiting), waited_s=ADMIN_S)


def _await_leaders(admin: AdminClient, services: Services, created: Sequence[TopicPlan]) -> None:
    """Wait until the leader of each partition of new topics answers requests for it.

    Metadata name a leader before that broker has opened the partition's log. On a loaded machine, or with a thousand
    partitions, this takes seconds, and a process that starts too early gets the error NOT_LEADER_OR_FOLLOWER.
    """
    partitions = [TopicPartition(topic.name, number) for topic in created for number in range(topic.partitions)]
    with translate_errors(
        services.kafka, "open the topics that it has created", "see the brokers' logs, then start again"
    ):
        wait_s = ADMIN_S + len(partitions) * _PARTITION_S
        retry_while_leaderless(lambda: list_offsets(admin, partitions, OffsetSpec.earliest()), wait_s)


def _led(metadata: Any) -> set[str]:
    """Return the topics whose partitions all have a leader."""
    return {
        name
        for name, topic in metadata.topics.items()
        if topic.partitions and all(partition.leader >= 0 for partition in topic.partitions.values())
    }
