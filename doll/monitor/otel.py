"""`doll otel`: the lives of batches as traces of OpenTelemetry, and the metrics of a job, from its records.

The exporter reads topics, like `doll prometheus`: training waits for nothing, and a collector that is away costs only
traces and values. A batch continues the trace of its first record, if the producer has sent the header `traceparent`
(W3C).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, Literal

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.extras import require
from doll.kafka.range_reader import RangeReader
from doll.kafka.reader import Partition
from doll.monitor.follow import follow
from doll.monitor.otel_metrics import MetricSender, make_export
from doll.monitor.state.batch_times import BatchTimes, DurableBatches
from doll.monitor.views.prometheus import JobMetrics
from doll.records.control import ServerStatus, Update
from doll.services import Services
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

log = get_logger(__name__)

_TRACEPARENT: Final = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_MISSES: Final = 20  # batches without a header, after which only every `_MISSES`th is looked at
_READ_S: Final = 5.0

Headers = Sequence[tuple[str, bytes | None]]
HeadersOf = Callable[[int, int], Headers]  # partition, offset -> headers of the record


def make_provider(job: str, endpoint: str) -> TracerProvider:
    """Return a provider that sends spans to `endpoint`, by OTLP over HTTP, in a thread of its own. Raise ConfigError if
    the extra `otel` is not installed."""
    require("doll otel", "otel")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "doll", "doll.job": job}))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=10)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class BatchTracer:
    """Makes spans of batches.

    Attributes:
        sent: number of traces.
    """

    def __init__(self, provider: TracerProvider, headers_of: HeadersOf = lambda partition, offset: ()) -> None:
        self._tracer = provider.get_tracer("doll")
        self._headers_of = headers_of
        self._misses = 0
        self.sent = 0

    def trace(self, batch: BatchTimes) -> None:
        from opentelemetry import trace

        ends_s = batch.applied_s if batch.durable_s is None else batch.durable_s
        root = self._tracer.start_span(
            "batch", self._parent(batch), kind=trace.SpanKind.CONSUMER, start_time=_ns(batch.ready_s),
            attributes={
                "messaging.system": "kafka", "messaging.destination.partition.id": str(batch.partition),
                "messaging.kafka.offset": batch.lo, "doll.offset_until": batch.hi, "doll.samples": batch.samples,
                "doll.version": batch.version, "doll.base_version": batch.base_version, "doll.worker": batch.worker,
                "doll.market": batch.market, "doll.term": batch.term,
            },
        )  # fmt: skip
        context = trace.set_span_in_context(root)
        steps = (
            ("wait for a grant", batch.ready_s, batch.begun_s),
            ("fetch weights", batch.begun_s, batch.fetched_s),
            ("compute gradient", batch.computing_s, batch.computed_s),
            ("push gradient", batch.computed_s, batch.pushed_s),
            ("wait for the group and apply", batch.pushed_s, batch.applied_s),
            ("checkpoint", batch.applied_s, ends_s),
        )
        for name, begin_s, end_s in steps:
            span = self._tracer.start_span(name, context, start_time=_ns(begin_s))
            span.end(_ns(max(begin_s, end_s)))
        root.end(_ns(ends_s))
        self.sent += 1

    def _parent(self, batch: BatchTimes) -> Context | None:
        """Return the context of the producer's span, by the header of the batch's first record."""
        if self._misses >= _MISSES and self.sent % _MISSES:
            return None
        headers = dict(self._headers_of(batch.partition, batch.lo))
        match = _TRACEPARENT.fullmatch(headers.get("traceparent") or b"")
        if match is None:
            self._misses += 1
            return None
        self._misses = 0
        from opentelemetry import trace

        span = trace.NonRecordingSpan(
            trace.SpanContext(
                int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=trace.TraceFlags(int(match[3], 16))
            )
        )
        return trace.set_span_in_context(span)


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def export_job(
    config: JobConfig, services: Services, endpoint: str, *, max_per_s: float, interval_s: float,
    only: Literal["traces", "metrics"] | None = None,
) -> int:  # fmt: skip
    """Send traces of batches, and metrics, until SIGTERM or SIGINT; return the exit code, 0.

    Args:
        endpoint: address of a collector that takes OTLP over HTTP, without a path.
        max_per_s: maximum number of traced batches per second.
        interval_s: seconds between two sendings of the metrics.
        only: send only these. None: both.

    Raises:
        ConfigError: the extra is not installed.
        ServiceUnavailableError: Kafka does not answer at the start.
    """
    provider = None if only == "metrics" else make_provider(config.job, endpoint)
    metrics, batches = JobMetrics(config.job, config.data.workers, config.freshness), DurableBatches(max_per_s)
    export, end_export = make_export(endpoint)
    sender = MetricSender(metrics, export, interval_s, end_export)
    topics = (config.topic("updates"), config.topic("metrics"))
    with (
        closing(_FirstRecords(config, services)) as records,
        closing(follow(config, services, "otel", topics, loop_s=60.0)) as polls,
    ):
        tracer = None if provider is None else BatchTracer(provider, records.headers_of)
        for poll in polls:
            for entry in poll.entries:
                metrics.feed(entry.record)
                if tracer is None or entry.offset < poll.ends[Partition(entry.topic, 0)]:
                    continue
                if isinstance(entry.record, Update):
                    batches.add(entry.record)
                elif isinstance(entry.record, ServerStatus):
                    for batch in batches.durable(entry.record.durable_version, entry.record.time_s):
                        tracer.trace(batch)
                        poll.heartbeat.beat("loop")
            if poll.has_read_history and only != "traces":
                sender.start()  # before, the values would be old ones
    if only != "traces":
        sender.close()
    if provider is not None and tracer is not None:
        provider.shutdown()
        log.info("traces_sent", traces=tracer.sent)
    return 0


class _FirstRecords:
    """Reads the headers of single records of the samples topic."""

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._topic = config.topic("samples")
        self._reader = RangeReader(config, services, stall_timeout_s=_READ_S)

    def close(self) -> None:
        self._reader.__exit__()

    def headers_of(self, partition: int, offset: int) -> Headers:
        try:
            message: Any = next(self._reader.messages(self._topic, partition, offset, offset + 1), None)
        except ServiceUnavailableError as exc:
            log.warning("record_not_read", partition=partition, offset=offset, reason=str(exc))
            return ()
        return () if message is None else message.headers
