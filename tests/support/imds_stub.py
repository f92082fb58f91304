"""EC2's instance metadata service, version 2, on loopback: what `doll worker` may ask of it, and no more."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

TOKEN_HEADER = "X-aws-ec2-metadata-token"


class ImdsStub:
    """Answers from `paths`; 404 for others; 401 without the token of the hour.

    Attributes:
        paths: what is below /latest/meta-data/.
        tokens: how many were given out.
        broken: answers 500 to everything.
    """

    def __init__(self) -> None:
        self.paths: dict[str, str] = {"instance-id": "i-0abc"}
        self.tokens = 0
        self.broken = False
        self.endpoint = ""

    def expire_tokens(self) -> None:
        """No token given out so far counts any more."""
        self.tokens += 1000

    def interrupt(self, time: str) -> None:
        self.paths["spot/instance-action"] = json.dumps({"action": "terminate", "time": time})

    async def token(self, request: web.Request) -> web.Response:
        if self.broken:
            return web.Response(status=500)
        ttl = request.headers.get(f"{TOKEN_HEADER}-ttl-seconds", "")
        if not ttl.isdecimal() or not 1 <= int(ttl) <= 21_600:
            return web.Response(status=400)
        self.tokens += 1
        return web.Response(text=f"token-{self.tokens}")

    async def data(self, request: web.Request) -> web.Response:
        if self.broken:
            return web.Response(status=500)
        if request.headers.get(TOKEN_HEADER) != f"token-{self.tokens}":
            return web.Response(status=401)
        text = self.paths.get(request.match_info["path"])
        return web.Response(status=404) if text is None else web.Response(text=text)


@contextmanager
def imds_stub() -> Iterator[ImdsStub]:
    """One on a free port, until the end of the block."""
    stub = ImdsStub()
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_put("/latest/api/token", stub.token)
    app.router.add_get("/latest/meta-data/{path:.+}", stub.data)
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stub.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
