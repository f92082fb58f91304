"""What each role needs at Kafka, what it lacks, and the commands that allow it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka.admin import AclBinding
from doll.kafka import topics
from doll.kafka.permissions import ROLES, Permission, allow_command, lacking, needed
from job_files import job


def test_a_worker_reads_samples_and_commands_and_writes_what_it_reports() -> None:
    said = [str(item) for item in needed(job(), "worker")]
    assert said == [
        "Read on topic doll.j.samples", "Read on topic doll.j.commands", "Write on topic doll.j.events",
        "Write on topic doll.j.dead", "Write on topic doll.j.metrics", "Describe on topic doll.j.updates",
        "Describe on group doll.j.*", "Read on group doll-j-w*",
    ]  # fmt: skip


JOIN = """
data: {workers: 2, join: {features: {topic: shown}, labels: [{topic: clicks, name: click}], window_s: 60}}
"""


def test_a_joiner_reads_the_joined_topics_and_writes_samples_in_transactions() -> None:
    said = [str(item) for item in needed(job(text=JOIN), "joiner")]
    assert said == [
        "Read on topic doll.j.join", "Read on topic doll.j.joins", "Read on topic doll.j.updates",
        "Write on topic doll.j.join", "Write on topic doll.j.joins", "Write on topic doll.j.samples",
        "Write on topic doll.j.metrics", "Delete on topic doll.j.join", "Describe on topic doll.j.commands",
        "Describe on topic doll.j.events", "Describe on topic doll.j.dead", "Describe on group doll.j.*",
        "Read on topic shown", "DescribeConfigs on topic shown", "Read on topic clicks",
        "DescribeConfigs on topic clicks", "Read on group doll.j.join",
        "Describe on transactional-id doll.j.join.*", "Write on transactional-id doll.j.join.*",
    ]  # fmt: skip
    assert needed(job(), "joiner") == [], "a job without data.join has none"
    assert "Describe on topic doll.j.joins" in map(str, needed(job(text=JOIN), "worker"))


HISTORY = """
source: {kind: history, table: t, topic: clicks, time: at, handover: {partition: p, offset: o}}
"""


def test_the_producer_of_a_history_reads_its_topic_and_writes_in_transactions() -> None:
    more = set(map(str, needed(job(text=HISTORY), "producer"))) - set(map(str, needed(job(), "producer")))
    assert more == {
        "Read on topic doll.j.history", "Write on topic doll.j.history", "Delete on topic doll.j.history",
        "Read on topic clicks", "DescribeConfigs on topic clicks",
        "Describe on transactional-id doll.j.history", "Write on transactional-id doll.j.history",
    }  # fmt: skip
    assert "Describe on topic doll.j.history" in map(str, needed(job(text=HISTORY), "worker"))


def test_only_the_producer_writes_samples_and_only_the_server_commands_and_updates() -> None:
    writers = {
        kind: [role for role in ROLES if Permission("topic", f"doll.j.{kind}", "Write") in needed(job(), role)]
        for kind in ("samples", "commands", "updates", "events", "dead")
    }
    assert writers == {
        "samples": ["producer"], "commands": ["server"], "updates": ["server"],
        "events": ["producer", "worker", "evaluator", "provisioner"],
        "dead": ["worker"],
    }  # fmt: skip


def test_read_implies_describe_and_silence_is_no_lack() -> None:
    wanted = [Permission("topic", "t", "Describe"), Permission("topic", "t", "Write"), Permission("topic", "u", "Read")]
    assert lacking(wanted, {("topic", "t"): {"Read"}, ("topic", "u"): None}) == [wanted[1]]
    assert lacking(wanted, {("topic", "t"): frozenset()}) == wanted[:2]


def test_the_commands_name_each_resource_once() -> None:
    missing = [
        Permission("topic", "t", "Read"), Permission("topic", "t", "Write"),
        Permission("group", "g", "Read", is_prefix=True), Permission("cluster", "", "Create"),
    ]  # fmt: skip
    assert allow_command(missing, "User:me").split("; ") == [
        "kafka-acls.sh --add --allow-principal 'User:me' --operation Read --operation Write --topic 't'",
        "kafka-acls.sh --add --allow-principal 'User:me' --operation Read --group 'g' --resource-pattern-type prefixed",
        "kafka-acls.sh --add --allow-principal 'User:me' --operation Create --cluster",
    ]


class Granting:
    """An AdminClient that notes which ACLs it is asked for."""

    def __init__(self) -> None:
        self.acls: list[str] = []

    def create_acls(self, acls: list[AclBinding], **options: Any) -> dict[AclBinding, Future[None]]:
        done: Future[None] = Future()
        done.set_result(None)
        for acl in acls:
            pattern = f"{acl.restype.name} {acl.name}{'*' * (acl.resource_pattern_type.name == 'PREFIXED')}".lower()
            self.acls.append(f"{acl.principal} {acl.operation.name} {pattern}")
        return dict.fromkeys(acls, done)


def test_the_workers_user_is_allowed_what_a_worker_needs_but_on_a_topic_of_somebody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first ACL on a topic can exclude all who used it before: only its owner knows whom."""
    monkeypatch.setenv("DOLL_KAFKA_USERNAME", "doll")
    monkeypatch.setenv("DOLL_KAFKA_PASSWORD", "hush")
    own = [
        "User:w READ topic doll.j.commands", "User:w WRITE topic doll.j.events", "User:w WRITE topic doll.j.dead",
        "User:w WRITE topic doll.j.metrics", "User:w DESCRIBE topic doll.j.updates",
        "User:w DESCRIBE group doll.j.*", "User:w READ group doll-j-w*",
    ]  # fmt: skip
    for settings, samples in (((), ["User:w READ topic doll.j.samples"]), (("data.topic=clicks",), [])):
        kafka, wanted = Granting(), samples + own
        config = job("kafka.security=sasl_ssl", "kafka.worker_user=w", *settings)
        topics._allow_users(kafka, config, "kafka:9092")
        assert [acl for acl in kafka.acls if acl.startswith("User:w ")] == wanted
        others = {f"User:doll ALL {acl.split(' ', 2)[2]}" for acl in wanted}
        assert {acl for acl in kafka.acls if not acl.startswith("User:w ")} == others
    nobody = Granting()
    topics._allow_users(nobody, job("kafka.security=sasl_ssl"), "kafka:9092")
    assert nobody.acls == []
