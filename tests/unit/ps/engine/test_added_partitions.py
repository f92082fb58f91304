"""`TopicGrew`: who serves partitions that are added while the job runs, and what a later server knows of them."""

from __future__ import annotations

import pytest
from doll.ps.engine.engine import Engine
from doll.ps.engine.events import CheckpointStored, EngineSnapshot, StoreCheckpoint, TopicGrew
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies.asp import Asp
from doll.records.control import Announce, BatchRange, Durable, Join, Scale, Welcome
from engine_invariants import check_engine

SETTINGS = EngineSettings(
    num_workers=2, max_workers=4, records_per_batch=1, max_pending_batches=8, lease_s=5.0, grant_timeout_s=5.0,
    checkpoint_every_updates=100, checkpoint_every_s=1e9,
)  # fmt: skip


def engine_of(partitions: int) -> Engine:
    return Engine(SETTINGS, Asp(), term=1, now=0.0, origins=(7,) * partitions, run_id="run")


def join(engine: Engine, worker: int) -> Welcome:
    actions = engine.handle(Join(worker=worker, process=f"p{worker}"), 0.0)
    return next(action for action in actions if isinstance(action, Welcome))


def served(engine: Engine) -> list[list[int]]:
    return [sorted(worker.queue.partitions) for worker in engine.workers()]


def grow(engine: Engine, partitions: int) -> tuple[list[Welcome], list[EngineSnapshot]]:
    """What workers are told that serve others now, and the checkpoints that are ordered."""
    actions = engine.handle(TopicGrew(partitions=partitions), 0.0)
    check_engine(engine)
    welcomes = [action for action in actions if isinstance(action, Welcome)]
    return welcomes, [action.snapshot for action in actions if isinstance(action, StoreCheckpoint)]


def test_who_serves_the_fewest_gets_what_is_added_and_only_he_is_told() -> None:
    engine = engine_of(3)
    for worker in range(2):
        join(engine, worker)
    (welcome,), (snapshot,) = grow(engine, 4)
    assert (served(engine), welcome.worker) == ([[0, 2], [1, 3], [], []], 1)
    assert (snapshot.origins, snapshot.applied, snapshot.assignment) == ((7, 7, 7, 0), (0, 0, 0, 0), (0, 1, 0, 1))
    assert [(item.partition, item.origin, item.next_batch) for item in welcome.served] == [(1, 7, 0), (3, 0, 0)]
    engine.handle(Announce(worker=1, session=welcome.session, runs=(BatchRange(3, 0, 1),)), 0.0)
    assert engine.worker(1).computing == 1


@pytest.mark.parametrize("partitions", [3, 2, 0, -1])
def test_a_topic_that_did_not_grow_changes_nothing(partitions: int) -> None:
    engine = engine_of(3)
    assert grow(engine, partitions) == ([], [])
    assert served(engine) == [[0, 2], [1], [], []]


def test_a_checkpoint_under_way_knows_nothing_of_them_and_the_next_one_does() -> None:
    engine = engine_of(2)
    for worker in range(2):
        join(engine, worker)
    engine.handle(Scale(workers=1, run_id="run"), 0.0)  # orders a checkpoint
    assert grow(engine, 3)[1] == []
    actions = engine.handle(CheckpointStored(version=0), 0.0)
    (snapshot,) = (action.snapshot for action in actions if isinstance(action, StoreCheckpoint))
    assert snapshot.origins == (7, 7, 0)
    assert not [action for action in actions if isinstance(action, Durable)]
    check_engine(engine)


def test_a_server_that_ends_before_the_checkpoint_is_followed_by_one_that_adds_them_again() -> None:
    first = engine_of(2)
    before = first.snapshot(0.0)
    (kept,) = grow(first, 4)[1]
    for snapshot, known in ((before, 2), (kept, 4)):
        later = Engine(SETTINGS, Asp(), term=2, now=0.0, snapshot=snapshot)
        assert len(later.start.origins) == known
        grow(later, 4)
        assert (later.snapshot(0.0).origins, later.snapshot(0.0).assignment) == (kept.origins, kept.assignment)


def test_who_has_not_come_yet_is_not_given_a_new_one() -> None:
    """A job that is to have more workers goes on with those that are here."""
    engine = engine_of(2)
    for worker in range(2):
        join(engine, worker)
    engine.handle(Scale(workers=4, run_id="run"), 0.0)
    grow(engine, 4)
    assert served(engine) == [[0, 2], [1, 3], [], []]
    assert sorted(engine.moves.targets) == [2, 3]
    join(engine, 2)
    join(engine, 3)
    assert served(engine) == [[0], [1], [2], [3]]


def test_a_spare_that_waits_gets_its_first_partition() -> None:
    engine = engine_of(1)
    for worker in range(2):
        join(engine, worker)
    assert engine.num_live == 1
    assert [welcome.worker for welcome in grow(engine, 2)[0]] == [1]
    assert engine.num_live == 2


def test_what_is_computed_goes_on() -> None:
    engine = engine_of(1)
    session = join(engine, 0).session
    engine.handle(Announce(worker=0, session=session, runs=(BatchRange(0, 0, 2),)), 0.0)
    assert engine.worker(0).computing == 1
    assert [welcome.worker for welcome in grow(engine, 4)[0]] == [0], "worker 1 is not here"
    assert (engine.worker(0).computing, engine.num_waiting) == (1, 1)
