"""Real gradients in virtual time: the same arithmetic as by hand, and the same batches however often they are lost."""

from __future__ import annotations

import numpy as np
import pytest
import record_builders
import torch
from benchmarks.paper.learning import Learner
from doll.config import SgdConfig
from doll.consumers.compute.gradient import GradientComputer
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import Optimizer
from doll.provisioner.traces.availability import Markov
from doll.ps.policies.doll import DollPolicyConfig
from examples.digits.task import Digits

from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

pytestmark = pytest.mark.slow  # loads torch

TASK = Digits(hidden=(8,), holdout_samples=50)


def batches(worker: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((worker, batch))
    return rng.integers(0, 255, (4, 8, 8), dtype=np.uint8), rng.integers(0, 10, 4)


def learner() -> Learner:
    return Learner(TASK, SgdConfig(lr=0.05), batches, seed=3, evaluate_every=2, holdout_samples=50)


def test_one_worker_learns_as_by_hand() -> None:
    settings = SimulationSettings(
        rates_per_s=[10.0], batch_size=4, policy=DollPolicyConfig(group_size=2), updates=3, arrival_scv=0.0
    )
    made = learner()
    System(settings, learner=made).run()
    torch.manual_seed(3)
    model = FlatModel(TASK.build_model())
    optimizer, computer = Optimizer(model, SgdConfig(lr=0.05)), GradientComputer(TASK, model)
    for update in range(3):
        sums = [computer.compute(*batches(0, 2 * update + k)).values.copy() for k in range(2)]
        optimizer.apply(sums, 1 / 8, 8)
    assert made.version == 3
    assert np.array_equal(made.weights, optimizer.weights)
    assert [version for version, _ in made.errors] == [0, 2]
    assert all(0 <= (error.accuracy or 0) <= 1 for _, error in made.errors)


def test_lost_batches_are_computed_again_and_none_is_kept() -> None:
    settings = SimulationSettings(
        rates_per_s=[40.0] * 4, batch_size=4, policy=DollPolicyConfig(group_size=3), updates=60, compute_s=0.05
    )
    made = learner()
    system = System(settings, spot=[True] * 4, preemption=Markov(0.6, 1.0, np.random.default_rng(2)), learner=made)
    system.run()
    assert system.preemptions > 5
    assert system.engine.counters["requeued"] > 0
    assert made.version == system.version == 60
    # What is left are grants that are still out when the run ends.
    assert made.num_waiting <= 3


def test_a_grant_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a grant of version 0, got one of 7"):
        learner().grant(
            record_builders.grant_of(
                term=1, worker=0, session=1, first=0, grant_ids=(1,), version=7, min_version=7, key=""
            )
        )
