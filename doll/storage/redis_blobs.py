"""Store parameter blobs in Redis. While Redis is unreachable or full, calls wait with growing pauses, logged once.

Redis is a cache here: after a restart its content is lost, and readers get None. Large values go from the caller's
array to the socket, and from the socket to an array, without an intermediate copy. redis-py's default packer copies
them (4.8 MB over loopback: 1.4 ms without the copy, 11 ms with it), and so do its parsers (CPU: 0.7 ms without, 2.5 ms
with).

Redis refuses values above 512 MB, and answers nobody else while it receives one. A blob of more than `SECTION_BYTES` is
therefore stored in sections, under its key with `#` and a number. An index under the key itself is written last, so a
reader gets all sections or None.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from doll import telemetry
from doll.errors import BlobError, ServiceUnavailableError
from doll.process.threads import in_thread
from doll.storage.blobs import MAX_BLOB_BYTES, Blobs, Buffer
from doll.storage.redis_client import is_temporary, reason_of

log = telemetry.get_logger(__name__)

T = TypeVar("T")
S = TypeVar("S", bytes, int)
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
_FIRST_READ_BYTES: Final = 4096
_FAR_S: Final = 0.005  # a thread for each read costs less than this wait
_RECENT_CALLS: Final = 8
SOON_S: Final = 2.0  # an announced blob that is missing after this time is lost; 0.9 MB arrive in time at 4 Mbit/s
_WAITING: Final = "waiting until it is back"
_WHERE_FULL: Final = "raise its maxmemory, or lower blobs.ttl_s or blobs.keep_versions"
SECTION_BYTES: Final = 64 * 2**20
_MAX_VALUE_BYTES: Final = 512 * 2**20
_INDEX: Final = struct.Struct("<4sIQ")  # magic, number of sections, bytes of the blob
_INDEX_MAGIC: Final = b"DLBS"
_MOST_NOTED: Final = 1_000
_AGAIN_S: Final = 0.005  # wait between two requests, in addition to the round trip


class RedisBlobs:
    """`Blobs` over one synchronous Redis client, which this object closes. Safe to share between threads.

    Calls also raise ServiceUnavailableError if Redis refuses them permanently (no access, or a value larger than its
    memory). While Redis is unreachable, `give_up` is called before each new attempt; if it returns True, the wait ends
    with the same error. By default, calls wait without a limit.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        give_up: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], object] = time.sleep,
        section_bytes: int = SECTION_BYTES,
    ) -> None:
        self._client = client
        self._client.set_retry(Retry(NoBackoff(), 0))  # only our own loop retries, because it logs and can be ended
        self._give_up = give_up
        self._sleep = sleep
        self._section_bytes = section_bytes
        self._num_sections: dict[str, int] = {}
        self._unreachable = False
        # Kept between calls, because taking one from the pool and returning it costs as much as the call. Connections
        # that have sent values send the next ones: TCP's window in a direction grows with the data sent.
        self._readers: deque[Any] = deque()
        self._writers: deque[Any] = deque()
        self._prefetched: dict[str, memoryview] = {}
        self._stored: Future[None] | None = None  # of the last blob given to `put_soon`
        self._took_s: deque[float] = deque(maxlen=_RECENT_CALLS)

    @property
    def is_far(self) -> bool:
        """Whether even the fastest of the last calls was slow. Other calls may have waited for the processor."""
        return min(self._took_s, default=0.0) >= _FAR_S

    def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        self._prefetched.pop(key, None)
        size = sum(map(len, parts))
        if size > MAX_BLOB_BYTES:
            raise BlobError(f"{key}: expected at most {MAX_BLOB_BYTES} bytes, got {size}")
        if size > self._section_bytes:
            count = 0
            for count, section in enumerate(_sections(parts, self._section_bytes), 1):
                self._set(section_key(key, count - 1), section, ttl_s, size)
            self._note_sections(key, count)
            parts = [_INDEX.pack(_INDEX_MAGIC, count, size)]
        self._set(key, parts, ttl_s, size)

    def _set(self, key: str, parts: Sequence[Buffer], ttl_s: float, blob_bytes: int) -> None:
        """Store one value of a blob of `blob_bytes`."""
        name, size = key.encode(), sum(map(len, parts))
        ttl_ms = b"%d" % max(1, round(ttl_s * 1000))
        head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)
        tail = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl_ms), ttl_ms)
        self._wait_for(
            lambda: self._call([head, *parts, tail], lambda link: link.read_response(), self._writers), blob_bytes
        )

    def put_soon(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> bool:
        self.settle()
        # Readers wait for a blob that was announced for `SOON_S`, in which sections may not arrive.
        if not self.is_far or sum(map(len, parts)) > self._section_bytes:
            self.put(key, parts, ttl_s)
            return True
        self._stored = in_thread(lambda: self.put(key, parts, ttl_s), "store")
        return False

    def settle(self) -> None:
        stored, self._stored = self._stored, None
        if stored is not None:
            stored.result()

    def reserve(self, size_bytes: int) -> None:
        """Return None: data for Redis are always copied into a socket."""

    def get(self, key: str) -> Buffer | None:
        if (value := self._prefetched.pop(key, None)) is None:
            value = self._read(key)
        if value is None or len(value) != _INDEX.size or bytes(value[:4]) != _INDEX_MAGIC:
            return value
        _, count, size = _INDEX.unpack(value)
        if size > MAX_BLOB_BYTES or count > size:
            return None
        self._note_sections(key, count)
        # Not a bytearray: that would be filled with zeros first.
        whole, at = np.empty(size, np.uint8).data, 0
        for number in range(count):
            section = self._read(section_key(key, number))
            if section is None or at + len(section) > size:
                return None  # it has expired meanwhile, or another blob replaces this one
            whole[at : at + len(section)] = section
            at += len(section)
        return whole if at == size else None

    def _read(self, key: str) -> memoryview | None:
        return self._wait_for(lambda: self._call([_get_command(key)], lambda link: _read_value(link)[0], self._readers))

    def _note_sections(self, key: str, count: int) -> None:
        """Remember that a blob has sections, for `delete`. What is forgotten expires."""
        self._num_sections[key] = count
        if len(self._num_sections) > _MOST_NOTED:
            with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # other threads change it too
                del self._num_sections[next(iter(self._num_sections))]

    def get_soon(self, key: str) -> Buffer | None:
        value = self.get(key)
        deadline_s = time.monotonic() + SOON_S
        while value is None and time.monotonic() < deadline_s:
            self._sleep(_AGAIN_S)
            value = self.get(key)
        return value

    def prefetch(self, keys: Sequence[str]) -> None:
        """Read `keys` in one round trip, and keep the blobs. The next `get` of a key returns the kept blob. Kept blobs
        of the previous call are dropped. If Redis does not answer, no key is read.
        """
        self._prefetched = {}

        def read(connection: Any) -> dict[str, memoryview]:
            values: dict[str, memoryview] = {}
            rest = b""
            for key in keys:
                value, rest = _read_value(connection, rest)
                if value is not None:
                    values[key] = value
            return values

        with contextlib.suppress(redis.RedisError):  # `get` waits for Redis, and reports the problem
            self._prefetched = self._call([_get_command(key) for key in keys], read, self._readers)

    def delete(self, *keys: str) -> None:
        """Delete `keys`; Redis frees the memory in its background thread."""
        for key in keys:
            self._prefetched.pop(key, None)
        names = [*keys]
        for key in keys:
            names += [section_key(key, number) for number in range(self._num_sections.pop(key, 0))]
        if names:
            self._wait_for(lambda: self._client.unlink(*names))

    def close(self) -> None:
        with contextlib.suppress(ServiceUnavailableError, BlobError):  # callers that need the result call `settle`
            self.settle()
        self._release_all()
        self._client.close()

    def _call(self, packed: list[Buffer], read: Callable[[Any], T], kept: deque[Any]) -> T:
        """Send one command unchanged on one of the `kept` connections, and read the reply."""
        try:
            connection = kept.pop()
        except IndexError:
            connection = self._client.connection_pool.get_connection()
        begun_s = time.perf_counter()
        try:
            connection.send_packed_command(packed)
            result = read(connection)
        except BaseException:
            connection.disconnect()  # no command may follow one that was partly sent or answered
            self._client.connection_pool.release(connection)
            self._release_all()  # the others have probably failed too
            raise
        self._took_s.append(time.perf_counter() - begun_s)
        kept.append(connection)
        return result

    def _release_all(self) -> None:
        for kept in (self._readers, self._writers):
            while True:
                try:
                    connection = kept.pop()
                except IndexError:
                    break
                connection.disconnect()
                self._client.connection_pool.release(connection)

    def _max_bytes(self) -> int:
        """Return Redis's `maxmemory` in bytes; 0 if there is no limit, or the limit is unknown."""
        with contextlib.suppress(redis.RedisError):
            return int(self._client.info("memory").get("maxmemory", 0))
        return 0

    def _wait_for(self, call: Callable[[], T], size_bytes: int = 0) -> T:
        """Return the result of `call`, which sends `size_bytes`, as soon as Redis accepts it."""
        pause_s = 0.0
        while True:
            try:
                result = call()
            except (redis.AuthenticationError, redis.exceptions.AuthorizationError) as exc:
                raise ServiceUnavailableError(
                    f"Redis refuses the log-in ({exc}): set DOLL_REDIS_PASSWORD (and DOLL_REDIS_USERNAME)"
                ) from exc
            except redis.RedisError as exc:
                if not is_temporary(exc):
                    raise ServiceUnavailableError(f"Redis refuses a command: {exc}") from exc
                is_full = isinstance(exc, redis.exceptions.OutOfMemoryError)
                if is_full and size_bytes > (most := self._max_bytes()) > 0:
                    raise ServiceUnavailableError(
                        f"Redis is out of memory: expected a maxmemory above the {size_bytes} bytes of one value, got "
                        f"{most}: raise it"
                    ) from exc
                if self._give_up():
                    state = "takes no values" if is_full else "is unreachable"
                    hint = _WHERE_FULL if is_full else "start it, or correct redis.address"
                    raise ServiceUnavailableError(f"Redis {state} ({reason_of(exc)}): {hint}") from exc
                # The first failure may only be a connection that broke while it was idle: try again without a pause.
                if pause_s and not self._unreachable:
                    self._unreachable = True
                    hint = f"waiting until it takes values again: {_WHERE_FULL}" if is_full else _WAITING
                    log.warning("redis_unavailable", error=reason_of(exc), hint=hint)
                self._sleep(pause_s)
                pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            else:
                if self._unreachable:
                    self._unreachable = False
                    log.info("redis_available")
                return result


def section_key(key: str, number: int) -> str:
    """Return the key of a section of the blob `key`."""
    return f"{key}#{number}"


def _sections(parts: Sequence[Buffer], size: int) -> Iterator[list[Buffer]]:
    """Yield the bytes of `parts`, joined, in sections of `size` bytes, without a copy."""
    section, left = list[Buffer](), size
    for part in parts:
        view = memoryview(part).cast("B")
        at = 0
        while at < len(view):
            piece = view[at : at + left]
            section.append(piece)
            at, left = at + len(piece), left - len(piece)
            if not left:
                yield section
                section, left = [], size
    if section:
        yield section


def _get_command(key: str) -> bytes:
    name = key.encode()
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)


