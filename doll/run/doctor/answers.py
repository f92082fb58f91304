"""Judges the answers of a job's services, and formats all results as a table. Pure: the answers are arguments.

`examine` asks the services, and chooses the checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from doll.amounts import aligned
from doll.config import JobConfig
from doll.config.join import JoinConfig
from doll.kafka.facts import KafkaFacts, StreamFacts
from doll.kafka.permissions import Permission, Role, allow_command, lacking, needed
from doll.kafka.topic_plan import (
    RECORD_LIMIT_BYTES,
    SIZE_SETTING,
    ActualTopic,
    TopicPlan,
    alter_command,
    find_problems,
    plan_topics,
)
from doll.records.check import Check, Result
from doll.records.record_sizes import COMPRESSED, status_bytes, update_bytes
from doll.storage.redis_facts import RedisFacts

_SLOW_S: Final = 0.05
_MAX_SKEW_S: Final = 2.0
_DAY_S: Final = 86_400.0
_CERTIFICATE_WARNING_S: Final = 14 * _DAY_S
_FAR_S: Final = 0.005  # round trip from which the TCP window limits transfers more than the bandwidth
_COUNTED: tuple[Result, ...] = ("failed", "warning", "unknown")


def check_certificate(name: str, left_s: float) -> Check:
    """Check that a certificate is valid."""
    if left_s <= 0:
        return Check(name, "failed", f"expired {-left_s / _DAY_S:.1f} days ago", "renew it")
    detail = f"expires in {left_s / _DAY_S:.1f} days"
    if left_s < _CERTIFICATE_WARNING_S:
        return Check(name, "warning", detail, "renew it; processes read it when they start")
    return Check(name, "ok", detail)


def check_unasked(bootstrap: str, places: Sequence[str]) -> Check:
    """Report that the address `bootstrap` answers, but no broker is reachable at its advertised address."""
    detail = f"not asked: {bootstrap} answers, and none of what the brokers advertise does ({', '.join(places)})"
    return Check("Kafka: log in, permissions, topics", "unknown", detail)


def check_tcp(latency_s: float, settings: Mapping[str, str]) -> Iterator[Check]:
    """Check whether TCP settings slow down the connection to a distant Redis.

    Args:
        latency_s: round-trip time to Redis, seconds.
        settings: settings of `/proc/sys/net/ipv4`, by name; empty on other systems than Linux.
    """
    name, setting = "Redis: TCP window", "tcp_slow_start_after_idle"
    if latency_s < _FAR_S or setting not in settings or settings.get("tcp_congestion_control") == "bbr":
        return
    if settings[setting] == "0":
        yield Check(name, "ok", f"net.ipv4.{setting} is 0")
        return
    yield Check(name, "warning", f"net.ipv4.{setting} is {settings[setting]}: after each pause, weights and gradients "
                "take more round trips", f"sysctl -w net.ipv4.{setting}=0, here and on the host of Redis")  # fmt: skip


def check_kafka(
    config: JobConfig, facts: KafkaFacts, roles: Sequence[Role], principal: str, now_s: float
) -> Iterator[Check]:
    """Yield all checks of Kafka, except those of its addresses.

    Args:
        now_s: time of this machine's clock, Unix seconds.
    """
    log_in = f"Kafka: log in as {principal}"
    if facts.refusal:
        yield Check(log_in, "failed", facts.refusal)
        return
    yield Check(log_in, "ok", " ".join(filter(None, (config.kafka.security, config.kafka.mechanism))))
    if facts.latency_s is not None:
        yield _check_latency("Kafka", facts.latency_s, "the brokers: control records wait for this")
    # The owner of `data.topic` has an own producer; the joiners write the samples of `data.join`.
    absent = {"joiner"} if config.data.join is None else {"producer"}
    if config.data.topic is not None:
        absent.add("producer")
    for role in roles:
        if role not in absent:
            yield _check_permissions(config, facts, role, principal)
    yield from _check_topics(config, facts, roles, principal)
    yield from _check_streams(config, facts)
    yield _check_kafka_clock(facts.newest_s, now_s)
    for problem in facts.problems:
        yield Check("Kafka: a question", "unknown", problem)


def _check_latency(service: str, latency_s: float, near: str) -> Check:
    slow = latency_s > _SLOW_S
    todo = f"run near {near} with each batch" if slow else ""
    return Check(f"{service}: latency", "warning" if slow else "ok", f"{1000 * latency_s:.1f} ms", todo)


def _check_permissions(config: JobConfig, facts: KafkaFacts, role: Role, principal: str) -> Check:
    name = f"{role}: permissions at Kafka"
    # Kafka cannot tell about missing topics: `_check_topics` says whether they could be created.
    # Nor does it tell about transactional ids.
    wanted = [item for item in needed(config, role) if item.resource not in ("topic", "transactional-id") or
              (item.resource, item.name) in facts.allowed]  # fmt: skip
    if missing := lacking(wanted, facts.allowed):
        detail = f"{principal} lacks {', '.join(map(str, missing))}"
        return Check(name, "failed", detail, allow_command(missing, principal))
    if any(facts.allowed.get((item.resource, item.name)) is None for item in wanted):
        return Check(name, "unknown", "this Kafka does not say what a user may do")
    unasked = [item for item in needed(config, role) if item.resource == "transactional-id"]
    more = f"; Kafka does not tell: {', '.join(map(str, unasked))}" if unasked else ""
    return Check(name, "ok", (f"{len(wanted)} operations" if wanted else "no topic exists yet") + more)


def _check_topics(config: JobConfig, facts: KafkaFacts, roles: Sequence[Role], principal: str) -> Iterator[Check]:
    if config.data.topic is not None:
        yield _check_foreign(config, facts, principal)
    if config.data.join is not None and "joiner" in roles:
        yield from _check_joined(config.data.join, facts, principal)
    for plan in plan_topics(config):
        kind, name = plan.kind, f"topic {plan.name}"
        if plan.name in facts.partitions:
            count = facts.partitions[plan.name]
            is_enough = count >= config.data.least_places if kind == "commands" else count == plan.partitions
            if kind == "samples" and count > plan.partitions:
                yield Check(name, "warning", f"{count} partitions, the job file says {plan.partitions}",
                            "nothing, if some were added since the job began; a new job needs data.partitions: "
                            f"{count}, or another job name")  # fmt: skip
            elif not is_enough:
                yield Check(name, "failed", f"{count} partitions, expected {plan.partitions}",
                            "set data.partitions or data.workers to fit, or take another job name")  # fmt: skip
            else:
                yield Check(name, "ok", f"{count} partitions")
            if (actual := facts.topics.get(plan.name)) is not None:
                yield from _check_size(config, plan, actual)
                for finding in find_problems(plan, actual, config.kafka.replication_factor):
                    problem, _, todo = finding.text.removeprefix(f"topic {plan.name}: ").partition("; change it: ")
                    yield Check(f"{name}: settings", "failed" if finding.fatal else "warning", problem, todo)
        elif facts.allowed.get(("topic", plan.name)) == frozenset():
            yield Check(name, "failed", f"{principal} may not see it, or it does not exist",
                        allow_command([Permission("topic", plan.name, "Describe")], principal))  # fmt: skip
        elif (refusal := facts.create_refusals.get(plan.name)) is None:
            yield Check(name, "unknown", "it does not exist; whether it could be created was not answered")
        elif refusal:
            yield Check(name, "failed", f"it does not exist, and Kafka would refuse to create it ({refusal})",
                        f"create it ({plan.partitions} partitions, {_settings(plan.settings)}), or "
                        + allow_command([Permission("topic", plan.name, "Create")], principal))  # fmt: skip
        else:
            who = "the server creates it" if "server" in roles else "doll topics --create, or the server, creates it"
            yield Check(name, "ok", f"it does not exist; {who}")
    for place in facts.leaderless:
        yield Check(f"partition {place}", "failed", "it has no leader",
                    "see the brokers' logs: nobody can read or write it")  # fmt: skip
    if config.data.max_record_bytes > RECORD_LIMIT_BYTES:
        yield Check("data.max_record_bytes", "warning", f"{config.data.max_record_bytes}, above {RECORD_LIMIT_BYTES}",
                    "DOLL's own producer sends no longer records")  # fmt: skip


def _check_foreign(config: JobConfig, facts: KafkaFacts, principal: str) -> Check:
    """Check a topic that belongs to somebody else (`data.topic`)."""
    topic = config.topic("samples")
    name = f"topic {topic} (data.topic)"
    if topic not in facts.partitions:
        return _check_unseen(name, topic, ("Read", "Describe"), principal)
    if _is_compacted(facts, topic):
        result: Result = "failed" if config.data.on_data_loss == "stop" else "warning"
        return Check(name, result, "it is compacted: records may be removed before they are learned",
                     "data.on_data_loss: skip, or another cleanup.policy")  # fmt: skip
    return Check(name, "ok", f"{facts.partitions[topic]} partitions")


def _check_joined(join: JoinConfig, facts: KafkaFacts, principal: str) -> Iterator[Check]:
    """Yield the checks of the topics of `data.join`."""
    places = ["data.join.features", *(f"data.join.labels[{number}]" for number in range(len(join.labels)))]
    takes = ["", *(label.take for label in join.labels)]
    for topic, place, take in zip(join.topics, places, takes, strict=True):
        name = f"topic {topic} ({place})"
        if topic not in facts.partitions:
            yield _check_unseen(name, topic, ("Read", "DescribeConfigs"), principal)
        elif _is_compacted(facts, topic) and take != "last":
            yield Check(name, "failed", "it is compacted: records may be removed before they are joined",
                        "another cleanup.policy" + (", or take: last" if take else ""))  # fmt: skip
        else:
            yield Check(name, "ok", f"{facts.partitions[topic]} partitions")


def _check_unseen(name: str, topic: str, operations: Sequence[str], principal: str) -> Check:
    permissions = [Permission("topic", topic, operation) for operation in operations]
    return Check(name, "failed", f"it does not exist, or {principal} may not see it",
                 f"correct the name, or have its owner {allow_command(permissions, principal)}")  # fmt: skip


def _is_compacted(facts: KafkaFacts, topic: str) -> bool:
    actual = facts.topics.get(topic)
    return actual is not None and "compact" in actual.settings.get("cleanup.policy", "")


def _check_size(config: JobConfig, plan: TopicPlan, actual: ActualTopic) -> Iterator[Check]:
    """Check that the topic accepts its longest record: the server's status (which a standby needs), or an update."""
    limit_bytes = int(actual.settings.get(SIZE_SETTING, RECORD_LIMIT_BYTES))
    if plan.kind == "metrics":
        what, size_bytes = f"the status of {config.data.places} workers", status_bytes(config.data.places)
    elif plan.kind == "updates":
        what, size_bytes = (
            f"an update of {config.group_size} batches",
            update_bytes(config.group_size, config.data.records_per_batch),
        )
    else:
        return
    if (sent_bytes := size_bytes // COMPRESSED) > limit_bytes:
        yield Check(f"topic {plan.name}: settings", "failed",
                    f"{SIZE_SETTING} is {limit_bytes}, {what} may take {sent_bytes}",
                    alter_command(plan.name, f"{SIZE_SETTING}={RECORD_LIMIT_BYTES}"))  # fmt: skip


def _settings(settings: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _check_streams(config: JobConfig, facts: KafkaFacts) -> Iterator[Check]:
    """Check that Kafka keeps records for long enough until they are learned."""
    behind = {number: stream.high - stream.committed for number, stream in facts.streams.items()
              if stream.committed is not None and stream.high > stream.committed}  # fmt: skip
    if not facts.streams:
        return
    topic = config.topic("samples")
    for number, stream in facts.streams.items():
        if (problem := _stream_problem(stream)) is not None:
            result, detail = problem
            yield Check(f"{topic}/{number}: retention", "failed" if result == "failed" else "warning", detail,
                        "start more workers, or keep records for longer (retention.ms, retention.bytes)")  # fmt: skip
    most = max(behind.values(), default=0)
    yield Check(f"{topic}: lag", "ok", f"{sum(behind.values())} records in all, {most} in one partition, not durable")


def _stream_problem(stream: StreamFacts) -> tuple[str, str] | None:
    if stream.committed is None or stream.committed >= stream.high:
        return None
    if stream.committed < stream.low:
        return "failed", f"records {stream.committed} to {stream.low - 1} were deleted before they were learned"
    if stream.old_until is not None and stream.committed < stream.old_until:
        return "warning", f"record {stream.committed}, the next to learn, is older than half of the retention"
    return None


def _check_kafka_clock(newest_s: float | None, now_s: float) -> Check:
    name = "Kafka: clocks"
    if newest_s is None:
        return Check(name, "unknown", "the job's topics hold no record with a time stamp")
    if newest_s > now_s + _MAX_SKEW_S:
        return Check(name, "warning", f"the newest record is {newest_s - now_s:.1f} s in this machine's future",
                     "set the clocks by NTP (chrony)")  # fmt: skip
    return Check(name, "ok", "no record is in this machine's future")


def check_redis(facts: RedisFacts, now_s: float) -> Iterator[Check]:
    """Yield all checks of Redis, except those of its address."""
    if facts.refusal:
        yield Check("Redis: log in", "failed", facts.refusal)
        return
    yield Check("Redis: log in", "ok", facts.described)
    yield _check_latency("Redis", facts.latency_s, "Redis: workers wait for it")
    if facts.denied:
        yield Check("Redis: permissions", "failed", f"refused: {'; '.join(facts.denied)}",
                    "ACL SETUSER NAME on >PASSWORD ~doll:* +@all -@dangerous")  # fmt: skip
    else:
        yield Check("Redis: permissions", "ok", "a probe key was written, read and deleted")
    if facts.clock_s is not None:
        skew_s = facts.clock_s - now_s
        if abs(skew_s) > _MAX_SKEW_S:
            yield Check("Redis: clocks", "warning", f"its clock differs by {skew_s:+.1f} s",
                        "set the clocks by NTP (chrony)")  # fmt: skip
        else:
            yield Check("Redis: clocks", "ok", f"{skew_s:+.2f} s")
    if facts.eviction is None:
        yield Check("Redis: eviction", "unknown", "this user may not ask (INFO)", "it must be noeviction")
    elif facts.eviction != "noeviction":
        yield Check("Redis: eviction", "warning", f"maxmemory-policy is {facts.eviction}",
                    "CONFIG SET maxmemory-policy noeviction: evicted weights look like a restart of Redis")  # fmt: skip
    else:
        yield Check("Redis: eviction", "ok", "noeviction")


@dataclass(frozen=True)
class DoctorReport:
    """The results of all checks of a job."""

    job: str
    checks: Sequence[Check]

    @property
    def ok(self) -> bool:
        """Whether no check has failed."""
        return all(check.result != "failed" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {"job": self.job, "ok": self.ok, "checks": [dataclasses.asdict(check) for check in self.checks]}

    def text(self) -> str:
        """Return a table of the checks, and a line with the counts of the results."""
        rows = [("check", "result", "what is there; what to do")]
        rows += [
            (check.name, check.result, "; ".join(filter(None, (check.detail, check.todo)))) for check in self.checks
        ]
        counts = [f"{sum(check.result == result for check in self.checks)} {result}" for result in _COUNTED]
        ended = "can run" if self.ok else "cannot run"
        return "\n".join([*aligned(rows, "<"), f"{self.job} {ended}: {len(self.checks)} checks, {', '.join(counts)}"])
