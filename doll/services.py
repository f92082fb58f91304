"""Where a job's Kafka and Redis are: addresses from the job file or the environment, and the names of its variables.

Clients are built in `doll.kafka.clients` and `doll.storage.redis_client`, which also read the credentials.
"""

from __future__ import annotations

import os
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
KAFKA_CA_ENV: Final = "DOLL_KAFKA_CA"
REDIS_USER_ENV: Final = "DOLL_REDIS_USERNAME"
REDIS_PASSWORD_ENV: Final = "DOLL_REDIS_PASSWORD"
REDIS_CA_ENV: Final = "DOLL_REDIS_CA"
_REDIS_SCHEMES: Final = ("redis://", "rediss://")


@dataclass(frozen=True)
class Services:
    """Addresses of the services of a job; they hold no secret.

    Attributes:
        kafka: bootstrap servers, `host:port[,host:port]`.
        redis: URL, `redis://host:port/db` or `rediss://...`, without credentials.
        blobs: folder in shared memory for weights and gradients; empty: they go through Redis.
        control: path of the local control socket: of a server, the socket to listen on; of a worker, the socket to
            connect to instead of the server's (a relay). Empty: the server's own choice.
    """

    kafka: str
    redis: str
    blobs: str = ""
    control: str = ""


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


def resolve(config: JobConfig, *, needs_redis: bool = True) -> Services:
    """The services that the job file or the environment name.

    Args:
        needs_redis: False: the caller reads Kafka alone; without an address of Redis, it is empty.

    Raises:
        ConfigError: an address is in neither, or is malformed.
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
