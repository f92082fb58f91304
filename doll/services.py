"""Where Kafka and Redis are and how to connect: addresses from job file or environment, secrets from environment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from doll.errors import ConfigError, ServiceUnavailableError
from doll.telemetry import get_logger

if TYPE_CHECKING:
    import redis

    from doll.config import JobConfig

log = get_logger(__name__)

KAFKA_ENV: Final = "DOLL_KAFKA"
REDIS_ENV: Final = "DOLL_REDIS"
BLOBS_ENV: Final = "DOLL_BLOB_FOLDER"
KAFKA_USER_ENV: Final = "DOLL_KAFKA_USERNAME"
KAFKA_PASSWORD_ENV: Final = "DOLL_KAFKA_PASSWORD"
KAFKA_CA_ENV: Final = "DOLL_KAFKA_CA"
REDIS_USER_ENV: Final = "DOLL_REDIS_USERNAME"
REDIS_PASSWORD_ENV: Final = "DOLL_REDIS_PASSWORD"
REDIS_CA_ENV: Final = "DOLL_REDIS_CA"

# For control records: what is sent in one breath (the grants of a group, an announcement and a push) travels in one
# request. A broker spends more on a request than this wait costs a round.
LINGER_MS: Final = 0.5
# The longest control record, and dead letter: one that names every offset of a large group, because all are refused.
RECORD_LIMIT_BYTES: Final = 32 * 1024 * 1024
_REDIS_SCHEMES: Final = ("redis://", "rediss://")
# At level 3 librdkafka writes a line each 50 ms while a broker is away; `error_cb` tells it once instead.
_LIBRDKAFKA_CRITICAL: Final = 2
# librdkafka's and confluent-kafka's few settings that are written with an underscore.
_UNDERSCORED: Final = frozenset({"log_level", "on_commit", "on_delivery"})
_REPEAT_AFTER_S: Final = 30.0
_METADATA_WAIT_S: Final = 0.5
# redis-py's own packer sends what is longer than this as it is: with 10 MB and more 3 times faster than hiredis's.
_PACK_CUTOFF_BYTES: Final = 6000


@dataclass(frozen=True)
class Services:
    """Addresses of the services of a job; they hold no secret.

    Attributes:
        kafka: bootstrap servers, `host:port[,host:port]`.
        redis: URL, `redis://host:port/db` or `rediss://...`, without credentials.
        blobs: folder in shared memory for weights and gradients; empty: they go through Redis.
    """

    kafka: str
    redis: str
    blobs: str = ""


class Settings(dict[str, Any]):
    """librdkafka settings whose repr hides the password."""

    def __repr__(self) -> str:
        return repr({key: "***" if "password" in key else value for key, value in self.items()})


def kafka_address(config: JobConfig) -> str | None:
    """Bootstrap servers from the job file, else from $DOLL_KAFKA, else None.

    Raises:
        ConfigError: they hold credentials.
    """
    address = config.kafka.address or os.environ.get(KAFKA_ENV) or None
    if address is not None and "@" in address:  # the address itself is a secret then: it is not repeated here
        origin = "kafka.address" if config.kafka.address else f"${KAFKA_ENV}"
        raise ConfigError(
            f"{origin} holds credentials: expected host:port[,host:port]; set {KAFKA_USER_ENV} and "
            f"{KAFKA_PASSWORD_ENV} instead"
        )
    return address


def redis_address(config: JobConfig) -> str | None:
    """Redis URL from the job file, else from $DOLL_REDIS, else None.

    Raises:
        ConfigError: it is not a redis:// URL, or holds credentials.
    """
    url = config.redis.address or os.environ.get(REDIS_ENV) or None
    if url is None:
        return None
    origin = "redis.address" if config.redis.address else f"${REDIS_ENV}"
    if "@" in url or "?" in url:  # the URL itself is a secret then: it is not repeated here
        raise ConfigError(
            f"{origin} holds credentials: expected redis://host:port/db; set {REDIS_PASSWORD_ENV} instead"
        )
    if not url.startswith(_REDIS_SCHEMES):
        raise ConfigError(f"{origin}: expected redis://host:port/db or rediss://host:port/db, got {url!r}")
    return url


def resolve(config: JobConfig) -> Services:
    """The services that the job file or the environment name.

    Raises:
        ConfigError: an address is in neither, or is malformed.
    """
    kafka, redis_url = kafka_address(config), redis_address(config)
    missing = []
    if kafka is None:
        missing.append(f"Kafka: set kafka.address in the job file or {KAFKA_ENV}=host:port")
    if redis_url is None:
        missing.append(f"Redis: set redis.address in the job file or {REDIS_ENV}=redis://host:port/0")
    if kafka is None or redis_url is None:
        raise ConfigError(f"no address for {'; '.join(missing)}; or use `doll up`, which starts them on this machine")
    return Services(kafka, redis_url)


def kafka_credentials(config: JobConfig) -> tuple[str, str] | None:
    """User name and password for SASL from the environment; None where the job's Kafka asks for none.

    Raises:
        ConfigError: SASL is asked for and the environment lacks the user name or the password.
    """
    if not config.kafka.security.startswith("sasl"):
        return None
    username, password = os.environ.get(KAFKA_USER_ENV), os.environ.get(KAFKA_PASSWORD_ENV)
    if not username or not password:
        raise ConfigError(f"kafka.security is {config.kafka.security}: set {KAFKA_USER_ENV} and {KAFKA_PASSWORD_ENV}")
    return username, password


def kafka_settings(config: JobConfig, services: Services, **extra: Any) -> Settings:
    """librdkafka settings for a producer, consumer or admin client.

    `extra` adds or replaces settings, with `_` for each `.`: `kafka_settings(config, services, group_id="g")`.

    While a broker is away, the client's log gets one line in 30 seconds, not one each 50 ms.

    Raises:
        ConfigError: SASL is asked for and the environment lacks the user name or the password.
    """
    settings = Settings(
        {
            "bootstrap.servers": services.kafka,
            "security.protocol": config.kafka.security.upper(),
            "log_level": _LIBRDKAFKA_CRITICAL,
            "error_cb": _LogErrorsOnce(services.kafka),
            "reconnect.backoff.max.ms": 1000,  # librdkafka's 10 s would outlast a broker's restart
            "retry.backoff.max.ms": 250,  # how often a new leader is asked for; 1 s would add to its election
        }
    )
    if (credentials := kafka_credentials(config)) is not None:
        username, password = credentials
        settings |= {"sasl.mechanism": "SCRAM-SHA-512", "sasl.username": username, "sasl.password": password}
    if config.kafka.security.endswith("ssl") and (ca := os.environ.get(KAFKA_CA_ENV)):
        settings["ssl.ca.location"] = ca
    for key, value in extra.items():
        settings[key if key.endswith("_cb") or key in _UNDERSCORED else key.replace("_", ".")] = value
    return settings


class _LogErrorsOnce:
    """An `error_cb` that logs each kind of trouble once in `_REPEAT_AFTER_S` seconds."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._clock = clock
        self._logged_at_s: dict[str, float] = {}

    def __call__(self, error: Any) -> None:
        now = self._clock()
        kind = error.name()
        if now - self._logged_at_s.get(kind, float("-inf")) < _REPEAT_AFTER_S:
            return
        self._logged_at_s[kind] = now
        log.warning("kafka_error", address=self._address, error=kind, reason=error.str())


