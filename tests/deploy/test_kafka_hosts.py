"""The brokers' boot script, as it is, starts a real Kafka of three nodes: TLS, SCRAM, certificates between nodes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from doll.config import parse
from doll.kafka import topics
from doll.kafka.clients import kafka_problem, kafka_settings
from doll.kafka.permissions import needed
from doll.kafka.topic_plan import TOPIC_KINDS, TopicKind
from doll.local import kafka_jars
from doll.services import Services
from job_files import job

from .conftest import CLIENTS, PRODUCER, SETTINGS, WORKER, Host

# Six starts of Java: a quarter of a minute each where the machine is busy.
SECURED = job("kafka.security=sasl_ssl")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
WITHIN_S = 600.0


@dataclass
class Cluster:
    hosts: dict[int, Host]
    addresses: dict[int, str]
    account: Path
    running: dict[int, subprocess.Popen[str]]

    def start(self, node: int) -> None:
        host = self.hosts[node]
        java = kafka_jars.find_java()
        assert java is not None
        host.environment |= {"FAKE_JARS": str(kafka_jars.ensure(lambda text: None)), "FAKE_JAVA": java}
        with (host.root / "log").open("a") as log:
            # A session of its own: bash, the program that plays docker, and Java end together.
            self.running[node] = subprocess.Popen(
                ["bash", str(host.root / "opt/doll/broker.sh")],
                env=host.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True,
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip

    def stop(self, node: int) -> None:
        process = self.running.pop(node)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"{address}:9092" for address in self.addresses.values())

    def logs(self) -> str:
        return "\n".join(f"--- {n}\n{host.root.joinpath('log').read_text()[-3000:]}" for n, host in self.hosts.items())


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@pytest.fixture
def cluster(make_host: Callable[..., Host], account: Path) -> Iterator[Cluster]:
    if (unavailable_reason := kafka_jars.unavailable_reason()) is not None:
        pytest.skip(f"no Kafka broker can be started: {unavailable_reason}")
    # Kafka's ports are the stack's; the addresses are ours alone, as far as chance goes: all of 127/8 is loopback.
    net = f"127.{random.SystemRandom().randrange(1, 255)}.{random.SystemRandom().randrange(1, 255)}"
    addresses = {node: f"{net}.{10 + node}" for node in (1, 2, 3)}
    (account / "secrets/doll/t/kafka-authority").touch()
    boot = {
        "DOLL_NODES": "3",
        "DOLL_VOLUME_ID": "vol-0",
        "DOLL_VOTERS": ",".join(f"{node}@{address}:9093" for node, address in addresses.items()),
    }
    hosts = {
        node: make_host(f"node-{node}", DOLL_NODE=str(node), DOLL_PRIVATE_IP=address, **boot)
        for node, address in addresses.items()
    }
    made = Cluster(hosts, addresses, account, {})
    try:
        for node in (3, 2, 1):  # the one that makes the authority comes last
            made.start(node)
        yield made
    finally:
        for node in list(made.running):
            made.stop(node)


def wait_for(cluster: Cluster, holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline_s, cluster.logs()


def test_three_brokers_serve_who_logs_in_and_live_through_the_loss_of_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confluent_kafka import Consumer, Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    authority = cluster.account / "bucket/ca/kafka.pem"
    for key, value in {**CLIENTS, "DOLL_KAFKA_CA": str(authority)}.items():
        monkeypatch.setenv(key, value)
    services = Services(cluster.bootstrap, "")
    wait_for(cluster, authority.is_file)
    wait_for(cluster, lambda: kafka_problem(SECURED, services, 5.0) is None)
    admin = AdminClient(kafka_settings(SECURED, services))
    wait_for(cluster, lambda: len(admin.list_topics(timeout=10).brokers) == 3)

    # Records have three copies, and an acknowledged one has two at least.
    wait_for(cluster, lambda: _created(admin, NewTopic("t", num_partitions=3, replication_factor=3)))
    producer = Producer(kafka_settings(SECURED, services, acks="all", message_timeout_ms=120_000))
    wait_for(cluster, lambda: _acknowledged(producer, b"before"))

    # Who does not log in, or not rightly, gets nothing.
    assert kafka_problem(job("kafka.security=plaintext"), services, 5.0) is not None
    assert kafka_problem(job("kafka.security=ssl"), services, 5.0) is not None
    with monkeypatch.context() as wrong:
        wrong.setenv("DOLL_KAFKA_PASSWORD", "wr0ng")
        problem = kafka_problem(SECURED, services, 30.0)
        assert problem is not None
        assert "refuses us" in problem

    # A node is lost without a word, the others serve; it comes back with a new certificate and its own data.
    cluster.stop(2)
    wait_for(cluster, lambda: _acknowledged(producer, b"without"))
    certificate = cluster.hosts[2].root / "run/doll/kafka/server.crt"
    before = certificate.read_text()
    cluster.start(2)
    wait_for(cluster, lambda: _in_sync(admin) == {1, 2, 3})
    assert certificate.read_text() != before
    assert (
        len(cluster.hosts[2].calls_of("docker run --rm --network host --user 1000:1000")) == 3
    )  # one format, two starts

    consumer = Consumer(kafka_settings(SECURED, services, group_id="g", auto_offset_reset="earliest"))
    consumer.subscribe(["t"])
    got: set[bytes] = set()

    def read() -> bool:
        message = consumer.poll(1.0)
        if message is not None and message.error() is None:
            got.add(message.value())
        return got == {b"before", b"without"}

    wait_for(cluster, read)
    consumer.close()
    _external_producers_write_samples_and_do_nothing_else(cluster, services, monkeypatch)
    _workers_do_what_a_worker_does_and_nothing_else(services, monkeypatch)

    # No password is in what the brokers log or are called with, nor in a file that is needed once.
    for host in cluster.hosts.values():
        seen = (host.root / "log").read_text() + "\n".join(host.calls)
        left = [path for path in (host.root / "run").rglob("*") if path.is_file()]
        for user, secret, files in (
            ("clients", CLIENTS, ["secrets"]),
            ("worker", WORKER, []),
            ("producer", PRODUCER, []),
        ):
            assert secret["DOLL_KAFKA_PASSWORD"] not in seen, user
            assert [path.name for path in left if secret["DOLL_KAFKA_PASSWORD"] in path.read_text()] == files, user
            if not files:  # asked for once, when the users are made
                assert len(host.calls_of(f"aws secretsmanager get-secret-value --secret-id doll/t/{user} ")) == 1


def _external_producers_write_samples_and_do_nothing_else(
    cluster: Cluster, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job allows its own samples topic, as no pattern of Kafka names the samples topics of all jobs."""
    from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
    from confluent_kafka.admin import AdminClient, NewTopic

    ours = [f"{key}={value}" for key, value in SETTINGS.items() if key.startswith("kafka.")]
    config = parse("job: t\ntask: {class: 'a:B'}", ours)
    kinds = {kind: config.topic(kind) for kind in TOPIC_KINDS}
    with monkeypatch.context() as outside:
        for key, value in PRODUCER.items():
            outside.setenv(key, value)
        settings = kafka_settings(config, services)

    def sent(topic: str) -> str | None:
        errors: list[str | None] = []
        producer = Producer({**settings, "enable.idempotence": True, "message.timeout.ms": 120_000})
        producer.produce(topic, b"x", on_delivery=lambda error, _: errors.append(error and error.name()))
        assert producer.flush(130) == 0
        return errors[0]

    topics.ensure(parse("job: t\ntask: {class: 'a:B'}", [*ours, "kafka.producer_user="]), services)
    assert sent(kinds["samples"]) == "TOPIC_AUTHORIZATION_FAILED"
    for _ in range(2):
        topics.ensure(config, services)
    wait_for(cluster, lambda: sent(kinds["samples"]) is None)  # a moment, until all brokers know of it
    workers = {("User:doll-worker", item.name, item.operation.upper()) for item in needed(config, "worker")}
    assert _permissions(AdminClient(kafka_settings(config, services))) == {
        ("User:doll-producer", kinds["samples"], "DESCRIBE"),
        ("User:doll-producer", kinds["samples"], "WRITE"),
        *workers,
        # Else the others would shut it out where it is no super user.
        *(("User:doll", name, "ALL") for _, name, _ in workers),
    }
    refused = {kind: sent(topic) for kind, topic in kinds.items() if kind != "samples"} | {"t": sent("t")}
    assert set(refused.values()) == {"TOPIC_AUTHORIZATION_FAILED"}, refused

    consumer = Consumer({**settings, "group.id": "g"})
    consumer.assign([TopicPartition(kinds["samples"], 0, 0)])
    answers: list[str] = []
    deadline_s = time.monotonic() + WITHIN_S
    while "TOPIC_AUTHORIZATION_FAILED" not in answers:
        assert time.monotonic() < deadline_s, answers
        message = consumer.poll(1.0)
        if message is not None:
            assert message.error() is not None, "it reads samples"
            answers.append(message.error().name())
    consumer.close()

    admin = AdminClient(settings)
    assert set(admin.list_topics(timeout=30).topics) == {kinds["samples"]}
    for asked in (
        admin.create_topics([NewTopic("doll.u.samples", 1, 1)], request_timeout=30),
        admin.delete_topics([kinds["samples"]], request_timeout=30),
    ):
        with pytest.raises(KafkaException, match="AUTHORIZATION_FAILED"):
            next(iter(asked.values())).result()


