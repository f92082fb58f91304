"""How the engine ends a job: stop rules, refused records, and a server that starts again on a finished job."""

from __future__ import annotations

import msgspec
import pytest
from doll.config import StopConfig
from doll.config.data import BadRecordsConfig
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.stopping import reached_before
from doll.ps.policies.doll import Doll
from doll.records.control import (
    Durable,
    Evaluated,
)
from engine_bench import Bench, only, settings


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        (StopConfig(updates=1), "updates"),
        (StopConfig(samples=4), "samples"),
        (StopConfig(accuracy=0.9), "accuracy"),
        (StopConfig(loss=0.5), "loss"),
        (StopConfig(seconds=5), "seconds"),
    ],
)
def test_stop_rules_end_the_job_after_a_last_checkpoint(stop: StopConfig, reason: str) -> None:
    bench = Bench(Doll(1), workers=1, stop=stop)
    bench.join(0)
    bench.announce(0, 0, 1)
    actions = bench.push(0, 0)
    bench.now = 6.0
    actions += bench.handle(Evaluated(term=1, version=1, loss=0.4, accuracy=0.95))
    actions += bench.handle(ev.Tick())
    (save,) = only(actions, ev.StoreCheckpoint)
    assert only(actions, ev.Finish) == []
    actions = bench.handle(ev.CheckpointStored(version=save.version))
    (finish,) = only(actions, ev.Finish)
    assert finish.reason.startswith(reason)
    assert only(actions, Durable)
    assert bench.handle(ev.Tick()) == [], "nothing comes after the end"


def test_a_server_that_starts_again_on_a_finished_job_adds_nothing() -> None:
    bench = Bench(Doll(1), workers=1, stop=StopConfig(updates=1))
    bench.join(0)
    bench.announce(0, 0, 2)
    bench.push(0, 0)
    snapshot = bench.engine.snapshot(0.0)
    again = Engine(settings(1, stop=StopConfig(updates=1)), Doll(1), term=2, now=0.0, snapshot=snapshot)
    assert [type(action) for action in again.handle(ev.Tick(), 0.0)] == [ev.StoreCheckpoint]
    assert only(again.handle(ev.CheckpointStored(version=1), 0.0), ev.Finish)


@pytest.mark.parametrize("stop", [StopConfig(accuracy=0.9), StopConfig(loss=0.5)])
@pytest.mark.parametrize("is_saving", [False, True])
def test_a_target_that_was_reached_is_in_the_last_checkpoint(stop: StopConfig, is_saving: bool) -> None:
    """A server that starts again ends the job, unless its rule asks for more; the evaluation does not come again."""
    bench = Bench(Doll(1), workers=1, stop=stop, checkpoint_every_updates=1 if is_saving else 1000)
    bench.join(0)
    bench.announce(0, 0, 2)
    saves = only(bench.push(0, 0), ev.StoreCheckpoint)
    assert len(saves) == is_saving, "the checkpoint of this version may be under way when the evaluation comes"
    saves += only(bench.handle(Evaluated(term=1, version=1, loss=0.4, accuracy=0.95)), ev.StoreCheckpoint)
    actions = bench.handle(ev.CheckpointStored(version=1))
    if is_saving:
        assert not only(actions, ev.Finish)
        saves += only(actions, ev.StoreCheckpoint)
        actions = bench.handle(ev.CheckpointStored(version=1))
    assert only(actions, ev.Finish)
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(saves[-1].snapshot), type=ev.EngineSnapshot)
    assert reached_before(stop, kept)
    again = Engine(settings(1, stop=stop), Doll(1), term=2, now=0.0, snapshot=kept)
    assert [type(action) for action in again.handle(ev.Tick(), 0.0)] == [ev.StoreCheckpoint]
    assert only(again.handle(ev.CheckpointStored(version=1), 0.0), ev.Finish)
    assert reached_before(stop, again.snapshot(0.0)), "as long as the rule is the same"
    more = StopConfig(accuracy=0.99, loss=0.1)
    assert reached_before(more, kept) is None
    further = Engine(settings(1, stop=more), Doll(1), term=2, now=0.0, snapshot=kept)
    assert further.handle(ev.Tick(), 0.0) == []
    assert further.stopping is None


