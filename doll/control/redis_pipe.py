"""One connection to Redis on which commands are sent without waiting for the replies to earlier ones.

redis-py connects and logs in; afterwards its socket is used directly, without blocking.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final

import hiredis
import redis

from doll.control.link_state import MAX_FRAME_BYTES, LinkError
from doll.storage.redis_client import connect_redis

if TYPE_CHECKING:
    from doll.services import Services

_READ_BYTES: Final = 1 << 16
_MAX_READS: Final = 16
_MAX_UNSENT_BYTES: Final = 2 * MAX_FRAME_BYTES
_CONNECT_S: Final = 2.0
_WAIT = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class RedisPipe:
    """Commands in, replies out, in order. Not thread-safe.

    Each call may raise LinkError: the connection is broken, or Redis does not answer or read, or refuses the log-in or
    a command.
    """

    def __init__(self, services: Services) -> None:
        self._client = connect_redis(services, timeout_s=_CONNECT_S, retries=0)
        self._unsent = bytearray()
        self._reader = hiredis.Reader()
        try:
            self._connection: Any = self._client.connection_pool.get_connection()
        except redis.RedisError as exc:
            self._client.close()
            raise LinkError(f"Redis is unreachable: {exc}") from exc
        self._socket: Any = self._connection._sock

    def call(self, *command: bytes | str | int) -> Any:
        """Send one command and wait for its reply; only before `begin`."""
        try:
            self._connection.send_command(*command)
            return self._connection.read_response()
        except redis.RedisError as exc:
            raise LinkError(f"Redis refuses {command[0]!r}: {exc}") from exc

    def begin(self) -> None:
        """Begin to return at once: from now on nothing waits."""
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Readable when a reply has come; -1 after `close`."""
        return int(self._socket.fileno())

    def send(self, *command: bytes) -> None:
        """Send one command, now or with a later `flush`."""
        self._unsent += b"*%d\r\n" % len(command)
        for part in command:
            self._unsent += b"$%d\r\n%b\r\n" % (len(part), part)
        self.flush()
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise LinkError("Redis does not read")

    def flush(self) -> None:
        """Send what the socket did not take before."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except _WAIT:
                return
            except OSError as exc:
                raise LinkError(f"connection to Redis broken: {exc.strerror or exc}") from exc
            del self._unsent[:sent]

    def replies(self) -> list[Any]:
        """The replies that have come. Bytes stay bytes."""
        replies: list[Any] = []
        for _ in range(_MAX_READS):
            try:
                data = self._socket.recv(_READ_BYTES)
            except _WAIT:
                break
            except OSError as exc:
                raise LinkError(f"connection to Redis broken: {exc.strerror or exc}") from exc
            if not data:
                raise LinkError("connection closed by Redis")
            self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, Exception):
                    raise LinkError(f"Redis refuses a command: {reply}")
                replies.append(reply)
        except hiredis.ProtocolError as exc:
            raise LinkError(f"Redis answers what is not its protocol: {exc}") from exc
        return replies

    def close(self) -> None:
        """May be repeated."""
        self._connection.disconnect()
        self._client.close()
