"""The server of a page over real sockets: what it answers, what it refuses, and what it sends."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doll.dashboard import server
from doll.dashboard.access import COOKIE, cookie_of
from doll.process.http_access import LOOPBACK
from page_feed import MadeUpJob, ask, served

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
    with served(made_up, token=TOKEN) as port:
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
        name, patch = next(stream)
    assert name == "patch"
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
