"""A model in shards: equal to the undivided one by bits, also after shards were lost."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator
from typing import Any

import channel_process
import numpy as np
import numpy.typing as npt
import pytest
from channel_process import POLICIES
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
from doll.ps.shards.sharded_host import ShardLostError
from doll.ps.start import Start, make_engine
from doll.records.control import Push, PushedBatch
from doll.storage.checkpoints import Checkpoint, joined
from doll.storage.contributions import Compressor
from doll.task.base import load_task
from fuzzing import SEED, SHARE
from memory_shards import ShardThreads
from memory_stores import MemoryBlobs, MemoryCheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]  # loads torch

BLOCK = 4
INTERLEAVINGS = 400 if SHARE == 1.0 else 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of a few numbers have several shards."""
    monkeypatch.setattr(slices_module, "BLOCK", BLOCK)
    monkeypatch.setattr(optimizer_module, "BLOCK", BLOCK)


class ShardedWorld(World):
    """The world of two channels with shards, which may be lost at any moment."""

    shards = 2
    kills = 0.004  # of an action of the server

    def begin(self) -> None:
        channel_process._REPLICAS.clear()
        self.config = self.config.model_copy(
            update={"ps": self.config.ps.model_copy(update={"shards": self.shards})}
        )  # fmt: skip
        self.store = MemoryCheckpointStore("unit")
        self.threads = ShardThreads(self.config, self.task, self.store, self.blobs)
        self.dice = random.Random(self.partitions)

    def _make_engine(self) -> Engine:
        self.threads.revive()
        model = build(self.config, self.task)
        self.host = self.threads.host(self.term, model.slices)
        place = None if self.saved is None else (self.saved.term, self.saved.version)
        assert self.host.begin(fingerprint(self.config, model), place, lambda: False)
        self._num_parameters = model.num_parameters
        if self.saved is None:
            start = Start(self.term, self.now, (0,) * self._partitions_at_start)
        else:
            start = Start.resume(self.term, self.now, self.saved)
        return make_engine(self.config, start, self.host.load)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        version, term = self.host._version, self.term
        self.host.tensors()
        return joined(self.store.read_part(term, version, part) for part in self.host.gather_parts(version))

    def _model(self) -> tuple[npt.NDArray[np.float64], dict[str, npt.NDArray[np.float64]]]:
        return self.tensors()["weights"][: self._num_parameters].astype(np.float64), {}

    def checkpoint(self, version: int, state: bytes) -> Checkpoint:
        self.host.tensors()
        checkpoint = Checkpoint(
            job="unit", fingerprint="", term=self.term, version=version, state=state, tensors={},
            parts=self.host.gather_parts(version),
        )  # fmt: skip
        self.store.save(checkpoint)
        self.host.forget_parts(version)
        return checkpoint

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        if self.dice.random() < self.kills:
            self.threads.kill(self.dice.randrange(self.shards))
        return super().perform(action)

    def handle(self, event: ev.Event) -> None:
        try:
            super().handle(event)
        except (ShardLostError, CheckpointError):
            self.counts["shards lost"] += 1
            self.start_server()


class InThree(ShardedWorld):
    shards = 3
    kills = 0.08  # some of these worlds make no update


class Whole(ShardedWorld):
    kills = 0.0


class WholeInThree(Whole):
    shards = 3


def without_tables() -> Iterator[int]:
    """Seeds whose worlds have no tables."""
    seed = SEED * 1_000_000
    while True:
        if random.Random(seed).random() >= 1 / 3:
            yield seed
        seed += 1


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_is_the_sum_of_its_batches_while_shards_are_lost(policy: str) -> None:
    lost = updates = 0
    for number, seed in zip(range(INTERLEAVINGS), without_tables(), strict=False):
        world_class = (ShardedWorld, InThree)[number % 2]
        try:
            world = play(policy, seed, world_class)
        except Exception as exc:
            raise AssertionError(f"policy {policy!r}, seed {seed}: {type(exc).__name__}: {exc}") from exc
        world.threads.close()  # type: ignore[attr-defined]
        lost, updates = lost + world.counts["shards lost"], updates + world.counts["updates"]
    assert updates
    assert lost


@pytest.mark.parametrize("policy", POLICIES)
def test_any_number_of_shards_makes_the_same_model(policy: str) -> None:
    seed = next(without_tables())
    expected = play(policy, seed).host.tensors()["weights"]
    for world_class in (Whole, WholeInThree):
        world = play(policy, seed, world_class)
        assert world.tensors()["weights"].tobytes() == expected.tobytes()  # type: ignore[attr-defined]
        world.threads.close()  # type: ignore[attr-defined]


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
        parts = [None] if shards == 1 else [ModelSlice(self.model, part) for part in self.model.slices]
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
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(override: str, problem: str) -> None:
    def make() -> None:
        config = parse(JOB % TRAININGS["momentum"], ["ps.shards=2", override])
        build(config, load_task(config))

    with pytest.raises(ConfigError, match=problem):
        make()
