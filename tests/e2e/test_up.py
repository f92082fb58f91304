"""`doll up` as a user runs it: with its own broker and Redis, a report, and nothing left behind, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray_cluster
from doll.services import Services
from forked_commands import Command, Program
from paths import EXAMPLES
from process_checks import is_gone
from waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("startable_broker")]


OWN_JOB = """
job: mine
task: {class: churn.py:Churn}
data: {workers: 2, batch_size: 16}
source: {kind: jsonl, path: events.jsonl, repeat: true}
arrivals: {process: poisson, rate_per_s: 200}
training: {policy: {name: doll, group_size: 2}, optimizer: {name: sgd, lr: 0.1, momentum: 0.9}}
"""


class Up:
    """One `doll up`, with what it started.

    Args:
        program: that it is forked from; else it is a new interpreter, as a user has it.
    """

    def __init__(self, folder: Path, *arguments: str, program: Program | None = None) -> None:
        self.runs, self.folder = folder / "runs", folder
        arguments = ("up", *arguments, "--parent-folder", str(self.runs), "--json")
        self.process: subprocess.Popen[bytes] | Command
        if program is not None:
            self.process = program.start(*arguments, out=folder / "out", err=folder / "err", cwd=folder)
            return
        # No DOLL_KAFKA or DOLL_REDIS: it starts its own.
        hidden = ("DOLL_KAFKA", "DOLL_REDIS")
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "doll", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                start_new_session=True,  # as two users have it: a signal to one is not a signal to the other
                env={key: value for key, value in os.environ.items() if not key.startswith(hidden)},
            )

    @property
    def said(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    @property
    def run(self) -> Path:
        (folder,) = self.runs.iterdir()
        return folder

    def until_learning(self) -> None:
        """A model is durable."""

        def durable() -> bool:
            # Version 0 is saved before anybody learns.
            has_checkpoint = any(int(path.stem[-10:]) > 0 for path in self.runs.glob("*/checkpoints/*.doll"))
            assert has_checkpoint or self.process.poll() is None, f"ended before the first checkpoint\n{self.said}"
            return has_checkpoint

        until(durable, lambda: f"the first checkpoint\n{self.said}")

    def report(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """The report of its orderly end, with exit code 0."""
        assert self.process.wait(timeout_s) == 0, self.said
        printed: dict[str, Any] = json.loads((self.folder / "out").read_text())
        assert printed == json.loads((self.run / "report.json").read_text())
        return printed

    def failed(self, exit_code: int, timeout_s: float = 600.0) -> dict[str, Any]:
        """The report of an end with this exit code."""
        assert self.process.wait(timeout_s) == exit_code, self.said
        printed: dict[str, Any] = json.loads((self.folder / "out").read_text())
        return printed

    def started(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def ports(self) -> list[int]:
        stack = json.loads((self.run / "stack.json").read_text())
        return [int(stack[name].removesuffix("/0").rpartition(":")[2]) for name in ("kafka", "redis")]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    running: list[Up] = []

    def start(*arguments: str, files: dict[str, str] | None = None, program: Program | None = None) -> Up:
        folder = tmp_path / f"user-{len(running)}"
        folder.mkdir()
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        running.append(Up(folder, *arguments, program=program))
        return running[-1]

    yield start
    for job in running:
        job.process.kill()
        job.process.wait()


def is_closed(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def assert_nothing_left(processes: list[psutil.Process], ports: list[int]) -> None:
    def left() -> list[psutil.Process | int]:
        return [process for process in processes if not is_gone(process)] + [
            port for port in ports if not is_closed(port)
        ]

    until(lambda: not left(), lambda: f"the end of {left()}")


def assert_audit_ok(report: dict[str, Any]) -> None:
    audit = report["audit"]
    assert audit["ok"]
    assert (audit["missing"], audit["duplicate"], audit["dead"], audit["violations"]) == (0, 0, 0, [])
    assert audit["produced"] == audit["applied"] + audit["pending"]
    assert audit["applied"] == report["samples"] > 0
    assert report["restarts"] == 0


def merged(state: Any, patch: Any) -> Any:
    """The state after a merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    after = dict(state) if isinstance(state, dict) else {}
    for name, value in patch.items():
        if value is None:
            after.pop(name, None)
        else:
            after[name] = merged(after.get(name), value)
    return after