def connect_redis(services: Services, *, timeout_s: float = 10.0, retries: int = 1) -> redis.Redis:
    """A synchronous client with its own pool. Nothing is sent before its first command.

    It parses with hiredis and packs with redis-py's Python packer, the faster of the two for big values.

    Args:
        timeout_s: longest wait for a connection's next bytes; connecting takes at most 5 s.
        retries: how often a command is sent again when its connection breaks. Reconnecting retries as often each time:
            a server that is silent, not gone, holds a command for up to `(retries + 1) ** 2` times `timeout_s`.
    """
    import redis
    from redis.backoff import ExponentialBackoff
    from redis.connection import PythonRespSerializer
    from redis.retry import Retry

    ca = os.environ.get(REDIS_CA_ENV)
    tls = {"ssl_ca_certs": ca} if ca and services.redis.startswith("rediss://") else {}
    pool = redis.ConnectionPool.from_url(
        services.redis,
        username=os.environ.get(REDIS_USER_ENV) or None,
        password=os.environ.get(REDIS_PASSWORD_ENV) or None,
        socket_timeout=timeout_s,
        socket_connect_timeout=min(timeout_s, 5.0),
        socket_keepalive=True,
        health_check_interval=30,
        protocol=2,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=retries),
        **tls,
    )
    pool.connection_kwargs["command_packer"] = PythonRespSerializer(_PACK_CUTOFF_BYTES, pool.get_encoder().encode)
    return redis.Redis.from_pool(pool)


