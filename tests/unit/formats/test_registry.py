"""The client of schema registries: what the registry says counts, and whatever else happens is waited for."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from doll.errors import ConfigError, RetryLater
from doll.formats.registry import NotInRegistryError, RegisteredSchema, RegistryClient
from fake_registry import FakeRegistry, fake_registry


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with fake_registry() as registry:
        yield registry


def test_schemas_are_read_by_id_and_by_subject(registry: FakeRegistry) -> None:
    client = RegistryClient(registry.url, {})
    registry.add(7, "string")
    registry.add(8, {"a": 1}, kind="JSON")
    registry.add_version("clicks-value", 3, "int")
    registry.add_version("clicks-value", "latest", "long")
    registry.add_version("a%2Fb", "latest", "bytes")
    assert client.by_id(7) == RegisteredSchema('"string"', "AVRO")
    assert client.by_id(8).kind == "JSON"
    assert client.by_subject("clicks-value", 3).text == '"int"'
    assert client.by_subject("clicks-value").text == '"long"'
    assert client.by_subject("a/b").text == '"bytes"'


def test_references_come_before_the_schema_that_names_them(registry: FakeRegistry) -> None:
    registry.add(1, "user", references=[{"name": "Place", "subject": "place", "version": 2}])
    registry.answers["/subjects/place/versions/2"] = (
        200, {"schema": "place", "references": [{"name": "Point", "subject": "point", "version": 1}]}
    )  # fmt: skip
    registry.answers["/subjects/point/versions/1"] = (200, {"schema": "point"})
    assert RegistryClient(registry.url, {}).by_id(1).references == ("point", "place")


def test_references_in_a_circle_end(registry: FakeRegistry) -> None:
    circle = {"schema": "x", "references": [{"name": "X", "subject": "x", "version": 1}]}
    registry.answers["/schemas/ids/1"] = registry.answers["/subjects/x/versions/1"] = (200, circle)
    with pytest.raises(NotInRegistryError, match="in a circle"):
        RegistryClient(registry.url, {}).by_id(1)


@pytest.mark.parametrize("code", [40401, 40402, 40403])
def test_only_the_registry_itself_says_that_something_does_not_exist(registry: FakeRegistry, code: int) -> None:
    registry.down = (404, {"error_code": code, "message": "not here"})
    with pytest.raises(NotInRegistryError, match=f"{code}: not here"):
        RegistryClient(registry.url, {}).by_id(5)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((404, b"<html>nothing here</html>"), "HTTP 404 without an error code.*apis/ccompat/v7"),
        ((404, {"message": "no route"}), "HTTP 404 without an error code"),
        ((200, b"<html>log in</html>"), "expected a schema registry .* got HTTP 200 with <html>log in"),
        ((200, []), "expected a schema registry"),
        ((200, {"id": 7}), "an answer without a schema"),
        ((200, {"schema": "x", "references": [{"subject": "y"}]}), "a reference"),
        ((200, b"[" * 100_000), "expected a schema registry"),
        ((500, {"error_code": 50001, "message": "Error in the backend"}), "answers HTTP 500: .*50001"),
        ((503, b""), "answers HTTP 503: no text"),
        ((429, b"slow down"), "answers HTTP 429"),
        ((401, {"error_code": 401}), "refuses the log-in .*set DOLL_REGISTRY_USERNAME and DOLL_REGISTRY_PASSWORD"),
        ((403, b""), "refuses the log-in"),
        ((302, b""), "answers HTTP 302"),
    ],
)
def test_whatever_else_comes_is_waited_for_and_says_what_to_do(
    registry: FakeRegistry, answer: tuple[int, object], text: str
) -> None:
    registry.down = answer
    client = RegistryClient(registry.url, {"DOLL_REGISTRY_TOKEN": "secret"})
    with pytest.raises(RetryLater, match=text) as caught:
        client.by_id(5)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    # No redirect is followed: it would take the credentials along.
    assert "/elsewhere" not in [path for path, _ in registry.asked]


def test_a_registry_that_is_not_there_is_waited_for() -> None:
    with fake_registry() as registry:
        client = RegistryClient(registry.url, {})
    with pytest.raises(RetryLater, match="does not answer"):
        client.by_id(5)


@pytest.mark.parametrize(
    ("environment", "header"),
    [
        ({}, None),
        ({"DOLL_REGISTRY_USERNAME": "me", "DOLL_REGISTRY_PASSWORD": "pw"}, "Basic bWU6cHc="),
        ({"DOLL_REGISTRY_TOKEN": "t"}, "Bearer t"),
    ],
)
def test_credentials_come_from_the_environment(
    registry: FakeRegistry, environment: dict[str, str], header: str | None
) -> None:
    registry.add(1, "int")
    client = RegistryClient(registry.url, environment)
    client.by_id(1)
    assert registry.asked[0][1].get("Authorization") == header
    assert "pw" not in repr(client)


def test_a_certificate_authority_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\$DOLL_REGISTRY_CA: expected a PEM file"):
        RegistryClient("https://localhost", {"DOLL_REGISTRY_CA": "/nowhere.pem"})


def test_similar_subjects_are_named(registry: FakeRegistry) -> None:
    registry.answers["/subjects"] = (200, ["clicks-value", "orders-value", "x"])
    assert RegistryClient(registry.url, {}).similar_subjects("click-value")[0] == "clicks-value"
    assert RegistryClient(registry.url, {}).similar_subjects("????") == ["clicks-value", "orders-value", "x"]


def test_a_password_in_a_file_may_change_and_may_be_gone_for_a_while(registry: FakeRegistry, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("old\n")
    environment = {"DOLL_REGISTRY_USERNAME": "me", "DOLL_REGISTRY_PASSWORD_FILE": str(file)}
    client = RegistryClient(registry.url, environment)
    registry.add(1, "int")
    sent = []
    for password in ("old", "new"):
        file.write_text(f"{password}\n")
        client.by_id(1)
        sent.append(base64.b64decode(registry.asked[-1][1]["Authorization"].removeprefix("Basic ")))
    assert sent == [b"me:old", b"me:new"]
    file.unlink()
    with pytest.raises(RetryLater, match="DOLL_REGISTRY_PASSWORD_FILE: cannot read"):
        client.by_id(1)
    with pytest.raises(ConfigError, match="DOLL_REGISTRY_PASSWORD_FILE: cannot read"):
        RegistryClient(registry.url, environment)


@pytest.mark.parametrize("token", ["hush\nhush", "hüsh"])
def test_a_token_that_is_no_header_is_refused_without_repeating_it(token: str) -> None:
    with pytest.raises(ConfigError, match="DOLL_REGISTRY_TOKEN: expected printable characters of ASCII") as caught:
        RegistryClient("http://127.0.0.1:1", {"DOLL_REGISTRY_TOKEN": token})
    assert token[:2] not in str(caught.value)


def test_a_registry_on_this_machine_is_asked_without_a_proxy(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add(1, {"type": "string"})
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert RegistryClient(registry.url, {}).by_id(1).kind == "AVRO"
    with pytest.raises(RetryLater, match="does not answer"):
        RegistryClient("http://registry.example:8081", {}).by_id(1)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"])
def test_an_answer_that_drips_is_not_waited_for_for_ever(head: bytes) -> None:
    """In its head or in its body, and always before the time without a byte is over."""
    ended = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError), connection:
            connection.recv(65_536)
            connection.sendall(head)
            while not ended.wait(0.01):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RetryLater, match=r"has not answered within 0\.2 s"):
            RegistryClient(url, {}, time_limit_s=0.2).by_id(1)
        ended.set()
        thread.join()
