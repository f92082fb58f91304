"""The state of a join, from the metrics of its joiners, and where it is shown."""

from __future__ import annotations

import io
import json
import math

import pytest
from doll.config import JobConfig, parse
from doll.monitor.state.join_progress import JoinCounts, JoinProgress
from doll.monitor.state.progress import ProgressModel
from doll.monitor.state.watched_job import WatchedJob
from doll.monitor.views.display import panel
from doll.monitor.views.page import page
from doll.monitor.views.run_report import RunOutcome, build_report, summary
from doll.process.files import json_safe
from doll.process.metric_names import LEFT
from doll.records.control import Metric
from doll.run.status import JobStatus
from record_builders import term_started
from rich.console import Console
from statuses import live_worker, server_status

T0 = 1_700_000_000.0
JOIN = """
job: clicks
task: {class: 'examples.digits.task:Digits'}
data: {workers: 1, join: {features: {topic: shown}, labels: [{topic: clicks, name: click}], window_s: 60}}
"""


def told(joiner: int, at_s: float, samples: float, refused: float = 0, open_keys: float = 0) -> Metric:
    values = {
        "samples_total": samples, "corrections_total": 0.0, "dropped_total": 0.0, "refused_total": refused,
        "open_keys": open_keys,
    }  # fmt: skip
    return Metric(source=f"joiner-{joiner}", values=values, time_s=T0 + at_s)


def test_rates_and_totals_are_the_sum_of_the_joiners() -> None:
    progress = JoinProgress()
    for second in range(30):
        progress.feed(told(0, second, 100 * second, refused=second, open_keys=50))
        progress.feed(told(1, second, 1000 + 10 * second, open_keys=7))
    progress.feed(Metric(source="worker-0", values={"samples_total": 1e9}, time_s=T0))
    counts = progress.counts()
    assert counts.samples_per_s == pytest.approx(110)
    assert (counts.joiners, counts.samples, counts.refused, counts.open_keys) == (2, 2900 + 1290, 29, 57)
    assert (
        counts.text()
        == "join: 110 samples/s from 2 joiners; 4,190 samples, 0 corrections, 0 dropped, 29 refused, 57 open keys"
    )


def test_a_joiner_that_begins_anew_keeps_what_it_had_written() -> None:
    """Its counters begin at 0 again with each membership in the group."""
    progress = JoinProgress()
    for at_s, samples in ((0, 0), (1, 100), (2, 0), (3, 50)):
        progress.feed(told(0, at_s, samples))
    counts = progress.counts()
    assert counts.samples == 150
    assert counts.samples_per_s == pytest.approx(50)


def test_who_is_silent_or_has_left_has_no_rate_and_no_open_keys() -> None:
    progress = JoinProgress()
    for second in range(3):
        for joiner in range(3):
            progress.feed(told(joiner, second, 10 * second, open_keys=5))
    progress.feed(Metric(source="joiner-2", values={LEFT: 1.0}, time_s=T0 + 3))
    for second in range(3, 20):
        progress.feed(told(0, second, 10 * second, open_keys=15))
    counts = progress.counts()
    assert (counts.joiners, counts.open_keys, counts.samples) == (1, 15, 190 + 20 + 20)
    assert counts.samples_per_s == pytest.approx(10)
    late = progress.counts(T0 + 60)
    assert (late.joiners, late.samples_per_s, late.samples) == (0, 0.0, 230), "the server is heard, no joiner is"


def with_join() -> JobConfig:
    return parse(JOIN)


def fed() -> ProgressModel:
    model = ProgressModel(with_join(), started_s=0.0)
    model.feed(term_started(1))
    for second in range(3):
        model.feed(told(0, second, 40 * second, refused=2, open_keys=9))
    model.feed(server_status([live_worker(0)], time_s=T0 + 2))
    return model


LINE = "join: 40 samples/s from 1 joiner; 80 samples, 0 corrections, 0 dropped, 2 refused, 9 open keys"


def test_status_and_display_and_report_show_one_line() -> None:
    snapshot = fed().snapshot(1.0)
    status = JobStatus(with_join(), snapshot, {"joiner-1": 130.0})
    assert f"{LINE}; see doll dead list" in status.text().splitlines()
    assert "silent: joiner-1: no heartbeat for 2:10; other joiners" in status.text()
    content = json.loads(json.dumps(json_safe(status.to_dict()), allow_nan=False))
    assert content["join"]["samples"] == 80
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(panel(snapshot, with_join().stop))
    assert LINE in console.export_text()
    report = json.loads(json.dumps(build_report(fed(), RunOutcome("updates", 0, 3.0), None), allow_nan=False))
    assert report["join"] == {
        "joiners": 1, "samples_per_s": 40.0, "samples": 80, "corrections": 0, "dropped": 0, "refused": 2,
        "open_keys": 9,
    }  # fmt: skip
    assert f"  {LINE.replace('40 samples/s from 1 joiner; ', '')}" in summary(report).splitlines()


def test_the_page_has_the_line_and_says_which_joiner_is_silent() -> None:
    job = WatchedJob(with_join(), 0.0)
    job.feed(term_started(1))
    for second in range(3):
        job.feed(told(0, second, 40 * second, refused=2, open_keys=9))
    shown = page(job.state(1.0, T0 + 2))
    assert dict(shown["questions"]["work"]["facts"])["join"] == LINE.removeprefix("join: ")
    silent = page(job.state(1.0, T0 + 150))
    assert dict(silent["questions"]["safety"]["facts"])["silent"] == "joiner-0 for 2:28"


def test_a_job_whose_joiner_was_never_heard_says_how_to_start_one_and_others_say_nothing() -> None:
    model = ProgressModel(with_join(), started_s=0.0)
    assert model.join() == JoinCounts()
    assert "join: no joiner has reported yet (doll join)" in JobStatus(with_join(), model.snapshot(1.0), {}).text()
    other = ProgressModel(parse("job: j\ntask: {class: 'a:B'}"), started_s=math.nan)
    other.feed(told(0, 0, 1))
    assert other.snapshot(1.0).join is None
