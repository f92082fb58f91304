"""Convert the login of a job's clients, from job file and environment, to settings of librdkafka.

All clients have the same login. PLAIN and SCRAM send a user name and a password. OAUTHBEARER sends a token that
librdkafka gets from `kafka.oauth.token_url` and renews. AWS_MSK_IAM sends a token that AWS's library signs with the
credentials that boto3 finds. A client certificate (mTLS) can be used with any of them, or alone.
"""

from __future__ import annotations

import datetime
import os
import re
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError
from cryptography import x509

from doll.config.connections import WITH_PASSWORD
from doll.credentials import secret
from doll.errors import ConfigError
from doll.extras import lacking
from doll.services import (
    KAFKA_CA_ENV,
    KAFKA_CERT_ENV,
    KAFKA_CLIENT_ID_ENV,
    KAFKA_CLIENT_SECRET_ENV,
    KAFKA_KEY_ENV,
    KAFKA_KEY_PASSWORD_ENV,
    KAFKA_PASSWORD_ENV,
    KAFKA_TOKEN_CA_ENV,
    KAFKA_USER_ENV,
)
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.config.connections import KafkaConfig

log = get_logger(__name__)

_PEM: Final = "-----BEGIN"
_MSK_REGION: Final = re.compile(r"\.kafka(?:-serverless)?\.([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.com")
_REGION_ENVS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")


def login_settings(kafka: KafkaConfig, address: str) -> dict[str, Any]:
    """Return the settings with which a client connects and logs in. Raise ConfigError if the environment lacks what
    they need, or a library is not installed."""
    settings: dict[str, Any] = {"security.protocol": kafka.security.upper()}
    if (mechanism := kafka.mechanism) in WITH_PASSWORD:
        username, password = _credentials(kafka)
        settings |= {"sasl.mechanism": mechanism, "sasl.username": username, "sasl.password": password}
    elif mechanism == "OAUTHBEARER":
        settings |= _oauth_settings(kafka)
    elif mechanism == "AWS_MSK_IAM":
        settings |= {"sasl.mechanism": "OAUTHBEARER", "oauth_cb": _msk_tokens(_msk_region(address))}
    if kafka.security.endswith("ssl"):
        settings |= _tls_settings()
    return settings


def own_user(kafka: KafkaConfig) -> str | None:
    """Return the user that Kafka assigns to this process, as in its ACLs after `User:`; None if it does not log in, or
    only Kafka knows the user. Raise ConfigError if the environment lacks what the login needs."""
    if kafka.mechanism in WITH_PASSWORD:
        return _credentials(kafka)[0]
    if kafka.mechanism is None and kafka.security == "ssl" and (certificate := client_certificate()) is not None:
        return certificate.subject.rfc4514_string()
    return None


def principal_text(kafka: KafkaConfig) -> str:
    """Return the principal of this process for a message: `User:doll`, or the known part of it."""
    if (user := own_user(kafka)) is not None:
        return f"User:{user}"
    if kafka.mechanism == "OAUTHBEARER":
        return f"User:{secret(KAFKA_CLIENT_ID_ENV)} (the `sub` of its token)"
    if kafka.mechanism == "AWS_MSK_IAM":
        return "this AWS identity (in its IAM policy: MSK with IAM has no ACLs)"
    return "User:ANONYMOUS"


def client_certificate() -> x509.Certificate | None:
    """Return the certificate that this process shows to brokers; None if none is set. Raise ConfigError if it is
    unreadable."""
    if not (value := os.environ.get(KAFKA_CERT_ENV)):
        return None
    try:
        if value.startswith(_PEM):
            return x509.load_pem_x509_certificate(value.encode())
        with open(value, "rb") as file:
            return x509.load_pem_x509_certificate(file.read())
    except OSError as exc:
        raise ConfigError(f"{KAFKA_CERT_ENV}: cannot read {value}: {exc.strerror}") from None
    except ValueError:
        raise ConfigError(f"{KAFKA_CERT_ENV}: expected a certificate, or the path of one, in PEM") from None


def has_expired_certificate() -> bool:
    """Return whether this process has a certificate that has expired."""
    try:
        certificate = client_certificate()
    except ConfigError:
        return False
    return certificate is not None and certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC)


def unreadable_files() -> list[str]:
    """Return the certificates and keys that the environment names and that cannot be read, with the reasons."""
    problems = []
    for name in (KAFKA_CA_ENV, KAFKA_TOKEN_CA_ENV, KAFKA_CERT_ENV, KAFKA_KEY_ENV):
        if (value := os.environ.get(name)) and not value.startswith(_PEM):
            try:
                with open(value, "rb"):
                    pass
            except OSError as exc:
                problems.append(f"{name}: cannot read {value}: {exc.strerror}")
    return problems


def _credentials(kafka: KafkaConfig) -> tuple[str, str]:
    what = f"kafka.security is {kafka.security}, with {kafka.mechanism}"
    return _secrets(what, KAFKA_USER_ENV, KAFKA_PASSWORD_ENV)