def require(config: JobConfig, services: Services, timeout_s: float = 8.0) -> None:
    """Return once Redis answers a PING (within 5 s) and Kafka sends its metadata (within `timeout_s`).

    Raises:
        ServiceUnavailableError: one of them does not answer. The message names the address and what to do.
        ConfigError: credentials are missing.
    """
    problems = [problem for problem in (redis_problem(services), kafka_problem(config, services, timeout_s)) if problem]
    if problems:
        raise ServiceUnavailableError("; ".join(problems))


def redis_problem(services: Services, timeout_s: float = 4.0) -> str | None:
    """None if Redis answers a PING within about `timeout_s`; else what is wrong and what to do."""
    import redis

    client = connect_redis(services, timeout_s=timeout_s, retries=0)
    try:
        client.ping()
    except (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError) as exc:
        return f"Redis at {services.redis} refuses us ({exc}): set {REDIS_PASSWORD_ENV} (and {REDIS_USER_ENV})"
    except redis.exceptions.RedisError as exc:
        return (
            f"Redis at {services.redis} does not answer ({exc}): start it, correct redis.address or {REDIS_ENV}, "
            "or use `doll up`, which starts one where no address is given"
        )
    finally:
        client.close()
    return None


def kafka_problem(config: JobConfig, services: Services, timeout_s: float) -> str | None:
    """None if Kafka answers with its metadata; else what is wrong and what to do.

    Raises:
        ConfigError: credentials are missing.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    errors: list[str] = []
    admin = AdminClient(kafka_settings(config, services, error_cb=lambda error: errors.append(error.str())))
    deadline_s = time.monotonic() + timeout_s
    while True:  # in short waits: librdkafka retries a refused log-in until the time is over
        left_s = max(deadline_s - time.monotonic(), 0.0)
        try:
            admin.list_topics(timeout=max(min(left_s, _METADATA_WAIT_S), 0.001))
            return None
        except KafkaException as exc:
            admin.poll(0)  # hands over the reasons that librdkafka has kept
            reason = errors[-1] if errors else exc.args[0].str()
        refusal = next((text for text in reversed(errors) if _is_refusal(text)), None)
        if refusal is not None and (left_s <= 0.0 or _is_final(refusal)):
            return (
                f"Kafka at {services.kafka} ({config.kafka.security}) refuses us ({refusal}): correct kafka.security, "
                f"{KAFKA_USER_ENV}, {KAFKA_PASSWORD_ENV} or {KAFKA_CA_ENV} (the CA's certificates, PEM)"
            )
        if left_s <= 0.0:
            return (
                f"Kafka at {services.kafka} ({config.kafka.security}) does not answer within {timeout_s:g} s "
                f"({reason}): start it, correct kafka.address (or {KAFKA_ENV}) or kafka.security, or use `doll up`, "
                "which starts one where no address is given"
            )


def _is_refusal(reason: str) -> bool:
    """Whether librdkafka's reason is about who we are: a log-in or a certificate, not a broker that is away."""
    return "SASL" in reason or "ertificate" in reason or "SSL" in reason


def _is_final(refusal: str) -> bool:
    """Whether trying again is idle; a handshake that broke off may be a broker that is still starting."""
    return "uthentication" in refusal or "verify failed" in refusal
