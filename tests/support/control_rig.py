"""Both ends of a control link of any kind: a server of links, a worker, and a worker without its logic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import record_builders
from doll.consumers.channels.control_link import ControlLink
from doll.control.link_state import TO_WORKER, LinkError, LinkState
from doll.control.local_socket import LocalSocket, SocketLink, connect
from doll.control.redis_streams import StreamLink
from doll.ps.channels.control_links import ControlLinks, LocalListener
from doll.ps.channels.stream_listener import StreamListener
from doll.records.control import (
    AnyRecord,
    Attach,
    Attached,
    Grant,
    Push,
    PushedBatch,
    Welcome,
)
from doll.services import Services
from doll.storage.blobs import scope_of
from waiting import WAIT_TIMEOUT_S

TERM, SESSION = 3, (3 << 20) + 1
KINDS = ("local", "redis")


def welcome(worker: int = 0, session: int = SESSION, term: int = TERM, **more: Any) -> Welcome:
    return record_builders.welcome(worker, term=term, session=session, fingerprint="f", **more)


def grant(number: int, worker: int = 0, session: int = SESSION) -> Grant:
    return record_builders.grant_of(
        term=TERM, worker=worker, session=session, first=number, grant_ids=(number,), version=1, min_version=1, key="w"
    )


def push(number: int, worker: int = 0, dead: tuple[int, ...] = ()) -> Push:
    batch = PushedBatch(batch=number, grant_id=number, n_samples=1, loss_sum=0.5, dead=dead)
    return Push(worker=worker, session=SESSION, term=TERM, version=1, key=f"g{number}", batches=(batch,))


class Clock:
    """The server's clock, which a test may put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Server:
    """`ControlLinks` of one kind."""

    def __init__(self, kind: str, services: Services, path: Path, term: int = TERM, run_id: str = "") -> None:
        self.term, self.clock, self.run_id = term, Clock(), run_id
        self.links = ControlLinks(term, self.clock, run_id=run_id)
        if kind == "local":
            self.links.add(LocalListener(self.links, LocalSocket(str(path), ""), max_links=8))
        else:
            self.links.add(StreamListener(self.links, services, scope_of("contract", run_id), term, max_links=8))
        self.records: list[AnyRecord] = []
        self.changed: list[int] = []

    def welcome(self, worker: int = 0, session: int = SESSION) -> Welcome:
        made = welcome(worker, session, self.term, endpoints=self.links.endpoints, run_id=self.run_id)
        self.links.welcome(made)
        return made

    def poll(self) -> None:
        self.links.poll(0.01)
        records, changed = self.take()
        self.records += records
        self.changed += changed

    def take(self) -> tuple[Sequence[AnyRecord], list[int]]:
        changed, records = self.links.take()
        return records, changed


@dataclass
class Worker:
    """A `ControlLink`, with what it was told."""

    link: ControlLink
    records: list[AnyRecord] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    async def run(self) -> None:
        await self.link.run(self.records.extend, lambda: self.changes.append(self.link.kind_in_use))

    async def attach(self, server: Server, until: Any) -> Welcome:
        """The server welcomes this process, which opens its first link."""
        self.link.welcome(made := server.welcome())
        await until(lambda: self.changes)
        return made


@dataclass
class Rig:
    kind: str
    services: Services
    path: Path
    servers: list[Server] = field(default_factory=list)

    def start_server(self, term: int = TERM) -> Server:
        self.servers.append(Server(self.kind, self.services, self.path, term))
        return self.servers[-1]

    def close(self) -> None:
        while self.servers:
            self.servers.pop().links.close()

    def worker(self) -> Worker:
        return Worker(ControlLink(self.services, self.kind))

    def raw(self) -> Any:
        """A worker's end without its logic."""
        endpoint = self.servers[-1].links.endpoints[0].partition(":")[2]
        now = time.monotonic()
        if self.kind == "local":
            return SocketLink(connect(endpoint), LinkState(TO_WORKER, now))
        return StreamLink(self.services, endpoint, now)

    def attached(self, server: Server) -> Any:
        """A worker's end without its logic, attached."""
        server.welcome()
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        records: list[AnyRecord] = []
        while True:
            raw = self.raw()
            try:
                raw.send(Attach(worker=0, session=SESSION, term=server.term), time.monotonic())
                while not records:
                    assert time.monotonic() < deadline_s
                    server.poll()
                    records = raw.receive(time.monotonic())
            except LinkError:  # the server's stream is not there yet
                raw.close()
            else:
                assert records == [Attached(term=server.term, worker=0, session=SESSION)]
                return raw


ON_SOCKET = pytest.mark.parametrize("rig", ["local"], indirect=True)
ON_REDIS = pytest.mark.parametrize("rig", ["redis"], indirect=True)


def run(scenario: Callable[[Worker, Callable[..., Any]], Any], worker: Worker, *servers: Server) -> None:
    """Run `scenario(until)` on an event loop, with `worker` beside it."""

    async def main() -> None:
        task = asyncio.create_task(worker.run())

        async def until(condition: Callable[[], Any], *polled: Server) -> None:
            deadline_s = time.monotonic() + WAIT_TIMEOUT_S
            while not condition():
                assert not task.done(), task.exception()
                assert time.monotonic() < deadline_s
                for server in polled or servers:
                    await asyncio.to_thread(server.poll)

        try:
            await scenario(worker, until)
        finally:
            task.cancel()
            worker.link.close("the test ends")

    asyncio.run(main())
