"""Build clients of Redis, also behind Sentinel or in a Cluster, and explain why Redis cannot be reached.

All keys of a job are in one hash slot (`doll.storage.blobs.key_prefix`), so in a Cluster one primary holds them. Each
connection looks up this primary before it connects; with Sentinel, it asks the Sentinels. After a failover a connection
breaks or is refused, and the next connection looks up the new primary. Unreplicated data are lost, as after a restart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Final

import redis
from redis.backoff import ExponentialBackoff
from redis.connection import PythonRespSerializer
from redis.crc import key_slot
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

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
    RedisPlace,
    Services,
    parse_redis,
)
from doll.storage.blobs import key_prefix

# redis-py's packer does not copy longer values: for 10 MB and more it is 3 times faster than hiredis's packer.
_PACK_CUTOFF_BYTES: Final = 6000
_MOVED: Final = (
    redis.exceptions.MovedError,
    redis.exceptions.AskError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
)
"""The answers of a Cluster node while a slot moves or has no primary: the command must be sent again."""
_PASSING: Final = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
    *_MOVED,
)
_PASSING_CODES: Final = frozenset({"MISCONF", "NOREPLICAS", "BUSY"})  # codes for which redis-py has no class


def connect_redis(services: Services, *, timeout_s: float = 10.0, retries: int = 1) -> redis.Redis:
    """Return a synchronous client with its own connection pool. It sends nothing before its first command.

    The client parses with hiredis and packs with redis-py's Python packer, which is faster for large values.

    Args:
        timeout_s: maximum wait for the next bytes of a connection, in seconds; connecting takes at most 5 s.
        retries: number of times that a command is sent again after its connection breaks. Each reconnection has the
            same number of retries: a silent server can delay a command for up to `(retries + 1) ** 2` times
            `timeout_s`.
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
    """Return the TLS settings: PEM files with the authority and, if the server requires one, our certificate."""
    names = {"ssl_ca_certs": REDIS_CA_ENV, "ssl_certfile": REDIS_CERT_ENV, "ssl_keyfile": REDIS_KEY_ENV}
    return {key: os.environ[name] for key, name in names.items() if os.environ.get(name)}


def redis_problem(
    services: Services, timeout_s: float = 4.0, *, origin: str = f"redis.address or {REDIS_ENV}"
) -> str | None:
    """Return why Redis does not answer a PING within about `timeout_s`, and what to do; None if it answers. `origin`:
    where its address comes from."""
    try:
        with connect_redis(services, timeout_s=timeout_s, retries=0) as client:
            client.ping()
    except (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError) as exc:
        return (
            f"Redis at {services.redis} refuses us ({reason_of(exc)}): set {REDIS_PASSWORD_ENV} (and {REDIS_USER_ENV})"
        )
    except redis.exceptions.RedisError as exc:
        return f"Redis at {services.redis} does not answer ({reason_of(exc)}): start it, or correct {origin}"
    return None


def server_pid(services: Services) -> int | None:
    """Return the process id of the Redis server; None if it does not answer within a second."""
    with contextlib.suppress(redis.RedisError), connect_redis(services, timeout_s=1.0, retries=0) as client:
        return int(client.info("server")["process_id"])
    return None


def delete_keys(services: Services, pattern: str) -> int:
    """Delete the keys that match a glob, and return their number; 0 if Redis does not answer within a second."""
    with contextlib.suppress(redis.RedisError), connect_redis(services, timeout_s=1.0, retries=0) as client:
        keys = list(client.scan_iter(pattern, count=1000))
        return int(client.delete(*keys)) if keys else 0
    return 0


class WorkerCount:
    """The number of workers that a running job should have. The parameter server writes it (`doll scale` changes it),
    and `--any-slot` workers that wait for a free slot read it. If it is not set, they use the number in the job file.
    `job` identifies the job on this Redis."""

    def __init__(self, client: redis.Redis, job: str) -> None:
        self._client: Any = client  # redis-py's types mix its synchronous and asynchronous answers
        self._key = f"{key_prefix(job)}:workers"

    def set(self, workers: int) -> bool:
        """Set the number of workers. Return False if Redis does not answer."""
        try:
            self._client.set(self._key, workers)
        except redis.RedisError:
            return False
        return True

    def get(self, default: int) -> int:
        """Return the number; `default` if it is unset or not positive. Raise RedisError if Redis does not answer."""
        value = self._client.get(self._key)
        return int(value) if value is not None and value.isdigit() and int(value) > 0 else default


