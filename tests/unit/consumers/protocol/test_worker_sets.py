"""A worker's protocol with sets: several batches in a grant, repeated and overtaken grants, pushes sent again."""

from __future__ import annotations

import msgspec
import pytest
from doll.consumers.protocol.worker_core import (
    Compute,
    Send,
    WorkerCore,
)
from doll.records.control import (
    AnyRecord,
    Durable,
    Hello,
    Nack,
    NewVersion,
)
from worker_records import batches, done, grant, pushed, welcome


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
    core.on_record(Durable(term=3, worker=1, until={1: 6}, batches=6), 1.0)
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
