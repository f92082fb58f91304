"""The permissions that each role of a job needs in Kafka, and the commands that grant them. Pure.

Read and Write imply Describe. Every role looks up all topics of the job when it starts. Kafka before 3.0 also requires
IdempotentWrite on the cluster from each user that writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from doll.config.source import HistorySource
from doll.kafka.topic_plan import TOPIC_KINDS, TopicKind, extra_kinds

if TYPE_CHECKING:
    from doll.config import JobConfig

Role = Literal["producer", "worker", "server", "evaluator", "provisioner", "joiner"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
Resource = Literal["topic", "group", "cluster", "transactional-id"]

_OPERATIONS: Final[dict[Role, dict[str, tuple[TopicKind, ...]]]] = {
    "producer": {"Read": ("samples", "updates", "metrics"), "Write": ("samples", "events", "metrics")},
    "worker": {"Read": ("samples", "commands"), "Write": ("events", "dead", "metrics")},
    "server": {"Read": ("events", "updates", "metrics"), "Write": ("commands", "updates", "metrics")},
    "evaluator": {"Read": ("updates",), "Write": ("events", "metrics")},
    "provisioner": {"Read": ("updates", "events", "metrics", "commands"), "Write": ("events", "metrics")},
    "joiner": {
        "Read": ("join", "joins", "updates"), "Write": ("join", "joins", "samples", "metrics"), "Delete": ("join",),
    },
}  # fmt: skip
_IMPLIED: Final = {"Describe": ("Read", "Write", "Delete", "Alter"), "DescribeConfigs": ("AlterConfigs",)}


@dataclass(frozen=True, order=True)
class Permission:
    """One operation on one resource, with the names of Kafka's ACLs."""

    resource: Resource
    name: str
    operation: str
    is_prefix: bool = False

    def __str__(self) -> str:
        named = f"{self.resource} {self.name}" if self.resource != "cluster" else "the cluster"
        return f"{self.operation} on {named}{'*' if self.is_prefix else ''}"


def needed(config: JobConfig, role: Role) -> list[Permission]:
    """Return the permissions of a role for existing topics; none if the job does not have the role. With several
    workers, the group is a prefix."""
    if role == "joiner" and config.data.join is None:
        return []
    of_role = _OPERATIONS[role]
    history = config.source if role == "producer" and isinstance(config.source, HistorySource) else None
    if history is not None:
        of_role = {name: (*kinds, "history") for name, kinds in of_role.items()} | {"Delete": ("history",)}
    permissions: list[Permission] = []

    def add(resource: Resource, name: str, *operations: str, is_prefix: bool = False) -> None:
        permissions.extend(Permission(resource, name, operation, is_prefix) for operation in operations)

    for operation, kinds in of_role.items():
        for kind in kinds:
            add("topic", config.topic(kind), operation)
    seen = {kind for kinds in of_role.values() for kind in kinds}
    for kind in (*TOPIC_KINDS, *extra_kinds(config)):
        if kind not in seen:
            add("topic", config.topic(kind), "Describe")
    add("group", f"doll.{config.job}.", "Describe", is_prefix=True)
    if role == "joiner" and (join := config.data.join) is not None:
        for topic in join.topics:
            add("topic", topic, "Read", "DescribeConfigs")
        add("group", f"doll.{config.job}.join", "Read")
        add("transactional-id", f"doll.{config.job}.join.", "Describe", "Write", is_prefix=True)
    holdout = config.evaluation.holdout
    if role == "evaluator" and holdout is not None and holdout.topic is not None:
        add("topic", holdout.topic, "Read")
    if history is not None:
        add("topic", history.topic, "Read", "DescribeConfigs")
        add("transactional-id", f"doll.{config.job}.history", "Describe", "Write")
    if role == "worker":
        add("group", f"doll-{config.job}-w", "Read", is_prefix=True)
    return permissions


def lacking(
    wanted: Iterable[Permission], allowed: Mapping[tuple[Resource, str], Collection[str] | None]
) -> list[Permission]:
    """Return the permissions of `wanted` that are not among the operations `allowed` on each resource. If the
    operations of a resource are None, they are unknown, and count as allowed."""
    return [item for item in wanted if not _allows(allowed.get((item.resource, item.name)), item.operation)]


def _allows(operations: Collection[str] | None, operation: str) -> bool:
    return operations is None or any(name in operations for name in (operation, *_IMPLIED.get(operation, ())))


def allow_command(permissions: Iterable[Permission], principal: str) -> str:
    """Return the commands that grant a principal these permissions, one after the other."""
    operations: dict[tuple[str, str, bool], list[str]] = {}
    for item in permissions:
        operations.setdefault((item.resource, item.name, item.is_prefix), []).append(item.operation)
    return "; ".join(
        f"kafka-acls.sh --add --allow-principal '{principal}' "
        + " ".join(f"--operation {name}" for name in names)
        + (" --cluster" if resource == "cluster" else f" --{resource} '{name}'")
        + (" --resource-pattern-type prefixed" if is_prefix else "")
        for (resource, name, is_prefix), names in operations.items()
    )
