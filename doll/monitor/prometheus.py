"""A job's measurements for Prometheus, read from its topics: one endpoint for all of its processes.

The processes measure onto the topic `metrics` anyway; whoever serves that to Prometheus need not be near any of them,
and no process of the job listens for anybody. What Prometheus gets of a measurement `name` of source `kind` is
`doll_<kind>_<name>`, a counter where it ends in `_total` and else a gauge, in the unit that the name ends in, with
seconds written out as Prometheus wants them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from doll.bounded import short
from doll.kafka.tail import Tail
from doll.monitor.heartbeats import RoleHeartbeats
from doll.monitor.loss_trend import LossTrend
from doll.process.health import heartbeat_of
from doll.process.signals import stop_requested
from doll.records import AnyRecord, Finished, Metric, TermStarted, Update
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

log = get_logger(__name__)

Family = CounterMetricFamily | GaugeMetricFamily
PATH: Final = "/metrics"
DEFAULT_PORT: Final = 9464
_POLL_S: Final = 0.5
_CHECK_KAFKA_EVERY_S: Final = 15.0
_WORKER_METRIC: Final = re.compile(r"worker_(\d+)_(\w+)")
_NOT_A_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")
_MAX_SOURCES: Final = 10_000  # sources: workers, and a handful of others
_MAX_NAME_CHARS: Final = 200  # of a name
_SECONDS: Final = (("_per_s", "_per_second"), ("_s", "_seconds"))


class Sample(NamedTuple):
    """One number with its name and labels, the job's left out."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


def samples_of(source: str, values: Mapping[str, float]) -> Iterator[Sample]:
    """What one record of the topic `metrics` says. Pure.

    `worker-3` measures `doll_worker_...{worker="3"}`, and so does the parameter server of it as `worker_3_...`.
    """
    kind, _, number = source.rpartition("-")
    own: tuple[tuple[str, str], ...] = (("worker", number),) if kind == "worker" and number.isdecimal() else ()
    prefix = "worker" if own else source
    for name, value in values.items():
        found = _WORKER_METRIC.fullmatch(name)
        if found is not None and not own:
            yield Sample(f"doll_worker_{_prometheus_name(found[2])}", (("worker", found[1]),), value)
        else:
            yield Sample(f"doll_{_prometheus_name(prefix)}_{_prometheus_name(name)}", own, value)


def _prometheus_name(name: str) -> str:
    plain = _NOT_A_NAME.sub("_", name)
    short, long = next((pair for pair in _SECONDS if plain.endswith(pair[0])), ("", ""))
    return plain.removesuffix(short) + long


