"""Sets of batches at the engine: granted at once, and taken, held, lost and applied as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest
from doll.errors import IllegalEventError
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies.asp import Asp
from doll.ps.policies.base import BatchId, Policy, PolicyView
from doll.ps.policies.doll import Doll
from doll.records.control import Alive, Grant, Join, Leave, Nack, Push, Welcome
from engine_invariants import check_engine
from msgspec.structs import replace
from pushes import answer
from record_builders import announce

T = TypeVar("T")
TIMEOUT_S = 30.0
SET_LIMIT_S = 2.0


class Bench:
    """An engine whose workers have joined; the test carries its actions out."""

    def __init__(self, policy: Policy, workers: int = 2) -> None:
        self.now = 0.0
        settings = EngineSettings(
            num_workers=workers, records_per_batch=4, max_pending_batches=8, lease_s=1000.0, grant_timeout_s=TIMEOUT_S,
            set_limit_s=SET_LIMIT_S, checkpoint_every_updates=1000, checkpoint_every_s=1000.0,
        )  # fmt: skip
        self.engine = Engine(settings, policy, term=1, now=0.0, origins=[0] * workers)
        self.sessions = [self.join(worker) for worker in range(workers)]

    def handle(self, event: ev.Event) -> list[ev.EngineAction]:
        actions = self.engine.handle(event, self.now)
        check_engine(self.engine)
        return actions

    def join(self, worker: int, process: str = "a") -> int:
        (welcome,) = only(self.handle(Join(worker=worker, process=f"{process}{worker}")), Welcome)
        return welcome.session

    def announce(self, worker: int, until: int) -> list[Grant]:
        announced = announce(worker, self.sessions[worker], 0, until)
        return only(self.handle(announced), Grant)

    def push(self, push: Push) -> list[ev.EngineAction]:
        """The push, and its gradient where it is fetched."""
        actions = self.handle(push)
        for fetch in only(actions, ev.FetchGradient):
            actions = actions + self.handle(ev.GradientFetched(grant_id=fetch.grant_id))
        return actions


def only(actions: Sequence[ev.EngineAction], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def whole(grant: Grant) -> Push:
    return answer(grant, 1, f"g{grant.grant_ids[0]}", n_samples=4, loss_sum=1.0)


def part(grant: Grant, first: int, until: int) -> Push:
    """The push of batches [first, until) of this grant, counted from its first."""
    push = whole(grant)
    return replace(push, key=f"g{grant.grant_ids[first]}", batches=push.batches[first:until])


def members(update: ev.ApplyUpdate) -> list[list[tuple[int, int]]]:
    """(worker, batch) of each set."""
    return [[(item.push.worker, batch.pushed.batch) for batch in item.batches] for item in update.sets]


def four() -> tuple[Bench, Grant, Grant]:
    """A group of four, two batches of each of two workers."""
    bench = Bench(Doll(4))
    bench.announce(0, 2)
    zero, one = bench.announce(1, 2)
    assert (zero.worker, zero.first, zero.grant_ids) == (0, 0, (1, 3))
    assert (one.worker, one.first, one.grant_ids) == (1, 0, (2, 4))
    return bench, zero, one


def test_what_one_event_grants_to_a_worker_is_one_grant_and_its_push_one_set() -> None:
    bench, zero, one = four()
    assert [fetch.key for fetch in only(bench.push(whole(one)), ev.FetchGradient)] == ["g2"]
    assert (bench.engine.num_held, bench.engine.num_computing) == (2, 2)
    (update,) = only(bench.push(whole(zero)), ev.ApplyUpdate)
    assert members(update) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]], "in the order of their first grants"
    assert [item.grant_id for item in update.sets] == [1, 2]
    assert [(batch.lo, batch.hi) for batch in update.sets[0].batches] == [(0, 4), (4, 8)]
    assert (update.scale, update.batches_total, update.samples_total) == (1 / 16, 4, 16)


def test_a_policy_without_exact_versions_gets_one_batch_in_a_grant_and_a_push() -> None:
    class Eager(Asp):
        def start(self, view: PolicyView) -> Sequence[int]:
            return [0] * view.worker(0).waiting if view.num_waiting else ()

    bench = Bench(Eager())
    first, second = bench.announce(0, 2)
    assert (first.grant_ids, second.grant_ids) == ((1,), (2,))
    both = replace(whole(first), batches=whole(first).batches + whole(second).batches)
    assert only(bench.push(both), ev.FetchGradient) == []
    assert bench.engine.counters["refused_content"] == 1
    assert [members(update) for update in only(bench.push(whole(first)), ev.ApplyUpdate)] == [[[(0, 0)]]]


def test_a_set_that_ends_early_is_two_sets() -> None:
    bench, zero, one = four()
    bench.push(whole(one))
    bench.push(part(zero, 0, 1))
    assert bench.engine.num_held == 3
    (update,) = only(bench.push(part(zero, 1, 2)), ev.ApplyUpdate)
    assert members(update) == [[(0, 0)], [(1, 0), (1, 1)], [(0, 1)]], "sets 1, 2 and 3"


def test_a_set_whose_gradient_is_lost_goes_back_whole_and_what_follows_it_too() -> None:
    bench = Bench(Doll(3), workers=1)
    (grant,) = bench.announce(0, 3)
    bench.handle(part(grant, 0, 2))
    (again,) = only(bench.handle(ev.GradientLost(grant_id=1, reason="torn")), Grant)
    assert (again.first, len(again.grant_ids)) == (0, 3)
    assert bench.engine.counters["requeued_blob_lost"] == 3
    late = bench.push(part(grant, 2, 3))
    assert [drop.key for drop in only(late, ev.DropGradient)] == ["g3"]
    assert only(bench.push(whole(again)), ev.ApplyUpdate)


def test_a_worker_that_dies_in_mid_set_is_replaced_and_gets_a_second_set_in_the_group() -> None:
    bench = Bench(Doll(4))
    bench.announce(0, 3)
    zero, one = bench.announce(1, 3)
    assert (zero.grant_ids, one.grant_ids) == ((1, 3), (2, 4))
    bench.push(whole(one))
    actions = bench.handle(Leave(worker=0, session=bench.sessions[0], cause="spot"))
    (replacement,) = only(actions, Grant)
    assert (replacement.worker, replacement.first, replacement.grant_ids) == (1, 2, (5,)), (
        "what it has, at this version"
    )
    session = bench.join(0, "b")
    bench.sessions[0] = session
    (back,) = bench.announce(0, 1)
    assert (back.worker, back.grant_ids) == (0, (6,))
    bench.push(whole(back))
    (update,) = only(bench.push(whole(replacement)), ev.ApplyUpdate)
    assert members(update) == [[(1, 0), (1, 1)], [(1, 2)], [(0, 0)]]


def test_a_push_of_which_a_part_is_void_is_refused_and_the_rest_goes_back_at_once() -> None:
    bench = Bench(Doll(3), workers=1)
    (grant,) = bench.announce(0, 3)
    bench.push(part(grant, 0, 1))
    # Batch 0 is answered already: a sum that holds it again must not count.
    actions = bench.push(part(grant, 0, 2))
    assert only(actions, ev.FetchGradient) == []
    (again,) = only(actions, Grant)
    assert (again.first, again.grant_ids) == (1, (4, 5))
    assert (bench.engine.counters["refused_partly"], bench.engine.counters["requeued_partly_void"]) == (1, 2)
    assert only(actions, ev.DropGradient) == [], "the blob of that key is the one that was taken"
    stranger = replace(whole(again), key="other", batches=(*whole(again).batches, *part(grant, 2, 3).batches))
    actions = bench.push(stranger)
    assert [drop.key for drop in only(actions, ev.DropGradient)] == ["other"]
    (third,) = only(actions, Grant)
    (update,) = only(bench.push(whole(third)), ev.ApplyUpdate)
    assert members(update) == [[(0, 0)], [(0, 1), (0, 2)]]


def test_a_push_that_comes_before_an_earlier_one_is_refused_and_its_batches_go_back_at_once() -> None:
    bench = Bench(Doll(3), workers=1)
    (grant,) = bench.announce(0, 3)
    actions = bench.push(part(grant, 1, 3))
    assert [drop.key for drop in only(actions, ev.DropGradient)] == ["g2"]
    (again,) = only(actions, Grant)
    assert (again.first, again.grant_ids) == (1, (4, 5))
    bench.push(part(grant, 0, 1))
    assert only(bench.push(whole(again)), ev.ApplyUpdate)
    assert bench.engine.counters["refused_order"] == 1


def test_a_push_with_its_batches_in_another_order_is_refused() -> None:
    bench = Bench(Doll(2), workers=1)
    (grant,) = bench.announce(0, 2)
    push = whole(grant)
    for at in ((1, 0), (0, 0)):
        actions = bench.push(replace(push, batches=tuple(push.batches[index] for index in at)))
        assert only(actions, ev.FetchGradient) == []
        (grant,) = only(actions, Grant)
        push = whole(grant)
    assert only(bench.push(push), ev.ApplyUpdate)


@pytest.mark.parametrize("wrong", ["an empty set", "negative samples", "another version", "another batch"])
def test_a_push_that_cannot_be_is_refused(wrong: str) -> None:
    bench = Bench(Doll(2), workers=1)
    (grant,) = bench.announce(0, 2)
    push = whole(grant)
    first, second = push.batches
    spoiled = {
        "an empty set": replace(push, batches=()),
        "negative samples": replace(push, batches=(first, replace(second, n_samples=-1))),
        "another version": replace(push, version=1),
        "another batch": replace(push, batches=(replace(first, batch=7), replace(second, batch=8))),
    }[wrong]
    actions = bench.push(spoiled)
    assert only(actions, ev.FetchGradient) == []
    assert [drop.key for drop in only(actions, ev.DropGradient)] == ["g1"]
    assert only(bench.push(push), ev.ApplyUpdate), "the grants stand: the right answer is taken"


def test_grants_of_two_versions_are_never_in_one_grant_and_a_push_that_joins_them_is_refused() -> None:
    bench = Bench(Doll(2), workers=1)
    (grant,) = bench.announce(0, 4)
    actions = bench.push(whole(grant))
    assert only(actions, ev.ApplyUpdate)
    (later,) = only(actions, Grant)
    assert (later.first, later.grant_ids, later.version) == (2, (3, 4), 1)
    straddling = replace(whole(later), batches=whole(grant).batches[1:] + whole(later).batches)
    for push in (straddling, replace(straddling, version=0)):
        actions = bench.push(push)
        assert only(actions, ev.FetchGradient) == []
    (again,) = only(actions, Grant) or [later]
    assert bench.engine.version == 1
    assert bench.engine.num_computing == 2
    assert again.version == 1


def test_a_policy_that_applies_a_part_of_a_set_is_a_bug() -> None:
    class Greedy(Doll):
        def collect(self, view: PolicyView) -> Sequence[BatchId]:
            return view.held_batches()[:1] if view.num_held else ()

    bench = Bench(Greedy(2), workers=1)
    (grant,) = bench.announce(0, 2)
    bench.handle(whole(grant))
    with pytest.raises(IllegalEventError, match="policy doll applies 1 batches of a set of 2"):
        bench.engine.handle(ev.GradientFetched(grant_id=1), 0.0)


def test_a_policy_of_exact_versions_that_leaves_batches_behind_is_a_bug() -> None:
    class Early(Doll):
        def collect(self, view: PolicyView) -> Sequence[BatchId]:
            return view.held_batches() if view.num_held else ()

    bench = Bench(Early(2))
    bench.announce(0, 1)
    zero, _ = bench.announce(1, 1)
    bench.handle(whole(zero))
    with pytest.raises(IllegalEventError, match="policy doll leaves 1 batches of version 0 behind"):
        bench.engine.handle(ev.GradientFetched(grant_id=1), 0.0)


def test_the_outcome_of_a_set_is_named_by_its_first_grant() -> None:
    bench = Bench(Doll(2), workers=1)
    (grant,) = bench.announce(0, 2)
    bench.handle(whole(grant))
    with pytest.raises(IllegalEventError, match="gradient of grant 2 was not asked for"):
        bench.engine.handle(ev.GradientFetched(grant_id=2), 0.0)


# --- what may be added at once ----------------------------------------------------------------------------------------


def in_order(actions: Sequence[ev.EngineAction]) -> bool:
    (fetch,) = only(actions, ev.FetchGradient)
    return fetch.in_order


def test_a_gradient_is_in_order_when_nothing_that_is_added_before_it_is_outstanding() -> None:
    bench, zero, one = four()
    assert not in_order(bench.push(whole(one))), "set 1 is added before it, and still being computed"
    assert in_order(bench.push(part(zero, 0, 1)))
    assert in_order(bench.push(part(zero, 1, 2)))


def test_a_batch_that_was_taken_back_holds_nothing_up() -> None:
    bench, _, one = four()
    bench.handle(Leave(worker=0, session=bench.sessions[0], cause="spot"))
    assert in_order(bench.push(whole(one))), "what replaces set 1 has a higher number"


def test_a_gradient_that_is_lost_holds_nothing_up() -> None:
    bench, zero, one = four()
    assert in_order(bench.handle(whole(zero)))
    assert not in_order(bench.handle(whole(one))), "the outcome for set 1 is not known"
    bench.handle(ev.GradientLost(grant_id=2, reason="torn"))
    (again,) = only(bench.handle(ev.GradientLost(grant_id=1, reason="torn")), Grant)
    assert again.worker == 0


def test_without_exact_versions_nothing_is_said_about_order() -> None:
    bench = Bench(Asp())
    (grant,) = bench.announce(0, 1)
    assert not in_order(bench.push(whole(grant)))


# --- time -------------------------------------------------------------------------------------------------------------


def alive_at(bench: Bench, now: float) -> list[ev.EngineAction]:
    bench.now = now
    for worker, session in enumerate(bench.sessions):
        bench.handle(Alive(worker=worker, session=session))
    return bench.handle(ev.Tick())


def test_a_set_has_its_limit_more_time_than_a_single_batch() -> None:
    bench = Bench(Doll(3))
    bench.announce(0, 2)
    bench.announce(1, 1)
    alive_at(bench, TIMEOUT_S)
    assert bench.engine.counters["requeued_timeout"] == 0
    alive_at(bench, TIMEOUT_S + 0.1)
    assert bench.engine.counters["requeued_timeout"] == 1, "of worker 1, although worker 0 has run for as long"
    alive_at(bench, TIMEOUT_S + SET_LIMIT_S)
    assert bench.engine.counters["requeued_timeout"] == 1
    alive_at(bench, TIMEOUT_S + SET_LIMIT_S + 0.1)
    assert bench.engine.counters["requeued_timeout"] == 3


def test_the_clock_of_a_worker_starts_again_with_each_push() -> None:
    bench = Bench(Doll(3), workers=1)
    (grant,) = bench.announce(0, 3)
    bench.now = 29.0
    bench.push(part(grant, 0, 1))
    alive_at(bench, 58.0)
    assert bench.engine.counters["requeued_timeout"] == 0
    bench.push(part(grant, 1, 2))
    alive_at(bench, 58.0 + TIMEOUT_S + 100.0)
    assert bench.engine.counters["requeued_timeout"] == 1


def test_how_long_a_batch_takes_is_measured_by_the_batch() -> None:
    """Batches of 20 s: a set of four takes 80 s, and the timeout becomes 5 times the mean of a batch, not of a set."""
    bench = Bench(Doll(4), workers=1)
    (grant,) = bench.announce(0, 8)
    for _ in range(30):
        bench.now += 80.0
        actions = bench.push(whole(grant))
        applied = only(actions, ev.ApplyUpdate)[0].version * 4
        for order in only(actions, ev.StoreCheckpoint):
            bench.handle(ev.CheckpointStored(version=order.version))
        bench.handle(announce(0, bench.sessions[0], applied, applied + 8))
        grant = (only(actions, Grant) or [grant])[0]
    begun_s = bench.now
    alive_at(bench, begun_s + 95.0)
    assert bench.engine.counters["requeued_timeout"] == 0
    alive_at(bench, begun_s + 5 * 20.0 + SET_LIMIT_S + 1.0)
    assert bench.engine.counters["requeued_timeout"] == 4


# --- messages that may be lost ----------------------------------------------------------------------------------------


def test_what_is_not_answered_is_granted_again_under_the_same_numbers() -> None:
    bench = Bench(Doll(3), workers=1)
    (grant,) = bench.announce(0, 3)
    assert bench.handle(ev.GrantsLost(worker=0)) == [grant]
    bench.handle(part(grant, 0, 1))  # its gradient is on its way
    (again,) = bench.handle(ev.GrantsLost(worker=0))
    assert isinstance(again, Grant)
    assert (again.first, again.grant_ids, again.version) == (1, (2, 3), 0)
    bench.handle(ev.GradientFetched(grant_id=1))
    assert only(bench.push(whole(again)), ev.ApplyUpdate)
    assert bench.handle(ev.GrantsLost(worker=0)) == []


@pytest.mark.parametrize("worker", [1, -1, 2, 10**9])
def test_a_worker_that_owes_nothing_is_sent_nothing(worker: int) -> None:
    bench = Bench(Doll(1))
    bench.announce(0, 1)
    assert bench.handle(ev.GrantsLost(worker=worker)) == []


def test_a_grant_of_an_older_version_is_sent_again_as_it_was() -> None:
    """Its weights live until it is answered."""
    bench = Bench(Asp())
    (old,) = bench.announce(0, 1)
    (other,) = bench.announce(1, 1)
    bench.push(whole(other))
    assert bench.engine.version == 1
    (again,) = bench.handle(ev.GrantsLost(worker=0))
    assert isinstance(again, Grant)
    assert again == old
    assert only(bench.push(whole(again)), ev.ApplyUpdate)


def test_a_push_that_comes_twice_counts_once() -> None:
    bench, zero, one = four()
    bench.push(whole(zero))
    assert bench.push(whole(zero)) == []
    bench.push(whole(one))
    late = bench.push(whole(one))
    assert only(late, ev.ApplyUpdate) == []
    counters = bench.engine.counters
    assert (counters["refused_duplicate"], counters["refused_late"], bench.engine.version) == (1, 1, 1)


def test_a_refusal_of_weights_returns_what_is_left_of_the_set() -> None:
    bench = Bench(Doll(3), workers=1)
    (grant,) = bench.announce(0, 3)
    bench.push(part(grant, 0, 1))
    nack = Nack(worker=0, session=bench.sessions[0], batch=1, term=1, grant_id=2, reason="weights")
    actions = bench.handle(nack)
    assert only(actions, ev.RepublishWeights)
    (again,) = only(actions, Grant)
    assert (again.first, again.grant_ids) == (1, (4, 5))
