"""What a worker says of the batches that it has cut, and what it does where the server means others."""

from __future__ import annotations

import msgspec
import pytest
from doll.consumers.protocol.worker_core import (
    Acknowledge,
    Batch,
    Compute,
    ComputedBatch,
    GradientDone,
    Send,
    Serve,
    StoreRest,
    WorkerCore,
)
from doll.records.control import Announce, BatchRange, Durable, Flush, Grant, Nack, Push, Served, Settle, Welcome

SERVED = Served(
    partition=2, origin=100, next_batch=5, included=6, decided=7, left_out=3, cuts=((6, 2),)
)  # fmt: skip


def welcome(served: Served = SERVED) -> Welcome:
    return Welcome(term=1, worker=0, process="me", session=3, served=(served,), fingerprint="f")


def grant(first: int, *batches: tuple[int, int], left_out: tuple[tuple[int, int], ...] = ()) -> Grant:
    numbers = tuple(range(10 + first, 10 + first + len(batches)))
    return Grant(
        term=1, worker=0, session=3, first=first, grant_ids=numbers, batches=batches, version=4, min_version=4, key="w",
        left_out=left_out,
    )  # fmt: skip


@pytest.fixture
def core() -> WorkerCore:
    """It has read batches 5 to 9, and has cut 8."""
    made = WorkerCore(welcome(), max_pending=8, now=0.0)
    for number in range(5, 10):
        if number == 8:
            made.served[2].cuts.add(8, 1)
        made.hold(Batch(number, number, 4, 0.0, partition=2))
    return made


def test_it_announces_what_it_has_cut_and_what_others_have_decided(core: WorkerCore) -> None:
    assert core.announce() == [Send(Announce(worker=0, session=3, runs=(BatchRange(2, 5, 10, 3, ((6, 2), (8, 1))),)))]
    core.on_record(Durable(term=1, worker=0, until={2: 8}, batches=3, left_out={2: 5}), 1.0)
    assert core._announce_all() == [Send(Announce(worker=0, session=3, runs=(BatchRange(2, 8, 10, 5, ((8, 1),)),)))]


def test_it_computes_the_batches_that_the_server_means_and_no_others(core: WorkerCore) -> None:
    (order,) = core.on_record(grant(0, (2, 7), (2, 8), left_out=((5, 0), (5, 1))), 1.0)
    assert isinstance(order, Compute)
    for left_out in ((), ((5, 0),), ((6, 1),)):
        (refused,) = core.on_record(grant(2, (2, 9), left_out=left_out), 1.0)
        assert isinstance(refused, Send)
        assert isinstance(refused.record, Nack)
        assert (refused.record.batch, refused.record.reason) == (2, "batch")
    (order,) = core.on_record(grant(2, (2, 9), left_out=((6, 0),)), 1.0)
    assert isinstance(order, Compute)


def test_the_part_of_a_grant_names_the_cuts_of_its_part(core: WorkerCore) -> None:
    (order,) = core.on_record(grant(0, (2, 7), (2, 8), left_out=((5, 0), (5, 1))), 1.0)
    assert isinstance(order, Compute)
    (order,) = core.on_record(grant(0, (2, 7), (2, 8), (2, 9), left_out=((5, 0), (5, 1), (6, 0))), 1.0)
    assert isinstance(order, Compute)
    assert (order.grant.first, order.grant.left_out) == (2, ((6, 0),)), "the others are being computed"


def test_what_is_acknowledged_ends_where_the_cuts_say(core: WorkerCore) -> None:
    durable = Durable(term=1, worker=0, until={2: 9}, batches=4, left_out={2: 6})
    other = msgspec.structs.replace(durable, left_out={2: 5})
    assert core.on_record(other, 1.0) == [], "these are not the batches that are here: a Welcome is on its way"
    assert core.on_record(durable, 1.0) == [Acknowledge(2, 9, 6)]
    assert core.served[2].bounds(4).lo(9) == 100 + 4 * 9 - 6


@pytest.mark.parametrize(
    "served",
    [
        msgspec.structs.replace(SERVED, decided=9, cuts=((6, 2),)),  # it has cut 8, and another was faster
        msgspec.structs.replace(SERVED, decided=9, cuts=((6, 2), (8, 2))),
        msgspec.structs.replace(SERVED, decided=11, cuts=((6, 2), (8, 1), (10, 3))),
        msgspec.structs.replace(SERVED, next_batch=7, included=7, left_out=4, cuts=()),
    ],
)
def test_where_others_have_decided_in_another_way_it_reads_again(core: WorkerCore, served: Served) -> None:
    core.announce()
    (serve, *others) = core.on_record(welcome(served), 1.0)
    assert serve == Serve((2,), (served,))
    assert others == [], "nothing is there to be announced"
    assert (core.retained, core.served[2].next_batch) == (0, served.next_batch)
    assert core.served[2].cuts.within(0, 20) == served.cuts


def test_what_is_decided_as_it_has_read_it_stays_and_is_not_cut_any_more(core: WorkerCore) -> None:
    core.announce()
    served = msgspec.structs.replace(SERVED, next_batch=7, included=8, decided=11, left_out=5, cuts=((8, 1),))
    acknowledged, announced = core.on_record(welcome(served), 1.0)
    assert acknowledged == Acknowledge(2, 7, 5)
    assert announced == Send(Announce(worker=0, session=3, runs=(BatchRange(2, 7, 10, 5, ((8, 1),)),)))
    assert core.served[2].cuts.decided == 11
    core.on_record(welcome(msgspec.structs.replace(served, decided=7, cuts=())), 1.0)
    assert core.served[2].cuts.decided == 11, "a later server has decided less: what is read stays"


def test_it_is_told_where_a_source_has_ended(core: WorkerCore) -> None:
    assert core.served[2].flush_until == 0
    assert core.on_record(Flush(term=1, worker=0, until={2: 140, 9: 3}), 1.0) == []
    assert core.served[2].flush_until == 140
    core.on_record(welcome(msgspec.structs.replace(SERVED, flush_until=130)), 1.0)
    assert core.served[2].flush_until == 140, "one behind it is known"
    core.on_record(welcome(msgspec.structs.replace(SERVED, flush_until=150)), 1.0)
    assert core.served[2].flush_until == 150
    assert WorkerCore(welcome(msgspec.structs.replace(SERVED, flush_until=7)), max_pending=8, now=0.0).served[
        2
    ].flush_until == 7  # fmt: skip


def test_what_is_kept_for_a_push_of_more_batches_is_pushed_when_no_more_come(core: WorkerCore) -> None:
    ask = Settle(term=1, worker=0, session=3, until=0)
    assert core.on_record(ask, 1.0) == [], "nothing is kept"
    (order,) = core.on_record(grant(0, (2, 7), left_out=((5, 0),)), 1.0)
    assert isinstance(order, Compute)
    assert core.on_record(ask, 1.0) == [], "it is being computed"
    kept = GradientDone("", 4, (ComputedBatch(4),), is_kept=True)
    core.gradient_done(order.grant, order.batches, kept, 1.0)
    (rest,) = core.on_record(ask, 1.0)
    assert rest == StoreRest(1, 0)
    (push,) = (
        action.record
        for action in core.rest_stored(StoreRest(1, 0), GradientDone("key", 4, (), holds=((0, 10),)))
        if isinstance(action, Send) and isinstance(action.record, Push)
    )
    assert [(item.batch, item.grant_id) for item in push.batches] == [(0, 10)]
    assert core.on_record(ask, 1.0) == [], "nothing is kept any more"
