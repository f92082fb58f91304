"""A run folder that was copied, moved or restored: each command that takes one works on that folder, and never on the
one that it was made from."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import typer
from commands import doll
from doll.cli.app import app
from doll.config import load
from doll.errors import ServiceUnavailableError
from doll.monitor.state.progress import ProgressModel
from doll.monitor.views.run_report import RunOutcome, build_report
from doll.run.folder import RunFolder
from doll.services import Services
from doll.storage.stores import open_store
from logged_runs import JOB, LoggedRun

pytestmark = pytest.mark.slow  # loads torch

COLUMNS = "time_s,term,version,n_samples,samples_total,prequential_loss,prequential_accuracy,weight,void"
GONE = 1  # what a command says that needs the run's Kafka, which `doll resume` starts
COMMANDS: dict[str, tuple[tuple[str, ...], int]] = {
    "up": ((), 0),
    "resume": ((), 0),
    "regrid": (("--batch-size", "8"), 0),
    "rollback": (("--to", "3", "--skip"), 0),
    "scale": (("--workers", "2"), GONE),
    "status": ((), 0),
    "dashboard": (("--port", "0"), 0),
    "audit": ((), GONE),
    "topics": (("--create",), GONE),
    "versions list": ((), 0),
    "versions show": (("latest",), 0),
    "versions diff": (("3", "latest"), 0),
    "versions compare": (("3", "latest"), GONE),
    "versions value": (("--version", "3", "--reward", "clicked"), GONE),
    "versions alias": (("stable", "3"), 0),
    "versions freeze": (("stable",), 0),
    "versions pin": (("latest",), 0),
    "versions unpin": (("3",), 0),
    "export": ((), 0),
    "replay": (("--to", "latest"), 0),
    "forget": (("--offset", "0/0"), GONE),
    "serve": ((), 0),
    "ps": ((), GONE),
    "worker": (("--worker", "0"), GONE),
    "produce": ((), GONE),
    "evaluate": ((), GONE),
    "prometheus": ((), GONE),
    "lineage": ((), GONE),
    "bill": ((), 2),  # as the next one
    "provision status": ((), 2),  # no machine was provisioned
    "doctor": ((), GONE),
    "dead list": ((), 0),
    "dead show": ((), 0),
    "dead replay": ((), GONE),
    "calibrate": (("--measure", "loss", "--target-error", "0.5"), 0),
    "config show": ((), 0),
    "config check": (("--build-model",), 0),
}


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    handlers = list(logging.getLogger().handlers)
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, on a broker of its own."""
    folder = tmp_path_factory.mktemp("original") / "line"
    run = RunFolder(folder)
    (folder / "events").mkdir(parents=True)
    source = tmp_path_factory.mktemp("jobs") / "line.yaml"
    stream = "{kind: python, of: examples.synthetic.source:gaussians, args: {features: 5, classes: 2}}"
    source.write_text(f"{JOB}source: {stream}\nstop: {{updates: 9}}\n")
    config = load(source, [f"checkpoint.folder={folder / 'checkpoints'}", "checkpoint.keep=3"])
    run.write_job(config)
    run.write_stack(Services("127.0.0.1:1", "redis://127.0.0.1:1/0"), kafka_kind="local")
    server = LoggedRun(folder / "events", open_store(load(run.job), folder), seed=1)
    server.play(9)
    server.terminate()
    store = open_store(load(run.job), folder)
    store.change_marks(lambda marks: marks.with_pin(3))
    data = folder / "services" / "kafka" / "data"
    data.mkdir(parents=True)
    (data / "meta.properties").write_text("cluster.id=x\n")
    report = build_report(ProgressModel(config, 0.0), RunOutcome("updates", 0, 3.5), None)
    run.report.write_text(json.dumps(report))
    (folder / "updates.csv").write_text(f"{COLUMNS}\n100.0,1,1,16,16,0.9,0.1,16,0\n")
    (folder / "evaluations.csv").write_text("time_s,term,version,loss,accuracy,void\n100.5,1,1,0.8,0.25,0\n")
    run.dead.write_text("[]")
    return folder


@pytest.fixture(scope="module")
def archive(original: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(original, original.name)
    return content.getvalue()


def restored(archive: bytes, parent: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(parent, filter="data")


def checksum(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


@pytest.fixture(params=["cp -r", "mv", "tar"])
def copy(request: pytest.FixtureRequest, original: Path, archive: bytes, tmp_path: Path) -> Iterator[Path]:
    """The run in another place; at the end the original is as it was before, or still not there."""
    before, made = checksum(original), tmp_path / "elsewhere" / original.name
    made.parent.mkdir()
    match request.param:
        case "cp -r":
            shutil.copytree(original, made)
        case "mv":
            shutil.move(original, made)
        case "tar":
            restored(archive, made.parent)
    yield made
    try:
        assert request.param == "mv" or checksum(original) == before
        assert request.param != "mv" or not original.exists()
    finally:
        shutil.rmtree(original, ignore_errors=True)
        restored(archive, original.parent)


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Where something was to be run, without running it: its folder, and that of its checkpoints."""
    used: list[Path] = []

    def run_in(folder: RunFolder, config: Any, **_: Any) -> dict[str, Any]:
        used.extend((folder.path, Path(open_store(config, folder.path).location)))
        return build_report(ProgressModel(config, 0.0), RunOutcome("updates", 0, 3.5), None)

    def run_serve(served: Any, options: Any, **_: Any) -> int:
        assert served.find_services() is None
        used.append(Path(open_store(served.config, served.run_folder).location))
        return 0

    def local_stack(config: Any, folder: Path, say: Any) -> Any:
        used.append(folder)
        raise ServiceUnavailableError("no broker is started in this test")

    monkeypatch.setattr("doll.run.forgetting.forget.local_stack", local_stack)
    monkeypatch.setattr("doll.run.local.up.run_in", run_in)
    monkeypatch.setattr("doll.run.local.resume.run_in", run_in)
    monkeypatch.setattr("doll.serving.main.run_serve", run_serve)
    monkeypatch.setattr("doll.run.page.serve_page", lambda *_, **__: None)
    for name in ("DOLL_KAFKA", "DOLL_REDIS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return used


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_leaves_the_original_as_it_is(command: str, copy: Path, tmp_path: Path, runs: list[Path]) -> None:
    more, code = COMMANDS[command]
    if command in ("doctor", "provision status"):  # no argument of theirs names a run folder
        result = doll(*command.split(), "--job", copy, *more)
    else:
        result = doll(*command.split(), copy, *more)
    assert result.exit_code == code, (result.output, result.exception)
    assert "nothing has been learned" not in result.output
    assert all(path.is_relative_to(tmp_path) for path in runs)


def test_each_command_that_takes_a_run_is_tried() -> None:
    def takers(group: Any, path: str = "") -> Iterator[str]:
        for name in group.commands:
            item = group.get_command(None, name)
            if hasattr(item, "commands"):
                yield from takers(item, f"{path}{name} ")
            elif any(p.param_type_name == "argument" and "RUN" in (p.metavar or "") for p in item.params):
                yield f"{path}{name}"

    with_run = set(takers(typer.main.get_command(app)))
    assert with_run <= set(COMMANDS), "commands without a row above"
    assert len(with_run) > 20
