"""A foreign topic on a Kafka with an authorizer: the permissions that the guide names are needed and enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from doll.config import parse
from doll.errors import ConfigError
from doll.kafka import foreign_topic
from doll.local import kafka_jars
from doll.local.kafka_broker import LocalKafka
from doll.local.processes import free_port
from doll.local.redis_server import LocalRedis
from doll.services import Services
from owners_topic import OwnersTopic, samples

pytestmark = [pytest.mark.slow, pytest.mark.integration]  # starts servers

USER, SECRET = "doll", "hush-hush-hush"
JOB = """
job: {job}
task: {{class: 'examples.synthetic.task:Gaussian', args: {{features: 4, hidden: [8]}}}}
data: {{topic: clicks, workers: 2, batch_size: 8}}
training: {{policy: {{name: doll, group_size: 2}}}}
kafka: {{security: sasl_plaintext, address: '{kafka}'}}
evaluation: {{enabled: false}}
stop: {{updates: 10}}
"""


GUARD = (
    "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users=User:ANONYMOUS",
    "sasl.enabled.mechanisms=SCRAM-SHA-512",
    "listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config="
    "org.apache.kafka.common.security.scram.ScramLoginModule required;",
)


class GuardedKafka(LocalKafka):
    """Without a permission nobody may do anything, except whoever comes without a log-in: the owner."""

    log_in_port = 0

    def _configure(self) -> None:
        super()._configure()
        self.log_in_port = free_port()
        lines = []
        for line in self._properties.read_text(encoding="utf-8").splitlines():
            if line.startswith(("listeners=", "advertised.listeners=")):
                line += f",SASL_PLAINTEXT://127.0.0.1:{self.log_in_port}"
            elif line.startswith("listener.security.protocol.map="):
                line += ",SASL_PLAINTEXT:SASL_PLAINTEXT"
            lines.append(line)
        self._properties.write_text("\n".join([*lines, *GUARD]) + "\n", encoding="utf-8")


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedKafka]:
    if (unavailable_reason := kafka_jars.unavailable_reason()) is not None:
        pytest.skip(f"no Kafka broker can be started: {unavailable_reason}")
    with GuardedKafka(tmp_path / "kafka") as kafka:
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        admin = AdminClient({"bootstrap.servers": kafka.address})
        user = UserScramCredentialUpsertion(USER, scram, SECRET.encode())
        for future in admin.alter_user_scram_credentials([user]).values():
            future.result(300)
        monkeypatch.setenv("DOLL_KAFKA_USERNAME", USER)
        monkeypatch.setenv("DOLL_KAFKA_PASSWORD", SECRET)
        yield kafka


def allow(admin: AdminClient, kind: ResourceType, name: str, pattern: ResourcePatternType, *what: AclOperation) -> None:
    bindings = [
        AclBinding(kind, name, pattern, f"User:{USER}", "*", operation, AclPermissionType.ALLOW) for operation in what
    ]
    for future in admin.create_acls(bindings).values():
        future.result(60)


def test_the_permissions_that_the_guide_names_are_needed_and_enough(
    guarded: GuardedKafka, redis_server: LocalRedis, job_name: str, tmp_path: Path
) -> None:
    owner = OwnersTopic(guarded.address, "clicks")
    owner.create(3)
    for partition in range(3):
        owner.fill(partition, samples(80))
    address = f"127.0.0.1:{guarded.log_in_port}"
    text = JOB.format(job=job_name, kafka=address)
    config, services = parse(text, ["data.partitions=3"]), Services(address, "")
    literal, prefixed = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
    own = f"doll.{job_name}."
    allow(owner.admin, ResourceType.TOPIC, own, prefixed, AclOperation.ALL)

    def refused(words: str) -> None:
        with pytest.raises(ConfigError) as error:
            foreign_topic.require(config, services)
        assert words in str(error.value)

    refused("does not allow User:doll to describe topic clicks: have its owner allow it: kafka-acls.sh --add")
    allow(owner.admin, ResourceType.TOPIC, "clicks", literal, AclOperation.DESCRIBE)
    refused("does not allow User:doll to read topic clicks: have its owner allow it: kafka-acls.sh --add")
    allow(owner.admin, ResourceType.TOPIC, "clicks", literal, AclOperation.READ)
    for group in (f"doll-{job_name}-", f"doll.{job_name}."):
        refused(f"does not allow User:doll to use the job's own groups, {group}*: allow it: kafka-acls.sh --add")
        allow(owner.admin, ResourceType.GROUP, group, prefixed, AclOperation.READ)
    assert foreign_topic.require(config, services) == []
    assert foreign_topic.look_up(config, services).settings is None, "DescribeConfigs is not among them"

    (tmp_path / "job.yaml").write_text(text)
    before = owner.ends(), owner.settings()
    done = subprocess.run(
        [sys.executable, "-m", "doll", "up", tmp_path / "job.yaml", "--json", "--parent-folder", tmp_path / "runs"],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "DOLL_REDIS": redis_server.address},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[:3000] + done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["audit"]["ok"]
    assert (owner.ends(), owner.settings()) == before
    (run,) = (tmp_path / "runs").iterdir()
    logs = "".join(path.read_text() for path in (run / "logs").glob("*.log"))
    assert "AUTHORIZATION" not in logs.upper()
    assert SECRET not in logs
