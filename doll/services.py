"""Find the addresses of a job's Kafka and Redis, from the job file or from environment variables.

The clients are built in `doll.kafka.clients` and `doll.storage.redis_client`. Kafka's logins are in
`doll.kafka.logins`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from doll.errors import ConfigError

if TYPE_CHECKING:
    from doll.config import JobConfig

KAFKA_ENV: Final = "DOLL_KAFKA"
REDIS_ENV: Final = "DOLL_REDIS"
BLOBS_ENV: Final = "DOLL_BLOB_FOLDER"
CONTROL_ENV: Final = "DOLL_CONTROL_SOCKET"
KAFKA_USER_ENV: Final = "DOLL_KAFKA_USERNAME"
KAFKA_PASSWORD_ENV: Final = "DOLL_KAFKA_PASSWORD"
KAFKA_CLIENT_ID_ENV: Final = "DOLL_KAFKA_CLIENT_ID"
KAFKA_CLIENT_SECRET_ENV: Final = "DOLL_KAFKA_CLIENT_SECRET"
KAFKA_CA_ENV: Final = "DOLL_KAFKA_CA"
KAFKA_TOKEN_CA_ENV: Final = "DOLL_KAFKA_TOKEN_CA"
KAFKA_CERT_ENV: Final = "DOLL_KAFKA_CERT"
KAFKA_KEY_ENV: Final = "DOLL_KAFKA_KEY"
KAFKA_KEY_PASSWORD_ENV: Final = "DOLL_KAFKA_KEY_PASSWORD"
REDIS_USER_ENV: Final = "DOLL_REDIS_USERNAME"
REDIS_PASSWORD_ENV: Final = "DOLL_REDIS_PASSWORD"
REDIS_CA_ENV: Final = "DOLL_REDIS_CA"
REDIS_CERT_ENV: Final = "DOLL_REDIS_CERT"
REDIS_KEY_ENV: Final = "DOLL_REDIS_KEY"
REDIS_SENTINEL_USER_ENV: Final = "DOLL_REDIS_SENTINEL_USERNAME"
REDIS_SENTINEL_PASSWORD_ENV: Final = "DOLL_REDIS_SENTINEL_PASSWORD"
_REDIS_URL: Final = re.compile(r"redis(s?)(?:\+(sentinel|cluster))?://([^/@?#\s]+)((?:/[A-Za-z0-9._-]*)*)")
_REDIS_PORTS: Final = {"sentinel": 26379}
REDIS_FORMS: Final = (
    "redis://host:port/db, redis+sentinel://host:port[,host:port]/PRIMARY[/db] or "
    "redis+cluster://host:port[,host:port], with rediss in place of redis for TLS"
)
"""The valid forms of a Redis URL, for messages."""


@dataclass(frozen=True)
class Services:
    """The addresses of a job's services, without secrets."""

    kafka: str  # bootstrap servers, `host:port[,host:port]`
    redis: str  # URL without credentials, in a form that `parse_redis` reads
    blobs: str = ""  # folder in shared memory for weights and gradients; empty: they go through Redis
    # Path of the local control socket. Server: the socket to listen on. Worker: the socket to connect to
    # instead of the server's (a relay). Empty: the server's own choice.
    control: str = ""


def kafka_address(config: JobConfig) -> str | None:
    """Return the bootstrap servers from the job file, otherwise from $DOLL_KAFKA, otherwise None. Raise ConfigError if
    the address contains credentials."""
    address = config.kafka.address or os.environ.get(KAFKA_ENV) or None
    if address is not None and "@" in address:  # the address itself is a secret then: it is not repeated here
        origin = "kafka.address" if config.kafka.address else f"${KAFKA_ENV}"
        raise ConfigError(
            f"{origin} holds credentials: expected host:port[,host:port]; set {KAFKA_USER_ENV} and "
            f"{KAFKA_PASSWORD_ENV} instead"
        )
    return address


