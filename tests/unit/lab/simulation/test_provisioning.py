"""The production planner inside the simulated system."""

from __future__ import annotations

import numpy as np
import pytest
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.traces.availability import Markov
from doll.ps.policies.doll import DollPolicyConfig
from fuzzing import seeds

from doll_lab.simulation.provisioning import PlannerProvisioner
from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

N, K, B, RATE, UPDATES = 16, 4, 32, 50.0, 4000
ON_DEMAND_S = UPDATES * K * B / (N * RATE)


def run(seed: int, ratio: float, *, guard: bool = True) -> System:
    settings = SimulationSettings(
        rates_per_s=[RATE] * N, batch_size=B, policy=DollPolicyConfig(group_size=K), compute_s=0.005, updates=UPDATES,
        seed=seed,
    )  # fmt: skip
    planner = PlannerSettings(
        samples=UPDATES * K * B,
        group_size=K,
        batch_size=B,
        deadline_s=ratio * ON_DEMAND_S,
        replan_s=2.0,
        boot_s=1.0,
        guard=guard,
    )
    preemption = Markov(0.8, 100.0, np.random.default_rng((seed, 1)))
    system = System(
        settings, spot=[True] * N, preemption=preemption, provisioner=PlannerProvisioner(planner), boot_s=1.0
    )
    system.run()
    return system


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(3))
def test_the_planner_meets_the_deadline_for_less_than_on_demand(seed: int) -> None:
    system = run(seed, ratio=1.1)
    assert system.now <= 1.1 * ON_DEMAND_S
    assert system.moves > 0
    assert system.usd < 0.9 * ON_DEMAND_S * N * 0.286 / 3600


@pytest.mark.slow
def test_without_need_nothing_is_moved() -> None:
    system = run(0, ratio=2.0)
    assert system.now <= 2.0 * ON_DEMAND_S
    assert sum(system.spot) == N
