"""`Scale`: what the engine takes, and when a partition moves."""

from __future__ import annotations

import pytest
from access_counts import CountingList
from doll.ps.engine.engine import Engine
from doll.ps.engine.events import (
    CheckpointStored,
    DropGradient,
    FetchGradient,
    GradientFetched,
    SendHello,
    StoreCheckpoint,
    Tick,
)
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies.asp import Asp
from doll.ps.policies.base import Policy
from doll.ps.policies.doll import Doll, RecentDoll
from doll.ps.policies.isp import Isp
from doll.records.control import Alive, Announce, BatchRange, Grant, Join, Leave, Push, Scale, Settle, Welcome
from engine_invariants import check_engine
from msgspec import structs
from pushes import answer


def engine_of(
    num_workers: int = 2, max_workers: int = 4, partitions: int = 4, policy: Policy | None = None
) -> Engine:  # fmt: skip
    settings = EngineSettings(
        num_workers=num_workers, max_workers=max_workers, records_per_batch=1, max_pending_batches=8, lease_s=5.0,
        grant_timeout_s=5.0, checkpoint_every_updates=100, checkpoint_every_s=1e9,
    )  # fmt: skip
    return Engine(settings, policy or Asp(), term=1, now=0.0, origins=(0,) * partitions, run_id="run")


def join(engine: Engine, worker: int) -> Welcome:
    actions = engine.handle(Join(worker=worker, process=f"p{worker}"), 0.0)
    return next(action for action in actions if isinstance(action, Welcome))


def served(welcome: Welcome) -> list[int]:
    return [item.partition for item in welcome.served]


def test_a_partition_moves_once_its_new_worker_is_here_and_its_worker_goes_on_with_the_others() -> None:
    engine = engine_of()
    assert [served(join(engine, worker)) for worker in (0, 1)] == [[0, 2], [1, 3]]
    session = engine.worker(0).session
    engine.handle(Announce(worker=0, session=session, runs=(BatchRange(0, 0, 2), BatchRange(2, 0, 2))), 0.0)
    assert engine.worker(0).computing == 1
    engine.handle(Scale(workers=4, run_id="run"), 0.0)
    assert (engine.moves.num_workers, sorted(engine.moves.targets)) == (4, [2, 3])
    assert engine.worker(0).computing == 1, "nobody is there yet"
    actions = engine.handle(Join(worker=2, process="p2"), 0.0)
    welcomes = [(action.worker, served(action)) for action in actions if isinstance(action, Welcome)]
    assert welcomes == [(2, []), (0, [0]), (2, [2])]
    assert (engine.worker(0).computing, engine.num_waiting) == (1, 1), "of partition 0"
    assert not [action for action in actions if isinstance(action, Grant | SendHello)]
    assert sorted(engine.moves.targets) == [3], "worker 3 is not here"
    engine.handle(Announce(worker=0, session=session, runs=(BatchRange(2, 0, 2), BatchRange(0, 0, 3))), 0.0)
    assert engine.counters["refused_moved"] == 1
    assert (engine.worker(0).computing, engine.num_waiting) == (1, 2)
    check_engine(engine)


@pytest.mark.parametrize("is_pushed", [False, True])
def test_what_is_computed_of_a_partition_that_moves_is_taken_back_with_what_is_behind_it(is_pushed: bool) -> None:
    engine = engine_of(num_workers=1, partitions=2, policy=Doll(4))
    session = join(engine, 0).session
    runs = (BatchRange(0, 0, 1), BatchRange(1, 0, 1), BatchRange(0, 1, 3), BatchRange(1, 1, 2))
    actions = engine.handle(Announce(worker=0, session=session, runs=runs), 0.0)
    (grant,) = [action for action in actions if isinstance(action, Grant)]
    assert grant.batches == ((0, 0), (1, 0), (0, 1), (0, 2))
    if is_pushed:  # and the sum is being fetched
        engine.handle(answer(grant, 1, "sum"), 0.0)
    engine.handle(Scale(workers=2, run_id="run"), 0.0)
    actions = engine.handle(Join(worker=1, process="p1"), 0.0)
    check_engine(engine)
    assert owned(engine)[:2] == [[0], [1]]
    left = [action.batches for action in actions if isinstance(action, Grant)]
    dropped = [action.key for action in actions if isinstance(action, DropGradient)]
    if is_pushed:
        assert (engine.counters["requeued_moved"], left, dropped) == (4, [], ["sum"]), "a sum is not taken apart"
    else:
        assert (engine.counters["requeued_moved"], left, dropped) == (3, [((0, 1), (0, 2))], [])


