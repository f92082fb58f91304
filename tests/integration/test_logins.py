"""Every log-in to a real broker, with the clients of a job; secrets that change or expire while it runs; refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from confluent_kafka import TopicPartition
from doll.config import JobConfig
from doll.kafka.clients import kafka_problem, make_admin, make_consumer, make_producer
from doll.kafka.logins import own_user, principal_text
from doll.local import kafka_jars
from doll.services import Services
from job_files import job
from secured_kafka import SecuredKafka
from token_endpoint import AUDIENCE, ISSUER, TokenEndpoint
from waiting import until

pytestmark = pytest.mark.integration

PASSWORD, NEW_PASSWORD, CLIENT_SECRET, KEY_PASSWORD = "p4ss-hush", "n3w-hush", "cl1ent-hush", "k3y-hush"
TOKEN_S = 6.0
REAUTHENTICATE_MS = 2_000
_LOGIN = "org.apache.kafka.common.security"
HANDLER = f"{_LOGIN}.oauthbearer.OAuthBearerValidatorCallbackHandler"


@dataclass(frozen=True)
class Rig:
    kafka: SecuredKafka
    authority: Authority
    endpoint: TokenEndpoint
    folder: Path


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    if (unavailable_reason := kafka_jars.unavailable_reason()) is not None:
        pytest.skip(f"no Kafka broker can be started: {unavailable_reason}")
    folder = tmp_path_factory.mktemp("logins")
    authority = Authority(folder)
    own, keys = authority.issue("server"), folder / "jwks.json"
    with (
        TokenEndpoint("doll-client", CLIENT_SECRET, TOKEN_S, "doll") as endpoint,
        pytest.MonkeyPatch.context() as patch,
    ):
        endpoint.write_keys(keys)
        # Java reads this; Kafka 4 takes keys from listed addresses only.
        patch.setenv("JAVA_TOOL_OPTIONS", f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={keys.as_uri()}")
        listeners = {"passwords": "SASL_SSL", "oauth": "SASL_SSL", "mutual": "SSL"}
        settings = {
            "listener.name.passwords.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            "listener.name.passwords.plain.sasl.jaas.config":
                f'{_LOGIN}.plain.PlainLoginModule required user_doll="{PASSWORD}";',
            **{
                f"listener.name.passwords.scram-sha-{bits}.sasl.jaas.config":
                    f"{_LOGIN}.scram.ScramLoginModule required;"
                for bits in (256, 512)
            },
            "listener.name.passwords.scram-sha-256.connections.max.reauth.ms": str(REAUTHENTICATE_MS),
            "listener.name.oauth.sasl.enabled.mechanisms": "OAUTHBEARER",
            "listener.name.oauth.oauthbearer.sasl.jaas.config":
                f"{_LOGIN}.oauthbearer.OAuthBearerLoginModule required;",
            "listener.name.oauth.oauthbearer.sasl.server.callback.handler.class": HANDLER,
            "listener.name.oauth.oauthbearer.connections.max.reauth.ms": "3600000",
            "sasl.oauthbearer.jwks.endpoint.url": keys.as_uri(),
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "sasl.oauthbearer.expected.issuer": ISSUER,
            "listener.name.mutual.ssl.client.auth": "required",
        }  # fmt: skip
        for name in listeners:
            settings |= {f"listener.name.{name}.ssl.keystore.type": "PEM",
                         f"listener.name.{name}.ssl.keystore.location": str(own),
                         f"listener.name.{name}.ssl.truststore.type": "PEM",
                         f"listener.name.{name}.ssl.truststore.location": str(authority.path)}  # fmt: skip
        with SecuredKafka(folder / "kafka", listeners, settings) as kafka:
            set_password(kafka, PASSWORD)
            yield Rig(kafka, authority, endpoint, folder)


def set_password(kafka: SecuredKafka, password: str) -> None:
    from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

    admin = AdminClient({"bootstrap.servers": kafka.address})
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        change = UserScramCredentialUpsertion("doll", ScramCredentialInfo(mechanism, 4096), password.encode())
        for future in admin.alter_user_scram_credentials([change]).values():
            future.result(300)


def with_password(mechanism: str) -> JobConfig:
    return job("kafka.security=sasl_ssl", f"kafka.sasl_mechanism={mechanism}")


def with_token(rig: Rig) -> JobConfig:
    oauth = f"{{token_url: '{rig.endpoint.url}', scope: 'read write', extensions: {{tenant: t1}}}}"
    return job("kafka.security=sasl_ssl", "kafka.sasl_mechanism=OAUTHBEARER", f"kafka.oauth={oauth}")


def set_environment(patch: pytest.MonkeyPatch, rig: Rig, **more: str) -> None:
    known = {"CA": str(rig.authority.path), "USERNAME": "doll", "PASSWORD": PASSWORD, "CLIENT_ID": "doll-client",
             "CLIENT_SECRET": CLIENT_SECRET}  # fmt: skip
    for name, value in {**known, **more}.items():
        if value:
            patch.setenv(f"DOLL_KAFKA_{name}", value)
        else:
            patch.delenv(f"DOLL_KAFKA_{name}", raising=False)


def services_at(rig: Rig, listener: str) -> Services:
    return Services(rig.kafka.address_of(listener), "")


def make_topic(rig: Rig, name: str) -> str:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": rig.kafka.address})
    admin.create_topics([NewTopic(name, num_partitions=1)])[name].result(300)
    return name


def check_all_clients(config: JobConfig, services: Services, topic: str) -> None:
    """An admin client sees the topic, a producer writes to it, and a consumer reads it."""
    assert kafka_problem(config, services, 60.0) is None
    assert topic in make_admin(config, services).list_topics(timeout=60).topics
    producer, consumer = make_producer(config, services), make_consumer(config, services, "test")
    send(producer, topic, b"1")
    consumer.assign([TopicPartition(topic, 0, 0)])
    assert next_value(consumer) == b"1"
    consumer.close()


def send(producer: Any, topic: str, value: bytes) -> None:
    refusals: list[Any] = []
    producer.produce(topic, value, on_delivery=lambda error, message: refusals.append(error) if error else None)
    assert producer.flush(300) == 0
    assert not refusals


def next_value(consumer: Any) -> bytes:
    message = None
    deadline_s = time.monotonic() + 300
    while message is None or message.error() is not None:
        assert time.monotonic() < deadline_s
        message = consumer.poll(1.0)
    return bytes(message.value())


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_passwords(rig: Rig, monkeypatch: pytest.MonkeyPatch, mechanism: str) -> None:
    set_environment(monkeypatch, rig)
    config = with_password(mechanism)
    assert principal_text(config.kafka) == "User:doll"
    check_all_clients(config, services_at(rig, "passwords"), make_topic(rig, f"t-{mechanism}"))


def test_a_token_endpoint(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, rig)
    check_all_clients(with_token(rig), services_at(rig, "oauth"), make_topic(rig, "t-oauth"))
    assert rig.endpoint.forms[-1] == {"grant_type": ["client_credentials"], "scope": ["read write"]}


def test_msk_iam_asks_for_tokens_in_the_clusters_region(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS's library signs an address, which only MSK accepts: the tokens of the local endpoint take its place."""
    from aws_msk_iam_sasl_signer import MSKAuthTokenProvider

    regions: list[str] = []

    def generate(region: str) -> tuple[str, int]:
        regions.append(region)
        return rig.endpoint.token(), round((time.time() + TOKEN_S) * 1000)

    monkeypatch.setattr(MSKAuthTokenProvider, "generate_auth_token", generate)
    set_environment(monkeypatch, rig)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    config = job("kafka.security=sasl_ssl", "kafka.sasl_mechanism=AWS_MSK_IAM")
    check_all_clients(config, services_at(rig, "oauth"), make_topic(rig, "t-msk"))
    assert set(regions) == {"eu-west-1"}


