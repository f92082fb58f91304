"""A worker's protocol, record by record: what is sent, computed, acknowledged; and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from doll.consumers.protocol.worker_core import (
    Acknowledge,
    Batch,
    Compute,
    ComputedBatch,
    Exit,
    GradientDone,
    Send,
    StoreRest,
    WorkerAction,
    WorkerCore,
)
from doll.records.control import (
    Alive,
    Announce,
    AnyRecord,
    Durable,
    Fence,
    Grant,
    Hello,
    Join,
    Leave,
    Nack,
    NewVersion,
    Push,
    PushedBatch,
    Settle,
    Stop,
    Welcome,
)

COMPUTED = ComputedBatch(4, 12.0, {"accuracy": 4.0}, (101,), 2, 0.1)
DONE = GradientDone("doll:j:g:3:1", 9, (COMPUTED,), 0.2, 0.3)


def welcome(**changes: Any) -> Welcome:
    values: dict[str, Any] = {
        "term": 3, "worker": 1, "process": "me", "session": 7, "origin": 100, "next_batch": 5, "fingerprint": "f",
    }  # fmt: skip
    return Welcome(**{**values, **changes})


def grant(first: int, *numbers: int, **changes: Any) -> Grant:
    values: dict[str, Any] = {
        "term": 3, "worker": 1, "session": 7, "first": first, "grant_ids": numbers or (1,), "version": 9,
        "min_version": 9,
        "key": "doll:j:w:3:9",
    }  # fmt: skip
    return Grant(**{**values, **changes})


def batch(number: int, **changes: Any) -> Batch:
    return Batch(**{"number": number, "data": f"data {number}", "num_samples": 8, "complete_at_s": 10.0, **changes})


def announced(first: int, until: int) -> list[WorkerAction]:
    return [Send(Announce(worker=1, session=7, first=first, until=until))]


@pytest.fixture
def core() -> WorkerCore:
    """Worker 1, which holds the batches 5, 6 and 7."""
    made = WorkerCore(welcome(), max_pending=4, now=0.0, market="spot")
    for number in (5, 6, 7):
        assert made.batch_ready(batch(number)) == announced(number, number + 1)
    return made


def test_it_starts_where_the_durable_model_stands() -> None:
    core = WorkerCore(welcome(next_batch=12), max_pending=4, now=0.0)
    assert (core.next_batch, core.retained, core.has_room, core.busy) == (12, 0, True, False)


def test_a_batch_out_of_order_is_a_bug(core: WorkerCore) -> None:
    with pytest.raises(ValueError, match="expected batch 8, got 9"):
        core.batch_ready(batch(9))
    assert core.retained == 3


def test_it_holds_so_many_batches_and_no_more(core: WorkerCore) -> None:
    assert core.has_room
    core.batch_ready(batch(8))
    assert not core.has_room
    assert core.on_record(Durable(term=3, worker=1, until=6), 1.0) == [Acknowledge(6)]
    assert core.has_room


def test_a_grant_is_computed_and_pushed_with_all_that_the_lineage_needs(core: WorkerCore) -> None:
    core = WorkerCore(welcome(), max_pending=4, now=0.0, market="spot")
    held = batch(5, gaps=((103, 105),), num_samples=5, leader_epoch=4)
    core.batch_ready(held)
    asked = grant(5)
    assert core.on_record(asked, 11.0) == [Compute(asked, (held,))]
    assert core.busy
    assert core.is_current(asked)
    (sent,) = core.gradient_done(asked, (held,), DONE, begun_at_s=12.5)
    assert sent == Send(
        Push(
            worker=1, session=7, term=3, version=9, key="doll:j:g:3:1", fetch_s=0.2, store_s=0.3, market="spot",
            batches=(
                PushedBatch(
                    batch=5, grant_id=1, n_samples=4, loss_sum=12.0, metric_sums={"accuracy": 4.0}, dead=(101,),
                    gaps=((103, 105),), dead_samples=2, compute_s=0.1, wait_s=2.5, leader_epoch=4,
                ),
            ),
        )
    )  # fmt: skip
    assert not core.busy
    assert core.gradient_done(asked, (held,), DONE, 12.5) == []  # once


@pytest.mark.parametrize("number", [4, 8, -1, 10**12])
def test_a_grant_of_a_batch_that_it_does_not_hold_is_refused(core: WorkerCore, number: int) -> None:
    nack = Nack(worker=1, session=7, batch=number, term=3, grant_id=1, reason="batch")
    assert core.on_record(grant(number), 1.0) == [Send(nack)]
    assert not core.busy


def test_weights_that_are_gone_are_told_never_replaced_by_others(core: WorkerCore) -> None:
    asked = grant(5)
    core.on_record(asked, 1.0)
    nack = Nack(worker=1, session=7, batch=5, term=3, grant_id=1, reason="weights")
    assert core.weights_missing(asked) == [Send(nack)]
    assert core.weights_missing(asked) == []


def test_a_later_grant_of_the_same_batch_replaces_the_earlier(core: WorkerCore) -> None:
    first, second = grant(5, 1), grant(5, 2, version=10)
    core.on_record(first, 1.0)
    core.on_record(second, 1.0)
    assert not core.is_current(first)
    assert core.gradient_done(first, (batch(5),), DONE, 1.0) == []
    assert len(core.gradient_done(second, (batch(5),), DONE, 1.0)) == 1


@pytest.mark.parametrize(
    "stale",
    [
        grant(5, session=6),
        grant(5, term=2),
        Durable(term=2, worker=1, until=7),
        Stop(term=2, reason="old"),
        Hello(term=2),
        welcome(term=2, next_batch=0),
        welcome(process="other", session=6),
        Fence(term=3, worker=1, process="other"),
        Join(worker=1, process="me"),
        Announce(worker=1, session=7, first=0, until=1),
    ],
    ids=lambda record: type(record).__name__,
)
def test_mail_of_an_older_server_for_another_process_or_of_the_wrong_kind_is_nothing(
    core: WorkerCore, stale: AnyRecord
) -> None:
    asked = grant(6)
    core.on_record(asked, 1.0)
    assert core.on_record(stale, 1.0) == []
    assert (core.retained, core.session, core.term, core.is_current(asked)) == (3, 7, 3, True)


def test_durable_acknowledges_in_order_and_forgets(core: WorkerCore) -> None:
    asked = grant(5)
    core.on_record(asked, 1.0)
    assert core.on_record(Durable(term=3, worker=1, until=7), 1.0) == [Acknowledge(7)]
    assert (core.retained, core.next_batch) == (1, 8)
    assert not core.is_current(asked)  # it has been applied already: nobody wants its gradient
    assert core.on_record(Durable(term=3, worker=1, until=7), 1.0) == []
    assert core.on_record(Durable(term=3, worker=1, until=6), 1.0) == []
    assert core.on_record(Durable(term=3, worker=1, until=8), 1.0) == [Acknowledge(8)]


def test_what_became_durable_before_it_was_read_again_takes_no_room() -> None:
    """All that its predecessor had announced is saved while this process has read nothing: nobody will say so again."""
    core = WorkerCore(welcome(), max_pending=2, now=0.0)
    core.on_record(Durable(term=3, worker=1, until=7), 1.0)
    assert Acknowledge(6) in core.batch_ready(batch(5))
    assert Acknowledge(7) in core.batch_ready(batch(6))
    assert (core.retained, core.has_room, core.next_batch) == (0, True, 7)
    assert core.batch_ready(batch(7)) == announced(7, 8)
    assert core.on_record(Durable(term=3, worker=1, until=8), 1.0) == [Acknowledge(8)]


def test_a_new_server_says_hello_and_hears_all_that_is_not_durable(core: WorkerCore) -> None:
    asked = grant(5)
    core.on_record(asked, 1.0)
    assert core.on_record(Hello(term=4), 1.0) == [Send(Join(worker=1, process="me", session=7))]
    assert not core.is_current(asked)  # its server is gone
    assert core.on_record(grant(5), 1.0) == []
    actions = core.on_record(welcome(term=4, session=7, next_batch=6), 2.0)
    assert actions == [Acknowledge(6), *announced(6, 8)]
    assert core.term == 4


def test_a_later_machine_claims_its_slot_from_a_server_that_has_forgotten_it() -> None:
    core = WorkerCore(welcome(), max_pending=4, now=0.0, incarnation=3)
    join = Send(Join(worker=1, process="me", session=7, incarnation=3))
    assert core.on_record(Hello(term=4), 1.0) == [join]
    assert core.on_record(welcome(term=4, process="older", session=99, incarnation=2), 1.0) == [join]
    for later in (0, 3, 4):  # 0: a process that nobody has numbered
        (action,) = core.on_record(welcome(term=4, process="newer", session=99, incarnation=later), 1.0)
        assert isinstance(action, Exit)
        assert action.code == 0
    core.drain()
    assert core.on_record(welcome(term=4, process="older", session=99, incarnation=2), 1.0) == []


def test_a_new_server_may_give_a_new_session(core: WorkerCore) -> None:
    core.on_record(welcome(term=4, session=99), 1.0)
    (action,) = core.batch_ready(batch(8))
    assert action == Send(Announce(worker=1, session=99, first=8, until=9))
    assert core.on_record(grant(5, term=4), 1.0) == []
    assert len(core.on_record(grant(5, term=4, session=99), 1.0)) == 1


@pytest.mark.parametrize(("next_batch", "said"), [(4, "is back at 4"), (9, "is at 9")])
def test_it_reads_again_where_the_model_is_not_where_it_stands(core: WorkerCore, next_batch: int, said: str) -> None:
    (action,) = core.on_record(welcome(term=4, next_batch=next_batch), 1.0)
    assert isinstance(action, Exit)
    assert action.code == 1
    assert said in action.reason


def test_nothing_held_is_nothing_announced() -> None:
    core = WorkerCore(welcome(), max_pending=4, now=0.0)
    assert core.on_record(welcome(term=4), 1.0) == []
    assert core.tick(100.0)[1:] == []


@pytest.mark.parametrize(
    "record", [Fence(term=3, worker=1, process="me"), welcome(process="newer", session=8)], ids=["fence", "welcome"]
)
def test_a_replaced_process_ends_and_is_not_started_again(core: WorkerCore, record: AnyRecord) -> None:
    (action,) = core.on_record(record, 1.0)
    assert isinstance(action, Exit)
    assert action.code == 0
    assert action.reason.startswith("fenced")


@pytest.mark.parametrize("term", [3, 4])
def test_the_end_of_the_job_ends_it(core: WorkerCore, term: int) -> None:
    assert core.on_record(Stop(term=term, reason="done"), 1.0) == [Exit(0, "job ended (done)")]


def test_it_gives_signs_of_life_and_announces_again(core: WorkerCore) -> None:
    core.next_offset, core.lag = 164, 36
    alive = Send(Alive(worker=1, session=7, retained=3, next_offset=164, lag=36))
    assert core.tick(0.9) == []
    assert core.tick(1.0) == [alive]
    assert core.tick(1.5) == []
    assert core.tick(2.0) == [alive]
    assert core.tick(3.0) == [alive, *announced(5, 8)]
    assert core.tick(4.0) == [alive]


def test_a_draining_worker_announces_nothing_and_finishes_what_it_owes(core: WorkerCore) -> None:
    asked = grant(5)
    core.on_record(asked, 1.0)
    core.drain()
    assert core.batch_ready(batch(8)) == []
    assert core.on_record(Hello(term=3), 1.0) == []
    assert core.tick(10.0) == [Send(Alive(worker=1, session=7, retained=4))]
    assert core.on_record(grant(6, 2), 1.0) == [Compute(grant(6, 2), (batch(6),))]
    assert len(core.gradient_done(grant(6, 2), (batch(6),), DONE, 1.0)) == 1
    assert core.leave("sigterm") == [Send(Leave(worker=1, session=7, cause="sigterm"))]
    assert not core.busy


def test_a_group_does_not_wait_for_the_announcement_of_what_comes_while_a_gradient_is_computed() -> None:
    core = WorkerCore(welcome(next_batch=0), max_pending=32, now=0.0)
    assert core.batch_ready(batch(0)) == announced(0, 1)
    core.on_record(grant(0), 1.0)
    for number in range(1, 9):
        assert core.batch_ready(batch(number)) == announced(number, number + 1)


def test_where_the_server_has_enough_announcements_wait_for_the_tick() -> None:
    """A message for each batch would cost broker and server more than it brings."""
    core = WorkerCore(welcome(next_batch=0), max_pending=32, now=0.0)
    for number in range(9):
        core.batch_ready(batch(number))
    core.on_record(grant(0), 1.0)
    assert core.batch_ready(batch(9)) == core.batch_ready(batch(10)) == []
    assert core.tick(0.5) == announced(9, 11)
    assert core.tick(0.6) == []
    for number in (1, 2, 3):
        core.on_record(grant(number, number + 1), 1.0)
    assert core.batch_ready(batch(11)) == announced(11, 12), "7 are left"


def test_few_announced_batches_are_followed_by_more_with_the_push() -> None:
    core = WorkerCore(welcome(next_batch=0), max_pending=32, now=0.0)
    for number in range(9):
        core.batch_ready(batch(number))
    core.on_record(grant(0), 1.0)
    assert core.batch_ready(batch(9)) == []
    core.on_record(grant(1, 2), 1.0)
    announcement, push = core.gradient_done(grant(0), (batch(0),), DONE, 1.0)
    assert [announcement] == announced(9, 10)
    assert isinstance(push, Send)
    assert isinstance(push.record, Push)


def test_a_server_whose_origin_is_another_makes_it_read_again(core: WorkerCore) -> None:
    """The same batch numbers would be other offsets: what it holds must not be announced under them."""
    (action,) = core.on_record(welcome(term=4, session=8, origin=140), 1.0)
    assert action == Exit(1, "the job now begins at offset 140, not at 100: reading again")
    (action,) = core.on_record(welcome(term=4, session=8, generation=4), 1.0)
    assert action == Exit(1, "another run of the job has begun: reading again")


# --- sets -------------------------------------------------------------------------------------------------------------


def pushed(actions: list[WorkerAction]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Key and (batch, grant) of every push."""
    records = [action.record for action in actions if isinstance(action, Send) and isinstance(action.record, Push)]
    return [(push.key, [(item.batch, item.grant_id) for item in push.batches]) for push in records]


