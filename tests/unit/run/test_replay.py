"""`doll replay`: a version from the event logs of a run, to the bit; what no log makes is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
from commands import doll
from doll.config import dump, load, parse
from doll.errors import ConfigError
from doll.ps.event_log import FileEventLog, read_log
from doll.ps.rollback import rollback
from doll.run.folder import RunFolder
from doll.run.replay import replay_version
from doll.storage.stores import open_store
from logged_runs import JOB, LoggedRun
from safetensors.numpy import load_file

pytestmark = pytest.mark.slow  # loads torch


def played(run: Path, seed: int, *overrides: str) -> dict[int, bytes]:
    """One server of the run; the weights of each version that it has made."""
    server = LoggedRun(run / "events", open_store(load(run / "job.yaml"), run), *overrides, seed=seed)
    server.play(9)
    server.close()
    return server.weights


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "events").mkdir()
    config = parse(JOB, ["checkpoint.keep=3", "stop.updates=2"])  # of the last session
    (tmp_path / "job.yaml").write_text(dump(config))
    (tmp_path / "stack.json").write_text('{"kafka": "", "redis": ""}')
    return tmp_path


def test_any_version_is_made_again_also_one_that_was_left(run: Path, tmp_path: Path) -> None:
    first = played(run, 1)
    store = open_store(load(run / "job.yaml"), run)
    to = store.versions()[0][1]
    newest = store.versions()[-1][1]
    rollback(load(run / "job.yaml"), store, to, skip=False)
    second = played(run, 2)
    assert min(second) == newest + 1
    last = store.versions()[-1][1]
    for version, weights in {2: first[2], newest: first[newest], last: second[last]}.items():
        made = replay_version(RunFolder(run), str(version), tmp_path / "out")
        assert (made.version, made.content["version"]) == (version, version)
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert b"".join(tensors[name].tobytes() for name in made.content["tensors"]) == weights
    assert made.is_kept
    assert "equal to its checkpoint to the bit" in made.text()
    shown = doll("replay", run, "--to", "latest", "--out", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert f"version {last} from ps-" in shown.stdout


def test_a_version_from_before_a_change_of_the_job_file_is_made_with_the_one_of_then(run: Path, tmp_path: Path) -> None:
    """`doll resume --set` may change what decides over each update: each server's log has its own job file."""
    first = played(run, 1)
    newest = open_store(load(run / "job.yaml"), run).versions()[-1][1]
    (run / "job.yaml").write_text(dump(parse(JOB, ["training.optimizer.lr=0.2"])))
    second = played(run, 2, "training.optimizer.lr=0.2")
    for version, weights in {2: first[2], newest - 1: first[newest - 1], max(second): second[max(second)]}.items():
        made = replay_version(RunFolder(run), str(version), tmp_path / "out")
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert b"".join(tensors[name].tobytes() for name in made.content["tensors"]) == weights


def test_what_no_log_makes_is_refused(run: Path) -> None:
    refused = doll("replay", run, "--to", "3")
    assert (refused.exit_code, "expected event logs in events/, got none" in refused.output) == (2, True)
    weights = played(run, 1)
    for to, says in (
        (str(max(weights) + 1), "expected a version that its event logs make"),
        ("stable", "an alias (none) or latest, got 'stable'"),
        ("../1", "got '../1'"),
    ):
        refused = doll("replay", run, "--to", to)
        assert (refused.exit_code, says in " ".join(refused.output.split())) == (2, True), refused.output
    # The job file of another session.
    (path,) = (run / "events").iterdir()
    start, entries = read_log(path)
    kept = [*entries]
    path.unlink()
    config = parse(JOB, ["training.optimizer.lr=0.2"])
    log = FileEventLog(path, msgspec.structs.replace(start, job=dump(config)))
    for entry in kept:
        log.write(entry.event, entry.now, entry.gradient)
    log.close()
    with pytest.raises(ConfigError, match=r"since then was changed: training.optimizer.lr: expected 0.1, got 0.2"):
        replay_version(RunFolder(run), "3", run / "out")


def test_a_checkpoint_that_differs_is_noticed(run: Path) -> None:
    played(run, 1)
    store = open_store(load(run / "job.yaml"), run)
    newest = store.load_newest(None)
    assert newest is not None
    weights = np.array(newest.tensors["weights"])
    weights[0] = np.nextafter(weights[0], np.float32(9))
    store.save(dataclasses.replace(newest, tensors={**newest.tensors, "weights": weights}))
    with pytest.raises(ConfigError, match="differs from the checkpoint of term 1"):
        replay_version(RunFolder(run), "latest", run / "out")
