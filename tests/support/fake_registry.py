"""A schema registry on loopback whose answers the test sets; and records in its form."""

from __future__ import annotations

import io
import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fastavro


class FakeRegistry:
    """Answers as Confluent's API.

    Attributes:
        answers: path to (status, body).
        asked: paths, with the headers of each request.
        down: what it answers to everything, instead.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.down: tuple[int, Any] | None = None
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.asked.append((self.path, dict(self.headers)))
                missing = (404, {"error_code": 40403, "message": "Schema not found"})
                status, body = registry.down or registry.answers.get(self.path, missing)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", f"{registry.url}/elsewhere")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self._handler, self._port = Handler, 0
        self.start()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, on the port of before."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing listens any more, until `start`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, number: int, schema: Any, *, references: Any = (), kind: str = "") -> None:
        """A schema with this id."""
        answer: dict[str, Any] = {"schema": json.dumps(schema)}
        answer |= {"references": references} if references else {}
        answer |= {"schemaType": kind} if kind else {}
        self.answers[f"/schemas/ids/{number}"] = (200, answer)

    def add_version(self, subject: str, version: int | str, schema: Any) -> None:
        """A version of a subject."""
        answer = {"subject": subject, "version": version, "id": 1, "schema": json.dumps(schema)}
        self.answers[f"/subjects/{subject}/versions/{version}"] = (200, answer)


@contextmanager
def fake_registry() -> Iterator[FakeRegistry]:
    """A registry until the end of the context."""
    registry = FakeRegistry()
    try:
        yield registry
    finally:
        registry.close()


def avro(number: int, schema: Any, fields: dict[str, Any]) -> bytes:
    """A record as a registry's serializer writes it."""
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema, named_schemas={}), fields)
    return struct.pack(">bI", 0, number) + stream.getvalue()


def schema(*fields: dict[str, Any] | tuple[str, Any], name: str = "Click") -> dict[str, Any]:
    """The schema of a record with these fields, (name, type) or as in a schema."""
    listed = [{"name": item[0], "type": item[1]} if isinstance(item, tuple) else item for item in fields]
    return {"type": "record", "name": name, "fields": listed}
