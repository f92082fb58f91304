"""A fake EC2 instance metadata service that serves interruption notices, well-formed or malformed, to single workers.

One server answers for all roles: each has its own path, which `doll.consumers.lifecycle.spot_notices` accepts as an
endpoint.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from doll.consumers.lifecycle.spot_notices import ENDPOINT_ENV, NOTICES_ENV
from doll.local.processes import LOOPBACK

_ACTION: Final = "/latest/meta-data/spot/instance-action"
_TOKEN: Final = "/latest/api/token"
_NOTICE_S: Final = 20.0
# Bytes that are not UTF-8, text that is not JSON, JSON that is nested too deeply, and JSON that is not a notice.
UNREADABLE: Final = (
    b"\xff\xfe\x00garbage", b"{'action': terminate", b"[" * 30_000 + b"]" * 30_000, b'{"time": {"time": []}}', b"7",
)  # fmt: skip


class FakeMetadataService:
    """Serves on loopback, in a thread. Use it as a context manager around the whole run."""

    def __init__(self) -> None:
        self._answers: dict[str, bytes] = {}
        self._served: Counter[str] = Counter()  # malformed notices served, by role
        self._server = ThreadingHTTPServer((LOOPBACK, 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="metadata", daemon=True)

    def environment(self, role: str) -> Mapping[str, str]:
        """Environment variables that make a worker poll this server for its notices."""
        return {NOTICES_ENV: "imds", ENDPOINT_ENV: f"http://{LOOPBACK}:{self._server.server_port}/{role}"}

    def serve_bad_notice(self, role: str, number: int) -> None:
        """From now on, serve the role a malformed notice; `number` selects which."""
        self._served[role] = 0
        self._answers[role] = UNREADABLE[number % len(UNREADABLE)]

    def num_bad_notices_served(self, role: str) -> int:
        """How often the role has received the malformed notice."""
        return self._served[role]

    def serve_notice(self, role: str) -> None:
        """From now on, serve the role a notice of an interruption in 20 s. It may be called again."""
        self._served[role] = 0
        at = datetime.now(UTC) + timedelta(seconds=_NOTICE_S)
        self._answers[role] = json.dumps({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}).encode()

    def clear_notice(self, role: str) -> None:
        """From now on, serve the role no notice."""
        self._answers.pop(role, None)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._answer(b"token" if self.path.endswith(_TOKEN) else None)

            def do_GET(self) -> None:
                role = self.path.split("/", 2)[1]
                answer = metadata._answers.get(role) if self.path.endswith(_ACTION) else None
                self._answer(answer)
                metadata._served[role] += answer in UNREADABLE

            def _answer(self, body: bytes | None) -> None:
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_: Any) -> None:
                return

        return Handler

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
