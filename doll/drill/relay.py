"""Relays between one process and one service, so that a drill can cut that connection only.

They relay TCP on loopback (`TcpRelay`) or Unix sockets (`UnixRelay`). There are three kinds of cut. A `silent` one
forwards and accepts nothing; data that was sent arrives after `restore`, as after a network partition, unless an end
has timed out. A `reset` one resets open connections and every new one; a Unix socket has no reset, and is closed. A
`removed` one, of Unix sockets only, resets open connections and takes the socket's file away until `restore`.
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
from typing import Any, Final, Self, TypeAlias, TypeVar

from doll.drill.plan import Cut
from doll.local.processes import LOOPBACK

T = TypeVar("T")
Late: TypeAlias = asyncio.Queue[tuple[float, bytes]]  # (when it is due, on the loop's clock, what), b"" at the end
R = TypeVar("R", bound="Relay")

_CHUNK: Final = 1 << 18
_BACKLOG: Final = 128
_LATE_PIECES: Final = 256  # of one direction, on their way at once
_ANSWER_S: Final = 60.0  # the relays' thread answers within milliseconds, later on an overloaded machine
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends RST


class Relay(ABC):
    """One listening socket and its target. Call its methods from any thread but the relays' own.

    Attributes:
        cut: the kind of the current cut, if any.
        watch: called for each new connection, on the relays' thread; what it returns is called with the bytes that the
            service sends on it, in order.
        bytes_per_s: how much passes in each direction, all connections together; None: as much as comes.
        delay_s: how long each byte takes in each direction, behind that; of connections that open from now on.
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
        self.watch: Callable[[], Callable[[bytes], None]] | None = None
        self.bytes_per_s: float | None = None
        self.delay_s = 0.0
        self._free_at_s = [0.0, 0.0]  # when what was accepted before has passed, to the service and from it

    @abstractmethod
    def _target(self) -> tuple[socket.AddressFamily, Any] | None:
        """Family and address of the service; None: not known yet."""

    def _hide(self) -> None:
        """
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
        """End the cut. It may be called again."""
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
                late: list[Late | None] = [asyncio.Queue(_LATE_PIECES) if self.delay_s else None for _ in range(2)]
                for queue, sink in zip(late, (far, near), strict=True):
                    if queue is not None:
                        directions.create_task(self._forward_late(queue, sink))
                watch = self.watch() if self.watch is not None else None
                directions.create_task(self._forward(near, far, 0, late[0]))
                directions.create_task(self._forward(far, near, 1, late[1], watch))
            near.close()
            far.close()
        except* OSError:
            pass  # one end has closed the connection
        finally:
            _reset(near)  # no effect on a closed socket
            _reset(far)

    async def _forward(
        self, source: socket.socket, sink: socket.socket, direction: int, late: Late | None,
        watch: Callable[[bytes], None] | None = None,
    ) -> None:  # fmt: skip
        while data := await self._loop.sock_recv(source, _CHUNK):
            if watch is not None:
                watch(data)
            if self.bytes_per_s is not None:
                await self._pass(len(data) / self.bytes_per_s, direction)
            if late is not None:
                await late.put((self._loop.time() + self.delay_s, data))
                continue
            await self._open.wait()
            await self._loop.sock_sendall(sink, data)
        if late is not None:
            await late.put((self._loop.time() + self.delay_s, b""))
            return
        await self._open.wait()
        sink.shutdown(socket.SHUT_WR)

    async def _forward_late(self, late: Late, sink: socket.socket) -> None:
        """Send what is in `late` when its time has come, while more comes."""
        while True:
            due_s, data = await late.get()
            await asyncio.sleep(due_s - self._loop.time())
            await self._open.wait()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            await self._loop.sock_sendall(sink, data)

    async def _pass(self, seconds: float, direction: int) -> None:
        """Wait until what takes so long has passed, behind what came before it."""
        now_s = self._loop.time()
        until_s = self._free_at_s[direction] = max(now_s, self._free_at_s[direction]) + seconds
        await asyncio.sleep(until_s - now_s)


class TcpRelay(Relay):
    """From a port on loopback to another one.

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
    """From one Unix socket to another, which need not exist yet: connections are then closed.

    Attributes:
        path: of the listening socket. It is in a folder that only this user may enter.
        target_path: of the service's socket.
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
        """A new relay; it resets connections until its `target_port` is set."""
        return self._make(TcpRelay)

    def open_unix(self, path: Path, target_path: Path) -> UnixRelay:
        """A new relay from `path`, which must not exist, to `target_path`."""
        return self._make(partial(UnixRelay, path=path, target_path=target_path))

    def _make(self, relay_of: Callable[[asyncio.AbstractEventLoop], R]) -> R:
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
