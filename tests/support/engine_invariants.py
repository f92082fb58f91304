"""What must hold in an engine after every event; the random tests and the simulated worlds of tests check it."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from doll.ps.engine.batch_queue import BatchQueue
from doll.ps.engine.durability import Durability
from doll.ps.engine.engine import Engine
from doll.ps.engine.grants import Grants, _grantable
from doll.ps.engine.membership import Membership
from doll.ps.engine.partition_state import PartitionState


def check_engine(engine: Engine) -> None:
    check_members(engine._members)
    check_grants(engine._grants, engine.version, is_ending=engine.stopping is not None)
    check_durability(engine._durability)
    running = {
        worker for worker in engine._workers if worker.computing and worker.queue.computing_grants[0].pushed is None
    }
    assert set(engine._limits._since_s) == running
    in_grid = engine.batches_total - engine.start.earlier_batches
    assert in_grid == sum(worker.applied for worker in engine._workers)
    assert in_grid == sum(partition.applied for partition in engine._partitions)
    assert engine.finished or engine.stopping or not engine._grants.changed, "the policy knows of every change"


def check_members(members: Membership) -> None:
    here = {worker.number for worker in members._workers if worker.present and not worker.left}
    assert set(members._last_heard) == here
    assert members._live == {worker.number for worker in members._workers if worker.is_live}


def check_grants(grants: Grants, version: int, *, is_ending: bool) -> None:
    for worker in grants._workers:
        check_queue(worker.queue)
        assert worker.waiting == _grantable(worker)
        assert worker.is_live or not worker.computing, "nobody waits for a worker that is gone"
    assert grants.num_held == len(grants._held) == sum(worker.held for worker in grants._workers)
    assert (
        grants.num_computing == len(grants) - len(grants._held) == sum(worker.computing for worker in grants._workers)
    )
    assert list(grants._standing) == sorted(grants._standing)
    assert set(grants._held) == {number for number, grant in grants._standing.items() if grant.held}
    assert grants.num_waiting == sum(worker.waiting for worker in grants._workers)
    named = Counter(grant.version for grant in grants._standing.values() if grant.names)
    assert grants.named_versions == named, "the weights of a grant live until it is answered or void, and no longer"
    for grant in grants._standing.values():
        assert not grant.names or grant.pushed is None
        assert grant.min_version <= grant.version <= version
        is_exact = grants._is_exact and not is_ending  # at the end only rests are applied
        assert not is_exact or grant.version == grant.min_version == version, (
            "a group's gradients are all of one version"
        )


def check_durability(durability: Durability) -> None:
    unsaved: Counter[int] = Counter()
    for partition, worker in zip(durability._partitions, durability._owners, strict=True):
        unsaved[worker.number] += partition.unsaved
    assert unsaved == durability._unsaved
    assert durability.max_unsaved == max(unsaved.values())


def check_queue(queue: BatchQueue) -> None:
    for partition in queue.partitions.values():
        check_partition(partition)
        held = [grant.batch_id.number for grant in queue.held_grants if grant.partition is partition]
        computing = [grant.batch_id.number for grant in queue.computing_grants if grant.partition is partition]
        waiting = [batch.batch_id.number for batch in queue.waiting if batch.partition is partition]
        assert (partition.held, partition.computing) == (len(held), len(computing))
        assert [*held, *computing, *waiting] == list(range(partition.applied, partition.announced)), (
            "batches are in flight in order, without a hole"
        )
    assert queue.pending == sum(partition.announced - partition.durable for partition in queue.partitions.values())
    first = [batch.batch_id for batch in islice(queue.waiting, len(queue.timed_out))]
    assert [grant.batch_id for grant in queue.timed_out] == first, "the first waiting ones"
    flying = [*queue.held_grants, *queue.computing_grants]
    assert [grant.batch for grant in flying] == list(range(queue.applied, queue.granted)), "in the worker's order"
    assert all(grant.pushed is not None and grant.held for grant in queue.held_grants)
    assert not any(grant.held for grant in queue.computing_grants)
    for grant in flying:
        if grant.pushed is not None:
            assert grant in grant.pushed.grants
            assert len({item.held for item in grant.pushed.grants}) == 1, "a set is held as one"
            assert all(item in flying for item in grant.pushed.grants), "a set is applied and lost as one"


def check_partition(partition: PartitionState) -> None:
    assert partition.durable <= partition.applied
    assert partition.held >= 0
    assert partition.computing >= 0
    assert partition.granted <= partition.announced