def done(key: str, *samples: int, version: int = 9) -> GradientDone:
    return GradientDone(key, version, tuple(map(ComputedBatch, samples)))


def batches(*numbers: int) -> tuple[Batch, ...]:
    return tuple(map(batch, numbers))


def test_a_grant_of_several_batches_is_computed_at_once_and_answered_by_one_push(core: WorkerCore) -> None:
    asked = grant(5, 1, 4, 6)
    assert core.on_record(asked, 1.0) == [Compute(asked, batches(5, 6, 7))]
    actions = core.gradient_done(asked, batches(5, 6, 7), done("k", 8, 0, 8), 12.0)
    assert pushed(actions) == [("k", [(5, 1), (6, 4), (7, 6)])]
    assert [item.n_samples for item in actions[-1].record.batches] == [8, 0, 8]  # type: ignore[union-attr]
    assert not core.busy


def test_a_set_that_ends_early_leaves_the_rest_wanted(core: WorkerCore) -> None:
    asked = grant(5, 1, 4, 6)
    core.on_record(asked, 1.0)
    assert pushed(core.gradient_done(asked, batches(5, 6, 7), done("a", 8), 12.0)) == [("a", [(5, 1)])]
    assert core.busy
    assert [core.is_wanted(3, 5, 1), core.is_wanted(3, 6, 4), core.is_wanted(3, 7, 6)] == [False, True, True]
    rest = grant(6, 4, 6)
    assert core.is_current(rest)
    assert pushed(core.gradient_done(rest, batches(6, 7), done("b", 8, 8), 12.0)) == [("b", [(6, 4), (7, 6)])]
    assert not core.busy


