"""Redis behind Sentinel, and in a Cluster: pools whose connections go to the one server that holds a job's keys.

All keys of a job are in one hash slot (`doll.storage.blobs.key_prefix`), so in a Cluster one primary holds them, and
each connection asks which one before it connects. With Sentinel it asks for the primary. After a failover a connection
breaks, or is refused, and the next one asks again; what was not replicated is lost, as when a cache is restarted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import redis
from redis.crc import key_slot
from redis.sentinel import Sentinel, SentinelConnectionPool

from doll.storage.blobs import key_prefix

if TYPE_CHECKING:
    from doll.services import RedisPlace

_MOVED: Final = (
    redis.exceptions.MovedError,
    redis.exceptions.AskError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
)
"""The answers of a node of a Cluster while a slot moves, or has no primary: to be asked again."""
_PASSING: Final = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
    *_MOVED,
)
_PASSING_CODES: Final = frozenset({"MISCONF", "NOREPLICAS", "BUSY"})  # for which redis-py has no class


def passes(exc: redis.RedisError) -> bool:
    """Whether Redis may take the same command later: it is away, full, failing over, or cannot save to its disk.

    A refused log-in is a `redis.ConnectionError` too, and does not pass.
    """
    if isinstance(exc, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    return isinstance(exc, _PASSING) or str(exc).partition(" ")[0] in _PASSING_CODES


def sentinel_pool(
    place: RedisPlace, settings: dict[str, Any], sentinel_settings: dict[str, Any]
) -> redis.ConnectionPool:
    """Connections to the primary that the Sentinels name, with these settings; `sentinel_settings` are of one to a
    Sentinel, which has another log-in."""
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        list(place.addresses), sentinel_kwargs={**sentinel_settings, "ssl": place.tls}
    )
    pool: redis.ConnectionPool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
        place.name, sentinels, ssl=place.tls, db=place.db, **settings
    )
    return pool


def cluster_pool(place: RedisPlace, settings: dict[str, Any]) -> redis.ConnectionPool:
    """Connections to the primary of the hash slot of the job `place.name`."""
    kind = _OwnerSSLConnection if place.tls else _OwnerConnection
    owner = SlotOwner(place, settings, redis.SSLConnection if place.tls else redis.Connection)
    return redis.ConnectionPool(connection_class=kind, owner=owner, **settings)


def reason_of(exc: redis.RedisError) -> str:
    """redis-py's words for an error, without the client that it adds for a Sentinel that does not answer."""
    return str(exc).partition(" : <redis.")[0]


class SlotOwner:
    """Finds the primary that holds a job's hash slot, by asking any node. Safe to share between threads."""

    def __init__(self, place: RedisPlace, settings: dict[str, Any], kind: type[Any]) -> None:
        self._slot = key_slot(key_prefix(place.name).encode())
        self._seeds = place.addresses
        self._known: Sequence[tuple[str, int]] = place.addresses
        self._settings, self._kind = settings, kind

    def __call__(self) -> tuple[str, int]:
        """Its host and port; raises redis-py's ConnectionError if no node answers, or the slot has no primary."""
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
    """Goes to the owner of a hash slot, whoever that is when it connects."""

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
    """The same with TLS."""


def _address(node: Sequence[Any], asked: str) -> tuple[str, int]:
    """Host and port of a node in an answer to CLUSTER SLOTS; without a host it is the one that was asked."""
    host = node[0].decode() if isinstance(node[0], bytes) else str(node[0] or "")
    return host or asked, int(node[1])
