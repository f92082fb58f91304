"""Counters of one partition, and which worker serves it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
import pytest
from doll.ps.engine import events as ev
from doll.ps.engine.assignment import reassigned
from doll.ps.engine.batch_queue import ActiveGrant, BatchQueue, PushedSet
from doll.ps.engine.engine import Engine
from doll.ps.engine.partition_state import PartitionState
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies.base import BatchId
from doll.ps.policies.doll import Doll
from doll.records.control import Announce, BatchRange, Durable, Grant, Join, Welcome
from engine_invariants import check_engine, check_queue
from hypothesis import given
from hypothesis import strategies as st
from pushes import answer
from record_builders import announce, grant_of


def queue_of(*partitions: PartitionState, announced: int = 0) -> BatchQueue:
    """A queue of which each partition has announced so many batches, one of each in turn."""
    queue = BatchQueue(
        {partition.number: partition for partition in partitions}, sum(partition.applied for partition in partitions)
    )
    for _ in range(announced):
        for partition in partitions:
            run = BatchRange(partition.number, partition.announced, partition.announced + 1)
            assert queue.announce(run, 100) == 1
    return queue


def hold(queue: BatchQueue, *grants: ActiveGrant) -> None:
    order = grant_of(0, grants[0].batch, [grant.number for grant in grants], version=7)
    pushed = PushedSet(answer(order, 1, ""), grants, 2.0)
    for grant in grants:
        grant.pushed = pushed
    queue.hold(pushed)
    check_queue(queue)


def test_a_batch_moves_along_the_counters_in_order() -> None:
    partition = PartitionState(3, origin=100, applied=5)
    queue = queue_of(partition, announced=3)
    grants = [queue.grant(number, 0, 7, 7, 1.0) for number in (1, 2)]
    assert [grant.batch_id for grant in grants] == [(3, 5), (3, 6)]
    assert (partition.received, partition.granted, partition.announced, queue.pending) == (5, 7, 8, 3)
    assert queue.apply(BatchId(3, 5)) is None, "its gradient is not there"
    hold(queue, grants[0])
    assert queue.apply(BatchId(3, 6)) is None
    assert queue.apply(BatchId(3, 5)) is grants[0]
    assert (partition.applied, partition.durable, partition.unsaved) == (6, 5, 1)
    assert partition.offsets(5, 4) == (120, 124)
    check_queue(queue)


def test_what_is_taken_back_keeps_its_place() -> None:
    partition = PartitionState(0, origin=0, applied=0)
    queue = queue_of(partition, announced=4)
    for number in (1, 2, 3):
        queue.grant(number, 0, 0, 0, 0.0)
    assert [grant.batch for grant in queue.take_back(1)] == [2, 1]
    assert [batch.batch_id.number for batch in queue.waiting] == [1, 2, 3]
    assert (partition.granted, partition.announced) == (1, 4)
    queue.forget_waiting()
    assert partition.announced == 1
    check_queue(queue)


def test_one_queue_has_the_batches_of_several_partitions_in_the_order_in_which_they_were_read() -> None:
    one, other = PartitionState(1, origin=0, applied=3), PartitionState(4, origin=50, applied=2)
    queue = queue_of(one, other, announced=3)
    grants = [queue.grant(number, 0, 0, 0, 0.0) for number in (1, 2, 3, 4)]
    assert [(grant.batch, *grant.batch_id) for grant in grants] == [(5, 1, 3), (6, 4, 2), (7, 1, 4), (8, 4, 3)]
    hold(queue, grants[0], grants[1])
    assert (one.held, other.held, one.computing, other.computing) == (1, 1, 1, 1)
    assert queue.apply(BatchId(4, 2)) is None, "a worker's batches are applied in its order"
    assert [queue.apply(grant.batch_id) for grant in grants[:2]] == grants[:2]
    assert (one.applied, other.applied, queue.applied, queue.received, queue.settled) == (4, 3, 7, 7, 7)
    assert [grant.batch_id for grant in queue.take_back(7)] == [(4, 3), (1, 4)], "of both partitions, the latest first"
    check_queue(queue)
    assert queue.announce(BatchRange(4, 6, 7), 100) is None, "batch 5 of this partition is missing"
    with pytest.raises(KeyError):
        queue.announce(BatchRange(0, 0, 1), 100)


@dataclass
class Exchanged:
    """An engine with place for two workers, from a checkpoint in which worker 0 serves partition 1, and worker 1
    partition 0; or as the assignment says."""

    engine: Engine

    @classmethod
    def make(cls, assignment: tuple[int, ...] = (1, 0)) -> Exchanged:
        settings = EngineSettings(
            num_workers=2, records_per_batch=4, max_pending_batches=8, lease_s=8.0, grant_timeout_s=30.0,
            checkpoint_every_updates=1, checkpoint_every_s=1e9,
        )  # fmt: skip
        fresh = Engine(settings, Doll(1), term=1, now=0.0, origins=(1000, 2000)).snapshot(0.0)
        stored = msgspec.structs.replace(
            fresh, version=5, applied=(3, 2), assignment=assignment, by_worker=(), num_workers=len(set(assignment))
        )
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=ev.EngineSnapshot)
        return cls(Engine(settings, Doll(1), term=2, now=0.0, snapshot=state))

    def handle(self, event: ev.Event) -> list[ev.EngineAction]:
        actions = self.engine.handle(event, 0.0)
        check_engine(self.engine)
        return actions


def test_the_assignment_of_a_checkpoint_says_whose_batches_a_worker_has() -> None:
    world = Exchanged.make()
    (welcome,) = world.handle(Join(worker=0, process="a"))
    assert isinstance(welcome, Welcome)
    assert [(item.partition, item.origin, item.next_batch) for item in welcome.served] == [(1, 2000, 2)]
    published, grant = world.handle(announce(0, welcome.session, 2, 3, partition=1))
    assert published == ev.PublishWeights(5)
    assert isinstance(grant, Grant)
    assert (grant.worker, grant.first, len(grant.grant_ids)) == (0, 2, 1)
    update, order = world.handle(answer(grant, 2, ""))
    assert isinstance(update, ev.ApplyUpdate)
    assert [(batch.lo, batch.hi) for batch in update.sets[0].batches] == [(2008, 2012)], "offsets of partition 1"
    assert isinstance(order, ev.StoreCheckpoint)
    assert (order.snapshot.applied, order.snapshot.assignment) == ((3, 3), (1, 0))
    durable, published = world.handle(ev.CheckpointStored(version=6))
    assert published == ev.PublishWeights(6), "no grant has asked for it"
    assert durable == Durable(term=2, worker=0, until={1: 3}, batches=3)


@pytest.mark.parametrize("wrong", [(1, 2), (0, -1), (0,)])
def test_each_partition_has_a_worker(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected a worker from 0 to 1 for each of 2 partitions"):
        Exchanged.make(wrong)


def test_a_worker_may_serve_every_partition_and_another_none() -> None:
    world = Exchanged.make((0, 0))
    (welcome,) = world.handle(Join(worker=0, process="a"))
    assert isinstance(welcome, Welcome)
    assert [(item.partition, item.next_batch) for item in welcome.served] == [(0, 3), (1, 2)]
    (idle,) = world.handle(Join(worker=1, process="b"))
    assert isinstance(idle, Welcome)
    assert idle.served == ()
    runs = (BatchRange(0, 3, 4), BatchRange(1, 2, 4), BatchRange(0, 4, 5))
    _, grant = world.handle(Announce(worker=0, session=welcome.session, runs=runs))
    assert isinstance(grant, Grant)
    applied = []
    for _ in range(4):
        actions = world.handle(answer(grant, 2, ""))
        update = next(action for action in actions if isinstance(action, ev.ApplyUpdate))
        applied += [(batch.partition, batch.number, batch.lo) for batch in update.sets[0].batches]
        if grants := [action for action in actions if isinstance(action, Grant)]:
            (grant,) = grants
        for action in actions:
            if isinstance(action, ev.StoreCheckpoint):
                stored = world.handle(ev.CheckpointStored(version=action.version))
                durable = [item.until for item in stored if isinstance(item, Durable)]
                grants = [item for item in stored if isinstance(item, Grant)]
    assert applied == [(0, 3, 1012), (1, 2, 2008), (1, 3, 2012), (0, 4, 1016)]
    assert durable == [{0: 5}]
    assert world.engine.snapshot(0.0).applied == (5, 4)
    assert world.engine.snapshot(0.0).by_worker == (9, 0)


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=40),
    st.sets(st.integers(0, 8), min_size=1),
)
def test_other_workers_take_over_as_few_partitions_as_can_be(owners: list[int | None], workers: set[int]) -> None:
    made = reassigned(owners, workers)
    sizes = Counter(made)
    counts = [sizes[worker] for worker in workers]
    assert sum(counts) == len(owners)
    assert max(counts) - min(counts) <= 1
    assert reassigned(made, workers) == made
    # Who had more than its share keeps its share, the others keep all.
    least, more = divmod(len(owners), len(workers))
    had = sorted((Counter(owners)[worker] for worker in workers), reverse=True)
    stay = sum(min(count, least + (rank < more)) for rank, count in enumerate(had))
    assert sum(a == b for a, b in zip(made, owners, strict=True)) == stay


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_a_job_goes_on_with_another_number_of_workers(num_workers: int) -> None:
    def settings(workers: int) -> EngineSettings:
        return EngineSettings(
            num_workers=workers, records_per_batch=4, max_pending_batches=8, lease_s=8.0, grant_timeout_s=30.0,
            checkpoint_every_updates=1, checkpoint_every_s=1e9,
        )  # fmt: skip

    before = Engine(settings(3), Doll(1), term=1, now=0.0, origins=(0,) * 5).snapshot(0.0)
    before = msgspec.structs.replace(
        before, version=9, applied=(3, 2, 2, 1, 1), by_worker=(4, 3, 2), sessions=(7, 8, 9)
    )
    engine = Engine(settings(num_workers), Doll(1), term=2, now=0.0, snapshot=before)
    engine.handle(ev.Tick(), 0.0)
    check_engine(engine)
    served: dict[int, int] = {}
    for worker in range(num_workers):
        (welcome,) = engine.handle(Join(worker=worker, process=f"w{worker}"), 0.0)
        assert isinstance(welcome, Welcome)
        served |= {item.partition: item.next_batch for item in welcome.served}
    assert served == dict(enumerate(before.applied)), "each partition is read on where it was, by one worker"
    assert engine.handle(Join(worker=num_workers, process="late"), 0.0) == [], "no such worker"
    after = engine.snapshot(0.0)
    assert after.by_worker[:3] == (4, 3, 2), "what a worker has computed stays its own, also of one that is left out"
    again = Engine(settings(3), Doll(1), term=3, now=0.0, snapshot=after)
    assert sorted(Counter(again.snapshot(0.0).assignment).values()) == [1, 2, 2]
    assert engine.batches_total == sum(before.applied)