def test_the_rest_of_a_set_whose_weights_are_gone_is_refused_by_its_first_batch(core: WorkerCore) -> None:
    asked = grant(5, 1, 4)
    core.on_record(asked, 1.0)
    core.gradient_done(asked, batches(5, 6), done("a", 8), 12.0)
    nack = Nack(worker=1, session=7, batch=6, term=3, grant_id=4, reason="weights")
    assert core.weights_missing(grant(6, 4)) == [Send(nack)]
    assert not core.busy


def test_a_grant_of_which_a_batch_is_not_held_is_refused_whole(core: WorkerCore) -> None:
    nack = Nack(worker=1, session=7, batch=6, term=3, grant_id=1, reason="batch")
    assert core.on_record(grant(6, 1, 2, 3), 1.0) == [Send(nack)]
    assert not core.busy


def test_a_grant_of_no_batch_is_nothing(core: WorkerCore) -> None:
    assert core.on_record(msgspec.structs.replace(grant(5), grant_ids=()), 1.0) == []


def test_a_void_set_is_not_pushed_and_one_of_which_a_part_is_void_is_for_the_server_to_refuse(core: WorkerCore) -> None:
    first = grant(5, 1, 2)
    core.on_record(first, 1.0)
    core.on_record(grant(6, 3), 1.0)
    assert core.is_current(first)
    assert pushed(core.gradient_done(first, batches(5, 6), done("a", 8, 8), 1.0)) == [("a", [(5, 1), (6, 2)])]
    assert core.is_wanted(3, 6, 3), "the later grant of batch 6 is not answered by it"
    core.on_record(grant(6, 4, 5), 1.0)
    assert pushed(core.gradient_done(grant(6, 3), batches(6), done("b", 8), 1.0)) == []


