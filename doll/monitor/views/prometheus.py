"""The metrics of a job for Prometheus: one endpoint for all of its processes, which reads the job's topics.

Prometheus therefore does not need to reach the processes of the job. A metric `name` of the source `kind` becomes
`doll_<kind>_<name>`: a counter if the name ends in `_total`, otherwise a gauge. The name ends in its unit; seconds are
written out, as the conventions of Prometheus require.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import accumulate
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from doll.config import JobConfig
from doll.config.freshness import FreshnessConfig
from doll.ledger.lineage import Lineage, LineageChange, UpdatesRecord
from doll.monitor.follow import follow
from doll.monitor.state.freshness import FreshnessProgress
from doll.monitor.state.heartbeats import RoleHeartbeats
from doll.monitor.state.metric_window import update_values
from doll.monitor.state.prequential import LossTrend
from doll.process.metric_names import TERM, joiner_of, worker_of, worker_source
from doll.records.bounded import short
from doll.records.control import AnyRecord, Finished, Measures, Metric, ServedStatus, ServerStatus, TermStarted, Update
from doll.records.event_times import BOUNDS_S, LatencyCounts, Stage
from doll.services import Services
from doll.telemetry import get_logger
from doll.theory.staleness import Histogram

log = get_logger(__name__)

_NOT_A_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")
_MAX_SOURCES: Final = 10_000  # workers, and a few other processes
_MAX_NAME_CHARS: Final = 200
_SECONDS: Final = (("_per_s", "_per_second"), ("_s", "_seconds"))
_SERVER_FIELDS: Final = (
    "term", "pid", "version", "durable_version", "samples_total", "batches_total", "waiting_batches",
    "computing_batches", "shortfall_batches", "stalled_s", "leader_since_s",
)  # fmt: skip
_WORKER_FIELDS: Final = ("session", "retained_batches", "lag_records")
_UPDATE_FIELDS: Final = ("version", "loss", "apply_s", "grant_to_update_s", "time_s")
_MEMBER_FIELDS: Final = ("compute_s", "fetch_s", "store_s", "wait_s")
_MEASURES: Final = (
    "older_reads", "blocked_s", "computing_s", "idle_s", "gradient_bytes", "dense_gradient_bytes", "weights_bytes",
    "row_bytes", "plain_row_bytes", "row_request_bytes",
)  # fmt: skip

Family = CounterMetricFamily | GaugeMetricFamily
PATH: Final = "/metrics"
HISTOGRAM: Final = "doll_freshness_seconds"
DEFAULT_PORT: Final = 9464
_NO_OBJECTIVES: Final = FreshnessConfig()
Labels = tuple[tuple[str, str], ...]


class MetricSample(NamedTuple):
    """One number with its name and labels, without the job's label."""

    name: str
    labels: Labels
    value: float


def samples_of(source: str, values: Mapping[str, float]) -> Iterator[MetricSample]:
    """Yield the samples of a `Metric` record. The source `worker-3` becomes a label: `doll_worker_...{worker="3"}`."""
    numbers = {"worker": worker_of(source), "joiner": joiner_of(source)}
    labels = tuple((role, str(number)) for role, number in numbers.items() if number is not None)
    prefix = labels[0][0] if labels else source
    for name, value in values.items():
        yield MetricSample(f"doll_{_prometheus_name(prefix)}_{_prometheus_name(name)}", labels, value)


def server_samples(status: ServerStatus) -> Iterator[MetricSample]:
    """Yield the samples of the parameter server's status: its own as `doll_ps_...`, and those of each worker."""
    counters = {f"{name}_total": float(count) for name, count in status.counters.items()}
    yield from samples_of("ps", _fields(status, _SERVER_FIELDS) | counters)
    if status.measures is not None:
        yield from _policy_samples(status.measures)
    if (limit := status.limit) is not None:
        place = (("worker", limit.worker), ("partition", limit.partitions[0] if limit.kind == "partition" else -1))
        labels = (("kind", limit.kind), *((name, str(number) if number >= 0 else "") for name, number in place))
        yield MetricSample("doll_ps_limit", labels, limit.share or 1.0)
    for table in status.tables:
        labels = (("table", table.name),)
        yield MetricSample("doll_ps_table_rows", labels, float(table.rows))
        for name in ("admitted", "evicted", "expired", "refused"):
            yield MetricSample(f"doll_ps_table_{name}_total", labels, float(getattr(table, name)))
    for shard in status.shards:
        labels = (("shard", str(shard.shard)),)
        yield MetricSample("doll_ps_shard_live", labels, float(shard.is_alive))
        for name in ("version", "slice_bytes", "memory_bytes", "part_version"):
            yield MetricSample(f"doll_ps_shard_{name}", labels, float(getattr(shard, name)))
    for worker in status.workers:
        values = {"live": float(worker.is_live), "restarts_total": float(worker.restarts)}
        values |= _fields(worker, _WORKER_FIELDS)
        if worker.is_live:
            values["silent_s"] = worker.silent_s
        yield from samples_of(worker_source(worker.worker), values)


