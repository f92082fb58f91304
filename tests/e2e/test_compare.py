"""`doll compare` as a user runs it: two policies live on the same stream, and one that is stopped half-way."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from doll.config import load
from doll.services import Services
from forked_commands import Command, Program, environment
from waiting import until

pytestmark = pytest.mark.e2e

JOB = """
job: both
task: {class: "examples.synthetic.task:Gaussian", args: {features: 4}}
data: {workers: 2, batch_size: 8}
source: {kind: python, of: examples.synthetic.source:gaussians, args: {features: 4, classes: 2}}
arrivals: {process: poisson, rate_per_s: 60}
training: {policy: {name: doll, group_size: 2}, optimizer: {name: sgd, lr: 0.05}}
checkpoint: {every_updates: 5, every_s: 0.5}
plan: {on_demand_usd_per_h: 3.6}
stop: {samples: 800}
"""


def start(doll: Program, folder: Path, services: Services, *arguments: str) -> Command:
    """`doll compare` in `folder`."""
    (folder / "job.yaml").write_text(JOB)
    command = ("compare", "job.yaml", "--json", *arguments)
    return doll.start(*command, err=folder / "err", cwd=folder, **environment(services))


def result(process: Command, folder: Path) -> tuple[int, dict[str, Any]]:
    done = process.finished()
    assert done.stdout, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    (compared,) = (folder / "runs").iterdir()
    assert printed == json.loads((compared / "comparison.json").read_text())
    assert "Loss over samples" in (compared / "comparison.html").read_text()
    return done.returncode, printed


def assert_the_page_shows_the_first_run(folder: Path) -> None:
    """While the second one is under way, the page has the first one, done, and opens it."""
    said = folder / "err"
    until(lambda: "page: " in said.read_text(errors="replace"), "the address of the page")
    port = int(said.read_text(errors="replace").partition("page: http://127.0.0.1:")[2].split()[0])
    runs: dict[str, Any] = {}

    def is_done() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/events", timeout=60) as stream:
                stream.readline()
                runs.update(json.loads(stream.readline().removeprefix(b"data: "))["runs"])
        except urllib.error.URLError:  # it begins
            return False
        return any(run["tone"] == "good" for run in runs.values())

    until(is_done, lambda: f"the first run, got {runs}, and {said.read_text()}")
    name = next(name for name, run in runs.items() if run["tone"] == "good")
    assert runs[name]["label"] == "bsp"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/runs/{name}/", timeout=60) as answer:
        assert b"Is it learning?" in answer.read()


def test_two_policies_learn_from_the_same_stream(tmp_path: Path, services: Services, doll: Program) -> None:
    process = start(doll, tmp_path, services, "--policies", "bsp,doll:group_size=1")
    assert_the_page_shows_the_first_run(tmp_path)
    code, printed = result(process, tmp_path)
    assert code == 0, (tmp_path / "err").read_text()
    assert printed["loss"] == "prequential", "this task has no held-out samples"
    bsp, grouped = printed["policies"]
    assert [bsp["policy"], grouped["policy"]] == ["bsp", "doll:group_size=1"]
    for row in (bsp, grouped):
        assert row["ok"], row
        assert row["samples"] >= 800
        assert row["final_loss"] < 1.0
        assert row["seconds_to_loss"] is not None
        assert row["usd"] == pytest.approx(2 * 3.6 * row["seconds"] / 3600)
        audit = json.loads((Path(row["folder"]) / "report.json").read_text())["audit"]
        assert (audit["ok"], audit["missing"], audit["duplicate"]) == (True, 0, 0)
    assert set(bsp["staleness"]["histogram"]) == {"-1"}
    assert (bsp["updates"], grouped["updates"]) == (50, 100)
    # A gradient is 4 x 2 + 2 float32 behind 128 bytes; bsp sends one for each batch.
    assert bsp["bytes"]["gradients"] == bsp["bytes"]["gradients_dense"] == 100 * (128 + 40)
    assert bsp["bytes"]["weights"] == 100 * (128 + 40)
    jobs = [load(Path(row["folder"]) / "job.yaml") for row in (bsp, grouped)]
    assert len({config.job for config in jobs}) == 2, "topics of its own for each"
    first, second = ((config.seed, config.source, config.arrivals, config.data, config.stop) for config in jobs)
    assert first == second


def test_ctrl_c_ends_the_run_under_way_and_shows_what_has_run(
    tmp_path: Path, services: Services, doll: Program
) -> None:
    process = start(doll, tmp_path, services, "--policies", "doll,bsp", "--set", "stop.samples=1000000")

    def is_learning() -> bool:
        assert process.poll() is None, (tmp_path / "err").read_text()
        return any(int(path.stem[-10:]) > 0 for path in tmp_path.glob("runs/*/*/checkpoints/*.doll"))

    until(is_learning, lambda: "the first checkpoint")
    process.send_signal(signal.SIGINT)
    code, printed = result(process, tmp_path)
    assert code == 1
    assert printed["not_run"] == ["bsp"]
    (row,) = printed["policies"]
    assert (row["policy"], row["outcome"]) == ("doll", "stopped by you")
    assert row["ok"], "it ended in order, and its audit holds"
    assert row["updates"] > 0
    assert row["staleness"]["reads"] > 0
