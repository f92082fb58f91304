"""How log-ins become settings of librdkafka, and what a job file may say of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import Authority
from doll.config import JobConfig
from doll.config.connections import KafkaConfig
from doll.errors import ConfigError
from doll.kafka.clients import kafka_settings, make_admin
from doll.kafka.logins import login_settings, own_user, principal_text
from doll.services import Services
from job_files import job

OAUTH = "{token_url: 'https://issuer/token', scope: 'a b', extensions: {logicalCluster: lkc-1, identityPoolId: pool-2}}"


def with_oauth(oauth: str = OAUTH) -> JobConfig:
    return job("kafka.security=sasl_ssl", "kafka.sasl_mechanism=OAUTHBEARER", f"kafka.oauth={oauth}")


def test_tokens_come_by_librdkafkas_own_method(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="set DOLL_KAFKA_CLIENT_ID and DOLL_KAFKA_CLIENT_SECRET"):
        login_settings(with_oauth().kafka, "a:1")
    monkeypatch.setenv("DOLL_KAFKA_CLIENT_ID", "me")
    monkeypatch.setenv("DOLL_KAFKA_CLIENT_SECRET", "hush")
    monkeypatch.setenv("DOLL_KAFKA_TOKEN_CA", "issuer.pem")
    settings = kafka_settings(with_oauth(), Services("a:1", ""))
    login = {key: value for key, value in settings.items() if key.startswith(("sasl", "https", "security"))}
    assert login == {
        "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": "https://issuer/token", "sasl.oauthbearer.client.id": "me",
        "sasl.oauthbearer.client.secret": "hush", "sasl.oauthbearer.scope": "a b", "https.ca.location": "issuer.pem",
        "sasl.oauthbearer.extensions": "logicalCluster=lkc-1,identityPoolId=pool-2",
    }  # fmt: skip
    assert "hush" not in repr(settings)
    assert principal_text(with_oauth().kafka) == "User:me (the `sub` of its token)"
    assert own_user(with_oauth().kafka) is None


def test_certificates_come_from_files_or_from_the_environment_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("me")
    kafka = job("kafka.security=ssl").kafka
    monkeypatch.setenv("DOLL_KAFKA_CERT", str(own))
    with pytest.raises(ConfigError, match="DOLL_KAFKA_CERT is set, DOLL_KAFKA_KEY is not: expected both"):
        login_settings(kafka, "a:1")
    monkeypatch.setenv("DOLL_KAFKA_KEY", own.read_text())
    monkeypatch.setenv("DOLL_KAFKA_KEY_PASSWORD", "hush")
    monkeypatch.setenv("DOLL_KAFKA_CA", authority.path.read_text())
    settings = kafka_settings(job("kafka.security=ssl"), Services("a:1", ""))
    assert settings["ssl.certificate.location"] == str(own)
    assert settings["ssl.key.pem"] == own.read_text()
    assert settings["ssl.ca.pem"] == authority.path.read_text()
    assert "hush" not in repr(settings)
    assert "PRIVATE KEY" not in repr(settings)
    assert own_user(kafka) == "CN=me"
    monkeypatch.setenv("DOLL_KAFKA_CERT", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"DOLL_KAFKA_CERT: cannot read .*none"):
        own_user(kafka)


def test_a_certificate_that_cannot_be_used_is_refused_with_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOLL_KAFKA_CERT", str(tmp_path / "none.pem"))
    monkeypatch.setenv("DOLL_KAFKA_KEY", str(tmp_path / "none.pem"))
    with pytest.raises(
        ConfigError, match=r"Kafka's client cannot be made .*DOLL_KAFKA_CERT: cannot read .*none.pem: No such file"
    ) as caught:
        make_admin(job("kafka.security=ssl"), Services("a:1", ""))
    assert "\n" not in str(caught.value)


def test_the_region_of_msk_is_in_its_brokers_names_else_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    kafka = job("kafka.security=sasl_ssl", "kafka.sasl_mechanism=AWS_MSK_IAM").kafka
    with pytest.raises(ConfigError, match=r"expected one region in the brokers' names .* found none"):
        login_settings(kafka, "broker:9098")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert callable(login_settings(kafka, "broker:9098")["oauth_cb"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-hush")
    address = (
        "b-1.x.abc123.c4.kafka.eu-central-1.amazonaws.com:9098,boot-1.y.kafka-serverless.eu-central-1.amazonaws.com:1"
    )
    token, expires_s = login_settings(kafka, address)["oauth_cb"]("")
    assert expires_s > 1_700_000_000
    from base64 import urlsafe_b64decode

    signed = urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    assert signed.startswith("https://kafka.eu-central-1.amazonaws.com/?Action=kafka-cluster%3AConnect")
    assert "aws-hush" not in signed


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["security=ssl", "sasl_mechanism=PLAIN"], "expected security: sasl_ssl"),
        (["security=sasl_ssl", "sasl_mechanism=OAUTHBEARER"], "expected oauth.token_url with"),
        (["security=sasl_ssl", f"oauth={OAUTH}"], "no oauth with any other"),
        (["security=sasl_plaintext", "sasl_mechanism=AWS_MSK_IAM"], "AWS_MSK_IAM: expected security: sasl_ssl"),
        (
            ["security=sasl_ssl", "sasl_mechanism=AWS_MSK_IAM", "producer_user=me"],
            "producer_user: with AWS_MSK_IAM DOLL does not know its own principal",
        ),
        (
            ["security=sasl_ssl", "sasl_mechanism=AWS_MSK_IAM", "worker_user=me"],
            "worker_user: with AWS_MSK_IAM DOLL does not know its own principal",
        ),
        (["security=sasl_ssl", "sasl_mechanism=GSSAPI"], "input should be 'PLAIN', 'SCRAM-SHA-256'"),
    ],
)
def test_what_cannot_be_a_log_in_is_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        job(*(f"kafka.{override}" for override in overrides))


def test_a_clients_secret_is_sent_over_tls_or_loopback_only() -> None:
    with pytest.raises(ConfigError, match="expected https://"):
        with_oauth("{token_url: 'http://issuer/token'}")
    with pytest.raises(ConfigError, match="expected https://"):
        with_oauth("{token_url: 'http://127.0.0.1.evil/token'}")
    with pytest.raises(ConfigError, match="token_url"):
        with_oauth("{token_url: 'https://me:hush@issuer/token'}")
    assert with_oauth("{token_url: 'http://127.0.0.1:8080/token'}").kafka.oauth is not None


def test_scram_sha_512_is_the_default() -> None:
    assert KafkaConfig(security="sasl_ssl").mechanism == "SCRAM-SHA-512"
    assert KafkaConfig(security="ssl").mechanism is None
