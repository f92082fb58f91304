"""What external producers may do on a Kafka with an authorizer: write to the job's samples, and nothing else.

A pattern of Kafka's names one topic or a prefix, and `doll.*.samples` is neither. So each job allows its own topic,
when its topics are made or checked; a permission that is there already stays as it is.

Where Kafka lets everybody use a topic without permissions (`allow.everyone.if.no.acl.found`), the first permission
shuts all others out: our own user gets its own in the same request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.clients import kafka_credentials

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

    from doll.config import JobConfig

_TIMEOUT_S: Final = 15.0


def allow_producer(admin: AdminClient, config: JobConfig, address: str) -> None:
    """Let `kafka.producer_user`, where there is one, write to `samples`. It may be repeated.

    Raises:
        ConfigError: Kafka asks nobody what he may do: the user could then write to every topic.
        ServiceUnavailableError: Kafka does not answer, or our own user may not give permissions.
    """
    if config.kafka.producer_user is None:
        return
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

    who, topic = f"User:{config.kafka.producer_user}", config.topic("samples")
    allowed = [(who, AclOperation.DESCRIBE), (who, AclOperation.WRITE)]
    if (credentials := kafka_credentials(config)) is not None:
        allowed.append((f"User:{credentials[0]}", AclOperation.ALL))
    wanted = [
        AclBinding(ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, whom, "*", does, AclPermissionType.ALLOW)
        for whom, does in allowed
    ]
    try:
        for future in admin.create_acls(wanted, request_timeout=_TIMEOUT_S).values():
            future.result()
    except KafkaException as exc:
        error = exc.args[0]
        if error.code() == KafkaError.SECURITY_DISABLED:
            raise ConfigError(
                f"kafka.producer_user is {config.kafka.producer_user}, but Kafka at {address} has no authorizer "
                "(authorizer.class.name), so that every user may do everything: set one, or leave producer_user out"
            ) from exc
        raise ServiceUnavailableError(
            f"Kafka at {address} does not allow {who} to write to {topic}: {error.str()}; DOLL's own user must be a "
            "super user, or have Alter on the cluster"
        ) from exc