@pytest.mark.parametrize(
    ("stop", "is_met"),
    [
        (StopConfig(updates=1), True),
        (StopConfig(updates=2), False),
        (StopConfig(samples=4), True),
        (StopConfig(samples=5), False),
        (StopConfig(seconds=5), True),
        (StopConfig(seconds=7), False),
        (StopConfig(accuracy=0.1), False),
    ],
)
def test_a_checkpoint_says_whether_its_job_has_ended(stop: StopConfig, is_met: bool) -> None:
    bench = Bench(Doll(1), workers=1)
    assert reached_before(stop, bench.engine.snapshot(100.0)) is None
    bench.join(0)
    bench.announce(0, 0, 1)
    bench.push(0, 0)
    assert (reached_before(stop, bench.engine.snapshot(6.0)) is not None) == is_met


def test_an_evaluation_of_another_server_does_not_stop_the_job() -> None:
    bench = Bench(Doll(1), workers=1, stop=StopConfig(accuracy=0.9))
    bench.handle(Evaluated(term=0, version=0, loss=0.1, accuracy=1.0))
    assert bench.engine.stopping is None


def garbage(bench: Bench, worker: int, batch: int) -> list[ev.EngineAction]:
    """The worker has found no usable sample in the four records of this batch."""
    lo = 100 * worker + 4 * batch
    return bench.push(
        worker, batch, key="", n_samples=0, loss_sum=0.0, dead=tuple(range(lo, lo + 4)),
        dead_reasons=(("no age", 3), ("NaN in x", 1)),
    )  # fmt: skip


def test_skipped_samples_are_counted_in_updates_and_in_a_checkpoint() -> None:
    bench = Bench(Doll(1), workers=1, stop=StopConfig(updates=2))
    bench.join(0)
    bench.announce(0, 0, 2)
    bench.push(0, 0, n_samples=1, skipped=(("tombstone", 2), ("bot", 1)))
    bench.push(0, 1, n_samples=3, skipped=(("bot", 1),))
    again = Engine(settings(1), Doll(1), term=2, now=0.0, snapshot=bench.engine.snapshot(0.0))
    for engine in (bench.engine, again):
        assert engine.refusals.skipped.in_order() == (("tombstone", 2), ("bot", 2))
        assert engine.refusals.reasons.in_order() == ()


def test_updates_without_samples_do_not_count_for_a_stop_rule() -> None:
    bench = Bench(Doll(1), workers=1, stop=StopConfig(updates=2, seconds=50))
    bench.join(0)
    bench.announce(0, 0, 6)
    for batch in range(3):
        garbage(bench, 0, batch)
    bench.now = 100.0
    bench.handle(ev.Tick())
    assert (bench.engine.version, bench.engine.stopping) == (3, None), "nothing is learned: no time has passed either"
    bench.join(0)
    bench.announce(0, 0, 6)
    bench.push(0, 3)
    snapshot = bench.engine.snapshot(bench.now)
    bench.push(0, 4)
    assert bench.engine.stopping == "updates: 2 reached"
    again = Engine(settings(1, stop=StopConfig(updates=2)), Doll(1), term=2, now=0.0, snapshot=snapshot)
    again.handle(ev.Tick(), 1.0)
    assert (again.version, again.stopping) == (4, None)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_job_whose_records_are_refused_ends_in_order_with_the_reasons(workers: int) -> None:
    limit = BadRecordsConfig(first_records=24, last_records=100)
    bench = Bench(Doll(1), workers=workers, on_bad_records=limit, max_pending_batches=32)
    bench.join(*range(workers))
    for batch in range(6):
        worker = batch % workers
        bench.announce(worker, batch // workers, batch // workers + 1)
        actions = garbage(bench, worker, batch // workers)
    assert bench.engine.stopping == "bad records"
    (stored,) = only(actions, ev.StoreCheckpoint)
    (finish,) = only(bench.handle(ev.CheckpointStored(version=stored.version)), ev.Finish)
    assert (finish.reason, finish.version) == ("bad records", 6)
    assert finish.error == "24 of the last 24 records were refused, the first for: no age (18); NaN in x (6)"
    again = Engine(
        settings(workers, on_bad_records=limit, max_pending_batches=32),
        Doll(1),
        term=2,
        now=0.0,
        snapshot=stored.snapshot,
    )
    again.handle(ev.Tick(), 1.0)
    assert (again.stopping, again.error) == (None, ""), "whoever resumes it has read why it ended"
    assert again.refusals.reasons.in_order() == (("no age", 18), ("NaN in x", 6))
