"""A slot is not released where deadline, budget or error target would be put at risk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doll.provisioner.planning import planner
from doll.provisioner.planning.state import Alpha, PlannerSettings, PlannerState
from doll.provisioner.scale_in import deadline_at_risk, error_refusal, release_refusal, spare_needed_s
from doll.theory.cost import Prices
from hypothesis import given
from hypothesis import strategies as st

PRICES = Prices(0.158, 0.286)


def settings(**change: Any) -> PlannerSettings:
    given: dict[str, Any] = {
        "samples": 40_000.0, "batch_size": 25, "deadline_s": 2000.0, "boot_s": 20.0, "replan_s": 10.0, "cycle_s": 2000.0
    }  # fmt: skip
    return PlannerSettings(**{**given, **change})


def state(slots: int = 4, *, rate: float = 10.0, **change: Any) -> PlannerState:
    given: dict[str, Any] = {
        "elapsed_s": 0.0, "samples_done": 0.0, "rates_per_s": np.full(slots, rate),
        "on_spot": np.ones(slots, dtype=bool), "up": np.ones(slots, dtype=bool), "alpha": Alpha(0.9), "prices": PRICES,
    }  # fmt: skip
    return PlannerState(**{**given, **change})


def without(before: PlannerState, slot: int) -> PlannerState:
    kept = np.ones(before.num_workers, dtype=bool)
    kept[slot] = False
    return before.of_slots(kept)


def test_the_slots_that_are_left_must_do_the_work_in_time() -> None:
    """40,000 samples at 40/s take 1000 s, at 30/s 1333 s, at 20/s 2000 s."""
    four, three = state(), without(state(), 3)
    assert release_refusal(four, three, settings(), 0.05) == ""
    why = release_refusal(four, three, settings(deadline_s=1350.0), 0.05)
    assert "deadline would be at risk: 3 workers would leave" in why
    assert release_refusal(four, three, settings(deadline_s=1500.0), 0.05) == ""
    assert "at risk" in release_refusal(four, three, settings(deadline_s=1500.0), 0.2), "the reserve counts"
    assert "at risk" in deadline_at_risk(four, settings(deadline_s=900.0), 0.0)


def test_the_work_that_is_done_and_the_time_that_has_passed_count() -> None:
    late = replace(state(), elapsed_s=1500.0, samples_done=20_000.0)
    assert "at risk" in release_refusal(late, without(late, 0), settings(), 0.05)
    nearly_done = replace(state(), elapsed_s=1500.0, samples_done=38_000.0)
    assert release_refusal(nearly_done, without(nearly_done, 0), settings(), 0.05) == ""


def test_the_budget_and_the_cost_count() -> None:
    four, three = state(), without(state(), 3)
    whole = planner.plan(three, settings()).forecast.expected_cost_usd
    assert "above the budget" in release_refusal(four, three, settings(budget_usd=whole * 0.99), 0.05)
    assert release_refusal(four, three, settings(budget_usd=whole * 1.1), 0.05) == ""
    # Rule "theorem": with three workers more of them would have to be on-demand.
    tight = settings(rule="theorem", guard=False, deadline_s=1450.0, dead_band=0, boot_s=0.0, replan_s=1.0, risk=0.5)
    assert "the expected cost would rise" in release_refusal(four, three, tight, 0.01)


def test_a_deadline_that_is_met_by_luck_is_not_enough() -> None:
    """Without guard and pace the expectation meets the deadline, and half of the runs do not."""
    loose = settings(rule="theorem", guard=False, deadline_s=1500.0, margin=0.0, cycle_s=20_000.0)
    four, three = state(), without(state(), 3)
    assert "missed with probability" in release_refusal(four, three, loose, 0.01)
    assert "missed with probability" not in release_refusal(four, three, replace(loose, risk=0.5), 0.01)


@given(
    slots=st.integers(2, 8), deadline_s=st.floats(600.0, 5000.0), done=st.floats(0.0, 39_000.0),
    elapsed_s=st.floats(0.0, 3000.0), reserve=st.floats(0.0, 0.3), spot=st.booleans(),
)  # fmt: skip
def test_a_release_that_is_allowed_leaves_time_in_the_worst_case(
    slots: int, deadline_s: float, done: float, elapsed_s: float, reserve: float, spot: bool
) -> None:
    """All spot machines end now and boot again on-demand: the work is done in time."""
    before = state(slots, elapsed_s=elapsed_s, samples_done=done, on_spot=np.full(slots, spot))
    how = settings(deadline_s=deadline_s)
    after = without(before, 0)
    if not release_refusal(before, after, how, reserve):
        ends_s = elapsed_s + how.detection_delay + how.boot_s + (how.samples - done) / (10.0 * (slots - 1))
        assert ends_s <= deadline_s * (1 - reserve)
        assert spare_needed_s(how, reserve) >= reserve * deadline_s


# --- the error target


def curve(floor: float, count: int = 40) -> tuple[list[float], list[float]]:
    updates = np.arange(1, count + 1) * 10.0
    return updates.tolist(), (0.9 * 0.98**updates + floor).tolist()


def test_a_floor_that_would_rise_above_the_target_refuses() -> None:
    """γ of (10) is in proportion to 1/(K b): an update of one batch of each worker shrinks with them."""
    updates, errors = curve(0.04)
    why, needed = error_refusal(updates, errors, 0.05, floor_growth=1.0)
    assert why == ""
    assert needed == pytest.approx(np.log(0.01 / 0.9) / np.log(0.98), rel=0.05)
    why, _ = error_refusal(updates, errors, 0.05, floor_growth=4 / 3)
    assert "error target 0.05 would be at risk: the error curve would not fall below 0.05" in why
    assert "at risk" in error_refusal(updates, errors, 0.03, floor_growth=1.0)[0], "out of reach as it is"


def test_a_curve_that_is_too_short_says_nothing() -> None:
    updates, errors = curve(0.04)
    assert error_refusal(updates[:11], errors[:11], 0.001, 1.0) == ("", 0.0)
    assert error_refusal(updates, [1.0 - 0.001 * n for n in range(40)], 0.001, 1.0) == ("", 0.0)
    assert error_refusal([], [], 0.1, 1.0) == ("", 0.0)


def test_a_part_of_the_slots_is_a_state_of_its_own() -> None:
    whole = state(3, rates_per_s=np.array([1.0, 2.0, 3.0]), on_spot=np.array([True, False, True]))
    part = whole.of_slots(np.array([True, False, True]))
    assert part.rates_per_s.tolist() == [1.0, 3.0]
    assert part.on_spot.tolist() == [True, True]
    assert (part.num_workers, part.moved_s.shape) == (2, (2,))
    assert whole.of_slots(np.ones(3, dtype=bool)) is whole
