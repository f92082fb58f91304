"""The engine, one behaviour at a time."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from doll.errors import IllegalEventError
from doll.ps.checkpointing import decode_snapshot, encode_snapshot
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.policies.asp import Asp
from doll.ps.policies.base import BatchId, PolicyView
from doll.ps.policies.bsp import Bsp
from doll.ps.policies.doll import Doll
from doll.records.control import (
    Alive,
    Durable,
    Fence,
    Grant,
    Join,
    Leave,
    Nack,
    NewVersion,
    Welcome,
)
from doll.storage.blobs import weights_key
from doll.storage.checkpoints import Checkpoint
from engine_bench import LEASE_S, TIMEOUT_S, Bench, applied, granted, only, settings
from pushes import push_of
from record_builders import announce


def test_a_group_starts_when_k_batches_are_there_and_prefers_distinct_workers() -> None:
    bench = Bench(Doll(3))
    bench.join(0, 1, 2)
    assert granted(bench.announce(0, 0, 2)) == []
    assert granted(bench.announce(1, 0, 1)) == [(0, 0), (1, 0), (0, 1)], "three batches: worker 0 has to give two"
    for worker, batch in [(0, 0), (1, 0), (0, 1)]:
        actions = bench.push(worker, batch)
    (update,) = only(actions, ev.ApplyUpdate)
    assert update.version == 1
    assert applied(update) == [(0, 0), (1, 0), (0, 1)]
    assert [(batch.lo, batch.hi) for item in update.sets for batch in item.batches] == [(0, 4), (100, 104), (4, 8)]
    assert update.scale == pytest.approx(1 / 12)
    assert granted(bench.announce(0, 2, 5)) == [(0, 2), (0, 3), (0, 4)], "K above the number of workers that have data"


def test_of_a_worker_that_may_hold_more_than_the_server_allows_only_so_many_count() -> None:
    """It runs with a larger `max_pending_batches`: refused, it would join and announce the same again without end."""
    bench = Bench(Doll(4), max_pending_batches=4)
    bench.join(0)
    actions = bench.announce(0, 0, 2**40)
    assert granted(actions) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert only(actions, ev.SendHello) == []
    for batch in range(4):
        actions = bench.push(0, batch)
    (stored,) = only(actions, ev.StoreCheckpoint)
    bench.handle(ev.CheckpointStored(version=stored.version))
    assert granted(bench.announce(0, 4, 2**40)) == [(0, 4), (0, 5), (0, 6), (0, 7)]
    assert only(bench.announce(0, 9, 10), ev.SendHello) == [], "no hole: what lies between was not let in"


def test_a_worker_that_goes_is_replaced_at_the_same_version() -> None:
    """Digest D3: nobody waits for a ghost, and the group is still of one version."""
    bench = Bench(Doll(2))
    bench.join(0, 1, 2)
    bench.announce(0, 0, 1)
    bench.announce(1, 0, 1)
    bench.push(0, 0)
    bench.announce(2, 0, 1)
    actions = bench.handle(Leave(worker=1, session=bench.sessions[1], cause="spot"))
    assert granted(actions) == [(2, 0)]
    (update,) = only(bench.push(2, 0), ev.ApplyUpdate)
    assert applied(update) == [(0, 0), (2, 0)]


def test_a_silent_worker_loses_its_grants_with_its_lease_and_may_come_back() -> None:
    bench = Bench(Doll(1))
    bench.join(0)
    bench.announce(0, 0, 1)
    bench.now = LEASE_S + 1
    bench.handle(ev.Tick())
    assert bench.engine.num_computing == 0
    late = bench.push(0, 0)
    assert only(late, ev.ApplyUpdate) == [], "the grant was taken back: a late gradient is refused"
    assert granted(late) == [(0, 0)], "but the worker is alive, and computes it again"
    assert only(bench.push(0, 0), ev.ApplyUpdate)


def test_a_grant_that_takes_too_long_goes_to_somebody_else() -> None:
    bench = Bench(Doll(1), workers=2)
    bench.join(0, 1)
    bench.announce(0, 0, 1)
    bench.announce(1, 0, 1)
    bench.now = TIMEOUT_S - 1
    for worker in (0, 1):
        bench.handle(Alive(worker=worker, session=bench.sessions[worker]))
    bench.now = TIMEOUT_S + 1
    assert granted(bench.handle(ev.Tick())) == [(1, 0)], (
        "worker 0 is stuck: it gets nothing until it is heard to finish"
    )


def test_a_process_that_joins_is_told_what_is_usual_of_the_others_batches() -> None:
    bench = Bench(Doll(1), workers=2)
    bench.join(0)
    bench.handle(Alive(worker=0, session=bench.sessions[0], usual=(2.0, 0.5)))
    bench.handle(Alive(worker=0, session=bench.sessions[0]))
    (welcome,) = only(bench.handle(Join(worker=1, process="later")), Welcome)
    assert welcome.usual == (2.0, 0.5)


def test_a_lost_gradient_takes_later_batches_of_its_worker_back_too() -> None:
    """Otherwise a later batch could be applied before an earlier one, and the applied set were no prefix."""
    bench = Bench(Doll(2), workers=1)
    bench.join(0)
    bench.announce(0, 0, 2)
    grant = bench.grants[0, 0]
    bench.handle(
        push_of(
            worker=0, session=bench.sessions[0], batch=0, term=1, grant_id=grant.grant_id, version=0, key="k",
            n_samples=4,
        )
    )  # fmt: skip
    actions = bench.handle(ev.GradientLost(grant_id=grant.grant_id, reason="gone"))
    assert granted(actions) == [(0, 0), (0, 1)]
    assert bench.engine.counters["requeued_blob_lost"] == 2


def test_duplicates_and_foreign_grants_are_refused() -> None:
    bench = Bench(Doll(2), workers=2)
    bench.join(0, 1)
    bench.announce(0, 0, 1)
    bench.announce(1, 0, 1)
    bench.push(0, 0)
    assert only(bench.push(0, 0), ev.FetchGradient) == []
    assert only(bench.push(1, 0, term=7), ev.FetchGradient) == []
    assert only(bench.push(1, 0, session=3), ev.FetchGradient) == []
    assert only(bench.push(1, 0, version=5), ev.FetchGradient) == []
    assert only(bench.push(1, 0), ev.ApplyUpdate)
    counters = bench.engine.counters
    assert (counters["refused_duplicate"], counters["refused_fenced"], counters["refused_content"]) == (1, 1, 1)
    assert counters["refused_late"] == 1


def test_a_newer_incarnation_fences_the_older_and_reads_on_from_the_durable_batch() -> None:
    bench = Bench(Doll(1), workers=1)
    bench.join(0)
    bench.announce(0, 0, 2)
    bench.push(0, 0)
    old = bench.sessions[0]
    actions = bench.handle(Join(worker=0, process="second"))
    assert [fence.process for fence in only(actions, Fence)] == ["w0"]
    (welcome,) = only(actions, Welcome)
    assert welcome.session > old
    assert welcome.served[0].next_batch == 0, "batch 0 is applied, but no checkpoint has it yet"
    assert only(bench.handle(Join(worker=0, process="w0", session=old)), Fence)
    assert bench.handle(announce(0, old, 0, 2)) == []
    assert granted(bench.handle(announce(0, welcome.session, 0, 2))) == [(0, 1)]


def test_an_older_machine_that_starts_again_does_not_get_its_slot_back() -> None:
    bench = Bench(Doll(1), workers=1)
    only(bench.handle(Join(worker=0, process="i-1:a", incarnation=1)), Welcome)
    (welcome,) = only(bench.handle(Join(worker=0, process="i-2:b", incarnation=2)), Welcome)
    for _ in range(2):
        actions = bench.handle(Join(worker=0, process="i-1:c", incarnation=1))
        assert [fence.process for fence in only(actions, Fence)] == ["i-1:c"]
        assert not only(actions, Welcome)
    assert bench.engine.counters["refused_fenced"] == 2
    bench.handle(announce(0, welcome.session, 0, 1))
    assert bench.engine.num_computing == 1, "the newer machine goes on undisturbed"
    # Its own process may start again, and a process that nobody has numbered may take over, as ever.
    assert only(bench.handle(Join(worker=0, process="i-2:d", incarnation=2)), Welcome)
    assert only(bench.handle(Join(worker=0, process="by hand")), Welcome)
    assert only(bench.handle(Join(worker=0, process="i-1:e", incarnation=1)), Fence)


def test_incarnations_survive_a_restart_of_the_server() -> None:
    bench = Bench(Doll(1), workers=2)
    bench.handle(Join(worker=1, process="i-7:a", incarnation=7))
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(bench.engine.snapshot(0.0)), type=ev.EngineSnapshot)
    again = Engine(settings(2), Doll(1), term=2, now=0.0, snapshot=state)
    assert only(again.handle(Join(worker=1, process="i-6:b", incarnation=6), 0.0), Fence)
    assert only(again.handle(Join(worker=0, process="i-1:c", incarnation=1), 0.0), Welcome)


def test_restarts_and_since_when_a_worker_is_live() -> None:
    bench = Bench(Doll(1), workers=2)
    bench.now = 5.0
    bench.join(0)
    bench.now = 6.0
    bench.join(0)  # the same process, asked by a Hello
    worker = bench.engine.worker(0)
    assert (worker.restarts, worker.live_since_s) == (0, 5.0)
    bench.now = 7.0
    bench.handle(Join(worker=0, process="second"))
    assert (worker.restarts, worker.live_since_s) == (1, 7.0)
    again = Engine(settings(2), Doll(1), term=2, now=0.0, snapshot=bench.engine.snapshot(7.0))
    assert again.snapshot(0.0).restarts == (1, 0)


def test_a_later_machine_that_a_restarted_server_has_forgotten_wins_over_an_older_one() -> None:
    """The checkpoint is of before machine 2 joined; machine 1 joins the next server first and gets a higher session."""
    bench = Bench(Doll(1), workers=1)
    bench.handle(Join(worker=0, process="i-1:a", incarnation=1))
    snapshot = bench.engine.snapshot(0.0)
    (held,) = only(bench.handle(Join(worker=0, process="i-2:b", incarnation=2)), Welcome)
    again = Engine(settings(1), Doll(1), term=2, now=0.0, snapshot=snapshot)
    (older,) = only(again.handle(Join(worker=0, process="i-1:c", incarnation=1), 0.0), Welcome)
    assert older.session > held.session
    actions = again.handle(Join(worker=0, process="i-2:b", session=held.session, incarnation=2), 0.0)
    assert [fence.process for fence in only(actions, Fence)] == ["i-1:c"]
    (welcome,) = only(actions, Welcome)
    assert welcome.session > older.session


def test_a_process_that_two_servers_have_welcomed_is_not_fenced_as_its_own_predecessor() -> None:
    """Both heard its Join; it takes the earlier server's session first, and answers the later one's Hello with that."""
    earlier, later = (Engine(settings(1), Doll(1), term=number, now=0.0, origins=[0]) for number in (1, 2))
    join = Join(worker=0, process="a")
    (first,) = only(earlier.handle(join, 0.0), Welcome)
    (second,) = only(later.handle(join, 0.0), Welcome)
    assert first.session < second.session
    (again,) = only(later.handle(Join(worker=0, process="a", session=first.session), 0.0), Welcome)
    assert again.session == second.session


def test_sessions_of_a_later_server_are_higher_whatever_the_earlier_one_handed_out() -> None:
    first = Bench(Doll(1), workers=1)
    first.join(0)
    first.handle(Join(worker=0, process="b"))
    second = Engine(settings(1), Doll(1), term=2, now=0.0, origins=[0])
    (welcome,) = only(second.handle(Join(worker=0, process="c"), 0.0), Welcome)
    assert welcome.session > 1 << 20
    assert welcome.session >> 20 == 2


def test_durable_is_said_only_after_the_checkpoint() -> None:
    bench = Bench(Doll(1), workers=1, checkpoint_every_updates=2)
    bench.join(0)
    bench.announce(0, 0, 3)
    bench.push(0, 0)
    actions = bench.push(0, 1)
    (save,) = only(actions, ev.StoreCheckpoint)
    assert (save.version, save.snapshot.applied) == (2, (2,))
    bench.push(0, 2)
    (durable,) = only(bench.handle(ev.CheckpointStored(version=2)), Durable)
    assert (durable.worker, durable.until) == (0, {0: 2})


def test_a_full_worker_makes_a_checkpoint_due() -> None:
    """It holds what is not durable; without this it would stand still until the clock says so."""
    bench = Bench(Doll(1), workers=1)
    bench.join(0)
    bench.announce(0, 0, 8)
    saved = [only(bench.push(0, batch), ev.StoreCheckpoint) for batch in range(4)]
    assert [bool(item) for item in saved] == [False, False, False, True]


def test_a_hole_in_the_announcements_is_refused() -> None:
    bench = Bench(Doll(1), workers=1)
    bench.join(0)
    assert only(bench.announce(0, 5, 6), ev.SendHello), "a hole: batch 0 to 4 were never announced"
    assert bench.engine.num_waiting == 0


def test_missing_weights_are_published_again_and_the_batch_is_granted_again() -> None:
    bench = Bench(Doll(1), workers=1)
    bench.join(0)
    bench.announce(0, 0, 1)
    grant = bench.grants[0, 0].grant_id
    actions = bench.handle(Nack(worker=0, session=bench.sessions[0], batch=0, term=1, grant_id=grant, reason="weights"))
    assert [type(action) for action in actions] == [ev.RepublishWeights, Grant]


def test_bsp_waits_for_every_live_worker_and_keeps_the_push_of_one_that_left() -> None:
    bench = Bench(Bsp())
    bench.join(0, 1, 2)
    for worker in range(3):
        bench.announce(worker, 0, 2)
    bench.push(0, 0)
    bench.push(1, 0)
    bench.handle(Leave(worker=1, session=bench.sessions[1], cause="spot"))
    actions = bench.handle(Leave(worker=2, session=bench.sessions[2], cause="spot"))
    (update,) = only(actions, ev.ApplyUpdate)
    assert applied(update) == [(0, 0), (1, 0)]
    assert granted(actions) == [(0, 1)]


def test_asp_applies_each_gradient_at_once_on_whatever_version() -> None:
    bench = Bench(Asp(), workers=2)
    bench.join(0, 1)
    bench.announce(0, 0, 2)
    bench.announce(1, 0, 1)
    assert bench.grants[1, 0].version == 0
    bench.push(0, 0)
    (update,) = only(bench.push(1, 0), ev.ApplyUpdate)
    assert (update.version, update.sets[0].push.version) == (2, 0)


def test_an_outcome_that_was_never_ordered_is_a_bug_and_says_so() -> None:
    bench = Bench(Doll(1), workers=1)
    with pytest.raises(IllegalEventError, match="version 3 was not ordered"):
        bench.engine.handle(ev.CheckpointStored(version=3), 0.0)


def test_a_policy_that_applies_what_is_not_held_is_a_bug_and_says_so() -> None:
    class Wrong(Asp):
        def collect(self, view: PolicyView) -> list[BatchId]:
            return [BatchId(0, 0)]

    engine = Engine(settings(1), Wrong(), term=1, now=0.0, origins=[0])
    with pytest.raises(IllegalEventError, match="policy asp applies batch 0 of partition 0 out of order"):
        engine.handle(ev.Tick(), 0.0)


def test_messages_before_a_restarted_server_knows_the_worker_ask_it_to_join() -> None:
    bench = Bench(Doll(1), workers=1)
    bench.join(0)
    snapshot = bench.engine.snapshot(0.0)
    again = Engine(settings(1), Doll(1), term=2, now=0.0, snapshot=snapshot)
    assert only(again.handle(Alive(worker=0, session=bench.sessions[0]), 0.0), ev.SendHello)
    assert (
        only(again.handle(Join(worker=0, process="w0", session=bench.sessions[0]), 0.0), Welcome)[0].session
        == bench.sessions[0]
    )


def served_of(welcome: Welcome) -> tuple[int, int, int]:
    (served,) = welcome.served
    return served.next_batch, served.included, served.leader_epoch


def test_a_worker_hears_how_far_the_model_is_and_of_the_leader_epoch_there() -> None:
    bench = Bench(Asp(), workers=2)
    (welcome,) = only(bench.handle(Join(worker=0, process="w0")), Welcome)
    assert (welcome.served[0].included, welcome.served[0].leader_epoch) == (0, -1)
    bench.sessions[0] = welcome.session
    bench.announce(0, 0, 3)
    bench.push(0, 0, leader_epoch=4)
    bench.push(0, 1, leader_epoch=6)
    bench.push(0, 2, key="", n_samples=0, leader_epoch=7)
    (welcome,) = only(bench.handle(Join(worker=0, process="again")), Welcome)
    assert served_of(welcome) == (0, 3, 7)

    snapshot = bench.engine.snapshot(0.0)
    assert snapshot.leader_epochs == (7, -1)
    encoded = msgspec.msgpack.decode(encode_snapshot(snapshot))
    earlier = {name: value for name, value in encoded.items() if name != "leader_epochs"}
    for state, leader_epoch in ((encoded, 7), (earlier, -1)):  # a checkpoint of an earlier release has no epoch
        checkpoint = Checkpoint(
            job="unit", fingerprint="f", term=1, version=3, state=msgspec.msgpack.encode(state), tensors={}
        )
        engine = Engine(settings(2), Asp(), term=2, now=0.0, snapshot=decode_snapshot(checkpoint))
        (welcome,) = only(engine.handle(Join(worker=0, process="w0"), 0.0), Welcome)
        assert served_of(welcome) == (3, 3, leader_epoch)


class _OneBehind(Asp):
    """Weights may be one version old."""

    def min_version(self, view: PolicyView, worker: int) -> int:
        return max(0, view.version - 1)


def test_a_push_may_use_any_version_from_the_oldest_that_its_grant_allows_to_the_current_one() -> None:
    bench = Bench(_OneBehind(), workers=2)
    bench.join(0, 1)
    bench.announce(0, 0, 3)
    bench.push(0, 0)
    assert (bench.grants[0, 1].version, bench.grants[0, 1].min_version) == (1, 0)
    (update,) = only(bench.push(0, 1, version=0), ev.ApplyUpdate)
    assert update.sets[0].push.version == 0
    assert (bench.grants[0, 2].version, bench.grants[0, 2].min_version) == (2, 1)
    for version in (0, 3):
        assert only(bench.push(0, 2, version=version), ev.FetchGradient) == []
    bench.announce(1, 0, 1)
    bench.push(1, 0)
    assert only(bench.push(0, 2, version=3), ev.ApplyUpdate), "newer than its grant: it is the current one by now"


def test_a_policy_that_wants_a_version_that_is_not_made_yet_is_a_bug() -> None:
    class Impatient(Asp):
        def min_version(self, view: PolicyView, worker: int) -> int:
            return view.version + 1

    bench = Bench(Impatient(), workers=1)
    bench.join(0)
    with pytest.raises(IllegalEventError, match="policy asp wants version 1 at least, expected 0 to 0"):
        bench.announce(0, 0, 1)


class _Counting(Asp):
    """Counts how often it was asked for its state; knows who is to hear of a version."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def recipients(self, view: PolicyView) -> tuple[int, ...]:
        self.count += 1
        return (1,) if view.version == 2 else ()

    def state(self) -> dict[str, int]:
        return {"count": self.count}

    def restore(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_policy_says_who_is_sent_a_version_once_for_each() -> None:
    policy = _Counting()
    bench = Bench(policy, workers=2)
    bench.join(0, 1)
    bench.announce(0, 0, 3)
    sent = [only(bench.push(0, batch), NewVersion) for batch in range(3)]
    assert sent == [[], [NewVersion(term=1, worker=1, version=2, key=weights_key("", 1, 2), included=0)], []]
    assert policy.count == 3


def test_state_of_a_policy_is_in_the_snapshot_and_of_another_policy_is_left_out() -> None:
    bench = Bench(_Counting(), workers=1)
    bench.join(0)
    bench.announce(0, 0, 1)
    bench.push(0, 0)
    snapshot = bench.engine.snapshot(0.0)
    assert (snapshot.policy, snapshot.policy_state) == ("asp", {"count": 1})
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=ev.EngineSnapshot)
    again = _Counting()
    Engine(settings(1), again, term=2, now=0.0, snapshot=stored)
    assert again.count == 1
    other = Engine(settings(1), Doll(1), term=2, now=0.0, snapshot=stored)
    assert other.snapshot(0.0).policy_state is None
    with pytest.raises(ValueError, match=r"policy asp keeps no state, got \['count'\]"):
        Engine(settings(1), Asp(), term=2, now=0.0, snapshot=stored)


