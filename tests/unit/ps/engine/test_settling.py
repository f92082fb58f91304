"""The ledger of isp and sparse rounds: what is durable is whole, and an engine that forgets it is caught."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from clock_world import drive
from doll.config.policy import PolicyConfig
from doll.errors import IllegalEventError
from doll.ps.engine import events as ev
from doll.ps.engine.engine import Engine
from doll.ps.engine.membership import Worker
from doll.ps.policies.base import BatchId
from doll.ps.policies.diloco import DilocoPolicyConfig
from doll.ps.policies.isp import IspPolicyConfig
from doll.records.control import Push
from engine_runs import check_random_run, play, random_steps
from engine_world import World
from fuzzing import examples, seeds
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

pytestmark = pytest.mark.slow  # loads torch

ISP = IspPolicyConfig(significance=0.7)
SPARSE = DilocoPolicyConfig(local_batches=3, quorum=0.6, grace_s=1.0, density=0.3)
both = pytest.mark.parametrize("policy", [ISP, SPARSE], ids=["isp", "diloco, sparse"])


@both
@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(50, 3000))
@example(seed=1, length=2500)
def test_what_is_durable_is_whole_and_in_the_model_once(policy: PolicyConfig, seed: int, length: int) -> None:
    check_random_run(policy, seed, length)


@both
def test_the_random_runs_settle_and_roll_back(policy: PolicyConfig) -> None:
    """Otherwise the test above would prove little."""
    settled = rolled_back = 0
    for seed in seeds(40):
        world = World(policy)
        play(world, random_steps(seed, 2500))
        settled += world.rests
        rolled_back += world.rolled_back
    assert settled > 5
    assert rolled_back > 3


class Hasty(Engine):
    """Stores what is applied, wherever the rest of the steps is."""

    def _save_if_due(self) -> None:
        settling, self._settling = self._settling, type(self._settling)(self.term)
        super()._save_if_due()
        self._settling = settling


class Careless(Engine):
    """Goes on without the rest of a worker that is lost."""

    def _lose_rest(self, worker: Worker) -> None:
        self._settling._unsettled.pop(worker.number, None)


def is_caught(
    mutant: type[Engine], seed: int, error: type[Exception], message: str, policy: PolicyConfig = ISP
) -> bool:
    class Mutated(World):
        engine_class = mutant

    world = Mutated(policy)
    try:
        play(world, random_steps(seed, 2500))
        world.settle()
    except error as exc:
        return message in str(exc)
    return False


@both
@pytest.mark.parametrize("mutant", [Hasty, Careless])
def test_an_engine_that_loses_a_part_of_a_step_is_caught(mutant: type[Engine], policy: PolicyConfig) -> None:
    assert any(is_caught(mutant, seed, AssertionError, "is whole", policy) for seed in range(100))


def two_rounds() -> World:
    """Each worker's first two batches are in the model, and each worker holds back a part of its steps."""
    world = World(ISP)
    drive(world, 3, 0, 1, 2)
    for worker in range(3):
        world.high[worker] += 4
    drive(world, 20, 0, 1, 2)
    return world


def test_a_worker_that_leaves_sends_its_rest_first_and_nothing_is_rolled_back() -> None:
    world = two_rounds()
    assert world.engine.worker(0).applied == 2
    assert not world.engine.is_settled
    (process,) = world.processes[0]
    world.leave(process)
    assert world.rolled_back == 0
    assert world.whole[0] == {0, 1}
    world.start_process(0)
    world.settle()
    assert world.rolled_back == 0


def test_a_worker_that_is_killed_takes_the_model_back_to_the_checkpoint() -> None:
    world = two_rounds()
    term = world.term
    world.kill_worker(0)
    world.start_process(0)
    drive(world, 4, 0)
    assert (world.rolled_back, world.term) == (1, term + 1)
    world.settle()
    world.check_ledger()


def test_the_job_ends_with_a_model_that_is_whole() -> None:
    world = two_rounds()
    world.handle(ev.StopRequested(reason="enough"))
    drive(world, 6, 0, 1, 2)
    world.store_checkpoint()
    assert world.engine.finished == "enough"
    assert world.stored is not None
    assert world.stored.applied == (2, 2, 2)
    assert world.whole == [{0, 1}] * 3


