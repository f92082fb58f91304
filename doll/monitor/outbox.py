"""A queue of events that are posted to an address in their order, each at least once while this process runs.

A receiver that is away or hangs delays only the events after it: up to `MAX_WAITING` wait, and the oldest are dropped
beyond these.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from doll.errors import ConfigError
from doll.process.http_access import is_loopback
from doll.redaction import redacted
from doll.telemetry import get_logger

log = get_logger(__name__)

MAX_WAITING: Final = 1_000
_TIMEOUT_S: Final = 10.0
_RETRY_FIRST_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0
_AGAIN: Final = frozenset({408, 425, 429})  # and 5xx: the receiver may accept the same request later

Post = Callable[[str, bytes, dict[str, str]], int]  # URL, body, headers -> HTTP status


def checked_url(url: str, secret_env: str) -> str:
    """Return the URL. Raise ConfigError if it is not https://, or http:// on loopback, or has a user or password.
    `secret_env`: variable that has the secret which receivers check instead."""
    try:
        parts = urlsplit(url)
        host, has_user = parts.hostname or "", parts.username is not None or parts.password is not None
        is_safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))
    except ValueError:
        host, has_user, is_safe = "", False, False
    if has_user:
        raise ConfigError(f"--url: expected no user or password, got {redacted(url)}: receivers check {secret_env}")
    if not host or not is_safe:
        raise ConfigError(f"--url: expected https://..., or http:// on this machine, got {redacted(url)[:200]!r}")
    return url


def post(url: str, body: bytes, headers: dict[str, str]) -> int:
    """Send a request, and return its status. Redirects are not followed. Raise OSError if there is no answer."""
    request = urllib.request.Request(url, body, headers, method="POST")
    opener = urllib.request.build_opener(_NoRedirects())
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code
    except http.client.HTTPException as exc:
        raise OSError(f"no HTTP answer: {exc}") from exc


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none: the body would go to somebody else."""


class Outbox:
    """A queue of events with a thread that sends them as JSON. `put` never waits.

    Attributes:
        sent, dropped: number of events that the receiver has accepted, and that it has refused or that were too many.
    """

    name = "lineage"  # in the log

    def __init__(
        self, url: str, token: str = "", *, send: Post = post, wait: Callable[[float], bool] | None = None
    ) -> None:  # fmt: skip
        """`token`: a bearer token, "" for none. `wait(seconds)`: waits, and returns True early if this is closed."""
        self._url, self._token, self._send = url, token, send
        self._waiting: deque[dict[str, Any]] = deque()
        self._closed, self._changed = threading.Event(), threading.Condition()
        self._wait = self._closed.wait if wait is None else wait
        self.sent = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def request(self, event: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
        """Return body and headers of a request. It is called again if the request is repeated."""
        login = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        return json.dumps(event).encode(), {"Content-Type": "application/json", "User-Agent": "doll"} | login

    @property
    def num_waiting(self) -> int:
        """The number of events that the receiver has neither accepted nor refused."""
        return len(self._waiting)

    def put(self, event: dict[str, Any]) -> None:
        with self._changed:
            self._waiting.append(event)
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popleft()
                self.dropped += 1
            self._changed.notify()

    def close(self, within_s: float = 2.0) -> None:
        """Send what waits, for at most `within_s` seconds."""
        ends_s = time.monotonic() + within_s
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, within_s)
        self._closed.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(max(0.0, ends_s - time.monotonic()))
        if self._waiting:
            log.warning(f"{self.name}_events_not_sent", events=len(self._waiting))

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed.is_set())
                if self._closed.is_set():
                    return
                event = self._waiting[0]
            self._deliver(event)
            with self._changed:
                if self._waiting and self._waiting[0] is event:  # otherwise it was dropped meanwhile
                    self._waiting.popleft()
                self._changed.notify_all()

    def _deliver(self, event: dict[str, Any]) -> None:
        """Send an event until it is accepted or refused, or this object is closed."""
        delay_s = _RETRY_FIRST_S
        while True:
            body, headers = self.request(event)
            try:
                status = self._send(self._url, body, headers)
                problem = f"HTTP status {status}"
            except OSError as exc:
                status, problem = 0, str(exc)
            if 200 <= status < 300:
                self.sent += 1
                return
            if 300 <= status < 500 and status not in _AGAIN:
                self.dropped += 1
                log.error(f"{self.name}_refused", url=redacted(self._url), problem=problem)
                return
            log.warning(f"{self.name}_away", url=redacted(self._url), problem=problem[:200], again_in_s=delay_s)
            if self._wait(delay_s):
                return
            delay_s = min(2 * delay_s, _RETRY_MAX_S)
