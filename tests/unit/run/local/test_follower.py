"""What a run knows of its job by its records, and by the restarts of its roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from doll.config import parse
from doll.kafka.reader import Partition, Tail, TimedRecord
from doll.local.supervisor import Restart
from doll.records.control import AnyRecord, Finished, TermStarted
from doll.run.local.follower import RunFollower
from local_runs import local_run

CONFIG = parse("job: j\ntask: {class: 'examples.digits.task:Digits'}\nsource: {kind: python, of: 'a:b'}\n")
UPDATES = CONFIG.topic("updates")


class FakeTail:
    """A topic of records; the first `history` of them were there before the run."""

    def __init__(self, records: list[AnyRecord], history: int) -> None:
        self.ends = {Partition(UPDATES): history}
        self._entries = [TimedRecord(record, 0.0, UPDATES, offset) for offset, record in enumerate(records)]

    def poll(self, timeout_s: float) -> list[TimedRecord]:
        entries, self._entries = self._entries, []
        return entries

    def read_to_end(self) -> list[TimedRecord]:
        return self.poll(0.0)


def follower(tmp_path: Path, records: list[AnyRecord], history: int = 0) -> RunFollower:
    tail = cast(Tail, FakeTail(records, history))
    (tmp_path / "logs").mkdir()
    return RunFollower(local_run(CONFIG, tmp_path), tail)


def term_started(term: int) -> TermStarted:
    return TermStarted(term=term, resumed_version=0, origins=(0,) * 4, records_per_batch=64, time_s=0.0)


def finished(term: int) -> Finished:
    return Finished(term=term, version=3, reason="updates: 3 reached", time_s=0.0)


@pytest.mark.parametrize("read", ["follow", "read_to_end"])
def test_the_job_has_finished_when_this_run_has_written_so(tmp_path: Path, read: str) -> None:
    subject = follower(tmp_path, [term_started(1), finished(1)])
    getattr(subject, read)()
    assert subject.finished


def test_the_end_of_an_earlier_run_does_not_finish_this_one(tmp_path: Path) -> None:
    subject = follower(tmp_path, [term_started(1), finished(1)], history=2)
    subject.follow()
    assert not subject.finished


def test_restarts_are_counted_and_failures_keep_the_last_line_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    subject = follower(tmp_path, [])
    (tmp_path / "logs" / "worker-1.log").write_text("starting\nno memory\n")
    subject.role_restarted(Restart("worker-1", exit_code=1, failures=1, backoff_s=0.5))
    subject.role_restarted(Restart("worker-1", exit_code=1, failures=2, backoff_s=0.5))
    subject.role_restarted(Restart("ps", exit_code=-9, failures=1, backoff_s=0.5))
    subject.service_restarted("redis", "Redis")
    assert subject.restarts == {"worker-1": 2, "ps": 1, "redis": 1}
    assert subject.failures == {"worker-1": (2, "no memory")}, "a role that was killed has not failed"
    assert [text for _, text in subject.model.all_events][-1] == "Redis died: restarting it"
    assert "ps ended with killed by SIGKILL: restarted after 0.5 s" in capsys.readouterr().err