def _read_value(connection: Any, start: bytes = b"") -> tuple[memoryview | None, bytes]:
    """Read the reply to a GET without redis-py's parser. Return it and the bytes read of the next reply."""
    sock = connection._sock
    try:
        while (end := start.find(b"\r\n")) < 0:
            start += _nonempty(sock.recv(_FIRST_READ_BYTES))
        kind, line, at = start[:1], start[1:end], end + 2
        if kind == b"-":
            raise connection._parser.parse_error(line.decode("utf-8", "replace"))
        if kind != b"$":
            raise redis.InvalidResponse(f"expected a value in answer to GET, got {start[:40]!r}")
        if line == b"-1":
            return None, start[at:]
        if not line.isdigit() or int(line) > _MAX_VALUE_BYTES:
            raise redis.InvalidResponse(
                f"expected the size of a value of at most {_MAX_VALUE_BYTES} bytes, got {line!r}"
            )
        size = int(line)
        # Not a bytearray: that would be filled with zeros first.
        value: memoryview = np.empty(size + 2, np.uint8).data
        have = min(len(start) - at, len(value))
        value[:have] = start[at : at + have]
        rest = start[at + have :]
        while have < len(value):
            have += _nonempty(sock.recv_into(value[have:]))
    except TimeoutError as exc:
        raise redis.TimeoutError("Timeout reading from socket") from exc
    except OSError as exc:
        raise redis.ConnectionError(f"Error while reading from socket: {exc}") from exc
    return value[:size], rest


def _nonempty(read: S) -> S:
    """Return the bytes that a socket returned. Raise an error if there are none: the other side has closed."""
    if not read:
        raise redis.ConnectionError("Connection closed by server.")
    return read


_: type[Blobs] = RedisBlobs