@pytest.mark.parametrize("form", ["files", "environment"])
def test_a_certificate_of_the_client(rig: Rig, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    path = rig.authority.issue(f"client-{form}", password=KEY_PASSWORD)
    given = str(path) if form == "files" else path.read_text()
    certificate = given if form == "files" else given[given.index("-----BEGIN CERTIFICATE") :]
    authority = str(rig.authority.path) if form == "files" else rig.authority.path.read_text()
    set_environment(monkeypatch, rig, CERT=certificate, KEY=given, KEY_PASSWORD=KEY_PASSWORD, CA=authority)
    config = job("kafka.security=ssl")
    assert own_user(config.kafka) == f"CN=client-{form}"
    check_all_clients(config, services_at(rig, "mutual"), make_topic(rig, f"t-mutual-{form}"))


def test_tokens_that_expire_while_clients_work_are_renewed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The broker closes a connection whose token has expired, unless the client has logged in again on it."""
    set_environment(monkeypatch, rig)
    config, services = with_token(rig), services_at(rig, "oauth")
    topic = make_topic(rig, "t-expiring")
    producer, consumer = make_producer(config, services), make_consumer(config, services, "test")
    consumer.assign([TopicPartition(topic, 0, 0)])
    first, end_s, sent = len(rig.endpoint.issued), time.monotonic() + 3 * TOKEN_S, 0
    while time.monotonic() < end_s:
        send(producer, topic, b"%d" % sent)
        assert next_value(consumer) == b"%d" % sent
        sent += 1
        producer.poll(0.2)
    consumer.close()
    assert len(rig.endpoint.issued) >= first + 4  # each client asked twice at least
    assert "Authentication failed" not in "".join(capfd.readouterr())


def test_a_password_file_that_changes_is_read_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    set_environment(monkeypatch, rig, PASSWORD="", PASSWORD_FILE=str(file))
    config, services = with_password("SCRAM-SHA-256"), services_at(rig, "passwords")
    topic = make_topic(rig, "t-rotated")
    producer, consumer = make_producer(config, services), make_consumer(config, services, "test")
    consumer.assign([TopicPartition(topic, 0, 0)])
    send(producer, topic, b"0")
    assert next_value(consumer) == b"0"
    try:
        set_password(rig.kafka, NEW_PASSWORD)
        file.write_text(NEW_PASSWORD + "\n")
        # Brokers ask for the password again every 2 s here.
        log: list[str] = []

        def renewed() -> bool:
            producer.poll(0.1)
            consumer.poll(0.1)
            log.append("".join(capfd.readouterr()))
            return "".join(log).count("kafka_password_renewed") >= 2

        until(renewed, lambda: "".join(log))
        send(producer, topic, b"1")
        assert next_value(consumer) == b"1"
        assert "hush" not in "".join(log)
    finally:
        set_password(rig.kafka, PASSWORD)
        consumer.close()


def test_a_certificate_that_expires_serves_open_connections_and_a_new_one_needs_new_clients(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rig.authority.issue("client-expiring", lifetime_s=8.0)
    set_environment(monkeypatch, rig, CERT=str(path), KEY=str(path))
    config, services = job("kafka.security=ssl"), services_at(rig, "mutual")
    topic = make_topic(rig, "t-certificate")
    producer = make_producer(config, services)
    send(producer, topic, b"0")
    until(lambda: kafka_problem(config, services, 30.0) is not None, "the certificate expires")
    problem = kafka_problem(config, services, 60.0)
    assert problem is not None
    assert "our certificate has expired: put a new one into DOLL_KAFKA_CERT and DOLL_KAFKA_KEY" in problem
    send(producer, topic, b"1")
    assert rig.authority.issue("client-expiring") == path
    check_all_clients(config, services, make_topic(rig, "t-certificate-2"))


def refusal(rig: Rig, config: JobConfig, listener: str) -> str:
    problem = kafka_problem(config, services_at(rig, listener), 20.0)
    assert problem is not None
    assert "\n" not in problem
    assert "hush" not in problem
    return problem


def test_a_refused_log_in_says_what_to_do(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    set_environment(monkeypatch, rig, PASSWORD="wr0ng-hush", CLIENT_SECRET="wr0ng-hush")
    for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        said = refusal(rig, with_password(mechanism), "passwords")
        assert f"refuses us ({mechanism}" in said or "SASL" in said
        assert "correct DOLL_KAFKA_USERNAME and DOLL_KAFKA_PASSWORD" in said
    assert "DOLL_KAFKA_CLIENT_SECRET" in refusal(rig, with_token(rig), "oauth")
    set_environment(monkeypatch, rig)
    assert "set it to one that the broker has enabled" in refusal(rig, with_password("SCRAM-SHA-512"), "oauth")
    assert "misses one: set DOLL_KAFKA_CERT" in refusal(rig, job("kafka.security=ssl"), "mutual")
    stranger = Authority(tmp_path, "stranger")
    path = stranger.issue("client-stranger")
    set_environment(monkeypatch, rig, CERT=str(path), KEY=str(path))
    assert "does not accept our certificate" in refusal(rig, job("kafka.security=ssl"), "mutual")
    set_environment(monkeypatch, rig, CERT="", KEY="", CA=str(stranger.path))
    assert "set DOLL_KAFKA_CA" in refusal(rig, with_password("PLAIN"), "passwords")
    set_environment(monkeypatch, rig)
    assert "kafka.security" in refusal(rig, job("kafka.security=sasl_plaintext"), "passwords")
    assert "hush" not in "".join(capfd.readouterr())


def test_clients_that_work_log_a_log_in_that_is_refused_with_what_to_do(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_environment(monkeypatch, rig, PASSWORD="wr0ng-hush")
    producer = make_producer(with_password("PLAIN"), services_at(rig, "passwords"), error_cb=lambda error: None)
    log: list[str] = []

    def logged() -> bool:
        producer.poll(0.1)
        log.append("".join(capfd.readouterr()))
        return "correct DOLL_KAFKA_USERNAME" in "".join(log)

    until(logged, lambda: "".join(log))
    assert "hush" not in "".join(log)
