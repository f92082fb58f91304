"""What is made of the answers of a job's services."""

from __future__ import annotations

import pytest
from doll.kafka.facts import KafkaFacts, StreamFacts
from doll.kafka.permissions import ROLES, Role, needed
from doll.kafka.topic_plan import ActualTopic, plan_topics
from doll.records.check import Check
from doll.run.doctor.answers import (
    DoctorReport,
    check_certificate,
    check_kafka,
    check_redis,
    check_tcp,
)
from doll.storage.redis_facts import RedisFacts
from job_files import job

CONFIG = job(workers=2)
NOW_S = 1_800_000_000.0
DAY_S = 86_400.0


def good_kafka() -> KafkaFacts:
    """A Kafka on which all is as the job wants it."""
    facts = KafkaFacts(latency_s=0.002, newest_s=NOW_S - 5)
    for plan in plan_topics(CONFIG):
        facts.partitions[plan.name] = plan.partitions
        facts.topics[plan.name] = ActualTopic(plan.settings, 1, 1)
        facts.allowed["topic", plan.name] = frozenset({"Read", "Write"})
    facts.allowed["group", "doll.j."] = facts.allowed["group", "doll-j-w"] = frozenset({"Read"})
    facts.streams = {0: StreamFacts(5, 0, 10, 3), 1: StreamFacts(None, 0, 0)}
    return facts


def judged(facts: KafkaFacts, *roles: Role) -> dict[str, Check]:
    checks = check_kafka(CONFIG, facts, roles or ("producer", "worker", "server"), "User:me", NOW_S)
    return {check.name: check for check in checks}


def test_a_good_kafka_passes() -> None:
    assert {check.result for check in judged(good_kafka()).values()} == {"ok"}


def test_a_refused_log_in_is_all_that_is_said() -> None:
    checks = judged(KafkaFacts(refusal="Kafka refuses us: correct it"))
    assert [(check.result, check.detail) for check in checks.values()] == [("failed", "Kafka refuses us: correct it")]


def test_a_missing_permission_names_principal_operation_and_command() -> None:
    facts = good_kafka()
    facts.allowed["topic", "doll.j.dead"] = frozenset({"Describe"})
    checks = judged(facts, "worker", "server")
    worker = checks["worker: permissions at Kafka"]
    assert (worker.result, worker.detail) == ("failed", "User:me lacks Write on topic doll.j.dead")
    assert worker.todo == "kafka-acls.sh --add --allow-principal 'User:me' --operation Write --topic 'doll.j.dead'"
    assert checks["server: permissions at Kafka"].result == "ok"


def test_a_kafka_that_does_not_tell_permissions_is_no_failure() -> None:
    facts = good_kafka()
    facts.allowed["topic", "doll.j.events"] = None
    assert judged(facts)["worker: permissions at Kafka"].result == "unknown"


def test_topics_that_do_not_exist_are_fine_where_they_can_be_created() -> None:
    facts = KafkaFacts(create_refusals=dict.fromkeys((plan.name for plan in plan_topics(CONFIG)), ""))
    facts.create_refusals["doll.j.events"] = "POLICY_VIOLATION: max.message.bytes is too large"
    checks = judged(facts)
    assert checks["topic doll.j.samples"].result == "ok"
    refused = checks["topic doll.j.events"]
    assert refused.result == "failed"
    assert "POLICY_VIOLATION" in refused.detail
    assert "--operation Create --topic 'doll.j.events'" in refused.todo


def test_wrong_topics_are_named() -> None:
    facts = good_kafka()
    facts.partitions["doll.j.samples"] = 1
    facts.topics["doll.j.updates"] = ActualTopic({"cleanup.policy": "compact"}, 1, 1)
    facts.topics["doll.j.events"] = ActualTopic({"max.message.bytes": "1048588"}, 1, 1)
    del facts.partitions["doll.j.dead"], facts.topics["doll.j.dead"]
    facts.allowed["topic", "doll.j.dead"] = frozenset()
    facts.leaderless = ["doll.j.metrics/0"]
    checks = judged(facts)
    assert checks["topic doll.j.samples"].detail == "1 partitions, expected 2"
    assert checks["topic doll.j.updates: settings"].result == "failed"
    assert checks["topic doll.j.events: settings"].result == "warning"
    assert "max.message.bytes=33554432" in checks["topic doll.j.events: settings"].todo
    assert "may not see it" in checks["topic doll.j.dead"].detail
    assert checks["partition doll.j.metrics/0"].result == "failed"


