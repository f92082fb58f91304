"""Metrics by OTLP: the values, names and labels of `doll prometheus`, and nothing waits for a collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from doll.config import parse
from doll.errors import ConfigError
from doll.kafka.reader import Partition, TimedRecord
from doll.monitor import otel
from doll.monitor.follow import Poll
from doll.monitor.otel_metrics import MetricSender, OtlpForm, make_export
from doll.monitor.views.prometheus import JobMetrics
from doll.process.health import Heartbeat
from doll.records.control import Member, Metric, Update
from doll.records.event_times import BOUNDS_S, NO_LATENCIES, EventTimes
from doll.services import Services
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from statuses import live_worker, server_status
from waiting import until

LEARNED = NO_LATENCIES.with_batch(EventTimes(1_000_000, (0, 0), 2), 1000.4, None, 1.0)


def job_metrics() -> JobMetrics:
    job = JobMetrics("unit", 2, clock=lambda: 20.0)
    workers = [live_worker(0), live_worker(1, restarts=2, lag_records=7)]
    job.feed(server_status(workers, version=5, counters={"joined": 3}, time_s=3, learned=LEARNED))
    job.feed(Metric(source="evaluator", values={"loss": 0.5, "nothing": float("nan")}, time_s=2))
    return job


def exposed(job: JobMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], str]:
    """What a scrape gets, without the histogram. As text, because nan is not equal to itself."""
    registry = CollectorRegistry()
    registry.register(job)
    return {
        (sample.name, frozenset(sample.labels.items())): str(float(sample.value))
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if family.type != "histogram"
    }


class Collector:
    """Answers with `status` as soon as `answers` is set, and keeps the requests."""

    def __init__(self) -> None:
        self.status, self.answers = 200, threading.Event()
        self.answers.set()
        self.requests: list[tuple[str, bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.requests.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
                outer.answers.wait(120)
                self.send_response(outer.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    made = Collector()
    thread = threading.Thread(target=made.http.serve_forever, daemon=True)
    thread.start()
    yield made
    made.answers.set()
    made.http.shutdown()
    made.http.server_close()
    thread.join()


def received(body: bytes) -> dict[str, Any]:
    """The metrics in a request, by name."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    request = ExportMetricsServiceRequest()
    request.ParseFromString(body)
    (resource,) = request.resource_metrics
    names = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert (names["service.name"], names["doll.job"]) == ("doll", "unit")
    return {metric.name: metric for metric in resource.scope_metrics[0].metrics}


def labels_of(point: Any) -> frozenset[tuple[str, str]]:
    return frozenset((item.key, item.value.string_value) for item in point.attributes)


def test_a_collector_gets_what_prometheus_gets(collector: Collector) -> None:
    job = job_metrics()
    export, end_export = make_export(collector.url)
    assert export(OtlpForm(job).data(7_000))
    end_export()
    ((path, body),) = collector.requests
    metrics = received(body)
    histogram = metrics.pop("doll_freshness_seconds").histogram
    sent = {
        (name, labels_of(point)): str(point.as_double)
        for name, metric in metrics.items()
        for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points
    }
    assert path == "/v1/metrics"
    assert sent == exposed(job)
    assert {name for name, metric in metrics.items() if metric.HasField("sum")} == {
        name for name in metrics if name.endswith("_total")
    }
    assert metrics["doll_ps_joined_total"].sum.is_monotonic
    assert metrics["doll_ps_joined_total"].sum.aggregation_temporality == 2  # cumulative
    assert not any(metric.unit for metric in metrics.values()), "a collector would add it to the name"
    (point,) = histogram.data_points
    assert labels_of(point) == {("job_name", "unit"), ("stage", "learned")}
    assert (point.count, point.sum, point.HasField("min")) == (2, pytest.approx(0.8), False)
    assert tuple(point.explicit_bounds) == BOUNDS_S
    assert list(point.bucket_counts) == list(LEARNED.buckets)


def test_a_sum_begins_again_when_another_server_counts() -> None:
    pytest.importorskip("opentelemetry.sdk")
    job = JobMetrics("unit", 1)
    form = OtlpForm(job)

    def beginning(joined: int, time_ns: int) -> int:
        job.feed(server_status([], counters={"joined": joined}))
        metrics = form.data(time_ns).resource_metrics[0].scope_metrics[0].metrics
        (metric,) = (metric for metric in metrics if metric.name == "doll_ps_joined_total")
        return int(metric.data.data_points[0].start_time_unix_nano)

    assert [beginning(*step) for step in ((3, 10), (3, 20), (5, 30), (1, 40), (4, 50))] == [10, 10, 10, 40, 40]