def _policy_samples(measures: Measures) -> Iterator[MetricSample]:
    """Yield the measurements of the policy. The number of reads has the difference as a label."""
    reads = Histogram(measures.staleness, total=measures.staleness_total, older=measures.older_reads)
    if reads.size:
        yield MetricSample("doll_ps_staleness_mean", (), reads.mean)
        yield MetricSample("doll_ps_staleness_p99", (), reads.percentile(1))
        yield MetricSample("doll_ps_staleness_counted_ratio", (), reads.counted_share)
    for difference, count in sorted(reads.counts.items()):
        yield MetricSample("doll_ps_staleness_reads_total", (("difference", str(difference)),), float(count))
    for name in _MEASURES:
        yield MetricSample(f"doll_ps_{_prometheus_name(name)}_total", (), float(getattr(measures, name)))


def _fields(record: object, names: Iterable[str]) -> dict[str, float]:
    return {name: float(getattr(record, name)) for name in names}


def _prometheus_name(name: str) -> str:
    plain = _NOT_A_NAME.sub("_", name)
    suffix, long = next((pair for pair in _SECONDS if plain.endswith(pair[0])), ("", ""))
    return plain.removesuffix(suffix) + long


class JobMetrics(Collector):
    """The newest metrics of a job. `samples` and `collect` may be called from another thread than `feed`.

    Args:
        clock: returns Unix seconds, for the ages of heartbeats.
    """

    def __init__(
        self, job: str, workers: int, freshness: FreshnessConfig = _NO_OBJECTIVES, *,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.job = job
        self._freshness = FreshnessProgress(freshness)
        self._clock = clock
        self._heartbeats = RoleHeartbeats()
        self._by_source: dict[str, tuple[MetricSample, ...]] = {"job": (MetricSample("doll_job_workers", (), workers),)}
        self._finished = False
        self._loss_trend = LossTrend()
        self._full = False
        self._lineage = Lineage()

    def feed(self, record: AnyRecord) -> None:
        """Process a record of `metrics` or `updates`; other types are ignored."""
        self._heartbeats.feed(record)
        match record:
            case ServerStatus() if self._lineage.is_current(record.term):
                self._freshness.feed(record)
                self._put("ps", (*server_samples(record), _measured_at("ps", record.time_s)))
                if record.num_workers:
                    self._put("job", (MetricSample("doll_job_workers", (), record.num_workers - len(record.released)),))
            case ServedStatus() if self._lineage.is_current(record.term):
                self._freshness.feed(record)
            case Metric():
                self._measured(record)
            case TermStarted() | Update() | Finished():
                self._lineage_changed(record, self._lineage.feed(record))
            case _:
                pass

    def _lineage_changed(self, record: UpdatesRecord, change: LineageChange) -> None:
        if change is LineageChange.FENCED:
            return
        if change is LineageChange.GENERATION:
            self._loss_trend = LossTrend()
            self._freshness = FreshnessProgress(self._freshness.config)
            self._by_source = {"job": self._by_source["job"]}
        if isinstance(record, Update):
            self._updated(record)
        else:
            self._finished = isinstance(record, Finished)

    def samples(self) -> dict[tuple[str, Labels], float]:
        """Return the newest values by name and labels."""
        ages_s = self._heartbeats.ages_s(self._clock())
        newest = (
            MetricSample("doll_job_finished", (), float(self._finished)),
            *(MetricSample("doll_heartbeat_age_seconds", (("role", role),), age_s) for role, age_s in ages_s.items()),
            *self._freshness_samples(),
        )
        return {
            (sample.name, sample.labels): sample.value
            for samples in (*self._by_source.values(), newest)
            for sample in samples
        }

    def _freshness_samples(self) -> Iterator[MetricSample]:
        config = self._freshness.config
        for stage, counts in self._freshness.counts().items():
            values = {
                "records_total": counts.records, "without_time_total": counts.bad,
                "newest_event_timestamp_s": counts.newest_ms / 1000,
            }  # fmt: skip
            if (limit_s := config.limit_s(stage)) is not None:
                values |= {"within_objective_total": counts.within, "objective_s": limit_s}
                values["objective_ratio"] = config.share
            for name, value in values.items():
                yield MetricSample(f"doll_freshness_{_prometheus_name(name)}", (("stage", stage),), value)

    def latencies(self) -> Mapping[Stage, LatencyCounts]:
        """Return the time from the events, by stage."""
        return self._freshness.counts()

    def _histogram(self) -> HistogramMetricFamily:
        text, bounds = "see docs/guide/freshness.md", [*map(str, BOUNDS_S), "+Inf"]
        family = HistogramMetricFamily(HISTOGRAM, text, labels=["job_name", "stage"])
        for stage, counts in self.latencies().items():
            buckets = list(zip(bounds, map(float, accumulate(counts.buckets)), strict=True))
            family.add_metric([self.job, stage], buckets, counts.sum_s)
        return family

    def collect(self) -> Iterable[Family | HistogramMetricFamily]:
        """Return the metric families in the form of Prometheus' client library."""
        families: dict[str, Family] = {}
        names: dict[str, tuple[str, ...]] = {}
        for (name, own_labels), value in self.samples().items():
            labels = {"job_name": self.job, **dict(own_labels)}
            if name not in families:
                make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                names[name] = tuple(labels)
                families[name] = make(name, "see docs/operations.md", labels=list(labels))
            if names[name] == tuple(labels):  # skip a name that two sources use with different labels
                families[name].add_metric(list(labels.values()), value)
        histogram = self._histogram()
        return [*families.values(), histogram] if histogram.samples else list(families.values())

    def _measured(self, record: Metric) -> None:
        if len(record.source) > _MAX_NAME_CHARS or any(len(name) > _MAX_NAME_CHARS for name in record.values):
            log.warning("metric_refused", source=short(record.source, 60), reason="a name is too long")
        elif record.values and record.values.get(TERM, self._lineage.generation) >= self._lineage.generation:
            samples = samples_of(record.source, record.values)
            # A worker reports several groups of numbers in separate records.
            group = record.source if worker_of(record.source) is None else f"{record.source} {min(record.values)}"
            self._put(group, (*samples, _measured_at(record.source, record.time_s)))

    def _updated(self, update: Update) -> None:
        values = {"samples": float(update.n_samples), "batches": float(len(update.members))}
        values |= _fields(update, _UPDATE_FIELDS)
        values |= {f"prequential_{name}": value for name, value in update_values(update.metrics).items()}
        self._put("update", tuple(samples_of("update", values)))
        self._loss_trend.add(update.version, update.total_weight, update.loss)
        trend = {
            "window_loss": self._loss_trend.last,
            "best_window_loss": self._loss_trend.best,
            "loss_worsened": float(self._loss_trend.worsened),
        }
        self._put("loss trend", tuple(samples_of("job", trend)))
        for member in update.members:
            times = samples_of(worker_source(member.worker), _fields(member, _MEMBER_FIELDS))
            self._put(f"member {member.worker}", tuple(times))

    def _put(self, source: str, samples: tuple[MetricSample, ...]) -> None:
        if source not in self._by_source and len(self._by_source) >= _MAX_SOURCES:
            if not self._full:
                log.warning("too_many_sources", at_most=_MAX_SOURCES, refused=short(source), action="not served")
            self._full = True
            return
        self._by_source = {**self._by_source, source: samples}  # new, because a scrape may read the old one


def _measured_at(source: str, time_s: float) -> MetricSample:
    return MetricSample("doll_last_metric_timestamp_seconds", (("source", source),), time_s)


def serve_metrics(config: JobConfig, services: Services) -> int:
    """Serve the job's metrics on loopback, with the health probes, until SIGTERM or SIGINT; return the exit code, 0.

    Must be called in the main thread. If Kafka becomes unavailable later, the server waits for it.

    Raises:
        ServiceUnavailableError: Kafka does not answer at the start.
    """
    metrics = JobMetrics(config.job, config.data.workers, config.freshness)
    registry = CollectorRegistry()
    registry.register(metrics)
    topics = (config.topic("updates"), config.topic("metrics"))
    pages = {PATH: lambda: (CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry))}
    with closing(follow(config, services, "prometheus", topics, pages=pages, default_port=DEFAULT_PORT)) as polls:
        for poll in polls:
            for entry in poll.entries:
                metrics.feed(entry.record)
    return 0
