"""Control links over streams in Redis, for workers on any machine.

The server reads one stream, `doll:{<job>}:<run>:control:<term>`, to which all workers add entries. For the other
direction, each link has its own stream, `doll:{<job>}:<run>:control:<term>:<link>`, which its worker creates. An entry
contains a frame; entries for the server also contain the name of the link. The reader of a stream trims the stream and
renews its expiry. So the streams of an ended job expire. Only its reader creates a stream: if a writer finds no stream
(Redis was restarted or wiped), the link breaks.
"""

from __future__ import annotations

import contextlib
import ssl
import uuid
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import hiredis
import redis

from doll.control.link_state import MAX_FRAME_BYTES, PING_EVERY_S, SILENCE_S, TO_WORKER, Link, LinkError, LinkState
from doll.records.control import AnyRecord, Detach, Ping
from doll.storage.blobs import key_prefix
from doll.storage.redis_client import connect_redis

if TYPE_CHECKING:
    from doll.services import Services

_EXPIRE_S: Final = b"60"
_MAX_ENTRIES: Final = b"20000"  # maximum number of entries if the reader has stopped: a few MB
_COUNT: Final = b"500"
_BLOCK_MS: Final = b"1000"
_MAX_NAME_BYTES: Final = 64
_FRAME: Final = b"f"
_LINK: Final = b"l"
_READ_BYTES: Final = 1 << 16
_MAX_READS: Final = 16
_MAX_UNSENT_BYTES: Final = 2 * MAX_FRAME_BYTES
_CONNECT_S: Final = 2.0
_WAIT = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def server_stream(scope: str, term: int) -> str:
    """Return the name of the stream that the server of this term reads. `scope`: see `doll.storage.blobs.scope_of`."""
    return f"{key_prefix(scope)}:control:{term}"


def streams_pattern(job: str) -> str:
    """Return a glob pattern for the keys of all control streams of all runs of a job."""
    return f"{key_prefix(job)}:*control:*"


class RedisPipe:
    """A connection that sends commands without waiting for the replies to earlier commands. Not thread-safe.

    redis-py connects and logs in. After that, this class uses the socket directly, without blocking.

    Each call may raise LinkError: the connection is broken, Redis does not answer or does not read, or Redis refuses
    the login or a command.
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
        """Send one command and wait for its reply. Only allowed before `begin`."""
        try:
            self._connection.send_command(*command)
            return self._connection.read_response()
        except redis.RedisError as exc:
            raise LinkError(f"Redis refuses {command[0]!r}: {exc}") from exc

    def begin(self) -> None:
        """Make the socket non-blocking: from now on, no call waits."""
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor, which becomes readable when a reply arrives; -1 after `close`."""
        return int(self._socket.fileno())

    def send(self, *command: bytes) -> None:
        """Send one command now, or in a later `flush`."""
        self._unsent += b"*%d\r\n" % len(command)
        for part in command:
            self._unsent += b"$%d\r\n%b\r\n" % (len(part), part)
        self.flush()
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise LinkError("Redis does not read")

    def flush(self) -> None:
        """Send the bytes that the socket did not accept before."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except _WAIT:
                return
            except OSError as exc:
                raise LinkError(f"connection to Redis broken: {exc.strerror or exc}") from exc
            del self._unsent[:sent]

    def replies(self) -> list[Any]:
        """Return the received replies. Bytes are not decoded."""
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
        """Close the connection. This method may be called again."""
        self._connection.disconnect()
        self._client.close()


class ControlStreams:
    """The connections of one end: it creates and reads the stream `key`, and adds entries to other streams.

    Only the constructor waits for Redis. Each call may raise LinkError: Redis is gone, does not answer or refuses a
    command.
    """

    def __init__(self, services: Services, key: str, now: float) -> None:
        self._key = key.encode()
        self._added: deque[tuple[float, bytes]] = deque()  # commands without a reply: (time, stream)
        self._read_s = self._renewed_s = now
        self._in = RedisPipe(services)
        try:
            self._out = RedisPipe(services)
        except LinkError:
            self._in.close()
            raise
        try:
            self._in.call("DEL", self._key)
            # Not empty: a stream without an entry does not exist.
            self._position: bytes = self._in.call("XADD", self._key, "*", "", "")
            self._in.call("EXPIRE", self._key, _EXPIRE_S)
            self._in.begin()
            self._out.begin()
            self._ask()
        except LinkError:
            self.close()
            raise

    def filenos(self) -> tuple[int, int]:
        """Return the two file descriptors, which become readable when entries or replies arrive."""
        return self._in.fileno(), self._out.fileno()

    def read(self, now: float) -> list[dict[bytes, bytes]]:
        """Return the fields of the received entries."""
        entries: list[dict[bytes, bytes]] = []
        for reply in self._in.replies():
            self._read_s = now
            for identifier, fields in reply[0][1] if reply else ():
                self._position = identifier
                entries.append(dict(zip(fields[::2], fields[1::2], strict=False)))
            self._ask()
        return entries

    def add(self, key: bytes, now: float, *fields: bytes) -> None:
        """Add an entry to the stream `key` if the stream exists."""
        self._added.append((now, key))
        self._out.send(b"XADD", key, b"NOMKSTREAM", b"MAXLEN", b"~", _MAX_ENTRIES, b"*", *fields)

    def missing(self) -> list[bytes]:
        """Return the streams for which an `add` since the last call failed, because they did not exist. Raise LinkError
        also if this end's own stream does not exist any more."""
        missing = []
        for reply in self._out.replies():
            _, key = self._added.popleft()
            if reply is None:
                missing.append(key)
            elif key == self._key and reply == 0:
                raise LinkError("Redis has lost this end's stream")
        return missing

    def check(self, now: float) -> None:
        """Trim the stream and renew its expiry, once a second. Call it several times a second."""
        if now - self._read_s >= SILENCE_S or (self._added and now - self._added[0][0] >= SILENCE_S):
            raise LinkError("Redis does not answer")
        if now - self._renewed_s >= PING_EVERY_S:
            self._renewed_s = now
            self._added.extend(((now, b""), (now, self._key)))
            self._out.send(b"XTRIM", self._key, b"MINID", self._position)  # keeps the last entry that was read
            self._out.send(b"EXPIRE", self._key, _EXPIRE_S)
        else:
            self._out.flush()

    def close(self) -> None:
        """Close the connections, and delete this end's stream if Redis answers. This method may be called again."""
        if self._out.fileno() >= 0:
            with contextlib.suppress(LinkError):
                self._out.send(b"UNLINK", self._key)
        self._in.close()
        self._out.close()

    def _ask(self) -> None:
        self._in.send(b"XREAD", b"COUNT", _COUNT, b"BLOCK", _BLOCK_MS, b"STREAMS", self._key, self._position)


