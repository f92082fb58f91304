"""Ask Kafka the questions of `doll doctor`, which change nothing.

Each question is asked once and can fail alone: an unknown answer is None, and the reason is in `problems`.
"""

from __future__ import annotations

import contextlib
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec, ResourceType

from doll.config import JobConfig
from doll.kafka.clients import ADMIN_S, error_of, is_denial, kafka_problem, list_offsets, make_admin, setting_values
from doll.kafka.facts import KafkaFacts, StreamFacts
from doll.kafka.topic_plan import ActualTopic, plan_topics
from doll.kafka.worker_offsets import MAX_GROUPS, committed_offsets, group_of, groups_of, newest
from doll.services import Services

_CONNECT_S: Final = 10.0
_LATENCY_TRIES: Final = 5
_OLD_SHARE: Final = 0.5  # share of the retention time


def ask_kafka(
    config: JobConfig,
    services: Services,
    goes_on: Callable[[Sequence[tuple[str, int]]], bool],
) -> KafkaFacts:
    """Return all facts. Nothing is created, changed, written or committed. Raise ConfigError if the environment lacks
    what the login needs.

    Args:
        goes_on: function that gets the addresses that the brokers advertise, and returns whether to ask further
            questions. If no address can be reached, each question would wait for its time limit.
    """
    refusal = kafka_problem(config, services, _CONNECT_S)
    if refusal is not None:
        return KafkaFacts(refusal=refusal)
    facts = KafkaFacts()
    question = _Questions(make_admin(config, services), config, facts)
    question.metadata()
    if not goes_on(facts.brokers):
        return facts
    question.cluster()
    question.topics()
    question.groups()
    question.settings()
    question.missing_topics()
    question.streams()
    question.newest_record()
    return facts


