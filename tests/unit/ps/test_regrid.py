"""`doll regrid`: batches of other sizes, under other policies, and each offset is in the model once all the same."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from doll.ledger.balance import Range
from engine_runs import play, random_steps
from engine_world import POLICIES
from fuzzing import seeds
from ledger_world import LedgerWorld

pytestmark = pytest.mark.slow  # long random runs


class ManyGrids(LedgerWorld):
    """Counts what happens around its regrids."""

    seen: Counter[str]

    def __init__(self, policy: str) -> None:
        self.seen = Counter()
        super().__init__(policy)

    def regrid(self, policy: str, records_per_batch: int) -> None:
        if self.stored is not None:
            self.seen["regrids"] += 1
            self.seen["void updates"] += bool(self.updates) and self.updates[-1].version > self.stored.version
            self.seen["other sizes"] += records_per_batch != self.settings.records_per_batch
            self.seen["cut before"] += any(self.stored.left_out)
            self.seen["processes that live on"] += any(process.core is not None for process in self.live())
        super().regrid(policy, records_per_batch)


def world_of(seed: int) -> ManyGrids:
    """A random job of up to five grids, at rest."""
    rng = random.Random(seed)
    names = sorted(POLICIES)
    world = ManyGrids(rng.choice(names))
    world.share_cut = rng.choice((0.0, 0.2))
    for _ in range(rng.randrange(1, 5)):
        play(world, random_steps(rng.randrange(1 << 30), rng.randrange(1200)))
        world.regrid(rng.choice(names), rng.choice((1, 2, 3, 5)))
    play(world, random_steps(rng.randrange(1 << 30), rng.randrange(1200)))
    world.settle()
    return world


def test_every_offset_is_applied_once_in_whichever_grid() -> None:
    seen: Counter[str] = Counter()
    for seed in seeds(60):
        world = world_of(seed)
        report = world.audit()
        assert report.ok, (seed, report.violations())
        assert world.stored is not None
        assert report.version == world.engine.version
        first = world.stored.earlier_grids[0].origins if world.stored.earlier_grids else tuple(world.origins)
        until = [line.applied_until for line in report.partitions]
        assert [line.origin for line in report.partitions] == list(first)
        assert report.applied == sum(until) - sum(first)
        # Progress in the streams, in batches of today's size; each grid before counts in whole ones.
        records = sum(grid.num_records for grid in world.stored.earlier_grids)
        size = world.settings.records_per_batch
        assert world.engine.batches_total == records // size + sum(world.stored.applied)
        seen += world.seen
        seen["learned in several grids"] += len({grid.version for grid in world.stored.earlier_grids} - {0}) > 1
    assert set(seen) == {
        "regrids", "void updates", "other sizes", "cut before", "processes that live on", "learned in several grids",
    }, seen  # fmt: skip


def test_what_is_lost_or_learned_twice_at_a_seam_is_noticed() -> None:
    """A new grid that begins one record too late, or too early."""
    noticed: Counter[str] = Counter()
    for seed in range(12):
        for shift in (1, -1):
            world = ManyGrids("doll")
            world.high = [high + 30 for high in world.high]
            play(world, random_steps(seed, 1500))
            world.settle()
            world.regrid("bsp", 3)
            if world.stored is None or not world.stored.version:
                continue
            world.origins[0] += shift
            world.stored = type(world.stored)(
                **{
                    **{name: getattr(world.stored, name) for name in world.stored.__struct_fields__},
                    "origins": tuple(world.origins),
                }
            )
            world.high = [high + 30 for high in world.high]
            world.settle()
            report = world.audit()
            assert not report.ok
            seam = world.stored.earlier_grids[0].ends[0]
            if report.missing == (Range(0, seam, seam + 1),):
                noticed["lost"] += 1
            if report.twice == (Range(0, seam - 1, seam),):
                noticed["twice"] += 1
            assert any("before the job was regridded" in problem for problem in report.problems)
    assert set(noticed) == {"lost", "twice"}