def test_a_repeated_grant_that_is_being_computed_is_ignored(core: WorkerCore) -> None:
    asked = grant(5, 1, 2, 3)
    core.on_record(asked, 1.0)
    assert core.on_record(asked, 1.0) == []
    assert core.on_record(grant(6, 2, 3), 1.0) == [], "a part of it"
    assert core.is_current(asked)


def test_a_repeated_grant_that_was_answered_gets_its_push_again(core: WorkerCore) -> None:
    asked = grant(5, 1, 2, 3)
    core.on_record(asked, 1.0)
    answer = core.gradient_done(asked, batches(5, 6, 7), done("a", 8, 8), 1.0)
    assert core.on_record(asked, 1.0) == answer, "batch 7 is being computed"
    assert core.on_record(grant(6, 2), 1.0) == answer, "the set as it was pushed, whatever part of it is asked for"


def test_a_repeated_grant_whose_refusal_may_be_lost_is_computed(core: WorkerCore) -> None:
    asked = grant(5, 1, 2)
    core.on_record(asked, 1.0)
    core.weights_missing(asked)
    assert core.on_record(asked, 1.0) == [Compute(asked, batches(5, 6))]


def test_a_repeated_grant_of_which_a_part_is_new_is_computed_in_that_part(core: WorkerCore) -> None:
    core.on_record(grant(6, 4), 1.0)
    assert core.on_record(grant(5, 3, 4, 5), 1.0) == [
        Compute(grant(5, 3), batches(5)),
        Compute(grant(7, 5), batches(7)),
    ]


