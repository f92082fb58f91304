"""The end of a run: the report comes first, and nothing that fails on the way to it or behind it costs it."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from doll.cli.app import app
from doll.monitor.state.progress import ProgressModel
from doll.monitor.views.run_report import RunOutcome, summary
from doll.run.folder import RunFolder
from doll.run.local import finish
from doll.run.local import up as run_job
from job_files import job
from local_runs import local_run
from typer.testing import CliRunner

pytestmark = pytest.mark.slow  # starts servers


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run without a broker and without a model: audit and export are not what is tested here."""
    monkeypatch.setattr(finish, "_audit", lambda *_: None)
    monkeypatch.setattr(finish, "_export", lambda *_: None)
    return RunFolder(tmp_path)


def finished(run: RunFolder) -> dict[str, Any]:
    config = job()
    outcome = RunOutcome("updates: 5 reached", 0, 3.0)
    return finish.finish_run(local_run(config, run.path), ProgressModel(config, 0.0), outcome)


def test_a_page_that_fails_is_one_line_of_the_report(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("a table without\n rows")

    monkeypatch.setattr(finish, "save_run", broken)
    report = finished(run)
    assert report["exit_code"] == 0
    assert report["notes"] == ["no page: ValueError: a table without rows"]
    assert json.loads(run.report.read_text()) == report


def test_the_report_is_there_before_the_page(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(finish, "save_run", lambda *_, **__: seen.append(run.report.exists()))
    finished(run)
    assert seen == [True]


def test_a_report_that_cannot_be_written_is_still_shown(run: RunFolder) -> None:
    run.report.mkdir()
    report = finished(run)
    assert report["exit_code"] == 1
    assert "report.json: Is a directory" in summary(report)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_on_a_full_disk_stops_nothing() -> None:
    with run_job._Log(Path("/dev/full").open("ab", buffering=0)) as log:
        print("lost", file=log)
        log.flush()


def test_an_error_of_the_disk_is_one_line_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from doll.run.local import preflight

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x/job.yaml")

    monkeypatch.setattr(preflight, "check_files", full)
    (tmp_path / "job.yaml").write_text("job: x\ntask: {class: 'examples.synthetic.task:Gaussian'}\n")
    result = CliRunner().invoke(app, ["config", "check", str(tmp_path / "job.yaml")])
    assert result.exit_code == 1
    assert result.stderr.startswith("doll: runs/x/job.yaml: No space left on device; free some space there")
    assert result.stderr.count("\n") == 1
