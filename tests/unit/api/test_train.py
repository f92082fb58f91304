"""What `doll.train` makes of its arguments, and what is known of a run that has no report."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import doll
import numpy as np
import pytest
from doll.api import run as runs
from doll.api.run import Run, RunFailedError
from doll.config import load
from doll.errors import ConfigError
from doll.run.local.resume import run_resume
from doll.task.base import Task


class Net(Task):
    num_classes = 2

    def __init__(self, sizes: object = None) -> None:
        self.sizes = sizes


class _Failing(Run):
    """A run whose process ends with an error."""

    def wait(self, timeout_s: float | None = None, *, progress: bool = True) -> dict[str, Any]:
        raise RunFailedError("its audit has failed", {"exit_code": 4})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "start", lambda folder, feeder: (feeder.close(), _Failing(folder))[1])


PAIRS = [([1.0, 2.0], 1), ([0.0, 1.0], 0)]


def test_a_failed_train_leaves_its_run_on_the_error(tmp_path: Path, started: None) -> None:
    with pytest.raises(RunFailedError) as failed:
        doll.train(Net, PAIRS, runs_folder=tmp_path)
    run = failed.value.run  # type: ignore[attr-defined]
    assert (run.folder.parent, load(run.folder / "job.yaml").job) == (tmp_path, "net")


def test_settings_may_be_numbers_of_numpy_tuples_and_paths(tmp_path: Path, started: None) -> None:
    settings = {
        "data.batch_size": np.int64(64), "training.optimizer": {"name": "sgd", "lr": np.float32(0.5)},
        "checkpoint.folder": tmp_path / "kept", "evaluation": {"enabled": np.bool_(False)},
    }  # fmt: skip
    with pytest.raises(RunFailedError) as failed:
        doll.train(
            Net, PAIRS, workers=np.int64(3),  # type: ignore[arg-type]
            stop={"samples": np.int64(9)}, args={"sizes": (np.int64(4), np.ones(2))},
            settings=settings, runs_folder=tmp_path,
        )  # fmt: skip
    config = load(failed.value.run.folder / "job.yaml")  # type: ignore[attr-defined]
    assert (config.data.batch_size, config.data.workers, config.stop.samples) == (64, 3, 9)
    assert (config.training.optimizer.model_dump()["lr"], config.evaluation.enabled) == (0.5, False)
    assert config.checkpoint.folder == tmp_path / "kept"
    assert config.task.args == {"sizes": [4, [1.0, 1.0]]}


def test_held_out_samples_are_taken_as_those_of_the_source_and_no_more_than_are_evaluated(
    tmp_path: Path, started: None
) -> None:
    x, y = np.ones((9, 2), np.float32), np.arange(9) % 2
    with pytest.raises(RunFailedError) as failed:
        doll.train(
            Net, (x, y), held_out=(x, y), settings={"evaluation.max_samples": 4}, runs_folder=tmp_path
        )  # fmt: skip
    folder = failed.value.run.folder  # type: ignore[attr-defined]
    from doll.task.pairs import decode, read_records

    assert [int(decode(record).y) for record in read_records(folder / "held_out.records")] == [0, 1, 0, 1]
    for wrong, says in (
        (7, "held_out: expected an iterable"),
        ({"x": x}, "held_out: expected samples.*got one of 'x'"),
    ):
        with pytest.raises(ConfigError, match=says):
            doll.train(Net, PAIRS, held_out=wrong, runs_folder=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"source: expected samples.*got one of 'x', 'y': give arrays as \(X, y\)"):
        doll.train(Net, {"x": x, "y": y}, runs_folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()


UPDATES = "time_s,term,version,n_samples,samples_total,void\n1.0,1,1,8,8,0\n2.0,1,2,8,16,0\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, (0, 0)), (UPDATES[:48], (0, 0)), (UPDATES, (2, 16)), (UPDATES + "3.0,1,3,8,24,1\n", (2, 16)),
        (UPDATES + "3.0,1,3,8,2", (2, 16)),
    ],
)  # fmt: skip
def test_a_killed_run_has_the_version_and_samples_of_its_last_update(
    tmp_path: Path, content: str | None, expected: tuple[int, int]
) -> None:
    if content is not None:
        (tmp_path / "updates.csv").write_text(content)
    run = Run(tmp_path)
    assert (run.version, run.samples) == expected
    assert f"version {expected[0]}, {expected[1]} samples" in repr(run)


def test_resume_of_a_run_whose_program_has_gone_says_so_before_anything_starts(tmp_path: Path, started: None) -> None:
    with pytest.raises(RunFailedError) as failed:
        doll.train(Net, PAIRS, runs_folder=tmp_path)
    folder = failed.value.run.folder  # type: ignore[attr-defined]
    (folder / "stack.json").write_text("{}")
    before = sorted(path.name for path in folder.iterdir())
    says = "expected the program that feeds this run, which has ended.*doll resume RUN --set source=null"
    with pytest.raises(ConfigError, match=says):
        run_resume(folder, [])
    with socket.socket(socket.AF_UNIX) as left:  # by a program that was killed: nobody listens
        left.bind(str(tmp_path / "feed.sock"))
    with pytest.raises(ConfigError, match=says):
        run_resume(folder, [f"source.socket={tmp_path / 'feed.sock'}"])
    assert sorted({path.name for path in folder.iterdir()} - {".lock", "lock"}) == before
