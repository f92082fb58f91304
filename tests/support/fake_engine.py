"""An engine that has nothing yet but some images, for `docker compose --dry-run`: no container, network or volume.

Compose asks a real one these questions before a dry run makes up the rest itself.
"""

from __future__ import annotations

import json
import re
import socketserver
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

VERSION = {"Version": "28.2.2", "ApiVersion": "1.50", "MinAPIVersion": "1.24", "Os": "linux", "Arch": "arm64"}
INFO = {"OSType": "linux", "Architecture": "aarch64", "ServerVersion": VERSION["Version"], "SecurityOptions": []}


class FakeDockerEngine(BaseHTTPRequestHandler):
    images: Collection[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        what = re.sub(r"^/v1\.\d+", "", unquote(self.path.partition("?")[0]))
        known: dict[str, Any] = {
            "/_ping": "OK", "/version": VERSION, "/info": INFO, "/containers/json": [], "/images/json": [],
            "/networks": [], "/volumes": {"Volumes": []},
        }  # fmt: skip
        known |= {f"/images/{name}/json": {"Id": f"sha256:{7:064x}", "RepoTags": [name]} for name in self.images}
        answer = known.get(what)
        body = json.dumps({"message": f"No such object: {what}"} if answer is None else answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Api-Version", VERSION["ApiVersion"])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(BrokenPipeError):  # who asked has ended
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def address_string(self) -> str:
        return "unix"


@contextmanager
def fake_docker_engine(socket: Path, images: Collection[str]) -> Iterator[None]:
    """Serve at `unix://<socket>`, with `images` pulled before."""
    handler = type("Handler", (FakeDockerEngine,), {"images": images})
    with socketserver.ThreadingUnixStreamServer(str(socket), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
