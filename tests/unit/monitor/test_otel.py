"""Traces of batches: spans with the times of their steps, joined to the producer's, received as OTLP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from doll.errors import ConfigError
from doll.monitor import otel
from doll.monitor.otel import BatchTracer, make_provider
from doll.monitor.state.batch_times import BatchTimes

BATCH = BatchTimes(
    term=3, version=7, base_version=6, worker=1, market="spot", partition=2, lo=10, hi=20, samples=9, ready_s=87.5,
    begun_s=90.5, fetched_s=91.5, computing_s=91.5, computed_s=93.0, pushed_s=96.0, applied_s=100.0, durable_s=104.0,
)  # fmt: skip
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = ("traceparent", f"00-{TRACE}-{SPAN}-01".encode())


@pytest.fixture
def exporter() -> Any:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


def tracer_of(exporter: Any, headers_of: otel.HeadersOf = lambda partition, offset: ()) -> BatchTracer:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return BatchTracer(provider, headers_of)


def test_a_batch_is_a_trace_of_its_steps(exporter: Any) -> None:
    tracer_of(exporter).trace(BATCH)
    *steps, root = exporter.get_finished_spans()
    assert [(span.name, span.start_time / 1e9, span.end_time / 1e9) for span in steps] == [
        ("wait for a grant", 87.5, 90.5),
        ("fetch weights", 90.5, 91.5),
        ("compute gradient", 91.5, 93.0),
        ("push gradient", 93.0, 96.0),
        ("wait for the group and apply", 96.0, 100.0),
        ("checkpoint", 100.0, 104.0),
    ]
    assert (root.name, root.start_time / 1e9, root.end_time / 1e9, root.parent) == ("batch", 87.5, 104.0, None)
    assert {span.parent.span_id for span in steps} == {root.context.span_id}
    assert (root.attributes["messaging.kafka.offset"], root.attributes["doll.version"]) == (10, 7)


def test_it_continues_the_trace_of_its_first_record(exporter: Any) -> None:
    asked: list[tuple[int, int]] = []

    def headers_of(partition: int, offset: int) -> otel.Headers:
        asked.append((partition, offset))
        return [("other", b"x"), HEADER]

    tracer_of(exporter, headers_of).trace(BATCH)
    root = exporter.get_finished_spans()[-1]
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, SPAN)
    assert asked == [(2, 10)]


@pytest.mark.parametrize("header", [b"", b"00-xyz", b"00-" + b"0" * 31 + b"-" + SPAN.encode() + b"-01", b"\xff" * 55])
def test_a_header_that_is_none_begins_a_trace_of_its_own(exporter: Any, header: bytes) -> None:
    tracer_of(exporter, lambda partition, offset: [("traceparent", header)]).trace(BATCH)
    assert exporter.get_finished_spans()[-1].parent is None


def test_records_are_seldom_looked_at_where_producers_send_no_header(exporter: Any) -> None:
    asked: list[int] = []

    def headers_of(partition: int, offset: int) -> otel.Headers:
        asked.append(offset)
        return ()

    tracer = tracer_of(exporter, headers_of)
    for _ in range(200):
        tracer.trace(BATCH)
    assert 20 <= len(asked) <= 30


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.path.encode() + b" " + self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/", received
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_collector_gets_spans_by_otlp(collector: tuple[str, list[bytes]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    url, received = collector
    provider = make_provider("unit", url)
    BatchTracer(provider).trace(BATCH)
    provider.shutdown()
    (request,) = received
    assert request.startswith(b"/v1/traces ")
    for word in (b"compute gradient", b"doll.version", b"doll.job", b"unit"):
        assert word in request


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doll.extras.is_installed", lambda extra: False)
    with pytest.raises(ConfigError, match=r"doll otel needs the extra otel: pip install"):
        make_provider("unit", "http://127.0.0.1:1")
