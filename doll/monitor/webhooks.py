"""`doll notify`: sends the events of a job to a webhook, as signed JSON.

Events are delivered in their order, each at least once while this process runs. A receiver that is away or hangs delays
only the events after it: up to `MAX_WAITING` wait, and what is dropped beyond these is counted in the next one.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final, get_args
from urllib.parse import urlsplit

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.kafka.reader import Partition, Tail
from doll.monitor.state.progress import EventKind, ProgressModel
from doll.process.health import heartbeat_of
from doll.process.http_access import is_loopback
from doll.process.signals import stop_requested
from doll.records.control import AnyRecord, Finished, ProvisionDecision, TermStarted
from doll.redaction import redacted
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

SECRET_ENV: Final = "DOLL_WEBHOOK_SECRET"
KINDS: Final[tuple[EventKind, ...]] = get_args(EventKind)
# What a person wants to know at once; the others are the daily life of a job.
DEFAULT_KINDS: Final[tuple[EventKind, ...]] = ("records", "model", "gate", "alias", "drift", "alarm", "end")
MAX_WAITING: Final = 1_000
_TIMEOUT_S: Final = 10.0
_RETRY_FIRST_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0
_POLL_S: Final = 0.5
_CHECK_KAFKA_EVERY_S: Final = 10.0
_AGAIN: Final = frozenset({408, 425, 429})  # and 5xx: the receiver may accept the same request later

Post = Callable[[str, bytes, dict[str, str]], int]  # URL, body, headers -> HTTP status


def checked_url(url: str) -> str:
    """Return the URL. Raise ConfigError if it is not https://, or http:// on loopback, or has a user or password."""
    try:
        parts = urlsplit(url)
        host, has_user = parts.hostname or "", parts.username is not None or parts.password is not None
        is_safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))
    except ValueError:
        host, has_user, is_safe = "", False, False
    if has_user:
        raise ConfigError(f"--url: expected no user or password, got {redacted(url)}: receivers check {SECRET_ENV}")
    if not host or not is_safe:
        raise ConfigError(f"--url: expected https://..., or http:// on this machine, got {redacted(url)[:200]!r}")
    return url


def signature(secret: str, time_s: int, body: bytes) -> str:
    """Return the value of the header `X-Doll-Signature`: the HMAC-SHA256 of the time, a dot and the body."""
    return "sha256=" + hmac.new(secret.encode(), b"%d." % time_s + body, hashlib.sha256).hexdigest()


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


class Webhook:
    """A queue of events with a thread that sends them. `put` never waits.

    Attributes:
        sent, dropped: number of events that the receiver has accepted, and that it has refused or that were too many.
    """

    def __init__(
        self, url: str, secret: str = "", *, send: Post = post, clock: Callable[[], float] = time.time,
        wait: Callable[[float], bool] | None = None,
    ) -> None:  # fmt: skip
        """`wait(seconds)`: waits, and returns True early if this object is closed."""
        self._url, self._secret, self._send, self._clock = url, secret, send, clock
        self._waiting: deque[dict[str, Any]] = deque()
        self._closed, self._changed = threading.Event(), threading.Condition()
        self._wait = self._closed.wait if wait is None else wait
        self.sent = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

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
            log.warning("webhook_events_not_sent", events=len(self._waiting))

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
        delivery = hashlib.sha256(json.dumps(event, sort_keys=True).encode()).hexdigest()[:32]
        while True:
            body = json.dumps({**event, "dropped_before": self.dropped}).encode()
            now_s = int(self._clock())
            headers = {
                "Content-Type": "application/json", "User-Agent": "doll", "X-Doll-Delivery": delivery,
                "X-Doll-Time": str(now_s),
            }  # fmt: skip
            if self._secret:
                headers["X-Doll-Signature"] = signature(self._secret, now_s, body)
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
                log.error("webhook_refused", url=redacted(self._url), problem=problem, kind=event["kind"])
                return
            log.warning("webhook_away", url=redacted(self._url), problem=problem[:200], again_in_s=delay_s)
            if self._wait(delay_s):
                return
            delay_s = min(2 * delay_s, _RETRY_MAX_S)


class Notifier:
    """Turns the records of a job into events of some kinds. `begin` ends the history, of which nothing is sent."""

    def __init__(
        self, config: JobConfig, kinds: Collection[str], put: Callable[[dict[str, Any]], object],
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._config, self._kinds, self._put, self._clock = config, frozenset(kinds), put, clock
        self._progress = ProgressModel(config, 0.0, on_event=self._event)
        self._has_begun = False
        self._alarms: frozenset[str] = frozenset()
        self._run_id = ""

    def begin(self) -> None:
        self._has_begun = True

    def feed(self, record: AnyRecord) -> None:
        self._progress.feed(record)
        match record:
            case TermStarted():
                self._run_id = record.run_id
            case Finished():
                ended = f"the job has ended: {record.error or record.reason}"
                self._event("end", f"{ended}, with version {record.version}")
            case ProvisionDecision():
                for alarm in sorted(set(record.alarms) - self._alarms):
                    self._event("alarm", alarm)
                self._alarms = frozenset(record.alarms)

    def _event(self, kind: EventKind, text: str) -> None:
        if self._has_begun and kind in self._kinds:
            self._put(
                {
                    "job": self._config.job, "run_id": self._run_id, "kind": kind, "text": redacted(text),
                    "version": self._progress.history.version, "time_s": round(self._clock(), 3),
                }
            )  # fmt: skip


def notify(config: JobConfig, services: Services, url: str, kinds: Collection[str]) -> int:
    """Send the events of a job to `url` until SIGTERM or SIGINT, or the end of the job; return the exit code, 0.

    Raises:
        ConfigError: the URL is not accepted.
        ServiceUnavailableError: Kafka does not answer at the start.
    """
    webhook = Webhook(checked_url(url), os.environ.get(SECRET_ENV, ""))
    notifier = Notifier(config, kinds, webhook.put)
    topics = (config.topic("updates"), config.topic("metrics"))
    with (
        stop_requested() as stop,
        heartbeat_of("notifier", config) as heartbeat,
        Tail(config, services, topics) as tail,
    ):
        heartbeat.expect("loop")
        heartbeat.expect("kafka", within_s=3 * _CHECK_KAFKA_EVERY_S, vital=False)
        heartbeat.set_waiting_for("the history of the job")
        is_read = False
        try:
            while not stop.is_set():
                heartbeat.beat("loop")
                entries = tail.poll(_POLL_S)
                if not is_read and all(map(tail.has_read_history, tail.ends)):
                    is_read = True
                    heartbeat.set_waiting_for("")
                for entry in entries:
                    if is_read and entry.offset >= tail.ends[Partition(entry.topic, 0)]:
                        notifier.begin()
                    notifier.feed(entry.record)
                if entries or tail.partition_ends(topics[0], 1) is not None:
                    heartbeat.beat("kafka")
        finally:
            webhook.close()
            log.info("notified", sent=webhook.sent, dropped=webhook.dropped)
    return 0
