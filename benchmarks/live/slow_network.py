"""A slow network for workers on one machine: each reaches Redis, which has weights and steps, through a relay."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from doll.local.processes import LOOPBACK
from doll.run.local.context import RunHook

from doll_lab.drill.relay import CHUNK, Relays, TcpRelay

if TYPE_CHECKING:
    from doll.local.stack import Stack
    from doll.services import Services

_LATE_PIECES: Final = 256  # of one direction, on their way at once
CHANGES: Final = ("blobs.kind=redis",)  # of the job: shared memory has no network


class SlowRelay(TcpRelay):
    """A relay that takes its time.

    Attributes:
        bytes_per_s: how much passes in each direction, all connections together; None: as much as comes.
        delay_s: how long each byte takes in each direction, behind that.
    """

    bytes_per_s: float | None = None
    delay_s = 0.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._free_at_s = {True: 0.0, False: 0.0}  # when what was accepted before has passed, to the service and back

    async def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_LATE_PIECES)
        is_there = sink.getpeername()[1] == self.target_port
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_late(late, sink))
            while True:
                data = await self._loop.sock_recv(source, CHUNK)
                if self.bytes_per_s is not None:
                    await self._pass(len(data) / self.bytes_per_s, is_there)
                await late.put((self._loop.time() + self.delay_s, data))
                if not data:
                    return

    async def _send_late(self, late: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        """Send what is in `late` when its time has come, while more comes."""
        data = b" "
        while data:
            due_s, data = await late.get()
            await asyncio.sleep(due_s - self._loop.time())
            await self._send(sink, data)

    async def _pass(self, seconds: float, is_there: bool) -> None:
        """Wait until what takes so long has passed, behind what came before it."""
        now_s = self._loop.time()
        until_s = self._free_at_s[is_there] = max(now_s, self._free_at_s[is_there]) + seconds
        await asyncio.sleep(until_s - now_s)


@dataclass
class SlowNetwork(RunHook):
    """Each worker has a link of its own, which passes `bytes_per_s` in each direction, each byte `delay_s` late.
    Samples do not pass it, and grants only where `control.kind` is `redis`."""

    relays: Relays
    bytes_per_s: float | None
    delay_s: float = 0.0
    _ports: dict[str, int] = field(default_factory=dict)

    def services(self, role: str, stack: Stack) -> Services:
        if not role.startswith("worker-"):
            return stack.services
        if role not in self._ports:
            relay = self.relays.make(SlowRelay)
            relay.target_port = urlsplit(stack.services.redis).port or 0
            relay.bytes_per_s, relay.delay_s = self.bytes_per_s, self.delay_s
            self._ports[role] = relay.port
        return replace(stack.services, redis=f"redis://{LOOPBACK}:{self._ports[role]}/0")


@contextmanager
def network(mbit_per_s: float, delay_s: float = 0.0) -> Iterator[RunHook]:
    """The hook of a run on links of `mbit_per_s` in each direction, each byte `delay_s` late; 0: no such limit."""
    if not (mbit_per_s or delay_s):
        yield RunHook()
        return
    with Relays() as relays:
        yield SlowNetwork(relays, mbit_per_s * 1e6 / 8 or None, delay_s)
