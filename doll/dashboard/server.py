"""The web server of a page: its files, the state as server-sent events, and what a click opens. It only answers.

A browser gets the whole state first, then once a second a merge patch of what has changed. The state is computed once
for all browsers, and not at all while there are none.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import mimetypes
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import unquote_plus

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from doll.dashboard.access import COOKIE, LOGIN, Access, cookie_of
from doll.dashboard.merge_patch import merge_patch
from doll.dashboard.sources import JobSource
from doll.monitor.views.page import page
from doll.monitor.views.page_details import KINDS, detail
from doll.process.http_access import is_token

EVERY_S: Final = 1.0
MAX_STREAMS: Final = 64
NICENESS: Final = 10  # watching must not slow learning down
_QUEUED: Final = 8  # events for a browser that does not read them; then it gets the whole state again
_COMMENT_S: Final = 15.0  # a stream without news says something, so that a proxy keeps it open
_MAX_FORM_BYTES: Final = 4_096
_GRACE_S: Final = 1


class Streams:
    """The browsers that follow a job, and what they have been sent."""

    def __init__(self, source: JobSource, every_s: float) -> None:
        self._source = source
        self._every_s = every_s
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._sent: dict[str, Any] = {}
        self._turn = asyncio.Lock()

    @property
    def is_full(self) -> bool:
        return len(self._queues) >= MAX_STREAMS

    async def events(self) -> AsyncIterator[bytes]:
        """The events for one browser, until it goes."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUED)
        async with self._turn:
            if not self._queues:
                self._sent = await self._state()
            queue.put_nowait(_event("state", self._sent))
            self._queues.add(queue)
        try:
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), _COMMENT_S)
                except TimeoutError:
                    event = b": \n\n"
                if event is None:
                    return
                yield event
        finally:
            self._queues.discard(queue)

    async def send_changes(self) -> None:
        """Send what has changed, again and again, while there are browsers."""
        while True:
            await asyncio.sleep(self._every_s)
            if self._queues:
                async with self._turn:
                    await self._send_changes()

    async def _send_changes(self) -> None:
        state = await self._state()
        if not (patch := merge_patch(self._sent, state)):
            return
        self._sent, event = state, _event("patch", patch)
        for queue in self._queues:
            if queue.full():
                _replace(queue, _event("state", state))
            else:
                queue.put_nowait(event)

    def close(self) -> None:
        """The server ends: so do all streams."""
        for queue in self._queues:
            _replace(queue, None)

    async def _state(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._source.read, page)


def _replace(queue: asyncio.Queue[bytes | None], item: bytes | None) -> None:
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(item)


def _event(name: str, value: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


def _application(source: JobSource, streams: Streams, token: str) -> Access:
    files = _files()

    async def index(request: Request) -> Response:
        return files["index.html"]

    async def file(request: Request) -> Response:
        return files.get(request.path_params["name"], PlainTextResponse("no such file\n", 404))

    async def events(request: Request) -> Response:
        if streams.is_full:
            return PlainTextResponse(f"{MAX_STREAMS} browsers follow this job already\n", 503, {"Retry-After": "60"})
        return StreamingResponse(streams.events(), media_type="text/event-stream")

    async def opened(request: Request) -> Response:
        kind, key = request.path_params["kind"], request.path_params["key"].split("-")
        if kind not in KINDS or not all(part.isascii() and part.isdecimal() and len(part) <= 18 for part in key):
            return JSONResponse({"error": f"expected one of {', '.join(KINDS)}, and its number"}, 404)
        found_detail = await asyncio.to_thread(source.read, lambda state: detail(state, kind, [*map(int, key)]))
        if found_detail is None:
            return JSONResponse({"error": f"there is no such {kind}, or it is not kept any more"}, 404)
        return Response(msgspec.json.encode(found_detail), media_type="application/json")

    async def log_in(request: Request) -> Response:
        if request.method != "POST":
            return files["login.html"]
        given = await _form_token(request)
        if not token or not is_token(given, token):
            return PlainTextResponse("this is not the token of this page\n", 401)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, cookie_of(token), httponly=True, samesite="strict")
        return answer

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(streams.send_changes())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    routes = [
        Route("/", index),
        Route("/events", events),
        Route("/api/{kind}/{key}", opened),
        Route(LOGIN, log_in, methods=["GET", "POST"]),
        Route("/{name}", file),
    ]
    return Access(Starlette(routes=routes, lifespan=lifespan), token)


async def _form_token(request: Request) -> str:
    """The field `token` of a short form; "" where there is none."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_FORM_BYTES:
            return ""
    name, _, value = body.partition(b"=")
    return unquote_plus(value.decode("ascii", "replace")) if name == b"token" else ""


def _files() -> dict[str, Response]:
    """The files of the front end by name. They are kept in memory: no request names a file on the disk."""
    files = {}
    for path in importlib.resources.files("doll.dashboard").joinpath("static").iterdir():
        if path.name.startswith("."):
            continue
        kind = "text/javascript" if path.name.endswith(".js") else mimetypes.guess_type(path.name)[0] or "text/plain"
        files[path.name] = Response(path.read_bytes(), media_type=kind, headers={"Cache-Control": "no-cache"})
    return files


class PageServer(uvicorn.Server):
    """The server of a page; `run` serves it at a socket until SIGTERM or SIGINT where that is the main thread.

    Args:
        token: that a reader must know; "": whoever reaches the loopback interface may read.
        every_s: how often changes are sent.
    """

    def __init__(self, source: JobSource, *, token: str = "", every_s: float = EVERY_S) -> None:
        self._streams = Streams(source, every_s)
        super().__init__(
            uvicorn.Config(
                _application(source, self._streams, token), log_config=None, access_log=False, server_header=False,
                lifespan="on", ws="none", timeout_graceful_shutdown=_GRACE_S,
            )
        )  # fmt: skip

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._streams.close()
        await super().shutdown(sockets)


def serve_page(source: JobSource, listener: socket.socket, *, token: str = "") -> None:
    """Serve a page at a socket until SIGTERM or SIGINT, at a low priority. Needs the main thread."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has ended
        PageServer(source, token=token).run(sockets=[listener])
