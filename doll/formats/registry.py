"""A client for schema registries with Confluent's API (also Apicurio's `/apis/ccompat/v7`), limited to reading.

Only an answer with an error code of the registry means that a schema or subject does not exist. In all other cases the
registry counts as unavailable: no connection, an error of a server or a proxy, a refused log-in, or an answer in
another format. Then `RetryLater` reports the received answer and what to do, and the worker waits.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import http.client
import os
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

from doll.credentials import secret
from doll.errors import ConfigError, RetryLater
from doll.records.bounded import MalformedError, json_value, short

USER_ENV: Final = "DOLL_REGISTRY_USERNAME"
PASSWORD_ENV: Final = "DOLL_REGISTRY_PASSWORD"
TOKEN_ENV: Final = "DOLL_REGISTRY_TOKEN"
CA_ENV: Final = "DOLL_REGISTRY_CA"
_ACCEPTED: Final = "application/vnd.schemaregistry.v1+json, application/json"
_TIMEOUT_S: Final = 5.0  # maximum time without a byte
_TIME_LIMIT_S: Final = 15.0  # maximum time for a whole answer, also if it arrives slowly
_MAX_ANSWER_BYTES: Final = 4_000_000
_MAX_REASON_CHARS: Final = 200
_NOT_FOUND: Final = 404
_LOG_IN: Final = (401, 403)
_MAX_REFERENCES: Final = 100


class NotInRegistryError(Exception):
    """The registry answered that there is no such schema, subject or version."""


class RegisteredSchema(NamedTuple):
    """A schema of the registry. `references` are the schemas that it names, each after the schemas that it needs."""

    text: str
    kind: str
    references: tuple[str, ...] = ()


class RegistryClient:
    """A client that reads schemas. Do not use it in several threads at once. It caches nothing; its callers do."""

    def __init__(
        self, url: str, environment: Mapping[str, str] = os.environ, *, time_limit_s: float = _TIME_LIMIT_S
    ) -> None:
        """
        Args:
            url: URL of the registry, without credentials. A registry on this machine is asked without a proxy.
            environment: environment variables with the credentials. Credentials in files are read again for each
                question, so they may change.
            time_limit_s: maximum time for an answer, in seconds.

        Raises:
            ConfigError: a file with credentials or with the certificate authority cannot be read.
        """
        self.url = url
        self._environment = environment
        _authorization(environment)
        self._time_limit_s = time_limit_s
        self._sockets: list[socket.socket] = []  # sockets of the current question
        context = None
        if ca_file := environment.get(CA_ENV):
            try:
                context = ssl.create_default_context(cafile=ca_file)
            except (OSError, ssl.SSLError) as exc:
                raise ConfigError(f"${CA_ENV}: expected a PEM file with certificates at {ca_file!r}: {exc}") from exc
        _http, _https = _Http(), _Https(context=context)
        _http.sockets = _https.sockets = self._sockets
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect(), _http, _https]
        host = urlsplit(url).hostname or ""
        if host in ("localhost", "::1") or host.startswith("127."):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def by_id(self, number: int) -> RegisteredSchema:
        """Return the schema with this id.

        Raises:
            NotInRegistryError: there is no such schema.
            RetryLater: the registry does not answer, or the answer is not that of a registry.
        """
        return self._schema(self._get(f"/schemas/ids/{number}"))

    def by_subject(self, subject: str, version: int | None = None) -> RegisteredSchema:
        """Return a version of a subject. None: the newest version. Raises the same errors as `by_id`."""
        return self._schema(self._get(f"/subjects/{quote(subject, safe='')}/versions/{version or 'latest'}"))

    def similar_subjects(self, subject: str) -> list[str]:
        """Return the subjects with similar names. Raises the same errors as `by_id`."""
        names = [str(name) for name in self._get("/subjects", list)]
        return difflib.get_close_matches(subject, names) or names[:3]

    def _schema(self, answer: Mapping[str, Any], depth: int = 0) -> RegisteredSchema:
        text = answer.get("schema")
        if not isinstance(text, str):
            raise RetryLater(self._no_registry(f"an answer without a schema: {short(answer, _MAX_REASON_CHARS)}"))
        references: list[str] = []
        for item in answer.get("references") or ():
            try:
                path = f"/subjects/{quote(item['subject'], safe='')}/versions/{int(item['version'])}"
            except (TypeError, KeyError, ValueError):
                raise RetryLater(self._no_registry(f"a reference {short(item, _MAX_REASON_CHARS)}")) from None
            if depth > _MAX_REFERENCES:
                raise NotInRegistryError("its references refer to each other in a circle")
            referenced = self._schema(self._get(path), depth + 1)
            references += [*referenced.references, referenced.text]
        return RegisteredSchema(text, str(answer.get("schemaType") or "AVRO"), tuple(dict.fromkeys(references)))

    def _get(self, path: str, kind: type = dict) -> Any:
        try:
            headers = {"Accept": _ACCEPTED, **_authorization(self._environment)}
        except ConfigError as exc:  # the file could be read at the start
            raise RetryLater(str(exc)) from None
        request = urllib.request.Request(self.url + path, headers=headers)
        begun_s = time.monotonic()
        limit = threading.Timer(self._time_limit_s, self._hang_up)
        limit.daemon = True
        limit.start()
        try:
            return self._answer(request, kind)
        except Exception:
            if time.monotonic() - begun_s < self._time_limit_s:
                raise
            raise RetryLater(
                f"the schema registry at {self.url} has not answered within {self._time_limit_s:g} s"
            ) from None
        finally:
            limit.cancel()
            self._sockets.clear()

    def _hang_up(self) -> None:
        for connection in tuple(self._sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, request: urllib.request.Request, kind: type) -> Any:
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                body, status = response.read(_MAX_ANSWER_BYTES + 1), response.status
        except urllib.error.HTTPError as exc:
            with exc:
                raise self._refusal(exc.code, exc.read(_MAX_ANSWER_BYTES)) from None
        except (OSError, ValueError) as exc:  # no connection, a timeout, a TLS error, or no HTTP
            reason = getattr(exc, "reason", None) or exc
            text = short(f"{type(exc).__name__}: {reason}", _MAX_REASON_CHARS)
            raise RetryLater(f"the schema registry at {self.url} does not answer ({text})") from None
        except Exception as exc:  # errors of http.client
            raise RetryLater(self._no_registry(f"{type(exc).__name__}: {exc}")) from None
        value = _json(body)
        if not isinstance(value, kind):
            raise RetryLater(self._no_registry(f"HTTP {status} with {_shown(body)}"))
        return value

    def _refusal(self, status: int, body: bytes) -> Exception:
        value = _json(body)
        code = value.get("error_code") if isinstance(value, dict) else None
        if status == _NOT_FOUND and isinstance(code, int) and code // 100 == _NOT_FOUND:
            assert isinstance(value, dict)
            return NotInRegistryError(f"{code}: {short(value.get('message') or 'not found', _MAX_REASON_CHARS)}")
        if status in _LOG_IN:
            return RetryLater(
                f"the schema registry at {self.url} refuses the log-in (HTTP {status}): set {USER_ENV} and "
                f"{PASSWORD_ENV}, or {TOKEN_ENV}, where the workers run"
            )
        if status == _NOT_FOUND:
            return RetryLater(self._no_registry(f"HTTP 404 without an error code of a registry: {_shown(body)}"))
        return RetryLater(f"the schema registry at {self.url} answers HTTP {status}: {_shown(body)}")

    def _no_registry(self, what: str) -> str:
        return (
            f"data.format.registry: expected a schema registry with Confluent's API at {self.url}, got "
            f"{short(what, _MAX_REASON_CHARS)}; is the URL right? (Apicurio's ends in /apis/ccompat/v7)"
        )


class _KeepsSockets(urllib.request.AbstractHTTPHandler):
    """A handler that keeps the sockets of its connections in a list, which is set after construction."""

    sockets: list[socket.socket]

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> http.client.HTTPResponse:
        sockets = self.sockets

        class Connection(http_class):  # type: ignore[misc]
            def connect(self) -> None:
                super().connect()
                sockets.append(self.sock)

        return super().do_open(Connection, req, **options)


class _Http(_KeepsSockets, urllib.request.HTTPHandler):
    pass


class _Https(_KeepsSockets, urllib.request.HTTPSHandler):
    pass


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that refuses redirects, because a redirect would send the credentials to another host."""

    def redirect_request(self, *args: Any) -> None:
        return None


def _authorization(environment: Mapping[str, str]) -> dict[str, str]:
    if token := secret(TOKEN_ENV, environment):
        if not (token.isascii() and token.isprintable()):  # the error message of urllib would contain the token
            raise ConfigError(f"{TOKEN_ENV}: expected printable characters of ASCII, got others")
        return {"Authorization": f"Bearer {token}"}
    if user := secret(USER_ENV, environment):
        pair = f"{user}:{secret(PASSWORD_ENV, environment) or ''}".encode()
        return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
    return {}


def _json(body: bytes) -> Any:
    try:
        return json_value(body, max_chars=_MAX_ANSWER_BYTES)
    except MalformedError:
        return None


def _shown(body: bytes) -> str:
    return short(body[:_MAX_REASON_CHARS].decode(errors="replace") or "no text", 80)
