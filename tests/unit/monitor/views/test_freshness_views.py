"""Freshness as Prometheus, the report and the page show it."""

from __future__ import annotations

from typing import Any

from doll.config import parse
from doll.config.freshness import FreshnessConfig
from doll.monitor.state.progress import ProgressModel
from doll.monitor.views.prometheus import JobMetrics
from doll.monitor.views.run_report import RunOutcome, build_report, summary
from doll.records.control import ServedStatus
from doll.records.event_times import NO_LATENCIES, EventTimes, LatencyCounts
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from statuses import server_status

NOW_MS = 1_800_000_000_000


def latencies(*seconds: float, limit_s: float | None = None, bad: int = 0) -> LatencyCounts:
    counts = NO_LATENCIES.with_batch(EventTimes(bad=bad), 0.0, None, 1.0)
    for each in seconds:
        counts = counts.with_batch(EventTimes(NOW_MS, (0,), 1), NOW_MS / 1000 + each, limit_s, 1.0)
    return counts


RECORDS: tuple[Any, ...] = (
    server_status(term=1, learned=latencies(0.4, 0.4, 8.0, bad=1), durable=latencies(0.4, 8.0)),
    ServedStatus(server="a", time_s=1.0, term=1, served=latencies(0.4, 8.0, limit_s=5.0)),
)


def samples_of(metrics: JobMetrics) -> dict[tuple[str, str, str], float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    return {
        (sample.name, sample.labels.get("stage", ""), sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_prometheus_has_a_histogram_of_each_stage_and_the_objectives() -> None:
    metrics = JobMetrics("j", 1, FreshnessConfig(event_to_served_s=5.0, share=0.9))
    assert not [name for name, _, _ in samples_of(metrics) if name.startswith("doll_freshness")]
    for record in RECORDS:
        metrics.feed(record)
    samples = samples_of(metrics)
    assert samples["doll_freshness_seconds_bucket", "learned", "0.5"] == 2
    assert samples["doll_freshness_seconds_bucket", "learned", "+Inf"] == 3
    assert samples["doll_freshness_seconds_count", "served", ""] == 2
    assert samples["doll_freshness_records_total", "learned", ""] == 4
    assert samples["doll_freshness_without_time_total", "learned", ""] == 1
    assert samples["doll_freshness_within_objective_total", "served", ""] == 1
    assert samples["doll_freshness_objective_seconds", "served", ""] == 5.0
    assert samples["doll_freshness_objective_ratio", "served", ""] == 0.9
    assert samples["doll_freshness_newest_event_timestamp_seconds", "durable", ""] == NOW_MS / 1000
    assert ("doll_freshness_objective_seconds", "learned", "") not in samples


def test_the_report_says_how_fresh_the_model_was() -> None:
    config = parse('{"job": "j", "task": {"class": "a:B"}, "freshness": {"event_to_served_s": 5}}')
    model = ProgressModel(config, 0.0)
    outcome = RunOutcome("stopped", 0, 1.0)
    assert "freshness" not in summary(build_report(model, outcome, None))
    for record in RECORDS:
        model.feed(record)
    report = build_report(model, outcome, None)
    assert report["freshness"]["served"]["records"] == 2
    assert report["freshness"]["learned"]["within"] is None
    text = summary(report)
    assert "freshness: from events to learned p50" in text
    assert "50 % of 2 records within 5 s (objective missed)" in text
    del report["freshness_text"]  # a report of an earlier release
    assert "freshness" not in summary(report)
