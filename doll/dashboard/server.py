"""The web server of a page: its files, the state as server-sent events, and the details that a click opens. Read-only.

A browser gets the whole state first. Then it gets once per second a merge patch with the changes, or a message that
nothing has changed. If neither arrives, the browser knows that its state is old. The state is computed once for all
browsers, and only while there are browsers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.resources
import mimetypes
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote_plus

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from doll import telemetry
from doll.dashboard.access import COOKIE, LOGIN, Access, cookie_of
from doll.dashboard.merge_patch import merge_patch
from doll.dashboard.runs_folder import RunsFolder
from doll.dashboard.sources import JobSource
from doll.errors import DollError
from doll.monitor.views.page import page, visible
from doll.monitor.views.page_details import KINDS, Detail, detail
from doll.process.connections import IDLE_S, BoundedProtocol, BoundedServer
from doll.process.http_access import NO_TOKENS, Right, Tokens
from doll.process.platform import lower_priority
from doll.records.bounded import short

log = telemetry.get_logger(__name__)

EVERY_S: Final = 1.0
FOLDER_EVERY_S: Final = 5.0  # for runs side by side, whose files must be read again
MAX_STREAMS: Final = 64
_QUEUED: Final = 8  # limit of unread events of a browser; above it, it gets the whole state again
_MAX_FORM_BYTES: Final = 4_096
_GRACE_S: Final = 1
_LAST_S: Final = 2.0  # time limit for the last state when the server ends
_TIME_LIMIT_S: Final = 10.0  # time limit for receiving a request
_BACKLOG: Final = 64  # connections accepted at a time, before surplus ones are closed


class Streams:
    """The browsers that follow a page, and the state that they have received.

    Args:
        read: returns the state as plain values; called in another thread.
        every_s: interval between updates, seconds.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], every_s: float) -> None:
        self._read = read
        self._every_s = every_s
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._sent: dict[str, Any] = {}
        self._turn = asyncio.Lock()

    def response(self) -> Response:
        """Return the answer to a browser that requests the events."""
        if len(self._queues) >= MAX_STREAMS:
            return PlainTextResponse(f"{MAX_STREAMS} browsers follow this page already\n", 503, {"Retry-After": "60"})
        return StreamingResponse(self.events(), media_type="text/event-stream")

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events for one browser until it disconnects."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUED)
        async with self._turn:
            if not self._queues:
                self._sent = await self._state()
            queue.put_nowait(_event("state", self._sent))
            self._queues.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._queues.discard(queue)

    async def send_changes(self) -> None:
        """Send changes repeatedly while there are browsers."""
        while True:
            await asyncio.sleep(self._every_s)
            if self._queues:
                async with self._turn:
                    await self._send_changes()

    async def _send_changes(self) -> None:
        try:
            state = await self._state()
        except Exception as error:  # browsers notice the missing event; the next round may succeed
            log.warning("state_not_read", reason=short(error))
            return
        patch = merge_patch(self._sent, state)
        self._sent, event = state, _event("patch", patch) if patch else _event("beat", {})
        for queue in self._queues:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(_event("state", state))
            else:
                queue.put_nowait(event)

    async def close(self) -> None:
        """End all streams after the last state, because the server ends."""
        if self._queues:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_S), self._turn:
                    await self._send_changes()
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def _state(self) -> dict[str, Any]:
        shown: dict[str, Any] = visible(await asyncio.to_thread(self._read))
        return {**shown, "every_s": self._every_s}


