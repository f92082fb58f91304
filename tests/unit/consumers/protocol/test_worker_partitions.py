"""A worker that serves two partitions: one order of its batches, and each partition in its own."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from doll.consumers.protocol.skipped_batches import SkippedRange
from doll.consumers.protocol.worker_core import Acknowledge, Batch, Compute, Exit, Send, Serve, WorkerCore
from doll.records.control import Alive, Announce, BatchRange, Durable, Grant, Nack, Served, Skip, Welcome

SERVED = (Served(partition=2, origin=100, next_batch=5), Served(partition=7, origin=0, next_batch=1))


def welcome(*served: Served) -> Welcome:
    return Welcome(term=1, worker=0, process="me", session=3, served=served or SERVED, fingerprint="f")


def batch(partition: int, number: int) -> Batch:
    return Batch(number, f"{partition}/{number}", 4, 0.0, partition=partition)


def grant(first: int, *batches: tuple[int, int]) -> Grant:
    numbers = tuple(range(10 + first, 10 + first + len(batches)))
    return Grant(
        term=1, worker=0, session=3, first=first, grant_ids=numbers, batches=batches, version=4, min_version=4, key="w"
    )


@pytest.fixture
def core() -> WorkerCore:
    """It has read 2/5, 7/1, 7/2 and 2/6, in this order."""
    made = WorkerCore(welcome(), max_pending=8, now=0.0)
    for partition, number in ((2, 5), (7, 1), (7, 2), (2, 6)):
        made.hold(batch(partition, number))
    return made


def test_batches_are_announced_in_the_order_in_which_they_came_and_so_again(core: WorkerCore) -> None:
    runs = (BatchRange(2, 5, 6), BatchRange(7, 1, 3), BatchRange(2, 6, 7))
    assert core.announce() == [Send(Announce(worker=0, session=3, runs=runs))]
    assert core.announce() == []
    assert core.on_record(welcome(), 1.0) == [Send(Announce(worker=0, session=3, runs=runs))], "after a new Welcome"
    with pytest.raises(ValueError, match="expected batch 3 of partition 7, got 4"):
        core.hold(batch(7, 4))


def test_a_grant_says_which_batches_its_numbers_are(core: WorkerCore) -> None:
    (order,) = core.on_record(grant(20, (2, 5), (7, 1), (7, 2)), 1.0)
    assert isinstance(order, Compute)
    assert [(item.number, item.data) for item in order.batches] == [(20, "2/5"), (21, "7/1"), (22, "7/2")]
    assert core.is_wanted(1, 21, 31)
    (refused,) = core.on_record(grant(23, (2, 6), (7, 3)), 1.0)
    assert isinstance(refused, Send), "7/3 is not here"
    assert isinstance(refused.record, Nack)
    assert (refused.record.batch, refused.record.reason) == (23, "batch")
    (other,) = core.on_record(msgspec.structs.replace(grant(23, (2, 6)), batches=()), 1.0)
    assert isinstance(other, Send), "one grant, and no batch"


def test_each_partition_is_released_and_acknowledged_by_itself(core: WorkerCore) -> None:
    core.on_record(grant(20, (2, 5), (7, 1), (7, 2)), 1.0)
    durable = Durable(term=1, worker=0, until={7: 3, 2: 5, 9: 1}, batches=20)
    assert core.on_record(durable, 2.0) == [Acknowledge(7, 3)], "of 2 nothing more, and 9 is another worker's"
    assert (core.retained, core.served[7].durable, core.served[2].durable) == (2, 3, 5)
    assert core.on_record(Durable(term=1, worker=0, until={2: 6}, batches=23), 2.0) == [Acknowledge(2, 6)]
    assert not core.is_wanted(1, 20, 30), "its answer is not needed any more"


def test_what_is_skipped_in_one_partition_holds_up_no_other() -> None:
    core = WorkerCore(welcome(), max_pending=8, now=0.0)
    (told,) = core.skip(2, SkippedRange(5, 300, ((100, 200),), ()))
    assert isinstance(told, Send)
    assert isinstance(told.record, Skip)
    assert (told.record.partition, told.record.first, told.record.until) == (2, 5, 300)
    assert core.batch_ready(batch(7, 1)) == [Send(Announce(worker=0, session=3, runs=(BatchRange(7, 1, 2),)))]
    assert core.on_record(Durable(term=1, worker=0, until={2: 300}, batches=0), 1.0) == [Acknowledge(2, 300)]
    assert core.served[2].next_batch == 300
    assert core.batch_ready(batch(2, 300)) == [Send(Announce(worker=0, session=3, runs=(BatchRange(2, 300, 301),)))]


def test_what_a_worker_serves_changes_with_a_welcome(core: WorkerCore) -> None:
    core.on_record(grant(20, (2, 5), (7, 1)), 1.0)
    new = Served(partition=4, origin=50, next_batch=9, included=11)
    serve, announced = core.on_record(welcome(SERVED[0], new), 1.0)
    assert serve == Serve((7,), (new,))
    assert announced == Send(Announce(worker=0, session=3, runs=(BatchRange(2, 5, 7),)))
    assert core.is_wanted(1, 20, 30), "it goes on with what it computes"
    (order,) = core.on_record(msgspec.structs.replace(grant(21, (2, 6)), grant_ids=(40,)), 1.0)
    assert isinstance(order, Compute)
    assert [(item.number, item.data) for item in order.batches] == [(21, "2/6")]
    assert not core.is_wanted(1, 21, 31), "7/1 is computed by another worker"
    assert (core.retained, sorted(core.served)) == (2, [2, 4])
    assert core.on_record(Durable(term=1, worker=0, until={7: 3}, batches=21), 2.0) == [], "7 is another worker's"
    core.hold(batch(4, 9))
    with pytest.raises(KeyError):
        core.hold(batch(7, 3))
    (serve, _) = core.on_record(welcome(*SERVED), 3.0)
    assert serve == Serve((4,), (SERVED[1],))
    core.hold(batch(7, 1))
    assert core.retained == 3, "what was read before does not count"


def test_a_spare_serves_nothing_and_waits(core: WorkerCore) -> None:
    assert core.on_record(msgspec.structs.replace(welcome(), served=()), 1.0) == [Serve((2, 7), ())]
    assert (core.retained, core.served, core.announce()) == (0, {}, [])
    assert [type(action.record) for action in core.tick(10.0) if isinstance(action, Send)] == [Alive]


def test_another_place_in_a_partition_means_reading_again(core: WorkerCore) -> None:
    back = (SERVED[0], Served(partition=7, origin=0, next_batch=0))
    assert core.on_record(welcome(*back), 1.0) == [
        Exit(1, "partition 7: the durable model is back at 0 of 1: reading again")
    ]


def test_a_partition_that_is_durable_further_than_was_read_is_read_from_there(core: WorkerCore) -> None:
    """It has moved here from a worker whose last batches have become durable since: the process goes on."""
    ahead = Served(partition=7, origin=0, next_batch=9, included=9)
    serve, *others = core.on_record(welcome(SERVED[0], ahead), 1.0)
    assert serve == Serve((7,), (ahead,))
    assert not [action for action in others if isinstance(action, Exit)]
    assert core.served[7].next_batch == 9
    core.hold(batch(7, 9))


def test_room_is_of_all_partitions_together(core: WorkerCore) -> None:
    assert core.has_room
    for number in (3, 4, 5, 6):
        core.hold(batch(7, number))
    assert (core.retained, core.has_room) == (8, False)
    assert replace(batch(2, 6), number=9).number_in_partition == 6, "a batch keeps its number in its partition"
