"""Where services are looked for, what a connection is made with, and what is said when nobody answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from doll import services as module
from doll.config import JobConfig, parse
from doll.errors import ConfigError, ServiceUnavailableError
from doll.local.redis_server import LocalRedis
from doll.services import Services, connect_redis, kafka_settings, require, resolve


def job(*overrides: str) -> JobConfig:
    return parse("job: j\ntask: {class: 'a:B'}\n", overrides)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener.getsockname()[1]


def test_the_job_file_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOLL_KAFKA", "env:1")
    monkeypatch.setenv("DOLL_REDIS", "redis://env:2/0")
    assert resolve(job()) == Services("env:1", "redis://env:2/0")
    assert resolve(job("kafka.address=file:3")) == Services("file:3", "redis://env:2/0")


def test_without_any_address_the_error_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"kafka\.address .* DOLL_KAFKA=.* redis\.address .* DOLL_REDIS=.* `doll up`"):
        resolve(job())


def test_only_what_is_missing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOLL_REDIS", "redis://env:2/0")
    with pytest.raises(ConfigError, match=r"no address for Kafka: (?!.*Redis)"):
        resolve(job())


def test_credentials_in_the_redis_url_are_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOLL_KAFKA", "env:1")
    monkeypatch.setenv("DOLL_REDIS", "redis://me:hush@env:2/0")
    with pytest.raises(ConfigError, match="DOLL_REDIS_PASSWORD") as caught:
        resolve(job())
    assert "hush" not in str(caught.value)


def test_another_scheme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOLL_KAFKA", "env:1")
    monkeypatch.setenv("DOLL_REDIS", "env:2")
    with pytest.raises(ConfigError, match=r"expected redis://host:port/db or .* got 'env:2'"):
        resolve(job())


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


def test_a_broker_that_is_away_is_told_once_in_thirty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    class Error:
        def __init__(self, name: str) -> None:
            self._name = name

        def name(self) -> str:
            return self._name

        def str(self) -> str:
            return "refused"

    times_s = iter([0.0, 0.05, 29.9, 30.1, 30.2])
    tell = module._LogErrorsOnce("a:1", clock=lambda: next(times_s))
    for _ in range(4):
        tell(Error("_TRANSPORT"))
    tell(Error("_ALL_BROKERS_DOWN"))
    told = capsys.readouterr()
    assert (told.out + told.err).count("_TRANSPORT") == 2
    assert (told.out + told.err).count("_ALL_BROKERS_DOWN") == 1


def test_redis_client_packs_in_python_parses_with_hiredis_and_keeps_bytes(redis_server: LocalRedis) -> None:
    from redis._parsers.hiredis import _HiredisParser
    from redis.connection import PythonRespSerializer

    client = connect_redis(Services("", redis_server.address))
    value = bytes(range(256)) * 40_000
    try:
        client.set("blob", memoryview(value))
        assert client.get("blob") == value
        connection = client.connection_pool.make_connection()
        assert isinstance(connection._command_packer, PythonRespSerializer)
        assert connection._parser.__class__ is _HiredisParser
    finally:
        client.delete("blob")
        client.close()


@pytest.mark.integration
def test_require_returns_when_both_answer(services: Services) -> None:
    require(job(), services)


def test_require_names_each_service_that_is_not_there_and_what_to_do(redis_server: LocalRedis) -> None:
    gone = Services("127.0.0.1:1", "redis://127.0.0.1:1/0")
    with pytest.raises(ServiceUnavailableError) as caught:
        require(job(), gone, timeout_s=0.5)
    for word in (
        "redis://127.0.0.1:1/0",
        "redis.address",
        "Kafka at 127.0.0.1:1 ",
        "refused",
        "DOLL_KAFKA",
        "`doll up`",
    ):
        assert word in str(caught.value)
    with pytest.raises(ServiceUnavailableError) as caught:
        require(job(), Services("127.0.0.1:1", redis_server.address), timeout_s=0.5)
    assert "Redis" not in str(caught.value)


def test_require_gives_up_on_servers_that_stay_silent(silent_port: int) -> None:
    silent = Services(f"127.0.0.1:{silent_port}", f"redis://127.0.0.1:{silent_port}/0")
    with pytest.raises(ServiceUnavailableError):
        require(job(), silent, timeout_s=1.0)