class _Questions:
    def __init__(self, admin: AdminClient, config: JobConfig, facts: KafkaFacts) -> None:
        self._admin, self._config, self._facts = admin, config, facts
        self._plans = {topic.name: topic for topic in plan_topics(config)}
        self._joined = dict.fromkeys(() if config.data.join is None else config.data.join.topics)
        self._replicas: dict[str, tuple[int, int]] = {}
        self._denied: set[str] = set()

    @contextlib.contextmanager
    def _about(self, what: str) -> Iterator[None]:
        try:
            yield
        except (KafkaException, TimeoutError) as exc:
            reason = error_of(exc).str() if isinstance(exc, KafkaException) else "no answer in time"
            self._facts.problems.append(f"{what}: {reason}")

    def metadata(self) -> None:
        with self._about("brokers"):
            ask = partial(self._admin.list_topics, timeout=ADMIN_S)
            metadata = ask()
            self._facts.latency_s = min(timeit.repeat(ask, number=1, repeat=_LATENCY_TRIES))
            self._facts.brokers = [(broker.host, broker.port) for broker in metadata.brokers.values()]

    def cluster(self) -> None:
        with self._about("operations on the cluster"):
            cluster = self._admin.describe_cluster(include_authorized_operations=True, request_timeout=ADMIN_S)
            self._facts.allowed["cluster", ""] = _operations(cluster.result(ADMIN_S).authorized_operations)

    def topics(self) -> None:
        futures: Mapping[str, Future[Any]] = {}
        with self._about("topics"):
            wanted = TopicCollection(list({self._config.topic("samples"): None, **self._plans, **self._joined}))
            futures = self._admin.describe_topics(wanted, include_authorized_operations=True, request_timeout=ADMIN_S)
        for name, future in futures.items():
            with self._about(f"topic {name}"):
                try:
                    topic = future.result(ADMIN_S)
                except KafkaException as exc:
                    if error_of(exc).code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                        continue
                    if is_denial(error_of(exc)):
                        self._denied.add(name)
                        self._facts.allowed["topic", name] = frozenset()
                        continue
                    raise
                self._facts.allowed["topic", name] = _operations(topic.authorized_operations)
                self._facts.partitions[name] = len(topic.partitions)
                self._facts.leaderless += [
                    f"{name}/{part.id}" for part in topic.partitions if part.leader is None or part.leader.id < 0
                ]
                self._replicas[name] = (
                    min((len(part.replicas) for part in topic.partitions), default=0),
                    min((len(part.isr) for part in topic.partitions), default=0),
                )

    def groups(self) -> None:
        names = {
            f"doll.{self._config.job}.": f"doll.{self._config.job}.ps",
            f"doll-{self._config.job}-w": group_of(self._config.job, 0),
        }
        if self._joined:
            names[f"doll.{self._config.job}.join"] = f"doll.{self._config.job}.join"
        futures: Mapping[str, Future[Any]] = {}
        with self._about("groups"):
            futures = self._admin.describe_consumer_groups(
                list(names.values()), include_authorized_operations=True, request_timeout=ADMIN_S
            )
        for prefix, name in names.items():
            if name not in futures:
                continue
            with self._about(f"group {name}"):
                try:
                    operations = _operations(futures[name].result(ADMIN_S).authorized_operations)
                except KafkaException as exc:
                    if not is_denial(error_of(exc)):
                        raise
                    operations = frozenset()
                self._facts.allowed["group", prefix] = operations

    def settings(self) -> None:
        resources = {name: ConfigResource(ResourceType.TOPIC, name) for name in self._facts.partitions}
        if not resources:
            return
        futures: Mapping[Any, Future[Any]] = {}
        with self._about("settings of topics"):
            futures = self._admin.describe_configs(list(resources.values()), request_timeout=ADMIN_S)
        for name, resource in resources.items():
            with self._about(f"settings of topic {name} (DescribeConfigs)"):
                entries = futures[resource].result(ADMIN_S) if resource in futures else {}
                self._facts.topics[name] = ActualTopic(setting_values(entries), *self._replicas[name])

    def missing_topics(self) -> None:
        """Let Kafka check whether the missing topics could be created, without creating them."""
        missing = [
            plan
            for name, plan in self._plans.items()
            if name not in self._facts.partitions and name not in self._denied
        ]
        if not missing:
            return
        replicas = self._config.kafka.replication_factor
        wanted = [NewTopic(plan.name, plan.partitions, replicas, config=plan.settings) for plan in missing]
        with self._about("topics that are missing"):
            futures = self._admin.create_topics(wanted, validate_only=True, request_timeout=ADMIN_S)
            for name, future in futures.items():
                self._facts.create_refusals[name] = _refusal(future)

    def streams(self) -> None:
        name = self._config.topic("samples")
        if name not in self._facts.partitions:
            return
        places = [TopicPartition(name, number) for number in range(self._facts.partitions[name])]
        with self._about(f"ends of {name}"):
            low = list_offsets(self._admin, places, OffsetSpec.earliest())
            high = list_offsets(self._admin, places, OffsetSpec.latest())
            committed = self._committed(places)
            old = self._old_until(name, places)
            self._facts.streams = {
                number: StreamFacts(committed.get(number), low[name, number], high[name, number], old.get(number))
                for number in range(len(places))
            }

    def newest_record(self) -> None:
        # The owners of joined topics may write any time stamp.
        places = [TopicPartition(name, 0) for name in self._facts.partitions if name not in self._joined]
        if not places:
            return
        with self._about("newest record"):
            spec = OffsetSpec.max_timestamp()
            futures = self._admin.list_offsets(dict.fromkeys(places, spec), request_timeout=ADMIN_S)
            stamps_ms = [future.result(ADMIN_S).timestamp for future in futures.values()]
            newest_ms = max((stamp for stamp in stamps_ms if stamp is not None and stamp > 0), default=None)
            self._facts.newest_s = None if newest_ms is None else newest_ms / 1000

    def _committed(self, places: list[TopicPartition]) -> dict[int, int]:
        """Return the newest committed offset of each partition, over the groups of all workers."""
        if self._config.data.workers > MAX_GROUPS:
            self._facts.problems.append(
                f"offsets of groups: only those of workers 0 to {MAX_GROUPS - 1} were asked for"
            )
        committed = []
        for group in groups_of(self._config):
            with self._about(f"offsets of group {group}"):
                committed.append(committed_offsets(self._admin, group, places))
        return newest(committed)

    def _old_until(self, name: str, places: list[TopicPartition]) -> dict[int, int]:
        settings = self._facts.topics[name].settings if name in self._facts.topics else {}
        retention_ms = int(settings.get("retention.ms", -1))
        if retention_ms < 0:
            return {}
        old_ms = int(time.time() * 1000 - _OLD_SHARE * retention_ms)
        newer_from = list_offsets(self._admin, places, OffsetSpec.for_timestamp(old_ms))
        return {number: offset for (_, number), offset in newer_from.items() if offset >= 0}  # -1: no record is newer


def _operations(operations: Any) -> frozenset[str] | None:
    """Return the names of operations as in ACLs: `DESCRIBE_CONFIGS` is DescribeConfigs."""
    if operations is None:
        return None
    return frozenset("".join(map(str.title, operation.name.split("_"))) for operation in operations)


def _refusal(future: Future[Any]) -> str:
    try:
        future.result(ADMIN_S)
    except KafkaException as exc:
        error = error_of(exc)
        return "" if error.code() == KafkaError.TOPIC_ALREADY_EXISTS else f"{error.name()}: {error.str()}"
    return ""
