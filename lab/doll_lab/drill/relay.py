"""Relays between one process and one service, so that a drill can cut only this connection.

They relay TCP on loopback (`TcpRelay`) or Unix sockets (`UnixRelay`). There are three kinds of cut. A `silent` cut
forwards and accepts nothing; unless an end has timed out, sent data arrives after `restore`, as after a network
partition. A `reset` cut resets open connections and every new one; Unix sockets have no reset, and are closed. A
`removed` cut, only for Unix sockets, resets open connections and removes the file of the socket until `restore`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from doll.local.processes import LOOPBACK

from doll_lab.drill.plan import Cut

T = TypeVar("T")
R = TypeVar("R", bound="Relay")

CHUNK: Final = 1 << 18
_BACKLOG: Final = 128
_ANSWER_S: Final = 60.0  # the thread of the relays answers within milliseconds, later on an overloaded machine
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends RST


class Relay(ABC):
    """One listening socket and its target. Call its methods from any thread except the relays' own thread.

    Attributes:
        cut: kind of the current cut, if any.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
        self._loop = loop
        self._socket = listening
        self._socket.setblocking(False)
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening = loop.create_task(self._accept())
        self.cut: Cut | None = None

    @abstractmethod
    def _target(self) -> tuple[socket.AddressFamily, Any] | None:
        """Return the family and address of the service; None: not known yet."""

    def _hide(self) -> None:
        """Remove the file of the listening socket.

        Raises:
            ValueError: connections of this kind cannot be cut by the removal of a file.
        """
        raise ValueError(f"expected a silent cut or a reset of a {type(self).__name__}")

    def _show(self) -> None:  # noqa: B027 - not every kind can be hidden
        """Undo `_hide`, if it was called."""

    def start_cut(self, how: Cut) -> None:
        """Cut the connections until `restore`."""
        self._on_loop(self._start_cut(how))

    def restore(self) -> None:
        """End the cut. May be called again."""
        self._on_loop(self._restore())

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_S)

    async def _start_cut(self, how: Cut) -> None:
        if how == "removed":
            self._hide()
        self.cut = how
        if how == "silent":
            self._open.clear()
        else:
            for task in self._tasks:
                task.cancel()

    async def _restore(self) -> None:
        self.cut = None
        self._show()
        self._open.set()

    async def close(self) -> None:
        """Reset open connections and free the port. Runs in the event loop."""
        tasks = [self._listening, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        while True:
            # The kernel completes the handshake of waiting connections; for the peer this looks like packet loss.
            await self._open.wait()
            connection, _ = await self._loop.sock_accept(self._socket)
            await self._open.wait()
            target = self._target()
            if self.cut is not None or target is None:
                _reset(connection)
                continue
            task = self._loop.create_task(self._serve(connection, *target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, near: socket.socket, family: socket.AddressFamily, address: Any) -> None:
        near.setblocking(False)
        far = socket.socket(family)
        far.setblocking(False)
        try:
            if family == socket.AF_INET:
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.sock_connect(far, address)
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
        while data := await self._loop.sock_recv(source, CHUNK):
            await self._send(sink, data)
        await self._send(sink, b"")

    async def _send(self, sink: socket.socket, data: bytes) -> None:
        """Send the data when the connection is not cut. Empty data: the end of the connection."""
        await self._open.wait()
        if data:
            await self._loop.sock_sendall(sink, data)
        else:
            sink.shutdown(socket.SHUT_WR)


class TcpRelay(Relay):
    """A relay from one port on loopback to another one.

    Attributes:
        port: listening port, fixed until `close`.
        target_port: port of the service; 0: not known yet, and connections are reset.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, socket.create_server((LOOPBACK, 0), backlog=_BACKLOG))
        self.port = int(self._socket.getsockname()[1])
        self.target_port = 0

    def _target(self) -> tuple[socket.AddressFamily, Any] | None:
        return (socket.AF_INET, (LOOPBACK, self.target_port)) if self.target_port else None


class UnixRelay(Relay):
    """A relay from one Unix socket to another. If the target does not exist yet, connections are closed.

    Attributes:
        path: path of the listening socket, in a folder that only this user may enter.
        target_path: path of the service's socket.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, path: Path, target_path: Path) -> None:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(_BACKLOG)
        super().__init__(loop, listening)
        self.path = path
        self.target_path = target_path
        self._hidden = path.with_suffix(".removed")

    def _target(self) -> tuple[socket.AddressFamily, Any] | None:
        return socket.AF_UNIX, str(self.target_path)

    def _hide(self) -> None:
        os.rename(self.path, self._hidden)

    def _show(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._hidden, self.path)


class Relays:
    """All relays of a drill, served by one thread. Use it as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self._relays: list[Relay] = []

    def open(self) -> TcpRelay:
        """Open a relay. It resets connections until its `target_port` is set."""
        return self.make(TcpRelay)

    def open_unix(self, path: Path, target_path: Path) -> UnixRelay:
        """Open a relay from `path`, which must not exist, to `target_path`."""
        return self.make(partial(UnixRelay, path=path, target_path=target_path))

    def make(self, relay_of: Callable[[asyncio.AbstractEventLoop], R]) -> R:
        """Open a relay of any kind."""

        async def make() -> R:
            return relay_of(self._loop)

        relay = self._on_loop(make())
        self._relays.append(relay)
        return relay

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for relay in self._relays:
            self._on_loop(relay.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    end.close()
