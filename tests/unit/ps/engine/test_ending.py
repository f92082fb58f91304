"""What the engine makes of the end of a source: who is told, and which groups are not waited for any more."""

from __future__ import annotations

import msgspec
import pytest
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.partition_state import PartitionState
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies.base import Policy
from doll.ps.policies.bsp import Bsp
from doll.ps.policies.diloco import Diloco
from doll.ps.policies.doll import Doll
from doll.ps.policies.ssp import Ssp
from doll.ps.policies.wsp import Wsp
from doll.records.control import Announce, BatchRange, Flush, Grant, Join, Settle, SourceEnded, Welcome
from engine_invariants import check_engine
from pushes import answer

SETTINGS = EngineSettings(
    num_workers=2, records_per_batch=4, max_pending_batches=16, lease_s=80.0, grant_timeout_s=300.0,
    checkpoint_every_updates=100, checkpoint_every_s=1e9,
)  # fmt: skip


class Job:
    """Two workers with a partition each, from offset 0; batches of 4 records. Grants are answered when a test says."""

    def __init__(self, policy: Policy) -> None:
        self.engine = Engine(SETTINGS, policy, term=1, now=0.0, origins=(0, 0))
        self.sessions: list[int] = []
        self.grants: list[Grant] = []
        self.now = 0.0
        for worker in range(2):
            self.handle(Join(worker=worker, process=f"p{worker}"))
            self.sessions.append(self.engine.worker(worker).session)

    def handle(self, event: ev.Event) -> list[ev.EngineAction]:
        actions = self.engine.handle(event, self.now)
        check_engine(self.engine)
        self.grants += [action for action in actions if isinstance(action, Grant)]
        return actions

    def announce(self, worker: int, first: int, until: int, *cuts: tuple[int, int]) -> None:
        runs = (BatchRange(worker, first, until, 0, cuts),)
        self.handle(Announce(worker=worker, session=self.sessions[worker], runs=runs))

    def answer_all(self) -> None:
        while self.grants:
            self.handle(answer(self.grants.pop(0), 1, ""))

    @property
    def applied(self) -> tuple[int, ...]:
        return self.engine.snapshot(self.now).applied


@pytest.mark.parametrize(
    "policy",
    [Doll(4), Bsp(), Diloco(3), Ssp(0), Wsp(3, 0)],
    ids=lambda policy: policy.name,
)
def test_what_can_fill_no_group_is_applied_once_all_is_announced(policy: Policy) -> None:
    job = Job(policy)
    job.handle(SourceEnded(ends=(18, 0)))
    job.announce(0, 0, 4)
    job.announce(1, 0, 0)
    assert job.engine.num_left is None, "2 records of partition 0 are to come"
    job.announce(0, 4, 5, (4, 2))
    job.answer_all()
    job.now += 10.0
    job.handle(ev.Tick())
    job.answer_all()
    assert job.applied == (5, 0)
    assert job.engine.num_left is None, "it is over"
    assert not any(worker.is_done for worker in job.engine.workers())


@pytest.mark.parametrize("policy", [Doll(4), Bsp(), Diloco(3)], ids=lambda policy: policy.name)
def test_without_an_end_it_waits_for_more(policy: Policy) -> None:
    job = Job(policy)
    job.announce(0, 0, 2)
    job.answer_all()
    job.now += 10.0
    job.handle(ev.Tick())
    assert job.applied == (0, 0)


def test_a_worker_whose_partitions_are_not_at_their_end_is_waited_for() -> None:
    job = Job(Bsp())
    job.handle(SourceEnded(ends=(8, 8)))
    job.announce(0, 0, 2)
    job.answer_all()
    assert job.applied == (0, 0), "worker 1 has batches to give"
    job.announce(1, 0, 1)
    job.answer_all()
    assert job.applied == (1, 1)
    job.announce(1, 1, 2)
    job.answer_all()
    assert job.applied == (2, 2)


def test_workers_are_told_at_once_and_with_their_welcome_and_a_later_server_is() -> None:
    job = Job(Bsp())
    actions = job.handle(SourceEnded(ends=(18, 7)))
    assert [item for item in actions if isinstance(item, Flush)] == [
        Flush(term=1, worker=0, until={0: 18}), Flush(term=1, worker=1, until={1: 7})
    ]  # fmt: skip
    (order,) = (item for item in actions if isinstance(item, ev.StoreCheckpoint))
    assert order.snapshot.source_ends == (18, 7)
    job.handle(ev.CheckpointStored(version=0))
    assert job.handle(SourceEnded(ends=(17,))) == [], "nothing new"
    later = job.handle(SourceEnded(ends=(20, 7, 9)))
    assert [item.until for item in later if isinstance(item, Flush)] == [{0: 20}, {1: 7}]
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(order.snapshot), type=ev.EngineSnapshot)
    engine = Engine(SETTINGS, Bsp(), term=2, now=0.0, snapshot=state)
    (welcome,) = engine.handle(Join(worker=0, process="p0"), 0.0)
    assert isinstance(welcome, Welcome)
    assert [item.flush_until for item in welcome.served] == [18]


def test_who_keeps_computed_batches_for_a_push_of_more_is_asked_for_them() -> None:
    job = Job(Wsp(3, 0))
    job.announce(0, 0, 2)
    job.announce(1, 0, 3)
    assert [item for item in job.handle(ev.Tick()) if isinstance(item, Settle)] == []
    job.handle(SourceEnded(ends=(8, 16)))
    asked = [item for item in job.handle(ev.Tick()) if isinstance(item, Settle)]
    assert [(item.worker, item.until) for item in asked] == [(0, 0)], "worker 1 has one more to give"
    assert [item for item in job.handle(ev.Tick()) if isinstance(item, Settle)] == [], "not at every tick"
    job.now = 1.0
    asked = [item for item in job.handle(ev.Tick()) if isinstance(item, Settle)]
    assert [item.worker for item in asked] == [0]


def test_a_source_that_goes_on_is_waited_for_again() -> None:
    job = Job(Doll(4))
    job.handle(SourceEnded(ends=(8, 0)))
    job.announce(0, 0, 2)
    job.answer_all()
    assert job.applied == (2, 0)
    job.announce(0, 2, 5)
    job.answer_all()
    assert job.applied == (2, 0)
    job.announce(1, 0, 1)
    job.answer_all()
    assert job.applied == (5, 1)


def test_the_end_of_a_source_costs_an_event_nothing_for_each_partition() -> None:
    """While a worker has one that is not announced up to its end, its others are not looked at."""
    engine = Engine(SETTINGS, Doll(2), term=1, now=0.0, origins=(0,) * 1000)
    for worker in range(2):
        engine.handle(Join(worker=worker, process=f"p{worker}"), 0.0)
    engine.handle(SourceEnded(ends=(400,) * 1000), 0.0)
    looks: list[int] = []
    is_reached = engine.ending._is_reached

    def counted(partition: PartitionState) -> bool:
        looks.append(partition.number)
        return is_reached(partition)

    engine.ending._is_reached = counted  # type: ignore[method-assign]
    session = engine.worker(0).session
    for number in range(10):
        engine.handle(Announce(worker=0, session=session, runs=(BatchRange(2 * number, 0, 1, 0, ()),)), 0.0)
        engine.handle(ev.Tick(), 0.0)
    assert 0 < len(looks) <= 3 * 20
    assert set(looks) == {0}