def test_a_job_that_has_begun_may_have_got_more_partitions_of_samples() -> None:
    facts = good_kafka()
    facts.partitions["doll.j.samples"] = 3
    check = judged(facts)["topic doll.j.samples"]
    assert (check.result, check.detail) == ("warning", "3 partitions, the job file says 2")
    assert "a new job needs data.partitions: 3" in check.todo


def test_a_topic_of_somebody_else_is_looked_at_and_never_created() -> None:
    config = job("data.topic=clicks", workers=2)
    checks = {item.name: item for item in check_kafka(config, KafkaFacts(), ("producer", "worker"), "User:me", NOW_S)}
    missing = checks["topic clicks (data.topic)"]
    assert missing.result == "failed"
    assert "--operation Read --operation Describe --topic 'clicks'" in missing.todo
    assert "topic doll.j.samples" not in checks
    assert "producer: permissions at Kafka" not in checks
    facts = KafkaFacts(partitions={"clicks": 12}, topics={"clicks": ActualTopic({"cleanup.policy": "compact"}, 1, 1)})
    for on_data_loss, result in (("stop", "failed"), ("skip", "warning")):
        config = job("data.topic=clicks", f"data.on_data_loss={on_data_loss}", workers=2)
        checks = {item.name: item for item in check_kafka(config, facts, ("worker",), "User:me", NOW_S)}
        assert checks["topic clicks (data.topic)"].result == result


JOIN = """
data:
  workers: 2
  join:
    features: {topic: shown}
    labels: [{topic: clicks, name: click}, {topic: totals, name: total, take: last}]
    window_s: 60
"""


def joined(facts: KafkaFacts, *roles: Role) -> dict[str, Check]:
    checks = check_kafka(job(text=JOIN), facts, roles or ROLES, "User:me", NOW_S)
    return {check.name: check for check in checks}


def test_joined_topics_are_looked_at_for_the_joiner() -> None:
    facts = good_kafka()
    for plan in plan_topics(job(text=JOIN)):
        facts.partitions[plan.name] = plan.partitions
        facts.topics[plan.name] = ActualTopic(plan.settings, 1, 1)
        facts.allowed["topic", plan.name] = frozenset({"Read", "Write", "Delete"})
    compacted = ActualTopic({"cleanup.policy": "compact"}, 1, 1)
    for topic, settings in (("shown", ActualTopic({}, 1, 1)), ("clicks", compacted), ("totals", compacted)):
        facts.partitions[topic], facts.topics[topic] = 12, settings
        facts.allowed["topic", topic] = frozenset({"Read", "DescribeConfigs"})
    facts.allowed["group", "doll.j.join"] = frozenset({"Read"})
    checks = joined(facts)
    assert checks["topic shown (data.join.features)"].detail == "12 partitions"
    assert checks["topic clicks (data.join.labels[0])"].result == "failed"
    assert checks["topic clicks (data.join.labels[0])"].todo == "another cleanup.policy, or take: last"
    assert checks["topic totals (data.join.labels[1])"].result == "ok", "the newest record of a key is enough"
    joiner = checks["joiner: permissions at Kafka"]
    assert joiner.result == "ok"
    assert "Kafka does not tell: Describe on transactional-id doll.j.join.*" in joiner.detail
    assert "producer: permissions at Kafka" not in checks, "the joiners write the samples"
    facts.allowed["topic", "clicks"] = frozenset({"Describe"})
    lacking = joined(facts, "joiner")["joiner: permissions at Kafka"]
    assert lacking.detail == "User:me lacks Read on topic clicks, DescribeConfigs on topic clicks"
    del facts.partitions["shown"]
    missing = joined(facts, "joiner")["topic shown (data.join.features)"]
    assert missing.result == "failed"
    assert "--operation Read --operation DescribeConfigs --topic 'shown'" in missing.todo
    assert not [name for name in joined(facts, "worker") if "data.join" in name]


def test_a_job_without_a_join_has_no_joiner() -> None:
    assert not [name for name in judged(good_kafka(), *ROLES) if "join" in name]


def test_records_that_retention_deletes_before_they_are_learned() -> None:
    facts = good_kafka()
    facts.streams = {0: StreamFacts(2, 5, 10), 1: StreamFacts(4, 0, 10, 6)}
    checks = judged(facts)
    assert checks["doll.j.samples/0: retention"].result == "failed"
    assert "records 2 to 4 were deleted" in checks["doll.j.samples/0: retention"].detail
    assert checks["doll.j.samples/1: retention"].result == "warning"
    assert checks["doll.j.samples: lag"].detail == "14 records in all, 8 in one partition, not durable"


