"""Requests to a model server while its job, its services and its own processes are killed: is an answer ever wrong?

    python -m benchmarks.serve_fire [--requests 20000] [--swaps 100] [--tables]

A job of `doll up` learns a stream, `doll serve` answers for it in two processes. Meanwhile the parameter server is
killed twice, Redis, Kafka and a serving process once each. Every answer names its term and version; afterwards each is
compared with what torch gives for the weights of that version: another observer reads these from the blob store as soon
as an answer names them, and from the checkpoints, of which the job keeps all. `--tables`: of a model whose rows are in
tables, one of them bounded, so that requests ask for rows that no version has. Rows of versions without a checkpoint
are those of the one before them, with all changes since, which the observer reads from the blob store.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
import torch
from doll.config import JobConfig, load
from doll.errors import DollError
from doll.evaluation.stored_weights import StoredWeights, newest_weights, weights_of
from doll.local.processes import free_port, tied
from doll.model.flat_model import build
from doll.ps.tables.bounded_table import CheckpointRows
from doll.run.folder import RunFolder
from doll.storage.blobs import decode_blob, row_changes_key, scope_of, weights_key
from doll.storage.checkpoints import checkpoint_name, decode_checkpoint
from doll.storage.row_changes import RowChanges, decode_row_changes
from doll.storage.stores import open_blobs, open_store
from doll.task.base import load_task

FEATURES: Final = 8
TOLERANCE: Final = 1e-5
CLIENTS: Final = 4
_REFUSALS: Final = (429, 503)
_INPUTS: Final = 16
_CHAIN: Final = 50  # versions whose changes are read at once
JOB: Final = f"""
job: fire
task: {{class: "examples.synthetic.task:Gaussian", args: {{features: {FEATURES}, hidden: [16]}}}}
data: {{workers: 2, batch_size: 8}}
source: {{kind: python, of: examples.synthetic.source:gaussians, args: {{features: {FEATURES}, classes: 2}}}}
arrivals: {{process: poisson, rate_per_s: 80}}
training: {{policy: {{name: doll, group_size: 2}}, optimizer: {{name: sgd, lr: 0.5}}}}
checkpoint: {{every_updates: 1, every_s: 0.1, keep: 10000}}
blobs: {{kind: redis, keep_versions: 10000}}
evaluation: {{enabled: false}}
worker: {{lease_s: 3, grant_timeout_s: 5}}
"""
TABLES: Final = (
    ("examples.synthetic.task:Gaussian", "fire.py:Tables"),
    ("training: {", "training: {tables: {hashed: {max_rows: 64}}, "),
    ("checkpoint: {every_updates: 1, every_s: 0.1,", "checkpoint: {every_updates: 10, every_s: 2,"),
)
TABLE_TASK: Final = f"""
import doll
import torch
from examples.synthetic.task import Gaussian


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear({FEATURES}, 2)
        self.known = torch.nn.Embedding(64, 2, sparse=True)
        self.hashed = doll.BoundedEmbedding(1000, 2, scale=0.5)


class Tables(Gaussian):
    def build_model(self):
        return Model()

    def forward(self, model, x):
        known = (x[:, 0].clamp(-3.9, 3.9) * 8 + 32).long()
        hashed = (x[:, 1].clamp(-3.9, 3.9) * 100 + 500).long()
        return model.line(x) + model.known(known) + model.hashed(hashed)
