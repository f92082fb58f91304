"""Held batches that go back to the queue: what `Grants` counts then, and what it refuses."""

from __future__ import annotations

import pytest
import record_builders
from doll.errors import IllegalEventError
from doll.ps.engine.batch_queue import ActiveGrant, BatchQueue, PushedSet
from doll.ps.engine.grants import Grants
from doll.ps.engine.membership import Worker
from doll.ps.engine.partition_state import PartitionState
from doll.ps.policies.base import BatchId
from doll.ps.policies.vap import Vap
from doll.records.control import BatchRange
from engine_invariants import check_grants
from pushes import answer

VERSION = 7
OTHER, MINE = 0, 1


def workers_with_batches(*, waiting: int) -> tuple[list[Worker], Grants]:
    """Two workers, each with so many complete batches."""
    workers = [
        Worker(number, BatchQueue({number: PartitionState(number, 0, 0)}, 0), 1, f"w{number}", 0, 0, present=True)
        for number in (OTHER, MINE)
    ]
    grants = Grants(workers, workers, Vap(1.0))
    for number in range(waiting):
        for worker in workers:
            run = BatchRange(worker.number, number, number + 1)
            assert worker.queue.announce(run, waiting) == 1
            grants.note_change(worker)
    grants.changed.clear()
    return workers, grants


def granted(grants: Grants, worker: Worker, *, held: bool) -> ActiveGrant:
    """The next batch of `worker`, under way; `held`: its push has come."""
    grant = grants.grant(worker, VERSION, VERSION, 0.0)
    if held:
        hold(grants, grant)
    return grant


def hold(grants: Grants, *held: ActiveGrant) -> PushedSet:
    first = held[0]
    order = record_builders.grant_of(
        term=1, worker=first.worker, session=1, first=first.batch, grant_ids=tuple(grant.number for grant in held),
        version=VERSION, min_version=VERSION, key="",
    )  # fmt: skip
    pushed = PushedSet(answer(order, 1, f"step {first.number}"), held, 1.0)
    for grant in held:
        grant.pushed = pushed
        grants.release(grant)
    grants.hold(pushed)
    return pushed


def test_a_held_batch_that_is_given_back_is_the_first_in_the_queue_and_gets_another_grant() -> None:
    (other, mine), grants = workers_with_batches(waiting=3)
    standing = granted(grants, other, held=True)
    void = granted(grants, mine, held=True)
    grants.changed.clear()

    pushed = grants.give_back(BatchId(MINE, 0))

    assert pushed is void.pushed, "whoever gave it back drops its step"
    assert grants.get(void.number) is None
    assert grants.get(standing.number) is standing
    assert (grants.num_held, grants.num_computing, grants.num_waiting) == (1, 0, 2 + 3)
    assert grants.held_batches() == [BatchId(OTHER, 0)]
    assert [batch.batch_id.number for batch in mine.queue.waiting] == [0, 1, 2], "it is the first again"
    assert (mine.applied, mine.held, mine.waiting) == (0, 0, 3)
    assert list(grants.changed) == [MINE], "the policy is told"
    check_grants(grants, VERSION, is_ending=False)

    again = granted(grants, mine, held=True)
    assert (again.batch, again.batch_id) == (0, BatchId(MINE, 0))
    assert again.number > void.number, "the void push answers no grant that stands"
    assert [item.grants for item in grants.apply([BatchId(MINE, 0)])] == [(again,)]
    assert mine.applied == 1
    check_grants(grants, VERSION, is_ending=False)


def test_it_may_be_given_back_behind_held_batches_of_its_worker() -> None:
    (_, mine), grants = workers_with_batches(waiting=3)
    first, second = (granted(grants, mine, held=True) for _ in range(2))
    assert grants.give_back(BatchId(MINE, 1)).grants == (second,)
    assert grants.get(first.number) is first
    check_grants(grants, VERSION, is_ending=False)
    assert [item.grants for item in grants.apply([BatchId(MINE, 0)])] == [(first,)]


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(0, id="a later one of its worker is held"),
        pytest.param(1, id="a later one is computed"),
        pytest.param(2, id="its step has not come"),
        pytest.param(3, id="it was never granted"),
    ],
)
def test_only_the_last_batch_under_way_of_a_worker_may_be_void(batch: int) -> None:
    (_, mine), grants = workers_with_batches(waiting=4)
    for held in (True, True, False):
        granted(grants, mine, held=held)
    with pytest.raises(IllegalEventError, match=f"policy vap voids batch {batch} of partition 1"):
        grants.give_back(BatchId(MINE, batch))
    assert (grants.num_held, grants.num_computing, mine.waiting) == (2, 1, 1)
    check_grants(grants, VERSION, is_ending=False)


def test_a_batch_of_a_set_is_not_given_back_without_the_others() -> None:
    (_, mine), grants = workers_with_batches(waiting=2)
    hold(grants, *[granted(grants, mine, held=False) for _ in range(2)])
    with pytest.raises(IllegalEventError, match="pushed by itself"):
        grants.give_back(BatchId(MINE, 1))
