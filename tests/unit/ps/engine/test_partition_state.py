"""Counters of one partition, and which worker serves it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine, EngineSettings
from doll.ps.engine.partition_state import Partition, PushedSet
from doll.ps.policies.doll import Doll
from doll.records.control import Announce, Durable, Grant, Join, Welcome
from pushes import answer


def test_a_batch_moves_along_the_counters_in_order() -> None:
    partition = Partition(3, origin=100, applied=5)
    partition.announce([10, 11, 12])
    grants = [partition.grant(number, 7, 7, 1.0) for number in (1, 2)]
    assert [(grant.batch, grant.queue_position, grant.partition) for grant in grants] == [(5, 10, 3), (6, 11, 3)]
    assert (partition.received, partition.granted, partition.announced) == (5, 7, 8)
    assert partition.apply(5) is None, "its gradient is not there"
    granted = Grant(term=1, worker=0, session=1, first=5, grant_ids=(1,), version=7, min_version=7, key="")
    partition.hold(PushedSet(answer(granted, 1, ""), (grants[0],), 2.0))
    assert partition.apply(6) is None
    assert partition.apply(5) is grants[0]
    assert (partition.applied, partition.durable, partition.unsaved) == (6, 5, 1)
    assert partition.offsets(5, 4) == (120, 124)


def test_what_is_taken_back_keeps_its_place_in_the_order_of_announcements() -> None:
    partition = Partition(0, origin=0, applied=0)
    partition.announce(range(4))
    for number in (1, 2, 3):
        partition.grant(number, 0, 0, 0.0)
    assert [grant.batch for grant in partition.take_back(1)] == [2, 1]
    assert list(partition.waiting) == [1, 2, 3]
    assert (partition.granted, partition.announced) == (1, 4)
    partition.forget_waiting()
    assert partition.announced == 1


@dataclass
class Exchanged:
    """An engine from a checkpoint in which worker 0 serves partition 1, and worker 1 partition 0."""

    engine: Engine

    @classmethod
    def make(cls, assignment: tuple[int, ...] = (1, 0)) -> Exchanged:
        settings = EngineSettings(
            num_workers=2, records_per_batch=4, max_pending_batches=8, lease_s=8.0, grant_timeout_s=30.0,
            checkpoint_every_updates=1, checkpoint_every_s=1e9,
        )  # fmt: skip
        fresh = Engine(settings, Doll(1), term=1, now=0.0, origins=(1000, 2000)).snapshot(0.0)
        stored = msgspec.structs.replace(fresh, version=5, applied=(3, 2), assignment=assignment)
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=ev.EngineSnapshot)
        return cls(Engine(settings, Doll(1), term=2, now=0.0, snapshot=state))

    def handle(self, event: ev.Event) -> list[ev.EngineAction]:
        actions = self.engine.handle(event, 0.0)
        self.engine.check_invariants()
        return actions


def test_the_assignment_of_a_checkpoint_says_whose_batches_a_worker_has() -> None:
    world = Exchanged.make()
    (welcome,) = world.handle(Join(worker=0, process="a"))
    assert isinstance(welcome, Welcome)
    assert (welcome.origin, welcome.next_batch) == (2000, 2)
    published, grant = world.handle(Announce(worker=0, session=welcome.session, first=2, until=3))
    assert published == ev.PublishWeights(5)
    assert isinstance(grant, Grant)
    assert (grant.worker, grant.first, len(grant.grant_ids)) == (0, 2, 1)
    update, order = world.handle(answer(grant, 2, ""))
    assert isinstance(update, ev.ApplyUpdate)
    assert [(batch.lo, batch.hi) for batch in update.sets[0].batches] == [(2008, 2012)], "offsets of partition 1"
    assert isinstance(order, ev.StoreCheckpoint)
    assert (order.snapshot.applied, order.snapshot.assignment) == ((3, 3), (1, 0))
    (durable,) = world.handle(ev.CheckpointStored(version=6))
    assert durable == Durable(term=2, worker=0, until=3)


@pytest.mark.parametrize("wrong", [(0, 0), (1, 2), (0, -1), (0,)])
def test_each_worker_serves_one_partition(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected each of 2 workers once"):
        Exchanged.make(wrong)
