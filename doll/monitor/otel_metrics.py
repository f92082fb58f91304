"""The metrics of a job by OTLP: the values of `doll prometheus`, sent to a collector of OpenTelemetry at an interval.

A metric has the name that Prometheus sees, without a unit, because a collector would add the unit to the name again.
Only the newest values are sent, so nothing waits while a collector is away or hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from doll.extras import require
from doll.monitor.views.prometheus import HISTOGRAM, JobMetrics
from doll.records.event_times import BOUNDS_S
from doll.redaction import redacted
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData

log = get_logger(__name__)

DEFAULT_INTERVAL_S: Final = 15.0
_EXPORT_TIMEOUT_S: Final = 10.0

Export = Callable[["MetricsData"], bool]  # returns whether the collector has accepted the values


class OtlpForm:
    """Turns the metrics of a job into those of OpenTelemetry: gauges, monotonic sums, and histograms.

    A sum begins when it is seen first, and again when its value becomes smaller: then another process counts.
    """

    def __init__(self, metrics: JobMetrics) -> None:
        self._metrics = metrics
        self._sums: dict[object, tuple[float, int]] = {}  # last value, and Unix ns of its beginning

    def data(self, time_ns: int) -> MetricsData:
        """Return the newest values. `time_ns`: the present Unix time."""
        from opentelemetry.sdk.metrics.export import AggregationTemporality as Temporality
        from opentelemetry.sdk.metrics.export import (
            Gauge,
            Histogram,
            HistogramDataPoint,
            Metric,
            MetricsData,
            NumberDataPoint,
            ResourceMetrics,
            ScopeMetrics,
            Sum,
        )
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        before, self._sums = self._sums, {}

        def begins_ns(key: object, value: float) -> int:
            last = before.get(key)
            self._sums[key] = value, time_ns if last is None or value < last[0] else last[1]
            return self._sums[key][1]

        job = self._metrics.job
        points: dict[str, list[NumberDataPoint]] = {}
        for (name, labels), value in self._metrics.samples().items():
            begin_ns = begins_ns((name, labels), value) if _is_sum(name) else 0
            attributes = {"job_name": job, **dict(labels)}
            points.setdefault(name, []).append(NumberDataPoint(attributes, begin_ns, time_ns, float(value)))
        metrics = [Metric(name, "", "", Gauge(numbers)) for name, numbers in points.items() if not _is_sum(name)]
        metrics += [
            Metric(name, "", "", Sum(numbers, Temporality.CUMULATIVE, is_monotonic=True))
            for name, numbers in points.items()
            if _is_sum(name)
        ]
        latencies = []
        for stage, counts in self._metrics.latencies().items():
            total, attributes = sum(counts.buckets), {"job_name": job, "stage": stage}
            latencies.append(
                HistogramDataPoint(
                    attributes, begins_ns(stage, total), time_ns, count=total, sum=counts.sum_s,
                    bucket_counts=counts.buckets, explicit_bounds=BOUNDS_S,
                    min=None, max=None,  # type: ignore[arg-type] # not known: left out
                )
            )  # fmt: skip
        if latencies:
            metrics.append(Metric(HISTOGRAM, "", "", Histogram(latencies, Temporality.CUMULATIVE)))
        scope = ScopeMetrics(InstrumentationScope("doll"), metrics, "")
        resource = Resource.create({"service.name": "doll", "doll.job": job})
        return MetricsData([ResourceMetrics(resource, [scope], "")])


def _is_sum(name: str) -> bool:
    return name.endswith("_total")


def make_export(endpoint: str) -> tuple[Export, Callable[[], None]]:
    """Return functions that send metrics to `endpoint` by OTLP over HTTP, and that end a sending. Raise ConfigError if
    the extra `otel` is not installed."""
    require("doll otel", "otel")
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import MetricExportResult

    exporter = OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics", timeout=_EXPORT_TIMEOUT_S)
    return lambda data: exporter.export(data) is MetricExportResult.SUCCESS, exporter.shutdown


class MetricSender:
    """A thread that sends the newest metrics at an interval, and once more when it is closed.

    Attributes:
        sent, failed: number of times that the collector has accepted the values, and that it has not.
    """

    def __init__(
        self, metrics: JobMetrics, export: Export, interval_s: float, end_export: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        """`export` is called in the thread. `end_export`: makes a running `export` return soon."""
        self._form, self._export, self._interval_s = OtlpForm(metrics), export, interval_s
        self._end_export = end_export
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self.sent = self.failed = 0

    def start(self) -> None:
        """Begin to send, if this was not called before."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self, within_s: float = 5.0) -> None:
        """Send the newest values a last time, for at most `within_s` seconds."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)
        self._end_export()
        log.info("metrics_sent", sent=self.sent, failed=self.failed)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(self._interval_s)
            try:
                accepted = self._export(self._form.data(time.time_ns()))
            except Exception as exc:  # of any HTTP library: the next values are sent again
                log.warning("metrics_not_sent", reason=redacted(f"{type(exc).__name__}: {exc}")[:200])
                accepted = False
            self.sent, self.failed = self.sent + accepted, self.failed + (not accepted)