@dataclass(frozen=True)
class RedisPlace:
    """The servers of a Redis installation."""

    kind: str  # "single", "sentinel" or "cluster"
    tls: bool
    addresses: tuple[tuple[str, int], ...]  # the server, or some Sentinels or Cluster nodes
    name: str = ""  # Sentinel: name of the primary; Cluster: job that determines the hash slot
    db: int = 0


def parse_redis(url: str) -> RedisPlace | None:
    """Return the servers that a Redis URL names, or None if the URL has none of the forms of `REDIS_FORMS`."""
    match = _REDIS_URL.fullmatch(url)
    if match is None:
        return None
    tls, kind, addresses, rest = match.groups()
    parts = [part for part in rest.split("/") if part]
    name = parts.pop(0) if kind and parts else ""
    hosts = [_split_address(item, _REDIS_PORTS.get(kind, 6379)) for item in addresses.split(",")]
    if None in hosts or len(parts) > 1 or (parts and not parts[0].isdecimal()):
        return None
    if (kind == "sentinel" and not name) or (kind == "cluster" and parts) or (not kind and len(hosts) > 1):
        return None
    places = tuple(host for host in hosts if host is not None)
    return RedisPlace(kind or "single", bool(tls), places, name, int(parts[0]) if parts else 0)


def _split_address(text: str, port: int) -> tuple[str, int] | None:
    host, colon, given = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, given = text, str(port)
    if not host or not given.isdecimal() or not 0 < int(given) < 65_536:
        return None
    return host.strip("[]"), int(given)


def redis_address(config: JobConfig) -> str | None:
    """Return the Redis URL from the job file, otherwise from $DOLL_REDIS, otherwise None. The URL of a Cluster also
    names the job. Raise ConfigError if the URL is not a valid Redis URL, or contains credentials."""
    url = config.redis.address or os.environ.get(REDIS_ENV) or None
    if url is None:
        return None
    return _checked_redis(config, url, "redis.address" if config.redis.address else f"${REDIS_ENV}")


def shard_addresses(config: JobConfig) -> list[str]:
    """Return the Redis URLs of the shards, in order; none if all blobs are in one Redis. Raises the errors of
    `redis_address`."""
    urls = enumerate(config.redis.shard_addresses)
    return [_checked_redis(config, url, f"redis.shard_addresses.{number}") for number, url in urls]


def _checked_redis(config: JobConfig, url: str, origin: str) -> str:
    if "@" in url or "?" in url:  # the URL itself is a secret then: it is not repeated here
        raise ConfigError(f"{origin} holds credentials: expected {REDIS_FORMS}; set {REDIS_PASSWORD_ENV} instead")
    if (place := parse_redis(url)) is None:
        raise ConfigError(f"{origin}: expected {REDIS_FORMS}, got {url!r}")
    if place.kind != "cluster":
        return url
    if place.name not in ("", config.job):
        raise ConfigError(f"{origin}: expected a Cluster's addresses alone, got {url!r}")
    return url if place.name else f"{url.rstrip('/')}/{config.job}"


def resolve(config: JobConfig, *, needs_redis: bool = True) -> Services:
    """Return the services that the job file or the environment names. Raise ConfigError if an address is missing or
    malformed.

    Args:
        needs_redis: whether a missing Redis address is an error. False: the address may then be empty, because the
            caller only reads Kafka.
    """
    kafka, redis_url = kafka_address(config), redis_address(config)
    missing = []
    if kafka is None:
        missing.append(f"Kafka: set kafka.address in the job file or {KAFKA_ENV}=host:port")
    if redis_url is None and needs_redis:
        missing.append(f"Redis: set redis.address in the job file or {REDIS_ENV}=redis://host:port/0")
    if kafka is None or missing:
        raise ConfigError(f"no address for {'; '.join(missing)}; or use `doll up`, which starts them on this machine")
    return Services(kafka, redis_url or "", control=os.environ.get(CONTROL_ENV, ""))
