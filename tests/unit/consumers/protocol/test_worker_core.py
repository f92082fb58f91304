"""A worker's protocol, record by record: what is sent, computed, acknowledged; and when it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doll.consumers.protocol.worker_core import (
    Acknowledge,
    Compute,
    Exit,
    Send,
    WorkerCore,
)
from doll.records.control import (
    Alive,
    AnyRecord,
    Durable,
    Fence,
    Hello,
    Join,
    Leave,
    Nack,
    Push,
    PushedBatch,
    Stop,
)
from record_builders import announce
from worker_records import COMPUTED, DONE, announced, batch, grant, welcome


def test_it_starts_where_the_durable_model_stands() -> None:
    core = WorkerCore(welcome(next_batch=12), max_pending=4, now=0.0)
    assert (core.served[core.worker].next_batch, core.retained, core.has_room, core.busy) == (12, 0, True, False)


def test_a_batch_out_of_order_is_a_bug(core: WorkerCore) -> None:
    with pytest.raises(ValueError, match="expected batch 8 of partition 1, got 9"):
        core.batch_ready(batch(9))
    assert core.retained == 3


def test_it_holds_so_many_batches_and_no_more(core: WorkerCore) -> None:
    assert core.has_room
    core.batch_ready(batch(8))
    assert not core.has_room
    assert core.on_record(Durable(term=3, worker=1, until={1: 6}, batches=6), 1.0) == [Acknowledge(1, 6)]
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
                    gaps=((103, 105),), dead_samples=2, compute_s=0.1, wait_s=2.5, leader_epoch=4, shared_loss=0.7,
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


def test_a_nack_is_sent_again_until_its_batch_is_granted_again_or_durable(core: WorkerCore) -> None:
    """It may be lost on a link that breaks, and a server whose time limit has passed waits for an answer."""
    asked = grant(5)
    core.on_record(asked, 1.0)
    nacks = [*core.weights_missing(asked), *core.on_record(grant(7, 3), 1.0), *core.on_record(grant(8, 4), 1.0)]
    assert core.resend() == [nacks[0], nacks[2]]
    assert core.resend() == [nacks[0], nacks[2]]
    core.on_record(grant(5, 5), 1.0)
    assert core.resend() == [nacks[2]]
    core.on_record(Durable(term=3, worker=1, until={1: 8}, batches=9), 1.0)
    assert core.resend() == []


def test_a_nack_is_of_one_session(core: WorkerCore) -> None:
    core.on_record(grant(8), 1.0)
    core.on_record(Hello(term=3), 1.0)
    assert core.resend() == []


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
        Durable(term=2, worker=1, until={1: 7}, batches=7),
        Stop(term=2, reason="old"),
        Hello(term=2),
        welcome(term=2, next_batch=0),
        welcome(process="other", session=6),
        Fence(term=3, worker=1, process="other"),
        Join(worker=1, process="me"),
        announce(1, 7, 0, 1),
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
    assert core.on_record(Durable(term=3, worker=1, until={1: 7}, batches=7), 1.0) == [Acknowledge(1, 7)]
    assert (core.retained, core.served[core.worker].next_batch) == (1, 8)
    assert not core.is_current(asked)  # it has been applied already: nobody wants its gradient
    assert core.on_record(Durable(term=3, worker=1, until={1: 7}, batches=7), 1.0) == []
    assert core.on_record(Durable(term=3, worker=1, until={1: 6}, batches=6), 1.0) == []
    assert core.on_record(Durable(term=3, worker=1, until={1: 8}, batches=8), 1.0) == [Acknowledge(1, 8)]


def test_what_became_durable_before_it_was_read_again_takes_no_room() -> None:
    """All batches that the predecessor announced are saved before this process reads any: no message repeats this."""
    core = WorkerCore(welcome(), max_pending=2, now=0.0)
    core.on_record(Durable(term=3, worker=1, until={1: 7}, batches=7), 1.0)
    assert Acknowledge(1, 6) in core.batch_ready(batch(5))
    assert Acknowledge(1, 7) in core.batch_ready(batch(6))
    assert (core.retained, core.has_room, core.served[core.worker].next_batch) == (0, True, 7)
    assert core.batch_ready(batch(7)) == announced(7, 8)
    assert core.on_record(Durable(term=3, worker=1, until={1: 8}, batches=8), 1.0) == [Acknowledge(1, 8)]


def test_a_new_server_says_hello_and_hears_all_that_is_not_durable(core: WorkerCore) -> None:
    asked = grant(5)
    core.on_record(asked, 1.0)
    assert core.on_record(Hello(term=4), 1.0) == [Send(Join(worker=1, process="me", session=7))]
    assert not core.is_current(asked)  # its server is gone
    assert core.on_record(grant(5), 1.0) == []
    actions = core.on_record(welcome(term=4, session=7, next_batch=6), 2.0)
    assert actions == [Acknowledge(1, 6), *announced(6, 8)]
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
    assert action == Send(announce(1, 99, 8, 9))
    assert core.on_record(grant(5, term=4), 1.0) == []
    assert len(core.on_record(grant(5, term=4, session=99), 1.0)) == 1


def test_it_starts_again_where_the_model_is_behind_what_it_holds(core: WorkerCore) -> None:
    (action,) = core.on_record(welcome(term=4, next_batch=4), 1.0)
    assert isinstance(action, Exit)
    assert action.code == 1
    assert "is back at 4" in action.reason


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


def test_it_tells_what_is_usual_of_its_batches_and_until_then_what_it_was_told() -> None:
    core = WorkerCore(welcome(usual=(2.0, 0.0)), max_pending=4, now=0.0)
    assert core.tick(1.0) == [Send(Alive(worker=1, session=7, usual=(2.0, 0.0)))]
    core.hold(batch(5))
    core.on_record(grant(5), 1.0)
    done = replace(DONE, batches=(replace(COMPUTED, usual=(3.0, 1.0)),))
    core.gradient_done(grant(5), (batch(5),), done, 1.0)
    assert core.tick(2.0) == [Send(Alive(worker=1, session=7, retained=1, usual=(3.0, 1.0)))]


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


def test_a_draining_worker_begins_nothing_and_owes_only_what_it_computes(core: WorkerCore) -> None:
    for number in (5, 6, 7):
        core.on_record(grant(number, number), 1.0)
    assert core.begin(grant(5, 5)) == grant(5, 5)
    core.drain()
    assert core.begin(grant(6, 6)) is core.begin(grant(7, 7)) is None
    assert core.busy
    core.gradient_done(grant(5, 5), (batch(5),), DONE, 1.0)
    assert not core.busy


def test_a_batch_begins_with_the_newest_weights_that_were_granted(core: WorkerCore) -> None:
    waiting = grant(6, 2, version=10, min_version=9, key="w:10")
    core.on_record(grant(5, 1), 1.0)
    core.on_record(waiting, 1.0)
    core.on_record(grant(7, 3, version=12, min_version=10, key="w:12", included=6), 1.0)
    core.on_record(waiting, 1.0)  # once more, late
    assert core.begin(waiting) == grant(6, 2, version=12, min_version=9, key="w:12", included=6)
    core.on_record(grant(6, 4, version=13, min_version=9, key="w:13"), 1.0)
    assert core.begin(waiting) is None, "it is granted again"


def test_weights_of_an_earlier_server_are_not_used(core: WorkerCore) -> None:
    core.on_record(grant(5, 1, version=30), 1.0)
    core.on_record(Hello(term=4), 1.0)
    core.on_record(welcome(term=4), 1.0)
    granted = grant(5, 1, term=4, version=20)
    core.on_record(granted, 1.0)
    assert core.begin(granted) == granted


def test_a_group_does_not_wait_for_the_announcement_of_what_comes_while_a_gradient_is_computed() -> None:
    core = WorkerCore(welcome(next_batch=0), max_pending=32, now=0.0)
    assert core.batch_ready(batch(0)) == announced(0, 1)
    core.on_record(grant(0), 1.0)
    for number in range(1, 9):
        assert core.batch_ready(batch(number)) == announced(number, number + 1)


def test_batches_of_one_moment_are_announced_together() -> None:
    core = WorkerCore(welcome(next_batch=0), max_pending=4, now=0.0)
    for number in range(3):
        core.hold(batch(number))
    assert core.announce() == announced(0, 3)
    assert core.announce() == []
    assert core.batch_ready(batch(3)) == announced(3, 4)
    with pytest.raises(ValueError, match="expected batch 4 of partition 1, got 5"):
        core.hold(batch(5))


def test_where_the_server_has_enough_announcements_wait_for_the_tick() -> None:
    """A message for each batch would cost broker and server more than it brings."""
    core = WorkerCore(welcome(next_batch=0), max_pending=32, now=0.0)
    for number in range(8):
        assert core.batch_ready(batch(number)) == announced(number, number + 1)
    assert core.batch_ready(batch(8)) == [], "also if it waits for a grant: it has enough batches for the next one"
    core.on_record(grant(0), 1.0)
    assert core.batch_ready(batch(9)) == announced(8, 10), "7 are left"
    assert core.batch_ready(batch(10)) == core.batch_ready(batch(11)) == []
    assert core.tick(0.5) == announced(10, 12)
    assert core.tick(0.6) == []


def test_a_worker_without_a_grant_announces_twice_as_many_batches_as_the_server_takes_at_once() -> None:
    core = WorkerCore(welcome(next_batch=0), max_pending=32, now=0.0)
    for number in range(8):
        core.batch_ready(batch(number))
    order = grant(0, *range(1, 9))
    core.on_record(order, 1.0)
    core.gradient_done(order, tuple(map(batch, range(8))), replace(DONE, batches=(COMPUTED,) * 8), 1.0)
    for number in range(8, 24):
        assert core.batch_ready(batch(number)) == announced(number, number + 1)
    assert core.batch_ready(batch(24)) == [], "16 wait: enough for two such grants"


def test_few_announced_batches_are_followed_by_more_with_the_push() -> None:
    core = WorkerCore(welcome(next_batch=0), max_pending=32, now=0.0)
    for number in range(9):
        core.hold(batch(number))
    assert core.announce() == announced(0, 9)
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
    assert action == Exit(1, "partition 1: the job now begins at offset 140, not at 100: reading again")
    (action,) = core.on_record(welcome(term=4, session=8, generation=4), 1.0)
    assert action == Exit(1, "another run of the job has begun: reading again")