def test_a_free_place_goes_to_the_worker_with_the_fewest_batches_in_the_group() -> None:
    bench = Bench(Doll(4))
    bench.join(0, 1, 2)
    bench.announce(0, 0, 3)
    assert granted(bench.announce(1, 0, 3)) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    bench.announce(2, 0, 1)
    actions = bench.handle(Leave(worker=0, session=bench.sessions[0], cause="spot"))
    assert granted(actions) == [(2, 0), (1, 2)], "worker 1 announced earlier, and has two"


def test_a_worker_that_joins_is_in_the_next_group_whatever_the_others_have_announced() -> None:
    bench = Bench(Doll(2), workers=4)
    bench.join(0, 1, 2, 3)
    bench.announce(0, 0, 1)
    group = granted(bench.announce(1, 0, 8))
    assert group == [(0, 0), (1, 0)]
    bench.announce(0, 1, 8)
    bench.announce(2, 0, 8)
    bench.announce(3, 0, 2)
    for expected in ([(2, 0), (3, 0)], [(0, 1), (1, 1)], [(2, 1), (0, 2)], [(1, 2), (2, 2)], [(0, 3), (3, 1)]):
        for worker, batch in group:
            actions = bench.push(worker, batch)
        group = granted(actions)
        assert group == expected, "in turn, and earlier with more batches waiting"


