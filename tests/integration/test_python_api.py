"""`doll.train` on real services: from a program's samples to an audited model."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import doll
import numpy as np
import pytest
from doll.errors import ConfigError
from doll.monitor.state.folder_logs import EventLog
from doll.services import Services

pytestmark = [pytest.mark.slow, pytest.mark.integration]  # starts servers

_SETTINGS = {"training.optimizer": {"name": "sgd", "lr": 0.1}, "data.batch_size": 32}
_STOP = {"samples": 1600}
_RNG = np.random.default_rng(0)
_CENTRES = _RNG.normal(size=(3, 8)).astype(np.float32)


class Blobs(doll.Task):
    num_classes = 3

    def build_model(self) -> Any:
        import torch

        return torch.nn.Linear(8, 3)


def _pairs(seed: int = 0) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    rng = np.random.default_rng(seed)
    while True:
        label = int(rng.integers(3))
        yield _CENTRES[label] + rng.normal(0, 0.3, 8).astype(np.float32), label


@pytest.fixture
def shared(services: Services, job_name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A name for a job on the session's broker and Redis: it starts none of its own."""
    monkeypatch.setenv("DOLL_KAFKA", services.kafka)
    monkeypatch.setenv("DOLL_REDIS", services.redis)
    return job_name


def _trained(folder: Path, name: str) -> tuple[doll.Run, list[tuple[np.ndarray[Any, Any], int]]]:
    """A run of pairs of a generator, and its held-out pairs."""
    held_out = [pair for pair, _ in zip(_pairs(1), range(200), strict=False)]
    run = doll.train(
        Blobs, _pairs(), name=name, held_out=held_out, stop=_STOP, settings=_SETTINGS, runs_folder=folder,
        progress=False,
    )  # fmt: skip
    return run, held_out


def test_pairs_of_a_generator_become_an_audited_model(tmp_path: Path, shared: str) -> None:
    run, held_out = _trained(tmp_path, shared)
    assert not run.is_running
    assert run.samples >= _STOP["samples"]
    audit = run.audit()
    assert (audit["ok"], audit["applied"]) == (True, run.samples)
    table = run.metrics(frame="dict")
    assert int(float(table["samples_total"][-1])) == run.samples
    assert run.report["job"] == shared
    _check_model(run, held_out)
    again = doll.open(run.folder)
    assert (again.samples, again.version) == (run.samples, run.version)
    _check_model(again, held_out)


def test_a_run_goes_on_with_more_samples_and_another_begins_with_its_weights(tmp_path: Path, shared: str) -> None:
    run, held_out = _trained(tmp_path, shared)
    # In the same folder and with the same audit.
    before = run.samples
    more = doll.train(source=itertools.islice(_pairs(3), 320), resume=run, progress=False)
    assert more.folder == run.folder
    assert more.samples >= before + 320
    assert more.audit()["applied"] == more.samples
    _check_model(more, held_out)
    with pytest.raises(ConfigError, match="resume: expected only source, stop and settings"):
        doll.train(Blobs, _pairs(3), resume=run)
    with pytest.raises(ConfigError, match="a run that has ended, and a source"):
        doll.train(resume=run)

    # Another run begins with its weights: one more update leaves them as good as they are.
    warm = doll.train(
        Blobs, _pairs(2), name=f"{shared}-warm", init_from={"from": run.folder, "strict": True}, stop={"updates": 1},
        settings=_SETTINGS, runs_folder=tmp_path / "warm", progress=False,
    )  # fmt: skip
    report = json.loads((warm.folder / "init_from.json").read_text())
    assert (report["taken"], report["source"].partition(" (")[0]) == (
        ["weight", "bias"], f"version {run.version} of {shared}"
    )  # fmt: skip
    assert warm.version < 5
    _check_model(warm, held_out)


def _check_model(run: doll.Run, held_out: list[tuple[np.ndarray[Any, Any], int]]) -> None:
    import torch

    x, y = np.stack([x for x, _ in held_out]), np.array([label for _, label in held_out])
    with torch.no_grad():
        predicted = run.model()(torch.from_numpy(x)).argmax(dim=1).numpy()
    assert (predicted == y).mean() > 0.9


def test_a_killed_producer_loses_and_repeats_nothing_and_stop_ends_in_order(tmp_path: Path, shared: str) -> None:
    given: list[int] = []

    def counted() -> Iterator[tuple[np.ndarray[Any, Any], int]]:
        for x, label in _pairs():
            given.append(label)
            yield x, label

    settings = {**_SETTINGS, "arrivals": {"process": "poisson", "rate_per_s": 400}}
    run = doll.train(Blobs, counted(), name=shared, settings=settings, runs_folder=tmp_path, wait=False, progress=False)
    _until(run, lambda: run.samples > 300)
    producer = json.loads((run.folder / "roles.json").read_text())["producer"]
    os.kill(producer, signal.SIGKILL)
    before = run.samples
    _until(run, lambda: run.samples > before + 1500)
    assert run.audit()["ok"]
    report = run.stop(progress=False)
    assert report["exit_code"] == 0
    assert report["restarts"] == 1
    assert [event.restarted for event in EventLog(run.folder).read()] == ["producer"]
    assert run.audit()["ok"]


