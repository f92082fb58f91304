"""How much of a source's history has been sent is shown until all of it has."""

from __future__ import annotations

import io

from doll.config import parse
from doll.monitor.state.progress import ProgressModel
from doll.monitor.state.watched_job import WatchedJob
from doll.monitor.views.display import panel
from doll.monitor.views.page import page
from doll.records.control import Metric
from doll.run.status import JobStatus
from record_builders import term_started
from rich.console import Console

CONFIG = parse("""
job: clicks
task: {class: 'examples.digits.task:Digits'}
data: {workers: 1}
source: {kind: history, table: t, topic: clicks, time: at, handover: {partition: p, offset: o}}
""")
LINE = "1,200,000 of 5,000,000 rows sent (24%), about 1:35 left"


def sent(rows: float, left_s: float) -> Metric:
    values = {"history_rows": rows, "history_total_rows": 5e6, "history_left_s": left_s}
    return Metric(source="producer", values=values, time_s=1.7e9)


def test_status_display_and_page_show_the_part_that_has_been_sent() -> None:
    job = WatchedJob(CONFIG, 0.0)
    job.feed(term_started(1))
    job.feed(sent(1.2e6, 95.0))
    state = job.state(1.0, 1.7e9)
    assert f"history: {LINE}" in JobStatus(CONFIG, state.snapshot, {}).text().splitlines()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(panel(state.snapshot, CONFIG.stop))
    assert f"history: {LINE}" in console.export_text()
    assert dict(page(state)["questions"]["work"]["facts"])["history"] == LINE


def test_nothing_is_shown_before_the_first_row_is_counted_and_after_the_last() -> None:
    model = ProgressModel(CONFIG, started_s=0.0)
    assert model.history_sent() == ""
    model.feed(sent(0, 0.0))
    assert model.history_sent() == "0 of 5,000,000 rows sent (0%)"
    model.feed(sent(5e6, 0.0))
    assert model.history_sent() == ""
