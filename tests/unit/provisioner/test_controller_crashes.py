"""A controller that is killed between any two side effects, in a market at its worst: nothing is lost or doubled."""

from __future__ import annotations

import itertools

import pytest
from crash_scenario import DEADLINE_S, STEP_S, CrashScenario
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.planning.tuner import TunerSettings
from doll.provisioner.reconcile import Launch
from doll.provisioner.scale_in import ScaleInSettings
from doll.theory.scale_in import ReferenceCurve
from fuzzing import examples, seeds
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from job_world import settings


@pytest.mark.slow  # random runs
@given(st.integers(0, 2**32))
@example(2093)  # a notice for an instance that the fleet does not list yet, at the job's end
@hypothesis_settings(max_examples=examples(25), deadline=None)
def test_any_crash_in_any_market(seed: int) -> None:
    scenario = CrashScenario(seed, crashes=20)
    scenario.play()
    scenario.drain()
    scenario.check()


@pytest.mark.slow  # random runs
@given(st.integers(0, 2**32))
@example(2185)
@example(24174)
@example(4_245_141_884)  # a lost answer, then no room, and the same order again
@example(1_888_673_432)  # a launch whose answer was lost in the last turn before the job's end
@hypothesis_settings(max_examples=examples(10), deadline=None)
def test_any_crash_with_the_book_lost_now_and_then(seed: int) -> None:
    scenario = CrashScenario(seed, crashes=20, forget=True)
    scenario.play()
    scenario.drain()
    scenario.check()


@pytest.mark.slow  # random runs
@pytest.mark.parametrize("seed", seeds(5))
def test_no_orphans_after_twenty_crashes_in_mid_run(seed: int) -> None:
    """The bar: 20 crashes, and the job is drained long before its end."""
    scenario = CrashScenario(seed, crashes=20)
    turns = 0
    scenario.world.pass_time(0.0)
    while scenario.crashes < 20 and turns < 400:
        scenario.turn()
        scenario.clock.advance(STEP_S)
        scenario.market()
        scenario.world.pass_time(STEP_S if turns < 10 else 0.0)  # it does not finish by itself
        turns += 1
    assert scenario.crashes == 20
    scenario.drain()
    scenario.check()
    assert scenario.decisions[-1].phase == "drain"


@pytest.mark.slow  # random runs
@given(st.integers(0, 2**32))
@hypothesis_settings(max_examples=examples(15), deadline=None)
def test_crashes_cost_no_deadline_and_no_money(seed: int) -> None:
    """In a calm market a controller that crashes does as one that does not: deadline and bill are the same."""
    calm, crashed = CrashScenario(seed, crashes=0, wild=False), CrashScenario(seed, crashes=20, wild=False)
    for scenario in (calm, crashed):
        scenario.play()
        scenario.check()
        assert scenario.world.finished_s is not None
        assert scenario.world.finished_s - scenario.decisions[0].started_s <= DEADLINE_S
    assert crashed.decisions[-1].bill.usd == pytest.approx(calm.decisions[-1].bill.usd, rel=0.02)
    assert crashed.decisions[-1].bill.instances == calm.decisions[-1].bill.instances


@pytest.mark.slow  # random runs
@given(st.integers(0, 2**32), st.booleans())
@hypothesis_settings(max_examples=examples(6), deadline=None)
def test_a_released_slot_stays_released_over_any_crash(seed: int, wild: bool) -> None:
    """Only a recall brings the slot back, whatever the market does and wherever the controller dies."""
    rule = ScaleInSettings(TunerSettings(every_s=60.0, horizon_s=30.0, knee_slope=-5e-3), require_gain=False)
    limits = LaunchLimits(pool_backoff_s=30.0, early_s=20.0)
    job = settings(updates=200.0, deadline_s=2000.0, limits=limits, scale_in=rule)
    scenario = CrashScenario(seed, crashes=20, wild=wild, job=job)
    scenario.world.loss_of = ReferenceCurve((0.05, 1.5, 0.5, 0.4)).loss
    scenario.play()
    scenario.drain()
    scenario.check()
    running = [decision for decision in scenario.decisions if decision.phase == "run"]
    if not wild:  # else outages may leave too little slack for any release
        assert max(len(decision.released) for decision in running) > 0
    back = sum(len(set(before.released) - set(after.released)) for before, after in itertools.pairwise(running))
    recalls = [entry for entry in scenario.state_store.journal if entry["kind"] == "recall"]
    assert back <= len(recalls)
    for decision in running:
        orders = [result.action.order for result in decision.results if isinstance(result.action, Launch)]
        assert not {order.slot for order in orders} & set(decision.released)