def _until(run: doll.Run, holds: Any) -> None:
    """Wait by the run's own events; it fails where the run ends before."""
    process = run._process
    assert process is not None
    while not holds():
        assert run.is_running, run.wait(progress=False)
        process._events.get(timeout=120)


def test_what_the_source_raises_ends_the_run_in_order(tmp_path: Path, shared: str) -> None:
    def broken() -> Iterator[tuple[np.ndarray[Any, Any], int]]:
        for number, pair in enumerate(_pairs()):
            if number == 500:
                raise ZeroDivisionError("in the program's generator")
            yield pair

    with pytest.raises(ZeroDivisionError, match="in the program's generator"):
        doll.train(Blobs, broken(), name=shared, settings=_SETTINGS, runs_folder=tmp_path, progress=False)
    (folder,) = tmp_path.iterdir()
    assert doll.open(folder).audit()["ok"]


def test_what_cannot_begin_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(doll.ConfigError, match=r"training\.policy"):
        doll.train(Blobs, _pairs(), policy="bspp", runs_folder=tmp_path)
    with pytest.raises(doll.ConfigError, match=r"expected a subclass of doll\.Task"):
        doll.train(int, _pairs(), runs_folder=tmp_path)
    with pytest.raises(doll.ConfigError, match="expected an iterable"):
        doll.train(Blobs, 7, runs_folder=tmp_path)
    for init_from, words in (
        (tmp_path / "none", "expected a run folder"), ("gs://bucket/x", "expected s3://bucket/prefix of a URL"),
        ({"from": tmp_path, "strikt": True}, "strikt: unknown key"),
    ):  # fmt: skip
        with pytest.raises(doll.ConfigError, match=rf"training\.init_from.*{words}"):
            doll.train(Blobs, _pairs(), init_from=init_from, runs_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    class Broken(Blobs):
        def build_model(self) -> Any:
            raise ValueError("no such layer")

    with pytest.raises(doll.ConfigError, match="no such layer"):
        doll.train(Broken, _pairs(), runs_folder=tmp_path, progress=False)


_SCRIPT = """
import sys
import numpy as np
import torch
import doll

class Net(doll.Task):
    num_classes = 2
    def build_model(self):
        return torch.nn.Linear(4, 2)

def stream():
    rng = np.random.default_rng(0)
    while True:
        x = rng.normal(size=4).astype(np.float32)
        yield x, int(x[0] > 0)

run = doll.train(Net, stream(), settings={"data.batch_size": 16}, runs_folder=sys.argv[1], wait=False)
print(run.folder, flush=True)
run.wait()
print("audit", run.audit()["ok"], run.samples > 0, flush=True)
"""


def test_an_interrupt_ends_a_script_s_run_in_order_and_its_death_ends_all_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT))
    for number, killed in ((signal.SIGINT, False), (signal.SIGKILL, True)):
        with subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "runs")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            folder = Path(process.stdout.readline().strip())
            for line in process.stderr:
                if line.startswith("version") and not line.startswith("version 0,"):
                    break
            pids = json.loads((folder / "roles.json").read_text())
            process.send_signal(number)
            out = process.stdout.read()
            process.stderr.read()
        assert ("audit True True" in out) is not killed
        for pid in pids.values():
            _wait_for_end(pid)


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    ended, _, _ = select.select([descriptor], [], [], 30)
    os.close(descriptor)
    assert ended, pid


class Visits(doll.Task):
    """Dicts and sequences of different lengths, with weights."""

    def build_model(self) -> Any:
        from tree_tasks import TwoInputs

        return TwoInputs()

    def collate(self, samples: Sequence[doll.Sample]) -> Any:
        from tree_tasks import Texts

        return Texts.collate(self, samples)  # type: ignore[arg-type]

    def losses(self, output: Any, target: Any) -> Any:
        from tree_tasks import Texts

        return Texts.losses(self, output, target)  # type: ignore[arg-type]


def test_dicts_sequences_and_weights_become_an_audited_model_that_its_event_log_makes_again(
    tmp_path: Path, shared: str
) -> None:
    from doll.config import load
    from doll.storage.stores import open_store
    from tree_tasks import visit

    from doll_lab.drill.replay_check import check_replay

    rng = np.random.default_rng(0)
    samples = [doll.Sample(*visit(rng, int(rng.integers(1, 513))), weight=float(rng.integers(3))) for _ in range(1600)]
    held_out = [visit(rng, 1 + at) for at in range(60)]
    run = doll.train(
        Visits, samples, name=shared, held_out=held_out, runs_folder=tmp_path, progress=False,
        settings={**_SETTINGS, "checkpoint.event_log": True},
    )  # fmt: skip
    audit = run.audit()
    assert (audit["ok"], audit["applied"], audit["dead"]) == (True, 1600, 0)
    assert 0 < run.report["loss"] < 3
    table = run.metrics(frame="dict")
    weights = [float(value) for value in table["weight"]]
    assert sum(weights) == sum(sample.weight for sample in samples)
    config = load(run.folder / "job.yaml")
    replayed = check_replay(config, run.folder / "events", open_store(config, run.folder).load_newest(None))
    assert (replayed.terms, replayed.differences) == (1, ())
