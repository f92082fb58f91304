"""`doll lineage`: events of OpenLineage with the required fields, for each run its start and its end, in order."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterable, Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from doll.config import parse
from doll.kafka.reader import TimedRecord
from doll.monitor import openlineage
from doll.monitor.follow import Poll
from doll.monitor.openlineage import EventForm, RunFollower, send_lineage
from doll.monitor.outbox import Outbox
from doll.process.health import Heartbeat
from doll.records.control import AnyRecord, Finished, Member, TermStarted, Update
from doll.services import Services
from paths import ROOT
from statuses import server_status

JOB = "job: unit\ntask: {class: 'm:Task'}\ndata: {workers: 1, batch_size: 8"
KAFKA = Services("k1:9092, k2:9092", "redis://127.0.0.1:1/0")
FORM = EventForm(parse(JOB + "}"), KAFKA, Path("/runs/unit/checkpoints"), "ns")
KINDS = ("job", "run", "inputs", "outputs")


def started(term: int, resumed: int = 0, *, generation: int = 0) -> TermStarted:
    return TermStarted(
        term=term, resumed_version=resumed, origins=(0,), records_per_batch=8, time_s=100.0 + term,
        generation=generation, run_id=f"run{term}",
    )  # fmt: skip


def update(term: int, version: int) -> Update:
    lo = 8 * (version - 1)
    learned = Member(
        worker=0, partition=0, batch=version - 1, lo=lo, hi=lo + 8, base_version=0, n_samples=7, dead=(lo,)
    )
    return Update(term=term, version=version, members=(learned,), n_samples=7, loss=0.0)


def finished(term: int, version: int, error: str = "") -> Finished:
    return Finished(term=term, version=version, reason="updates: 2 reached", time_s=200.5, error=error)


RUN: list[AnyRecord] = [started(1), update(1, 1), update(1, 2), server_status([], term=1, durable_version=1)]


def events_of(
    history: Iterable[AnyRecord], *more: AnyRecord, generation: int | None = None, form: EventForm = FORM
) -> list[dict[str, Any]]:
    """What is sent of a history and of later records, after each of which the counts are sent."""
    sent: list[dict[str, Any]] = []
    follower = RunFollower("unit", form, sent.append, generation, clock=lambda: 150.0)
    for record in history:
        assert follower.feed(record)
    assert sent == []
    follower.begin()
    for record in more:
        assert follower.feed(record)
        follower.progress()
    return sent


def types(events: Iterable[dict[str, Any]]) -> list[str]:
    return [event["eventType"] for event in events]


def facets(value: Any) -> Iterator[dict[str, Any]]:
    """All facets in an event."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key in ("facets", "inputFacets"):
            yield from item.values()
        elif isinstance(item, dict | list):
            yield from facets(item)


def check(event: dict[str, Any]) -> None:
    """What the schema of RunEvent requires, and that of the facets that are DOLL's own."""
    assert set(event) == {"eventType", "eventTime", "producer", "schemaURL", *KINDS}
    assert event["eventType"] in ("START", "RUNNING", "COMPLETE", "FAIL", "ABORT", "OTHER")
    assert datetime.fromisoformat(event["eventTime"]).tzinfo is not None
    assert event["schemaURL"] == "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
    assert uuid.UUID(event["run"]["runId"])
    assert all(isinstance(item["name"], str) and item["namespace"] for item in (event["job"], *event["inputs"]))
    assert len(event["outputs"]) == 1
    shown = list(facets(event))
    assert len(shown) >= 3
    for url in (event["producer"], *(facet[key] for facet in shown for key in ("_producer", "_schemaURL"))):
        assert urlsplit(url).scheme == "https"
    jsonschema = pytest.importorskip("jsonschema")
    own = json.loads((ROOT / "docs" / "openlineage.json").read_text())
    names = [facet["_schemaURL"].partition("docs/openlineage.json")[2] for facet in shown]
    assert any(names)
    for name, facet in zip(names, shown, strict=True):
        if name:
            jsonschema.validate(facet, {**own, "$ref": name})


def test_a_run_has_a_start_its_counts_and_an_end() -> None:
    events = events_of(RUN, server_status([], term=1, durable_version=1), finished(1, 2))
    assert types(events) == ["START", "RUNNING", "COMPLETE"]
    for event in events:
        check(json.loads(json.dumps(event)))
    assert len({event["run"]["runId"] for event in events}) == 1
    assert [event["eventTime"] for event in events] == [
        "1970-01-01T00:01:41.000+00:00", "1970-01-01T00:02:30.000+00:00", "1970-01-01T00:03:20.500+00:00"
    ]  # fmt: skip
    start, running, end = events
    assert "inputFacets" not in start["inputs"][0]
    assert running["inputs"][0]["namespace"], running["inputs"][0]["name"] == ("kafka://k1:9092", "doll.unit.samples")
    assert running["inputs"][0]["inputFacets"]["doll_offsets"]["partitions"] == [
        {"partition": 0, "applied": [[0, 8]], "samples": 7, "deadLetters": 1, "heldOut": 0, "lost": 0}
    ]
    (model,) = end["outputs"]
    assert (model["namespace"], model["name"]) == ("file", "/runs/unit/checkpoints")
    assert model["facets"]["version"]["datasetVersion"] == "2"
    training = end["run"]["facets"]["doll_training"]
    assert (training["version"], training["samples"], training["runId"]) == (2, 14, "run1")
    assert training["endReason"] == "updates: 2 reached"
    assert "errorMessage" not in end["run"]["facets"]


