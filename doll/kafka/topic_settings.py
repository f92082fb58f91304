"""What the settings of a topic that is there already mean for the job: what it cannot live with, and what is unwise.

An error is what would break the ledger or stop the job for ever: compaction deletes records that were not learned, and
refuses records without a key; an `updates` that deletes forgets who has served the job and what was learned; more
replicas that must be in sync than there are can never be written. All else is a warning: nothing is wrong yet, but
less survives than the job file asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from doll.telemetry import get_logger

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

    from doll.kafka.topics import TopicPlan

log = get_logger(__name__)

_ALTER: Final = "kafka-configs.sh --alter --entity-type topics --entity-name {topic} --add-config {change}"


@dataclass(frozen=True, slots=True)
class Found:
    """One topic as the broker has it.

    Attributes:
        settings: effective values by name, also those that the broker's own defaults give.
        replicas: of the partition that has the fewest.
        in_sync: of the partition that has the fewest.
    """

    settings: Mapping[str, str]
    replicas: int
    in_sync: int


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a topic; `fatal`: the job must not run so."""

    fatal: bool
    text: str


def judge(topic: TopicPlan, kind: str, found: Found, replication_factor: int) -> list[Finding]:
    """What is wrong with a topic, the worst first. Pure.

    Args:
        kind: "samples", "updates", ...
        replication_factor: as the job file asks for.
    """
    findings: list[Finding] = []

    def note(fatal: bool, what: str, change: str = "") -> None:
        todo = f"; change it: {_ALTER.format(topic=topic.name, change=change)}" if change else ""
        findings.append(Finding(fatal, f"topic {topic.name}: {what}{todo}"))

    policy = found.settings.get("cleanup.policy", "delete")
    if policy != "delete":
        what = "records that were not learned yet" if kind == "samples" else "records that the job needs"
        note(
            True,
            f"cleanup.policy is {policy}, expected delete: compaction removes {what}, and refuses those without a key",
            "cleanup.policy=delete",
        )
    in_sync = _number(found, "min.insync.replicas", 1)
    if in_sync > found.replicas:
        note(
            True,
            f"min.insync.replicas is {in_sync}, but it has {found.replicas} replicas: nothing can ever be written",
            f"min.insync.replicas={max(1, found.replicas - 1)}",
        )
    elif found.in_sync < in_sync:
        note(False, f"{found.in_sync} replicas are in sync and {in_sync} must be: writers wait until brokers are back")
    elif found.replicas > 2 and in_sync < 2:  # of two, one must be allowed to be away
        note(
            False,
            "min.insync.replicas is 1: what one broker alone has acknowledged is lost with it",
            f"min.insync.replicas={found.replicas - 1}",
        )
    if found.replicas > 1 and found.settings.get("unclean.leader.election.enable") == "true":
        note(
            False,
            "unclean.leader.election.enable is true: a broker that lags behind may become the leader, and what was "
            "acknowledged is gone",
            "unclean.leader.election.enable=false",
        )
    if found.replicas < replication_factor:
        note(False, f"it has {found.replicas} replicas, kafka.replication_factor is {replication_factor}")
    _judge_retention(topic, kind, found, note)
    limit, wanted = _number(found, "max.message.bytes", 1 << 62), int(topic.settings.get("max.message.bytes", 0))
    if limit < wanted:
        what = "a longer record cannot be sent, so nobody can dead-letter it" if kind in ("samples", "dead") else (
            "a record that names many refused samples cannot be written, and its writer ends"
        )  # fmt: skip
        note(False, f"max.message.bytes is {limit}, expected {wanted}: {what}", f"max.message.bytes={wanted}")
    return sorted(findings, key=lambda finding: not finding.fatal)


def _judge_retention(topic: TopicPlan, kind: str, found: Found, note: Any) -> None:
    kept_ms, kept_bytes = _number(found, "retention.ms", -1), _number(found, "retention.bytes", -1)
    wanted_ms = int(topic.settings["retention.ms"])
    if kind == "updates" and (kept_ms >= 0 or kept_bytes >= 0):
        note(
            True,
            f"retention.ms is {kept_ms} and retention.bytes {kept_bytes}, expected -1 for both: it is the job's "
            "ledger, and what is deleted of it can be neither audited nor gone on with",
            "retention.ms=-1,retention.bytes=-1",
        )
    elif kind == "dead" and (kept_ms >= 0 or kept_bytes >= 0):
        note(
            False,
            f"retention.ms is {kept_ms} and retention.bytes {kept_bytes}, expected -1 for both: the audit fails once a "
            "dead letter is deleted",
            "retention.ms=-1,retention.bytes=-1",
        )
    elif kind == "samples" and 0 <= kept_ms < wanted_ms:
        note(
            False,
            f"retention.ms is {kept_ms}, data.retention_hours asks for {wanted_ms}: records may be deleted before they "
            "are learned",
            f"retention.ms={wanted_ms}",
        )
    elif kind == "samples" and kept_bytes >= 0:
        note(
            False,
            f"retention.bytes is {kept_bytes}: records may be deleted before data.retention_hours",
            "retention.bytes=-1",
        )


def _number(found: Found, name: str, default: int) -> int:
    try:
        return int(found.settings.get(name, default))
    except ValueError:
        return default


def look(admin: AdminClient, topics: Mapping[str, Any], timeout_s: float) -> dict[str, Found]:
    """The settings of `topics` (name -> metadata), by name; nothing where the broker does not tell, which is logged."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import ConfigResource, ResourceType

    resources = {name: ConfigResource(ResourceType.TOPIC, name) for name in topics}
    if not resources:
        return {}
    found = {}
    try:
        futures = admin.describe_configs(list(resources.values()), request_timeout=timeout_s)
        for name, resource in resources.items():
            entries = futures[resource].result()
            parts = topics[name].partitions.values()
            found[name] = Found(
                {key: str(entry.value) for key, entry in entries.items() if entry.value is not None},
                min((len(part.replicas) for part in parts), default=0),
                min((len(part.isrs) for part in parts), default=0),
            )
    except (KafkaException, KeyError) as exc:
        log.warning(
            "topic_settings_unknown", reason=str(exc.args[0]), hint="allow DescribeConfigs, so that they are checked"
        )
        return {}
    return found
