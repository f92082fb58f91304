"""`doll regrid` in the world of two channels: other batch sizes, policies and numbers of workers, and the model is the
sum of its batches at every version; tables included."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from channel_process import POLICIES, Process, job_of, takes_tables
from channel_world import World
from doll.model.flat_model import build, fingerprint
from doll.ps.regrid import regrid
from doll.records.control import AnyRecord, Welcome
from expected_model import Moment
from memory_stores import MemoryCheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]  # loads torch


class ManyGrids(World):
    """Regrids as `doll regrid` does: while no server runs, and processes of the grid before live on."""

    def regrid(self, policy: str, size: int, workers: int, *, has_tables: bool) -> None:
        if self.saved is None:
            return
        model = build(self.config, self.task)
        store = MemoryCheckpointStore("unit", keep=100)
        mark = fingerprint(self.config, model)
        store.save(dataclasses.replace(self.saved, fingerprint=mark, layout=model.layout))
        overrides = (f"data.batch_size={size}", f"data.workers={workers}", "data.partitions=3")
        config, _ = job_of(policy, has_tables=has_tables, overrides=overrides)
        if fingerprint(config, build(config, self.task)) == mark:
            return
        result = regrid(config, store)
        before = self.expected.moments[self.saved_by, self.saved.version]
        self.counts["regrids"] += 1
        self.counts["regrids with void updates"] += self.engine.version > self.saved.version
        self.counts["regrids between steps and gradients"] += (
            config.training.policy.sends_steps != self.config.training.policy.sends_steps
        )
        self.config = config
        self.expected.regrid(config.training.policy, size)
        self.saved = store.load_newest(None)
        if "so is" not in result.optimizer_state:
            before = before._replace(momentum=0.0)
        # What the next server begins with.
        self.expected.moments[self.term, result.version] = Moment(*before)
        self.start_server()

    def receive(self, process: Process, record: AnyRecord) -> None:
        """A process that has read the job file of the grid before ends at its first Welcome, as `doll.consumers.main`
        does if its fingerprint is another one than the server's."""
        is_first = process.core is None and isinstance(record, Welcome) and record.process == process.name
        if is_first and process.config is not self.config:
            self.counts["processes of another job file"] += 1
            self.end(process)
        else:
            super().receive(process, record)

    @property
    def saved_by(self) -> int:
        """The term of the newest server whose moments have the saved version."""
        assert self.saved is not None
        return max(term for term, version in self.expected.moments if version == self.saved.version)


def play(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    has_tables = rng.random() < 1 / 3
    names = [name for name in sorted(POLICIES) if takes_tables(name) or not has_tables]
    world = ManyGrids(rng.choice(names), seed, has_tables=has_tables)
    for _ in range(4):
        for _ in range(rng.randrange(200, 1200)):
            world.step()
        world.regrid(
            rng.choice(names), rng.choice((3, 4, 5, 8)), rng.randrange(1, 5), has_tables=has_tables
        )  # fmt: skip
    world.counts["tables"] += has_tables
    return world.counts + world.engine.counters + world.expected.counts


def test_the_model_is_the_sum_of_its_batches_in_whichever_grid() -> None:
    counts: Counter[str] = Counter()
    for seed in range(30):
        try:
            counts += play(seed)
        except Exception as exc:
            raise AssertionError(f"seed {seed}: {type(exc).__name__}: {exc}") from exc
    seen = ("regrids", "regrids with void updates", "regrids between steps and gradients", "tables", "partitions added")
    assert counts["processes of another job file"] > 0
    assert min(counts[name] for name in seen) > 0, counts
    assert counts["regrids"] > 60
    assert counts["updates"] > 400
