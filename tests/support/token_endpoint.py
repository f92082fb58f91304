"""An OAuth token endpoint on loopback: client credentials in, signed JWTs out, with the keys that verify them."""

from __future__ import annotations

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

ISSUER, AUDIENCE = "https://issuer.test", "kafka"


class TokenEndpoint:
    """Answers `url` with tokens that live for `lifetime_s`; use as a context manager.

    Attributes:
        issued: the tokens so far.
        refused: requests with wrong credentials.
        forms: the form of each request.
    """

    def __init__(self, client: str, secret: str, lifetime_s: float, subject: str) -> None:
        self.client, self.secret, self.lifetime_s, self.subject = client, secret, lifetime_s, subject
        self.issued: list[str] = []
        self.refused = 0
        self.forms: list[dict[str, list[str]]] = []
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"] or 0)).decode())
                status, answer = endpoint._answer(self.headers.get("Authorization", ""), form)
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/token"

    def __enter__(self) -> TokenEndpoint:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def write_keys(self, path: Path) -> None:
        """The JWKS by which a broker verifies the tokens."""
        numbers = self._key.public_key().public_numbers()
        key = {"kty": "RSA", "use": "sig", "alg": "RS256", "kid": "k", "n": _number(numbers.n), "e": _number(numbers.e)}
        path.write_text(json.dumps({"keys": [key]}))

    def token(self) -> str:
        """A new token."""
        now_s = int(time.time())
        claims = {"sub": self.subject, "iss": ISSUER, "aud": AUDIENCE, "iat": now_s, "jti": str(len(self.issued))}
        claims["exp"] = now_s + int(self.lifetime_s)
        text = f"{_part({'alg': 'RS256', 'typ': 'JWT', 'kid': 'k'})}.{_part(claims)}"
        signed = f"{text}.{_encode(self._key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"
        self.issued.append(signed)
        return signed

    def _answer(self, authorization: str, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        self.forms.append(form)
        given = base64.b64decode(authorization.removeprefix("Basic ") or "").decode()
        if [unquote(part) for part in given.split(":", 1)] != [self.client, self.secret]:
            self.refused += 1
            return 401, {"error": "invalid_client"}
        return 200, {"access_token": self.token(), "token_type": "Bearer", "expires_in": int(self.lifetime_s)}


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _part(content: dict[str, Any]) -> str:
    return _encode(json.dumps(content).encode())


def _number(value: int) -> str:
    return _encode(value.to_bytes((value.bit_length() + 7) // 8, "big"))
