"""The link between a server and the shadow's process: what is left out is counted, also when the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doll.serving.shadow import MAX_WAITING, Copied, ShadowLink, compute_copies

REQUEST = Copied("first", False, "12")


class Full(asyncio.WriteTransport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.kept = b""

    def writelines(self, parts: Iterable[Any]) -> None:
        self.kept += b"".join(parts)

    def get_write_buffer_size(self) -> int:
        return len(self.kept)


class Counts:
    def __init__(self) -> None:
        self.answered = self.skipped = 0

    def link(self, path: str = "", max_bytes: int = 1_000_000) -> ShadowLink:
        def answered() -> None:
            self.answered += 1

        def skipped() -> None:
            self.skipped += 1

        return ShadowLink(path, max_bytes=max_bytes, on_answered=answered, on_skipped=skipped)


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:  # the paths of tests may be too long for a socket
        yield str(Path(folder) / "shadow.sock")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def computing(path: str, compute: Any) -> AsyncIterator[None]:
    """The shadow's side, while the context lasts."""
    stop = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        task = asyncio.create_task(compute_copies(listener, compute, stop, lambda: None))
        yield
        stop.set()
        await task


def test_while_many_wait_further_ones_are_left_out() -> None:
    counts = Counts()
    link = counts.link()
    link.send(REQUEST, b"no process is there")
    assert counts.skipped == 1
    link.connection_made(Full())
    for _ in range(MAX_WAITING + 2):
        link.send(REQUEST, b"{}")
    assert counts.skipped == 3
    link.data_received(b"\1\1\0")
    assert (counts.answered, counts.skipped) == (2, 4)
    link.send(REQUEST, b"{}")
    assert counts.skipped == 4, "there is room again"
    link.connection_lost(None)
    assert (counts.answered, counts.skipped) == (2, 4 + MAX_WAITING - 2), "each request is counted once"


def test_what_the_socket_does_not_take_is_bounded() -> None:
    counts = Counts()
    link = counts.link(max_bytes=100)
    link.connection_made(Full())
    link.send(REQUEST, bytes(100))
    assert counts.skipped == 0, "the largest body fits if nothing waits"
    link.send(REQUEST, bytes(1))
    assert counts.skipped == 1


def test_requests_come_with_their_bodies_and_each_answer_is_counted(path: str) -> None:
    counts, computed = Counts(), list[tuple[Copied, bytes]]()

    async def compute(request: Copied, body: bytes) -> bool:
        computed.append((request, body))
        return body != b"bad"

    async def run() -> None:
        link = counts.link(path)
        connecting = asyncio.create_task(link.keep_connected())
        async with computing(path, compute):
            await until(lambda: link._transport is not None)
            bodies = [b"", bytes(300_000), b"bad"]
            for body in bodies:
                link.send(REQUEST, body)
            await until(lambda: counts.answered + counts.skipped == 3)
        connecting.cancel()
        assert computed == [(REQUEST, body) for body in bodies]
        assert (counts.answered, counts.skipped) == (2, 1)

    asyncio.run(run())


def test_a_process_that_ends_is_waited_for_and_its_requests_are_counted(path: str) -> None:
    counts, hold = Counts(), asyncio.Event()

    async def never(request: Copied, body: bytes) -> bool:
        await hold.wait()
        return True

    async def run() -> None:
        link = counts.link(path)
        connecting = asyncio.create_task(link.keep_connected())
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.setblocking(False)
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            await until(lambda: link._transport is not None)
            link.send(REQUEST, b"{}")
            connection.close()
            await until(lambda: counts.skipped == 1)
        Path(path).unlink()
        async with computing(path, never):
            await until(lambda: link._transport is not None)
            link.send(REQUEST, b"{}")
            hold.set()
            await until(lambda: counts.answered == 1)
        connecting.cancel()

    asyncio.run(run())
