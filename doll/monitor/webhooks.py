"""`doll notify`: sends the events of a job to a webhook, as signed JSON.

Events are delivered in their order, each at least once while this process runs (`doll.monitor.outbox`). What is dropped
is counted in the next one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Any, Final, get_args

from doll.config import JobConfig
from doll.monitor.follow import follow
from doll.monitor.outbox import Outbox, Post, checked_url, post
from doll.monitor.state.progress import EventKind, ProgressModel
from doll.records.control import AnyRecord, Finished, ProvisionDecision, TermStarted
from doll.redaction import redacted
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

SECRET_ENV: Final = "DOLL_WEBHOOK_SECRET"
KINDS: Final[tuple[EventKind, ...]] = get_args(EventKind)
# What a person wants to know at once; the others are the daily life of a job.
DEFAULT_KINDS: Final[tuple[EventKind, ...]] = ("records", "model", "gate", "alias", "drift", "alarm", "end")


def signature(secret: str, time_s: int, body: bytes) -> str:
    """Return the value of the header `X-Doll-Signature`: the HMAC-SHA256 of the time, a dot and the body."""
    return "sha256=" + hmac.new(secret.encode(), b"%d." % time_s + body, hashlib.sha256).hexdigest()


class Webhook(Outbox):
    """A queue of events that are posted with the number of dropped events before them, and signed if there is a
    secret. An event that is sent again has the same delivery number."""

    name = "webhook"

    def __init__(
        self, url: str, secret: str = "", *, send: Post = post, clock: Callable[[], float] = time.time,
        wait: Callable[[float], bool] | None = None,
    ) -> None:  # fmt: skip
        self._secret, self._clock = secret, clock
        super().__init__(url, send=send, wait=wait)

    def request(self, event: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
        delivery = hashlib.sha256(json.dumps(event, sort_keys=True).encode()).hexdigest()[:32]
        body = json.dumps({**event, "dropped_before": self.dropped}).encode()
        now_s = int(self._clock())
        _, headers = super().request(event)
        headers |= {"X-Doll-Delivery": delivery, "X-Doll-Time": str(now_s)}
        if self._secret:
            headers["X-Doll-Signature"] = signature(self._secret, now_s, body)
        return body, headers


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
    webhook = Webhook(checked_url(url, SECRET_ENV), os.environ.get(SECRET_ENV, ""))
    notifier = Notifier(config, kinds, webhook.put)
    topics = (config.topic("updates"), config.topic("metrics"))
    try:
        with closing(follow(config, services, "notifier", topics)) as polls:
            for poll in polls:
                for entry in poll.entries:
                    if poll.is_new(entry):
                        notifier.begin()
                    notifier.feed(entry.record)
    finally:
        webhook.close()
        log.info("notified", sent=webhook.sent, dropped=webhook.dropped)
    return 0
