"""Clients of Redis: the one place that builds them and says why Redis cannot be reached."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Final

import redis
from redis.backoff import ExponentialBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from doll.credentials import secret
from doll.errors import ConfigError
from doll.services import (
    REDIS_CA_ENV,
    REDIS_CERT_ENV,
    REDIS_ENV,
    REDIS_FORMS,
    REDIS_KEY_ENV,
    REDIS_PASSWORD_ENV,
    REDIS_SENTINEL_PASSWORD_ENV,
    REDIS_SENTINEL_USER_ENV,
    REDIS_USER_ENV,
    Services,
    parse_redis,
)
from doll.storage.blobs import key_prefix
from doll.storage.redis_places import cluster_pool, reason_of, sentinel_pool

# redis-py's own packer sends what is longer than this as it is: with 10 MB and more 3 times faster than hiredis's.
_PACK_CUTOFF_BYTES: Final = 6000


def connect_redis(services: Services, *, timeout_s: float = 10.0, retries: int = 1) -> redis.Redis:
    """A synchronous client with its own pool. Nothing is sent before its first command.

    It parses with hiredis and packs with redis-py's Python packer, the faster of the two for big values.

    Args:
        timeout_s: longest wait for a connection's next bytes; connecting takes at most 5 s.
        retries: how often a command is sent again when its connection breaks. Reconnecting retries as often each time:
            a server that is silent, not gone, holds a command for up to `(retries + 1) ** 2` times `timeout_s`.
    """
    place = parse_redis(services.redis)
    if place is None:
        raise ConfigError(f"expected {REDIS_FORMS}, got {services.redis!r}")
    common: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(timeout_s, 5.0),
        "socket_keepalive": True,
        "protocol": 2,
        "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=retries),
        **(_tls_settings() if place.tls else {}),
    }
    settings = {
        **common, "username": secret(REDIS_USER_ENV), "password": secret(REDIS_PASSWORD_ENV),
        "health_check_interval": 30,
    }  # fmt: skip
    if place.kind == "sentinel":
        log_in = {"username": secret(REDIS_SENTINEL_USER_ENV), "password": secret(REDIS_SENTINEL_PASSWORD_ENV)}
        pool = sentinel_pool(place, settings, {**common, **log_in})
    elif place.kind == "cluster":
        pool = cluster_pool(place, settings)
    else:
        ((host, port),) = place.addresses
        kind = redis.SSLConnection if place.tls else redis.Connection
        pool = redis.ConnectionPool(connection_class=kind, host=host, port=port, db=place.db, **settings)
    pool.connection_kwargs["command_packer"] = PythonRespSerializer(_PACK_CUTOFF_BYTES, pool.get_encoder().encode)
    return redis.Redis.from_pool(pool)


def _tls_settings() -> dict[str, Any]:
    """The authority and, where the server asks for one, our certificate: PEM files."""
    names = {"ssl_ca_certs": REDIS_CA_ENV, "ssl_certfile": REDIS_CERT_ENV, "ssl_keyfile": REDIS_KEY_ENV}
    return {key: os.environ[name] for key, name in names.items() if os.environ.get(name)}


def redis_problem(services: Services, timeout_s: float = 4.0) -> str | None:
    """Why Redis does not answer a PING within about `timeout_s`, and what to do; None if it does."""
    try:
        with connect_redis(services, timeout_s=timeout_s, retries=0) as client:
            client.ping()
    except (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError) as exc:
        return (
            f"Redis at {services.redis} refuses us ({reason_of(exc)}): set {REDIS_PASSWORD_ENV} (and {REDIS_USER_ENV})"
        )
    except redis.exceptions.RedisError as exc:
        return (
            f"Redis at {services.redis} does not answer ({reason_of(exc)}): start it, or correct redis.address or "
            f"{REDIS_ENV}"
        )
    return None


def server_pid(services: Services) -> int | None:
    """The process id of the Redis server; None if it does not answer within a second."""
    with contextlib.suppress(redis.RedisError), connect_redis(services, timeout_s=1.0, retries=0) as client:
        return int(client.info("server")["process_id"])
    return None


def delete_keys(services: Services, pattern: str) -> int:
    """Delete the keys that match a glob; how many there were, 0 where Redis does not answer within a second."""
    with contextlib.suppress(redis.RedisError), connect_redis(services, timeout_s=1.0, retries=0) as client:
        keys = list(client.scan_iter(pattern, count=1000))
        return int(client.delete(*keys)) if keys else 0
    return 0


class WorkerCount:
    """How many workers a running job is to have: the parameter server writes it (`doll scale` changes it), and
    `--any-slot` workers, which wait for a place, read it. Without it they count with the job file's number. `job` is
    the job, and what else tells it from others on this Redis."""

    def __init__(self, client: redis.Redis, job: str) -> None:
        self._client: Any = client  # redis-py's types mix its synchronous and asynchronous answers
        self._key = f"{key_prefix(job)}:workers"

    def set(self, workers: int) -> bool:
        """The job is to have so many from now on. False: Redis does not answer."""
        try:
            self._client.set(self._key, workers)
        except redis.RedisError:
            return False
        return True

    def get(self, default: int) -> int:
        """The number; `default` if nobody has set it, or not to a number above 0. Raises RedisError if Redis does not
        answer."""
        value = self._client.get(self._key)
        return int(value) if value is not None and value.isdigit() and int(value) > 0 else default
