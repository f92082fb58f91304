"""The pipes between a parameter server and its shards as lists in Redis, which all processes of a job reach.

A shard needs no port. A message may be lost if a connection breaks. An end that gets an error therefore leaves the
term, and the server begins again from the newest checkpoint.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec
import redis

from doll.process.memory import resident_bytes
from doll.ps.shards.pipes import ALIVE_S, Mark, PipeBrokenError
from doll.storage.blobs import key_prefix
from doll.storage.redis_client import reason_of

_ALIVE_MS: Final = round(ALIVE_S * 1000)
_RENEW_S: Final = 1.5
_KEPT_S: Final = 3600  # a list that nobody reads any more is deleted after this time
_WAIT_S: Final = 1.0


class RedisServerEnd:
    """A `ServerEnd`. Every call may raise PipeBrokenError."""

    def __init__(self, client: redis.Redis, scope: str, shard: int, server: str) -> None:
        """`scope`: identifies the job on this Redis."""
        self._client, self._shard = client, shard
        self._prefix, self._server = _prefix(scope, shard), server

    def begin(self, data: bytes) -> None:
        _push(self._client, f"{self._prefix}:begin", data, alone=True)

    def send(self, data: bytes) -> None:
        _push(self._client, f"{self._prefix}:{self._server}:orders", data)

    def receive(self, timeout_s: float) -> bytes | None:
        return _pop(self._client, [f"{self._prefix}:{self._server}:answers"], timeout_s)

    def receive_part(self, timeout_s: float) -> bytes | None:
        return _pop(self._client, [f"{self._prefix}:{self._server}:parts"], timeout_s)

    def mark(self, process: str) -> Mark | None:
        data: bytes | None = _call(partial(self._client.get, f"{self._prefix}:{process}:alive"))
        try:
            mark = None if data is None else msgspec.msgpack.decode(data, type=Mark)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # of another release
            return None
        return mark if mark is not None and mark.server == self._server else None


def take_number(client: redis.Redis, scope: str, shards: int, process: str) -> int | None:
    """Take a number of a shard that no running process has, and return it; None if all are taken. Raises the errors of
    `RedisServerEnd`."""
    for number in range(shards):
        if _call(partial(client.set, f"{_prefix(scope, number)}:holder", process, nx=True, px=_ALIVE_MS)):
            return number
    return None


class RedisShardEnd:
    """A `ShardEnd`, with a thread that marks this process as alive, and as the holder of its number. Calls raise the
    errors of `RedisServerEnd`.

    Attributes:
        is_replaced: whether another process has taken the number.
    """

    is_replaced = False

    def __init__(self, client: redis.Redis, scope: str, shard: int, process: str = "") -> None:
        """Take the number of the shard, also from another process. `process`: name of this process."""
        self._client = client
        self._prefix = _prefix(scope, shard)
        self.process = process or uuid.uuid4().hex
        _call(partial(client.set, f"{self._prefix}:holder", self.process, px=_ALIVE_MS))
        self._serves = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._stay_alive, name="alive", daemon=True)
        self._thread.start()

    def serve(self, server: str) -> None:
        self._serves = server
        if server:  # which looks for the mark when it gets the first answer
            _call(self._mark)

    def receive(self, server: str, timeout_s: float) -> bytes | None:
        return _pop(self._client, [f"{self._prefix}:begin", f"{self._prefix}:{server}:orders"], timeout_s)

    def send(self, server: str, data: bytes) -> None:
        _push(self._client, f"{self._prefix}:{server}:answers", data)

    def send_part(self, server: str, data: bytes) -> None:
        _push(self._client, f"{self._prefix}:{server}:parts", data)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        with suppress(redis.RedisError):  # the server sees at once that this process has ended
            self._client.delete(f"{self._prefix}:{self.process}:alive")
            if not self.is_replaced:
                self._client.delete(f"{self._prefix}:holder")
        self._client.close()

    def _mark(self) -> None:
        mark = Mark(self._serves, socket.gethostname(), os.getpid(), resident_bytes())
        self._client.set(f"{self._prefix}:{self.process}:alive", msgspec.msgpack.encode(mark), px=_ALIVE_MS)

    def _stay_alive(self) -> None:
        while True:
            with suppress(redis.RedisError):  # the thread that carries out orders reports it
                holder: Any = self._client.get(f"{self._prefix}:holder")
                self.is_replaced = holder not in (None, self.process.encode())
                if self.is_replaced:
                    return
                self._client.set(f"{self._prefix}:holder", self.process, px=_ALIVE_MS)
                self._mark()
            if self._closed.wait(_RENEW_S):
                return


def _prefix(scope: str, shard: int) -> str:
    return f"{key_prefix(scope)}:shard:{shard}"


def _push(client: redis.Redis, key: str, data: bytes, *, alone: bool = False) -> None:
    def push() -> object:
        pipeline = client.pipeline(transaction=True)
        if alone:
            pipeline.delete(key)
        pipeline.rpush(key, data)
        pipeline.expire(key, _KEPT_S)
        return pipeline.execute()

    _call(push)


def _pop(client: redis.Redis, keys: Sequence[str], timeout_s: float) -> bytes | None:
    """Return the next value of the first of these lists that has one."""
    if timeout_s <= 0:
        ready: list[bytes | None] = [_call(partial(client.lpop, key)) for key in keys]
        return next((value for value in ready if value is not None), None)
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        named = _call(partial(client.blpop, list(keys), timeout=min(left_s, _WAIT_S)))
        if named is not None:
            value: bytes = named[1]
            return value
    return None


def _call(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except redis.RedisError as exc:
        raise PipeBrokenError(
            f"Redis, through which server and shards send messages, does not answer: {reason_of(exc)}"
        ) from exc
