"""Run folders: each run its own, and what stands in one opens from anywhere."""

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from doll.config import load
from doll.config.fingerprint import job_fields
from doll.errors import ConfigError, ServiceUnavailableError, VersionUnknownError
from doll.run import folder as runfolder
from doll.run import status
from doll.run.status import audit_target, status_of
from doll.run.target import open_target
from doll.service_checks import require_kafka
from doll.services import Services
from doll.storage.stores import checkpoint_location

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


def copied(run: runfolder.RunFolder, to: Path) -> runfolder.RunFolder:
    return runfolder.RunFolder(Path(shutil.copytree(run.path, to)))


def test_what_is_inside_a_run_folder_is_inside_of_its_copy(run: runfolder.RunFolder, tmp_path: Path) -> None:
    inside = [f"checkpoint.folder={run.path}/checkpoints", f"task.class={run.path}/task.py:Shipped"]
    run.write_job(load(tmp_path / "jobs" / "my.yaml", inside))
    copy = copied(run, tmp_path / "copy")
    for folder in (run, copy):
        config = load(folder.job)
        assert checkpoint_location(config, folder.path) == folder.path / "checkpoints"
        assert config.task.cls == f"{folder.path}/task.py:Shipped"
        assert config.base_folder == tmp_path / "jobs"
    assert job_fields(load(run.job)) == job_fields(load(copy.job)), "it is the same job"
    shutil.move(run.job, copy.job)
    assert checkpoint_location(load(copy.job), copy.path) == copy.path / "checkpoints"


def test_a_project_that_is_moved_with_its_runs_finds_its_own_task(run: runfolder.RunFolder, tmp_path: Path) -> None:
    (tmp_path / "jobs" / "my_task.py").touch()
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move(run.path.parent, moved / "runs")
    assert load(moved / "runs" / run.path.name / "job.yaml").base_folder == tmp_path / "jobs"
    shutil.move(tmp_path / "jobs", moved / "jobs")
    assert load(moved / "runs" / run.path.name / "job.yaml").base_folder == moved / "jobs"
    (moved / "jobs" / "my_task.py").unlink()  # else any folder at that distance would do
    assert load(moved / "runs" / run.path.name / "job.yaml").base_folder == tmp_path / "jobs"


def test_a_run_of_an_earlier_release_is_its_own_too(run: runfolder.RunFolder, tmp_path: Path) -> None:
    """Its paths are absolute."""
    elsewhere = tmp_path / "elsewhere"
    run.job.write_text(f"{JOB}checkpoint: {{folder: {run.path}/checkpoints}}\nbase_folder: {tmp_path}/jobs\n")
    (run.path / "checkpoints").mkdir()
    run.stack.write_text('{"kafka": "127.0.0.1:9", "redis": "redis://127.0.0.1:8/0"}')
    for folder in (run, copied(run, tmp_path / "copy")):
        target = open_target(folder.path, [])
        assert checkpoint_location(target.config, folder.path) == folder.path / "checkpoints"
        assert target.services() == Services("127.0.0.1:9", "redis://127.0.0.1:8/0")
    run.job.write_text(f"{JOB}checkpoint: {{folder: {elsewhere}}}\nbase_folder: {tmp_path}/jobs\n")
    assert checkpoint_location(load(copied(run, tmp_path / "other").job), run.path) == elsewhere


def test_a_copy_does_not_reach_the_broker_of_the_run_that_it_was_copied_from(
    run: runfolder.RunFolder, tmp_path: Path
) -> None:
    run.write_stack(Services("127.0.0.1:9", "redis://127.0.0.1:8/0"), kafka_kind="local")
    copy = copied(run, tmp_path / "copy")
    with pytest.raises(ServiceUnavailableError, match=r"copied or moved .* doll resume starts it"):
        open_target(copy.path, []).services()
    assert open_target(run.path, []).services().kafka == "127.0.0.1:9"
    (tmp_path / "link").symlink_to(run.path)
    assert open_target(tmp_path / "link", []).services().kafka == "127.0.0.1:9"


def test_two_copies_that_would_share_records_or_checkpoints_are_one_too_many(
    run: runfolder.RunFolder, tmp_path: Path
) -> None:
    from doll.run.local.resume import on_same_broker
    from doll.run.versions import pin

    run.write_job(load(tmp_path / "jobs" / "my.yaml", [f"checkpoint.folder={tmp_path}/shared"]))
    run.write_stack(Services("127.0.0.1:9", "redis://127.0.0.1:8/0"), kafka_kind="given")
    copy = copied(run, tmp_path / "copy")
    target = open_target(copy.path, [])
    for change in (target.services, lambda: on_same_broker(copy, target.config), lambda: pin(target, "1", pinned=True)):
        with pytest.raises(ConfigError, match=f"{copy.path} is a copy of {run.path}, and both have the same"):
            change()
    shutil.move(run.path, tmp_path / "away")  # then it was moved, or restored from a backup
    assert target.services().kafka == "127.0.0.1:9"
    with pytest.raises(VersionUnknownError):
        pin(target, "1", pinned=True)


def test_actors_of_a_copy_have_a_name_of_their_own(run: runfolder.RunFolder, tmp_path: Path) -> None:
    name = runfolder.cluster_of(run.path)
    config = load(run.job, [f"fleet={{kind: ray, address: 'h:1', cluster: {name}}}", "control.kind=redis"])
    run.write_job(config)
    run.write_stack(Services("h:9", "redis://h:8/0"), kafka_kind="given")
    assert open_target(run.path, []).config.cluster == name
    for place in (tmp_path / "copies" / run.path.name, tmp_path / "Łódź", tmp_path / "__"):
        copy = copied(run, place)
        config = open_target(copy.path, []).config
        assert config.cluster == runfolder.cluster_of(copy.path) != name
        copy.write_job(config)
        assert load(copy.job).cluster == config.cluster
    run.write_job(load(run.job, ["fleet.cluster=mine"]))
    shutil.copy(run.job, copy.job)
    assert open_target(copy.path, []).config.cluster == "mine"
