"""The metadata service of machines that do not exist: it tells single workers that spot takes them, well or badly.

Each role has a path of its own, so one server speaks for all: `doll.consumers.spot_notices` takes such an address.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self

from doll.consumers.spot_notices import ENDPOINT_ENV, NOTICES_ENV
from doll.local.processes import LOOPBACK

_ACTION: Final = "/latest/meta-data/spot/instance-action"
_TOKEN: Final = "/latest/api/token"
_NOTICE_S: Final = 20.0
# Bytes that are no text, text that is no JSON, JSON that is nested too deeply, and JSON that is no notice.
UNREADABLE: Final = (
    b"\xff\xfe\x00garbage", b"{'action': terminate", b"[" * 30_000 + b"]" * 30_000, b'{"time": {"time": []}}', b"7",
)  # fmt: skip


class FakeMetadataService:
    """Answers on loopback, from a thread. Use it as a context manager around the whole run."""

    def __init__(self) -> None:
        self._answers: dict[str, bytes] = {}
        self._served: Counter[str] = Counter()  # bad notices that were asked for
        self._server = ThreadingHTTPServer((LOOPBACK, 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="metadata", daemon=True)

    def environment(self, role: str) -> Mapping[str, str]:
        """What makes a worker ask here for its notices."""
        return {NOTICES_ENV: "imds", ENDPOINT_ENV: f"http://{LOOPBACK}:{self._server.server_port}/{role}"}

    def serve_bad_notice(self, role: str, number: int) -> None:
        """From now on the role is answered with something that cannot be read; `number` chooses what."""
        self._served[role] = 0
        self._answers[role] = UNREADABLE[number % len(UNREADABLE)]

    def num_bad_notices_served(self, role: str) -> int:
        """How often the role has asked for its notice and got the bad one."""
        return self._served[role]

    def serve_notice(self, role: str) -> None:
        """From now on the role is told that it is taken in 20 s. It may be repeated."""
        self._served[role] = 0
        at = datetime.now(UTC) + timedelta(seconds=_NOTICE_S)
        self._answers[role] = json.dumps({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}).encode()

    def clear_notice(self, role: str) -> None:
        """From now on there is no notice for the role."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
