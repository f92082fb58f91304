"""A model in shards: equal to the undivided one by bits, also after shards were lost."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import channel_process
import doll.storage.differences
import numpy as np
import numpy.typing as npt
import pytest
import torch
from channel_process import POLICIES, Process, takes_tables
from channel_world import World, play
from doll.config import parse
from doll.errors import CheckpointError, ConfigError, FencedError
from doll.model import slices as slices_module
from doll.model.flat_model import build, fingerprint
from doll.model.model_slice import ModelSlice
from doll.optim import optimizer as optimizer_module
from doll.optim.optimizer import SLICED, DivergedError, slice_of_tensors
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.model.updater import make_parts
from doll.ps.server import require_newest_term
from doll.ps.shards import sharded_host
from doll.ps.shards.sharded_host import PartedStore, ShardLostError
from doll.ps.start import Start, make_engine
from doll.records.control import GetRows, Push, PushedBatch
from doll.storage.checkpoints import Checkpoint, CheckpointPart, checksum_of, joined
from doll.storage.contributions import Compressor
from doll.storage.differences import BaseReference
from doll.tables.checkpointed import part_of_tables
from doll.tables.row_slices import row_slices
from doll.tables.rows import Rows
from doll.task.base import load_task
from fuzzing import SEED, SHARE
from memory_shards import ShardThreads
from memory_stores import MemoryBlobs, MemoryCheckpointStore
from paths import SUPPORT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]  # loads torch

BLOCK = 4
BAG = f"{SUPPORT / 'bag_task.py'}:Bags"
BOUNDED = json.dumps({"class": BAG, "args": {"bounded": True}})
BAGS = json.dumps({"class": BAG, "args": {"ids": 19}})
INTERLEAVINGS = -(-10_000 // len(POLICIES)) if SHARE == 1.0 else 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of a few numbers have several shards, and differential parts."""
    monkeypatch.setattr(doll.storage.differences, "MIN_BASE_BYTES", 0)
    monkeypatch.setattr(sharded_host, "_BEGIN_AGAIN_S", 2.0)
    monkeypatch.setattr(slices_module, "BLOCK", BLOCK)
    monkeypatch.setattr(optimizer_module, "BLOCK", BLOCK)


class ReadingStore(MemoryCheckpointStore):
    """Reads each part that it has stored."""

    def __init__(self) -> None:
        super().__init__("unit")
        self.counts: Counter[str] = Counter()

    def save_part(
        self, checkpoint: Checkpoint, number: int, count: int, base: BaseReference | None = None
    ) -> CheckpointPart:
        part = super().save_part(checkpoint, number, count, base)
        self.counts["differential parts"] += part.base is not None
        try:
            read = self.read_part(checkpoint.term, checkpoint.version, part).tensors
            self.counts["parts that differ"] += checksum_of(read) != checksum_of(checkpoint.tensors)
        except CheckpointError:
            self.counts["parts that cannot be read"] += 1
        return part


