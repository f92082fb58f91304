"""A model server over TLS: real handshakes, with certificates that are made here."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from doll.dashboard.model_server import metrics_of
from doll.errors import ConfigError
from doll.process.connections import find_access
from serving_rig import ServingRig
from waiting import until

pytestmark = pytest.mark.slow  # loads torch
TOKEN = "0123456789abcdef"
# What a client sees of a refusal: an alert, or a closed connection. With TLS 1.3 it may have sent its request by then.
REFUSED = (ssl.SSLError, ConnectionError)


class Ends:
    """The files of the server, of a client, and of a stranger who has a certificate of somebody else."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = Authority(folder / "ours"), Authority(folder / "theirs")
        self.ca, self.server, self.client = ours.path, ours.issue("server"), ours.issue("client")
        self.stranger, self.expired = theirs.issue("client"), ours.issue("expired", lifetime_s=-60.0)
        self.locked = ours.issue("locked", password="hush-hush")
        self.other_ca = theirs.path

    def context(self, own: Path | None = None, ca: Path | None = None) -> ssl.SSLContext:
        """Of a client that trusts our authority, or another one, and has a certificate or none."""
        context = ssl.create_default_context(cafile=str(ca or self.ca))
        if own is not None:
            context.load_cert_chain(own)
        return context


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return Ends(tmp_path_factory.mktemp("certificates"))


def served(folder: Path) -> Iterator[ServingRig]:
    """A server that asks for what the environment says."""
    with ServingRig(folder, access=find_access()) as rig:
        rig.save(1)
        rig.begin()
        yield rig


@pytest.fixture
def over_tls(tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServingRig]:
    monkeypatch.setenv("DOLL_SERVE_CERT", str(ends.server))
    monkeypatch.setenv("DOLL_SERVE_TOKEN", TOKEN)
    yield from served(tmp_path)


@pytest.fixture
def by_certificate(tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServingRig]:
    for name, path in (("CERT", ends.server), ("KEY", ends.server), ("CLIENT_CA", ends.ca)):
        monkeypatch.setenv(f"DOLL_SERVE_{name}", str(path))
    yield from served(tmp_path)


def asked(
    rig: ServingRig, context: ssl.SSLContext, *, token: str = "", path: str = "/v2/models/line"
) -> tuple[int, Any]:
    connection = http.client.HTTPSConnection("127.0.0.1", rig.port, timeout=60, context=context)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_tls_and_a_token(over_tls: ServingRig, ends: Ends) -> None:
    until(lambda: asked(over_tls, ends.context(), path="/v2/health/ready")[0] == 200, "a version that answers")
    assert asked(over_tls, ends.context(), token=TOKEN)[0] == 200
    assert asked(over_tls, ends.context())[0] == 401
    assert asked(over_tls, ends.context(), token=TOKEN[::-1])[0] == 401
    with pytest.raises(ssl.SSLCertVerificationError):
        asked(over_tls, ends.context(ca=ends.other_ca), token=TOKEN)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        over_tls.request("GET", "/v2/health/live")  # without TLS
    assert asked(over_tls, ends.context(), token=TOKEN)[0] == 200


def test_a_page_that_watches_the_server_says_what_is_missing(
    over_tls: ServingRig, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: asked(over_tls, ends.context(), path="/v2/health/ready")[0] == 200, "a version that answers")
    address = f"https://127.0.0.1:{over_tls.port}"
    with pytest.raises(OSError, match=r"its certificate is not trusted .*: SSL_CERT_FILE names a CA"):
        metrics_of(address, TOKEN)()
    monkeypatch.setenv("SSL_CERT_FILE", str(ends.ca))
    assert "doll_serve_requests_total" in metrics_of(address, TOKEN)()
    with pytest.raises(OSError, match="it wants a token: set DOLL_SERVE_TOKEN"):
        metrics_of(address, "")()
    with pytest.raises(OSError, match="it wants another token"):
        metrics_of(address, TOKEN[::-1])()


def test_clients_without_a_certificate_of_the_authority_are_refused(by_certificate: ServingRig, ends: Ends) -> None:
    until(lambda: asked(by_certificate, ends.context(ends.client), path="/v2/health/ready")[0] == 200, "a version")
    assert asked(by_certificate, ends.context(ends.client))[0] == 200, "a certificate is enough"
    for own in (None, ends.stranger, ends.expired):
        for path in ("/v2/models/line", "/v2/health/live"):
            with pytest.raises(REFUSED):
                asked(by_certificate, ends.context(own), path=path)
    assert asked(by_certificate, ends.context(ends.client))[0] == 200


def test_a_certificate_does_not_replace_a_token_that_is_asked_for(
    tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CERT", ends.server), ("CLIENT_CA", ends.ca), ("TOKEN", TOKEN)):
        monkeypatch.setenv(f"DOLL_SERVE_{name}", str(value))
    for rig in served(tmp_path):
        context = ends.context(ends.client)
        until(lambda: asked(rig, context, path="/v2/health/ready")[0] == 200, "a version")  # noqa: B023
        assert asked(rig, context)[0] == 401
        assert asked(rig, context, token=TOKEN)[0] == 200
        with pytest.raises(REFUSED):
            asked(rig, ends.context(), token=TOKEN)


def test_a_handshake_that_does_not_go_on_holds_nobody_up(by_certificate: ServingRig, ends: Ends) -> None:
    silent = [socket.create_connection(("127.0.0.1", by_certificate.port)) for _ in range(20)]
    for connection in silent[:10]:
        connection.sendall(b"\x16\x03\x01")
    until(lambda: asked(by_certificate, ends.context(ends.client), path="/v2/health/ready")[0] == 200, "a version")
    for connection in silent:
        connection.close()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"CERT": "no-such-file"}, "DOLL_SERVE_CERT: expected a PEM file that can be read, got .*no-such-file"),
        ({"CERT": "."}, "DOLL_SERVE_CERT: expected a PEM file that can be read"),
        ({"CERT": "text"}, "DOLL_SERVE_CERT: expected the server's certificate in .*text, with its private key"),
        ({"CERT": "ca"}, r"with its private key \(DOLL_SERVE_KEY names another file\)"),
        ({"CERT": "server", "KEY": "client"}, "and its private key in .*client.pem: key values mismatch"),
        ({"CERT": "locked"}, "DOLL_SERVE_CERT: expected a private key without a password, in .*locked.pem"),
        ({"CERT": "server", "KEY": "locked"}, "DOLL_SERVE_KEY: expected a private key without a password"),
        ({"CERT": "server", "CLIENT_CA": "text"}, "DOLL_SERVE_CLIENT_CA: expected certificates of the authority"),
        ({"CLIENT_CA": "ca"}, "DOLL_SERVE_CERT: expected a PEM file with the server's certificate, got none"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_anything_starts(
    files: dict[str, str], said: str, ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("this is no certificate")
    for name, value in files.items():
        monkeypatch.setenv(f"DOLL_SERVE_{name}", str(getattr(ends, value, tmp_path / value)))
    with pytest.raises(ConfigError, match=said):
        find_access()
