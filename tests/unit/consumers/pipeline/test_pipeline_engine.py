"""The gradient engine of stages, with real stage processes: what it answers, what it stores, and how it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import record_builders
import torch
from doll.consumers.pipeline.stage_processes import StageProcesses
from doll.consumers.protocol.worker_core import GradientDone
from doll.errors import ConfigError, ServiceUnavailableError, StageLostError, TaskError
from doll.pipeline.links.link import socket_pair
from doll.pipeline.runtime.messages import Ready, encode
from doll.records.control import NewVersion
from pipeline_rig import BATCH, Rig, answer
from process_checks import is_gone
from stage_models import samples
from tree_tasks import weighted_texts
from waiting import WAIT_TIMEOUT_S, until

from doll_lab.pipelines.measured import read_tasks

pytestmark = pytest.mark.slow  # loads torch

Array = npt.NDArray[Any]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []
    threads = torch.get_num_threads()

    def make(*arguments: Any) -> Rig:
        made.append(Rig(tmp_path, *arguments))
        return made[-1]

    yield make
    for rig in made:
        rig.engine.close()
        assert all(is_gone(pid) for pid in rig.stages.pids)
    torch.set_num_threads(threads)


def failure(rig: Rig) -> BaseException:
    """Why the engine has ended."""
    error = rig.engine.ended.exception(WAIT_TIMEOUT_S)
    assert error is not None
    return error


# --- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "in_flight"), [(1, 2), (3, 4), (8, 2)])
def test_waves_are_answered_in_order_with_the_sum_of_their_steps(
    make_rig: Callable[..., Rig], stages: int, in_flight: int
) -> None:
    rig = make_rig(stages, in_flight)
    weights = rig.publish(1, 0)
    finished: list[int] = []
    futures = [rig.submit(number, weights) for number in range(2 * in_flight)]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: finished.append(number))  # type: ignore[misc]
    answers = [answer(future) for future in futures]
    assert finished == list(range(2 * in_flight))
    assert [done.is_kept for done in answers] == 2 * [*[True] * (in_flight - 1), False]
    assert [bool(done.key) for done in answers] == [not done.is_kept for done in answers]
    assert all(done.batches[0].num_samples == BATCH for done in answers)
    assert all(done.batches[0].version == 1 for done in answers)
    assert all(np.isfinite(done.batches[0].loss_sum) for done in answers)
    first, second = (rig.pushed(done) for done in answers if done.key)
    n = rig.model.num_parameters
    assert np.abs(first[:n]).max() > 1e-4
    assert not np.allclose(first[:n], second[:n])
    rig.engine.close()
    orders = {(task.stage, task.batch) for task in read_tasks(rig.log)}
    assert orders == {(stage, number) for stage in range(stages) for number in range(2 * in_flight)}


@pytest.mark.parametrize("stages", [1, 3])
def test_one_batch_at_a_time_is_what_an_undivided_worker_computes(make_rig: Callable[..., Rig], stages: int) -> None:
    """Each batch is computed on all own steps before it, and the wave's sum equals the undivided worker's exactly."""
    rig = make_rig(stages, 2, "training.optimizer={name: adam, lr: 0.01}", "training.clip_norm=0.5")
    steps = rig.undivided()
    computer = steps._computer
    weights = rig.publish(1, 0)
    for wave in range(3):
        for number in (2 * wave, 2 * wave + 1):
            done = answer(rig.submit(number, weights, min_version=weights.version))
            order = record_builders.grant_of(
                term=1, worker=0, session=1, first=number, grant_ids=(number,), version=weights.version,
                min_version=0, key=weights.key, included=weights.included,
            )  # fmt: skip
            assert steps.load(order) == done.batches[0].version
            gradient = computer.compute(*samples(rig.task, number, BATCH))
            assert done.batches[0].loss_sum == pytest.approx(gradient.loss_sum, rel=1e-5)
            steps.add(gradient, batch=number)
        expected = steps.values()
        assert expected is not None
        np.testing.assert_allclose(rig.pushed(done), expected, rtol=1e-5, atol=1e-6)
        weights = rig.publish(2 + wave, 2 * wave + 2, rig.first_weights * (1 + wave / 10))
        rig.engine.offer(weights)
        steps.offer(weights)


def test_dicts_sequences_and_weights_go_through_stages_as_through_an_undivided_worker(
    make_rig: Callable[..., Rig],
) -> None:
    """With several tensors between stages, and two at the end."""
    rig = make_rig(3, 1, "task.class=tree_tasks:Chained", "training.optimizer={name: sgd, lr: 0.1}")
    steps = rig.undivided()
    computer = steps._computer
    weights = rig.publish(1, 0)
    for number in range(3):
        batch = weighted_texts(number, BATCH)
        done = answer(rig.submit(number, weights, batch=batch))
        order = record_builders.grant_of(
            term=1, worker=0, session=1, first=number, grant_ids=(number,), version=1, min_version=0, key=weights.key,
            included=0,
        )  # fmt: skip
        assert steps.begin(order)
        assert steps.load(order) == 1
        gradient = computer.compute(*batch)
        (computed,) = done.batches
        assert (computed.num_samples, computed.weight) == (BATCH, batch.total_weight)
        assert computed.loss_sum == pytest.approx(gradient.loss_sum, rel=1e-5)
        assert computed.metric_sums == pytest.approx(gradient.metric_sums)
        steps.add(gradient, batch=number)
        expected = steps.values()
        assert expected is not None
        np.testing.assert_allclose(rig.pushed(done), expected, rtol=1e-5, atol=1e-6)


def test_a_batch_without_any_weight_adds_nothing_and_a_bad_sequence_is_refused(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(2, 1, "task.class=tree_tasks:Chained")
    weights = rig.publish(1, 0)
    batch = weighted_texts(0, BATCH)
    nothing = answer(rig.submit(0, weights, batch=batch._replace(weight=np.zeros(BATCH, np.float32))))
    assert (nothing.key, nothing.batches[0].num_samples, nothing.batches[0].weight) == ("", BATCH, 0.0)
    batch.x[3]["words"] = (np.array([[1, 2]]), batch.x[3]["words"][1])  # of two dimensions: no sequence as the others
    done = answer(rig.submit(1, weights, batch=batch))
    assert list(rig.refusals.bad[1]) == [3]
    assert done.batches[0].num_samples == BATCH - 1


def test_each_stage_draws_numbers_of_its_own(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 1, "task.class=stage_models:Random", "training.optimizer={name: sgd, lr: 1.0}")
    drawn = [-wave for wave in waves(rig, [samples(rig.task, number, BATCH) for number in range(2)])]
    at_stages = np.concatenate([numbers.reshape(3, -1) for numbers in drawn])
    assert ((at_stages > 0) & (at_stages < 1)).all()
    assert len(np.unique(at_stages.round(5))) == at_stages.size


def test_batches_without_samples_need_no_weights_and_end_waves(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(2, 2)
    weights = rig.publish(3, 0)
    empty = (np.zeros((0, 6), np.float32), np.zeros(0, np.int64))
    futures = [rig.submit(0, weights), rig.submit(1, weights, *empty, min_version=3)]
    futures += [rig.submit(number, weights, *empty) for number in (2, 3)]
    first, second, third, fourth = (answer(future) for future in futures)
    assert first.is_kept
    assert not second.is_kept
    assert np.abs(rig.pushed(second)).max() > 0
    assert second.version >= 3
    assert (third.key, fourth.key) == ("", "")
    assert [done.batches[0].num_samples for done in (second, third, fourth)] == [0, 0, 0]


def test_one_sample_alone_is_computed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 2)
    weights = rig.publish(1, 0)
    done = [answer(rig.submit(number, weights, n=1)) for number in (0, 1)]
    assert [item.batches[0].num_samples for item in done] == [1, 1]


def test_newer_weights_are_used_when_they_are_offered(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 2)
    weights = rig.publish(1, 0)
    assert [answer(rig.submit(number, weights)).version for number in (0, 1)] == [1, 1]
    newer = rig.publish(2, 2)
    rig.engine.offer(newer)
    assert [answer(rig.submit(number, newer, min_version=2)).version for number in (2, 3)] == [2, 2]


# --- bad samples ----------------------------------------------------------------------------------------------------


def learn(rig: Rig, weights: NewVersion, count: int) -> None:
    for future in [rig.submit(number, weights) for number in range(count)]:
        answer(future)


@pytest.mark.parametrize("fails", ["", "error"])
@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_bad_samples_are_refused_and_the_rest_is_learned(
    make_rig: Callable[..., Rig], value: float, fails: str
) -> None:
    """Several batches are in flight while one is inspected, and each is judged by what came back of it."""
    rig = make_rig(3, 4, f"task.args={{fails: '{fails}'}}")
    weights = rig.publish(1, 0)
    learn(rig, weights, 4)
    x, y = samples(rig.task, 5, BATCH)
    x[2] = value
    sizes = [8, 8, 5, 7, 8, 8, 3, 8]
    futures = [
        rig.submit(4 + at, weights, x, y) if at == 1 else rig.submit(4 + at, weights, n=n) for at, n in enumerate(sizes)
    ]
    answers = [answer(future) for future in futures]
    assert list(rig.refusals.bad) == [5]
    assert list(rig.refusals.bad[5]) == [2]
    sizes[1] = 7
    assert [done.batches[0].num_samples for done in answers] == sizes
    for done in answers:
        if done.key:
            assert np.isfinite(rig.pushed(done)[: rig.model.num_floats]).all()
    for at, done in enumerate(answers):
        assert 0 < done.batches[0].loss_sum / sizes[at] < 5


def waves(rig: Rig, batches: Sequence[tuple[Array, Array]]) -> list[Array]:
    """The sums of steps that are pushed. Each batch begins when the one before it is complete."""
    weights = rig.publish(1, 0)
    answers = [answer(rig.submit(number, weights, x.copy(), y)) for number, (x, y) in enumerate(batches)]
    return [rig.pushed(done) for done in answers if done.key]


@pytest.mark.parametrize("at", [4, 5])
@pytest.mark.parametrize(("fails", "value"), [("", 1e6), ("", 1e30), ("error", 1e6)], ids=["spike", "nan", "fails"])
def test_what_is_pushed_is_what_the_other_samples_make(
    make_rig: Callable[..., Rig], fails: str, value: float, at: int
) -> None:
    """A bad sample has no part in the steps, and those of the batches before it are made at all stages, also at those
    behind one that fails."""
    rig = make_rig(3, 2, f"task.args={{fails: '{fails}'}}")
    batches = [samples(rig.task, number, BATCH) for number in range(6)]
    usable = list(batches)
    x, y = batches[at][0].copy(), batches[at][1]
    x[2] = value
    batches[at] = x, y
    left = [number for number in range(BATCH) if number != 2]
    usable[at] = x[left], y[left]
    actual = waves(rig, batches)
    rig.engine.close()  # stages are forked where there is one thread
    other = make_rig(3, 2, f"task.args={{fails: '{fails}'}}")
    expected = waves(other, usable)
    assert {number: list(bad) for number, bad in rig.refusals.bad.items()} == {at: [2]}
    assert not other.refusals.bad
    assert len(actual) == len(expected) == 3
    for wave, clean in zip(actual, expected, strict=True):
        np.testing.assert_allclose(wave, clean, rtol=1e-5, atol=1e-7)


def test_nothing_begins_while_a_batch_is_inspected(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(3, 4)
    weights = rig.publish(1, 0)
    learn(rig, weights, 4)
    engine, guard = rig.engine, rig.engine._guard
    inspect_if_due, compute = engine._inspect_if_due, guard.compute
    suspected, submitted = threading.Event(), threading.Event()
    computing: list[int] = []

    def pause() -> None:
        if engine._suspect is not None and not suspected.is_set():
            suspected.set()
            assert submitted.wait(WAIT_TIMEOUT_S)
        else:  # what was submitted has come first
            inspect_if_due()

    def count(*arguments: Any, **options: Any) -> Any:
        computing.append(engine._core.num_computing)
        return compute(*arguments, **options)

    monkeypatch.setattr(engine, "_inspect_if_due", pause)
    monkeypatch.setattr(guard, "compute", count)
    x, y = samples(rig.task, 4, BATCH)
    x[2] = np.nan
    futures = [rig.submit(4, weights, x, y)]
    assert suspected.wait(WAIT_TIMEOUT_S)
    futures += [rig.submit(number, weights) for number in (5, 6, 7)]
    submitted.set()
    assert [answer(future).batches[0].num_samples for future in futures] == [BATCH - 1, BATCH, BATCH, BATCH]
    assert computing == [1], "another batch than the inspected one is in the stages"


def test_what_is_learned_of_an_unusual_batch_is_what_was_judged(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came back with a gradient of older weights, and was judged at those that the batches before it have made."""
    rig = make_rig(3, 4)
    weights = rig.publish(1, 0)
    learn(rig, weights, 4)
    guard = rig.engine._guard
    seen: list[float] = []
    judged: list[float] = []
    compute = guard.compute

    def is_unusual(gradient: Any) -> bool:
        seen.append(gradient.loss_sum)
        return len(seen) == 3

    def record(*arguments: Any, **options: Any) -> Any:
        result = compute(*arguments, **options)
        judged.append(0.0 if result.gradient is None else result.gradient.loss_sum)
        return result

    monkeypatch.setattr(guard, "is_unusual", is_unusual)
    monkeypatch.setattr(guard, "compute", record)
    answers = [answer(future) for future in [rig.submit(number, weights) for number in (4, 5, 6, 7)]]
    assert answers[2].batches[0].loss_sum == pytest.approx(judged[0], rel=1e-5)
    assert answers[2].batches[0].loss_sum != pytest.approx(seen[2], rel=1e-3)