def test_an_older_grant_that_comes_late_does_not_replace_a_newer_one(core: WorkerCore) -> None:
    core.on_record(grant(5, 3, 4), 1.0)
    assert core.on_record(grant(5, 1, 2), 1.0) == []
    assert core.is_wanted(3, 5, 3)
    core.gradient_done(grant(5, 3, 4), batches(5, 6), done("a", 8, 8), 1.0)
    assert core.on_record(grant(5, 1, 2), 1.0) == [], "nor is it computed where the newer one is answered"


def test_pushes_that_nothing_has_confirmed_are_sent_again(core: WorkerCore) -> None:
    core.on_record(grant(5, 1, 2), 1.0)
    core.gradient_done(grant(5, 1, 2), batches(5, 6), done("a", 8), 1.0)
    core.gradient_done(grant(6, 2), batches(6), done("b", 8), 1.0)
    assert pushed(core.resend()) == [("a", [(5, 1)]), ("b", [(6, 2)])]
    core.on_record(Durable(term=3, worker=1, until=6), 1.0)
    assert pushed(core.resend()) == [("b", [(6, 2)])]


@pytest.mark.parametrize(
    ("record", "left"),
    [
        (grant(7, 9, version=10, included=6), 0),
        (grant(7, 9, version=10, included=5), 1),  # others made it
        (grant(5, 1, version=10, included=6), 0),  # a late copy, and it has been applied
        (NewVersion(term=3, worker=1, version=10, key="k"), 1),  # others made it: this push may be on its way
        (grant(5, 1, version=10), 1),  # the same grant again: the push that answers it did not arrive
        (Hello(term=3), 0),
        (Hello(term=4), 0),
    ],
)
def test_a_push_is_confirmed_by_weights_that_hold_its_batches_and_void_for_another_server(
    core: WorkerCore, record: AnyRecord, left: int
) -> None:
    core.on_record(grant(5, 1), 1.0)
    core.gradient_done(grant(5, 1), batches(5), done("a", 8), 1.0)
    core.on_record(record, 1.0)
    assert len(core.resend()) == left


