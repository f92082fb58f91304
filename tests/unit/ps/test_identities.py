"""Policies that must be the same for certain parameters: to the bit, with the real worker and server code.

That `vap` without a bound is `asp` that publishes is in test_value_bound.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from clock_world import RecordedWorld
from doll.consumers.compute.gradient import GradientComputer
from doll.model.flat_model import build
from doll.optim.optimizer import Optimizer
from doll.ps.policies.asp import AspPolicyConfig
from doll.ps.policies.base import PolicyView
from doll.ps.policies.ssp import Ssp, SspPolicyConfig
from doll.task.base import load_task
from engine_runs import play, random_steps
from fuzzing import seeds
from threadless_jobs import BATCHES, WORKERS, Job

pytestmark = pytest.mark.slow  # loads torch


@pytest.mark.parametrize("seed", seeds(5))
def test_isp_that_holds_nothing_back_is_bsp(seed: int) -> None:
    isp, bsp = Job("{name: isp, significance: 0}", seed), Job("{name: bsp, contribution: step}", seed)
    assert isp.engine.version == bsp.engine.version == BATCHES
    assert isp.weights.tobytes() == bsp.weights.tobytes()
    assert Job("{name: isp, significance: 5}", seed).weights.tobytes() != bsp.weights.tobytes()


@pytest.mark.parametrize("seed", seeds(5))
def test_doll_with_groups_of_one_batch_of_each_worker_is_bsp(seed: int) -> None:
    doll, bsp = Job(f"{{name: doll, group_size: {WORKERS}}}", seed), Job("{name: bsp}", seed)
    assert doll.engine.version == bsp.engine.version == BATCHES
    assert doll.weights.tobytes() == bsp.weights.tobytes()


def test_doll_with_groups_of_one_is_stochastic_gradient_descent_one_batch_after_the_other() -> None:
    job = Job("{name: doll, group_size: 1}", 0)
    assert job.engine.version == WORKERS * BATCHES
    task = load_task(job.config)
    model = build(job.config, task)
    computer, optimizer = GradientComputer(task, model), Optimizer(model, job.config.training.optimizer)
    assert len(set(job.order)) == WORKERS * BATCHES
    for number, batch in job.order:
        data = job.workers[number].batch(batch).data
        optimizer.apply([computer.compute(data.x, data.y).values], 1 / 8, 8)
    assert job.weights.tobytes() == optimizer.weights.tobytes()


@pytest.mark.parametrize(
    "policy",
    [
        "{name: ssp, staleness: 2}",
        "{name: essp, staleness: 2}",
        "{name: vap}",
        "{name: wsp, wave_batches: 2, clock_distance: 1}",
        "{name: asp, contribution: step}",
    ],
)
def test_every_batch_is_learned_and_the_same_order_makes_the_same_model(policy: str) -> None:
    job = Job(policy, 3)
    assert [worker.applied for worker in job.engine.workers()] == [BATCHES] * WORKERS
    other = Job(policy, 3)
    assert job.weights.tobytes() == other.weights.tobytes()
    first = build(job.config, load_task(job.config)).flat.detach().numpy()
    assert np.isfinite(job.weights).all()
    assert np.abs(job.weights - first).max() > 0.01


class PullingSsp(Ssp):
    """Fetches the newest weights for each batch."""

    def min_version(self, view: PolicyView, worker: int) -> int:
        return view.version


def test_ssp_without_a_bound_that_always_pulls_is_asp() -> None:
    count = 0
    for seed in seeds(15):
        ssp, asp = (
            RecordedWorld(SspPolicyConfig(staleness=10_000), lambda: PullingSsp(10_000)),
            RecordedWorld(AspPolicyConfig(contribution="step")),
        )
        for world in (ssp, asp):
            play(world, random_steps(seed, 1500))
        assert ssp.actions == asp.actions
        count += len(ssp.actions)
    assert count > 200
