"""What clients of Kafka are built with, and what their log says of a broker that is unreachable."""

from __future__ import annotations

import ast
import socket
from pathlib import Path

import doll
import pytest
from confluent_kafka import KafkaError
from doll.errors import ConfigError
from doll.kafka import clients
from doll.kafka.clients import LINGER_MS, kafka_problem, kafka_settings, make_consumer, make_producer
from doll.services import Services
from job_files import job


def test_kafka_settings_hold_the_address_and_what_the_caller_adds() -> None:
    settings = kafka_settings(
        job(), Services("a:1,b:2", ""), group_id="g", log_level=5, stats_cb=len, **{"linger.ms": 3}
    )
    assert settings["bootstrap.servers"] == "a:1,b:2"
    assert settings["security.protocol"] == "PLAINTEXT"
    assert settings["group.id"] == "g"
    assert settings["log_level"] == 5
    assert settings["stats_cb"] is len
    assert settings["linger.ms"] == 3
    assert "sasl.password" not in settings


def test_sasl_takes_its_secret_from_the_environment_and_shows_it_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    config = job("kafka.security=sasl_ssl")
    with pytest.raises(ConfigError, match="set DOLL_KAFKA_USERNAME and DOLL_KAFKA_PASSWORD"):
        kafka_settings(config, Services("a:1", ""))
    monkeypatch.setenv("DOLL_KAFKA_USERNAME", "me")
    monkeypatch.setenv("DOLL_KAFKA_PASSWORD", "hush")
    monkeypatch.setenv("DOLL_KAFKA_CA", "ca.pem")
    settings = kafka_settings(config, Services("a:1", ""))
    assert settings["security.protocol"] == "SASL_SSL"
    assert settings["sasl.mechanism"] == "SCRAM-SHA-512"
    assert (settings["sasl.username"], settings["sasl.password"]) == ("me", "hush")
    assert settings["ssl.ca.location"] == "ca.pem"
    assert "hush" not in repr(settings)
    assert "hush" not in f"{settings}"


def test_a_broker_that_is_unreachable_is_logged_once_in_thirty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    class Error:
        def __init__(self, name: str) -> None:
            self._name = name

        def code(self) -> int:
            return int(getattr(KafkaError, self._name))

        def name(self) -> str:
            return self._name

        def str(self) -> str:
            return "refused"

    times_s = iter([0.0, 0.05, 29.9, 30.1, 30.2])
    report = clients._LogErrorsOnce("a:1", job().kafka, clock=lambda: next(times_s))
    for _ in range(4):
        report(Error("_TRANSPORT"))
    report(Error("_ALL_BROKERS_DOWN"))
    output = capsys.readouterr()
    assert (output.out + output.err).count("_TRANSPORT") == 2
    assert (output.out + output.err).count("_ALL_BROKERS_DOWN") == 1


def test_a_broker_that_is_connected_and_busy_is_waited_for_longer_than_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        services = Services(f"127.0.0.1:{silent.getsockname()[1]}", "")
        assert "does not answer within 1.2 s" in str(kafka_problem(job(), services, 0.3))
    assert "does not answer within 0.3 s" in str(kafka_problem(job(), services, 0.3))


def test_a_producer_waits_for_all_replicas_and_a_consumer_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[dict[str, object]] = []
    monkeypatch.setattr(clients, "_JobProducer", built.append)
    monkeypatch.setattr(clients, "_JobConsumer", built.append)
    make_producer(job(), Services("a:1", ""), linger_ms=LINGER_MS)
    make_consumer(job(), Services("a:1", ""), "watch", fetch_wait_max_ms=100)
    make_producer(job(), Services("a:1", ""), enable_idempotence=False)
    producer, consumer, unordered = built
    assert (producer["acks"], producer["enable.idempotence"], producer["linger.ms"]) == ("all", True, LINGER_MS)
    assert (consumer["group.id"], consumer["enable.auto.commit"]) == ("doll.j.watch", False)
    assert (consumer["auto.offset.reset"], consumer["fetch.wait.max.ms"]) == ("earliest", 100)
    assert unordered["enable.idempotence"] is False


def _built_clients(source: str) -> set[str]:
    """The confluent_kafka client classes that this module calls."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}
    return names & {"AdminClient", "Consumer", "Producer"}


@pytest.mark.slow
def test_clients_are_built_in_one_module() -> None:
    package = Path(doll.__file__).parent
    builders = {
        path.relative_to(package).as_posix(): built
        for path in package.rglob("*.py")
        if (built := _built_clients(path.read_text()))
    }
    assert builders == {"kafka/clients.py": {"AdminClient"}}, "the others are made of a class that is an argument"