def _secrets(what: str, name_env: str, secret_env: str) -> tuple[str, str]:
    name, hidden = secret(name_env), secret(secret_env)
    if not name or not hidden:
        raise ConfigError(f"{what}: set {name_env} and {secret_env} (or {secret_env}_FILE)")
    return name, hidden


def _oauth_settings(kafka: KafkaConfig) -> dict[str, Any]:
    assert kafka.oauth is not None
    what = "kafka.sasl_mechanism is OAUTHBEARER"
    client, hidden = _secrets(what, KAFKA_CLIENT_ID_ENV, KAFKA_CLIENT_SECRET_ENV)
    settings = {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": kafka.oauth.token_url,
        "sasl.oauthbearer.client.id": client,
        "sasl.oauthbearer.client.secret": hidden,
        **_from_environment(KAFKA_TOKEN_CA_ENV, "https.ca"),
    }
    if kafka.oauth.scope:
        settings["sasl.oauthbearer.scope"] = kafka.oauth.scope
    if extensions := kafka.oauth.extensions:
        settings["sasl.oauthbearer.extensions"] = ",".join(f"{key}={value}" for key, value in extensions.items())
    return settings


def _tls_settings() -> dict[str, Any]:
    certificate, key = (_from_environment(*names) for names in ((KAFKA_CERT_ENV, "ssl.certificate"),
                                                                 (KAFKA_KEY_ENV, "ssl.key")))  # fmt: skip
    if bool(certificate) != bool(key):
        given, lacking = (KAFKA_CERT_ENV, KAFKA_KEY_ENV) if certificate else (KAFKA_KEY_ENV, KAFKA_CERT_ENV)
        raise ConfigError(f"{given} is set, {lacking} is not: expected both (they may name the same file), or neither")
    settings = {**_from_environment(KAFKA_CA_ENV, "ssl.ca"), **certificate, **key}
    if key and (password := secret(KAFKA_KEY_PASSWORD_ENV)):
        settings["ssl.key.password"] = password
    return settings


def _from_environment(name: str, setting: str) -> dict[str, Any]:
    """Return the PEM in $`name`, or the path of a PEM file, as the setting `setting`."""
    if not (value := os.environ.get(name)):
        return {}
    return {f"{setting}.pem" if value.startswith(_PEM) else f"{setting}.location": value}


def _msk_region(address: str) -> str:
    """Return the region of a cluster, from the names of its brokers, otherwise from the environment."""
    regions = set(_MSK_REGION.findall(address)) or {os.environ[name] for name in _REGION_ENVS if os.environ.get(name)}
    if len(regions) != 1:
        named = " and ".join(sorted(regions)) or "none"
        raise ConfigError(
            f"kafka.sasl_mechanism is AWS_MSK_IAM: expected one region in the brokers' names (b-1.NAME.kafka.REGION."
            f"amazonaws.com:9098) or in AWS_REGION, found {named}"
        )
    return str(regions.pop())


def _msk_tokens(region: str) -> Callable[[str], tuple[str, float]]:
    """Return the callback that gives librdkafka a token and the token's expiry (Unix time in s), whenever it asks."""
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
    except ImportError:
        raise lacking("kafka.sasl_mechanism: AWS_MSK_IAM", "msk") from None

    def token(_: str) -> tuple[str, float]:
        try:
            value, expiry_ms = MSKAuthTokenProvider.generate_auth_token(region)
        except Exception as exc:
            log.warning(
                "kafka_token_unavailable", reason=f"{type(exc).__name__}: {exc}",
                hint="boto3 must find AWS credentials: a role, a profile, or AWS_ACCESS_KEY_ID",
            )  # fmt: skip
            raise
        return str(value), expiry_ms / 1000

    return token


class Renewal:
    """An `error_cb` that gives its client a new password after a broker has refused the old one. It passes errors to
    `report`.

    A password in a file (DOLL_KAFKA_PASSWORD_FILE) may therefore change while the job runs: open connections stay open,
    and the next connection logs in with the present content of the file.
    """

    def __init__(self, kafka: KafkaConfig, report: Callable[[Any], None]) -> None:
        self._kafka, self._report = kafka, report
        self._known = _credentials(kafka) if kafka.mechanism in WITH_PASSWORD else None
        self._client: Callable[[], Any] = lambda: None
        self._lock = threading.Lock()

    def attach(self, client: Any) -> None:
        """Set the client that has this callback. The client is not kept alive."""
        self._client = weakref.ref(client)

    def __call__(self, error: Any) -> None:
        if error.code() == KafkaError._AUTHENTICATION and self._known is not None:
            self._renew()
        self._report(error)

    def _renew(self) -> None:
        with self._lock:
            try:
                current = _credentials(self._kafka)
            except ConfigError as exc:  # the file may be missing for a moment
                log.warning("kafka_password_unreadable", reason=str(exc))
                return
            client = self._client()
            if current != self._known and client is not None:
                # In a separate thread: the library aborts the process if a callback of a client calls the client.
                threading.Thread(target=client.set_sasl_credentials, args=current, daemon=True).start()
                self._known = current
                log.info("kafka_password_renewed")