def test_clocks_and_latency() -> None:
    facts = good_kafka()
    facts.newest_s, facts.latency_s = NOW_S + 60, 0.2
    checks = judged(facts)
    assert checks["Kafka: clocks"].result == checks["Kafka: latency"].result == "warning"
    redis = {check.name: check for check in check_redis(RedisFacts(clock_s=NOW_S - 9, eviction="noeviction"), NOW_S)}
    assert redis["Redis: clocks"].detail == "its clock differs by -9.0 s"
    assert redis["Redis: eviction"].result == "ok"


def test_redis() -> None:
    (refused,) = check_redis(RedisFacts(refusal="no"), NOW_S)
    assert refused.result == "failed"
    checks = {item.name: item for item in check_redis(RedisFacts(denied=("XADD (NOPERM)",), eviction="allkeys-lru"), 0)}
    assert checks["Redis: permissions"].result == "failed"
    assert checks["Redis: eviction"].result == "warning"


@pytest.mark.parametrize(("days", "result"), [(-1, "failed"), (3, "warning"), (90, "ok")])
def test_a_certificate_is_renewed_in_time(days: int, result: str) -> None:
    assert check_certificate("it", days * DAY_S).result == result


def test_a_report_is_a_table_and_its_exit_follows_from_failures() -> None:
    report = DoctorReport("j", [Check("one", "ok", "found"), Check("two", "failed", "this", "do that")])
    assert report.text().splitlines() == [
        "check  result  what is there; what to do", "one    ok      found", "two    failed  this; do that",
        "j cannot run: 2 checks, 1 failed, 0 warning, 0 unknown",
    ]  # fmt: skip
    assert not report.ok
    assert DoctorReport("j", [Check("one", "warning")]).ok


def test_every_role_has_permissions_that_are_judged() -> None:
    assert all(needed(CONFIG, role) for role in ("producer", "worker", "server", "evaluator", "provisioner"))


@pytest.mark.parametrize(
    ("kind", "overrides", "what"),
    [
        ("metrics", ["data.workers=5000"], "the status of 5000 workers may take 640000"),
        ("updates", ["training.policy.group_size=7000"], "an update of 7000 batches may take 1456000"),
    ],
)
def test_a_topic_that_does_not_take_the_longest_records_says_which(kind: str, overrides: list[str], what: str) -> None:
    config = job("data.workers=1000", "worker.max_pending_batches=100", *overrides)
    facts = KafkaFacts()
    for plan in plan_topics(config):
        facts.partitions[plan.name] = plan.partitions
        settings = plan.settings | {"max.message.bytes": "600000"} if plan.kind == kind else plan.settings
        facts.topics[plan.name] = ActualTopic(settings, 1, 1)
    checks = check_kafka(config, facts, ["server"], "User:me", NOW_S)
    (check,) = [check for check in checks if check.name.startswith("topic doll.j.") and "may take" in check.detail]
    assert (check.result, check.detail) == ("failed", f"max.message.bytes is 600000, {what}")
    assert check.todo.endswith(f"--entity-name doll.j.{kind} --add-config max.message.bytes=33554432")


def test_ten_thousand_workers_fit_into_what_managed_services_take() -> None:
    config = job("data.workers=10000", "training.policy.group_size=4600")
    facts = KafkaFacts()
    for plan in plan_topics(config):
        facts.partitions[plan.name] = plan.partitions
        facts.topics[plan.name] = ActualTopic(plan.settings | {"max.message.bytes": "1000000"}, 1, 1)
    checks = check_kafka(config, facts, ["server"], "User:me", NOW_S)
    assert not [check for check in checks if "may take" in check.detail]


def test_a_far_redis_needs_a_window_that_survives_a_pause() -> None:
    assert not list(check_tcp(0.001, {"tcp_slow_start_after_idle": "1"}))
    assert not list(check_tcp(0.04, {}))  # not Linux
    assert not list(check_tcp(0.04, {"tcp_slow_start_after_idle": "1", "tcp_congestion_control": "bbr"}))
    (check,) = check_tcp(0.04, {"tcp_slow_start_after_idle": "1", "tcp_congestion_control": "cubic"})
    assert check.result == "warning"
    assert "sysctl -w net.ipv4.tcp_slow_start_after_idle=0" in check.todo
    assert [check.result for check in check_tcp(0.04, {"tcp_slow_start_after_idle": "0"})] == ["ok"]
