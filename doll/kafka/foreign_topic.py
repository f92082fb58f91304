"""Check a samples topic that belongs to somebody else (`data.topic`): its properties and the job's permissions.

The job only reads the topic: no function here creates, changes or writes anything. The job needs two permissions on it,
Read and Describe. If DescribeConfigs is allowed too, the topic's settings are checked.

The number of partitions is determined when the job begins. The owner may add partitions while the job runs; the server
gets the new number from `doll.kafka.topic_watch`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, ResourceType

from doll.config import JobConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.clients import (
    ADMIN_S,
    error_of,
    is_denial,
    make_admin,
    retry_while_leaderless,
    setting_values,
    translate_errors,
)
from doll.kafka.logins import principal_text
from doll.kafka.permissions import Permission, allow_command
from doll.kafka.topic_plan import alter_command, batch_limit_bytes
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

_ZERO_TOPIC_ID: Final = "AAAAAAAAAAAAAAAAAAAAAA"  # base64 of 16 bytes of zero
MISSING: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)


class MissingTopicError(ConfigError):
    """Kafka has no topic with the name in the job file."""


@dataclass(frozen=True)
class ForeignTopic:
    """The present state of the topic in Kafka."""

    name: str
    partitions: int
    topic_id: str = ""  # Kafka's id, which changes if the topic is deleted and created again; "": no ids
    # Partitions without a leader, which cannot be read now, with the brokers that hold a copy.
    leaderless: tuple[tuple[int, tuple[int, ...]], ...] = ()
    may_read: bool | None = None  # whether this user may read records; None: Kafka does not say
    settings: dict[str, str] | None = None  # by name, such as `retention.ms`; None: this user may not see them


def look_up(
    config: JobConfig, services: Services, name: str = "", key: str = "data.topic", *, admin: AdminClient | None = None
) -> ForeignTopic:
    """Return the state of a topic; by default of `data.topic`, or of the job's own samples topic.

    Args:
        key: key of the job file that has the name.
        admin: client of a caller that asks repeatedly, and whose Kafka has ids of topics. None: if Kafka does not know
            the topic, ask again for some seconds, because the topic may be new.

    Raises:
        MissingTopicError: there is no topic of this name.
        ConfigError: this user may not describe it.
        ServiceUnavailableError: Kafka does not answer.
    """
    name = name or config.topic("samples")
    with translate_errors(services.kafka, f"describe topic {name}"):
        client = make_admin(config, services) if admin is None else admin  # the client must exist until the answer
        metadata = client.list_topics(timeout=ADMIN_S) if admin is None else None
        try:
            if admin is None:
                description = retry_while_leaderless(lambda: describe_topic(client, name))
            else:
                description = describe_topic(client, name)
        except KafkaException as exc:
            error = error_of(exc)
            if error.code() in MISSING:
                raise _missing(services, metadata, name, key) from exc
            if is_denial(error):
                raise ConfigError(_forbidden(config, services, name, "describe")) from exc
            if error.code() == KafkaError._UNSUPPORTED_FEATURE and metadata is not None:  # before Kafka 2.8
                return _from_metadata(services, metadata, name, key)
            raise
        allowed = description.authorized_operations
        return ForeignTopic(
            name, len(description.partitions), known_id(description),
            tuple(
                (part.id, tuple(node.id for node in part.replicas))
                for part in description.partitions if part.leader is None or part.leader.id < 0
            ),
            None if not allowed else bool({AclOperation.READ, AclOperation.ALL} & set(allowed)),
            settings_of(client, name),
        )  # fmt: skip


def describe_topic(admin: AdminClient, name: str) -> Any:
    """Return Kafka's description of one topic, with this user's permissions. Raise KafkaException if Kafka refuses."""
    wanted = TopicCollection([name])
    return admin.describe_topics(wanted, include_authorized_operations=True, request_timeout=ADMIN_S)[name].result()


def known_id(description: Any) -> str:
    """Return the id of a topic; "" if this Kafka has no ids."""
    return "" if str(description.topic_id) == _ZERO_TOPIC_ID else str(description.topic_id)


def _from_metadata(services: Services, metadata: Any, name: str, key: str) -> ForeignTopic:
    if name not in metadata.topics:
        raise _missing(services, metadata, name, key)
    parts = metadata.topics[name].partitions.values()
    leaderless = tuple((part.id, tuple(part.replicas)) for part in parts if part.leader < 0)
    return ForeignTopic(name, len(parts), leaderless=leaderless)


def settings_of(admin: AdminClient, name: str) -> dict[str, str] | None:
    resource = ConfigResource(ResourceType.TOPIC, name)
    try:
        entries = admin.describe_configs([resource], request_timeout=ADMIN_S)[resource].result()
    except KafkaException:
        return None
    return setting_values(entries)


# --- what is wrong, and what to do ----------------------------------------------------------------------------------


def require(config: JobConfig, services: Services) -> list[str]:
    """Check that a server may read the topic now, and return warnings about the topic, one sentence each. Raise
    ConfigError if the topic is missing, is compacted or has fewer partitions than the job reads. Also raise ConfigError
    if this user may not read the topic, or may not commit in its own group. Raise ServiceUnavailableError if Kafka does
    not answer or a partition has no leader."""
    topic = look_up(config, services)
    refuse_partitions(config, topic)
    if problem := unreadable(config, services, topic) or compacted(config, topic):
        raise ConfigError(problem)
    if problem := _group_problem(config, services):
        raise ConfigError(problem)
    if problem := without_leader(topic):
        raise ServiceUnavailableError(problem)
    return [note] if (note := too_long(config, topic)) else []


def require_own_topic(config: JobConfig, what: str) -> None:
    """Raise ConfigError if the samples topic, to which `what` writes, belongs to somebody else."""
    if config.data.topic is not None:
        raise ConfigError(
            f"{what} writes to the samples topic, and data.topic is {config.data.topic}, which belongs to somebody "
            "else: DOLL only reads it. Write to it with the program of its owner"
        )


def refuse_partitions(config: JobConfig, topic: ForeignTopic) -> None:
    """Raise ConfigError if the topic has fewer partitions than the job reads."""
    if topic.partitions < config.data.num_partitions:
        raise ConfigError(
            f"data.partitions: expected at most {topic.partitions}, which topic {topic.name} has, got "
            f"{config.data.num_partitions}: remove the key, and Kafka is asked"
        )


def with_partitions(
    config: JobConfig, services: Services, *, recorded: int | None = None, begins: bool = False
) -> JobConfig:
    """Return `config` with the number of partitions that the job reads. If the topic is the job's own, change nothing.

    Args:
        recorded: number of partitions that the job reads now, if it is known. A list in `arrivals.rate_per_s` has one
            rate for each partition that existed when the job began, so its length is the initial number.
        begins: True: the job begins now, so `data.partitions` must be the number of partitions of the topic.

    Raises:
        ConfigError: the topic is missing or may not be described; or `data.partitions` or `arrivals.rate_per_s` does
            not fit it.
        ServiceUnavailableError: Kafka does not answer.
    """
    data = config.data
    if data.topic is None or not (data.asks_kafka or begins):
        return config
    count = recorded or look_up(config, services).partitions
    if begins and data.partitions not in (None, count):
        raise ConfigError(
            f"data.partitions: expected {count}, which topic {data.topic} has on Kafka at {services.kafka}, got "
            f"{data.partitions}: correct the key, or remove it, and Kafka is asked"
        )
    rates = config.arrivals.rate_per_s
    if isinstance(rates, list) and recorded:
        count = min(count, len(rates))
    if isinstance(rates, list) and len(rates) != count:
        raise ConfigError(
            f"arrivals.rate_per_s: expected one rate, or {count}, one for each partition of topic {data.topic}, got "
            f"{len(rates)}"
        )
    return config.model_copy(update={"data": data.model_copy(update={"partitions": count})})


def compacted(config: JobConfig, topic: ForeignTopic) -> str:
    """Return the problem that Kafka may delete unlearned records although the job file forbids this; otherwise ""."""
    policy = (topic.settings or {}).get("cleanup.policy", "delete")
    if "compact" not in policy or config.data.on_data_loss == "skip":
        return ""
    return (
        f"topic {topic.name}: cleanup.policy is {policy}, expected delete: compaction removes records before they are "
        "learned, and nothing tells that they were there. Choose one: have its owner set it back "
        f"({alter_command(topic.name, 'cleanup.policy=delete')}), or learn what is left of it (--set "
        "data.on_data_loss=skip: the audit counts such offsets as offsets without a record)"
    )


def unreadable(config: JobConfig, services: Services, topic: ForeignTopic) -> str:
    """Return the problem that this user may not read records of the topic; otherwise ""."""
    return _forbidden(config, services, topic.name, "read") if topic.may_read is False else ""


def without_leader(topic: ForeignTopic) -> str:
    """Return the problem that some partitions of the topic have no leader; otherwise ""."""
    if not topic.leaderless:
        return ""
    which = ", ".join(
        f"partition {number} (copies on brokers {', '.join(map(str, brokers))})"
        for number, brokers in topic.leaderless[:8]
    )
    more = f" and {len(topic.leaderless) - 8} more" if len(topic.leaderless) > 8 else ""
    return (
        f"topic {topic.name}: no leader for {which}{more}: nobody can read these until one of their brokers is back; "
        "start it. Nothing is lost"
    )


def too_long(config: JobConfig, topic: ForeignTopic) -> str:
    """Return a note that the topic accepts larger batches of records than the job's clients; otherwise ""."""
    text, limit = (topic.settings or {}).get("max.message.bytes", ""), batch_limit_bytes(config) // 2
    if not text.isdecimal() or int(text) <= limit:
        return ""
    return (
        f"topic {topic.name}: max.message.bytes is {text}, and a worker takes batches of records of up to {limit} "
        f"bytes: raise data.max_record_bytes to {int(text) // 2} if there are longer ones"
    )


