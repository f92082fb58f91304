"""Where a batch ends is decided by the first announcement that counts, and stays so for whoever reads it again."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies.bsp import Bsp
from doll.records.control import (
    Announce,
    BatchRange,
    Durable,
    Grant,
    Join,
    Nack,
    Scale,
    Served,
    Skip,
    Welcome,
)
from engine_invariants import check_engine
from pushes import answer

SETTINGS = EngineSettings(
    num_workers=2, records_per_batch=4, max_pending_batches=16, lease_s=8.0, grant_timeout_s=30.0,
    checkpoint_every_updates=1, checkpoint_every_s=1e9,
)  # fmt: skip


@dataclass
class Job:
    """Two workers with a partition each, from offsets 100 and 200; batches of 4 records; a round needs both."""

    engine: Engine = field(
        default_factory=lambda: Engine(SETTINGS, Bsp(), term=1, now=0.0, origins=(100, 200), run_id="r")
    )
    sessions: dict[int, int] = field(default_factory=dict)

    def handle(self, event: ev.Event) -> list[ev.EngineAction]:
        actions = self.engine.handle(event, 1.0)
        check_engine(self.engine)
        return actions

    def join(self, worker: int, process: str) -> tuple[Served, ...]:
        (welcome,) = (item for item in self.handle(Join(worker=worker, process=process)) if isinstance(item, Welcome))
        self.sessions[worker] = welcome.session
        return welcome.served

    def announce(self, worker: int, *runs: BatchRange) -> list[ev.EngineAction]:
        return self.handle(Announce(worker=worker, session=self.sessions[worker], runs=runs))

    def push(self, grant: Grant) -> list[ev.EngineAction]:
        return self.handle(answer(grant, self.engine.term, ""))


@pytest.fixture
def job() -> Job:
    made = Job()
    for worker, process in enumerate("ab"):
        made.join(worker, process)
    return made


def granted(actions: list[ev.EngineAction]) -> list[Grant]:
    return [action for action in actions if isinstance(action, Grant)]


def applied(actions: list[ev.EngineAction]) -> list[tuple[int, int, int, int, bool]]:
    return [
        (batch.partition, batch.number, batch.lo, batch.hi, batch.cut)
        for action in actions
        if isinstance(action, ev.ApplyUpdate)
        for item in action.sets
        for batch in item.batches
    ]


def test_an_announced_cut_moves_all_later_batches_and_is_in_update_checkpoint_and_durable(job: Job) -> None:
    (cut,) = granted(job.announce(0, BatchRange(0, 0, 3, 0, ((1, 3),))))
    assert cut.left_out == ((0, 0),), "what it was granted as"
    (other,) = granted(job.announce(1, BatchRange(1, 0, 3)))
    assert other.left_out == ()
    job.push(cut)
    actions = job.push(other)
    assert applied(actions) == [(0, 0, 100, 104, False), (1, 0, 200, 204, False)]
    cut, other = granted(actions)
    assert cut.left_out == ((0, 3),)
    job.push(cut)
    assert applied(job.push(other)) == [(0, 1, 104, 105, True), (1, 1, 204, 208, False)]
    (order,) = (item for item in job.handle(ev.CheckpointStored(version=1)) if isinstance(item, ev.StoreCheckpoint))
    assert (order.snapshot.applied, order.snapshot.left_out) == ((2, 2), (3, 0))
    durable = [item for item in job.handle(ev.CheckpointStored(version=2)) if isinstance(item, Durable)]
    assert [(item.until, item.left_out) for item in durable] == [({0: 2}, {0: 3}), ({1: 2}, {})]
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(order.snapshot), type=ev.EngineSnapshot)
    later = Job(Engine(SETTINGS, Bsp(), term=2, now=0.0, snapshot=state))
    (served,) = later.join(0, "c")
    assert (served.next_batch, served.decided, served.left_out, served.cuts) == (2, 2, 3, ())
    later.join(1, "b")
    (grant,) = granted(later.announce(0, BatchRange(0, 2, 3, 3, ())))
    assert grant.left_out == ((3, 0),)
    (other,) = granted(later.announce(1, BatchRange(1, 2, 3)))
    later.push(grant)
    assert applied(later.push(other))[0] == (0, 2, 105, 109, False)


def test_the_first_announcement_counts_while_it_stands(job: Job) -> None:
    job.announce(0, BatchRange(0, 0, 2, 0, ((0, 2),)))
    assert granted(job.announce(0, BatchRange(0, 0, 2, 0, ((1, 1),)))) == [], "it is known already"
    assert job.announce(0, BatchRange(0, 2, 3, 1, ())) == [ev.SendHello(0)], "it does not follow what is known"
    assert job.engine.counters["refused_announce"] == 1
    (served,) = job.join(0, "a")
    assert (served.decided, served.cuts) == (0, ()), "nothing was at the server"
    (grant,) = granted(job.announce(0, BatchRange(0, 0, 3, 0, ((1, 1),))))
    assert grant.left_out == ((0, 0),), "it is full"


def test_what_is_held_is_decided_for_the_next_process_and_what_is_only_announced_is_not(job: Job) -> None:
    (grant,) = granted(job.announce(0, BatchRange(0, 0, 3, 0, ((0, 2), (2, 1)))))
    job.push(grant)
    (served,) = job.join(0, "another")
    assert (served.next_batch, served.included, served.decided, served.left_out) == (0, 0, 1, 0)
    assert served.cuts == ((0, 2),)
    job.announce(0, BatchRange(0, 0, 4, 0, ((0, 2), (1, 3))))
    (other,) = granted(job.announce(1, BatchRange(1, 0, 1)))
    actions = job.push(other)
    assert applied(actions) == [(0, 0, 100, 102, True), (1, 0, 200, 204, False)]
    job.announce(1, BatchRange(1, 1, 2))
    waiting = job.engine.worker(0).queue.partitions[0]
    assert [waiting.offsets(batch, 4) for batch in (1, 2, 3)] == [(102, 103), (103, 107), (107, 111)]


def test_a_nack_forgets_the_cuts_of_what_was_not_pushed(job: Job) -> None:
    (grant,) = granted(job.announce(0, BatchRange(0, 0, 2, 0, ((0, 2),))))
    nack = Nack(
        worker=0, session=job.sessions[0], batch=0, term=1, grant_id=grant.grant_ids[0], reason="batch"
    )  # fmt: skip
    assert ev.SendHello(0) in job.handle(nack)
    (served,) = job.join(0, "a")
    assert (served.decided, served.cuts) == (0, ())


def test_a_partition_that_moves_takes_along_what_is_decided(job: Job) -> None:
    for worker in (0, 1):
        (grant,) = granted(job.announce(worker, BatchRange(worker, 0, 2, 0, ((0, 1), (1, 1)))))
        job.push(grant)
    job.handle(Scale(workers=1, run_id="r"))
    assert job.engine.worker(0).queue.partitions.keys() == {0, 1}
    _, served = job.join(0, "a")
    assert (served.partition, served.next_batch, served.included, served.decided) == (1, 0, 1, 1)
    assert (served.left_out, served.cuts) == (0, ((0, 1),))


@pytest.mark.parametrize(
    "run",
    [
        BatchRange(0, 0, 2, 0, ((0, 4),)),
        BatchRange(0, 0, 2, 0, ((0, 0),)),
        BatchRange(0, 0, 2, 0, ((0, -1),)),
        BatchRange(0, 0, 2, 0, ((2, 1),)),
        BatchRange(0, 0, 3, 0, ((1, 1), (1, 1))),
        BatchRange(0, 0, 3, 0, ((2, 1), (1, 1))),
        BatchRange(0, 0, 2, -1, ()),
        BatchRange(0, 0, 2, 1, ()),
    ],
)
def test_cuts_that_cannot_be_are_refused(job: Job, run: BatchRange) -> None:
    assert job.announce(0, run) == [ev.SendHello(0)]
    assert job.engine.counters["refused_announce"] == 1
    assert granted(job.announce(0, BatchRange(0, 0, 1))) != []


def test_what_is_skipped_lies_behind_the_cuts(job: Job) -> None:
    (grant,) = granted(job.announce(0, BatchRange(0, 0, 1, 0, ((0, 3),))))
    (other,) = granted(job.announce(1, BatchRange(1, 0, 1)))
    job.push(grant)
    job.push(other)
    skip = Skip(worker=0, session=job.sessions[0], partition=0, first=1, until=301, gaps=((104, 1304),))
    assert applied(job.handle(skip)) == []
    assert job.engine.counters["refused_content"] == 1
    skip = msgspec.structs.replace(skip, gaps=((101, 1301),))
    assert applied(job.handle(skip)) == [(0, 1, 101, 1301, False)]
    assert job.engine.worker(0).queue.partitions[0].offsets(301, 4) == (1301, 1305)
