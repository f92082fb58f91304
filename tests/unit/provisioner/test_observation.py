"""The observed model: who holds which slot, how far the job is, how fast samples come; kept over a restart."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import record_builders
from doll.provisioner.observation import Observed
from doll.records.control import (
    Alive,
    AnyRecord,
    Drifted,
    Evaluated,
    Finished,
    Join,
    Leave,
    Member,
    Metric,
    ProvisionDecision,
    Served,
    TermStarted,
    Update,
    Welcome,
)
from statuses import server_status

T0 = 1_700_000_000.0


def observed(slots: int = 2, **more: Any) -> Observed:
    return Observed(np.full(slots, 10.0), **more)


def welcome(worker: int, incarnation: int, session: int, process: str = "") -> Welcome:
    return record_builders.welcome(
        worker, process=process or f"p{worker}.{incarnation}", session=session, incarnation=incarnation
    )


def update(version: int, term: int = 1, **more: Any) -> Update:
    more = {"batches_total": 3 * version} | more
    return Update(term=term, version=version, members=(), n_samples=1, loss=0.5, **more)


def feed(model: Observed, *records: AnyRecord, at_s: float = T0) -> None:
    for record in records:
        model.feed(record, at_s)


def test_a_slot_is_held_by_whom_the_server_has_welcomed() -> None:
    model = observed()
    assert model.holder(0) is None
    feed(model, Join(worker=0, process="p0.1", incarnation=1))
    assert model.holder(0) is None, "asking is not having"
    feed(model, welcome(0, 1, session=100))
    holder = model.holder(0)
    assert holder is not None
    assert (holder.incarnation, holder.works) == (1, True)
    feed(model, welcome(0, 2, session=101), at_s=T0 + 5)
    holder = model.holder(0)
    assert holder is not None
    assert (holder.incarnation, holder.since_s) == (2, T0 + 5)
    feed(model, welcome(0, 1, session=100))
    assert model.holder(0) == holder, "an old welcome that comes late changes nothing"
    assert model.highest_incarnation(0) == 2
    assert model.holder(1) is None


def test_signs_of_life_count_only_of_whom_holds_the_slot() -> None:
    model = observed(heartbeat_timeout_s=30.0)
    feed(model, welcome(0, 1, session=100), welcome(1, 1, session=101))
    feed(model, Alive(worker=0, session=99), at_s=T0 + 40)  # a zombie
    feed(model, Alive(worker=1, session=101), at_s=T0 + 40)
    silent, loud = model.holder(0), model.holder(1)
    assert silent is not None
    assert loud is not None
    assert (silent.works, loud.works) == (False, True)
    feed(model, Alive(worker=0, session=100), at_s=T0 + 41)
    back = model.holder(0)
    assert back is not None
    assert back.works


def test_when_nobody_is_heard_nobody_is_blamed() -> None:
    """Kafka away, or this process suspended: silence of all says nothing about one."""
    model = observed()
    feed(model, welcome(0, 1, session=100), welcome(1, 1, session=101))
    assert all((holder := model.holder(slot)) is not None and holder.works for slot in (0, 1))


def test_who_has_left_does_not_work_until_it_joins_again() -> None:
    model = observed()
    feed(model, welcome(0, 1, session=100), Leave(worker=0, session=99, cause="old"))
    assert model.holder(0).works  # type: ignore[union-attr]
    feed(model, Leave(worker=0, session=100, cause="notice"), Alive(worker=0, session=100))
    assert not model.holder(0).works  # type: ignore[union-attr]
    feed(model, welcome(0, 1, session=102))
    assert model.holder(0).works  # type: ignore[union-attr]


@pytest.mark.parametrize("worker", [-1, 2, 10**6])
def test_slots_that_are_none_are_passed_over(worker: int) -> None:
    model = observed()
    feed(
        model, Join(worker=worker, process="x"), welcome(worker, 1, 1), Alive(worker=worker, session=1),
        Leave(worker=worker, session=1, cause=""),
    )  # fmt: skip
    assert model.holder(0) is None


def test_progress_goes_back_with_a_server_that_did() -> None:
    model = observed()
    feed(model, TermStarted(term=1, resumed_version=0, origins=(), records_per_batch=1, time_s=T0))
    feed(model, *(update(version) for version in range(1, 11)))
    feed(model, Evaluated(term=1, version=4, loss=0.9, accuracy=0.5), Evaluated(term=1, version=10, loss=0.5))
    feed(model, Drifted(term=1, version=9, metric="loss", since=8), Drifted(term=1, version=5, metric="loss", since=2))
    assert (model.version, model.batches_done, model.batches_per_update) == (10, 30, 3.0)
    assert model.drifted_version == 8
    resumed = TermStarted(term=2, resumed_version=6, resumed_batches=18, origins=(), records_per_batch=1, time_s=T0)
    feed(model, resumed)
    assert (model.version, model.batches_done, model.drifted_version) == (6, 18, 6)
    assert model.errors("loss") == ([4], [0.9])
    feed(model, update(11, term=1))
    assert model.version == 6, "the old server's updates are void"
    feed(model, update(7, term=2))
    assert model.version == 7
    feed(model, Finished(term=1, version=11, reason="old", time_s=T0))
    assert model.finished is None
    feed(model, Finished(term=2, version=7, reason="updates", time_s=T0))
    assert model.finished == "updates"
    feed(model, TermStarted(term=3, resumed_version=7, origins=(), records_per_batch=1, time_s=T0))
    assert model.finished is None, "a resumed job goes on"


def test_errors_in_both_measures() -> None:
    model = observed()
    feed(model, update(5))
    feed(
        model, Evaluated(term=1, version=5, loss=1.0, accuracy=0.75),
        Evaluated(term=1, version=2, loss=2.0, accuracy=0.5), Evaluated(term=1, version=3, loss=1.5),
        Evaluated(term=1, version=4, loss=math.nan, accuracy=1.0),
    )  # fmt: skip
    assert model.errors("error_rate") == ([2, 5], [0.5, 0.25])
    assert model.errors("loss") == ([2, 3, 5], [2.0, 1.5, 1.0])


def test_service_time_is_the_mean_over_batches() -> None:
    model = observed()
    assert math.isnan(model.service_s)
    member = Member(
        worker=0, partition=0, batch=0, lo=0, hi=1, n_samples=1, base_version=0, compute_s=0.1, fetch_s=0.2, store_s=0.3
    )
    model.feed(Update(term=1, version=1, members=(member, member), n_samples=2, loss=1.0), T0)
    assert model.service_s == pytest.approx(0.6)


def test_the_first_batch_of_a_process_says_nothing_of_how_fast_it_is() -> None:
    model = observed(1)
    for session, process in ((100, "a:1"), (101, "b:1")):
        feed(model, welcome(0, session, session=session, process=process))
        known_per_s = model.capacity_per_s(1.0)[0]
        for number, seconds in enumerate((9.0, 0.5)):
            version = 2 * (session - 100) + number + 1
            member = Member(
                worker=0, partition=0, batch=version, lo=0, hi=1, n_samples=1, base_version=0, compute_s=seconds
            )
            model.feed(Update(term=1, version=version, members=(member,), n_samples=1, loss=1.0), T0)
            assert model.capacity_per_s(1.0)[0] == (known_per_s, 2.0)[number]


def test_rates_are_what_arrives() -> None:
    model = observed(samples_per_record=2)
    model.observe_ends(T0, [0, 0])
    for second in range(60, 3601, 60):
        model.observe_ends(T0 + second, [10 * second, 2 * second])  # 20 and 4 samples/s
    assert model.rates_per_s() == pytest.approx([10.0, 4.1], rel=0.05), "not above what workers have shown"
    feed(model, welcome(0, 1, session=100))
    for second in range(0, 3601, 60):
        feed(model, Alive(worker=0, session=100, next_offset=10 * second), at_s=T0 + second)
    assert model.rates_per_s() == pytest.approx([19.8, 4.1], rel=0.05)


def serving(worker: int, *partitions: int) -> Welcome:
    """The worker serves these partitions from now on; it is the same process."""
    served = tuple(Served(partition=number, origin=0, next_batch=0) for number in partitions)
    return msgspec.structs.replace(welcome(worker, 1, session=100 + worker), served=served)


def streaming(model: Observed, per_s: list[int], until_s: int = 3600, from_s: int = 0) -> None:
    """So many records come in each partition, and each worker reads all that its partitions hold."""
    read = dict.fromkeys(range(model.num_slots), 0)
    for second in range(from_s, until_s + 1, 60):
        model.observe_ends(T0 + second, [rate * second for rate in per_s])
        for slot in read:
            mine = [number for number in range(len(per_s)) if model._streams.owners[number] == slot]
            read[slot] += 60 * sum(per_s[number] for number in mine)
            if mine:
                feed(model, Alive(worker=slot, session=100 + slot, next_offset=read[slot]), at_s=T0 + second)


def test_rates_follow_the_partitions_that_a_slot_serves_now() -> None:
    """A new job gives partition p to worker p mod N; they move by load, and with scale-in."""
    per_s = [40, 1, 1, 20, 1, 1]
    model = observed(3)
    for worker in range(3):
        feed(model, serving(worker, worker, worker + 3))
    streaming(model, per_s)
    assert model.rates_per_s() == pytest.approx([60, 2, 2], rel=0.1)
    moves = [serving(0, 0), serving(1, 1, 2, 4, 5), serving(2, 3)]
    feed(model, *moves, at_s=T0 + 3601)
    assert model.rates_per_s() == pytest.approx([40, 4, 20], rel=0.1), "in the same moment"
    again = observed(3)
    again.restore(json.loads(json.dumps(model.to_dict())))
    assert again.rates_per_s() == pytest.approx(model.rates_per_s())
    late = observed(3)
    streaming(late, per_s, until_s=60)
    for at_s, messages in ((3601, moves[::-1]), (0, [serving(worker, worker, worker + 3) for worker in range(2)])):
        for message in messages:
            late.feed(message, T0 + at_s if at_s else T0)
    assert late._streams.owners[3] == 2, "the topic's partitions are read in any order: the newest Welcome counts"
    streaming(model, per_s, until_s=7200, from_s=3660)
    assert model.rates_per_s() == pytest.approx([40, 4, 20], rel=0.1)
    feed(model, serving(0, 0), serving(1), serving(2, 3, 1, 2, 4, 5), at_s=T0 + 7201)
    assert model.rates_per_s() == pytest.approx([40, 0, 24], rel=0.1, abs=0.01)
    assert model.without_partition().tolist() == [False, True, False]
    model.observe_ends(T0 + 7260, [*(rate * 7260 for rate in per_s), 500])
    assert model.rates_per_s() == pytest.approx([41.4, 0, 24], rel=0.1, abs=0.01), "a partition was added"
    model.observe_ends(T0 + 7320, [5, 6])
    assert (model.rates_per_s() > 0).all(), "another topic of this name begins again"


def test_a_stream_is_silent_with_all_its_partitions() -> None:
    model = observed(2)
    feed(model, serving(0, 0), serving(1, 1, 2, 3))
    for second in range(0, 3601, 60):
        model.observe_ends(T0 + second, [9 * second, 0, 9 * min(second, 1200), 9 * second])
        feed(model, *(Alive(worker=slot, session=100 + slot, next_offset=second) for slot in (0, 1)), at_s=T0 + second)
    assert model.paused().tolist() == [False, False]
    feed(model, serving(0, 0, 3), serving(1, 1, 2), at_s=T0 + 3601)
    assert model.paused().tolist() == [False, True]


def test_a_worker_that_cannot_keep_up_sets_the_rate() -> None:
    model = observed(1)
    feed(model, welcome(0, 1, session=100))
    model.observe_ends(T0, [0])
    for second in range(0, 3601, 60):
        model.observe_ends(T0 + second, [10 * second])
        feed(model, Alive(worker=0, session=100, next_offset=3 * second), at_s=T0 + second)
    assert model.rates_per_s() == pytest.approx([3.1], rel=0.05)


def test_a_new_process_that_reads_from_an_earlier_offset_is_no_negative_rate() -> None:
    model = observed(1)
    feed(model, welcome(0, 1, session=100), Alive(worker=0, session=100, next_offset=5000))
    feed(model, welcome(0, 2, session=101), at_s=T0 + 1)
    feed(model, Alive(worker=0, session=101, next_offset=100), at_s=T0 + 2)
    feed(model, Alive(worker=0, session=101, next_offset=110), at_s=T0 + 3)
    assert (model.rates_per_s() > 9).all()


def test_the_server_has_been_there_since_its_last_pause() -> None:
    model = observed(heartbeat_timeout_s=30.0)
    assert model.ps_since_s(T0) is None
    for second in (0, 10, 20, 100, 110):
        feed(model, server_status(), at_s=T0 + second)
    assert model.ps_since_s(T0 + 115) == T0 + 100
    assert model.ps_since_s(T0 + 200) is None
    feed(model, Metric(source="evaluator", values={}, time_s=T0), at_s=T0 + 200)
    assert model.ps_since_s(T0 + 200) is None


def test_the_newest_decision_is_kept() -> None:
    model = observed()
    for turn in (1, 3, 2):
        feed(model, ProvisionDecision(turn=turn, time_s=turn, started_s=0, phase="run", binding="none", feasible=True))
    assert model.last_decision is not None
    assert model.last_decision.turn == 3


def test_a_restart_forgets_nothing() -> None:
    model = observed(heartbeat_timeout_s=30.0)
    feed(model, TermStarted(term=1, resumed_version=0, origins=(), records_per_batch=1, time_s=T0))
    feed(model, welcome(0, 3, session=100), update(4), Evaluated(term=1, version=3, loss=0.9, accuracy=0.1))
    feed(model, Drifted(term=1, version=4, metric="loss", since=3))
    feed(model, Alive(worker=0, session=100, next_offset=10), at_s=T0 + 1)
    feed(model, Alive(worker=0, session=100, next_offset=90), at_s=T0 + 2)
    model.observe_ends(T0, [0, 0])
    model.observe_ends(T0 + 60, [900, 900])
    for second in (0, 60, 120):
        model.spot.observe(T0 + second, np.array([second < 120, True]), np.array([True, True]), ["a", "b"])
    again = observed(heartbeat_timeout_s=30.0)
    again.restore(json.loads(json.dumps(model.to_dict())))
    assert again.holder(0) == model.holder(0)
    assert again.holder(1) is None
    assert again.batches_done == model.batches_done == 12
    assert (again.version, again.term, again.errors("loss"), again.drifted_version) == (4, 1, ([3], [0.9]), 3)
    assert again.rates_per_s().tolist() == model.rates_per_s().tolist()
    assert again.spot.alpha() == model.spot.alpha()
    with pytest.raises(ValueError, match="expected 3 slots, got 2"):
        observed(3).restore(model.to_dict())


def test_a_new_generation_begins_at_nothing() -> None:
    """What the run before on the same topics did, decided and ended with is not this one's."""
    model = observed()
    first = TermStarted(term=1, resumed_version=0, origins=(0, 0), records_per_batch=1, time_s=0.0)
    decided = ProvisionDecision(turn=9, time_s=1.0, started_s=0.0, phase="done", binding="done", feasible=True)
    feed(model, first, update(1), update(2), Evaluated(term=1, version=2, loss=0.2), decided)
    feed(model, Finished(term=1, version=2, reason="updates: 2 reached", time_s=0.0))
    assert (model.version, model.finished) == (2, "updates: 2 reached")
    feed(model, TermStarted(term=2, resumed_version=0, origins=(0, 0), records_per_batch=1, time_s=2.0, generation=2))
    assert (model.version, model.finished, model.last_decision, model.evaluations) == (0, None, None, [])
    feed(model, Drifted(term=1, version=0, metric="loss", since=2))
    assert model.drifted_version == 0, "of the generation before"
    assert math.isnan(model.loss)
    feed(model, Evaluated(term=1, version=0, loss=0.2))
    assert model.evaluations == []
    again = observed()
    again.restore(json.loads(json.dumps(model.to_dict())))
    assert (again.generation, again.term) == (2, 2)


def test_incarnations_that_no_fleet_can_have_used_are_passed_over() -> None:
    model = observed()
    wild = ProvisionDecision(
        turn=1, time_s=T0, started_s=0, phase="run", binding="none", feasible=True, incarnations=(2**63 - 1, 7, 5)
    )
    feed(model, wild, Join(worker=0, process="x", incarnation=2**62))
    assert [model.highest_incarnation(slot) for slot in range(2)] == [0, 7]
