"""Counters of a model server, and one Prometheus page for all processes of a port.

The processes share memory with one row for each process, so that each process can report the sums of all.
"""

from __future__ import annotations

import mmap
import time
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, Literal

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from doll.serving.model_copies import ModelCopies

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
_CODES: Final = (200, 400, 401, 403, 404, 405, 408, 413, 415, 421, 422, 429, 500, 503)
_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_COUNTS: Final = {
    "samples": "Samples that were answered.", "batches": "Batches that were computed.",
    "compute_seconds": "Time in which batches were computed.", "swaps": "Versions that took the place of another one.",
    "logged_answers": "Answers that stand in the topic of --log-answers.",
    "unlogged_answers": "Answers that Kafka did not take.",
    "shadow_answers": "Requests that the version of --shadow has computed too.",
    "skipped_shadow_answers": "Requests that it has not computed: too many waited, it failed, or its process was away.",
}  # fmt: skip
_GAUGES: Final = {
    "version": "Version that answers requests.", "version_age_seconds": "Time since its update.",
    "samples_behind": "Samples that a newer version has learned, and this one has not.",
    "stale": "1: a newer version may not have been seen.", "waiting_requests": "Requests that wait to be computed.",
    "row_bytes": "Memory for rows of tables that have changed since the checkpoint.",
}  # fmt: skip
_COLUMNS: Final = {
    name: at
    for at, name in enumerate(
        [*map(str, _CODES), *_COUNTS, *(f"le{at}" for at in range(len(_BOUNDS_S) + 1)), "seconds", *_GAUGES]
    )
}
_BY_CODE: Final = {code: _COLUMNS[str(code)] for code in _CODES}
_BY_TIME: Final = [_COLUMNS[f"le{at}"] for at in range(len(_BOUNDS_S) + 1)]


class ServeMetrics(Collector):
    """The counters of the processes of one port, and of the shadow's process, whose row is the last one. Create it
    before the fork; each process then counts in its own row."""

    def __init__(self, job: str, processes: int) -> None:
        self._job = job
        rows = processes + 1
        cells = memoryview(mmap.mmap(-1, 8 * rows * len(_COLUMNS))).cast("d")  # faster than numpy for one number
        self._of_process = [cells[at : at + len(_COLUMNS)] for at in range(0, len(cells), len(_COLUMNS))]
        self._rows = np.asarray(cells).reshape(rows, len(_COLUMNS))
        self.use_row(0)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def use_row(self, process: int) -> None:
        """Set the number of this process."""
        self._own = self._of_process[process]

    def answered(self, code: int, seconds: float) -> None:
        """Count a request that was answered with this status."""
        self._own[_BY_CODE.get(code, _BY_CODE[500])] += 1
        self._own[_BY_TIME[bisect_left(_BOUNDS_S, seconds)]] += 1
        self._own[_COLUMNS["seconds"]] += seconds

    def computed(self, samples: int, seconds: float) -> None:
        """Count a computed batch."""
        self._own[_COLUMNS["samples"]] += samples
        self._own[_COLUMNS["batches"]] += 1
        self._own[_COLUMNS["compute_seconds"]] += seconds

    def count(
        self,
        name: Literal["swaps", "logged_answers", "unlogged_answers", "shadow_answers", "skipped_shadow_answers"],
    ) -> None:
        """Increase the counter of this name by one."""
        self._own[_COLUMNS[name]] += 1

    def observe(self, copies: ModelCopies, newest_samples: int, waiting: int, row_bytes: int = 0) -> None:
        """Set the gauges of this process; if there are several lanes, to the values of the first one."""
        lane = copies.lanes[0]
        own, at = self._own, _COLUMNS
        if (copy := lane.copy) is not None:
            version = copy.version
            own[at["version"]] = version.place.version
            own[at["version_age_seconds"]] = max(0.0, time.time() - version.made_s)
            own[at["samples_behind"]] = max(0, newest_samples - version.samples) if version.samples >= 0 else 0
        own[at["stale"]] = bool(lane.stale)
        own[at["waiting_requests"]] = waiting
        own[at["row_bytes"]] = row_bytes

    def page(self) -> bytes:
        """Return the page for Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """Yield the metrics in the form of the Prometheus client library."""
        total = dict(zip(_COLUMNS, self._rows.sum(axis=0).tolist(), strict=True))
        requests = CounterMetricFamily("doll_serve_requests", "Requests, by status.", labels=["job_name", "code"])
        for code in _CODES:
            requests.add_metric([self._job, str(code)], total[str(code)])
        yield requests
        for name, text in _COUNTS.items():
            counter = CounterMetricFamily(f"doll_serve_{name}", text, labels=["job_name"])
            counter.add_metric([self._job], total[name])
            yield counter
        counts = np.cumsum([total[f"le{at}"] for at in range(len(_BOUNDS_S) + 1)]).tolist()
        buckets = list(zip([*map(str, _BOUNDS_S), "+Inf"], counts, strict=True))
        latency = HistogramMetricFamily("doll_serve_request_seconds", "Time to answer.", labels=["job_name"])
        latency.add_metric([self._job], buckets, total["seconds"])
        yield latency
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"doll_serve_{name}", text, labels=["job_name", "process"])
            for process, row in enumerate(self._rows[:-1]):
                gauge.add_metric([self._job, str(process)], float(row[_COLUMNS[name]]))
            yield gauge
