"""`doll doctor` and the roles' logs on a Kafka with ACLs: each role needs exactly the permissions that it names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from doll.config import JobConfig, load
from doll.errors import ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.permissions import Permission, Role, needed
from doll.kafka.publisher import Delivery, Publisher
from doll.kafka.reader import Partition, Reader
from doll.kafka.topic_plan import TOPIC_KINDS
from doll.local import kafka_jars
from doll.local.redis_server import LocalRedis
from doll.records.check import Check
from doll.run.doctor.examine import examine
from doll.run.target import open_target
from doll.services import Services
from forked_commands import Command, Program
from secured_kafka import SecuredKafka
from waiting import until

pytestmark = pytest.mark.integration

PASSWORD = "p4ss-hush"
USERS: tuple[Role, ...] = ("producer", "worker", "server", "evaluator")
_SECURITY = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
JOB = """
job: {job}
task: {{class: 'examples.synthetic.task:Gaussian', args: {{features: 4, hidden: [8]}}}}
data: {{workers: 1, batch_size: 8}}
source: {{kind: python, of: examples.synthetic.source:gaussians, args: {{features: 4, classes: 2}}}}
arrivals: {{process: poisson, rate_per_s: 200}}
training: {{policy: {{name: doll, group_size: 1}}}}
checkpoint: {{every_updates: 5, every_s: 0.5}}
kafka: {{security: {security}, address: '{kafka}'}}
redis: {{address: '{redis}'}}
stop: {{updates: 20}}
"""


@dataclass(frozen=True)
class Guarded:
    kafka: SecuredKafka
    redis: LocalRedis
    admin: AdminClient

    @property
    def services(self) -> Services:
        return Services(self.kafka.address_of("users"), self.redis.address)

    def write_job(self, folder: Path, job: str, *, as_super_user: bool = False) -> Path:
        path = folder / ("super.yaml" if as_super_user else "job.yaml")
        address, security = (
            (self.kafka.address, "plaintext") if as_super_user else (self.services.kafka, "sasl_plaintext")
        )
        path.write_text(JOB.format(job=job, kafka=address, redis=self.redis.address, security=security))
        return path

    def allow(self, user: str, permissions: Iterable[Permission]) -> None:
        for future in self.admin.create_acls([binding(AclBinding, user, item) for item in permissions]).values():
            future.result(300)

    def forbid(self, user: str, permission: Permission) -> None:
        for future in self.admin.delete_acls([binding(AclBindingFilter, user, permission)]).values():
            assert len(future.result(300)) == 1


def binding(kind: Any, user: str, item: Permission) -> Any:
    pattern = ResourcePatternType.PREFIXED if item.is_prefix else ResourcePatternType.LITERAL
    operation = "".join(f"_{char}" if char.isupper() else char for char in item.operation).strip("_").upper()
    resource = {"topic": ResourceType.TOPIC, "group": ResourceType.GROUP}[item.resource]
    return kind(resource, item.name, pattern, f"User:{user}", "*", AclOperation[operation], AclPermissionType.ALLOW)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, redis_server: LocalRedis) -> Iterator[Guarded]:
    if (unavailable_reason := kafka_jars.unavailable_reason()) is not None:
        pytest.skip(f"no Kafka broker can be started: {unavailable_reason}")
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # the plaintext listener's, where the brokers are too
        "listener.name.users.sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.users.scram-sha-512.sasl.jaas.config": _SECURITY,
    }
    folder = tmp_path_factory.mktemp("guarded")
    with SecuredKafka(folder / "kafka", {"users": "SASL_PLAINTEXT"}, settings) as kafka:
        admin = AdminClient({"bootstrap.servers": kafka.address})
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        for user in (*USERS, "stranger"):
            change = UserScramCredentialUpsertion(user, scram, PASSWORD.encode())
            for future in admin.alter_user_scram_credentials([change]).values():
                future.result(300)
        yield Guarded(kafka, redis_server, admin)


@pytest.fixture
def config(guarded: Guarded, tmp_path: Path, job_name: str) -> JobConfig:
    """A job whose topics exist, and whose users have what they need."""
    topics.ensure(load(guarded.write_job(tmp_path, job_name, as_super_user=True)), super_services(guarded))
    config = load(guarded.write_job(tmp_path, job_name))
    for user in USERS:
        guarded.allow(user, needed(config, user))
    return config


def super_services(guarded: Guarded) -> Services:
    return Services(guarded.kafka.address, guarded.redis.address)


def log_in(patch: pytest.MonkeyPatch, user: str, password: str = PASSWORD) -> None:
    patch.setenv("DOLL_KAFKA_USERNAME", user)
    patch.setenv("DOLL_KAFKA_PASSWORD", password)


def checks_of(folder: Path, *roles: Role) -> dict[str, Check]:
    report = examine(open_target(folder / "job.yaml", [], folder / "run"), roles)
    assert "hush" not in report.text() + json.dumps(report.to_dict())
    return {check.name: check for check in report.checks}


def test_each_role_works_with_what_it_is_said_to_need(
    guarded: Guarded, tmp_path: Path, job_name: str, doll: Program
) -> None:
    """The server makes the topics; a user for each role, and an audit at the end."""
    job = guarded.write_job(tmp_path, job_name)
    config = load(job)
    for user in USERS:
        guarded.allow(user, needed(config, user))
    prefix, operations = f"doll.{job_name}.", ("Create", "Describe", "DescribeConfigs")
    guarded.allow("server", [Permission("topic", prefix, operation, is_prefix=True) for operation in operations])
    commands = {
        "server": ["ps"], "worker": ["worker"], "producer": ["produce", "--until-finished"], "evaluator": ["evaluate"],
    }  # fmt: skip
    processes: dict[str, Command] = {}

    def start(user: str) -> None:
        more = [] if user == "producer" else ["--run-folder", str(tmp_path / "run")]
        log_in = {"DOLL_KAFKA_USERNAME": user, "DOLL_KAFKA_PASSWORD": PASSWORD}
        words = (*commands[user], "--job", str(job), *more)
        processes[user] = doll.start(*words, err=tmp_path / f"{user}.log", cwd=tmp_path, **log_in)

    def said() -> dict[str, str]:
        return {user: (tmp_path / f"{user}.log").read_text() for user in processes}

    start("server")
    existing = load(guarded.write_job(tmp_path, job_name, as_super_user=True)), super_services(guarded)
    until(lambda: len(topics.describe(*existing)) == len(TOPIC_KINDS), "the server makes the topics")
    for user in ("worker", "producer", "evaluator"):
        start(user)
    until(lambda: all(process.poll() is not None for process in processes.values()), lambda: str(said()), 120)
    assert {user: process.returncode for user, process in processes.items()} == dict.fromkeys(commands, 0), said()
    for log in said().values():
        # Only the server may ask for the topics' settings.
        text = "\n".join(line for line in log.splitlines() if "topic_settings_unknown" not in line)
        assert "authorization" not in text.lower(), text
        assert "lacks" not in text, text
        assert "hush" not in text
    audited = doll("audit", tmp_path / "super.yaml", "--run-folder", tmp_path / "run", "--json")
    assert audited.returncode == 0, audited.stderr
    assert json.loads(audited.stdout)["applied"] >= 160


def test_a_user_with_all_that_a_role_needs_passes(
    guarded: Guarded, config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, "worker")
    checks = checks_of(tmp_path, "worker")
    assert [check for check in checks.values() if check.result == "failed"] == []
    assert checks["worker: permissions at Kafka"].result == "ok"
    assert checks["Redis: permissions"].result == "ok"
    assert guarded.redis.address
    assert {check.result for name, check in checks.items() if name.startswith("topic")} <= {"ok", "warning"}


def test_a_missing_acl_is_named_with_its_principal(
    guarded: Guarded, config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, "worker")
    dead = config.topic("dead")
    guarded.forbid("worker", Permission("topic", dead, "Write"))
    guarded.allow("worker", [Permission("topic", dead, "Describe")])
    until(lambda: checks_of(tmp_path, "worker")["worker: permissions at Kafka"].result == "failed", "the ACL is gone")
    check = checks_of(tmp_path, "worker")["worker: permissions at Kafka"]
    assert check.detail == f"User:worker lacks Write on topic {dead}"
    assert check.todo == f"kafka-acls.sh --add --allow-principal 'User:worker' --operation Write --topic '{dead}'"
    refused: list[Delivery] = []
    with Publisher(config, guarded.services) as publisher:
        publisher.send(dead, b"x", on_delivery=refused.append)
        publisher.flush(300)
    assert f"User:worker lacks Write on topic {dead}; kafka-acls.sh --add" in refused[0].refusal


def test_a_topic_that_a_user_may_not_see_is_not_said_to_be_missing(
    guarded: Guarded, config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, "stranger")
    with pytest.raises(ServiceUnavailableError, match=r"does not show topic .*User:stranger lacks Describe on topic"):
        topics.check(config, guarded.services)
    checks = checks_of(tmp_path, "worker")
    assert "User:stranger lacks Read on topic" in checks["worker: permissions at Kafka"].detail
    assert checks[f"topic {config.topic('samples')}"].result == "failed"


def test_a_reader_without_the_acl_says_so_in_its_log(
    guarded: Guarded, config: JobConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log_in(monkeypatch, "evaluator")
    samples = config.topic("samples")
    log: list[str] = []
    reader = Reader(config, guarded.services, "test", [Partition(samples)])
    try:

        def logged() -> bool:
            reader.poll(0.1)
            log.append("".join(capfd.readouterr()))
            return f"User:evaluator lacks Read on topic {samples}" in "".join(log)

        until(logged, lambda: "".join(log))
    finally:
        reader.close()


def test_topics_that_could_not_be_created_are_found_without_creating_any(
    guarded: Guarded, tmp_path: Path, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(guarded.write_job(tmp_path, job_name))
    log_in(monkeypatch, "server")
    names = [
        Permission("topic", f"doll.{job_name}.", operation, is_prefix=True) for operation in ("Describe", "Create")
    ]
    guarded.allow("server", names[:1])
    check = checks_of(tmp_path, "server")[f"topic {config.topic('updates')}"]
    assert (check.result, "TOPIC_AUTHORIZATION_FAILED" in check.detail) == ("failed", True)
    assert "--operation Create" in check.todo
    guarded.allow("server", names[1:])
    until(lambda: checks_of(tmp_path, "server")[f"topic {config.topic('updates')}"].result == "ok", "the ACL holds")
    assert not [name for name in guarded.admin.list_topics(timeout=60).topics if job_name in name]


def test_services_that_are_not_there_and_wrong_secrets_fail_with_what_to_do(
    guarded: Guarded, config: JobConfig, tmp_path: Path, doll: Program
) -> None:
    log_in = {"DOLL_KAFKA_USERNAME": "worker", "DOLL_KAFKA_PASSWORD": "wr0ng-hush"}
    done = doll("doctor", tmp_path / "job.yaml", "--json", "--set", "redis.address=redis://127.0.0.1:1/0", **log_in)
    assert done.returncode == 1, done.stderr
    assert "hush" not in done.stdout + done.stderr
    report = json.loads(done.stdout)
    failed = {
        check["name"]: check["detail"] + check["todo"] for check in report["checks"] if check["result"] == "failed"
    }
    assert "correct DOLL_KAFKA_USERNAME and DOLL_KAFKA_PASSWORD" in failed["Kafka: log in as User:worker"]
    assert "nothing answers" in failed["Redis: connect to 127.0.0.1:1"]
    assert "Redis: log in" in failed
    assert config.job == report["job"]