class Browser:
    """A browser that opens the page at its address in the output, and stays open until the server ends."""

    def __init__(self, job: Up) -> None:
        until(lambda: "page: http://" in job.said or job.process.poll() is not None, lambda: job.said)
        address = re.search(r"page: (http://127\.0\.0\.1:\d+)", job.said)
        assert address is not None, job.said
        self._state: dict[str, Any] = {}

        def is_open() -> bool:  # the address is printed while the server starts
            with contextlib.suppress(urllib.error.URLError):
                self._stream = urllib.request.urlopen(f"{address[1]}/events", timeout=600)
            return hasattr(self, "_stream")

        until(is_open, lambda: f"the page at {address[1]}\n{job.said}")

    def assert_it_shows_a_job_that_learns(self) -> None:
        """What the job sent before and after is read in its order, so the job may have ended meanwhile."""
        while kind := self._stream.readline():
            data = json.loads(self._stream.readline().removeprefix(b"data: "))
            assert self._stream.readline() == b"\n"
            if kind != b"event: beat\n":
                self._state = merged({} if kind == b"event: state\n" else self._state, data)
            questions = self._state["questions"]
            if len(self._state["curves"]["samples"]) > 1 and questions["safety"]["tone"] == "good":
                assert self._state["job"]["name"] == "digits"
                assert questions["work"]["verdict"] == "4 of 4 workers are live"
                return
        pytest.fail(f"the page ended before it showed that the job learns: {self._state}")

    def rest(self) -> Future[bytes]:
        """What comes until the server ends."""
        return ThreadPoolExecutor(1).submit(self._stream.read)


def test_the_digits_example_shortened(up: Any) -> None:
    """Exit code, report, and no more updates than Eq. (1) of the paper predicts: 4 x 125 / (4 x 32) a second."""
    updates = 40
    job = up(str(EXAMPLES / "digits" / "job.yaml"), "--set", f"stop={{updates: {updates}}}", "--set", "log.format=json")
    browser = Browser(job)
    job.until_learning()
    processes, ports = job.started(), job.ports()
    browser.assert_it_shows_a_job_that_learns()
    sent = browser.rest()
    report = job.report()
    assert b"yes: by the audit each offset is in one update" in sent.result(60)  # in a browser that has stayed open
    assert report["exit_code"] == 0
    assert report["error"] is None
    assert (report["job"], report["updates"], report["samples"]) == ("digits", updates, updates * 128)
    assert report["seconds"] > 8  # what arrives at 500 a second sets the pace
    assert report["accuracy"] > 0.5  # ten classes
    assert 0 < report["loss"] < 2.0
    assert report["evaluated_version"] == updates
    assert report["update_rate_predicted_per_s"] == pytest.approx(500 / 128)
    assert 0 < report["update_rate_measured_per_s"] < 1.1 * 500 / 128  # a busy machine makes less of it
    assert_audit_ok(report)
    assert report["audit"]["applied"] == updates * 128
    for name in ("report.json", "audit.json", "updates.csv", "evaluations.csv", "report.html", "job.yaml"):
        assert (job.run / name).stat().st_size > 0, name
    assert (job.run / "model" / "model.safetensors").stat().st_size > 4 * 64 * 128
    logs = {path.stem: path.read_text().splitlines() for path in (job.run / "logs").glob("*.log")}
    roles = {name for name in logs if name.startswith(("ps", "worker", "evaluator", "producer"))}
    assert len(roles) == 7
    for name in roles:  # Faust's warnings too; it also writes control sequences of its own
        assert {json.loads(line)["process"] for line in logs[name]} == {name}
    assert_nothing_left(processes, ports)


CSV_JOB = """
job: rows
task: {class: rows.py:Rows}
data: {workers: 3, partitions: 4, batch_size: 16}
source: {kind: csv, path: rows.csv}
arrivals: {process: asap}
training: {policy: {name: doll, group_size: 7}, optimizer: {name: sgd, lr: 0.1}}
evaluation: {enabled: false}
"""
CSV_TASK = """
import numpy as np
import torch
import doll


class Rows(doll.Task):
    num_classes = 2

    def build_model(self):
        return torch.nn.Linear(2, 2)

    def decode(self, record):
        a, b, y = record.decode().split(",")
        return doll.Sample(np.array([a, b], np.float32), int(y))
"""


