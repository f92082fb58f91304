"""Each endpoint of the page and of the model server needs one right: none, to read, or to act.

The tables name every endpoint. A new route without a line fails here, so that nobody forgets its right.
"""

from __future__ import annotations

from typing import Any

import pytest
from doll.dashboard.access import COOKIE, LOGIN, Access, cookie_of
from doll.dashboard.runs_folder import RunsFolder
from doll.dashboard.server import JobPage, RunsPage, application
from doll.process.connections import ServerAccess
from doll.process.http_access import Right, Tokens
from examples.synthetic.task import Gaussian
from page_feed import MadeUpJob
from serving_app import CalledApp
from starlette.responses import PlainTextResponse

pytestmark = pytest.mark.slow  # loads torch

TOKENS = Tokens(act="the-token-that-acts", read="the-token-that-reads")
PAGE = {
    ("GET", "/login"): Right.OPEN, ("POST", "/login"): Right.OPEN,
    ("GET", "/"): Right.READ, ("GET", "/events"): Right.READ, ("GET", "/api/{kind}/{key}"): Right.READ,
    ("GET", "/{name}"): Right.READ,
}  # fmt: skip
RUNS = {
    **PAGE, ("GET", "/runs/{run}/"): Right.READ, ("GET", "/runs/{run}/events"): Right.READ,
    ("GET", "/runs/{run}/api/{kind}/{key}"): Right.READ, ("GET", "/runs/{run}/{name}"): Right.READ,
}  # fmt: skip
del RUNS["GET", "/api/{kind}/{key}"]
MODEL, VERSION = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
SERVER = {
    ("POST", f"{MODEL}/infer"): Right.ACT, ("POST", f"{VERSION}/infer"): Right.ACT, ("POST", "/predict"): Right.ACT,
    ("GET", f"{MODEL}/ready"): Right.READ, ("GET", f"{VERSION}/ready"): Right.READ,
    ("GET", MODEL): Right.READ, ("GET", VERSION): Right.READ, ("GET", "/v2"): Right.READ,
    ("GET", "/metrics"): Right.READ,
    ("GET", "/v2/health/live"): Right.OPEN, ("GET", "/v2/health/ready"): Right.OPEN,
}  # fmt: skip
# The style of the log-in, which is a file among the others.
STYLE = "/page.css"


def endpoints(routes: Any) -> list[tuple[str, str]]:
    return sorted((method, route.path) for route in routes for method in route.methods - {"HEAD"})


async def status_of(app: Any, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of the answer to a request of this machine; its body is empty."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items()]
    path = path.replace("{name}", "m").replace("{version}", "1")
    scope = {"type": "http", "method": method, "path": path, "headers": pairs, "query_string": b"", "root_path": ""}
    await app(scope, receive, send)
    for _, value in [pair for message in sent for pair in message.get("headers", ())]:
        assert TOKENS.act.encode() not in value
        assert TOKENS.read.encode() not in value
    return int(sent[0]["status"])


def given(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


def test_the_table_has_each_route_of_the_page(tmp_path: Any) -> None:
    for shown, table in ((JobPage(MadeUpJob()), PAGE), (RunsPage(RunsFolder(tmp_path)), RUNS)):
        app: Any = application(shown).app
        assert endpoints(app.routes) == sorted(table)


@pytest.mark.parametrize("endpoint", sorted({**PAGE, **RUNS}))
async def test_the_page_asks_for_a_token_where_its_table_says_so(endpoint: tuple[str, str]) -> None:
    method, path = endpoint
    needed = {**PAGE, **RUNS}[endpoint]
    app = Access(PlainTextResponse("the page"), TOKENS)  # the rights are decided before the routes
    for token in ("", "another-token-0123", TOKENS.read[:-1]):
        expected = {Right.OPEN: {200}, Right.READ: {401, 303}}[needed]
        assert await status_of(app, method, path, given(token)) in expected
    for token in (TOKENS.read, TOKENS.act):  # nothing on the page acts
        assert await status_of(app, method, path, given(token)) == 200
        assert await status_of(app, method, path, {"cookie": f"{COOKIE}={cookie_of(token)}"}) == 200
        assert await status_of(app, method, path, {"cookie": f"{COOKIE}={token}"}) in (
            {200} if not needed else {401, 303}
        )
    if path != LOGIN:
        assert await status_of(app, "POST", path, given(TOKENS.act)) == 405
    assert await status_of(app, "GET", STYLE, {}) == 200


def test_the_table_has_each_route_of_the_model_server() -> None:
    routes = CalledApp(Gaussian()).app.routes
    assert sorted(SERVER) == sorted(endpoint for each in routes.values() for endpoint in endpoints(each))
    for right, each in routes.items():
        assert {SERVER[endpoint] for endpoint in endpoints(each)} == {right}


@pytest.mark.parametrize("endpoint", sorted(SERVER))
async def test_the_model_server_asks_for_the_right_of_its_table(endpoint: tuple[str, str]) -> None:
    method, path = endpoint
    needed = SERVER[endpoint]
    app = CalledApp(Gaussian(), ServerAccess(TOKENS)).app
    for token, right in (
        ("", Right.OPEN),
        ("another-token-0123", Right.OPEN),
        (TOKENS.read, Right.READ),
        (TOKENS.act, Right.ACT),
    ):
        status = await status_of(app, method, path, given(token))
        if right >= needed:
            assert status not in (401, 403), (token, status)  # the empty body is refused
        else:
            assert status == (403 if right else 401), (token, status)
