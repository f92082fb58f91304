"""Serves the metrics of a job to Prometheus: one endpoint for all of its processes, fed by its topics.

No process of the job has to be reachable for Prometheus, and none listens for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from doll.config import JobConfig
from doll.kafka.reader import Tail
from doll.monitor.state.job_metrics import JobMetrics
from doll.process.health import heartbeat_of
from doll.process.signals import stop_requested
from doll.services import Services

Family = CounterMetricFamily | GaugeMetricFamily
PATH: Final = "/metrics"
DEFAULT_PORT: Final = 9464
_POLL_S: Final = 0.5
_CHECK_KAFKA_EVERY_S: Final = 15.0


class JobCollector(Collector):
    """The metrics of a job as Prometheus' client library takes them; `collect` may run in another thread."""

    def __init__(self, job: str, metrics: JobMetrics) -> None:
        self._job = job
        self._metrics = metrics

    def collect(self) -> Iterable[Family]:
        families: dict[str, Family] = {}
        names: dict[str, tuple[str, ...]] = {}
        for (name, own_labels), value in self._metrics.samples().items():
            labels = {"job_name": self._job, **dict(own_labels)}
            if name not in families:
                make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                names[name] = tuple(labels)
                families[name] = make(name, "see docs/operations.md", labels=list(labels))
            if names[name] == tuple(labels):  # else two sources use a name with different labels
                families[name].add_metric(list(labels.values()), value)
        return families.values()


def serve_metrics(config: JobConfig, services: Services) -> int:
    """Serve the job's metrics on loopback, beside the health probes, until SIGTERM or SIGINT; the exit code, 0.

    Needs the main thread. If Kafka is unavailable later, it waits for it.

    Raises:
        ServiceUnavailableError: Kafka does not answer at the start.
    """
    metrics = JobMetrics(config.data.workers)
    registry = CollectorRegistry()
    registry.register(JobCollector(config.job, metrics))
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
            entries = tail.poll(_POLL_S)
            for entry in entries:
                metrics.feed(entry.record)
            if entries or tail.partition_ends(topics[0], 1) is not None:
                heartbeat.beat("kafka")
            if all(map(tail.has_read_history, tail.ends)):
                heartbeat.set_waiting_for("")
    return 0