class ShardedWorld(World):
    """The world of two channels with shards, which may lag, be lost and come back before and after any order."""

    shards = 2
    kills = 0.002
    lags = 0.05  # so often a shard begins to lag, or ends it
    is_reading = False  # the test, not the server

    def begin(self) -> None:
        channel_process._REPLICAS.clear()
        self.config = self.config.model_copy(
            update={"ps": self.config.ps.model_copy(update={"shards": self.shards})}
        )  # fmt: skip
        self.store = ReadingStore()
        self.threads = ShardThreads(self.config, self.task, self.store, self.blobs, self.happens)
        self.dice = random.Random(str(self.rng.getstate()))
        self.happened: Counter[str] = Counter()

    def happens(self, number: int) -> None:
        """What may happen before and after an order to shard `number`."""
        if self.is_reading:
            return
        if self.dice.random() < self.kills:
            self.threads.kill(self.dice.randrange(self.shards))
            self.happened["killed"] += 1
            if self.is_beginning or self.dice.random() < 0.5:
                self.threads.revive()  # before the server has missed it
                self.happened["back at once"] += 1
        if self.dice.random() < self.lags:
            self.threads.pipes[number].lags ^= True
            self.happened["lags"] += 1

    def _make_engine(self) -> Engine:
        self.threads.revive()
        model = build(self.config, self.task)
        tables = None if model.tables is None else model.tables.shapes
        place = None if self.saved is None else (self.saved.term, self.saved.version)
        self.is_beginning = True
        while self.is_beginning:
            self.host = self.threads.host(self.term, model.slices, tables=tables)
            try:
                self.is_beginning = not self.host.begin(fingerprint(self.config, model), place, lambda: False)
            except ShardLostError:
                self.term += 1
        self._num_parameters = model.num_parameters
        if self.saved is None:
            start = Start(self.term, self.now, (0,) * self._partitions_at_start)
        else:
            start = Start.resume(self.term, self.now, self.saved)
        return make_engine(self.config, start, self.host.load)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        version, term = self.host._version, self.term
        self.is_reading = True
        self.host.tensors()
        self.is_reading = False
        return joined(self.store.read_part(term, version, part) for part in self.host.gather_parts(version))

    def checkpoint(self, version: int, state: bytes) -> Checkpoint:
        self.host.tensors()
        checkpoint = Checkpoint(
            job="unit", fingerprint="", term=self.term, version=version, state=state, tensors={}
        )  # fmt: skip
        self.happens(0)  # after some parts, before the checkpoint
        PartedStore(self.store, self.host).save(checkpoint)
        return checkpoint

    def handle(self, event: ev.Event) -> None:
        with self.until_a_shard_is_lost():
            super().handle(event)

    def get_rows(self, process: Process, request: GetRows) -> None:
        with self.until_a_shard_is_lost():
            super().get_rows(process, request)

    @contextmanager
    def until_a_shard_is_lost(self) -> Iterator[None]:
        try:
            yield
        except (ShardLostError, CheckpointError):
            self.counts["shards lost"] += 1
            self.start_server()


class InThree(ShardedWorld):
    shards = 3
    kills = 0.04  # some of these worlds make no update


class Whole(ShardedWorld):
    kills = 0.0


class WholeInThree(Whole):
    shards = 3