@pytest.mark.parametrize("by", ["hello", "welcome"])
def test_an_order_of_an_earlier_server_is_void_although_the_later_one_counts_its_grants_from_one_again(
    core: WorkerCore, by: str
) -> None:
    """The same batches, the same version and the same numbers: only the term tells the two grants apart."""
    before, after = grant(5, 1, 2), grant(5, 1, 2, term=4)
    core.on_record(before, 1.0)
    if by == "hello":
        core.on_record(Hello(term=4), 1.0)
    core.on_record(welcome(term=4), 1.0)
    assert core.on_record(after, 1.0) == [Compute(after, batches(5, 6))]
    assert not core.is_current(before)
    assert not core.is_wanted(3, 6, 2)
    assert core.gradient_done(before, batches(5, 6), done("old", 8, 8), 1.0) == []
    assert core.weights_missing(before) == []
    assert core.is_current(after)
    assert pushed(core.gradient_done(after, batches(5, 6), done("new", 8, 8), 1.0)) == [("new", [(5, 1), (6, 2)])]


# --- late copies ------------------------------------------------------------------------------------------------------


def test_a_late_copy_of_an_answered_grant_gets_its_push_again_and_is_not_computed(core: WorkerCore) -> None:
    """A channel has changed: the server sent its grants again while the other channel still carried the first ones."""
    first = grant(5, 1)
    core.on_record(first, 1.0)
    answer = core.gradient_done(first, batches(5), done("a", 8), 1.0)
    core.on_record(grant(6, 2, version=10, included=6), 1.0)
    assert core.on_record(first, 1.0) == answer, "the server refuses what it has"
    assert not core.is_wanted(3, 5, 1)
    assert core.is_wanted(3, 6, 2)
    core.on_record(Durable(term=3, worker=1, until=6), 1.0)
    (action,) = core.on_record(first, 1.0)
    assert isinstance(action, Send)
    assert isinstance(action.record, Nack), "of a batch that is durable"


def test_a_late_copy_is_void_where_the_server_has_lost_track_of_this_process(core: WorkerCore) -> None:
    """It has taken its grants back, but those that it has a push of: what it grants next has other numbers."""
    first = grant(5, 1)
    core.on_record(first, 1.0)
    core.gradient_done(first, batches(5), done("a", 8), 1.0)
    core.on_record(grant(6, 2, 3), 1.0)
    core.on_record(Hello(term=3), 1.0)
    core.on_record(welcome(), 1.0)
    for copy in (first, grant(6, 2, 3), grant(7, 3)):
        assert core.on_record(copy, 1.0) == []
    assert core.on_record(grant(6, 4), 1.0) == [Compute(grant(6, 4), batches(6))]


def kept(key: str, *holds: tuple[int, int]) -> GradientDone:
    """One batch is computed; `key`: and stored, with all that `holds` names."""
    return GradientDone(key, 9, (ComputedBatch(8, version=9),), is_kept=not key, holds=holds)


def test_a_push_names_what_the_sum_holds_and_nothing_else(core: WorkerCore) -> None:
    """A batch of the wave was granted again while it was computed: whatever is said to be kept, the sum decides."""
    for number in (5, 6, 7):
        core.on_record(grant(number, number), 1.0)
    assert core.gradient_done(grant(5, 5), batches(5), kept(""), 1.0) == []
    assert core.gradient_done(grant(6, 6), batches(6), kept(""), 1.0) == []
    actions = core.gradient_done(grant(7, 7), batches(7), kept("k", (5, 5), (7, 7)), 1.0)
    assert pushed(actions) == [("k", [(5, 5), (7, 7)])], "the server refuses it: batch 6 is missing"


