"""A plan request from a job file: where its numbers come from, and what is missing."""

from __future__ import annotations

import numpy as np
import pytest
from doll.config import JobConfig, PlanConfig, parse
from doll.errors import ConfigError
from doll.provisioner.observation import Observed
from doll.provisioner.planning.assessment import assess
from doll.provisioner.planning.plan_request import apply_speed_up, changed_plan, plan_request, updates_to_target
from doll.provisioner.settings import controller_settings

JOB = """
job: t
task: {class: 'a:B'}
data: {workers: 2, batch_size: 32}
arrivals: {rate_per_s: 50}
training: {policy: {group_size: 4}}
plan: {spot_usd_per_h: 0.1, on_demand_usd_per_h: 0.3, cycle_s: 1000}
"""


def job(*overrides: str) -> JobConfig:
    return parse(JOB, overrides)


def test_options_come_before_the_job_file() -> None:
    config = job("stop.updates=500")
    request, notes = plan_request(config, config.plan, [50.0, 50.0])
    assert (request.group_size, request.batch_size, request.updates) == (4, 32, 500)
    assert any("stop.updates, a cap" in note for note in notes)
    request, notes = plan_request(config, changed_plan(config.plan, updates=70), [50.0, 50.0], 3, 16)
    assert (request.group_size, request.batch_size, request.updates, notes) == (3, 16, 70, [])


def test_what_is_missing_is_named_with_option_and_key() -> None:
    with pytest.raises(ConfigError, match=r"--batch-size \(data\.batch_size\), --spot-price \(plan\.spot_usd_per_h\)"):
        plan_request(None, PlanConfig(updates=10, on_demand_usd_per_h=0.3), [1.0], 4)
    with pytest.raises(ConfigError, match="Measure it with a pilot run"):
        updates_to_target(job(), PlanConfig(target_error=0.05), [])


def test_an_error_target_and_a_number_of_updates_replace_each_other() -> None:
    updates = changed_plan(PlanConfig(target_error=0.1), updates=10)
    assert (updates.updates, updates.target_error) == (10, None)
    target = changed_plan(PlanConfig(updates=10), target_error=0.1)
    assert (target.updates, target.target_error) == (None, 0.1)
    with pytest.raises(ConfigError, match=r"plan\.alpha: .*got 1\.5"):
        changed_plan(PlanConfig(), alpha=1.5)
    with pytest.raises(ConfigError, match="expected updates or target_error"):
        changed_plan(PlanConfig(), updates=10, target_error=0.1)


def test_a_faster_market_has_higher_prices_and_shorter_cycles() -> None:
    notes: list[str] = []
    config = job("fleet.speed_up=20")
    section = apply_speed_up(config, config.plan, notes)
    assert section.spot_usd_per_h == pytest.approx(2.0)
    assert (section.on_demand_usd_per_h, section.cycle_s) == (pytest.approx(6.0), 50.0)
    assert len(notes) == 1
    assert apply_speed_up(job(), config.plan, notes) is config.plan
    assert len(notes) == 1


def test_a_policy_that_the_plan_does_not_fit_is_named() -> None:
    lockstep = job("training.policy={name: bsp}")
    _, notes = plan_request(lockstep, changed_plan(lockstep.plan, updates=70), [50.0, 20.0])
    assert notes == ["policy bsp: planned as groups of K = 2 batches of any workers"]
    _, notes = plan_request(lockstep, changed_plan(lockstep.plan, updates=70), [50.0, 50.0])
    assert notes == [], "equal streams: the slowest is as fast as the mean"


def test_records_that_give_several_samples_are_planned_as_these() -> None:
    """A batch has three times the samples and they come three times as fast: times stay, and a number of samples needs
    a third of the updates."""
    common = ("stop.samples=19200", "plan.deadline_s=2000")
    one, three = (job(*common, *more) for more in ((), ("plan.mean_samples=3",)))
    request, notes = plan_request(one, one.plan, [50.0, 50.0])
    assert (request.updates, request.planner.samples) == (150, 19200)
    (note,) = notes
    assert note == "J = 150, of 128 samples each, is the job's stop.samples"
    several, notes = plan_request(three, three.plan, [50.0, 50.0])
    assert (several.updates, several.planner.samples, several.batch_size) == (50, 19200, 96)
    assert notes == ["J = 50, of 384 samples each, is the job's stop.samples"]
    assert several.rates_per_s.tolist() == [150, 150]
    third = assess(plan_request(one, changed_plan(one.plan, updates=50), [50.0, 50.0])[0])
    planned = assess(several)
    assert planned.on_demand_s == pytest.approx(third.on_demand_s)
    assert planned.all_on_demand_usd == pytest.approx(third.all_on_demand_usd)
    assert planned.to_dict()["update_rate_per_s"] == pytest.approx(third.to_dict()["update_rate_per_s"])
    assert any("K b = 384 samples" in line for line in planned.advice)


def test_the_batch_that_is_advised_counts_records_as_the_job_file_does() -> None:
    config = job("stop.updates=50", "plan.mean_samples=2.5", "plan.service_s=1.0")
    request, _ = plan_request(config, config.plan, [50.0, 50.0])
    assert request.stability is not None
    advice = assess(request).advice
    # 100 records/s and a second for each batch: more than 100 records in a batch.
    assert any(line.startswith("raise b to at least 101 ") for line in advice), advice


def test_a_provisioner_counts_the_samples_that_records_give() -> None:
    config = job("stop.updates=50", "plan.mean_samples=2.5", "data.samples_per_record=4")
    settings, _ = controller_settings(config)
    assert settings.planner.batch_size == 80
    assert settings.planner.samples == 50 * 4 * 80
    assert settings.rates_per_s.tolist() == [125, 125]
    model = Observed(settings.rates_per_s, samples_per_record=settings.samples_per_record)
    for at_s in range(2000):
        model.observe_ends(1000.0 + at_s, [10 * at_s, 5 * at_s])  # records of 4 that give 2.5 each
    np.testing.assert_allclose(model.rates_per_s(), [100, 50], rtol=0.05)
