"""Each version of a model with tables that a reader is given is that of its name, whatever is lost on the way to it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import record_builders
import torch
from doll.config import JobConfig, load
from doll.errors import ServiceUnavailableError
from doll.evaluation.stored_weights import Place, StoredWeights, place_of
from doll.evaluation.weight_follower import ROWS, WeightFollower
from doll.model.flat_model import build, fingerprint
from doll.ps.engine.events import ApplyUpdate
from doll.ps.model.model_host import ModelHost
from doll.ps.model.updater import make_parts
from doll.ps.tables.bounded_table import renumbered
from doll.records.control import TermStarted, Update
from doll.storage.blobs import Buffer, latest_key
from doll.storage.checkpoints import Checkpoint, checkpoint_name
from doll.storage.stores import open_store
from doll.tables.rows import Rows
from doll.task.base import load_task
from memory_stores import MemoryBlobs
from pushes import applied_set, push_of

pytestmark = pytest.mark.slow  # loads torch

KNOWN, HASHED = 40, 10**6
TASK = f"""
import doll
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.known = torch.nn.Embedding({KNOWN}, 3, sparse=True)
        self.hashed = doll.BoundedEmbedding({HASHED}, 3, scale=0.5)
        self.line = torch.nn.Linear(3, 2)


class Tables(doll.Task):
    input_shape = (2,)

    def build_model(self):
        return Model()

    def forward(self, model, x):
        return model.line(model.known(x[:, 0].long()) * model.hashed(x[:, 1].long()))

    def decode(self, record):
        raise NotImplementedError
"""
JOB = """
job: rows
task: {class: rows_task.py:Tables}
data: {workers: 1, batch_size: 1}
training:
  policy: {name: doll, group_size: 1}
  optimizer: {name: adagrad, lr: 0.3}
  tables: {hashed: {max_rows: 8, min_count: 2, ttl_updates: 9}}