def test_only_the_newest_values_are_sent_and_once_more_at_the_end() -> None:
    pytest.importorskip("opentelemetry.sdk")
    job, sent = JobMetrics("unit", 1), list[float]()
    now = threading.Event()

    def export(data: Any) -> bool:
        (metric,) = (each for each in data.resource_metrics[0].scope_metrics[0].metrics if each.name.endswith("_loss"))
        sent.append(metric.data.data_points[0].value)
        now.wait(120)
        return True

    sender = MetricSender(job, export, 0.001)
    for loss in (4.0, 3.0):
        job.feed(Metric(source="evaluator", values={"loss": loss}, time_s=1))
    assert sent == [], "nothing is sent before the history is read"
    sender.start()
    sender.start()
    until(lambda: sent, "the first values")
    for loss in (2.0, 1.0):  # the collector hangs meanwhile
        job.feed(Metric(source="evaluator", values={"loss": loss}, time_s=2))
    now.set()
    sender.close(120.0)
    assert (sent[0], sent[-1], 2.0 in sent) == (3.0, 1.0, False)
    assert (sender.sent, sender.failed) == (len(sent), 0)


def test_a_collector_that_hangs_does_not_hold_up_the_end(collector: Collector) -> None:
    collector.answers.clear()
    export, end_export = make_export(collector.url)
    sender = MetricSender(job_metrics(), export, 0.001, end_export)
    sender.start()
    until(lambda: collector.requests, "a request")
    sender.close(0.0)
    assert (len(collector.requests), sender.sent) == (1, 0)


@pytest.mark.parametrize("status", [400, 404])
def test_a_collector_that_refuses_gets_the_next_values(collector: Collector, status: int) -> None:
    collector.status = status
    export, end_export = make_export(collector.url)
    sender = MetricSender(job_metrics(), export, 0.001, end_export)
    sender.start()
    until(lambda: sender.failed >= 2, "two refusals")
    collector.status = 200
    until(lambda: sender.sent, "accepted values")
    sender.close(120.0)


def test_an_error_is_logged_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("opentelemetry.sdk")

    def export(data: Any) -> bool:
        raise RuntimeError("no answer from http://ann:secret@127.0.0.1/?key=secret")

    sender = MetricSender(job_metrics(), export, 0.001)
    sender.start()
    until(lambda: sender.failed >= 2, "two errors")
    sender.close(120.0)
    logged = "".join(capsys.readouterr())
    assert "metrics_not_sent" in logged
    assert "secret" not in logged


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doll.extras.is_installed", lambda extra: False)
    with pytest.raises(ConfigError, match=r"doll otel needs the extra otel: pip install"):
        make_export("http://127.0.0.1:1")


@pytest.mark.parametrize("only", [None, "traces", "metrics"])
def test_a_job_is_followed_and_what_was_asked_for_is_sent(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, only: Any
) -> None:  # fmt: skip
    config = parse("job: unit\ntask: {class: 'm:Task'}\ndata: {workers: 1, batch_size: 8}")
    updates, metrics = config.topic("updates"), config.topic("metrics")
    learned = Member(
        worker=0, partition=0, batch=0, lo=0, hi=8, base_version=0, n_samples=8, grant_to_update_s=2.0, compute_s=0.5
    )
    update = Update(term=1, version=1, members=(learned,), n_samples=8, loss=0.5, time_s=1000.0)

    def follow(*_: Any, **__: Any) -> Iterator[Poll]:
        entries = [
            TimedRecord(update, 0.0, updates, 0), TimedRecord(update, 0.0, updates, 7),
            TimedRecord(server_status([], durable_version=1, time_s=1001.0), 0.0, metrics, 5),
        ]  # fmt: skip
        yield Poll(entries, True, {Partition(updates, 0): 7, Partition(metrics, 0): 5}, Heartbeat("otel"))

    monkeypatch.setattr(otel, "follow", follow)
    services = Services("127.0.0.1:1", "redis://127.0.0.1:1/0")
    assert otel.export_job(config, services, collector.url, max_per_s=5.0, interval_s=1000.0, only=only) == 0
    expected = {"/v1/traces", "/v1/metrics"} if only is None else {f"/v1/{only}"}
    assert {path for path, _ in collector.requests} == expected
    assert len(collector.requests) == len(expected)
