"""Computes requests a second time with another version, in a process of its own, after their users have the answers.

Users never get these answers, and do not wait for them. A server copies each request to the shadow's process through a
Unix socket, and leaves out what does not fit. The process gets only the processor time that no other process wants, and
it does not share Python's lock with a server.

A copied request is a frame: the lengths of its head and its body, the head in MessagePack, and the body as it came. The
process answers each frame with one byte, in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from typing import Final, cast

import msgspec

from doll.telemetry import get_logger

log = get_logger(__name__)

MAX_WAITING: Final = 16  # requests of a server that the process has not answered
TIME_LIMIT_S: Final = 30.0
_SIZES: Final = struct.Struct(">II")
_ANSWERED, _SKIPPED = b"\1", b"\0"
_LOOK_S: Final = 0.2


class Copied(msgspec.Struct, array_like=True):
    """Describes the body of a request.

    Attributes:
        id: the id with which the answer is logged.
        has_records: whether it is one of `/predict`.
        json_bytes: as for `decode_request`.
    """

    id: str
    has_records: bool
    json_bytes: str | None = None


class ShadowLink(asyncio.Protocol):
    """Sends requests to the shadow's process, for the event loop of one server.

    Args:
        path: socket at which the process listens.
        max_bytes: maximum number of bytes that wait until the socket takes them.
        on_answered, on_skipped: called for each request that was computed, or left out.
    """

    def __init__(
        self, path: str, *, max_bytes: int, on_answered: Callable[[], object], on_skipped: Callable[[], object]
    ) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._on_answered, self._on_skipped = on_answered, on_skipped
        self._transport: asyncio.WriteTransport | None = None
        self._waiting = 0

    async def keep_connected(self) -> None:
        """Connect, also after the process has ended: it is started again. Cancel this at the end."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self._transport is None:
                    with contextlib.suppress(OSError):
                        await loop.create_unix_connection(lambda: self, self._path)
                await asyncio.sleep(_LOOK_S)
        finally:
            transport, self._transport = self._transport, None
            if transport is not None:
                transport.abort()

    def send(self, request: Copied, body: bytes | bytearray) -> None:
        """Have a request computed; leave it out if the process is away, or many wait. Call it in the event loop."""
        transport = self._transport
        if (
            transport is None or self._waiting >= MAX_WAITING
            or transport.get_write_buffer_size() + len(body) > self._max_bytes
        ):  # fmt: skip
            self._on_skipped()
            return
        head = msgspec.msgpack.encode(request)
        self._waiting += 1
        transport.writelines((_SIZES.pack(len(head), len(body)), head, body))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._waiting -= len(data)
        for number in data:
            (self._on_answered if number else self._on_skipped)()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:  # otherwise the server ends
            log.warning("shadow_away", left_out=self._waiting, action="requests are left out until it is back")
        while self._waiting:
            self._waiting -= 1
            self._on_skipped()
        self._transport = None


async def compute_copies(
    listener: socket.socket, compute: Callable[[Copied, bytes], Awaitable[bool]], stop: threading.Event,
    expire: Callable[[], object],
) -> None:  # fmt: skip
    """Compute the requests of all servers that connect, until `stop` is set.

    Args:
        compute: computes a request and logs the answer; returns False if it was left out. It raises nothing.
        expire: called several times per second.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def answer(request: Copied, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_ANSWERED if await compute(request, body) else _SKIPPED)

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:  # at most MAX_WAITING of a server are here
                head_bytes, body_bytes = _SIZES.unpack(await reader.readexactly(_SIZES.size))
                request = msgspec.msgpack.decode(await reader.readexactly(head_bytes), type=Copied)
                task = asyncio.create_task(answer(request, await reader.readexactly(body_bytes), writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    server = await asyncio.start_unix_server(receive, sock=listener.dup())
    try:
        while not stop.is_set():
            expire()
            await asyncio.sleep(_LOOK_S)
    finally:
        server.close()
