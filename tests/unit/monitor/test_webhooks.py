"""`doll notify`: events of a job reach a webhook in order, signed, and nothing waits for a receiver that is away."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from doll.config import parse
from doll.errors import ConfigError
from doll.monitor.outbox import MAX_WAITING, checked_url, post
from doll.monitor.webhooks import DEFAULT_KINDS, SECRET_ENV, Notifier, Webhook, signature
from doll.process import metric_names as names
from doll.records.control import Finished, Metric, ProvisionDecision
from record_builders import term_started

CONFIG = parse("job: unit\ntask: {class: 'm:Task'}\ndata: {workers: 1, batch_size: 8}")


class Receiver:
    """Answers with the given statuses in turn, then with 200; 0: no answer. It keeps the requests."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.requests: list[tuple[dict[str, Any], dict[str, str], bytes]] = []
        self.waits: list[float] = []

    def send(self, url: str, body: bytes, headers: dict[str, str]) -> int:
        self.requests.append((json.loads(body), headers, body))
        status = self.statuses.pop(0) if self.statuses else 200
        if not status:
            raise OSError("no answer")
        return status

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return False


def delivered(receiver: Receiver, count: int, secret: str = "") -> Webhook:
    webhook = Webhook("http://127.0.0.1/x", secret, send=receiver.send, clock=lambda: 1000.5, wait=receiver.wait)
    for number in range(count):
        webhook.put({"kind": "drift", "text": f"event {number}"})
    webhook.close(30.0)
    return webhook


def test_events_come_in_order_and_a_receiver_that_is_away_gets_them_later() -> None:
    receiver = Receiver(0, 503, 429)
    webhook = delivered(receiver, 3)
    assert (webhook.sent, webhook.dropped) == (3, 0)
    assert [body["text"] for body, _, _ in receiver.requests] == [f"event {at}" for at in (0, 0, 0, 0, 1, 2)]
    assert receiver.waits == [1.0, 2.0, 4.0]
    deliveries = [headers["X-Doll-Delivery"] for _, headers, _ in receiver.requests]
    assert len(set(deliveries)) == 3
    assert len(set(deliveries[:4])) == 1, "a receiver can tell a second delivery"


def test_an_event_that_is_refused_is_dropped_and_counted_in_the_next() -> None:
    receiver = Receiver(400, 302)
    webhook = delivered(receiver, 3)
    assert (webhook.sent, webhook.dropped) == (1, 2)
    assert [body["dropped_before"] for body, _, _ in receiver.requests] == [0, 1, 2]


def test_a_request_is_signed_if_there_is_a_secret() -> None:
    receiver = Receiver()
    delivered(receiver, 1, "of nobody else")
    ((_, headers, body),) = receiver.requests
    expected = hmac.new(b"of nobody else", b"1000." + body, hashlib.sha256).hexdigest()
    assert headers["X-Doll-Signature"] == signature("of nobody else", 1000, body) == f"sha256={expected}"
    assert headers["X-Doll-Time"] == "1000"
    plain = Receiver()
    delivered(plain, 1)
    assert "X-Doll-Signature" not in plain.requests[0][1]


def test_what_waits_is_limited_while_a_receiver_hangs() -> None:
    hangs, receiver = threading.Event(), Receiver()

    def send(url: str, body: bytes, headers: dict[str, str]) -> int:
        hangs.wait(60)
        return receiver.send(url, body, headers)

    webhook = Webhook("http://127.0.0.1/x", send=send, wait=receiver.wait)
    for number in range(MAX_WAITING + 50):
        webhook.put({"kind": "drift", "text": f"event {number}"})
    assert webhook.dropped >= 49
    hangs.set()
    webhook.close(30.0)
    assert webhook.sent + webhook.dropped in (MAX_WAITING + 50, MAX_WAITING + 51)
    assert receiver.requests[-1][0]["text"] == f"event {MAX_WAITING + 49}"


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(int(self.path.strip("/")))
            self.send_header("Location", "/200")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", received
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_real_server_is_asked_once_and_redirects_are_not_followed(server: tuple[str, list[bytes]]) -> None:
    url, received = server
    assert [post(f"{url}/{status}", b"{}", {}) for status in (200, 302, 404, 503)] == [200, 302, 404, 503]
    assert received == [b"{}"] * 4
    with pytest.raises(OSError):  # whatever the system says
        post("http://127.0.0.1:1/", b"{}", {})


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://hooks.example.com/x", "expected https://"),
        ("ftp://127.0.0.1/x", "expected https://"),
        ("file:///etc/passwd", "expected https://"),
        ("https://", "expected https://"),
        ("https://me:secret@hooks.example.com/x", "expected no user or password"),
        ("http://[::1", "expected https://"),
    ],
)
def test_other_addresses_are_refused_and_no_secret_is_shown(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        checked_url(url, SECRET_ENV)
    assert "secret" not in str(refused.value)


def test_addresses_that_are_accepted() -> None:
    for url in ("https://hooks.example.com/doll?x=1", "http://127.0.0.1:8080/x", "http://localhost/x"):
        assert checked_url(url, SECRET_ENV) == url


def metric(**values: float) -> Metric:
    return Metric(source=names.EVALUATOR, values=values, time_s=5.0)


def test_events_of_the_wanted_kinds_are_sent_and_none_of_the_history() -> None:
    sent: list[dict[str, Any]] = []
    notifier = Notifier(CONFIG, DEFAULT_KINDS, sent.append, clock=lambda: 12.3456)
    drift = {
        names.DRIFT: 1.0, f"{names.DRIFT}_before_loss": 0.2, f"{names.DRIFT}_after_loss": 0.5,
        f"{names.DRIFT}_since_loss": 3.0, f"{names.DRIFT}_version_loss": 9.0,
    }  # fmt: skip
    notifier.feed(term_started(1))
    notifier.feed(metric(**drift))
    assert sent == []
    notifier.begin()
    notifier.feed(metric(**drift | {f"{names.DRIFT}_version_loss": 19.0}))
    notifier.feed(metric(**{names.GATE_PASSED: 0.0, names.GATE_VERSION: 20.0, f"{names.GATE_PASSED}_loss": 0.0}))
    notifier.feed(metric(**{names.GATE_PASSED: 1.0, names.GATE_VERSION: 21.0}))
    notifier.feed(metric(**{names.MOVED_BACK: 21.0, names.MOVED_BACK_TO: 19.0}))
    notifier.feed(term_started(2))  # kind server: not wanted
    notifier.feed(Finished(term=2, version=30, reason="updates: 30 reached", time_s=1.0))
    assert [event["kind"] for event in sent] == ["drift", "gate", "alias", "alias", "end"]
    assert sent[0]["text"].startswith("drift: loss went from 0.2 to 0.5")
    assert sent[2]["text"] == "version 21 has passed its gates"
    assert sent[4]["text"] == "the job has ended: updates: 30 reached, with version 30"
    assert {event["job"] for event in sent} == {"unit"}
    assert sent[0]["time_s"] == 12.346


def test_an_alarm_of_the_provisioner_is_sent_once() -> None:
    sent: list[dict[str, Any]] = []
    notifier = Notifier(CONFIG, ("alarm",), sent.append)
    notifier.begin()
    for turn, alarms in enumerate([(), ("no capacity",), ("no capacity", "no budget"), ("no capacity",), ()]):
        notifier.feed(
            ProvisionDecision(
                turn=turn, time_s=1.0, started_s=0.0, phase="run", binding="deadline", feasible=True, alarms=alarms
            )
        )
    assert [event["text"] for event in sent] == ["no capacity", "no budget"]