checkpoint: {keep: 3}
blobs: {keep_versions: 3}
"""
SCOPE = "rows:r1"
IDS = np.array([0, 3, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 500_000, HASHED - 1])  # of `hashed`, that batches have


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "rows_task.py").write_text(TASK)
    (folder / "job.yaml").write_text(JOB)
    return load(folder / "job.yaml")


class Unreliable:
    """How a reader sees a blob store: some of it late, some of it not at all.

    Attributes:
        faults: the share of calls in which something goes wrong.
    """

    def __init__(self, blobs: MemoryBlobs, rng: random.Random) -> None:
        self.blobs = blobs
        self.faults = 0.0
        self._rng = rng
        self._pointers: list[Any] = []

    def get(self, key: str) -> Buffer | None:
        data = self.blobs.get(key)
        if key == latest_key(SCOPE):
            self._pointers.append(data)
            if self._rng.random() < self.faults:
                return self._rng.choice(self._pointers[-20:])  # late, and out of order
        if self._rng.random() < self.faults:
            if self._rng.random() < 0.3:
                raise ServiceUnavailableError("Redis is away")
            return None
        return data

    def put(self, key: str, parts: Any, ttl_s: float) -> None:
        self.blobs.put(key, parts, ttl_s)


class Job:
    """A parameter server, its checkpoints and blobs, and all versions that there have been, as they were."""

    def __init__(self, config: JobConfig, folder: Path, rng: random.Random) -> None:
        self.config, self.folder, self.rng = config, folder, rng
        self.now_s = 0.0
        self.blobs = MemoryBlobs(clock=lambda: self.now_s)
        self.store = open_store(config, folder)
        self.task = load_task(config)
        self.versions: dict[Place, tuple[dict[str, torch.Tensor], Rows]] = {}
        self.records: list[TermStarted | Update] = []
        self.damaged: set[tuple[int, int]] = set()
        self.start()
        self.save()

    def start(self) -> None:
        """A server begins with the newest checkpoint: what the one before it has made since is void."""
        self.term = self.store.claim_term()
        torch.manual_seed(1)
        model = build(self.config, self.task)
        self.model = build(self.config, self.task, with_rows=False)
        self.parts = make_parts(self.config.training, model)
        self.host = ModelHost(self.config, self.term, self.parts.updater, self.blobs, self.parts.tables, run_id="r1")
        # The clock of the writer is the test's, so that it looks for readers as time goes by.
        writer = self.host._row_writer
        assert writer is not None
        writer._clock = lambda: self.now_s
        checkpoint = self.store.load_newest(None)
        self.version = 0
        if checkpoint is not None:
            self.version = checkpoint.version
            self.host.load(checkpoint.tensors)
        started = record_builders.term_started(self.term)
        self.records.append(msgspec.structs.replace(started, resumed_version=self.version, run_id="r1"))
        self.note()
        self.publish()

    def update(self) -> None:
        rng = np.random.default_rng(self.rng.randrange(2**32))
        self.version += 1
        number = self.version
        push = push_of(worker=0, session=1, batch=number, term=self.term, grant_id=number, version=0, key=f"g{number}")
        rows = {}
        for name, ids in (("known.weight", np.arange(KNOWN)), ("hashed.weight", IDS)):
            named = np.sort(rng.choice(ids, rng.integers(0, len(ids)), replace=False))
            rows[name] = Rows(named, rng.normal(size=(len(named), 3)).astype(np.float32))
        dense = rng.normal(size=self.host.num_values).astype(np.float32)
        self.host._contributions.put(number, dense, rows=rows, in_order=True)
        self.host.apply(ApplyUpdate(self.version, (applied_set(push),), 1.0, 0, 0))
        self.records.append(record_builders.update(self.term, self.version))
        self.note()

    def publish(self) -> None:
        self.host.publish(self.version)
        self.host.tidy()

    def publish_late(self) -> None:
        """The next version is made before readers are told of this one."""
        self.host.publish(self.version)
        self.update()
        self.host.tidy()

    def spoil(self) -> None:
        """The newest checkpoint is damaged, so the next server begins with the one before it."""
        held = self.store.versions()
        if len(held) > 1 and not self.damaged.intersection(held):
            self.damaged.add(held[-1])
            path = self.folder / "checkpoints" / checkpoint_name(*held[-1])
            damaged = path.with_name("damaged")
            damaged.write_bytes(path.read_bytes()[:-1])
            damaged.replace(path)  # readers still have the file as it was
            self.start()
            while self.rng.random() < 0.7 and self.version < held[-1][1]:
                self.update()
                self.publish()
            if self.rng.random() < 0.7:  # it may have the number of the one that is damaged
                self.save()
                self.start()

    def save(self) -> None:
        self._save(self.term, self.version, dict(self.host.tensors()))

    def roll_back(self) -> None:
        """As `doll rollback`: an earlier checkpoint is the newest one, under a new number and term."""
        held = self.store.versions()
        if self.damaged.intersection(held):
            return
        earlier = self.store.load_newest(None, held[0][1])
        assert earlier is not None
        version, term = held[-1][1] + 1, self.store.claim_term()
        by = version - earlier.version
        self.versions[Place(term, version)] = self.versions[Place(earlier.term, earlier.version)]
        self._save(term, version, {**earlier.tensors, **renumbered(earlier.tensors, "hashed.weight", by)})
        self.start()

    def note(self) -> None:
        """Keep this version as torch would have it: the whole table `known`, and `hashed` with all rows it has."""
        tables = self.parts.tables
        assert tables is not None
        torch_model = {
            "flat": torch.from_numpy(self.parts.updater.weights.copy()),
            "known": torch.from_numpy(tables.tables["known.weight"].read(np.arange(KNOWN)).values),
        }
        self.versions[Place(self.term, self.version)] = (torch_model, tables.bounded["hashed.weight"].read(IDS))

    def output(self, place: Place, x: npt.NDArray[np.float32]) -> torch.Tensor:
        """What torch gives for x, shape (n, 2), in this version."""
        weights, hashed = self.versions[place]
        assert self.model.tables is not None
        ids = x[:, 1].astype(np.int64)
        rows = self.model.tables.bounds["hashed.weight"].initial.rows(ids)
        at = np.minimum(np.searchsorted(IDS, ids), len(IDS) - 1)
        rows[IDS[at] == ids] = hashed.values[at[IDS[at] == ids]]
        known = torch.nn.functional.embedding(torch.from_numpy(x[:, 0].astype(np.int64)), weights["known"])
        flat = weights["flat"]
        line, bias = flat[:6].reshape(2, 3), flat[6:]
        return torch.nn.functional.linear(known * torch.from_numpy(rows), line, bias)

    def _save(self, term: int, version: int, tensors: dict[str, Any]) -> None:
        state = msgspec.msgpack.encode({"run_id": "r1", "samples_total": 0, "version": version})
        mark = fingerprint(self.config, self.model)
        self.store.save(
            Checkpoint(
                job=self.config.job, fingerprint=mark, term=term, version=version, state=state, tensors=tensors
            )
        )  # fmt: skip


class Reader:
    def __init__(self, job: Job, rng: random.Random, row_bytes: int) -> None:
        self.job, self.rng, self.row_bytes = job, rng, row_bytes
        self.blobs = Unreliable(job.blobs, rng)
        self.model = build(job.config, job.task, with_rows=False)
        self.follower = WeightFollower(
            job.config, self.blobs, job.folder, self.model, row_bytes=row_bytes, clock=lambda: job.now_s  # type: ignore[arg-type]
        )  # fmt: skip
        self.given: list[tuple[StoredWeights, npt.NDArray[np.float32]]] = []  # with the weights as they were
        self.place: Place | None = None
        self.num_read = 0

    def look(self) -> None:
        """What it gives is what it says, and what it has given stays as it was."""
        stored = self.follower.newest(self.place)
        if stored is not None:
            assert self.place is None or place_of(stored) > self.place
            self.place = place_of(stored)
            weights = stored.weights.copy()
            self.given = [*self.given[-2:], (stored._replace(weights=weights), weights)]
        assert self.follower.row_bytes <= 2 * self.row_bytes
        for version, _ in self.given:
            self.check(version)

    def check(self, version: StoredWeights) -> None:
        rng = np.random.default_rng(self.rng.randrange(2**32))
        ids = np.concatenate([rng.choice(IDS, 6), rng.integers(0, HASHED, 6)])
        x = np.stack([rng.integers(0, KNOWN, 12), ids], axis=1).astype(np.float32)
        version.load_into(self.model)
        with torch.inference_mode():
            output = self.job.task.forward(self.model.module, torch.from_numpy(x))
        expected = self.job.output(place_of(version), x)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6, msg=f"version {place_of(version)}")

    def hear(self) -> None:
        """Records come late, and some of them twice."""
        until = self.rng.randint(self.num_read, len(self.job.records))
        for record in self.job.records[max(0, self.num_read - self.rng.randrange(3)) : until]:
            self.follower.feed(record)
        self.num_read = until


@pytest.mark.parametrize("seed", range(12))
def test_every_version_is_that_of_its_name(config: JobConfig, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    job = Job(config, tmp_path, rng)
    row_bytes = rng.choice([200, 2000, 20_000, 10**6])

    def read() -> Reader:
        return Reader(job, rng, row_bytes)

    reader = read()
    steps = {
        job.update: 20, job.publish: 20, job.publish_late: 4, job.save: 4, job.start: 1, job.roll_back: 0.5,
        job.spoil: 0.5, job.blobs.wipe: 0.5,
        "look": 20, "hear": 6, "again": 0.5, "calm": 3, "fire": 3, "wait": 8,
    }  # fmt: skip
    followed = 0
    for _ in range(400):
        step = rng.choices(list(steps), list(steps.values()))[0]
        job.now_s += 0.05
        match step:
            case "look":
                reader.look()
                followed += bool(reader.given and reader.given[-1][0].layers)
            case "hear":
                reader.hear()
            case "again":
                reader = read()
            case "calm":
                reader.blobs.faults = 0.0
            case "fire":
                reader.blobs.faults = rng.choice([0.1, 0.5])
            case "wait":
                job.now_s += rng.random() * 2
            case _:
                assert callable(step)
                step()
    reader.blobs.faults = 0.0
    reader.num_read = 0
    for record in job.records:
        reader.follower.feed(record)
    for _ in range(3):  # the reader says that it is there; a checkpoint comes; it has that
        job.now_s += 3.0
        job.update()
        job.publish()
        reader.look()
    job.save()
    job.now_s += 1.0
    reader.look()
    assert reader.place == (job.term, job.version)
    if row_bytes >= 20_000:
        assert followed > 20, "most versions do not come from checkpoints"
        for _ in range(5):
            job.update()
            job.publish()
            reader.look()
            assert reader.place == (job.term, job.version)
            assert ROWS not in reader.follower.unavailable
