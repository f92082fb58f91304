"""The job on cloud functions: what is simulated is exact, and a filter or a worker that loses something is found."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from benchmarks.paper import mlless_fig7, mlless_table5
from benchmarks.paper.factorization import low_rank
from benchmarks.paper.function_cost import functions_usd
from benchmarks.paper.function_job import DenseRing, Factors, FunctionJob, Step, Store
from benchmarks.paper.mlless_fig7 import compare, factors, isp, play
from doll.config.policy import PolicyConfig
from doll.optim.significance_filter import Residual
from doll.provisioner.planning.tuner import LossHistory, ScaleInTuner, TunerSettings, TunerVerdict
from doll.ps.policies.bsp import BspPolicyConfig
from doll.ps.policies.isp import IspPolicyConfig
from doll.ps.policies.ssp import SspPolicyConfig

Vector = npt.NDArray[np.float32]
BSP = BspPolicyConfig(contribution="step")


class Dropping(Residual):
    """Forgets what is not significant."""

    def split(self, step: Vector, weights: Vector, batch: int, version: int) -> None:
        super().split(step, weights, batch, version)
        self._held[:] = 0.0
        self.is_held = False


class Kept(Residual):
    """Never flushes."""

    def below(self, until: int) -> Vector | None:
        return None


class Recorded(Factors):
    """Adds up all steps, and keeps the parameters of each."""

    def __init__(self) -> None:
        super().__init__(
            low_rank(30, 20, 3, 0.5, 0.1, np.random.default_rng(1)), rate=0.05, batch=10, workers=0, seed=1
        )
        self.total = np.zeros(self.data.num_parameters)
        self.seen: list[Vector] = []

    def step(self, parameters: Vector, worker: int, batch: int) -> Step:
        self.seen.append(parameters.copy())
        result = super().step(parameters, worker, batch)
        self.total += result.values
        return result


class RemovesAt(ScaleInTuner):
    """Removes a worker after each of these steps."""

    def __init__(self, workers: int, steps: tuple[int, ...]) -> None:
        super().__init__(TunerSettings(), workers)
        self._steps = steps

    def ask(self, history: LossHistory, now_s: float) -> TunerVerdict:
        return TunerVerdict(history.last_step in self._steps, "")


def job_of(problem: Factors, policy: PolicyConfig, workers: int = 4, **more: object) -> FunctionJob:
    return FunctionJob(problem, policy, workers, Store(1e5), lambda worker, batch: 0.1 + 0.01 * worker, **more)  # type: ignore[arg-type]


def held_by(job: FunctionJob) -> npt.NDArray[np.float64]:
    """What all workers hold back, and what is on its way to the server."""
    held = sum(worker.residual._held.astype(np.float64) for worker in job._workers if worker.residual.is_used)
    coming = sum(values.astype(np.float64) for values, *_ in job._blobs.values())
    return np.asarray(held + coming + np.zeros(len(job.weights)))


@pytest.mark.slow
def test_the_filter_reaches_the_target_and_one_that_drops_does_not() -> None:
    problem = factors(0)
    bsp, filtered = play(problem, BSP, mlless_fig7.TARGET), play(problem, isp(0.7), mlless_fig7.TARGET)
    right = compare([bsp], [filtered])
    assert right.fewer >= 2.5
    assert right.longer <= 1.3  # of one seed
    wrong = compare([bsp], [play(problem, isp(0.7), mlless_fig7.TARGET, residual=Dropping)])
    assert wrong.fewer < 2.5
    assert wrong.longer > 1.5


@pytest.mark.parametrize("policy", [BSP, IspPolicyConfig(significance=0.7), SspPolicyConfig(staleness=2, under_way=1)])
def test_every_step_is_in_the_model_at_a_worker_or_on_its_way(policy: PolicyConfig) -> None:
    problem = Recorded()
    job = job_of(problem, policy)
    job.run(target=0.0, most_steps=40)
    assert job.weights + held_by(job) == pytest.approx(problem.start() + problem.total, abs=1e-4)


def test_adding_the_updates_of_the_others_takes_its_time_of_each_byte() -> None:
    alone, together = (job_of(Recorded(), BSP, add_s_per_byte=1e-3 * adds).run(target=0.0, most_steps=10)
                       for adds in (False, True))  # fmt: skip
    assert together.bytes_read == alone.bytes_read
    # All four read as much in a round, for the first time behind it; what they read behind the tenth is not added yet.
    of_a_worker = together.bytes_read / 4 * 9 / 10
    assert together.last.time_s - alone.last.time_s == pytest.approx(1e-3 * of_a_worker, rel=0.03)


def test_a_worker_that_leaves_takes_nothing_with_it() -> None:
    problem = Recorded()
    job = job_of(problem, IspPolicyConfig(significance=2.0), tuner=RemovesAt(4, (10, 20)))
    outcome = job.run(target=0.0, most_steps=40)
    assert outcome.last.workers == 2
    assert job.engine.num_live == 2
    gone = [worker for worker in job._workers if worker.is_leaving]
    assert len(gone) == 2
    assert not any(worker.residual.is_held for worker in gone)
    assert job.weights + held_by(job) == pytest.approx(problem.start() + problem.total, abs=1e-4)


def test_a_worker_that_leaves_with_a_part_of_its_steps_is_found() -> None:
    job = job_of(Recorded(), IspPolicyConfig(significance=2.0), tuner=RemovesAt(4, (10,)), residual=Kept)
    with pytest.raises(RuntimeError, match="lost with a part of its steps"):
        job.run(target=0.0, most_steps=40)


def test_a_worker_alone_sees_all_its_steps_at_once() -> None:
    """Under every policy one worker is serial descent, whatever its cached version is."""
    serial, parameters = Recorded(), Recorded().start()
    for batch in range(30):
        parameters += serial.step(parameters, 0, batch).values
    for policy in (BSP, SspPolicyConfig(staleness=5, under_way=1), IspPolicyConfig(significance=0.7)):
        problem = Recorded()
        job_of(problem, policy, workers=1).run(target=0.0, most_steps=30)
        for one, other in zip(serial.seen, problem.seen, strict=False):
            assert one == pytest.approx(other, abs=1e-5)


def test_staleness_bounds_what_a_worker_does_not_see() -> None:
    """With ssp(1) and a slow worker, the fast ones wait: all clocks stay within two."""
    problem = Recorded()
    job = FunctionJob(
        problem, SspPolicyConfig(staleness=1, under_way=1), 3, Store(1e9), lambda worker, batch: 1.0 if worker else 9.0
    )
    job.run(target=0.0, most_steps=20)
    applied = [job.engine.worker(number).applied for number in range(3)]
    assert max(applied) - min(applied) <= 2
    assert job.now >= 9.0 * (min(applied))


def test_functions_are_paid_until_they_leave() -> None:
    job = job_of(Recorded(), BSP)
    last = job.run(target=0.0, most_steps=20).last
    assert last.usd == pytest.approx(functions_usd(4 * last.time_s, last.time_s, last.time_s))
    fewer = job_of(Recorded(), BSP, tuner=RemovesAt(4, (5,))).run(target=0.0, most_steps=20).last
    assert functions_usd(3 * fewer.time_s, fewer.time_s, fewer.time_s) < fewer.usd
    assert fewer.usd < functions_usd(4 * fewer.time_s, fewer.time_s, fewer.time_s)


def test_a_store_serves_in_turn_and_a_link_is_a_limit() -> None:
    store = Store(100.0, shards=2, shard_bytes_per_s=50.0)
    assert store.get(0, {1: 100}, 0.0) == 2.0  # the shard
    assert store.get(2, {3: 100}, 0.0) == 4.0  # after it, at the same shard
    assert store.get(0, {2: 25}, 0.0) == 0.5  # the other one
    assert Store(10.0, shards=2, shard_bytes_per_s=50.0).get(0, {1: 100, 2: 100}, 1.0) == 21.0  # the link
    assert Store(float("inf"), latency_s=0.5).get(0, {1: 1, 2: 1}, 1.0) == 2.0
    ring = DenseRing(1000.0, num_parameters=1000, workers=4)
    assert ring.get(0, {1: 10}, ring.put(0, 1, 1.0)) == 7.0


def test_the_times_of_table_5_follow_from_its_constants() -> None:
    times = mlless_table5.step_time()
    for workers, seconds in zip(mlless_table5.PAPER_WORKERS, mlless_table5.PAPER_S, strict=True):
        assert times.a + times.c / workers + times.d * workers == pytest.approx(seconds)
    assert min(times) > 0
