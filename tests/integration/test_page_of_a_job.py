"""The page of a job by its topics on a real broker: what was there, and what comes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from doll.dashboard import sources
from doll.dashboard.sources import RunningJob
from doll.local.kafka_broker import LocalKafka
from doll.monitor.views.page import page
from doll.records.control import encode
from job_rig import MakePipeline
from record_builders import dead_letter, term_started, update
from statuses import live_worker, server_status
from waiting import until

pytestmark = pytest.mark.integration


def test_records_of_the_topics_are_shown_as_they_come(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    job = make_pipeline()

    def write(kind: Any, record: Any) -> None:
        job._producer.produce(job.config.topic(kind), encode(record), partition=0)
        assert job._producer.flush(30) == 0

    now_s = time.time()
    write("updates", term_started(1))
    write("updates", update(1, 1, (0, 0), time_s=now_s))
    source = RunningJob(job.config, tmp_path)
    assert source.read(page)["questions"]["safety"]["verdict"] == "reading the history of the job"
    with source.followed(job.services):
        until(lambda: source.read(page)["lists"]["updates"], "the update that was there")
        write("updates", update(1, 2, (0, 1), time_s=now_s + 1))
        write("metrics", server_status([live_worker(0)], version=2, durable_version=1, time_s=now_s + 1))
        write("dead", dead_letter(0, 3))
        until(lambda: source.read(page)["lists"]["letters"], "the letter")
        until(lambda: source.read(lambda state: state.snapshot.durable_version) == 1, "the status")
        shown = source.read(page)
    assert list(shown["lists"]["updates"]) == ["1", "2"]
    assert shown["lists"]["letters"] == {"0-3": "no JSON"}
    assert dict(shown["questions"]["safety"]["facts"])["audit"].startswith("16 offsets in updates, 0 missing, 0 twice")
    assert shown["questions"]["safety"]["tone"] == "good"


def test_a_page_outlives_a_restart_of_the_broker(
    make_pipeline: MakePipeline, broker: LocalKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_ASK_EVERY_S", 0.5)
    monkeypatch.setattr(sources, "_AWAY_S", 2.0)
    job = make_pipeline()
    source = RunningJob(job.config, tmp_path)

    def problem() -> str:
        return source.read(lambda state: state.problem)

    try:
        with source.followed(job.services):
            until(lambda: not problem(), "the history")
            broker.kill()
            until(lambda: problem().startswith("Kafka has not answered for"), "the page to say so", 60)
            broker.start()
            job._producer.produce(job.config.topic("updates"), encode(term_started(1)), partition=0)
            job._producer.produce(job.config.topic("updates"), encode(update(1, 1, (0, 0))), partition=0)
            assert job._producer.flush(60) == 0
            until(lambda: source.read(page)["lists"]["updates"], "the update after the restart", 60)
            until(lambda: not problem(), "the page to go on", 60)
    finally:
        if broker.pid is None:
            broker.start()