def test_a_batch_of_bad_samples_only_is_left_out(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 2)
    weights = rig.publish(1, 0)
    learn(rig, weights, 2)
    x, y = samples(rig.task, 2, BATCH)
    futures = [rig.submit(2, weights, x * np.nan, y), rig.submit(3, weights), rig.submit(4, weights)]
    first, second, third = (answer(future) for future in futures)
    assert list(rig.refusals.bad[2]) == list(range(BATCH))
    assert [done.batches[0].num_samples for done in (first, second, third)] == [0, BATCH, BATCH]
    assert second.key
    rig.engine.offer(rig.publish(2, 4))
    assert answer(rig.submit(5, rig.publish(2, 4), min_version=2)).batches[0].version == 2


def test_a_task_that_fails_on_everything_ends_the_engine(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 2, "task.args={fails: error}")
    x, y = samples(rig.task, 0, BATCH)
    with pytest.raises(TaskError, match="a number is too large"):
        rig.submit(0, rig.publish(1, 0), x + 1e9, y).result(WAIT_TIMEOUT_S)
    assert isinstance(failure(rig), TaskError)
    with pytest.raises(TaskError):
        rig.submit(1, rig.publish(1, 0)).result(WAIT_TIMEOUT_S)


def test_a_model_that_diverges_is_the_tasks_fault(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(2, 1, "training.optimizer={name: sgd, lr: 1.0e30}")
    weights = rig.publish(1, 0)
    for number in range(4):
        rig.submit(number, weights)
    assert isinstance(failure(rig), TaskError), failure(rig)


def test_a_stage_without_memory_is_this_machines_fault(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 2, "task.args={fails: memory}")
    x, y = samples(rig.task, 0, BATCH)
    with pytest.raises(StageLostError, match=r"stage \d: MemoryError: no memory is left"):
        rig.submit(0, rig.publish(1, 0), x + 1e9, y).result(WAIT_TIMEOUT_S)


# --- grants ---------------------------------------------------------------------------------------------------------


def test_weights_that_are_gone_are_missing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(2, 2)
    weights = rig.publish(1, 0)
    rig.blobs.wipe()
    futures = [rig.submit(number, weights) for number in (0, 1)]
    assert [future.result(WAIT_TIMEOUT_S) for future in futures] == [None, None]
    again = rig.publish(1, 0)
    assert all(answer(rig.submit(number, again)).batches for number in (0, 1))


def test_a_blob_that_is_torn_is_missing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(2, 2)
    weights = rig.publish(1, 0)
    blob = rig.blobs.get(weights.key)
    assert blob is not None
    rig.blobs.put(weights.key, [blob[:-1]], 60.0)
    assert rig.submit(0, weights).result(WAIT_TIMEOUT_S) is None


def test_a_wave_that_is_granted_again_is_computed_again_without_its_own_steps(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 2)
    weights = rig.publish(1, 0)
    answers = [answer(rig.submit(number, weights)) for number in (0, 1)]
    again = [answer(rig.submit(number, weights, grant=10 + number)) for number in (0, 1)]
    assert answers[1].key != again[1].key
    np.testing.assert_array_equal(rig.pushed(answers[1]), rig.pushed(again[1]))


def test_a_new_term_has_none_of_the_steps(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 2)
    first = answer_all(rig, rig.publish(1, 0), [0, 1])
    rig.term = 2
    second = answer_all(rig, rig.publish(1, 0), [0, 1])
    np.testing.assert_array_equal(rig.pushed(first), rig.pushed(second))


def answer_all(rig: Rig, weights: NewVersion, numbers: Sequence[int]) -> GradientDone:
    """One after the other; the last answer."""
    return [answer(rig.submit(number, weights)) for number in numbers][-1]


def test_batches_that_nobody_wants_any_more_are_void(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 4)
    weights = rig.publish(1, 0)
    rig.wanted = lambda batch, grant_id: grant_id >= 10
    old = [rig.submit(number, weights) for number in range(4)]
    new = [rig.submit(number, weights, grant=10 + number) for number in range(4)]
    assert [answer(future).batches for future in old] == [()] * 4
    assert [len(answer(future).batches) for future in new] == [1] * 4
    assert answer(new[-1]).key


def test_a_new_term_while_a_batch_is_inspected(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 4)
    weights = rig.publish(1, 0)
    learn(rig, weights, 4)
    x, y = samples(rig.task, 5, BATCH)
    x[2] = np.nan
    for term in range(2, 8):
        futures = [rig.submit(number, weights, *((x, y) if number == 1 else (None, None))) for number in range(4)]
        for future in futures[: term - 2]:
            answer(future)  # some terms begin a little later
        rig.term = term
        weights = rig.publish(1, 0)
        answers = [answer(rig.submit(number, weights, grant=100 * term + number)) for number in range(4)]
        assert all(future.done() for future in futures)
        assert [done.batches[0].num_samples for done in answers] == [BATCH] * 4
        assert answers[-1].key


def test_a_blob_store_that_is_away_ends_the_engine(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(2, 1)
    weights = rig.publish(1, 0)
    rig.blobs.fail_next(ServiceUnavailableError("no blobs"))
    with pytest.raises(ServiceUnavailableError, match="no blobs"):
        rig.submit(0, weights).result(WAIT_TIMEOUT_S)
    assert isinstance(failure(rig), ServiceUnavailableError)


# --- leaving --------------------------------------------------------------------------------------------------------


def test_the_rest_of_a_wave_is_stored_when_the_worker_leaves(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 4)
    weights = rig.publish(1, 0)
    assert rig.engine.store_rest(0).result(WAIT_TIMEOUT_S).key == ""
    learn(rig, weights, 3)
    rig.engine.stop()
    assert answer(rig.submit(3, weights)).batches == ()
    rest = rig.engine.store_rest(0).result(WAIT_TIMEOUT_S)
    assert rest.version == 1
    assert np.abs(rig.pushed(rest)).max() > 0


def test_sigterm_at_a_stage_is_a_departure_of_the_worker(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 2)
    os.kill(rig.stages.pids[1], signal.SIGTERM)
    until(rig.departure, "the departure")
    assert rig.departure.cause == "sigterm"
    assert answer_all(rig, rig.publish(1, 0), [0, 1]).key, "it finishes what it owes"


def test_closing_ends_what_waits(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(2, 2)
    future = rig.submit(0, NewVersion(term=1, worker=0, version=1, key="", included=0), min_version=5)
    rig.engine.close()
    assert future.done()
    assert not rig.engine.ended.done()
    late = rig.submit(1, rig.publish(1, 0))
    assert isinstance(late.exception(WAIT_TIMEOUT_S), StageLostError)


# --- stages that end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_that_is_killed_ends_the_engine(make_rig: Callable[..., Rig], stage: int) -> None:
    rig = make_rig(3, 4)
    weights = rig.publish(1, 0)
    learn(rig, weights, 4)
    os.kill(rig.stages.pids[stage], signal.SIGKILL)
    error = failure(rig)
    assert isinstance(error, StageLostError)
    assert f"stage {stage + 1} (pid {rig.stages.pids[stage]}) was ended by SIGKILL" in str(error)
    with pytest.raises(StageLostError):
        rig.submit(4, weights).result(WAIT_TIMEOUT_S)
    with pytest.raises(StageLostError):
        rig.engine.store_rest(0).result(WAIT_TIMEOUT_S)


def test_a_stage_that_does_not_run_any_more_ends_the_engine(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(3, 2, "worker.pipeline.stage_timeout_s=2")
    future = rig.submit(0, rig.publish(1, 0))
    answer(future)
    os.kill(rig.stages.pids[1], signal.SIGSTOP)
    assert "stage 2" in str(failure(rig))
    assert "has been silent" in str(failure(rig))


def test_stages_end_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            rig = Rig(tmp_path, 3, 2)
            (tmp_path / "pids.tmp").write_text(" ".join(map(str, rig.stages.pids)))
            (tmp_path / "pids.tmp").rename(tmp_path / "pids")
            signal.pause()
        finally:
            os._exit(1)
    until((tmp_path / "pids").exists, "the stages")
    pids = [int(item) for item in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert all(psutil.pid_exists(item) for item in pids)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until(lambda: all(is_gone(item) for item in pids), "their end")


# --- stages that cannot be started ----------------------------------------------------------------------------------


def test_a_device_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"^stage 2: device cuda:99: expected cpu, or one of"):
        Rig(tmp_path, 3, 2, "worker.pipeline.devices=[cpu, 'cuda:99', cpu]")
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_stage_of_another_version_is_refused(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(1, 1)
    here, there = socket_pair()
    there.send(encode(Ready(stage=0, fingerprint="doll 0.0")))
    stages = StageProcesses((0,), (here,), rig.stages.chain, rig.stages.shared)
    with pytest.raises(ConfigError, match=r"stage 1 runs another version: expected 'doll 1', got 'doll 0.0'; install"):
        stages.wait_until_ready("doll 1")
    here.close()
    there.close()
