"""Summaries of simulations."""

from __future__ import annotations

import numpy as np
import pytest
from doll.config import parse
from doll.provisioner.traces.availability import Markov
from doll.ps.policies.bsp import BspPolicyConfig
from doll.ps.policies.doll import DollPolicyConfig

from doll_lab.simulation.comparison import seconds_of, simulate_policy
from doll_lab.simulation.job import simulation_settings
from doll_lab.simulation.report import formula_rate, summarise
from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System


def test_formulas_know_rates_availability_and_policy() -> None:
    settings = SimulationSettings(
        rates_per_s=[10.0, 20.0], batch_size=5, updates=1, policy=DollPolicyConfig(group_size=3)
    )
    assert formula_rate(settings, [False, False], 0.5) == pytest.approx(30 / 15)
    assert formula_rate(settings, [True, False], 0.5) == pytest.approx(25 / 15)
    lockstep = SimulationSettings(rates_per_s=[10.0, 20.0], batch_size=5, updates=1, policy=BspPolicyConfig(name="bsp"))
    assert formula_rate(lockstep, [False, False], 1.0) == pytest.approx(2.0)


def test_costs_are_compared_with_the_same_updates_on_demand() -> None:
    settings = SimulationSettings(
        rates_per_s=[50.0] * 8, batch_size=32, policy=DollPolicyConfig(group_size=4), updates=500
    )
    system = System(settings)
    system.run()
    assert summarise(system, 1.0).cost_ratio == pytest.approx(1.0, abs=0.01)
    spot = System(settings, spot=[True] * 8, preemption=Markov(1.0, 100.0, np.random.default_rng(0)))
    spot.run()
    assert summarise(spot, 1.0).cost_ratio == pytest.approx(0.158 / 0.286, abs=0.01)


def test_a_stop_rule_in_samples_counts_what_records_give() -> None:
    job = """
job: t
task: {class: 'a:B'}
data: {workers: 2, batch_size: 32}
training: {policy: {group_size: 4}}
stop: {samples: 19200}
"""
    rates = [50.0, 50.0]
    for mean, updates, seconds in ((1, 150, 192.0), (3, 50, 64.0)):
        config = parse(job, [f"plan.mean_samples={mean}"])
        settings = simulation_settings(config, rates, batch_size=None, group_size=None, updates=None, seconds=None)
        assert settings.updates == updates
        assert seconds_of(config, rates) == seconds
        run = simulate_policy("doll", config, rates, seconds=seconds, service_s=0.01)
        assert run.samples == pytest.approx(19200, rel=0.15)
        assert run.updates == pytest.approx(updates, rel=0.15)