def _workers_do_what_a_worker_does_and_nothing_else(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs the task's code, which must not become the job's parameter server by the worker's password."""
    from confluent_kafka import Consumer, KafkaException, Producer
    from confluent_kafka.admin import (
        AclBinding,
        AclOperation,
        AclPermissionType,
        AdminClient,
        ResourcePatternType,
        ResourceType,
    )

    config = parse("job: t\ntask: {class: 'a:B'}", [f"{key}={value}" for key, value in SETTINGS.items()])
    with monkeypatch.context() as inside:
        for key, value in WORKER.items():
            inside.setenv(key, value)
        settings = kafka_settings(config, services)

    def sent(kind: TopicKind) -> str | None:
        errors: list[str | None] = []
        producer = Producer({**settings, "enable.idempotence": True, "message.timeout.ms": 120_000})
        producer.produce(config.topic(kind), b"x", on_delivery=lambda error, _: errors.append(error and error.name()))
        assert producer.flush(130) == 0
        return errors[0]

    assert {kind: sent(kind) for kind in TOPIC_KINDS} == {
        kind: None if kind in ("events", "dead", "metrics") else "TOPIC_AUTHORIZATION_FAILED" for kind in TOPIC_KINDS
    }
    consumer = Consumer({**settings, "group.id": "doll-t-w0", "auto.offset.reset": "earliest"})
    consumer.subscribe([config.topic("samples")])
    deadline_s = time.monotonic() + WITHIN_S
    while (message := consumer.poll(1.0)) is None or message.error() is not None:
        assert time.monotonic() < deadline_s, message and message.error()
    assert message.value() == b"x"  # of the external producer
    consumer.close()

    admin, me = AdminClient(settings), f"User:{WORKER['DOLL_KAFKA_USERNAME']}"
    more = AclBinding(
        ResourceType.TOPIC, config.topic("updates"), ResourcePatternType.LITERAL, me, "*", AclOperation.ALL,
        AclPermissionType.ALLOW,
    )  # fmt: skip
    for asked in (
        admin.create_acls([more], request_timeout=30),
        admin.delete_topics([config.topic("events")], request_timeout=30),
    ):
        with pytest.raises(KafkaException, match="AUTHORIZATION_FAILED"):
            next(iter(asked.values())).result()


def _permissions(admin) -> set[tuple[str, str, str]]:  # type: ignore[no-untyped-def]
    from confluent_kafka.admin import (
        AclBindingFilter,
        AclOperation,
        AclPermissionType,
        ResourcePatternType,
        ResourceType,
    )

    every = AclBindingFilter(
        ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
    )
    return {(acl.principal, acl.name, acl.operation.name) for acl in admin.describe_acls(every).result(120)}


def _created(admin, topic) -> bool:  # type: ignore[no-untyped-def]
    from confluent_kafka import KafkaError, KafkaException

    try:
        admin.create_topics([topic], request_timeout=20)[topic.topic].result()
    except KafkaException as exc:
        return bool(exc.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS)
    return True


def _acknowledged(producer, value: bytes) -> bool:  # type: ignore[no-untyped-def]
    errors: list[object] = []
    producer.produce("t", value, on_delivery=lambda error, message: errors.append(error))
    producer.flush(130)
    return errors == [None]


def _in_sync(admin) -> set[int]:  # type: ignore[no-untyped-def]
    partitions = admin.list_topics("t", timeout=10).topics["t"].partitions.values()
    return set.intersection(*(set(partition.isrs) for partition in partitions))