def _event(name: str, value: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


class JobPage:
    """The page of a job, or of a run that has ended.

    Attributes:
        streams: sends changes to the browsers.
    """

    def __init__(self, source: JobSource, every_s: float = EVERY_S) -> None:
        self.streams = Streams(lambda: source.read(page), every_s)
        self._source = source

    def routes(self) -> list[Route]:
        """Return the routes of an application that serves only this page."""

        async def own(request: Request) -> JobPage:
            return self

        return _job_routes("/", own)

    async def close(self) -> None:
        await self.streams.close()

    async def index(self, request: Request) -> Response:
        return _files()["index.html"]

    async def events(self, request: Request) -> Response:
        return self.streams.response()

    async def opened(self, request: Request) -> Response:
        """Return the answer to a click: the details of one item."""
        kind, numbers = request.path_params["kind"], request.path_params["key"].split("-")
        if kind not in KINDS or not all(part.isascii() and part.isdecimal() and len(part) <= 18 for part in numbers):
            return JSONResponse({"error": f"expected one of {', '.join(KINDS)}, and its number"}, 404)
        opened = await asyncio.to_thread(self._open, kind, [*map(int, numbers)])
        if opened is None:
            return JSONResponse({"error": f"there is no such {kind}, or it is not kept any more"}, 404)
        return Response(msgspec.json.encode(visible(opened)), media_type="application/json")

    def _open(self, kind: str, key: list[int]) -> Detail | None:
        kept = self._source.kept_versions() if kind == "version" else None
        return self._source.read(lambda state: detail(replace(state, kept=kept), kind, key))


class RunsPage:
    """The page of several runs side by side, and the pages of the runs that have ended.

    Attributes:
        streams: sends changes to the browsers.
    """

    def __init__(self, folder: RunsFolder, every_s: float = FOLDER_EVERY_S) -> None:
        self.streams = Streams(folder.page, every_s)
        self._folder = folder
        self._pages: dict[str, JobPage] = {}

    def routes(self) -> list[Route]:
        """Return the routes of an application that serves only these pages."""

        async def index(request: Request) -> Response:
            return _files()["runs.html"]

        async def events(request: Request) -> Response:
            return self.streams.response()

        return [Route("/events", events), *_job_routes("/runs/{run}/", self._page_of), Route("/", index), FILE_ROUTE]

    async def close(self) -> None:
        for streams in (self.streams, *(opened.streams for opened in self._pages.values())):
            await streams.close()

    async def _page_of(self, request: Request) -> JobPage | None:
        name = request.path_params["run"]
        if name not in self._pages:
            source = await asyncio.to_thread(self._folder.opened, name)
            if source is None:
                return None
            self._pages.setdefault(name, JobPage(source))
        return self._pages[name]


async def _file(request: Request) -> Response:
    return _files().get(request.path_params["name"], PlainTextResponse("no such file\n", 404))


FILE_ROUTE: Final = Route("/{name}", _file)


def _job_routes(prefix: str, page_of: Callable[[Request], Awaitable[JobPage | None]]) -> list[Route]:
    """Return the routes of the pages below `prefix`."""

    def route(path: str, answer: Callable[[JobPage, Request], Awaitable[Response]]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                shown = await page_of(request)
            except DollError as error:
                return PlainTextResponse(f"{error}\n", 404)
            if shown is None:
                return PlainTextResponse("there is no such run, or it has not ended\n", 404)
            return await answer(shown, request)

        return Route(f"{prefix}{path}", endpoint)

    return [
        route("", JobPage.index),
        route("events", JobPage.events),
        route("api/{kind}/{key}", JobPage.opened),
        Route(f"{prefix}{{name}}", _file),
    ]


def application(shown: JobPage | RunsPage, tokens: Tokens = NO_TOKENS) -> Access:
    """Return the web application of a page."""

    async def log_in(request: Request) -> Response:
        if request.method != "POST":
            return _files()["login.html"]
        given = await _form_token(request)
        if not tokens or tokens.right_of(given) < Right.READ:
            return PlainTextResponse("this is not the token of this page\n", 401)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, cookie_of(given), httponly=True, samesite="strict")
        return answer

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(shown.streams.send_changes())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    routes = [Route(LOGIN, log_in, methods=["GET", "POST"]), *shown.routes()]
    return Access(Starlette(routes=routes, lifespan=lifespan), tokens)


async def _form_token(request: Request) -> str:
    """Return the field `token` of a short form; "" if it is missing."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_FORM_BYTES:
            return ""
    name, _, value = body.partition(b"=")
    return unquote_plus(value.decode("ascii", "replace")) if name == b"token" else ""


@functools.cache
def _files() -> dict[str, Response]:
    """Return the files of the front end by name. They are kept in memory, so no request can name a file on the disk."""
    files = {}
    for path in importlib.resources.files("doll.dashboard").joinpath("static").iterdir():
        if path.name.startswith("."):
            continue
        kind = "text/javascript" if path.name.endswith(".js") else mimetypes.guess_type(path.name)[0] or "text/plain"
        files[path.name] = Response(path.read_bytes(), media_type=kind, headers={"Cache-Control": "no-cache"})
    return files


class PageProtocol(BoundedProtocol):
    """One connection to a page. The maximum number of connections is much lower than for a model server, because the
    page may run in the process of a model server.

    If a new connection exceeds the limit, the connection that has waited longest for a request is closed. So idle
    clients do not block others, and no answer is interrupted.
    """

    max_connections = 128

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self.max_connections:
            waiting = [other for other in self.connections if isinstance(other, PageProtocol) and other.is_waiting]
            if waiting:
                oldest = min(waiting, key=lambda other: other.idle_since_s)
                self.connections.discard(oldest)
                oldest.transport.abort()
        super().connection_made(transport)

    @property
    def is_waiting(self) -> bool:
        """Whether no request of this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete or self.message_since_s is not None


class PageServer(BoundedServer):
    """The server of a page. It closes idle connections, as the model server does.

    Args:
        tokens: tokens that readers may have; none: everyone who can reach the loopback interface may read.
    """

    def __init__(self, shown: JobPage | RunsPage, *, tokens: Tokens = NO_TOKENS) -> None:
        self._shown = shown
        super().__init__(
            uvicorn.Config(
                application(shown, tokens), http=PageProtocol, log_config=None, access_log=False, server_header=False,
                lifespan="on", ws="none", proxy_headers=False, backlog=_BACKLOG, timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=int(IDLE_S),
            )
        )  # fmt: skip

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self.close_idle(_TIME_LIMIT_S))
        try:
            await super().serve(sockets)
        finally:
            closing.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._shown.close()
        await super().shutdown(sockets)


def serve_page(shown: JobPage | RunsPage, listener: socket.socket, *, tokens: Tokens = NO_TOKENS) -> None:
    """Serve a page at a socket until SIGTERM or SIGINT, at a low priority. Must be called in the main thread."""
    lower_priority()
    server = PageServer(shown, tokens=tokens)
    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
