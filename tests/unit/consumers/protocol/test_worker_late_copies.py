"""A worker's protocol with late copies of grants and of orders to settle."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from doll.consumers.protocol.worker_core import (
    Compute,
    ComputedBatch,
    GradientDone,
    Send,
    StoreRest,
    WorkerAction,
    WorkerCore,
)
from doll.records.control import (
    Durable,
    Hello,
    Nack,
    Push,
    Settle,
)
from worker_records import batches, done, grant, pushed, welcome


def test_a_late_copy_of_an_answered_grant_gets_its_push_again_and_is_not_computed(core: WorkerCore) -> None:
    """A channel has changed: the server sent its grants again while the other channel still carried the first ones."""
    first = grant(5, 1)
    core.on_record(first, 1.0)
    answer = core.gradient_done(first, batches(5), done("a", 8), 1.0)
    core.on_record(grant(6, 2, version=10, included=6), 1.0)
    assert core.on_record(first, 1.0) == answer, "the server refuses what it has"
    assert not core.is_wanted(3, 5, 1)
    assert core.is_wanted(3, 6, 2)
    core.on_record(Durable(term=3, worker=1, until={1: 6}, batches=6), 1.0)
    (action,) = core.on_record(first, 1.0)
    assert isinstance(action, Send)
    assert isinstance(action.record, Nack), "of a batch that is durable"


def test_a_late_copy_is_void_where_the_server_has_lost_track_of_this_process(core: WorkerCore) -> None:
    """The server has taken back the grants without a push; its next grants have other numbers."""
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


@pytest.mark.parametrize("is_late", [False, True])
def test_a_batch_whose_step_was_made_too_early_is_computed_again(core: WorkerCore, is_late: bool) -> None:
    """The link carried a later grant while this one was on its way through Kafka: its step was not in the view."""
    overtaken = Compute(grant(5, 10), batches(5))
    core.on_record(grant(6, 11), 1.0)
    if not is_late:  # both wait, and the later batch is first
        assert core.on_record(grant(5, 10), 1.0) == [overtaken]
    core.gradient_done(grant(6, 11), batches(6), kept(""), 1.0)
    if is_late:
        assert core.on_record(grant(5, 10), 1.0) == [overtaken]
    assert core.gradient_done(grant(5, 10), batches(5), kept(""), 1.0) == [Compute(grant(6, 11), batches(6))]
    assert core.busy
    core.gradient_done(grant(6, 11), batches(6), kept(""), 1.0)
    assert not core.busy
    core.on_record(grant(7, 12), 1.0)
    actions = core.gradient_done(grant(7, 12), batches(7), kept("k", (5, 10), (6, 11), (7, 12)), 1.0)
    assert pushed(actions) == [("k", [(5, 10), (6, 11), (7, 12)])]


def test_a_wave_of_which_a_part_is_void_is_for_the_server_to_refuse(core: WorkerCore) -> None:
    """It has taken batch 6 back, and is to learn that the step of batch 5 is gone with it."""
    for number in (5, 6):
        core.on_record(grant(number, number), 1.0)
        core.gradient_done(grant(number, number), batches(number), kept(""), 1.0)
    core.on_record(grant(7, 21), 1.0)
    core.on_record(grant(6, 20), 1.0)
    actions = core.gradient_done(grant(7, 21), batches(7), kept("k", (5, 5), (6, 6), (7, 21)), 1.0)
    assert pushed(actions) == [("k", [(5, 5), (6, 6), (7, 21)])]
    assert [core.is_wanted(3, 5, 5), core.is_wanted(3, 6, 20), core.is_wanted(3, 7, 21)] == [False, True, False]


def test_a_batch_that_is_granted_again_takes_back_those_behind_it(core: WorkerCore) -> None:
    for number in (5, 6, 7):
        core.on_record(grant(number, number), 1.0)
        core.gradient_done(grant(number, number), batches(number), kept(""), 1.0)
    assert not core.busy
    assert core.on_record(grant(6, 20), 1.0) == [Compute(grant(6, 20), batches(6))]
    assert [core.is_wanted(3, 5, 5), core.is_wanted(3, 6, 20), core.is_wanted(3, 7, 7)] == [True, True, False]


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
    core.on_record(Durable(term=3, worker=1, until={1: 6}, batches=6), 1.0)
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