def test_a_held_gradient_keeps_a_worker_no_longer_than_a_round_may_be_dry() -> None:
    """A group of two has one gradient, and no record comes any more: the worker that is to leave does not wait."""
    engine = engine_of(num_workers=2, max_workers=2, partitions=2, policy=RecentDoll(2, 3))
    join(engine, 0)
    session = join(engine, 1).session
    actions = engine.handle(Announce(worker=1, session=session, runs=(BatchRange(1, 0, 1),)), 0.0)
    (grant,) = [action for action in actions if isinstance(action, Grant)]
    engine.handle(answer(grant, 1, "gradient"), 0.0)
    engine.handle(GradientFetched(grant.grant_ids[0]), 0.0)
    assert engine.worker(1).held == 1
    engine.handle(Scale(workers=1, run_id="run"), 1.0)
    for now in range(2, 16):
        for worker in (0, 1):
            engine.handle(Alive(worker=worker, session=engine.worker(worker).session), now)
        if now < 15:
            assert (owned(engine), engine.version) == ([[0], [1]], 0), "another batch may come"
    check_engine(engine)
    assert (owned(engine), engine.version, engine.batches_total) == ([[0, 1], []], 1, 1)


def test_a_part_held_back_of_another_partition_keeps_a_worker_no_longer_than_a_round_may_be_dry() -> None:
    """The gradient of partition 0 waits for worker 1, which has no records; partition 2 is to move meanwhile, and needs
    the part that its worker holds back."""
    engine = engine_of(num_workers=2, max_workers=3, partitions=3, policy=Isp())
    session = join(engine, 0).session
    join(engine, 1)
    actions = engine.handle(Announce(worker=0, session=session, runs=(BatchRange(0, 0, 1),)), 0.0)
    (grant,) = [action for action in actions if isinstance(action, Grant)]
    engine.handle(structs.replace(answer(grant, 1, "gradient"), holds_back=True), 0.0)
    engine.handle(GradientFetched(grant.grant_ids[0]), 0.0)
    join(engine, 2)
    engine.handle(Scale(workers=3, run_id="run"), 1.0)
    engine.handle(CheckpointStored(version=0), 1.0)
    (moving,) = engine.moves.targets
    asked = []
    for now in range(2, 19):
        for worker in (0, 1, 2):
            alive = Alive(worker=worker, session=engine.worker(worker).session)
            asked += [action for action in engine.handle(alive, now) if isinstance(action, Settle)]
    assert (moving, engine.version) == (2, 1), "the round has ended"
    assert asked[0].until == 1
    rest = Push(worker=0, session=session, term=1, version=1, key="rest", batches=(), settles=1)
    (fetch,) = [action for action in engine.handle(rest, 19.0) if isinstance(action, FetchGradient)]
    engine.handle(GradientFetched(fetch.grant_id), 19.0)
    assert owned(engine) == [[0], [1], [2]]
    check_engine(engine)


def test_a_number_is_kept_once_a_checkpoint_has_it() -> None:
    engine = engine_of()
    join(engine, 0)
    assert engine.is_kept
    actions = engine.handle(Scale(workers=3, run_id="run"), 0.0)
    (order,) = [action for action in actions if isinstance(action, StoreCheckpoint)]
    assert not engine.is_kept
    engine.handle(Scale(workers=4, run_id="run"), 0.0)
    (order_of_four,) = [
        action
        for action in engine.handle(CheckpointStored(version=order.version), 0.0)
        if isinstance(action, StoreCheckpoint)
    ]
    assert not engine.is_kept, "the stored one is of three"
    engine.handle(CheckpointStored(version=order_of_four.version), 0.0)
    assert engine.is_kept


def test_a_spare_is_waited_for_by_nobody_and_counts_once_it_serves() -> None:
    engine = engine_of(num_workers=1, max_workers=2, partitions=1)
    join(engine, 0)
    assert served(join(engine, 1)) == []
    assert engine.num_live == 1
    engine.handle(Scale(workers=2, run_id="run"), 0.0)
    assert (engine.num_live, engine.moves.targets) == (1, {}), "one partition has one worker"
    check_engine(engine)


@pytest.mark.parametrize(
    "scale", [Scale(workers=5, run_id="run"), Scale(workers=0, run_id="run"), Scale(workers=3, run_id="other")]
)
def test_a_number_without_place_and_another_run_are_refused(scale: Scale) -> None:
    engine = engine_of()
    engine.handle(scale, 0.0)
    assert engine.counters["refused_content"] == 1
    assert engine.moves.num_workers == 2


def test_who_is_gone_again_before_its_partition_moves_leaves_it_where_it_was() -> None:
    engine = engine_of(num_workers=1, max_workers=2, partitions=2)
    join(engine, 0)
    engine.handle(Scale(workers=2, run_id="run"), 0.0)
    engine.handle(Scale(workers=1, run_id="run"), 0.0)
    assert engine.moves.targets == {}
    assert served(join(engine, 1)) == []
    assert sorted(engine.worker(0).queue.partitions) == [0, 1]


