"""The gradient engine of stages, with real stage processes: what it answers, what it stores, and how it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from doll.config import parse
from doll.consumers.compressor import SparseCompressor
from doll.consumers.dead_letters import UsableSamples
from doll.consumers.decoding import Decoded
from doll.consumers.departure import Departure
from doll.consumers.gradient import GradientComputer
from doll.consumers.guard import Guard
from doll.consumers.pipeline_engine import PipelineGradientEngine
from doll.consumers.stage_processes import StageLostError, StageProcesses, start_stages
from doll.consumers.step_model import StepModel
from doll.consumers.task_log import TaskLog, read_tasks
from doll.consumers.worker import Batch, GradientDone
from doll.errors import ConfigError, ServiceUnavailableError, TaskError
from doll.model import build
from doll.pipeline.cut import cut
from doll.pipeline.link import socket_pair
from doll.pipeline.messages import Ready, encode
from doll.records import Grant, NewVersion
from doll.storage.blobs import encode_blob
from doll.storage.contributions import decode_contribution
from doll.task import load_task
from doll.testing import MemoryBlobs
from process_checks import is_gone
from stage_models import samples
from waiting import WAIT_TIMEOUT_S, until

Array = npt.NDArray[Any]
BATCH = 8


def job(stages: int, in_flight: int, *overrides: str) -> Any:
    return parse(
        "job: unit\ntask: {class: 'stage_models:Net'}\n"
        f"data: {{workers: 1, batch_size: {BATCH}}}\n"
        f"training: {{policy: {{name: wsp, wave_batches: {in_flight}, clock_distance: 4}}, "
        "optimizer: {name: sgd, lr: 0.05}}\n"
        f"worker: {{pipeline: {{stages: {stages}}}}}\n",
        overrides,
    )


class Refusals:
    """`DeadLetters.refuse_samples`."""

    def __init__(self) -> None:
        self.bad: dict[int, dict[int, str]] = {}

    def refuse_samples(self, batch: Batch, bad: dict[int, str]) -> UsableSamples:
        self.bad[batch.number] = bad
        return UsableSamples(batch.num_samples - len(bad), tuple(bad), 0)


class Rig:
    """An engine, and the versions that a server would publish; `view` is what an undivided worker would hold."""

    def __init__(self, folder: Path, stages: int = 3, in_flight: int = 4, *overrides: str) -> None:
        torch.set_num_threads(1)
        self.config = job(stages, in_flight, *overrides)
        self.task = load_task(self.config)
        self.model = build(self.config, self.task)
        self.first_weights = self.model.flat.detach().numpy().copy()
        self.stages = start_stages(
            self.config, self.task, self.model, cut(self.config, self.task, self.model.module, 0), 0,
            in_flight=in_flight,
        )  # fmt: skip
        self.blobs, self.refusals = MemoryBlobs(), Refusals()
        self.departure = Departure(end_within=lambda seconds, code: None)
        computer = GradientComputer(self.task, self.model)
        self.log = folder / "tasks.jsonl"
        self.engine = PipelineGradientEngine(
            self.config, self.stages, guard=Guard(self.config, self.task, computer), computer=computer,
            compressor=SparseCompressor("unit", self.model.num_parameters, {}), blobs=self.blobs,
            dead_letters=self.refusals, departure=self.departure, task_log=TaskLog(self.log),
        )  # fmt: skip
        self.term = 1
        self.wanted: Callable[[int, int], bool] = lambda batch, grant_id: True

    def publish(self, version: int, included: int, values: Array | None = None) -> NewVersion:
        key = f"doll:unit:w:{self.term}:{version}"
        weights = self.first_weights if values is None else values
        self.blobs.put(key, encode_blob(weights, job="unit", kind="w", version=version), 600.0)
        return NewVersion(term=self.term, worker=0, version=version, key=key, included=included)

    def submit(
        self, number: int, weights: NewVersion, x: Array | None = None, y: Array | None = None, *, grant: int = -1,
        min_version: int = 0, n: int = BATCH,
    ) -> Future[GradientDone | None]:  # fmt: skip
        if x is None or y is None:
            x, y = samples(self.task, number, n)
        order = Grant(
            term=self.term, worker=0, session=1, first=number, grant_ids=(number if grant < 0 else grant,),
            version=weights.version, min_version=min_version, key=weights.key, included=weights.included,
        )  # fmt: skip
        batch = Batch(number, Decoded(x, y, np.arange(len(x))), len(x), 0.0)
        return self.engine.submit(order, [batch], lambda batch, grant_id: self.wanted(batch, grant_id))

    def pushed(self, done: GradientDone) -> Array:
        """The sum of steps that was stored."""
        blob = self.blobs.get(done.key)
        assert blob is not None
        contribution = decode_contribution(
            blob, numel=self.model.flat.numel(), num_parameters=self.model.num_parameters, job="unit",
            version=done.version, tables={},
        )  # fmt: skip
        values: Array = contribution.values
        return values

    def undivided(self) -> StepModel:
        """A worker without stages."""
        model = build(self.config, self.task)
        computer = GradientComputer(self.task, model)
        return StepModel("unit", self.blobs, self.config.training, model, computer)


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


def answer(future: Future[GradientDone | None]) -> GradientDone:
    done = future.result(WAIT_TIMEOUT_S)
    assert done is not None
    return done


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
    """Each is computed on all own steps before it, and the wave's sum is to the number that of the undivided worker."""
    rig = make_rig(stages, 2, "training.optimizer={name: adam, lr: 0.01}", "training.clip_norm=0.5")
    steps = rig.undivided()
    computer = steps._computer
    weights = rig.publish(1, 0)
    for wave in range(3):
        for number in (2 * wave, 2 * wave + 1):
            done = answer(rig.submit(number, weights, min_version=weights.version))
            order = Grant(
                term=1, worker=0, session=1, first=number, grant_ids=(number,), version=weights.version,
                min_version=0, key=weights.key, included=weights.included,
            )  # fmt: skip
            assert steps.load(order) == done.batches[0].version
            gradient = computer.compute(*samples(rig.task, number, BATCH))
            assert done.batches[0].loss_sum == pytest.approx(gradient.loss_sum, rel=1e-5)
            steps.add(gradient, batch=number, num_samples=BATCH)
        expected = steps.values()
        assert expected is not None
        np.testing.assert_allclose(rig.pushed(done), expected, rtol=1e-5, atol=1e-6)
        weights = rig.publish(2 + wave, 2 * wave + 2, rig.first_weights * (1 + wave / 10))
        rig.engine.offer(weights)
        steps.offer(weights)


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