def dry_round() -> World:
    """Worker 2's stream has stopped, and the others wait for it with a batch each in the round."""
    world = World(ISP)
    drive(world, 3, 0, 1, 2)
    for worker, records in ((0, 6), (1, 6), (2, 4)):
        world.high[worker] += records
    drive(world, 30, 0, 1, 2)
    assert [worker.held for worker in world.engine.workers()] == [1, 1, 0]
    return world


def pass_time(world: World, seconds: int) -> None:
    for _ in range(seconds):
        world.tick(1.0)
        drive(world, 2, 0, 1, 2)
        world.store_checkpoint()


def test_a_job_whose_streams_have_stopped_becomes_durable() -> None:
    world = dry_round()
    pass_time(world, 12)
    assert world.engine.snapshot(world.now).applied == (2, 2, 2), "another batch may come: the round is open"
    pass_time(world, 10)
    assert world.stored is not None
    assert world.stored.applied == (3, 3, 2)
    assert world.whole == [{0, 1, 2}, {0, 1, 2}, {0, 1}]
    assert world.engine.durable_version == world.engine.version
    world.kill_worker(0)
    world.start_process(0)
    world.settle()
    assert world.rolled_back == 0, "nothing was held back any more"
    world.check_ledger()


class Patient(Engine):
    """Never ends a round before all have come."""

    def _end_of_dry_round(self) -> Sequence[BatchId]:
        return ()


class Impatient(Engine):
    """Ends a round in which batches are computed."""

    def _end_of_dry_round(self) -> Sequence[BatchId]:
        return self.held_batches() if self._settling.is_under_way else ()


@pytest.mark.parametrize(
    ("mutant", "error", "message"),
    [(Patient, AssertionError, "does not come to rest"), (Impatient, IllegalEventError, "batches of version")],
)
def test_an_engine_that_ends_rounds_at_the_wrong_time_is_caught(
    mutant: type[Engine], error: type[Exception], message: str
) -> None:
    assert any(is_caught(mutant, seed, error, message) for seed in range(20))


@pytest.mark.parametrize("lost", [False, True])
def test_a_job_that_ends_in_the_middle_of_a_round_leaves_the_round_out(lost: bool) -> None:
    """Gradients of the round are at the server already, and nobody will apply them."""
    world = World(ISP)
    drive(world, 3, 0, 1, 2)
    for worker, records in ((0, 6), (1, 6), (2, 4)):
        world.high[worker] += records
    drive(world, 30, 0, 1, 2)
    assert [worker.held for worker in world.engine.workers()] == [1, 1, 0]
    world.handle(ev.StopRequested(reason="enough"))
    if lost:
        world.kill_worker(1)
        world.start_process(1)
    drive(world, 8, 0, 1, 2)
    world.store_checkpoint()
    if lost:
        assert world.rolled_back == 1
        world.settle()
        world.check_ledger()
        return
    assert world.engine.finished == "enough"
    assert world.stored is not None
    assert world.stored.applied == (2, 2, 2)
    assert world.whole == [{0, 1}] * 3


def test_a_push_that_holds_back_under_another_policy_is_refused() -> None:
    world = World("bsp")
    drive(world, 3, 0, 1, 2)
    world.high[0] += 2
    (process,) = world.processes[0]
    while not any(isinstance(record, Push) for record in process.outbox):
        for step in (world.send, world.receive_next, world.read, world.compute):
            step(process)
    for at, record in enumerate(process.outbox):
        if isinstance(record, Push):
            process.outbox[at] = structs.replace(record, holds_back=True)
    drive(world, 8, 0)
    assert world.engine.counters["refused_content"] == 1
    assert world.engine.is_settled


def test_an_empty_rest_of_a_worker_that_holds_something_back_is_refused() -> None:
    """The empty rest would replace the real one, which is on its way on the other channel."""
    world = two_rounds()
    engine, worker = world.engine, world.engine.worker(0)
    assert engine._settling.holds_back(worker)
    empty = Push(
        worker=0, session=worker.session, term=engine.term, version=engine.version, key="", batches=(),
        settles=worker.applied,
    )  # fmt: skip
    assert engine.handle(empty, world.now) == []
    assert engine.counters["refused_empty_rest"] == 1
    assert engine._settling.holds_back(worker), "the real one is still awaited"
    assert not engine._settling.rests
