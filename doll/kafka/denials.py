"""The words for an operation that Kafka refuses: which ACL is missing, for whom; which limit a record exceeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from doll.kafka.logins import principal_text
from doll.kafka.permissions import Permission, Resource, allow_command
from doll.kafka.topic_plan import RECORD_LIMIT_BYTES, SIZE_SETTING, alter_command

if TYPE_CHECKING:
    from doll.config.connections import KafkaConfig

_RESOURCES: Final[dict[int, Resource]] = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "transactional-id",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "cluster",
}
_ASK_S: Final = 10.0


def is_denial(error: Any) -> bool:
    """Whether an error of the client library is a missing permission."""
    return error.code() in _RESOURCES


def reason_of(error: Any, kafka: KafkaConfig, operation: str, name: str) -> str:
    """The library's words for an error; for a missing permission also which one, who lacks it, and how to give it; for
    a record that is too long, what to raise.

    Args:
        operation: that was refused, as ACLs name it.
        name: of the topic, group or transactional id.
    """
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        change = alter_command(name, f"{SIZE_SETTING}={RECORD_LIMIT_BYTES}")
        return f"{error.str()}: raise the topic's limit: {change}"
    if not is_denial(error):
        return str(error.str())
    return f"{error.str()}: {_lacks(kafka, [Permission(_RESOURCES[error.code()], name, operation)])}"


def unseen_topics(admin: AdminClient, kafka: KafkaConfig, names: Iterable[str]) -> str | None:
    """The permissions that this user lacks to see the topics that it may not see; None if it may see all that exist."""
    futures = admin.describe_topics(TopicCollection(list(names)), request_timeout=_ASK_S)
    hidden = []
    for name, future in futures.items():
        try:
            future.result(_ASK_S)
        except KafkaException as exc:
            if is_denial(exc.args[0]):
                hidden.append(Permission("topic", name, "Describe"))
        except TimeoutError:
            continue
    return _lacks(kafka, hidden) if hidden else None


def _lacks(kafka: KafkaConfig, permissions: list[Permission]) -> str:
    principal = principal_text(kafka)
    return f"{principal} lacks {', '.join(map(str, permissions))}; {allow_command(permissions, principal)}"