def test_a_file_is_learned_to_its_last_record(tmp_path: Path, doll: Program, services: Services, job_name: str) -> None:
    """Neither batches nor groups are filled by so many rows; one of them is refused. Of other policies see
    tests/integration/test_cut_batches.py."""
    rows = [f"{n % 7},{n % 5},{n % 2}" for n in range(700)] + ["no row"] + ["1,2,1"] * 10
    files = {"job.yaml": CSV_JOB, "rows.csv": "\n".join(rows) + "\n", "rows.py": CSV_TASK}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    given = {"job": job_name, "kafka.address": services.kafka, "redis.address": services.redis}
    settings = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    done = doll("up", "job.yaml", *settings, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    audit = report["audit"]
    assert (audit["produced"], audit["applied"], audit["dead"], audit["pending"]) == (711, 710, 1, 0)
    assert (report["reason"], audit["ok"]) == ("the source has ended", True)


def test_two_side_by_side_one_ends_by_its_rule_the_other_by_ctrl_c(up: Any, doll: Program) -> None:
    """Both jobs have one name and a user's own task in a file beside the job file. Neither job notices the other."""
    events = subprocess.run(
        [sys.executable, str(EXAMPLES / "stdin" / "task.py"), "2000"], capture_output=True, check=True, text=True
    ).stdout
    files = {"job.yaml": OWN_JOB, "events.jsonl": events, "churn.py": (EXAMPLES / "stdin" / "task.py").read_text()}
    job = up("job.yaml", "--set", "stop.updates=60", files=files, program=doll)
    two = up("job.yaml", files=files, program=doll)
    two.until_learning()
    processes, ports = two.started(), two.ports()
    report = job.report()
    assert report["reason"] == "updates: 60 reached"
    assert (report["updates"], report["samples"]) == (60, 60 * 32)
    assert_audit_ok(report)
    assert not set(job.ports()) & set(ports)

    assert two.process.poll() is None
    two.process.send_signal(signal.SIGINT)
    report = two.report()
    assert report["reason"] == "stopped by you"
    assert report["updates"] > 0
    assert_audit_ok(report)
    assert report["files"]["model"]
    assert_nothing_left(processes, ports)


def test_after_sigkill_no_process_and_no_port_is_left(up: Any) -> None:
    job = up(
        "job.yaml",
        files={
            "job.yaml": OWN_JOB,
            "churn.py": (EXAMPLES / "stdin" / "task.py").read_text(),
            "events.jsonl": '{"age": 40, "visits": 3, "spend": 10.5, "left": true}\n',
        },
    )
    job.until_learning()
    processes, ports = job.started(), job.ports()
    names = " ".join(" ".join(process.cmdline()) for process in processes)
    assert "kafka.Kafka" in names
    assert "redis" in names
    assert len(processes) >= 8  # itself, fork server, Kafka, Redis, PS, two workers, evaluator, producer
    job.process.kill()
    assert_nothing_left(processes, ports)


ON_RAY = {
    "job.yaml": OWN_JOB + "evaluation: {enabled: false}\n",
    "churn.py": (EXAMPLES / "stdin" / "task.py").read_text(),
    "events.jsonl": '{"age": 40, "visits": 3, "spend": 10.5, "left": true}\n' * 100,
}
needs_ray = pytest.mark.skipif(
    ray_cluster.unavailable_reason() is not None, reason=str(ray_cluster.unavailable_reason())
)


@pytest.fixture
def no_ray_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def actors_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The workers that Ray has started; they are no children of who runs the job."""
    return [process for process in processes if "ray::WorkerHost" in " ".join(process.cmdline())]


@needs_ray
@pytest.mark.usefixtures("no_ray_of_others")
def test_workers_are_actors_of_a_ray_that_ends_with_the_run(up: Callable[..., Up]) -> None:
    job = up("job.yaml", "--fleet", "ray", "--set", "stop.updates=150", files=ON_RAY)
    job.until_learning()
    processes, ports = job.started(), job.ports()
    assert len(actors_of(processes)) >= 2
    report = job.report()
    assert (report["updates"], report["exit_code"]) == (150, 0)
    assert_audit_ok(report)
    fleet = report["fleet"]
    assert (fleet["kind"], fleet["is_own"], fleet["phase"]) == ("ray", True, "done")
    assert fleet["spent_usd"] > 0
    assert list((job.run / "services" / "ray" / "session_latest" / "logs").glob("worker-*.err"))
    assert_nothing_left(processes, [*ports, int(fleet["address"].rpartition(":")[2])])


@needs_ray
@pytest.mark.usefixtures("no_ray_of_others")
def test_after_sigkill_no_process_of_ray_is_left(up: Callable[..., Up]) -> None:
    job = up("job.yaml", "--fleet", "ray", "--set", "plan.updates=5000", files=ON_RAY)
    job.until_learning()
    processes, ports = job.started(), job.ports()
    assert actors_of(processes)
    job.process.kill()
    assert_nothing_left(processes, ports)


@needs_ray
def test_a_ray_that_was_given_goes_on_without_the_actors(up: Callable[..., Up]) -> None:
    with ray_cluster.RayCluster() as cluster:
        cluster.ensure("spot", 1)
        cluster.ensure("on-demand", 1)
        fleet = f"fleet: {{kind: ray, address: '{cluster.address}'}}\n"
        plan = "plan: {updates: 5000, spot_usd_per_h: 0.1, on_demand_usd_per_h: 0.3, boot_s: 10}\n"
        job = up("job.yaml", files=ON_RAY | {"job.yaml": ON_RAY["job.yaml"] + fleet + plan})
        job.until_learning()
        assert cluster.nodes_of_actors()
        job.process.send_signal(signal.SIGINT)
        report = job.report()
        assert report["reason"] == "stopped by you"
        assert (report["fleet"]["is_own"], report["fleet"]["phase"]) == (False, "drain")
        assert_audit_ok(report)
        until(lambda: not cluster.nodes_of_actors(), "the end of all actors")


def test_a_stream_of_garbage_is_no_success(up: Callable[..., Up]) -> None:
    events = '{"aged": 40, "visits": 3, "spend": 10.5, "left": true}\n' * 100
    files = {"churn.py": (EXAMPLES / "stdin" / "task.py").read_text(), "mine.yaml": OWN_JOB, "events.jsonl": events}
    job = up("mine.yaml", "--set", "stop.updates=50", "--set", "arrivals.process=asap", files=files)
    report = job.failed(2)
    assert (report["updates"], report["samples"]) == (0, 0)
    assert "ValidationError: Object missing required field `age`" in report["error"]
    assert f"doll dead list {job.run.relative_to(job.folder)}" in report["error"]
    assert "dead letters" in job.said, "on the terminal while it ran"
    assert not job.run.joinpath("model").exists(), "nothing was learned"
    assert (job.run / "report.html").stat().st_size > 0
    assert (job.run / "report.json").exists()
    listed = subprocess.run(
        [sys.executable, "-m", "doll", "dead", "list", str(job.run)], capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, "its broker is gone: the folder has the list"
    assert listed.stdout.count("ValidationError") == min(report["dead_letters"], 1000)


def test_ctrl_c_twice_kills_everything_and_says_what_is_lost(up: Callable[..., Up], doll: Program) -> None:
    events = '{"age": 40, "visits": 3, "spend": 10.5, "left": true}\n' * 100
    files = {"job.yaml": OWN_JOB, "events.jsonl": events, "churn.py": (EXAMPLES / "stdin" / "task.py").read_text()}
    job = up("job.yaml", files=files, program=doll)
    job.until_learning()
    processes, ports = job.started(), job.ports()
    job.process.send_signal(signal.SIGINT)
    until(lambda: "again to stop at once" in job.said, lambda: job.said)
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(600.0) == 1
    assert_nothing_left(processes, ports)
    assert f"doll resume {job.run.relative_to(job.folder)} goes on from it" in job.said
    assert "auditing" not in job.said
    assert "Traceback" not in job.said
    assert not (job.run / "report.json").exists()


def test_a_mistake_in_the_model_is_one_line_before_any_service_is_started(up: Callable[..., Up]) -> None:
    task = (EXAMPLES / "stdin" / "task.py").read_text().replace("torch.nn.ReLU()", "torch.nn.RuLE()")
    job = up("job.yaml", files={"job.yaml": OWN_JOB, "events.jsonl": "{}\n", "churn.py": task})
    assert job.process.wait(600.0) == 2
    assert "Churn.build_model() failed: AttributeError: module 'torch.nn' has no attribute 'RuLE'" in job.said
    assert "(churn.py, line " in job.said
    assert "Traceback" not in job.said
    assert "Kafka: " not in job.said
    assert not (job.run / "services").exists()
