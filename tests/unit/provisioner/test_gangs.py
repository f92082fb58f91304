"""Workers with several machines: k times the cost of one machine of the same availability, machine by machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doll.config import JobConfig, PlanConfig, load, parse
from doll.errors import ConfigError
from doll.provisioner.billing import LOCAL
from doll.provisioner.controller import Controller
from doll.provisioner.decision import Decision
from doll.provisioner.machines import check_machines, open_machines
from doll.provisioner.planning.assessment import assess, report_text
from doll.provisioner.planning.plan_request import plan_request
from doll.provisioner.settings import controller_settings
from doll.provisioner.status import status_text
from doll.theory.cost import SECONDS_PER_HOUR
from doll.theory.preemption import gang_availability
from fake_fleet import FakeFleet, VirtualClock
from fuzzing import examples
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from job_world import ON_DEMAND, SPOT, FlatPrices, JobWorld, run, settings
from memory_state_store import MemoryStateStore
from paths import EXAMPLES

from doll_lab.simulation import job as jobs
from doll_lab.simulation.report import summarise
from doll_lab.spot.preparation import SpotRun

T0 = 1_700_000_000.0
JOB = """
job: t
task: {class: 'a:B'}
data: {workers: 4, batch_size: 32}
arrivals: {rate_per_s: 50}
training: {policy: {group_size: 4}}
stop: {updates: 1000}
plan: {spot_usd_per_h: 0.1, on_demand_usd_per_h: 0.3, alpha: 0.9, cycle_s: 1000, deadline_s: 760}
"""


def job(*overrides: str) -> JobConfig:
    return parse(JOB, overrides)


# --- how many machines, and what they are worth


def test_a_pipeline_has_a_machine_for_each_stage_unless_the_plan_says_otherwise() -> None:
    assert job().machines_per_worker == 1
    pipeline = ["training.policy={name: wsp, wave_batches: 2}", "worker.pipeline={stages: 3}"]
    assert job(*pipeline).machines_per_worker == 3
    assert job(*pipeline, "plan.machines_per_worker=1").machines_per_worker == 1
    assert job(*pipeline, "worker.pipeline.remote=true").machines_per_worker == 4, "and one for the worker"
    with pytest.raises(ConfigError, match="machines_per_worker"):
        job("plan.machines_per_worker=0")


def test_prices_and_availability_of_machines_become_those_of_workers() -> None:
    config = job("plan.machines_per_worker=3")
    request, notes = plan_request(config, config.plan, config.rates_per_s())
    assert (request.prices.spot_usd_per_h, request.prices.on_demand_usd_per_h) == pytest.approx((0.3, 0.9))
    assert (request.alpha, request.planner.cycle_s) == gang_availability(3, 0.9, 1000.0)
    assert any("0.9^3 = 0.729" in note for note in notes)
    stated = job("plan.machines_per_worker=3", "plan.availability_of=worker")
    request, notes = plan_request(stated, stated.plan, stated.rates_per_s())
    assert (request.alpha, request.planner.cycle_s) == (0.9, 1000.0)
    assert request.prices.spot_usd_per_h == pytest.approx(0.3)
    for config_of, alpha in ((config, 0.729), (stated, 0.9)):
        made, _ = controller_settings(config_of)
        assert made.prior_alpha == pytest.approx(alpha)
        assert made.machines_per_worker == 3
        assert made.planner.cycle_s == (1000.0 if alpha == 0.9 else gang_availability(3, 0.9, 1000.0).cycle_s)


def test_a_plan_says_workers_and_machines() -> None:
    config = job("plan.machines_per_worker=3")
    request, notes = plan_request(config, config.plan, config.rates_per_s())
    assessment = assess(request)
    text = report_text(assessment, notes)
    assert "4 workers x 3 machines = 12 machines" in text
    assert "0.3 spot, 0.9 on-demand USD/h per worker; 0.1 and 0.3 per machine" in text
    assert assessment.to_dict()["machines_per_worker"] == 3
    one = job()
    assert "machines" not in report_text(assess(plan_request(one, one.plan, one.rates_per_s())[0]), [])


EC2 = (
    "{kind: ec2, launch_template: lt-0123456789abcdef0, launch_template_version: 1, subnets: [subnet-01234567], "
    "instance_types: [c5.large]}"
)


@pytest.mark.parametrize("kind", ["{kind: compose}", EC2])
def test_fleets_that_launch_machines_one_by_one_refuse_gangs(kind: str, tmp_path: Path) -> None:
    config = job("plan.machines_per_worker=3", f"fleet={kind}")
    with pytest.raises(ConfigError, match=r"plan.machines_per_worker: expected 1 .*got 3.*processes"):
        open_machines(config, tmp_path)


REMOTE = ("training.policy={name: wsp, wave_batches: 2}", "worker.pipeline={stages: 2, remote: true}")


ON_EC2 = "launch_template: lt-1, launch_template_version: 1, subnets: [subnet-0123456789], instance_types: [c7g.large]"


@pytest.mark.parametrize(
    "fleet", ["{kind: compose}", "{kind: ray}", "{kind: lambda, function: w}", f"{{kind: ec2, {ON_EC2}}}"]
)
def test_only_kubernetes_launches_a_worker_with_its_stages(fleet: str) -> None:
    config = job(*REMOTE, f"fleet={fleet}")
    with pytest.raises(ConfigError, match=rf"fleet.kind: {config.fleet.kind} with worker.pipeline.remote: "):
        check_machines(config)
    check_machines(job(*REMOTE, f"fleet={fleet}", "plan.machines_per_worker=1"))  # stages are started by a person


def test_a_gang_is_the_worker_and_all_stages() -> None:
    fleet = "fleet={kind: kubernetes, pod_template: p.yaml, stage_template: s.yaml}"
    check_machines(job(*REMOTE, fleet))
    with pytest.raises(ConfigError, match=r"expected 3 with worker.pipeline.remote .*got 2"):
        check_machines(job(*REMOTE, fleet, "plan.machines_per_worker=2"))


# --- k machines cost k times as much as one


@given(
    machines=st.integers(2, 8),
    alpha=st.floats(0.3, 1.0),
    tightness=st.floats(1.02, 3.0),
    spot_share=st.floats(0.1, 1.2),
)
@hypothesis_settings(max_examples=examples(25), deadline=None)
def test_a_plan_for_gangs_costs_k_times_that_for_single_machines(
    machines: int, alpha: float, tightness: float, spot_share: float
) -> None:
    section = PlanConfig(
        updates=500, deadline_s=tightness * 500 * 4 * 32 / 400.0, spot_usd_per_h=0.3 * spot_share,
        on_demand_usd_per_h=0.3, alpha=alpha, cycle_s=500.0, availability_of="worker",
    )  # fmt: skip
    rates = [50.0, 100.0, 100.0, 150.0]
    one = assess(plan_request(None, section, rates, 4, 32)[0])
    many = assess(plan_request(None, section.model_copy(update={"machines_per_worker": machines}), rates, 4, 32)[0])
    assert np.array_equal(many.mix, one.mix)
    assert many.all_on_demand_usd == pytest.approx(machines * one.all_on_demand_usd)
    assert many.static.expected_cost_usd == pytest.approx(machines * one.static.expected_cost_usd)
    assert many.static.expected_finish_s == pytest.approx(one.static.expected_finish_s)
    assert (many.adaptive is None) == (one.adaptive is None)
    if many.adaptive is not None and one.adaptive is not None:
        assert many.adaptive.expected_cost_usd == pytest.approx(machines * one.adaptive.expected_cost_usd)
        assert many.adaptive.cost_sd_usd == pytest.approx(machines * one.adaptive.cost_sd_usd)


def simulated(machines: int, *, deadline_s: float | None) -> Any:
    sized = jobs.simulation_settings(
        None, [125.0] * 8, batch_size=256, group_size=4, updates=300, seconds=None, machines_per_worker=machines, seed=3
    )
    preemption, alpha = jobs.preemptions(sized, 0.8, 120.0, None, None, one_by_one=False)
    if deadline_s is None:
        system = jobs.fixed_mix(sized, 5, preemption, boot_s=5.0)
    else:
        system = jobs.planned(sized, preemption, deadline_s=deadline_s, replan_s=10.0, boot_s=5.0)
    system.run()
    return summarise(system, alpha)


@pytest.mark.parametrize("deadline_s", [None, 360.0])
def test_a_simulated_gang_job_costs_k_times_that_of_single_machines(deadline_s: float | None) -> None:
    one, three = simulated(1, deadline_s=deadline_s), simulated(3, deadline_s=deadline_s)
    assert three.usd == pytest.approx(3 * one.usd)
    assert three.all_on_demand_usd == pytest.approx(3 * one.all_on_demand_usd)
    assert (three.seconds, three.moves, three.preemptions) == (one.seconds, one.moves, one.preemptions)
    assert one.preemptions > 0
    assert "8 workers x 3 machines" in three.text()
    assert "8 workers," in one.text()


def test_simulated_gangs_of_independent_machines_are_up_as_the_formula_says() -> None:
    sized = jobs.simulation_settings(
        None, [10.0] * 8, batch_size=256, group_size=4, updates=None, seconds=30_000.0, machines_per_worker=3, seed=1
    )
    preemption, alpha = jobs.preemptions(sized, 0.9, 300.0, None, None)
    assert alpha == pytest.approx(0.729)
    system = jobs.fixed_mix(sized, 8, preemption, boot_s=0.0)
    system.run()
    assert system.up_worker_s / system.now / 8 == pytest.approx(alpha, abs=0.02)
    cycle_s = gang_availability(3, 0.9, 300.0).cycle_s
    assert 8 * system.now / system.preemptions == pytest.approx(cycle_s, rel=0.07)
    # All machines of a worker are paid while it is up, and none while it is not.
    paid_h = system.usd / sized.spot_usd_per_hour
    assert paid_h == pytest.approx(3 * system.up_worker_s / SECONDS_PER_HOUR)


def test_a_predicted_gang_costs_k_times_as_much() -> None:
    def predictions(*overrides: str) -> SpotRun:
        return SpotRun.of(load(EXAMPLES / "digits" / "market.yaml", ["plan.availability_of=worker", *overrides]), 1)

    one, three = predictions(), predictions("plan.machines_per_worker=3")
    assert three.market_facts()["machines_per_worker"] == 3
    for name, prediction in three.predictions.items():
        assert prediction.cost_usd == pytest.approx(3 * one.predictions[name].cost_usd)
        assert prediction.finish_s == one.predictions[name].finish_s
        assert prediction.preemptions == one.predictions[name].preemptions
    assert "6 workers x 3 machines = 18 machines" in three.text()
    scarcer = SpotRun.of(
        load(EXAMPLES / "digits" / "market.yaml", ["plan.machines_per_worker=3", "plan.deadline_s=400"]), 1
    )
    assert scarcer.market.alpha == pytest.approx(0.8**3)


def controlled(machines: int, budget_usd: float | None = None) -> tuple[list[Decision], FakeFleet]:
    asked = settings(deadline_s=300.0, budget_usd=budget_usd, machines_per_worker=machines)
    clock = VirtualClock()
    fleet = FakeFleet(clock, boot_s=20.0, ending_s=5.0)
    world = JobWorld(clock, fleet, asked)
    controller = Controller(asked, fleet, FlatPrices(), LOCAL, MemoryStateStore())

    def market() -> None:
        for instance in fleet.alive():
            if instance.market == "spot" and instance.slot % 2 and instance.notice_s is None and clock.now_s % 90 < 10:
                fleet.interrupt(instance.id, 20.0)

    decisions = run(world, controller, clock.advance, clock, until_s=2000.0, each=market)
    return decisions, fleet


@pytest.mark.parametrize("budget_usd", [None, 0.07])
def test_the_controller_decides_for_gangs_as_for_machines_and_pays_k_times(budget_usd: float | None) -> None:
    one, fleet_of_one = controlled(1, budget_usd)
    three, fleet = controlled(3, None if budget_usd is None else 3 * budget_usd)
    assert len(fleet.all_instances()) == len(fleet_of_one.all_instances()) > 4
    assert [decision.markets for decision in three] == [decision.markets for decision in one]
    for mine, theirs in zip(three, one, strict=True):
        assert mine.bill.usd == pytest.approx(3 * theirs.bill.usd)
        assert mine.expected_cost_usd == pytest.approx(3 * theirs.expected_cost_usd, nan_ok=True)
        assert mine.all_on_demand_usd == pytest.approx(3 * theirs.all_on_demand_usd)


def test_the_cost_is_that_of_every_machine_hour() -> None:
    """Audit: machine-hours from the fleet's own records, times the price of a machine."""
    decisions, fleet = controlled(3)
    last = decisions[-1]
    assert last.finished
    hours = {"spot": 0.0, "on_demand": 0.0}
    for instance in fleet.all_instances():
        assert instance.machines == 3
        assert instance.ended_s is not None
        hours[instance.market] += 3 * (instance.ended_s - instance.launched_s) / SECONDS_PER_HOUR
    assert min(hours.values()) > 0
    assert last.bill.hours_by_market == pytest.approx(hours)
    assert last.bill.usd == pytest.approx(hours["spot"] * SPOT + hours["on_demand"] * ON_DEMAND)
    text = status_text(
        {**decisions[5].to_dict(), "journal": "j", "instances": []}, decisions[5].now_s
    )  # fmt: skip
    assert f"{3 * SPOT:.4f} spot, {3 * ON_DEMAND:.4f} on-demand USD/h per worker of 3 machines" in text
    assert decisions[5].measurements()["machines_spot"] == 3 * decisions[5].measurements()["instances_spot"] > 0


def test_the_machines_per_worker_stay_within_a_job() -> None:
    asked = settings(machines_per_worker=3)
    with pytest.raises(ValueError, match="expected 3 machines per worker as before, got 1"):
        asked.check_change(replace(asked, machines_per_worker=1))
