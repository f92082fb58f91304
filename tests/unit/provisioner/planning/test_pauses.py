"""When a job pauses: hours of the day, a limit of the price, cheaper hours; and never at the cost of the deadline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doll.provisioner.planning.pauses import PauseSettings, before_excluded_hours, no_time_left, pause_reason
from doll.provisioner.planning.state import Alpha, PlannerSettings, PlannerState
from doll.theory.cost import Prices

HOUR_S = 3600.0
MIDNIGHT = 1_764_547_200.0  # 2025-12-01 00:00 UTC
PLANNER = PlannerSettings(samples=4 * HOUR_S, batch_size=1, deadline_s=12 * HOUR_S, replan_s=30, boot_s=90, margin=0)
NIGHT = PauseSettings(not_between=((22 * HOUR_S, 6 * HOUR_S),))
NO_FORECAST: tuple[float, ...] = ()


def state(elapsed_s: float = 0.0, done_s: float = 0.0, spot: float = 0.1, alpha: float = 1.0) -> PlannerState:
    """A job of four streams that learns a second of work per second: it needs 4 h of its 12."""
    return PlannerState(
        elapsed_s=elapsed_s, samples_done=done_s, rates_per_s=np.full(4, 0.25), on_spot=np.ones(4, np.bool_),
        up=np.ones(4, np.bool_), alpha=Alpha(alpha), prices=Prices(spot, 0.3),
    )  # fmt: skip


def test_a_window_over_midnight_is_in_utc_and_counts_once() -> None:
    assert NIGHT.windows(MIDNIGHT, MIDNIGHT + 24 * HOUR_S) == [
        (MIDNIGHT, MIDNIGHT + 6 * HOUR_S), (MIDNIGHT + 22 * HOUR_S, MIDNIGHT + 24 * HOUR_S),
    ]  # fmt: skip
    both = replace(NIGHT, not_between=(*NIGHT.not_between, (5 * HOUR_S, 7 * HOUR_S)), start_after_s=MIDNIGHT + HOUR_S)
    assert both.open_s(MIDNIGHT, MIDNIGHT + 24 * HOUR_S) == 15 * HOUR_S
    assert NIGHT.open_s(MIDNIGHT + HOUR_S, MIDNIGHT + HOUR_S) == 0


@pytest.mark.parametrize(
    ("hour", "pauses"), [(21.99, False), (22.0, True), (23.5, True), (0.0, True), (5.99, True), (6.0, False)]
)
def test_excluded_hours_pause_a_job_with_time_to_spare(hour: float, pauses: bool) -> None:
    assert bool(pause_reason(state(), replace(PLANNER, deadline_s=24 * HOUR_S), NIGHT, MIDNIGHT + hour * HOUR_S)) is (
        pauses
    )


def test_the_deadline_comes_before_the_hours() -> None:
    at = MIDNIGHT + 23 * HOUR_S
    assert pause_reason(state(), PLANNER, NIGHT, at), "5 h from 06:00 to the deadline at 11:00, 4 are needed"
    late = replace(PLANNER, deadline_s=10.5 * HOUR_S)
    assert not pause_reason(state(), late, NIGHT, at), "3.5 h from 06:00 on do not suffice, so it runs at night"
    behind = replace(PLANNER, deadline_s=HOUR_S)
    assert not pause_reason(state(), behind, NIGHT, at), "the deadline is lost already"


def test_a_pause_that_begins_at_the_edge_would_flap() -> None:
    """The reserve is 30 + 3 * 90 - 60 s; to begin a pause takes two boots and a period more."""
    at, needed_s = MIDNIGHT + 23 * HOUR_S, 11 * HOUR_S + 30 + 2 * 90 + 30
    assert not pause_reason(state(), replace(PLANNER, deadline_s=needed_s + 209), NIGHT, at)
    assert pause_reason(state(), replace(PLANNER, deadline_s=needed_s + 211), NIGHT, at)
    assert pause_reason(state(), replace(PLANNER, deadline_s=needed_s + 1), NIGHT, at, is_paused=True)
    assert not pause_reason(state(), replace(PLANNER, deadline_s=needed_s - 1), NIGHT, at, is_paused=True)


def test_a_clock_that_is_set_back_changes_the_next_decision_only() -> None:
    day = replace(PLANNER, deadline_s=24 * HOUR_S)
    assert not pause_reason(state(), day, NIGHT, MIDNIGHT + 6 * HOUR_S)
    assert pause_reason(state(), day, NIGHT, MIDNIGHT + 5 * HOUR_S), "an hour back: in the window again"
    assert not pause_reason(state(), day, NIGHT, MIDNIGHT + 6 * HOUR_S, is_paused=True)


def test_the_planner_does_not_count_on_hours_that_are_excluded() -> None:
    at = MIDNIGHT + 20 * HOUR_S
    assert before_excluded_hours(state(), PLANNER, PauseSettings(), at) is PLANNER
    long = replace(PLANNER, deadline_s=16 * HOUR_S)
    assert before_excluded_hours(state(), long, NIGHT, at).deadline_s == 8 * HOUR_S, "8 h of it are at night"
    assert before_excluded_hours(state(), PLANNER, NIGHT, at) is PLANNER, "4 h at day are not enough with a reserve"


def test_a_price_above_the_limit_pauses_while_spot_can_do_the_rest() -> None:
    limit = PauseSettings(max_spot_usd_per_h=0.15)
    assert not pause_reason(state(spot=0.15), PLANNER, limit, MIDNIGHT)
    assert "max_spot_usd_per_h" in pause_reason(state(spot=0.16), PLANNER, limit, MIDNIGHT)
    assert not pause_reason(state(7.95 * HOUR_S, spot=0.16), PLANNER, limit, MIDNIGHT), "4.05 h are left for 4"
    half = state(3.9 * HOUR_S, spot=0.16, alpha=0.5)
    assert not pause_reason(half, PLANNER, limit, MIDNIGHT), "spot is there half of the time and needs 8 of 8.1 h"
    assert not pause_reason(state(done_s=4 * HOUR_S, spot=9.0), PLANNER, limit, MIDNIGHT), "the work is done"


def test_cheaper_hours_are_awaited_if_they_suffice() -> None:
    follow, hours = PauseSettings(follow_prices=True), [0.1] * 12 + [0.2] * 12
    assert not pause_reason(state(spot=0.1), PLANNER, follow, MIDNIGHT, recent_usd_per_h=hours)
    assert "cheaper hours suffice: the cheapest 34%" in pause_reason(
        state(spot=0.2), PLANNER, follow, MIDNIGHT, recent_usd_per_h=hours
    )
    tight = replace(PLANNER, deadline_s=5 * HOUR_S)
    assert not pause_reason(state(spot=0.2), tight, follow, MIDNIGHT, recent_usd_per_h=hours), "it needs 80 % of them"
    assert not pause_reason(state(spot=0.2), PLANNER, follow, MIDNIGHT, recent_usd_per_h=hours[:23]), "one day at least"
    flat: dict[str, Any] = {"recent_usd_per_h": [0.1] * 24}
    assert not pause_reason(state(spot=0.105), PLANNER, follow, MIDNIGHT, **flat), "a boot costs more than 5 %"
    assert pause_reason(state(spot=0.105), PLANNER, follow, MIDNIGHT, is_paused=True, **flat)


def test_a_job_without_time_before_its_deadline_is_refused() -> None:
    at = MIDNIGHT + 22 * HOUR_S
    assert not no_time_left(PLANNER, NIGHT, 1.0, at)
    text = no_time_left(replace(PLANNER, deadline_s=8 * HOUR_S), NIGHT, 1.0, at)
    assert "no time is left before the deadline: 0 of its 28800 s are not excluded, and the work takes 14400 s" in text
    assert no_time_left(PLANNER, PauseSettings(start_after_s=at + 9 * HOUR_S), 1.0, at)
    assert not no_time_left(replace(PLANNER, deadline_s=HOUR_S), PauseSettings(), 1.0, at), "no pause is to blame"
