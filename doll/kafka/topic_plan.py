"""Define the topics that a job needs: names, partitions, settings. Find problems in the settings of existing topics.
Pure. A samples topic that belongs to somebody else (`data.topic`) is not included.

A problem is fatal if it would break the ledger or block the job. Compaction deletes records that were not learned, and
refuses records without a key. If `updates` has a retention time, the history of servers and learned batches is lost. A
topic with fewer replicas than min.insync.replicas cannot be written. All other problems are warnings: less data
survives failures than the job file requires.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from doll.config import JobConfig

TopicKind = Literal["samples", "commands", "events", "updates", "metrics", "dead", "join", "joins", "history"]
JOIN_KINDS: Final[tuple[TopicKind, ...]] = ("join", "joins")  # topics of a job with data.join
TOPIC_KINDS: Final[tuple[TopicKind, ...]] = tuple(
    kind for kind in get_args(TopicKind) if kind not in (*JOIN_KINDS, "history")
)

# The longest control record lists every offset of a large group, if all of its records are refused.
RECORD_LIMIT_BYTES: Final = 32 * 1024 * 1024
MIN_ISR_SETTING: Final = "min.insync.replicas"
SIZE_SETTING: Final = "max.message.bytes"
TIME_SETTING: Final = "message.timestamp.type"
_APPEND_TIME: Final = "LogAppendTime"
_HOUR_MS: Final = 3_600_000
_CONTROL_RETENTION_MS: Final = 6 * _HOUR_MS
_KEEP_FOREVER_MS: Final = -1
_MIN_SAMPLE_LIMIT_BYTES: Final = 16 * 1024 * 1024
_FETCH_OVERHEAD_BYTES: Final = 1024 * 1024


@dataclass(frozen=True)
class TopicPlan:
    """A topic that the job needs; `settings` are Kafka's topic configs."""

    kind: TopicKind
    name: str
    partitions: int
    settings: dict[str, str]


def batch_limit_bytes(config: JobConfig) -> int:
    """Return the maximum size of a `samples` batch after it is decompressed with zstd, and of a fetch: twice the size
    of a compressed batch that the topic accepts."""
    return 2 * _sample_limit_bytes(config) + _FETCH_OVERHEAD_BYTES


def _sample_limit_bytes(config: JobConfig) -> int:
    # An oversized record must arrive, so that it can be dead-lettered.
    return max(2 * config.data.max_record_bytes, _MIN_SAMPLE_LIMIT_BYTES)


def plan_topics(config: JobConfig) -> list[TopicPlan]:
    """Return the topics that the job creates, in the order of `TOPIC_KINDS`, without an existing samples topic.
    Pure."""
    sample_limit_bytes = str(_sample_limit_bytes(config))
    samples = {
        "retention.ms": str(int(config.data.retention_hours * _HOUR_MS)),
        SIZE_SETTING: sample_limit_bytes,
    }
    control = {"retention.ms": str(_CONTROL_RETENTION_MS)}
    # No limit by size either: a broker may have a default limit.
    forever = {"retention.ms": str(_KEEP_FOREVER_MS), "retention.bytes": str(_KEEP_FOREVER_MS)}
    # If one broker is lost, acknowledged records survive, and writers continue.
    in_sync = {"cleanup.policy": "delete", MIN_ISR_SETTING: str(max(1, config.kafka.replication_factor - 1))}
    # Kafka's own limit of 1 MB is too low for a Push or an Update that names many refused records.
    long = {SIZE_SETTING: str(RECORD_LIMIT_BYTES)}
    # Retention begins when the broker gets a record: a wrong clock or an old event's time does not delete records.
    in_sync |= {TIME_SETTING: _APPEND_TIME}
    settings: dict[TopicKind, dict[str, str]] = {
        "samples": samples,
        "commands": control,
        "events": control | long,
        "updates": forever | long,
        "metrics": control,
        "dead": forever | {SIZE_SETTING: sample_limit_bytes},
        # The joiners delete the records of the log that they do not need any more.
        "join": forever | long,
        "joins": forever | long,
        "history": forever | long,
    }
    partitions: dict[TopicKind, int] = {"commands": config.data.places, "history": 2}
    if config.data.topic is None:
        partitions |= dict.fromkeys(("samples", "join", "joins"), config.data.num_partitions)
    return [
        TopicPlan(kind, config.topic(kind), partitions.get(kind, 1), settings[kind] | in_sync)
        for kind in kinds_of(config)
    ]


def kinds_of(config: JobConfig) -> list[TopicKind]:
    """Return the kinds of topics that the job has, without an existing samples topic."""
    kinds = TOPIC_KINDS if config.data.topic is None else TOPIC_KINDS[1:]
    return [*kinds, *extra_kinds(config)]


def extra_kinds(config: JobConfig) -> tuple[TopicKind, ...]:
    """Return the kinds of topics that only a job with a join, or with a history, has."""
    if config.source is not None and config.source.kind == "history":
        return ("history",)
    return () if config.data.join is None else JOIN_KINDS