"""


class Answered(NamedTuple):
    """An answer: to which input, of which term and version, and its numbers."""

    input: int
    place: tuple[int, int]
    output: tuple[float, ...]
    stale: str  # why a newer version may have been missed; "": none has


class FireReport(NamedTuple):
    """What came of it."""

    requests: int
    swaps: int
    refused: dict[str, int]
    errors: list[str]
    reconnects: int
    wrong: list[Answered]
    unverified: int
    stale: dict[str, int]  # answers, by the reason
    first_age_ms: tuple[float, float]  # of a version when it is first answered: p50, p99
    faults: list[str]
    seconds: float

    @property
    def is_good(self) -> bool:
        return not self.wrong and not self.errors and self.unverified == 0


class Clients:
    """Threads that ask, each over one connection, which it opens again when it breaks."""

    def __init__(self, port: int, inputs: npt.NDArray[np.float32], on_place: Callable[[tuple[int, int]], None]) -> None:
        self._port = port
        self._inputs = inputs
        self._on_place = on_place
        self._stop = threading.Event()
        self.answers: list[Answered] = []
        self.refused: Counter[str] = Counter()
        self.errors: list[str] = []
        self.reconnects = 0
        self.ages_s: list[float] = []
        self.places: dict[tuple[int, int], int] = {}
        self._threads = [threading.Thread(target=self._ask, args=(at,)) for at in range(CLIENTS)]

    def are_answered(self) -> bool:
        """Whether the server is ready."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, first: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        for number in itertools.count(first, CLIENTS):
            if self._stop.is_set():
                connection.close()
                return
            at = number % _INPUTS
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, FEATURES], "data": self._inputs[at].tolist()}
            body = json.dumps({"inputs": [tensor]})
            while not self._stop.is_set():
                try:
                    connection.request("POST", "/v2/models/fire/infer", body)
                    response = connection.getresponse()
                    status, answer = response.status, json.loads(response.read())
                    break
                except (OSError, http.client.HTTPException):  # its serving process was killed: ask another one
                    self.reconnects += 1
                    connection.close()
                    time.sleep(0.01)
            else:
                return
            if status == 200:
                facts = answer["parameters"]
                place = (facts["term"], int(answer["model_version"]))
                self.answers.append(
                    Answered(at, place, tuple(answer["outputs"][0]["data"]), facts.get("stale_because", ""))
                )
                if place not in self.places:
                    self.places[place] = len(self.answers)
                    self.ages_s.append(facts["age_s"])
                    self._on_place(place)
            elif status in _REFUSALS and answer.get("error"):
                self.refused[answer["error"]] += 1
                time.sleep(0.01)
            else:
                self.errors.append(f"{status}: {answer}")


