"""Batches without a record: they are skipped as one, exactly once, under every policy, whatever happens."""

from __future__ import annotations

import pytest
from doll.consumers.intake import batching
from doll.consumers.protocol.skipped_batches import SkippedBatches, SkippedRange
from doll.consumers.protocol.worker_core import Batch, Send
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.policies.asp import Asp
from doll.ps.policies.ssp import Ssp
from doll.records.control import Durable, Grant, Join, Push, Skip, Welcome
from engine_invariants import check_engine
from engine_runs import play, random_steps
from engine_world import POLICIES, World
from fuzzing import seeds
from holey_world import LEAST, HoleyWorld
from record_builders import announce

pytestmark = pytest.mark.slow  # loads torch


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_holes_are_passed_exactly_once_whatever_happens(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MIN_RANGE", LEAST)
    skipped = 0
    for seed in seeds(40):
        world = HoleyWorld(POLICIES[policy])
        play(world, random_steps(seed, 2500))
        world.settle()
        world.check_prefixes()
        world.check_progress()
        skipped += world.skipped
    assert skipped > 100, "no hole was skipped as one"


class Bench:
    """One engine, whose workers are moved by hand."""

    def __init__(self, policy: Asp | Ssp, workers: int = 2) -> None:
        world = World("asp", workers=workers)
        self.engine = Engine(world.settings, policy, term=1, now=0.0, origins=[0] * workers)
        self.sessions = {}
        for worker in range(workers):
            for action in self.handle(Join(worker=worker, process=f"w{worker}")):
                if isinstance(action, Welcome):
                    self.sessions[worker] = action.session

    def handle(self, event: ev.Event) -> list[ev.EngineAction]:
        actions = self.engine.handle(event, 0.0)
        check_engine(self.engine)
        return actions

    def skip(self, first: int, until: int, **spans: tuple[tuple[int, int], ...]) -> list[ev.EngineAction]:
        spans = spans or {"gaps": ((2 * first, 2 * until),)}
        return self.handle(Skip(worker=0, session=self.sessions[0], partition=0, first=first, until=until, **spans))

    @property
    def applied(self) -> int:
        return self.engine.snapshot(0.0).applied[0]


def test_a_hole_of_millions_of_batches_is_one_event_one_version_and_one_checkpoint() -> None:
    bench = Bench(Asp())
    actions = bench.skip(0, 300_000)
    (update,) = (action for action in actions if isinstance(action, ev.ApplyUpdate))
    ((batch,),) = (item.batches for item in update.sets)
    assert (batch.lo, batch.hi, batch.count, update.batches_total) == (0, 600_000, 300_000, 300_000)
    (order,) = (action for action in actions if isinstance(action, ev.StoreCheckpoint))
    durable, published = bench.handle(ev.CheckpointStored(version=order.version))
    assert durable == Durable(term=1, worker=0, until={0: 300_000}, batches=0)
    assert published == ev.PublishWeights(1)
    (grant,) = bench.handle(announce(0, bench.sessions[0], 300_000, 300_001))
    assert isinstance(grant, Grant)
    assert (grant.first, grant.batches) == (0, ((0, 300_000),)), "a worker is granted its first batch"


def test_what_a_predecessor_skipped_is_not_applied_again() -> None:
    bench = Bench(Asp())
    bench.skip(0, 300)
    bench.skip(0, 300)
    bench.skip(0, 400)
    assert bench.applied == 400
    assert bench.engine.batches_total == 400


@pytest.mark.parametrize(
    "spans", [{"gaps": ((0, 598),)}, {"gaps": ((0, 600),), "lost": ((0, 2),)}, {"gaps": ((0, 300), (302, 600))}]
)
def test_a_skip_that_does_not_say_what_became_of_each_offset_is_refused(
    spans: dict[str, tuple[tuple[int, int], ...]],
) -> None:
    bench = Bench(Asp())
    bench.skip(0, 300, **spans)
    assert (bench.applied, bench.engine.counters["refused_content"]) == (0, 1)


def test_a_skip_waits_until_what_is_before_it_is_applied() -> None:
    bench = Bench(Asp())
    bench.handle(announce(0, bench.sessions[0], 0, 1))
    bench.skip(1, 300)
    assert (bench.applied, bench.engine.counters["refused_order"]) == (0, 1)


def test_nobody_waits_for_the_batches_that_another_stream_has_skipped() -> None:
    bench = Bench(Ssp(staleness=1))
    bench.skip(0, 300_000)
    bench.handle(ev.CheckpointStored(version=1))
    granted = [
        action.worker
        for worker, first in ((0, 300_000), (1, 0))
        for action in bench.handle(announce(worker, bench.sessions[worker], first, first + 1))
        if isinstance(action, Grant)
    ]
    assert granted == [0, 1]


def test_a_worker_sends_a_skip_when_all_before_it_is_durable_and_again_until_it_is() -> None:
    world = World("asp", workers=1)
    for _ in range(3):
        world.send(world.processes[0][0])
        world.receive_next(world.processes[0][0])
    core = world.processes[0][0].protocol
    core.batch_ready(Batch(0, None, 2, 0.0))
    assert core.skip(core.worker, SkippedRange(1, 301, ((12, 612),), ())) == []
    with pytest.raises(ValueError, match="expected batch 1, got 2"):
        core.skip(core.worker, SkippedRange(2, 301, (), ()))
    assert [type(action.record) for action in core.tick(100.0) if isinstance(action, Send)].count(Skip) == 0
    actions = core.on_record(Durable(term=core.term, worker=core.worker, until={core.worker: 1}, batches=1), 100.0)
    assert [type(action.record) for action in actions if isinstance(action, Send)] == [Skip]
    repeated = [action.record for action in core.tick(200.0) if isinstance(action, Send)]
    assert [type(record) for record in repeated].count(Skip) == 1
    assert not any(isinstance(record, Push) for record in repeated)
    assert core.served[core.worker].skipped
    core.on_record(Durable(term=core.term, worker=core.worker, until={core.worker: 301}, batches=301), 100.0)
    assert (bool(core.served[core.worker].skipped), core.served[core.worker].next_batch) == (False, 301)


def test_a_group_that_lacks_a_batch_and_a_hole_do_not_wait_for_each_other() -> None:
    skipped = SkippedBatches()
    skipped.put(SkippedRange(3, 303, ((6, 500),), ((500, 606),)), 3)
    assert skipped.take(0.0, 2, 8, waiting=1, granted=0) is None
    assert skipped.take(1.0, 2, 8, waiting=1, granted=0) == SkippedRange(3, 4, ((6, 8),), ())
    assert skipped.take(1.1, 2, 10, waiting=2, granted=0) is None
    assert skipped.take(2.0, 3, 10, waiting=1, granted=0) is None, "more is durable: it goes on"
    assert skipped.take(11.9, 3, 10, waiting=0, granted=1) is None
    assert skipped.take(12.1, 3, 10, waiting=0, granted=1) == SkippedRange(4, 5, ((8, 10),), ())
    assert skipped.record(0, 7, 0) == Skip(
        worker=0, session=7, partition=0, first=5, until=303, gaps=((10, 500),), lost=((500, 606),)
    )