@dataclass(frozen=True, slots=True)
class ActualTopic:
    """The state of a topic at the broker."""

    settings: Mapping[str, str]  # effective values by name, also values from the broker's own defaults
    replicas: int  # of the partition with the fewest replicas
    in_sync: int  # of the partition with the fewest in-sync replicas


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a topic. If it is `fatal`, the job must not run with the topic."""

    fatal: bool
    text: str


def alter_command(topic: str, change: str) -> str:
    """Return the command that changes a topic's settings, `name=value[,name=value]`."""
    return f"kafka-configs.sh --alter --entity-type topics --entity-name {topic} --add-config {change}"


def find_problems(topic: TopicPlan, actual: ActualTopic, replication_factor: int) -> list[Finding]:
    """Return the problems of a topic, the worst first. Pure."""
    kind = topic.kind
    findings: list[Finding] = []

    def add_finding(fatal: bool, what: str, change: str = "") -> None:
        todo = f"; change it: {alter_command(topic.name, change)}" if change else ""
        findings.append(Finding(fatal, f"topic {topic.name}: {what}{todo}"))

    policy = actual.settings.get("cleanup.policy", "delete")
    if policy != "delete":
        what = "records that were not learned yet" if kind == "samples" else "records that the job needs"
        add_finding(
            True,
            f"cleanup.policy is {policy}, expected delete: compaction removes {what}, and refuses those without a key",
            "cleanup.policy=delete",
        )
    in_sync = _number(actual, "min.insync.replicas", 1)
    if in_sync > actual.replicas:
        add_finding(
            True,
            f"min.insync.replicas is {in_sync}, but it has {actual.replicas} replicas: nothing can ever be written",
            f"min.insync.replicas={max(1, actual.replicas - 1)}",
        )
    elif actual.in_sync < in_sync:
        add_finding(
            False, f"{actual.in_sync} replicas are in sync and {in_sync} must be: writers wait until enough are"
        )
    elif actual.replicas > 2 and in_sync < 2:  # with two brokers, one must be allowed to fail
        add_finding(
            False,
            "min.insync.replicas is 1: what one broker alone has acknowledged is lost with it",
            f"min.insync.replicas={actual.replicas - 1}",
        )
    if actual.replicas > 1 and actual.settings.get("unclean.leader.election.enable") == "true":
        add_finding(
            False,
            "unclean.leader.election.enable is true: a broker that lags behind may become the leader, and what was "
            "acknowledged is gone",
            "unclean.leader.election.enable=false",
        )
    if actual.replicas < replication_factor:
        add_finding(False, f"it has {actual.replicas} replicas, kafka.replication_factor is {replication_factor}")
    _check_retention(topic, kind, actual, add_finding)
    limit, wanted = _number(actual, SIZE_SETTING, 1 << 62), int(topic.settings.get(SIZE_SETTING, 0))
    if limit < wanted:
        what = "a longer record cannot be sent, so nobody can dead-letter it" if kind in ("samples", "dead") else (
            "a record that names many refused samples cannot be written, and its writer ends"
        )  # fmt: skip
        add_finding(False, f"max.message.bytes is {limit}, expected {wanted}: {what}", f"max.message.bytes={wanted}")
    return sorted(findings, key=lambda finding: not finding.fatal)


def _check_retention(topic: TopicPlan, kind: str, actual: ActualTopic, add_finding: Any) -> None:
    kept_ms, kept_bytes = _number(actual, "retention.ms", -1), _number(actual, "retention.bytes", -1)
    wanted_ms = int(topic.settings["retention.ms"])
    if kind in ("updates", "dead") and (kept_ms >= 0 or kept_bytes >= 0):
        why = "the audit fails once a dead letter is deleted"
        if kind == "updates":
            why = "it is the job's ledger, and without its older records the job can be neither audited nor resumed"
        add_finding(
            kind == "updates",
            f"retention.ms is {kept_ms} and retention.bytes {kept_bytes}, expected -1 for both: {why}",
            "retention.ms=-1,retention.bytes=-1",
        )
    elif kind == "samples" and 0 <= kept_ms < wanted_ms:
        add_finding(
            False,
            f"retention.ms is {kept_ms}, data.retention_hours asks for {wanted_ms}: records may be deleted before they "
            "are learned",
            f"retention.ms={wanted_ms}",
        )
    elif kind == "samples" and kept_ms >= 0 and actual.settings.get(TIME_SETTING, _APPEND_TIME) != _APPEND_TIME:
        add_finding(
            False,
            f"{TIME_SETTING} is {actual.settings[TIME_SETTING]}: records with old timestamps are deleted before they "
            "are learned",
            f"{TIME_SETTING}={_APPEND_TIME}",
        )
    elif kind == "samples" and kept_bytes >= 0:
        add_finding(
            False,
            f"retention.bytes is {kept_bytes}: records may be deleted before data.retention_hours",
            "retention.bytes=-1",
        )


def _number(actual: ActualTopic, name: str, default: int) -> int:
    try:
        return int(actual.settings.get(name, default))
    except ValueError:
        return default
