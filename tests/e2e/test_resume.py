"""`doll resume` after everything of a run was killed: on its own broker's data, and with checkpoints in S3."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from doll.local.redis_server import LocalRedis
from doll.monitor.state.csv_file import read_rows
from doll.services import Services
from forked_commands import Program, environment
from killed_runs import JOB, killed_run, left, version

pytestmark = pytest.mark.e2e


def test_a_run_whose_every_process_was_killed_goes_on_to_its_end_and_so_does_a_copy_beside_it(
    tmp_path: Path, job_name: str, redis_server: LocalRedis, doll: Program
) -> None:
    run = killed_run(doll, tmp_path, job_name)
    saved = version(run)
    assert saved >= 20
    goal = saved + 40
    copy = Path(shutil.copytree(run, tmp_path / "Kopie für später"))
    for change, words in (
        ("data.workers=3", "data.partitions: expected 2, got 3"),
        ("data.batch_size=16", "batch_size: expected 8, got 16"),
    ):
        refused = commands.doll("resume", run, "--set", change)
        assert refused.exit_code == 2
        assert words in refused.stderr
    more = ("--set", f"stop.updates={goal}", "--json")  # at once, and with one Redis
    runs = {path: doll.start("resume", path, *more, DOLL_REDIS=redis_server.address) for path in (run, copy)}
    for path, resumed in ((path, run.finished()) for path, run in runs.items()):
        assert resumed.returncode == 0, resumed.stderr
        report = json.loads(resumed.stdout)
        assert (report["updates"], report["samples"], report["kafka_kind"]) == (goal, goal * 16, "local")
        assert report["ps_resumes"] == 1
        audit = report["audit"]
        assert audit["ok"], audit
        assert (audit["applied"], audit["missing"], audit["duplicate"], audit["dead"]) == (goal * 16, 0, 0, 0)
        assert audit["produced"] == audit["applied"] + audit["pending"]
        valid = [int(row["version"]) for row in read_rows(path / "updates.csv") if not row["void"]]
        assert valid == list(range(1, goal + 1))
        assert version(path) == goal
        assert left(path) == []


def test_without_the_broker_s_data_it_says_what_is_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.yaml").write_text(JOB.format(job="gone"))
    nothing = commands.doll("resume", run)
    assert nothing.exit_code == 2
    assert "expected the folder of a run that has started" in nothing.stderr
    (run / "stack.json").write_text(json.dumps({"kafka": "127.0.0.1:9", "redis": "r", "kafka_kind": "local"}))
    gone = commands.doll("resume", run)
    assert gone.exit_code == 1
    assert re.search("data of the broker .* is gone.*doll export reads them", gone.stderr, re.DOTALL), gone.stderr


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An imitated S3 with a bucket `models`, as a user's shell would name it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    env = {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    boto3.session.Session().client("s3").create_bucket(Bucket="models")
    yield env
    server.stop()


def test_a_job_keeps_its_checkpoints_in_s3(
    tmp_path: Path, job_name: str, services: Services, s3_environment: dict[str, str], doll: Program
) -> None:
    """Through doll up, audit and export; the run folder holds no checkpoint. What has ended goes on to a later end."""
    import boto3

    env = environment(services)
    (tmp_path / "job.yaml").write_text(JOB.format(job=job_name))
    place = ["--set", f"checkpoint.folder=s3://models/{job_name}", "--set", "stop.updates=20"]
    done = doll("up", tmp_path / "job.yaml", "--parent-folder", tmp_path / "runs", "--json", *place, **env)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["updates"], report["audit"]["applied"], report["audit"]["ok"]) == (20, 320, True)
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "checkpoints").exists()
    listed = boto3.session.Session().client("s3").list_objects_v2(Bucket="models", Prefix=job_name)["Contents"]
    assert f"{job_name}/checkpoint-00000001-0000000020.doll" in [item["Key"] for item in listed]
    further = doll("resume", run, "--set", "stop.updates=30", "--json")
    assert further.returncode == 0, further.stderr
    assert json.loads(further.stdout)["audit"]["applied"] == 480
    assert json.loads((run / "report.previous.json").read_text())["updates"] == 20
    second_run_on_the_same_topics(doll, tmp_path, run, env)
    exported = commands.doll("export", run, "--out", tmp_path / "model", "--json")
    assert json.loads(exported.stdout)["version"] == 30
    warm = ("config", "check", tmp_path / "job.yaml", "--build-model", "--json", "--set")
    checked = commands.doll(*warm, f"training.init_from={{from: s3://models/{job_name}@30, strict: true}}")
    assert checked.exit_code == 0, checked.stderr
    assert json.loads(checked.stdout)["init_from"]["source"].startswith(f"version 30 of {job_name} (sha256 ")
    refused = commands.doll(*warm, "training.init_from=s3://models/nothing")
    assert refused.exit_code == 2
    assert "no checkpoint in s3://models/nothing" in refused.stderr


def second_run_on_the_same_topics(doll: Program, tmp_path: Path, first: Path, env: dict[str, str]) -> None:
    """The second run is refused with three options; as a new generation it reports nothing of the first run."""
    command = ("up", tmp_path / "job.yaml", "--parent-folder", tmp_path / "runs", "--set", "stop.updates=10", "--json")
    refused = commands.doll(*command, **env)
    assert refused.exit_code == 2, refused.stderr
    for words in ("hold an earlier run", f"doll resume {first}", "--fresh", "--set job="):
        assert words in refused.stderr
    assert list((tmp_path / "runs").iterdir()) == [first]
    fresh = doll(*command, "--fresh", **env)
    assert fresh.returncode == 0, fresh.stderr
    report = json.loads(fresh.stdout)
    assert (report["updates"], report["reason"], report["audit"]["applied"]) == (10, "updates: 10 reached", 160)
    (run,) = set((tmp_path / "runs").iterdir()) - {first}
    assert [int(row["version"]) for row in read_rows(run / "updates.csv")] == list(range(1, 11))
    over = commands.doll("resume", first, "--set", "stop.updates=40")
    assert over.exit_code == 2, over.stderr
    assert "a later run has begun on these topics" in over.stderr
