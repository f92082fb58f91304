"""Random plays of a job that holds out records: each is in one class, the same after kills and late pushes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from doll.ps.engine import events as ev
from doll.records.control import Update
from engine_world import POLICIES
from ledger_world import LedgerWorld

pytestmark = pytest.mark.slow  # loads torch


def is_held_out(partition: int, offset: int) -> bool:
    """Single offsets, and a time slice over whole batches."""
    return (offset + partition) % 7 == 3 or 40 <= offset < 55


class HoldoutWorld(LedgerWorld):
    """A world whose pushes say which records were not learned. The books have what the engine passes on."""

    def held_out_of(self, partition: int, offsets: Sequence[int]) -> tuple[int, ...]:
        return tuple(offset for offset in offsets if is_held_out(partition, offset))

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        done = super().perform(action)
        if isinstance(action, ev.ApplyUpdate):
            pushed = [batch.pushed for item in action.sets for batch in item.batches]
            at, update = next(
                (at, record) for at, record in reversed(list(enumerate(self.records)))
                if isinstance(record, Update) and record.version == action.version
            )  # fmt: skip
            members = tuple(
                msgspec.structs.replace(member, held_out=item.held_out, n_samples=item.n_samples)
                for member, item in zip(update.members, pushed, strict=True)
            )
            self.records[at] = msgspec.structs.replace(
                update, members=members, n_samples=sum(item.n_samples for item in pushed)
            )
        return done


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(2))
def test_the_model_has_each_accepted_record_except_those_that_are_held_out(policy: str, seed: int) -> None:
    world = HoldoutWorld(policy)
    rng = random.Random(seed)
    for _ in range(1200):
        world.work(rng)
        if rng.random() < 0.005:
            world.kill_server()
            world.start_server()
    world.settle()
    report = world.audit()
    assert report.violations() == []
    assert world.stored is not None
    durable = [
        (line.partition, offset) for line in report.partitions for offset in range(line.origin, line.applied_until)
    ]
    expected = sum(is_held_out(*at) for at in durable)
    assert report.held_out == expected > 50
    assert report.applied == len(durable) - expected == world.stored.samples_total
    assert world.engine.counters["held_out_records"] <= expected  # since the last server began
