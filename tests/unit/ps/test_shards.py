"""A model in shards: equal to the undivided one by bits, also after shards were lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import channel_process
import numpy as np
import numpy.typing as npt
import pytest
from channel_process import POLICIES
from channel_world import World, play
from doll.errors import CheckpointError
from doll.model import slices as slices_module
from doll.model.flat_model import build, fingerprint
from doll.optim import optimizer as optimizer_module
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.shards.sharded_host import ShardLostError
from doll.ps.start import Start, make_engine
from doll.storage.checkpoints import Checkpoint, joined
from fuzzing import SEED, SHARE
from memory_shards import ShardThreads
from memory_stores import MemoryCheckpointStore

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

    def begin(self) -> None:
        channel_process._REPLICAS.clear()
        self.config = self.config.model_copy(
            update={"ps": self.config.ps.model_copy(update={"shards": self.shards})}
        )  # fmt: skip
        self.store = MemoryCheckpointStore("unit")
        self.threads = ShardThreads(self.config, self.task, self.store, self.blobs)
        self.dice = random.Random(self.rng.random())

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
        if self.dice.random() < 0.004:
            self.threads.kill(self.dice.randrange(self.shards))
        return super().perform(action)

    def handle(self, event: ev.Event) -> None:
        try:
            super().handle(event)
        except (ShardLostError, CheckpointError):
            self.counts["shards lost"] += 1
            self.start_server()


class InFour(ShardedWorld):
    shards = 3


def without_tables(policy: str) -> Iterator[int]:
    """Seeds whose worlds have no tables."""
    seed = SEED * 1_000_000
    while True:
        if random.Random(seed).random() >= 1 / 3:
            yield seed
        seed += 1


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_is_the_sum_of_its_batches_while_shards_are_lost(policy: str) -> None:
    lost = updates = 0
    for number, seed in zip(range(INTERLEAVINGS), without_tables(policy), strict=False):
        world_class = (ShardedWorld, InFour)[number % 2]
        try:
            world = play(policy, seed, world_class)
        except Exception as exc:
            raise AssertionError(f"policy {policy!r}, seed {seed}: {type(exc).__name__}: {exc}") from exc
        world.threads.close()  # type: ignore[attr-defined]
        lost, updates = lost + world.counts["shards lost"], updates + world.counts["updates"]
    assert updates
    assert lost or INTERLEAVINGS < 100