def seed_with_tables(has_tables: bool) -> int:
    """Return a seed whose world has tables if its policy takes them, or one whose world has none."""
    return next(
        seed for seed in itertools.count(SEED * 1_000_000) if (random.Random(seed).random() < 1 / 3) == has_tables
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_is_the_sum_of_its_batches_while_shards_are_lost(policy: str) -> None:
    counts: Counter[str] = Counter()
    for number in range(INTERLEAVINGS):
        seed = SEED * 1_000_000 + number
        world_class = (ShardedWorld, InThree)[number % 2]
        try:
            world = play(policy, seed, world_class)
        except Exception as exc:
            raise AssertionError(f"policy {policy!r}, seed {seed}: {type(exc).__name__}: {exc}") from exc
        assert isinstance(world, ShardedWorld)
        world.threads.close()
        counts += world.counts + world.happened + world.store.counts
        assert not counts["parts that differ"] + counts["parts that cannot be read"], f"{policy!r}, seed {seed}"
    assert min(counts["updates"], counts["killed"], counts["lags"]) > 0, counts
    if INTERLEAVINGS > 100:
        assert min(counts["shards lost"], counts["back at once"]) > 0, counts
        assert counts["differential parts"] or not takes_tables(policy), counts


@pytest.mark.parametrize(
    ("policy", "has_tables"),
    [(policy, False) for policy in POLICIES] + [(policy, True) for policy in POLICIES if takes_tables(policy)],
)
def test_any_number_of_shards_makes_the_same_model(policy: str, has_tables: bool) -> None:
    seed = seed_with_tables(has_tables)
    whole = play(policy, seed)
    expected = whole.tensors()
    names = [name for name in expected if name == "weights" or name.endswith((".values", ".numbers"))]
    assert len(names) == (3 if has_tables else 1)
    for world_class in (Whole, WholeInThree):
        world = play(policy, seed, world_class)
        assert isinstance(world, ShardedWorld)
        got, stored = world.tensors(), world.store.load_newest(None)
        assert {name: got[name].tobytes() for name in names} == {name: expected[name].tobytes() for name in names}
        assert (stored is None) == (whole.saved is None)
        if stored is not None and whole.saved is not None:
            assert stored.version == whole.saved.version
            assert all(stored.tensors[name].tobytes() == whole.saved.tensors[name].tobytes() for name in names)
        assert world.store.counts["differential parts"] or (policy, has_tables) != ("ssp", True)
        world.threads.close()


JOB = """
job: unit
task: {class: "examples.synthetic.task:Gaussian", args: {features: 5, hidden: [3]}}
data: {workers: 1, batch_size: 4}
training: {policy: {name: bsp}, %s}
"""
TRAININGS = {
    "momentum": "optimizer: {name: sgd, lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.01}",
    "adam, clipped": "optimizer: {name: adam, lr: 0.1}, clip_norm: 0.5",
    "adagrad, averaged": "optimizer: {name: adagrad, lr: 0.1, momentum: 0.5}, ema: {decay: 0.9}",
    "clipped by value": "optimizer: {name: sgd, lr: 0.1}, clip_value: 0.1",
    "schedule": "optimizer: {name: adam, lr: 0.1}, "
    "schedule: [{class: torch.optim.lr_scheduler.StepLR, args: {step_size: 3}}]",
}


class Sliced:
    """The updaters of all shards, which exchange norms as their server does."""

    def __init__(self, training: str, shards: int) -> None:
        config = parse(JOB % training, [f"ps.shards={shards}"])
        self.model = build(config, load_task(config))
        parts = [None] if shards == 1 else [ModelSlice(self.model, number) for number in range(shards)]
        self.updaters = [make_parts(config.training, self.model, part).updater for part in parts]

    def apply(self, gradients: list[npt.NDArray[np.float32]], weight: float, absent: int) -> None:
        arrived = threading.Barrier(len(self.updaters))
        squares: dict[int, list[float]] = {}

        def apply(number: int) -> None:
            def exchange(values: list[float]) -> list[float]:
                squares[number] = values
                arrived.wait()
                return [value for _, part in sorted(squares.items()) for value in part]

            updater, part = self.updaters[number], self.model.slices[number]
            updater.squares_of_all = exchange
            updater.apply([part.view(gradient).copy() for gradient in gradients], 1 / weight, weight, absent=absent)

        threads = [threading.Thread(target=apply, args=(number,)) for number in range(len(self.updaters))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        empty = Checkpoint(job="unit", fingerprint="", term=1, version=0, state=b"", tensors={}, sliced=SLICED)
        return joined(dataclasses.replace(empty, tensors=updater.tensors()) for updater in self.updaters)

    def load(self, tensors: dict[str, npt.NDArray[Any]]) -> None:
        for updater, part in zip(self.updaters, self.model.slices, strict=True):
            updater.load(slice_of_tensors(tensors, part))


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_slices_make_the_same_steps_also_after_a_checkpoint_of_another_number(training: str) -> None:
    rng = np.random.default_rng(5)
    jobs = [Sliced(training, shards) for shards in (1, 2, 4)]
    size = jobs[0].model.flat.numel()
    for step in range(8):
        gradients = [rng.normal(size=size).astype(np.float32) for _ in range(2)]
        absent = int(rng.integers(0, 4)) if step > 2 else 0
        for job in jobs:
            job.apply(gradients, 8.0, absent)
        expected = jobs[0].tensors()
        for job in jobs[1:]:
            got = job.tensors()
            assert got.keys() == expected.keys()
            assert all(got[name].tobytes() == expected[name].tobytes() for name in expected), training
        if step == 4:  # each continues from the checkpoint of another number of shards
            jobs[2].load(jobs[1].tensors())
            jobs[1].load(expected)


def test_a_gradient_that_one_shard_does_not_have_is_lost_for_all() -> None:
    config = parse(JOB % TRAININGS["momentum"], ["ps.shards=2"])
    task, blobs, store = load_task(config), MemoryBlobs(), MemoryCheckpointStore("unit")
    model, threads = build(config, task), ShardThreads(config, task, store, blobs)
    host = threads.host(store.claim_term(), model.slices)
    assert host.begin(fingerprint(config, model), None, lambda: False)
    gradient = np.ones(model.flat.numel(), np.float32)
    for key in ("a", "b"):
        parts = Compressor("unit").compress_slices(gradient, model.slices, version=0)
        for name, part in zip(model.slices.keys(key), parts, strict=True):
            blobs.put(name, part, 60.0)
    blobs.delete(model.slices.key("a", 1))
    lost = host.fetch(ev.FetchGradient(grant_id=1, key="a", version=0, in_order=True)).event
    assert isinstance(lost, ev.GradientLost)
    assert isinstance(host.fetch(ev.FetchGradient(2, "b", 0, in_order=True)).event, ev.GradientFetched)
    push = Push(
        worker=0,
        session=1,
        term=1,
        version=0,
        key="b",
        batches=(PushedBatch(batch=0, grant_id=2, n_samples=4, loss_sum=0.0),),
    )
    applied = ev.AppliedSet(push, 0.0, (ev.AppliedBatch(0, 0, 0, 4, 0.0, push.batches[0]),))
    host.apply(ev.ApplyUpdate(1, (applied,), 0.25, 4, 1))
    host.tensors()
    weights = joined(store.read_part(1, 1, part) for part in host.gather_parts(1))["weights"]
    host.check()
    said = [(item.shard, item.is_alive, item.version, item.part_version) for item in host.shard_statuses()]
    assert said == [(0, True, 1, 1), (1, True, 1, 1)]
    assert [item.slice_bytes for item in host.shard_statuses()] == [4 * part.size for part in model.slices]
    threads.kill(1)
    with pytest.raises(ShardLostError, match="shard 1"):
        host.check()
    assert [item.is_alive for item in host.shard_statuses()] == [True, False]
    whole = Sliced(TRAININGS["momentum"], 1)
    whole.apply([gradient], 4.0, 0)
    assert weights.tobytes() == whole.tensors()["weights"].tobytes()
    threads.close()


def test_a_server_whose_shards_have_a_successor_ends_also_while_it_waits_for_them() -> None:
    config = parse(JOB % TRAININGS["momentum"], ["ps.shards=2"])
    task, blobs, store = load_task(config), MemoryBlobs(), MemoryCheckpointStore("unit")
    model, threads = build(config, task), ShardThreads(config, task, store, blobs)
    first = store.claim_term()
    host = threads.host(first, model.slices, wait=lambda waits_for: require_newest_term(store, first))
    assert host.begin(fingerprint(config, model), None, lambda: False)
    host.check()
    later = threads.host(store.claim_term(), model.slices)
    assert later.begin(fingerprint(config, model), None, lambda: False)
    with pytest.raises(FencedError):
        host.publish(0)
    host.tensors()
    host.close()
    with pytest.raises(CheckpointError, match="this server has ended before shard"):
        host.gather_parts(0)
    later.publish(0)
    later.tensors()
    assert len(later.gather_parts(0)) == 2
    threads.close()


def test_a_shard_that_cannot_open_its_slice_says_so_to_its_server() -> None:
    config = parse(JOB % TRAININGS["momentum"], ["ps.shards=2"])
    task, blobs, store = load_task(config), MemoryBlobs(), MemoryCheckpointStore("unit")
    model, threads = build(config, task), ShardThreads(config, task, store, blobs)
    host = threads.host(store.claim_term(), model.slices)
    with pytest.raises(ConfigError, match="shard 0: the parameter server runs another job file"):
        host.begin("job=another", None, lambda: False)
    host = threads.host(store.claim_term(), model.slices)
    with pytest.raises(CheckpointError, match="shard 0"):
        host.begin(fingerprint(config, model), (1, 7), lambda: False)
    threads.close()


def test_a_diverged_slice_ends_the_job() -> None:
    updater = Sliced(TRAININGS["momentum"], 2).updaters[1]
    with pytest.raises(DivergedError):
        updater.apply([np.full(updater.weights.size, np.nan, np.float32)], 1.0, 1.0)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("ps.shards=9", "expected at most 7 shards"),
        ("training.optimizer={class: torch.optim.AdamW, args: {lr: 0.1}}", "expected 1 with training.optimizer.class"),
        ("blobs.contributions=fp16", "expected 1 with blobs.contributions fp16"),
        (["training.clip_norm=1.0", f"task={BAGS}"], r"expected 1 with training.clip_norm, because .* has tables"),
        (
            [
                f"task={json.dumps({'class': BAG, 'args': {'bounded': True}})}",
                "training.tables={'0.weight': {max_rows: 40}}",
            ],
            r"expected 1 with training.tables.max_rows, because .* has tables",
        ),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(override: str | list[str], problem: str) -> None:
    overrides = [override] if isinstance(override, str) else override

    def make() -> None:
        config = parse(JOB % TRAININGS["momentum"], ["ps.shards=2", *overrides])
        build(config, load_task(config))

    with pytest.raises(ConfigError, match=problem):
        make()


TABLES = """
job: unit
task: %s
data: {workers: 1, batch_size: 4}
training: {policy: {name: bsp}, optimizer: %s}
"""


class SlicedTables:
    """The tables of all shards."""

    def __init__(self, optimizer: str, shards: int) -> None:
        config = parse(TABLES % (BAGS, optimizer), [f"ps.shards={shards}"])
        self.model = build(config, load_task(config))
        assert self.model.tables is not None
        self.names, self.slices = tuple(self.model.tables.shapes), row_slices(shards)
        initial = {name: rows.copy() for name, rows in self.model.tables.take_initial().items()}
        self.tables = []
        for number in range(shards):
            self.model.tables._initial = {
                name: torch.nn.Parameter(torch.from_numpy(rows)) for name, rows in initial.items()
            }
            part = None if shards == 1 else ModelSlice(self.model, number)
            tables = make_parts(config.training, self.model, part).tables
            assert tables is not None
            self.tables.append(tables)

    def apply(self, contributions: list[dict[str, Rows]], version: int) -> None:
        for tables, part in zip(self.tables, self.slices, strict=True):
            for rows in contributions:
                tables.add(part.parts(rows))
            tables.apply(0.25, version)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        empty = Checkpoint(
            job="unit", fingerprint="", term=1, version=0, state=b"", tensors={}, row_slices_of=self.names
        )
        return joined(dataclasses.replace(empty, tensors=tables.tensors()) for tables in self.tables)

    def load(self, tensors: dict[str, npt.NDArray[Any]]) -> None:
        for tables, part in zip(self.tables, self.slices, strict=True):
            tables.load(part_of_tables(tensors, self.names, part))


@pytest.mark.parametrize("optimizer", ["{name: sgd, lr: 0.1}", "{name: adam, lr: 0.1}", "{name: adagrad, lr: 0.1}"])
def test_tables_make_the_same_steps_also_after_a_checkpoint_of_another_number(optimizer: str) -> None:
    rng = np.random.default_rng(7)
    jobs = [SlicedTables(optimizer, shards) for shards in (1, 2, 5)]
    name = jobs[0].names[0]
    for version in range(1, 12):
        contributions = []
        for _ in range(3):  # some contributions have no row, and some shards none of a contribution
            ids = np.sort(rng.choice(19, rng.integers(0, 4), replace=False))
            contributions.append({name: Rows(ids, rng.normal(size=(len(ids), 3)).astype(np.float32))})
        for job in jobs:
            job.apply(contributions, version)
        assert len({checksum_of(job.tensors()) for job in jobs}) == 1
        if version == 6:  # each continues from the checkpoint of another number of shards
            of_all = [job.tensors() for job in jobs]
            for job, tensors in zip(jobs, [*of_all[1:], of_all[0]], strict=True):
                job.load(tensors)