def test_another_process_names_the_same_run_also_after_its_end() -> None:
    first, again = events_of(RUN), events_of([*RUN, finished(1, 2)])
    assert types(again) == ["START", "COMPLETE"]
    assert first == again[:1]


def test_an_error_is_the_message_of_a_failed_run_without_secrets() -> None:
    (_, end) = events_of([*RUN, finished(1, 2, "no answer from redis://:secret@host:1/0")])
    check(end)
    assert end["eventType"] == "FAIL"
    assert end["run"]["facets"]["errorMessage"]["message"] == "no answer from redis://***@host:1/0"


def test_a_server_that_resumes_continues_the_run_unless_it_had_ended() -> None:
    events = events_of(RUN, started(2, 1), finished(2, 1), started(3, 1))
    assert types(events) == ["START", "RUNNING", "COMPLETE", "START", "RUNNING"]
    assert [len({event["run"]["runId"] for event in part}) for part in (events[:3], events[3:], events)] == [1, 1, 2]


def test_a_run_that_another_generation_replaces_is_aborted() -> None:
    events = events_of(RUN, started(5, generation=5), finished(1, 2))
    assert types(events) == ["START", "ABORT", "START", "RUNNING", "RUNNING"]
    assert events[1]["run"]["facets"]["doll_training"]["endReason"] == "generation 5 has begun"
    assert events[1]["outputs"][0]["facets"]["version"]["datasetVersion"] == "1"
    assert events[3]["outputs"][0]["facets"]["version"]["datasetVersion"] == "0"


def test_of_a_run_folder_only_its_generation_is_sent() -> None:
    later = [*RUN, started(5, generation=5), update(5, 1), finished(5, 1)]
    (start, end) = events_of(later, generation=0)
    assert (start, end["eventType"], end["eventTime"]) == (*events_of(RUN), "ABORT", "1970-01-01T00:01:45.000+00:00")
    events = events_of(later, generation=5)
    assert types(events) == ["START", "COMPLETE"]
    assert events[0]["run"]["runId"] != start["run"]["runId"]


def test_a_rollback_is_read_again_and_sends_no_event_twice() -> None:
    sent: list[dict[str, Any]] = []
    follower = RunFollower("unit", FORM, sent.append, clock=lambda: 150.0)
    records = [*RUN, server_status([], term=1, durable_version=2), finished(1, 2)]
    for record in records:
        follower.feed(record)
    follower.begin()
    records.append(
        TermStarted(term=2, resumed_version=3, origins=(0,), records_per_batch=8, time_s=300.0, rolled_back_to=1)
    )
    assert not follower.feed(records[-1])
    follower.progress()
    assert all(follower.feed(record) for record in records)
    follower.begin()
    follower.progress()
    assert types(sent) == ["START", "COMPLETE", "START", "RUNNING"]
    assert sent[-1]["run"]["facets"]["doll_training"]["samples"] == 7
    assert sent[-1]["outputs"][0]["facets"]["version"]["datasetVersion"] == "3"


@pytest.mark.parametrize(
    ("more", "model", "expected"),
    [
        ("}", "s3://bucket/a/b", [("kafka://k1:9092", "doll.unit.samples")]),
        (", topic: theirs}", "s3://bucket/a/b/", [("kafka://k1:9092", "theirs")]),
        (
            ", join: {features: {topic: f}, labels: [{topic: l, name: y}], window_s: 5}}", "s3://bucket/a/b",
            [("kafka://k1:9092", "doll.unit.samples"), ("kafka://k1:9092", "f"), ("kafka://k1:9092", "l")],
        ),
        (
            "}\nsource: {kind: history, table: 's3://lake/t', topic: t, time: at, handover: {partition: p, offset: o}}",
            "s3://bucket/a/b",
            [("kafka://k1:9092", "doll.unit.samples"), ("s3://lake", "t"), ("kafka://k1:9092", "t")],
        ),
        (
            "}\nsource: {kind: history, table: /lake/t, topic: t, time: at, handover: {partition: p, offset: o}}",
            "s3://bucket/a/b",
            [("kafka://k1:9092", "doll.unit.samples"), ("file", "/lake/t"), ("kafka://k1:9092", "t")],
        ),
    ],
)  # fmt: skip
def test_inputs_and_the_model_are_named_by_their_places(
    more: str, model: str, expected: list[tuple[str, str]]
) -> None:  # fmt: skip
    (event,) = events_of(RUN, form=EventForm(parse(JOB + more), KAFKA, model, "ns"))
    assert [(item["namespace"], item["name"]) for item in event["inputs"]] == expected
    assert [(item["namespace"], item["name"]) for item in event["outputs"]] == [("s3://bucket", "a/b")]


