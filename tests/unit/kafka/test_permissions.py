"""What each role needs at Kafka, what it lacks, and the commands that allow it."""

from __future__ import annotations

from doll.kafka.permissions import ROLES, Permission, allow_command, lacking, needed
from job_files import job


def test_a_worker_reads_samples_and_commands_and_writes_what_it_reports() -> None:
    said = [str(item) for item in needed(job(), "worker")]
    assert said == [
        "Read on topic doll.j.samples", "Read on topic doll.j.commands", "Write on topic doll.j.events",
        "Write on topic doll.j.dead", "Write on topic doll.j.metrics", "Describe on topic doll.j.updates",
        "Describe on group doll.j.*", "Read on group doll-j-w*",
    ]  # fmt: skip


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
