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
from doll.monitor.heartbeats import Heartbeats
from doll.monitor.loss_trend import Course
from doll.process.health import pulse_of
from doll.process.signals import told_to_stop
from doll.records import AnyRecord, Epoch, Finished, Metric, Update
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

log = get_logger(__name__)

Family = CounterMetricFamily | GaugeMetricFamily
PATH: Final = "/metrics"
DEFAULT_PORT: Final = 9464
_POLL_S: Final = 0.5
_ASK_KAFKA_S: Final = 15.0
_OF_A_WORKER: Final = re.compile(r"worker_(\d+)_(\w+)")
_NOT_A_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")
_MOST_ORIGINS: Final = 10_000  # sources: workers, and a handful of others
_MOST_CHARS: Final = 200  # of a name
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
        found = _OF_A_WORKER.fullmatch(name)
        if found is not None and not own:
            yield Sample(f"doll_worker_{_plain(found[2])}", (("worker", found[1]),), value)
        else:
            yield Sample(f"doll_{_plain(prefix)}_{_plain(name)}", own, value)


def _plain(name: str) -> str:
    plain = _NOT_A_NAME.sub("_", name)
    short, long = next((pair for pair in _SECONDS if plain.endswith(pair[0])), ("", ""))
    return plain.removesuffix(short) + long


class Measurements(Collector):
    """The newest measurements of a job, folded from its records; `collect` may run in another thread."""

    def __init__(self, job: str, workers: int, *, clock: Callable[[], float] = time.time) -> None:
        self._job = job
        self._clock = clock
        self._heartbeats = Heartbeats()
        self._by_origin: dict[str, tuple[Sample, ...]] = {"job": (Sample("doll_job_workers", (), workers),)}
        self._finished = False
        self._course = Course()
        self._full = False
        self._ps_epoch = self._generation = 0

    def feed(self, record: AnyRecord) -> None:
        """Take in one record of `metrics` or `updates`; others are passed over."""
        self._heartbeats.feed(record)
        match record:
            case Metric() if len(record.source) > _MOST_CHARS or any(len(name) > _MOST_CHARS for name in record.values):
                log.warning("measurement_refused", source=short(record.source, 60), reason="a name is too long")
            case Metric() if record.values.get("ps_epoch", self._generation) < self._generation:
                pass  # of an earlier run
            case Epoch() | Update() | Finished() if record.ps_epoch < self._ps_epoch:
                pass  # of a server that was fenced
            case Metric() if not record.values:
                pass  # a sign of life: what was measured before stands
            case Metric():
                at = Sample("doll_measured_at_seconds", (("source", record.source),), record.time_s)
                self._put(record.source, (*samples_of(record.source, record.values), at))
            case Update():
                values = {
                    "version": float(record.version), "samples": float(record.n_samples), "loss": record.loss,
                    "batches": float(len(record.members)), "apply_s": record.apply_s,
                    "grant_to_update_s": record.grant_to_update_s, "time_s": record.time_s,
                    **{f"prequential_{name}": value for name, value in record.metrics.items()},
                }  # fmt: skip
                self._put("update", tuple(samples_of("update", values)))
                self._course.add(record.version, record.n_samples, record.loss)
                course = {
                    "window_loss": self._course.last, "best_window_loss": self._course.best,
                    "loss_worsened": float(self._course.worsened),
                }  # fmt: skip
                self._put("course", tuple(samples_of("job", course)))
                for member in record.members:
                    own = {
                        "compute_s": member.compute_s, "fetch_s": member.fetch_s, "store_s": member.store_s,
                        "wait_s": member.wait_s,
                    }  # fmt: skip
                    self._put(f"member {member.worker}", tuple(samples_of(f"worker-{member.worker}", own)))
            case Epoch():
                self._finished, self._ps_epoch = False, record.ps_epoch
                if record.generation > self._generation:
                    self._generation, self._course = record.generation, Course()
                    self._by_origin = {"job": self._by_origin["job"]}
            case Finished():
                self._finished = True
            case _:
                pass

    def _put(self, origin: str, samples: tuple[Sample, ...]) -> None:
        if origin not in self._by_origin and len(self._by_origin) >= _MOST_ORIGINS:
            if not self._full:
                log.warning("too_many_sources", at_most=_MOST_ORIGINS, refused=short(origin), action="not served")
            self._full = True
            return
        self._by_origin = {**self._by_origin, origin: samples}  # a new dictionary: a scrape may be under way

    def collect(self) -> Iterable[Family]:
        families: dict[str, Family] = {}
        names: dict[str, tuple[str, ...]] = {}
        told: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        finished = Sample("doll_job_finished", (), float(self._finished))
        ages = [
            Sample("doll_heartbeat_age_seconds", (("role", role),), age_s)
            for role, age_s in self._heartbeats.ages_s(self._clock()).items()
        ]
        for samples in (*self._by_origin.values(), (finished, *ages)):
            for one in samples:
                told[one.name, one.labels] = one.value  # of two for one name and labels a scrape may hold one only
        for (name, own), value in told.items():
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
        told_to_stop() as stop,
        pulse_of("prometheus", config, default_port=DEFAULT_PORT) as pulse,
        Tail(config, services, topics) as tail,
    ):
        pulse.expect("loop")
        pulse.expect("kafka", within_s=3 * _ASK_KAFKA_S, vital=False)
        pulse.waits_for("the history of the job")
        pulse.pages[PATH] = lambda: (CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry))
        while not stop.is_set():
            pulse.beat("loop")
            found = tail.poll(_POLL_S)
            for one in found:
                measurements.feed(one.record)
            if found or tail.partition_ends(topics[0], 1) is not None:
                pulse.beat("kafka")
            if all(map(tail.past, topics)):
                pulse.waits_for("")
    return 0
