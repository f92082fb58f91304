"""The server of a page over real sockets: what it answers, what it refuses, and what it sends."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doll.dashboard import server
from doll.dashboard.access import COOKIE, cookie_of
from doll.process import connections
from doll.process.http_access import LOOPBACK, Tokens
from doll.records.control import Finished
from page_feed import MadeUpJob, ask, served
from waiting import until

TOKEN = "a-secret-of-this-test"
STATIC = Path(server.__file__).with_name("static")


@pytest.fixture(scope="module")
def made_up() -> MadeUpJob:
    made_up = MadeUpJob()
    made_up.run(10)
    made_up.refuse(7, "no JSON")
    made_up.decide("slot 1: wait: spot is down")
    return made_up


@pytest.fixture(scope="module")
def port(made_up: MadeUpJob) -> Iterator[int]:
    with served(made_up) as port:
        yield port


@pytest.fixture(scope="module")
def locked_port(made_up: MadeUpJob) -> Iterator[int]:
    with served(made_up, tokens=Tokens(TOKEN)) as port:
        yield port


class Stream:
    """The events of one browser."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection(LOOPBACK, port, timeout=30)
        self._connection.request("GET", "/events")
        self.answer = self._connection.getresponse()

    def __next__(self) -> tuple[str, dict[str, Any]]:
        name = self.answer.readline().decode().removeprefix("event: ").strip()
        value = json.loads(self.answer.readline().decode().removeprefix("data: "))
        assert self.answer.readline() == b"\n"
        return name, value

    def until(self, wanted: str) -> dict[str, Any]:
        """The next event of this name."""
        while (event := next(self))[0] != wanted:
            pass
        return event[1]

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


def test_every_file_of_the_front_end_is_served_and_is_small(port: int) -> None:
    sizes = {}
    for path in ["/", *(f"/{file.name}" for file in STATIC.iterdir())]:
        status, headers, body = ask(port, path)
        assert status == 200, path
        assert headers["x-content-type-options"] == "nosniff"
        sizes[path] = len(body)
    assert sum(sizes.values()) < 150_000, sizes


