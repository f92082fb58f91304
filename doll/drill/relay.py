"""TCP relays on loopback between one process and one service, so that a drill can cut that connection only.

There are two kinds of cut. A `silent` one forwards and accepts nothing; data that was sent arrives after `restore`, as
after a network partition, unless an end has timed out. A `reset` one resets open connections and every new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from doll.drill.plan import Cut
from doll.local.processes import LOOPBACK

T = TypeVar("T")

_CHUNK: Final = 1 << 18
_ANSWER_S: Final = 60.0  # the relays' thread answers within milliseconds, later on an overloaded machine
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends RST


class Relay:
    """One listening port and its target port. Call its methods from any thread but the relays' own.

    Attributes:
        port: listening port on loopback, fixed until `close`.
        target_port: target port on loopback; 0: not known yet, and connections are reset.
        cut: the kind of the current cut, if any.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._socket = socket.create_server((LOOPBACK, 0), backlog=128)
        self._socket.setblocking(False)
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening = loop.create_task(self._accept())
        self.port = int(self._socket.getsockname()[1])
        self.target_port = 0
        self.cut: Cut | None = None

    def start_cut(self, how: Cut) -> None:
        """Cut the connections until `restore`."""
        self._on_loop(self._start_cut(how))

    def restore(self) -> None:
        """End the cut. It may be called again."""
        self._on_loop(self._restore())

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_S)

    async def _start_cut(self, how: Cut) -> None:
        self.cut = how
        if how == "silent":
            self._open.clear()
        else:
            for task in self._tasks:
                task.cancel()

    async def _restore(self) -> None:
        self.cut = None
        self._open.set()

    async def close(self) -> None:
        """On the loop: reset open connections and free the port."""
        tasks = [self._listening, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        while True:
            # The kernel completes the handshake of waiting connections; to the peer this looks like packet loss.
            await self._open.wait()
            connection, _ = await self._loop.sock_accept(self._socket)
            await self._open.wait()
            if self.cut == "reset" or not self.target_port:
                _reset(connection)
                continue
            task = self._loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, near: socket.socket) -> None:
        near.setblocking(False)
        far = socket.socket()
        far.setblocking(False)
        try:
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.sock_connect(far, (LOOPBACK, self.target_port))
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._forward(near, far))
                directions.create_task(self._forward(far, near))
            near.close()
            far.close()
        except* OSError:
            pass  # one end has closed the connection
        finally:
            _reset(near)  # no effect on a closed socket
            _reset(far)

    async def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        while data := await self._loop.sock_recv(source, _CHUNK):
            await self._open.wait()
            await self._loop.sock_sendall(sink, data)
        await self._open.wait()
        sink.shutdown(socket.SHUT_WR)


class Relays:
    """All relays of a drill, served by one thread. Use it as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self._relays: list[Relay] = []

    def open(self) -> Relay:
        """A new relay; it resets connections until its `target_port` is set."""

        async def make() -> Relay:
            return Relay(self._loop)

        self._relays.append(self._on_loop(make()))
        return self._relays[-1]

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for relay in self._relays:
            self._on_loop(relay.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    end.close()
