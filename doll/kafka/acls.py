"""ACLs of external producers on a Kafka with an authorizer: they may write to the job's samples, and nothing else.

An ACL's resource pattern is one topic or a prefix, and `doll.*.samples` is neither. So each job adds ACLs for its own
topic, when its topics are created or checked; an ACL that exists stays as it is.

Where Kafka allows everyone to use a topic without ACLs (`allow.everyone.if.no.acl.found`), the first ACL excludes all
other users: DOLL's own user gets one in the same request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.clients import kafka_credentials
from doll.kafka.errors import error_of

if TYPE_CHECKING:
    from doll.config import JobConfig

_TIMEOUT_S: Final = 15.0


def allow_producer(admin: AdminClient, config: JobConfig, address: str) -> None:
    """Allow `kafka.producer_user`, if it is set, to write to `samples`. It may be repeated.

    Raises:
        ConfigError: Kafka has no authorizer: the user could write to every topic.
        ServiceUnavailableError: Kafka does not answer, or DOLL's own user may not create ACLs.
    """
    if config.kafka.producer_user is None:
        return

    principal, topic = f"User:{config.kafka.producer_user}", config.topic("samples")
    allowed = [(principal, AclOperation.DESCRIBE), (principal, AclOperation.WRITE)]
    if (credentials := kafka_credentials(config)) is not None:
        allowed.append((f"User:{credentials[0]}", AclOperation.ALL))
    wanted = [
        AclBinding(
            ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, user, "*", operation, AclPermissionType.ALLOW
        )
        for user, operation in allowed
    ]
    try:
        for future in admin.create_acls(wanted, request_timeout=_TIMEOUT_S).values():
            future.result()
    except KafkaException as exc:
        error = error_of(exc)
        if error.code() == KafkaError.SECURITY_DISABLED:
            raise ConfigError(
                f"kafka.producer_user is {config.kafka.producer_user}, but Kafka at {address} has no authorizer "
                "(authorizer.class.name), so that every user may do everything: set one, or remove producer_user"
            ) from exc
        raise ServiceUnavailableError(
            f"Kafka at {address} does not allow {principal} to write to {topic}: {error.str()}; DOLL's own user must "
            "be a super user, or have Alter on the cluster"
        ) from exc