class Measurements(Collector):
    """The newest measurements of a job, folded from its records; `collect` may run in another thread."""

    def __init__(self, job: str, workers: int, *, clock: Callable[[], float] = time.time) -> None:
        self._job = job
        self._clock = clock
        self._heartbeats = RoleHeartbeats()
        self._by_source: dict[str, tuple[Sample, ...]] = {"job": (Sample("doll_job_workers", (), workers),)}
        self._finished = False
        self._loss_trend = LossTrend()
        self._full = False
        self._term = self._generation = 0

    def feed(self, record: AnyRecord) -> None:
        """Take in one record of `metrics` or `updates`; others are passed over."""
        self._heartbeats.feed(record)
        match record:
            case Metric() if len(record.source) > _MAX_NAME_CHARS or any(
                len(name) > _MAX_NAME_CHARS for name in record.values
            ):
                log.warning("measurement_refused", source=short(record.source, 60), reason="a name is too long")
            case Metric() if record.values.get("term", self._generation) < self._generation:
                pass  # of an earlier run
            case TermStarted() | Update() | Finished() if record.term < self._term:
                pass  # of a server that was fenced
            case Metric() if not record.values:
                pass  # a sign of life: what was measured before stands
            case Metric():
                at = Sample("doll_last_metric_timestamp_seconds", (("source", record.source),), record.time_s)
                self._put(record.source, (*samples_of(record.source, record.values), at))
            case Update():
                values = {
                    "version": float(record.version), "samples": float(record.n_samples), "loss": record.loss,
                    "batches": float(len(record.members)), "apply_s": record.apply_s,
                    "grant_to_update_s": record.grant_to_update_s, "time_s": record.time_s,
                    **{f"prequential_{name}": value for name, value in record.metrics.items()},
                }  # fmt: skip
                self._put("update", tuple(samples_of("update", values)))
                self._loss_trend.add(record.version, record.n_samples, record.loss)
                course = {
                    "window_loss": self._loss_trend.last, "best_window_loss": self._loss_trend.best,
                    "loss_worsened": float(self._loss_trend.worsened),
                }  # fmt: skip
                self._put("course", tuple(samples_of("job", course)))
                for member in record.members:
                    own = {
                        "compute_s": member.compute_s, "fetch_s": member.fetch_s, "store_s": member.store_s,
                        "wait_s": member.wait_s,
                    }  # fmt: skip
                    self._put(f"member {member.worker}", tuple(samples_of(f"worker-{member.worker}", own)))
            case TermStarted():
                self._finished, self._term = False, record.term
                if record.generation > self._generation:
                    self._generation, self._loss_trend = record.generation, LossTrend()
                    self._by_source = {"job": self._by_source["job"]}
            case Finished():
                self._finished = True
            case _:
                pass

    def _put(self, source: str, samples: tuple[Sample, ...]) -> None:
        if source not in self._by_source and len(self._by_source) >= _MAX_SOURCES:
            if not self._full:
                log.warning("too_many_sources", at_most=_MAX_SOURCES, refused=short(source), action="not served")
            self._full = True
            return
        self._by_source = {**self._by_source, source: samples}  # a new dictionary: a scrape may be under way

    def collect(self) -> Iterable[Family]:
        families: dict[str, Family] = {}
        names: dict[str, tuple[str, ...]] = {}
        values_by_series: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        finished = Sample("doll_job_finished", (), float(self._finished))
        ages = [
            Sample("doll_heartbeat_age_seconds", (("role", role),), age_s)
            for role, age_s in self._heartbeats.ages_s(self._clock()).items()
        ]
        for samples in (*self._by_source.values(), (finished, *ages)):
            for one in samples:
                values_by_series[one.name, one.labels] = (
                    one.value
                )  # of two for one name and labels a scrape may hold one only
        for (name, own), value in values_by_series.items():
            labels = {"job_name": self._job, **dict(own)}
            if name not in families:
                make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                names[name] = tuple(labels)
                families[name] = make(name, "see docs/operations.md", labels=list(labels))
            if names[name] == tuple(labels):  # else a source has taken a name that means another thing
                families[name].add_metric(list(labels.values()), value)
        return families.values()


def serve_metrics(config: JobConfig, services: Services) -> int:
    """Serve the job's measurements on loopback, beside the probes, until SIGTERM or SIGINT; 0.

    Needs the main thread.

    Raises:
        ServiceUnavailableError: Kafka does not answer at the start. Later it is waited for.
    """
    measurements = Measurements(config.job, config.data.workers)
    registry = CollectorRegistry()
    registry.register(measurements)
    topics = (config.topic("updates"), config.topic("metrics"))
    with (
        stop_requested() as stop,
        heartbeat_of("prometheus", config, default_port=DEFAULT_PORT) as heartbeat,
        Tail(config, services, topics) as tail,
    ):
        heartbeat.expect("loop")
        heartbeat.expect("kafka", within_s=3 * _CHECK_KAFKA_EVERY_S, vital=False)
        heartbeat.set_waiting_for("the history of the job")
        heartbeat.pages[PATH] = lambda: (CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry))
        while not stop.is_set():
            heartbeat.beat("loop")
            found = tail.poll(_POLL_S)
            for one in found:
                measurements.feed(one.record)
            if found or tail.partition_ends(topics[0], 1) is not None:
                heartbeat.beat("kafka")
            if all(map(tail.has_read_history, topics)):
                heartbeat.set_waiting_for("")
    return 0
