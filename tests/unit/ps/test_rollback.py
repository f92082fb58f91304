"""`doll rollback`: an earlier version goes on, and each offset is in the model once, or skipped as it was told."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from doll.ledger.balance import Range
from doll.ps.engine.events import EngineSnapshot
from doll.ps.rollback import rolled_back
from doll.records.control import Evaluated, Update
from doll.records.rollbacks import is_left
from engine_runs import play, random_steps
from engine_world import POLICIES
from fuzzing import seeds
from ledger_world import LedgerWorld

pytestmark = pytest.mark.slow  # long random runs


class ManyLines(LedgerWorld):
    """Keeps its checkpoints with their terms, and counts what happens around its rollbacks."""

    seen: Counter[str]
    kept: list[tuple[int, EngineSnapshot]]

    def __init__(self, policy: str) -> None:
        self.seen, self.kept = Counter(), []
        super().__init__(policy)

    def keep(self) -> None:
        if self.stored is not None and (not self.kept or self.kept[-1][1].version < self.stored.version):
            self.kept.append((self.term, self.stored))

    def go_back(self, rng: random.Random) -> None:
        """Roll back to some checkpoint that the newest one has gone through, if there is one."""
        if self.stored is None:
            return
        newest = self.stored
        known = [
            item for term, item in self.kept
            if item.version < newest.version and not is_left(newest.rollbacks, term, item.version, item.grid)
        ]  # fmt: skip
        if not known:
            return
        earlier, skip = rng.choice(known), rng.random() < 0.5
        self.seen["rollbacks"] += 1
        self.seen["behind a rollback"] += bool(earlier.rollbacks)
        self.seen["over a rollback"] += len(earlier.rollbacks) < len(newest.rollbacks)
        self.seen["over a regrid"] += earlier.grid < newest.grid
        self.seen["void updates"] += bool(self.updates) and self.updates[-1].version > newest.version
        self.seen["processes that live on"] += any(process.core is not None for process in self.live())
        self.rollback(earlier, skip=skip)
        assert self.stored is not None
        assert self.stored.version == newest.version + 1
        assert self.stored.grid == newest.grid + 1
        assert self.stored.samples_total == earlier.samples_total
        skipped = sum(self.stored.origins) - sum(self.stored.earlier_grids[-1].ends)
        self.seen["skipped records"] += skipped
        assert skip or not skipped
        report = self.audit()  # before the next server has begun
        assert report.ok, report.violations()


def world_of(seed: int) -> ManyLines:
    """A random job of up to six parts, with regrids and rollbacks between them, at rest."""
    rng = random.Random(seed)
    names = sorted(POLICIES)
    world = ManyLines(rng.choice(names))
    world.share_cut = rng.choice((0.0, 0.2))
    for _ in range(rng.randrange(2, 7)):
        for _ in range(rng.randrange(1, 4)):
            play(world, random_steps(rng.randrange(1 << 30), rng.randrange(500)))
            world.keep()
        if rng.random() < 0.25:
            world.regrid(rng.choice(names), rng.choice((1, 2, 3, 5)))
        else:
            world.go_back(rng)
        if not world.is_serving:
            world.start_server()
    play(world, random_steps(rng.randrange(1 << 30), rng.randrange(800)))
    world.settle()
    return world


def test_every_offset_is_applied_once_or_skipped_in_whichever_line() -> None:
    seen: Counter[str] = Counter()
    for seed in seeds(90):
        world = world_of(seed)
        report = world.audit()
        assert report.ok, (seed, report.violations())
        assert world.stored is not None
        assert report.version == world.engine.version
        grids = world.stored.earlier_grids
        first = grids[0].origins if grids else tuple(world.origins)
        until = [line.applied_until for line in report.partitions]
        assert [line.origin for line in report.partitions] == list(first)
        skipped = sum(sum(grid.skipped) for grid in grids)
        assert report.skipped == skipped
        assert report.applied + report.skipped == sum(until) - sum(first)
        assert len(report.rollbacks) == len(world.stored.rollbacks)
        records = sum(grid.num_records for grid in grids)
        assert world.engine.batches_total == records // world.settings.records_per_batch + sum(world.stored.applied)
        learned = {record.version for record in world.records if isinstance(record, Update)}
        assert world.engine.version - world.stored.empty_updates <= len(learned)
        seen += world.seen
    assert set(seen) == {
        "rollbacks", "behind a rollback", "over a rollback", "over a regrid", "void updates", "processes that live on",
        "skipped records",
    }, seen  # fmt: skip
    assert seen["rollbacks"] > 0.7 * len(seeds(90))


def test_what_is_lost_or_learned_twice_at_a_seam_is_noticed() -> None:
    """A line that begins one record too late or too early, and one that forgets what it has left."""
    noticed: Counter[str] = Counter()
    for seed in range(4):
        for change in ("late", "early", "forgotten"):
            world = ManyLines("doll")
            for part in range(3):
                world.high = [high + 30 for high in world.high]
                play(world, random_steps(seed + part, 500))
                world.settle()
                world.keep()
            known = [item for _, item in world.kept if world.stored and 0 < item.version < world.stored.version]
            if not known:
                continue
            world.rollback(known[0], skip=False)
            assert world.stored is not None
            if change == "forgotten":
                world.stored = msgspec.structs.replace(world.stored, rollbacks=())
            else:
                world.origins[0] += 1 if change == "late" else -1
                world.stored = msgspec.structs.replace(world.stored, origins=tuple(world.origins))
            world.start_server()
            world.high = [high + 30 for high in world.high]
            world.settle()
            report = world.audit()
            assert not report.ok, change
            seam = known[0].origins[0] + 2 * known[0].applied[0]
            if report.missing == (Range(0, seam, seam + 1),):
                noticed["lost"] += 1
            if report.twice == (Range(0, seam - 1, seam),):
                noticed["twice"] += 1
            noticed["forgotten"] += change == "forgotten"
    assert set(noticed) == {"lost", "twice", "forgotten"}


def test_partitions_that_were_added_since_are_skipped_or_begin_again() -> None:
    world = ManyLines("doll")
    world.high = [high + 30 for high in world.high]
    play(world, random_steps(3, 600))
    world.settle()
    assert world.stored is not None
    target = Evaluated(term=1, version=world.stored.version, loss=0.1, accuracy=0.95)
    newest = msgspec.structs.replace(world.stored, reached=target)
    earlier = msgspec.structs.replace(
        newest, version=1, origins=newest.origins[:2], applied=(1, 0), left_out=(), samples_total=2,
        leader_epochs=(4, 5), sessions=newest.sessions,
    )  # fmt: skip
    again = rolled_back(earlier, newest, 2, "doll", term=9, skip=False)
    assert again.origins == (newest.origins[0] + 2, newest.origins[1], 0)
    assert again.leader_epochs == (4, 5, -1)
    assert again.reached is None, "other weights have met the stop rule"
    skipped = rolled_back(earlier, newest, 2, "doll", term=9, skip=True)
    assert skipped.origins == tuple(
        origin + 2 * count for origin, count in zip(newest.origins, newest.applied, strict=True)
    )  # fmt: skip
    assert skipped.earlier_grids[0].next_origins == skipped.origins
