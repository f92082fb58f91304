"""Run folders: each run its own, and what stands in one opens from anywhere."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from doll.config import load
from doll.errors import ConfigError, ServiceUnavailableError
from doll.run import folder as runfolder
from doll.run import status
from doll.run.status import audit_target, status_of
from doll.run.target import open_target
from doll.service_checks import require_kafka
from doll.services import Services

NOW = datetime(2026, 1, 2, 3, 4, 5)
JOB = "job: line\ntask: {class: 'my_task.py:MyTask'}\nsource: {kind: csv, path: data/rows.csv}\n"


@pytest.fixture
def run(tmp_path: Path) -> runfolder.RunFolder:
    """A run of a job whose files stand beside its job file, elsewhere."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "my.yaml").write_text(JOB)
    made = runfolder.create(tmp_path / "runs", "line", NOW)
    made.write_job(load(tmp_path / "jobs" / "my.yaml", ["data.workers=3"]))
    return made


def test_runs_of_the_same_second_do_not_meet(tmp_path: Path) -> None:
    names = [runfolder.create(tmp_path / "runs", "line", NOW).path.name for _ in range(3)]
    assert names == ["line-20260102-030405", "line-20260102-030405-2", "line-20260102-030405-3"]


def test_a_folder_that_cannot_be_made_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="--parent-folder"):
        runfolder.create(tmp_path / "runs", "line", NOW)


def test_the_resolved_job_loads_from_anywhere(
    run: runfolder.RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    config = load(run.job)
    assert config == load(tmp_path / "jobs" / "my.yaml", ["data.workers=3"])
    assert config.path(Path("data/rows.csv")) == tmp_path / "jobs" / "data" / "rows.csv"


def test_a_run_folder_is_a_target_with_its_own_services(run: runfolder.RunFolder) -> None:
    run.write_stack(Services("127.0.0.1:9", "redis://127.0.0.1:8/0"), kafka_kind="local")
    for path in (run.path, run.job):
        target = open_target(path, [])
        assert target.config.data.workers == 3
        assert target.run.path == run.path
        assert target.services() == Services("127.0.0.1:9", "redis://127.0.0.1:8/0")


def test_a_job_file_is_a_target_with_a_run_folder_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(JOB)
    assert open_target(Path("my.yaml"), []).run.path == tmp_path / "runs" / "line"
    assert open_target(Path("my.yaml"), [], Path("here")).run.path == tmp_path / "here"


def test_an_empty_folder_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a job file or a run folder"):
        open_target(tmp_path, [])


def test_a_torn_note_of_the_services_is_an_error(run: runfolder.RunFolder) -> None:
    run.stack.write_text('{"kafka": "x"')
    with pytest.raises(ConfigError, match=r"stack\.json"):
        open_target(run.path, []).services()


@pytest.fixture
def ended(run: runfolder.RunFolder, monkeypatch: pytest.MonkeyPatch) -> runfolder.RunFolder:
    """A run whose broker is gone; one that refuses every connection is not asked for five seconds."""
    monkeypatch.setattr(
        status, "require_kafka", lambda config, services, timeout_s: require_kafka(config, services, 0.5)
    )
    run.write_stack(Services("127.0.0.1:1", "redis://127.0.0.1:1/0"))
    return run


@pytest.mark.slow
def test_the_audit_of_a_run_that_has_ended_is_in_its_report(ended: runfolder.RunFolder) -> None:
    with pytest.raises(ServiceUnavailableError, match="left no report"):
        audit_target(open_target(ended.path, []))
    ended.report.write_text(json.dumps({"audit": {"ok": True}}))
    with pytest.raises(ServiceUnavailableError, match=r"report\.json under 'audit'"):
        audit_target(open_target(ended.path, []))


def test_the_status_of_a_run_that_has_ended_is_its_report(ended: runfolder.RunFolder) -> None:
    from doll.monitor.state.progress import ProgressModel
    from doll.monitor.views.run_report import RunOutcome, build_report

    report = build_report(ProgressModel(load(ended.job), 0.0), RunOutcome("updates", 0, 3.5), None)
    ended.report.write_text(json.dumps(report))
    status = status_of(open_target(ended.path, []))
    assert status.to_dict() == report
    assert status.text().startswith("line: 0 updates, 0 samples in 4 s (updates)")