class Receiver:
    """Answers with the given statuses in turn, then with 201, and keeps the requests."""

    def __init__(self, *statuses: int) -> None:
        self.requests: list[tuple[dict[str, Any], str]] = []
        answers, outer = list(statuses), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((body, self.headers.get("Authorization", "")))
                self.send_response(answers.pop(0) if answers else 201)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/api/v1/lineage"


def test_a_receiver_that_is_away_gets_all_events_in_order() -> None:
    receiver, waits = Receiver(503, 500), list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    thread = threading.Thread(target=receiver.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        outbox = Outbox(receiver.url, "not for the log", wait=wait)
        events = events_of([*RUN, finished(1, 2)])
        for event in events:
            outbox.put(event)
        outbox.close(120.0)
    finally:
        receiver.http.shutdown()
        receiver.http.server_close()
        thread.join()
    assert types(body for body, _ in receiver.requests) == ["START", "START", "START", "COMPLETE"]
    assert {token for _, token in receiver.requests} == {"Bearer not for the log"}
    assert (outbox.sent, outbox.dropped, outbox.num_waiting, waits) == (2, 0, 0, [1.0, 2.0])


def polls_of(monkeypatch: pytest.MonkeyPatch, *rounds: list[list[AnyRecord]]) -> None:
    """Each call of `follow` yields the next round of polls, the first of which is the history."""
    left = list(rounds)

    def follow(*_: Any) -> Iterator[Poll]:
        for records in left.pop(0):
            entries = [TimedRecord(record, 0.0, "t", at) for at, record in enumerate(records)]
            yield Poll(entries, True, {}, Heartbeat("lineage"))

    monkeypatch.setattr(openlineage, "follow", follow)


def printed(interval_s: float = 1e9) -> list[dict[str, Any]]:
    lines: list[str] = []
    config = parse(JOB + "}")
    code = send_lineage(
        config, KAFKA, "s3://b/c", url=None, write=lines.append, namespace="ns", interval_s=interval_s
    )  # fmt: skip
    assert code == 0
    return [json.loads(line) for line in lines]


def test_it_follows_a_job_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    polls_of(monkeypatch, [RUN, [], [update(1, 3)], [finished(1, 3)], [], [started(9)]])
    assert types(printed()) == ["START", "RUNNING", "COMPLETE"]
    polls_of(monkeypatch, [RUN, [], [update(1, 3)], [finished(1, 3)], [], [started(9)]])
    assert types(printed(interval_s=0.0)) == ["START", "RUNNING", "RUNNING", "RUNNING", "COMPLETE"]


def test_it_reads_all_records_again_after_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    rollback = TermStarted(term=2, resumed_version=3, origins=(0,), records_per_batch=8, time_s=3.0, rolled_back_to=0)
    polls_of(monkeypatch, [RUN, [rollback]], [[*RUN, rollback], [finished(2, 3)], []])
    events = printed()
    assert types(events) == ["START", "RUNNING", "RUNNING", "COMPLETE"]
    assert [event["run"]["facets"]["doll_training"]["samples"] for event in events[1:]] == [7, 0, 0]


def test_it_waits_until_the_last_event_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, sent = threading.Event(), list[str]()

    def post(url: str, body: bytes, headers: dict[str, str]) -> int:
        answers.wait(120)
        sent.append(json.loads(body)["eventType"])
        return 200

    def follow(*_: Any) -> Iterator[Poll]:
        records = [*RUN, finished(1, 2)]
        yield Poll([TimedRecord(record, 0.0, "t", 0) for record in records], True, {}, Heartbeat("lineage"))
        yield Poll([], True, {}, Heartbeat("lineage"))
        assert sent == [], "nothing is accepted yet"
        answers.set()
        while True:
            yield Poll([], True, {}, Heartbeat("lineage"))

    monkeypatch.setattr(openlineage, "follow", follow)
    monkeypatch.setattr(openlineage, "Outbox", lambda url, token: Outbox(url, token, send=post))
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "k")
    url = "http://127.0.0.1:1/"
    config = parse(JOB + "}")
    send_lineage(config, KAFKA, "s3://b/c", url=url, write=lambda line: None, namespace="ns", interval_s=1.0)
    assert sent == ["START", "COMPLETE"]
