"""`doll otel`: the lives of batches as traces of OpenTelemetry, from the records of a job.

The exporter reads topics, like `doll prometheus`: training waits for nothing, and a collector that is away costs only
traces. A batch continues the trace of its first record, if the producer has sent the header `traceparent` (W3C).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.extras import require
from doll.kafka.range_reader import RangeReader
from doll.kafka.reader import Partition, Tail
from doll.monitor.state.batch_times import BatchTimes, DurableBatches
from doll.process.health import heartbeat_of
from doll.process.signals import stop_requested
from doll.records.control import ServerStatus, Update
from doll.services import Services
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

log = get_logger(__name__)

_TRACEPARENT: Final = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_POLL_S: Final = 0.5
_CHECK_KAFKA_EVERY_S: Final = 10.0
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


def export_traces(config: JobConfig, services: Services, endpoint: str, max_per_s: float) -> int:
    """Send traces of batches until SIGTERM or SIGINT; return the exit code, 0.

    Raises:
        ConfigError: the extra is not installed.
        ServiceUnavailableError: Kafka does not answer at the start.
    """
    provider = make_provider(config.job, endpoint)
    batches = DurableBatches(max_per_s)
    topics = (config.topic("updates"), config.topic("metrics"))
    with (
        stop_requested() as stop,
        heartbeat_of("otel", config) as heartbeat,
        closing(_FirstRecords(config, services)) as records,
        Tail(config, services, topics) as tail,
    ):
        tracer = BatchTracer(provider, records.headers_of)
        heartbeat.expect("loop", within_s=60.0)
        heartbeat.expect("kafka", within_s=3 * _CHECK_KAFKA_EVERY_S, vital=False)
        heartbeat.set_waiting_for("")
        while not stop.is_set():
            heartbeat.beat("loop")
            entries = tail.poll(_POLL_S)
            for entry in entries:
                is_new = entry.offset >= tail.ends[Partition(entry.topic, 0)]
                if is_new and isinstance(entry.record, Update):
                    batches.add(entry.record)
                elif is_new and isinstance(entry.record, ServerStatus):
                    for batch in batches.durable(entry.record.durable_version, entry.record.time_s):
                        tracer.trace(batch)
                heartbeat.beat("loop")
            if entries or tail.partition_ends(topics[0], 1) is not None:
                heartbeat.beat("kafka")
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