def test_a_grant_that_was_overtaken_has_what_is_behind_it_computed_again(core: WorkerCore) -> None:
    """The link carried a later grant while this one was on its way through Kafka: its step was not in the view."""
    core.on_record(grant(6, 11), 1.0)
    core.gradient_done(grant(6, 11), batches(6), kept(""), 1.0)
    assert core.on_record(grant(5, 10), 1.0) == [
        Compute(grant(5, 10), batches(5)),
        Compute(grant(6, 11), batches(6)),
    ]
    assert core.busy


def test_a_batch_that_is_granted_again_takes_back_those_behind_it(core: WorkerCore) -> None:
    for number in (5, 6, 7):
        core.on_record(grant(number, number), 1.0)
        core.gradient_done(grant(number, number), batches(number), kept(""), 1.0)
    assert not core.busy
    assert core.on_record(grant(6, 20), 1.0) == [Compute(grant(6, 20), batches(6))]
    assert [core.is_wanted(3, 5, 5), core.is_wanted(3, 6, 20), core.is_wanted(3, 7, 7)] == [True, True, False]


# --- what is held back ------------------------------------------------------------------------------------------------

ASKED = Settle(term=3, worker=1, session=7, until=6)
REST = GradientDone("doll:j:g:3:1:rest", 9, ())


def settling(core: WorkerCore) -> StoreRest:
    """Batch 5 is pushed, a part of its step is held back, and the server asks for it."""
    core.on_record(grant(5, 1), 1.0)
    core.gradient_done(grant(5, 1), batches(5), holding("a"), 1.0)
    (order,) = core.on_record(ASKED, 1.0)
    assert order == StoreRest(3, 6)
    return order


def holding(key: str) -> GradientDone:
    return GradientDone(key, 9, (ComputedBatch(8),), holds_back=True)


def rests(actions: Sequence[WorkerAction]) -> list[str]:
    """Keys of the rests that are sent."""
    records = [action.record for action in actions if isinstance(action, Send)]
    return [record.key for record in records if isinstance(record, Push) and not record.batches]


def test_a_second_settle_is_answered_by_the_same_rest(core: WorkerCore) -> None:
    order = settling(core)
    assert core.busy, "it must not leave before the rest is stored"
    assert core.on_record(ASKED, 1.0) == [], "the rest is being stored"
    assert rests(core.rest_stored(order, REST)) == [REST.key]
    assert rests(core.on_record(ASKED, 1.0)) == [REST.key]
    assert rests(core.resend()) == [REST.key]
    assert core.rest_stored(order, GradientDone("", 9, ())) == [], "nothing was left: that replaces nothing"
    assert rests(core.resend()) == [REST.key]


def test_a_late_settle_takes_nothing_of_what_was_held_back_since(core: WorkerCore) -> None:
    order = settling(core)
    core.rest_stored(order, REST)
    core.on_record(Durable(term=3, worker=1, until=6), 1.0)
    core.on_record(grant(6, 2, included=6), 1.0)
    core.gradient_done(grant(6, 2), batches(6), holding("b"), 1.0)
    assert core.on_record(ASKED, 1.0) == []
    assert core.rest == StoreRest(3, 7)


def test_a_late_copy_of_a_grant_does_not_make_the_worker_forget_its_rest(core: WorkerCore) -> None:
    order = settling(core)
    core.rest_stored(order, REST)
    core.on_record(grant(5, 1), 1.0)
    assert rests(core.on_record(ASKED, 1.0)) == [REST.key]


def test_a_rest_that_was_not_stored_is_stored_when_the_server_asks_again(core: WorkerCore) -> None:
    order = settling(core)
    core.rest_not_stored(order)
    assert core.on_record(ASKED, 1.0) == [order]
    core.on_record(Hello(term=4), 1.0)
    assert core.rest_stored(order, REST) == [], "another server"
    assert core.rest is None