def test_the_number_is_in_a_checkpoint_and_a_changed_job_file_counts_before_it() -> None:
    engine = engine_of()
    for worker in range(4):
        join(engine, worker)
    actions = engine.handle(Scale(workers=4, run_id="run"), 0.0)
    (snapshot,) = (action.snapshot for action in actions if isinstance(action, StoreCheckpoint))  # and no update
    assert (snapshot.num_workers, snapshot.job_workers, snapshot.assignment) == (4, 2, (0, 1, 2, 3))
    for workers, expected in ((2, 4), (3, 3)):
        settings = EngineSettings(
            num_workers=workers, max_workers=4, records_per_batch=1, max_pending_batches=8, lease_s=5.0,
            grant_timeout_s=5.0, checkpoint_every_updates=100, checkpoint_every_s=1e9,
        )  # fmt: skip
        later = Engine(settings, Asp(), term=2, now=0.0, snapshot=snapshot)
        assert later.moves.num_workers == expected
        assert not later.moves.targets
    assert not [
        action for action in engine.handle(Scale(workers=4, run_id="run"), 0.0) if isinstance(action, StoreCheckpoint)
    ]


def test_partitions_that_wait_for_a_worker_cost_an_event_nothing() -> None:
    engine = engine_of(num_workers=2, max_workers=4, partitions=1_000)
    for worker in (0, 1):
        join(engine, worker)
    engine.handle(Scale(workers=4, run_id="run"), 0.0)
    assert len(engine.moves.targets) == 500
    engine.moves._partitions = CountingList(engine.moves._partitions)
    CountingList.reads = 0
    session = engine.worker(0).session
    for number in range(20):
        engine.handle(Announce(worker=0, session=session, runs=(BatchRange(0, number, number + 1),)), 0.0)
        engine.handle(Tick(), 0.0)
    assert CountingList.reads == 0
    join(engine, 2)
    assert CountingList.reads >= 250, "they are counted"
    assert len(engine.moves.targets) == 250


def test_the_partitions_of_a_released_worker_go_to_the_others_and_come_back() -> None:
    engine = engine_of(num_workers=3)
    for worker in range(3):
        join(engine, worker)
    assert owned(engine) == [[0, 3], [1], [2], []]
    actions = engine.handle(Scale(workers=3, run_id="run", released=(0,)), 0.0)
    assert owned(engine) == [[], [0, 1], [2, 3], []]
    assert engine.num_live == 2
    (snapshot,) = (action.snapshot for action in actions if isinstance(action, StoreCheckpoint))
    assert (snapshot.num_workers, snapshot.released) == (3, (0,))
    later = Engine(engine.settings, Asp(), term=2, now=0.0, snapshot=snapshot)
    assert (later.moves.released, later.moves.targets) == (frozenset({0}), {})
    engine.handle(Scale(workers=3, run_id="run", released=()), 0.0)
    assert sorted(map(len, owned(engine))) == [0, 1, 1, 2]
    check_engine(engine)


def test_who_is_released_may_be_gone_before_its_partitions_move() -> None:
    engine = engine_of(num_workers=2)
    for worker in range(2):
        join(engine, worker)
    engine.handle(Leave(worker=1, session=engine.worker(1).session, cause="sigterm"), 0.0)
    engine.handle(Scale(workers=2, run_id="run", released=(1,)), 0.0)
    assert owned(engine) == [[0, 1, 2, 3], [], [], []]
    check_engine(engine)


def test_another_number_leaves_the_released_ones_as_they_are_where_that_can_be() -> None:
    engine = engine_of(num_workers=3)
    for number, released, expected in (
        (3, (1,), {1}), (4, None, {1}), (2, None, {1}), (1, None, set()), (2, (0, 7), {0}),
    ):  # fmt: skip
        engine.handle(Scale(workers=number, run_id="run", released=released), 0.0)
        assert (engine.moves.num_workers, engine.moves.released) == (number, expected)
    engine.handle(Scale(workers=2, run_id="run", released=(0, 1)), 0.0)
    assert engine.counters["refused_content"] == 1, "somebody must serve"


def owned(engine: Engine) -> list[list[int]]:
    return [sorted(worker.queue.partitions) for worker in engine.workers()]


def test_a_worker_goes_on_that_announces_more_than_there_is_room_for_behind_a_move() -> None:
    """What the giver has in the model counts for the taker, which has not read it again yet."""
    engine = engine_of(num_workers=1)
    session = join(engine, 0).session
    actions = engine.handle(
        Announce(worker=0, session=session, runs=tuple(BatchRange(number, 0, 1) for number in range(4))), 0.0
    )
    while grants := [action for action in actions if isinstance(action, Grant)]:
        actions = engine.handle(answer(grants[0], 1, ""), 0.0)
    assert engine.version == 4
    engine.handle(Scale(workers=2, run_id="run"), 0.0)
    actions = engine.handle(Join(worker=1, process="p1"), 0.0)
    session = engine.worker(1).session
    engine.handle(Announce(worker=1, session=session, runs=(BatchRange(2, 0, 8),)), 0.0)
    partition = engine.worker(1).queue.partitions[2]
    assert partition.announced == 7, "8 batches may be pending, and one is of partition 3"
    engine.handle(CheckpointStored(version=4), 0.0)
    actions = engine.handle(Announce(worker=1, session=session, runs=(BatchRange(2, 8, 9),)), 0.0)
    assert (partition.announced, [action for action in actions if isinstance(action, SendHello)]) == (7, [])
    engine.handle(Announce(worker=1, session=session, runs=(BatchRange(2, 1, 9),)), 0.0)
    assert partition.announced == 9
    check_engine(engine)
