"""The local stack on real servers: what it chooses, that a broker keeps its records, that nothing is left behind."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from doll.config import JobConfig, parse
from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.clients import kafka_settings
from doll.local.kafka_broker import LocalKafka
from doll.local.redis_server import LocalRedis
from doll.local.stack import local_stack
from doll.services import Services
from doll.storage.redis_client import connect_redis
from job_files import job
from process_checks import is_gone
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.integration

HOLDER = """
import json, pathlib, signal, sys
from doll.config import parse
from doll.local.forks import ForkServer
from doll.local.stack import local_stack

run = pathlib.Path(sys.argv[1])
config = parse("job: held\\ntask: {class: 'a:B'}\\n")
with local_stack(config, run, say=lambda text: None) as stack, ForkServer(run / "fork.log", preload=[]) as server:
    role = server.start_role("time:sleep", [600], log_path=run / "role.log", name="sleeper")
    pids = {"kafka": stack.kafka.pid, "redis": stack.redis.pid, "server": server.pid, "role": role.pid}
    print(json.dumps({"pids": pids, "kafka": stack.services.kafka, "redis": stack.services.redis}), flush=True)
    signal.pause()
"""


def port_is_closed(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.usefixtures("broker")  # skips, or fails under CI, where no broker can be started
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=["sigkill", "ctrl-c"])
def test_everything_ends_with_the_process_that_started_it(tmp_path: Path, end: signal.Signals) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert holder.stdout is not None
        report = json.loads(holder.stdout.readline())
        descendants = psutil.Process(holder.pid).children(recursive=True)
        assert set(report["pids"].values()) <= {process.pid for process in descendants}
        ports = [int(report["kafka"].rpartition(":")[2]), int(report["redis"].rpartition(":")[2].partition("/")[0])]
        assert not any(port_is_closed(port) for port in ports)

        holder.send_signal(end)
        holder.wait(WAIT_TIMEOUT_S)
        for process in descendants:
            until(partial(is_gone, process), f"the end of {process}")
        for port in ports:
            until(partial(port_is_closed, port), f"port {port} closed")
    finally:
        holder.kill()
        holder.wait()
        if holder.stdout is not None:
            holder.stdout.close()


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
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Java: nothing is on PATH or in JAVA_HOME."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)


@pytest.mark.usefixtures("no_java")
def test_without_java_and_docker_the_mock_broker_serves_with_a_warning(job_name: str, tmp_path: Path) -> None:
    config = parse(f"job: {job_name}\ntask: {{class: 'a:B'}}\ndata: {{workers: 6}}\n", base_folder=tmp_path)
    with local_stack(config, tmp_path / "run", print) as stack:
        assert stack.kafka_kind == "mock"
        assert "drops records beyond 5 MB" in stack.notes[-1]
        assert "no Java >= 17" in stack.notes[-1]
        assert "no docker-compose.yml" in stack.notes[-1]
        assert topics.ensure(config, stack.services) == []
        assert topics.topic_id(config, stack.services, "samples") == ""  # it is not asked: it would never answer
        assert [info.partitions for info in topics.describe(config, stack.services)] == [6, 6, 1, 1, 1, 1]
        port = int(stack.services.kafka.rpartition(":")[2])
        send(config, stack.services, [b"taste"])
        assert read(config, stack.services, 1) == [b"taste"]
    until(lambda: port_is_closed(port), "the mock broker's exit")


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
    broker.restart()
    assert read(config, services, 3) == sent


def test_two_brokers_and_two_redis_servers_run_side_by_side(
    broker: LocalKafka, redis_server: LocalRedis, tmp_path: Path
) -> None:
    with LocalKafka(tmp_path / "kafka") as second, LocalRedis(tmp_path / "redis") as second_redis:
        assert second.address != broker.address
        config = job(name="same-name", workers=2)
        topics.ensure(config, Services(second.address, ""))
        assert topics.describe(config, Services(broker.address, "")) == []
        assert second_redis.address != redis_server.address


def test_a_port_that_another_server_took_is_left_to_it(
    broker: LocalKafka, redis_server: LocalRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from doll.local import processes

    choose = processes.free_port
    taken = {
        "kafka": int(broker.address.rpartition(":")[2]),
        "redis": int(redis_server.address.rpartition(":")[2].partition("/")[0]),
    }
    for kind, make in (("kafka", LocalKafka), ("redis", LocalRedis)):
        answers = iter([taken[kind]])
        monkeypatch.setattr(processes, "free_port", lambda answers=answers: next(answers, None) or choose())
        with make(tmp_path / kind) as server:
            assert server.address not in (broker.address, redis_server.address)
            assert server.pid is not None


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


@pytest.mark.usefixtures("broker")
def test_a_cluster_id_that_begins_with_a_dash_is_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One random id in 64 does; the broker then did not start."""
    monkeypatch.setattr("doll.local.kafka_broker.uuid.uuid4", lambda: uuid.UUID(int=0xFB << 120))
    with LocalKafka(tmp_path) as server:
        assert "cluster.id=-w" in (tmp_path / "data" / "meta.properties").read_text()
        assert server.pid is not None