def _missing(services: Services, metadata: Any, name: str, key: str) -> MissingTopicError:
    others = [] if metadata is None else metadata.topics
    near = difflib.get_close_matches(name, [other for other in others if not other.startswith("__")], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return MissingTopicError(
        f"{key}: expected a topic on Kafka at {services.kafka}, which has no topic {name}{hint}: correct the name or "
        "the address, or have its owner create it; DOLL does not"
    )


def _forbidden(config: JobConfig, services: Services, name: str, what: str) -> str:
    user = principal_text(config.kafka)
    command = allow_command([Permission("topic", name, operation) for operation in ("Read", "Describe")], user)
    return f"Kafka at {services.kafka} does not allow {user} to {what} topic {name}: have its owner allow it: {command}"


def _group_problem(config: JobConfig, services: Services) -> str:
    """Return the problem that this user may not use the groups of its clients; otherwise "". Workers commit in their
    groups. Other readers also need a group, because they ask for its coordinator."""
    admin = make_admin(config, services)
    for prefix, name in ((f"doll-{config.job}-", "w0"), (f"doll.{config.job}.", "read")):
        group = f"{prefix}{name}"
        try:
            admin.describe_consumer_groups([group], request_timeout=ADMIN_S)[group].result()
        except KafkaException as exc:
            if is_denial(error_of(exc)):
                user = principal_text(config.kafka)
                command = allow_command([Permission("group", prefix, "Read", is_prefix=True)], user)
                return (
                    f"Kafka at {services.kafka} does not allow {user} to use the job's own groups, {prefix}*: allow "
                    f"it: {command}"
                )
    return ""