def test_no_script_or_style_is_inline_and_nothing_comes_from_elsewhere(port: int) -> None:
    _, headers, body = ask(port, "/")
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert b"<script>" not in body
    assert b" style=" not in body
    for file in STATIC.glob("*.*"):
        if file.suffix in (".html", ".css", ".js") and file.stem != "uplot":
            text = file.read_text()
            assert "//cdn" not in text
            assert "innerHTML" not in text
            assert "http:" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/../../server.py",
        "//etc/passwd",
        "/..%5cserver.py",
        "/api/worker/../../x",
        "/api/files/1",
        "/api/worker/x",
        "/api/worker/-1",
        "/api/worker/" + 30 * "9",
        "/server.py",
        "/api/letter/0",
    ],
)
def test_no_other_file_and_no_other_thing_is_served(port: int, path: str) -> None:
    status, _, body = ask(port, path)
    assert status == 404, path
    assert b"import" not in body
    assert b"root:" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_answers(port: int, method: str) -> None:
    assert ask(port, "/", method=method)[0] == 405
    assert ask(port, "/events", method=method)[0] == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1", 200),
        ("127.0.0.1:99", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("evil.example:80", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_a_name_that_points_here_is_refused(port: int, host: str, status: int) -> None:
    assert ask(port, "/", headers={"Host": host})[0] == status


def test_with_a_token_everything_but_the_log_in_asks_for_it(locked_port: int) -> None:
    for path in ("/events", "/page.js", "/api/worker/1"):
        assert ask(locked_port, path)[0] == 401
        assert ask(locked_port, path, headers={"Authorization": "Bearer wrong"})[0] == 401
        assert ask(locked_port, path, headers={"Cookie": f"{COOKIE}={TOKEN}"})[0] == 401
    status, headers, _ = ask(locked_port, "/")
    assert (status, headers["location"]) == (303, "/login")
    assert ask(locked_port, "/login")[0] == 200
    assert ask(locked_port, "/", headers={"Authorization": f"Bearer {TOKEN}", "Host": "doll.example"})[0] == 200


def test_a_log_in_sets_a_cookie_that_is_not_the_token(locked_port: int) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert ask(locked_port, "/login", method="POST", headers=form, body=b"token=wrong")[0] == 401
    assert ask(locked_port, "/login", method="POST", headers=form, body=b"token=" + 100_000 * b"x")[0] == 401
    status, headers, _ = ask(locked_port, "/login", method="POST", headers=form, body=f"token={TOKEN}".encode())
    assert status == 303
    cookie = headers["set-cookie"]
    assert f"{COOKIE}={cookie_of(TOKEN)};" in cookie
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert ask(locked_port, "/", headers={"Cookie": cookie.partition(";")[0]})[0] == 200


def test_a_click_opens(port: int) -> None:
    for path in ("worker/1", "update/40", "letter/0-7", "decision/1", "version/40"):
        status, headers, body = ask(port, f"/api/{path}")
        assert (status, headers["content-type"], headers["cache-control"]) == (200, "application/json", "no-store"), (
            path
        )
        assert json.loads(body)["title"]
    status, _, body = ask(port, "/api/worker/99")
    assert (status, json.loads(body)) == (404, {"error": "there is no such worker, or it is not kept any more"})


def test_a_browser_gets_the_whole_state_and_then_what_changes(made_up: MadeUpJob, port: int) -> None:
    stream = Stream(port)
    assert stream.answer.getheader("content-type") == "text/event-stream; charset=utf-8"
    name, state = next(stream)
    assert name == "state"
    assert state["questions"]["work"]["verdict"] == "8 of 8 workers are live"
    made_up.kill(5)
    made_up.run(1)
    patch: dict[str, Any] = {}
    while patch.get("workers", {}).get("5", {}).get("state") != "gone":
        patch = stream.until("patch")
    assert "name" not in patch["job"]
    second = Stream(port)
    assert next(second)[1]["workers"]["5"]["state"] == "gone"
    stream.close()
    second.close()


def test_too_many_browsers_are_refused(made_up: MadeUpJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STREAMS", 2)
    with served(made_up) as port:
        streams = [Stream(port) for _ in range(2)]
        for stream in streams:
            assert next(stream)[0] == "state"
        status, headers, _ = ask(port, "/events")
        assert (status, headers["retry-after"]) == (503, "60")
        for stream in streams:
            stream.close()


def test_a_stream_without_news_says_that_there_is_none(made_up: MadeUpJob, port: int) -> None:
    stream = Stream(port)
    assert next(stream)[1]["every_s"] == 0.1
    assert stream.until("beat") == {}
    stream.close()


def test_a_state_that_cannot_be_read_once_ends_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up, failed = MadeUpJob(), threading.Event()
    with served(made_up) as port:
        stream = Stream(port)
        stream.until("beat")

        def fail(view: Any) -> Any:
            failed.set()
            raise RuntimeError("a defect")

        monkeypatch.setattr(made_up, "read", fail)
        assert failed.wait(30)
        monkeypatch.undo()
        made_up.run(1)
        assert stream.until("patch")["job"]["doing"].startswith("4 updates")
        stream.close()


def test_the_last_state_is_sent_before_the_server_ends() -> None:
    made_up = MadeUpJob()
    with served(made_up, every_s=3_600) as port:
        stream = Stream(port)
        next(stream)
        made_up.run(60)
        made_up.feed(Finished(term=1, version=240, reason="samples: 30720 reached", time_s=made_up.now_s))
    assert next(stream)[1]["job"]["state"] == "ended: samples: 30720 reached"
    assert stream.answer.read() == b""
    stream.close()


def test_no_character_that_is_not_seen_gets_into_a_page(made_up: MadeUpJob, port: int) -> None:
    reason = "no JSON: \u202egnp.exe\x1b[31m\x00"
    made_up.refuse(8, reason)
    stream = Stream(port)
    state = next(stream)[1]
    assert state["lists"]["letters"]["0-8"] == "no JSON: \\u202egnp.exe\\x1b[31m\\x00"
    _, _, body = ask(port, "/api/letter/0-8")
    for text in (json.dumps(state, ensure_ascii=False), body.decode()):
        assert "\u202e" not in text
    assert dict(json.loads(body)["facts"])["reason"].endswith("\\x1b[31m\\x00")
    stream.close()


def raw(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection((LOOPBACK, port), timeout=30)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_connections_without_a_request_keep_nobody_out(made_up: MadeUpJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.PageProtocol, "max_connections", 4)
    with served(made_up) as port:
        stream = Stream(port)
        next(stream)
        others = [raw(port, b"GET / HTTP/1.1\r\n" if number % 2 else b"") for number in range(20)]
        assert ask(port, "/")[0] == 200
        until(lambda: sum(map(is_closed, others)) >= 16, "all but as many as may be to be closed")
        assert stream.until("beat") == {}
        stream.close()
        for other in others:
            other.close()


def test_a_head_that_does_not_end_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = raw(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + 70_000 * b"x")
    assert endless.recv(100).startswith(b"HTTP/1.1 431")
    endless.close()


def test_a_request_that_does_not_come_is_not_waited_for(made_up: MadeUpJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_TIME_LIMIT_S", 0.1)
    monkeypatch.setattr(connections, "_LOOK_S", 0.05)
    with served(made_up) as port:
        slow = raw(port, b"GET / HTTP/1.1\r\n")
        assert slow.recv(100).startswith(b"HTTP/1.1 408")
        slow.close()