def is_temporary(exc: redis.RedisError) -> bool:
    """Return whether Redis may accept the same command later: now it is unavailable, full, failing over, or cannot
    save.

    A refused login is also a `redis.ConnectionError`, but is permanent.
    """
    if isinstance(exc, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    return isinstance(exc, _PASSING) or str(exc).partition(" ")[0] in _PASSING_CODES


def sentinel_pool(
    place: RedisPlace, settings: dict[str, Any], sentinel_settings: dict[str, Any]
) -> redis.ConnectionPool:
    """Return connections to the primary that the Sentinels name, with these settings. `sentinel_settings` are for the
    connections to the Sentinels, which have a different login."""
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        list(place.addresses), sentinel_kwargs={**sentinel_settings, "ssl": place.tls}
    )
    pool: redis.ConnectionPool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
        place.name, sentinels, ssl=place.tls, db=place.db, **settings
    )
    return pool


def cluster_pool(place: RedisPlace, settings: dict[str, Any]) -> redis.ConnectionPool:
    """Return connections to the primary of the hash slot of the job `place.name`."""
    kind = _OwnerSSLConnection if place.tls else _OwnerConnection
    owner = SlotOwner(place, settings, redis.SSLConnection if place.tls else redis.Connection)
    return redis.ConnectionPool(connection_class=kind, owner=owner, **settings)


def reason_of(exc: redis.RedisError) -> str:
    """Return redis-py's message of an error. If a Sentinel does not answer, leave out the client in the message."""
    return str(exc).partition(" : <redis.")[0]


class SlotOwner:
    """A callable that asks any node for the primary of a job's hash slot. Safe to share between threads."""

    def __init__(self, place: RedisPlace, settings: dict[str, Any], kind: type[Any]) -> None:
        self._slot = key_slot(key_prefix(place.name).encode())
        self._seeds = place.addresses
        self._known: Sequence[tuple[str, int]] = place.addresses
        self._settings, self._kind = settings, kind

    def __call__(self) -> tuple[str, int]:
        """Return host and port of the primary. Raise redis-py's ConnectionError if no node answers or the slot has no
        primary."""
        reason = "no node was asked"
        for host, port in dict.fromkeys([*self._known, *self._seeds]):
            try:
                ranges = self._ask(host, port)
            except (redis.AuthenticationError, redis.exceptions.AuthorizationError):
                raise
            except redis.RedisError as exc:
                reason = str(exc)
                continue
            self._known = [_address(node, host) for part in ranges for node in part[2:]]
            for first, last, primary, *_ in ranges:
                if first <= self._slot <= last:
                    return _address(primary, host)
            reason = f"no node holds hash slot {self._slot}"
        raise redis.ConnectionError(f"the Redis Cluster at {self._seeds[0][0]}:{self._seeds[0][1]}: {reason}")

    def _ask(self, host: str, port: int) -> list[Any]:
        connection = self._kind(host=host, port=port, **self._settings)
        try:
            connection.connect()
            connection.send_command("CLUSTER", "SLOTS")
            answer = connection.read_response()
        finally:
            connection.disconnect()
        return answer if isinstance(answer, list) else []


class _OwnerConnection(redis.Connection):
    """A connection to the primary of a hash slot, which is looked up each time it connects."""

    def __init__(self, *, owner: SlotOwner, **settings: Any) -> None:
        super().__init__(**settings)  # type: ignore[no-untyped-call]
        self._owner = owner

    def connect(self) -> None:
        if not self.is_connected:
            self.host, self.port = self._owner()
        super().connect()  # type: ignore[no-untyped-call]

    def read_response(self, *args: Any, **more: Any) -> Any:
        try:
            return super().read_response(*args, **more)
        except _MOVED as exc:
            self.disconnect()  # type: ignore[no-untyped-call]  # to ask for the owner again
            raise redis.ConnectionError(f"the node does not hold the job's hash slot (now): {exc}") from exc


class _OwnerSSLConnection(_OwnerConnection, redis.SSLConnection):
    """The same connection with TLS."""


def _address(node: Sequence[Any], asked: str) -> tuple[str, int]:
    """Return host and port of a node in an answer to CLUSTER SLOTS; an empty host means the node that was asked."""
    host = node[0].decode() if isinstance(node[0], bytes) else str(node[0] or "")
    return host or asked, int(node[1])