class StreamLink(Link):
    """The worker's end of a link to the server that reads `stream`."""

    kind = "redis"

    def __init__(self, services: Services, stream: str, now: float) -> None:
        super().__init__(LinkState(TO_WORKER, now))
        self._server = stream.encode()
        self._name = uuid.uuid4().hex.encode()
        self._streams = ControlStreams(services, f"{stream}:{self._name.decode()}", now)

    def filenos(self) -> tuple[int, ...]:
        return self._streams.filenos()

    def send(self, record: AnyRecord, now: float) -> None:
        self._streams.add(self._server, now, _LINK, self._name, _FRAME, self._state.pack(record, now))

    def check(self, now: float) -> None:
        super().check(now)
        self._streams.check(now)

    def _frames(self, now: float) -> Iterator[bytes]:
        for fields in self._streams.read(now):
            yield fields.get(_FRAME, b"")
        if self._streams.missing():
            raise LinkError("the server's stream in Redis is gone")

    def _release(self) -> None:
        self._streams.close()


class ServerStreamLink:
    """The server's end of one link. It sends through `streams`, which all links share; the listener of `streams`
    receives the records. Calls raise LinkError as in `Link`."""

    kind = "redis"

    def __init__(self, streams: ControlStreams, key: bytes, state: LinkState) -> None:
        self._streams = streams
        self.key = key
        self.state = state

    def send(self, record: AnyRecord, now: float) -> None:
        self._streams.add(self.key, now, _FRAME, self.state.pack(record, now))

    def check(self, now: float) -> None:
        self.state.check(now)
        if self.state.ping_due(now):
            self.send(Ping(), now)

    def close(self, reason: str = "", now: float = 0.0) -> None:
        """End the link and tell the worker the reason. The worker's stream then expires by itself."""
        with contextlib.suppress(LinkError):
            self.send(Detach(reason=reason), now)


def link_and_frame(fields: dict[bytes, bytes]) -> tuple[bytes, bytes] | None:
    """Return the link's name and the frame of an entry in a server's stream; None if the entry is not valid."""
    name, frame = fields.get(_LINK), fields.get(_FRAME)
    if name is None or frame is None or not name.isalnum() or len(name) > _MAX_NAME_BYTES:
        return None
    return None if len(frame) > MAX_FRAME_BYTES else (name, frame)