def test_a_worker_that_is_behind_is_in_every_group_whatever_the_others_announce() -> None:
    bench = Bench(Doll(2), workers=4, max_pending_batches=32)
    bench.join(0, 1, 2, 3)
    bench.announce(0, 0, 1)
    group, counts = granted(bench.announce(1, 0, 1)), Counter[int]()
    bench.announce(0, 1, 16)
    for worker in (2, 3):
        bench.announce(worker, 0, 1)
    for _ in range(8):
        counts.update(worker for worker, _ in group)
        for worker, batch in group:
            if worker:
                bench.announce(worker, batch + 1, batch + 2)
        for worker, batch in group:
            actions = bench.push(worker, batch)
        group = granted(actions)
    assert counts == {0: 7, 1: 3, 2: 3, 3: 3}, "but in the first group of the other two"


def test_a_worker_that_answers_too_late_gets_another_grant_also_where_it_has_no_gradient() -> None:
    """Its store was away for longer than the grant: the answer is a Nack that nobody waits for any more."""
    bench = Bench(Asp(), workers=1)
    bench.join(0)
    assert granted(bench.announce(0, 0, 1)) == [(0, 0)]
    late = bench.grants[0, 0].grant_id
    for bench.now in (TIMEOUT_S / 2, TIMEOUT_S + 1.0):
        bench.handle(Alive(worker=0, session=bench.sessions[0]))
        assert granted(bench.handle(ev.Tick())) == []
    assert bench.engine.counters["requeued_timeout"] == 1
    nack = Nack(worker=0, session=bench.sessions[0], batch=0, term=1, grant_id=late, reason="weights")
    assert granted(bench.handle(nack)) == [(0, 0)]
