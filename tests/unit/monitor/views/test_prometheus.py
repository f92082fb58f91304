"""What Prometheus gets of the records of a job."""

from __future__ import annotations

import pytest
from doll.monitor.views.prometheus import JobMetrics, MetricSample, samples_of
from doll.records.control import (
    Finished,
    Measures,
    Member,
    Metric,
    ServerStatus,
    ShardStatus,
    TableStatus,
    TermStarted,
    Update,
)
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from statuses import gone_worker, live_worker, server_status


def exposed(metrics: JobMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By name and labels, read back from the text that a scrape gets."""
    registry = CollectorRegistry()
    registry.register(metrics)
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items()) - {("job_name", "j")}): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        ("ps", "version", MetricSample("doll_ps_version", (), 1.0)),
        ("worker-3", "read_total", MetricSample("doll_worker_read_total", (("worker", "3"),), 1.0)),
        ("producer", "rate_per_s", MetricSample("doll_producer_rate_per_second", (), 1.0)),
        ("joiner-2", "samples_total", MetricSample("doll_joiner_samples_total", (("joiner", "2"),), 1.0)),
        ("ps", "stalled_s", MetricSample("doll_ps_stalled_seconds", (), 1.0)),
        ("evaluator", "top-5 accuracy", MetricSample("doll_evaluator_top_5_accuracy", (), 1.0)),
    ],
)
def test_a_measurement_is_named_for_who_makes_it_and_what_it_is_of(
    source: str, name: str, expected: MetricSample
) -> None:
    assert list(samples_of(source, {name: 1.0})) == [expected]


def test_what_a_worker_reports_of_its_rows_does_not_replace_what_it_reports_of_its_link() -> None:
    job = JobMetrics("j", 1)
    job.feed(Metric(source="worker-0", values={"control_refused_total": 2.0}, time_s=1))
    for evicted in (0.0, 7.0):
        values = {"row_state_bytes": 4096.0, "row_states_evicted_total": evicted}
        job.feed(Metric(source="worker-0", values=values, time_s=2))
    shown = exposed(job)
    assert shown[key("doll_worker_control_refused_total", worker="0")] == 2
    assert shown[key("doll_worker_row_state_bytes", worker="0")] == 4096
    assert shown[key("doll_worker_row_states_evicted_total", worker="0")] == 7


def test_the_newest_measurements_of_each_are_exposed_with_the_times_they_were_made() -> None:
    job = JobMetrics("j", 2)
    job.feed(server_status([live_worker(0), gone_worker(1)], version=4, counters={"joined": 2}, time_s=1))
    job.feed(Metric(source="evaluator", values={"loss": 0.5}, time_s=2))
    workers = [live_worker(0, silent_s=0.5), live_worker(1, restarts=2, lag_records=7)]
    job.feed(server_status(workers, version=5, counters={"joined": 3}, stalled_s=12.0, time_s=3))
    values = exposed(job)
    assert values[key("doll_ps_stalled_seconds")] == 12.0
    assert values[key("doll_worker_lag_records", worker="1")] == 7
    assert values[key("doll_worker_restarts_total", worker="1")] == 2
    assert values[key("doll_worker_silent_seconds", worker="0")] == 0.5
    assert values[key("doll_job_workers")] == 2
    assert values[key("doll_ps_version")] == 5
    assert values[key("doll_ps_joined_total")] == 3
    assert values[key("doll_worker_live", worker="1")] == 1
    assert values[key("doll_evaluator_loss")] == 0.5
    assert values[key("doll_last_metric_timestamp_seconds", source="ps")] == 3
    assert values[key("doll_last_metric_timestamp_seconds", source="evaluator")] == 2


def test_bounded_tables_are_exposed_by_their_names() -> None:
    job = JobMetrics("j", 1)
    tables = [
        TableStatus(name=name, rows=5, admitted=9, evicted=3, expired=1, refused=n) for n, name in enumerate("ab")
    ]
    job.feed(server_status([live_worker(0)], tables=tuple(tables)))
    values = exposed(job)
    assert values[key("doll_ps_table_rows", table="a")] == 5
    shown = [
        values[key(f"doll_ps_table_{name}_total", table="b")] for name in ("admitted", "evicted", "expired", "refused")
    ]
    assert shown == [9, 3, 1, 1]


def test_shards_are_exposed_by_their_numbers() -> None:
    job = JobMetrics("j", 1)
    status = ShardStatus(shard=1, is_alive=False, version=41, slice_bytes=8, memory_bytes=9, part_version=40)
    job.feed(server_status([live_worker(0)], shards=(ShardStatus(shard=0), status)))
    values = exposed(job)
    assert values[key("doll_ps_shard_live", shard="0")] == 1
    names = ("live", "version", "slice_bytes", "memory_bytes", "part_version")
    assert [values[key(f"doll_ps_shard_{name}", shard="1")] for name in names] == [0, 41, 8, 9, 40]


def test_an_update_tells_its_loss_and_what_each_worker_took_for_it() -> None:
    members = tuple(
        Member(worker=n, partition=n, batch=0, lo=0, hi=8, n_samples=8, base_version=0, compute_s=0.25 * (n + 1))
        for n in (0, 1)
    )
    job = JobMetrics("j", 2)
    job.feed(
        Update(term=1, version=1, members=members, n_samples=16, loss=0.7, metrics={"accuracy": 0.5}, apply_s=0.01)
    )
    values = exposed(job)
    assert values[key("doll_update_loss")] == 0.7
    assert values[key("doll_update_prequential_accuracy")] == 0.5
    assert values[key("doll_worker_compute_seconds", worker="1")] == 0.5


def test_a_job_that_goes_on_has_not_finished_any_more() -> None:
    job = JobMetrics("j", 1)
    assert exposed(job)[key("doll_job_finished")] == 0
    job.feed(Finished(term=1, version=9, reason="updates: 9 reached", time_s=1))
    assert exposed(job)[key("doll_job_finished")] == 1
    job.feed(TermStarted(term=2, resumed_version=9, origins=(0,), records_per_batch=8, time_s=2))
    assert exposed(job)[key("doll_job_finished")] == 0


def test_a_new_generation_shows_nothing_of_the_run_before() -> None:
    def term_started(number: int, generation: int = 0) -> TermStarted:
        return TermStarted(
            term=number, resumed_version=0, origins=(0,), records_per_batch=1, time_s=0.0, generation=generation
        )

    def ps(number: int) -> ServerStatus:
        return server_status(term=number, version=10 * number, time_s=1)

    finished = Finished(term=1, version=10, reason="r", time_s=0.0)
    job = JobMetrics("j", 2)
    for record in (term_started(1), ps(1), Metric(source="producer", values={"sent_total": 7}, time_s=1), finished):
        job.feed(record)
    assert exposed(job)[key("doll_job_finished")] == 1
    for record in (term_started(2, generation=2), ps(1), finished):
        job.feed(record)
    shown = exposed(job)
    assert shown[key("doll_job_finished")] == 0
    assert key("doll_ps_version") not in shown
    assert key("doll_producer_sent_total") not in shown
    job.feed(ps(2))
    assert exposed(job)[key("doll_ps_version")] == 20


def test_a_loss_far_above_its_best_is_a_number_to_be_alarmed_by() -> None:
    job = JobMetrics("j", 1)
    for version in range(1, 41):
        job.feed(Update(term=1, version=version, members=(), n_samples=8, loss=0.5 if version < 30 else 1e9))
        assert exposed(job)[key("doll_job_loss_worsened")] == float(version >= 30)
    assert exposed(job)[key("doll_job_best_window_loss")] == 0.5
    job.feed(TermStarted(term=2, resumed_version=0, origins=(0,), records_per_batch=8, time_s=0.0, generation=2))
    assert key("doll_job_loss_worsened") not in exposed(job)


def test_the_age_of_each_roles_last_sign_of_life_is_exposed() -> None:
    now_s = 1000.0
    job = JobMetrics("j", 1, clock=lambda: now_s)
    job.feed(Metric(source="provisioner", values={"spent_usd": 2.0}, time_s=400.0))
    job.feed(Metric(source="provisioner", values={}, time_s=700.0))
    job.feed(server_status([live_worker(0, silent_s=4.0)], time_s=999.0))
    values = exposed(job)
    assert values[key("doll_heartbeat_age_seconds", role="provisioner")] == 300.0
    assert values[key("doll_heartbeat_age_seconds", role="ps")] == 1.0
    assert values[key("doll_heartbeat_age_seconds", role="worker-0")] == 5.0
    assert values[key("doll_provisioner_spent_usd")] == 2.0, "a heartbeat keeps the metrics"
    job.feed(Metric(source="provisioner", values={"left": 1.0}, time_s=701.0))
    assert key("doll_heartbeat_age_seconds", role="provisioner") not in exposed(job)


def test_reads_are_counted_by_staleness() -> None:
    job = JobMetrics("j", 2)
    measures = Measures(
        staleness={-3: 1, -1: 99}, staleness_total=-102, older_reads=25, blocked_s=2.5, weights_bytes=40
    )
    job.feed(server_status(measures=measures))
    values = exposed(job)
    assert values[key("doll_ps_staleness_reads_total", difference="-3")] == 1
    assert values[key("doll_ps_staleness_reads_total", difference="-1")] == 99
    assert values[key("doll_ps_staleness_mean")] == pytest.approx(-1.02)
    assert values[key("doll_ps_staleness_p99")] == -3
    assert values[key("doll_ps_staleness_counted_ratio")] == 0.8
    assert values[key("doll_ps_blocked_seconds_total")] == 2.5
    assert values[key("doll_ps_weights_bytes_total")] == 40