class Observer:
    """Reads the weights of every version that an answer names, in a thread."""

    def __init__(self, config: JobConfig, run: RunFolder) -> None:
        services = run.services()
        assert services is not None
        self._config, self._run = config, run
        self._blobs = open_blobs(config, services, give_up=lambda: True, timeout_s=1.0)
        self.task = load_task(config)
        self.model = build(config, self.task, with_rows=False)
        self._asked: queue.Queue[tuple[int, int] | None] = queue.Queue()
        self._weights: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
        self._changes: dict[tuple[int, int], RowChanges] = {}
        self._stored: dict[tuple[int, int], StoredWeights | None] = {}
        stored = newest_weights(config, run.path, self.model)
        assert stored is not None
        self._scope = scope_of(config.job, stored.run_id)
        self._store = open_store(config, run.path)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def want(self, place: tuple[int, int]) -> None:
        self._asked.put(place)

    def _read(self) -> None:
        missed = [place for place in iter(self._asked.get, None) if not self._has_read(place)]
        for place in missed:  # Redis was away: it may have them now
            self._has_read(place)

    def _has_read(self, place: tuple[int, int]) -> bool:
        with contextlib.suppress(DollError):
            if (data := self._blobs.get(weights_key(self._scope, *place))) is not None:
                numel = self.model.flat.numel()
                weights = decode_blob(data, job=self._scope, kind="w", version=place[1], numel=numel)
                self._weights[place] = weights.copy()
            self._read_changes(*place)
        return place in self._weights

    def _read_changes(self, term: int, version: int) -> None:
        if self.model.tables is None:
            return
        shapes = self.model.tables.shapes
        for _ in range(_CHAIN):
            data = self._blobs.get(row_changes_key(self._scope, term, version))
            if (term, version) in self._changes or data is None:
                return
            changes = decode_row_changes(bytes(data), shapes, job=self._scope, version=version)
            self._changes[term, version] = changes
            version = changes.since

    def has_read_all(self) -> bool:
        return self._asked.empty()

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()
        self._blobs.close()

    def outputs(self, place: tuple[int, int], inputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
        """What torch gives for this version; None where nobody has it."""
        weights = self._weights.get(place)
        if weights is not None and self.model.tables is None:
            self.model.load_weights(weights)
        else:
            stored = self._checkpointed(place)
            if stored is None and weights is not None:
                stored = self._version(place)
            if stored is None:
                return None
            stored.load_into(self.model)
        with torch.inference_mode():
            output: npt.NDArray[np.float32] = self.task.forward(self.model.module, torch.from_numpy(inputs)).numpy()
        return output.copy()

    def _version(self, place: tuple[int, int]) -> StoredWeights | None:
        """This version from its checkpoint, or from what it has changed in the one before it; None: it is not known."""
        if place not in self._stored:
            self._stored[place] = self._checkpointed(place) or self._changed(place)
        return self._stored[place]

    def _checkpointed(self, place: tuple[int, int]) -> StoredWeights | None:
        if place not in self._store.versions():
            return None
        data = (self._run.path / "checkpoints" / checkpoint_name(*place)).read_bytes()
        return weights_of(decode_checkpoint(data), self.model)

    def _changed(self, place: tuple[int, int]) -> StoredWeights | None:
        changes, weights = self._changes.get(place), self._weights.get(place)
        if changes is None:
            return None
        begin = (place[0], changes.since)
        if changes.since == changes.began:  # the checkpoint that the term began with is of an earlier one
            begun = [each for each in self._store.versions() if each[1] == changes.began and each[0] <= place[0]]
            begin = max(begun, default=begin)
        before = self._version(begin)
        if before is None:
            return None
        tables = {name: values.copy() for name, values in before.tables.items()}
        bounded = {
            name: dict(zip(rows.ids.tolist(), rows.values, strict=True)) for name, rows in before.bounded.items()
        }
        for name, rows in changes.rows.items():
            for number, row in zip(rows.ids.tolist(), rows.values, strict=True):
                (tables if name in tables else bounded)[name][number] = row
        return before._replace(
            term=place[0], version=place[1], weights=before.weights if weights is None else weights, tables=tables,
            bounded={name: _stored_rows(rows) for name, rows in bounded.items()},
        )  # fmt: skip


def _stored_rows(rows: dict[int, npt.NDArray[np.float32]]) -> CheckpointRows:
    ids = np.array(sorted(rows), np.int64)
    return CheckpointRows(ids, np.arange(len(ids)), np.stack([rows[number] for number in ids.tolist()]))


def until(condition: Callable[[], Any], what: str, timeout_s: float) -> None:
    """Wait until it holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def started(folder: Path, name: str, *arguments: str, **env: str) -> Iterator[psutil.Popen]:
    """`doll NAME ...` while the context lasts, and no longer than this process; its output is in a file."""
    hidden = ("DOLL_KAFKA", "DOLL_REDIS")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    with (folder / f"{name}.log").open("wb") as log:
        process = psutil.Popen(
            tied([sys.executable, "-m", "doll", name, *arguments]), cwd=folder, stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, start_new_session=True, env={**kept, **env},
        )  # fmt: skip
        try:
            yield process
        finally:
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                    process.send_signal(number)
                    process.wait(20)


def child_named(process: psutil.Process, *words: str) -> psutil.Process | None:
    """The process below this one whose command line begins with a program of such a name."""
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word in Path((child.cmdline() or [""])[0]).name for word in words):
                return child
    return None


def under_fire(
    folder: Path, *, requests: int, swaps: int, limit_s: float, has_tables: bool = False
) -> FireReport:  # fmt: skip
    """Ask until so many requests were answered by so many versions, and all faults have happened."""
    began_s = time.monotonic()
    (folder / "fire.py").write_text(TABLE_TASK)
    job = functools.reduce(lambda text, change: text.replace(*change), TABLES if has_tables else (), JOB)
    (folder / "job.yaml").write_text(job)
    inputs = np.random.default_rng(0).normal(size=(_INPUTS, FEATURES)).astype(np.float32)
    port = free_port()
    root = str(Path(__file__).parents[1])
    path = {"PYTHONPATH": ":".join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
    with started(folder, "up", "job.yaml", "--parent-folder", str(folder / "runs"), **path) as up:
        until(lambda: list(folder.glob("runs/*/checkpoints/*-*[1-9].doll")), "a model that has learned", 180)
        (run_path,) = (folder / "runs").iterdir()
        run = RunFolder(run_path)
        config = load(run.job)
        with started(folder, "serve", str(run_path), "--port", str(port), "--processes", "2", **path) as serving:
            observer = Observer(config, run)
            clients = Clients(port, inputs, observer.want)
            try:
                until(clients.are_answered, "a server that answers", 120)
                clients.start()
                faults = _with_faults(clients, observer, up, serving, run, requests, swaps, began_s + limit_s)
            finally:
                clients.stop()
                observer.close()
    expected = {place: observer.outputs(place, inputs) for place in clients.places}
    wrong, unverified = [], 0
    for answer in clients.answers:
        outputs = expected[answer.place]
        if outputs is None:
            unverified += 1
        elif not np.allclose(outputs[answer.input], answer.output, rtol=TOLERANCE, atol=TOLERANCE):
            wrong.append(answer)
    stale = Counter(re.sub(r"[0-9.:]+", "N", answer.stale) for answer in clients.answers if answer.stale)
    p50, p99 = np.percentile(clients.ages_s, [50, 99]).tolist()
    return FireReport(
        len(clients.answers), len(clients.places), dict(clients.refused), clients.errors, clients.reconnects, wrong,
        unverified, dict(stale), (1000 * p50, 1000 * p99), faults, time.monotonic() - began_s,
    )  # fmt: skip


@contextlib.contextmanager
def _standing_still(ps: psutil.Process | None, observer: Observer) -> Iterator[None]:
    """Meanwhile no version is published, and the observer has read all before: what Redis loses, it has."""
    if ps is None:
        yield
        return
    ps.suspend()
    try:
        time.sleep(0.5)
        until(observer.has_read_all, "an observer that has read all versions", 30)
        yield
    finally:
        ps.resume()


def _with_faults(
    clients: Clients, observer: Observer, up: psutil.Process, serving: psutil.Process, run: RunFolder, requests: int,
    swaps: int, deadline_s: float,
) -> list[str]:  # fmt: skip
    """Kill one after the other, and each when the job has gone on from the one before it; what was killed."""

    def ps() -> psutil.Process | None:
        pid = json.loads(run.roles.read_text()).get("ps") if run.roles.exists() else None
        return psutil.Process(pid) if pid else None

    faults: list[tuple[str, Callable[[], psutil.Process | None]]] = [
        ("parameter server", ps),
        ("Redis", lambda: child_named(up, "redis-server", "valkey-server")),
        ("a serving process", lambda: next(iter(serving.children()), None)),
        ("Kafka", lambda: child_named(up, "java")),
        ("parameter server", ps),
    ]
    done: list[str] = []
    wanted, step = 0, max(1, swaps // (len(faults) + 1))
    while time.monotonic() < deadline_s:
        time.sleep(0.05)
        if len(done) < len(faults) and len(clients.places) >= wanted + step:
            name, find = faults[len(done)]
            with contextlib.suppress(psutil.Error):
                if (process := find()) is not None:
                    with _standing_still(ps() if name == "Redis" else None, observer):
                        process.kill()
                    done.append(name)
                    wanted = len(clients.places)
        has_all = len(done) == len(faults) and len(clients.answers) >= requests
        if has_all and len(clients.places) >= max(swaps, wanted + step):
            return done
    raise SystemExit(
        f"not within the time limit: {len(clients.answers)} answers, {len(clients.places)} versions, killed {done}, "
        f"errors {clients.errors[:3]}, refused {clients.refused}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--tables", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report = under_fire(
            Path(folder), requests=options.requests, swaps=options.swaps, limit_s=options.limit_s,
            has_tables=options.tables,
        )  # fmt: skip
    for name, value in report._asdict().items():
        print(f"{name}: {value if not isinstance(value, list) or len(value) < 6 else value[:6]}")
    sys.exit(0 if report.is_good else 1)


if __name__ == "__main__":
    main()
