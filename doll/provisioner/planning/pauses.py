"""Pauses: when a job has no machines although it has work, because an hour is excluded or spot is expensive. Pure.

A pause uses time that the job could spend on waiting for spot. So a pause by price ends while the rest can still be
done on spot, and a pause by hours while it can still be done on-demand. All times without a date are in UTC, which has
no daylight saving time. Time is an argument, and a decision depends on the time only through `now_s`: a clock that is
set back changes the next decision, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from doll.provisioner.planning.market_rules import Slack
from doll.provisioner.planning.state import PlannerSettings, PlannerState

DAY_S: Final = 86_400.0
MIN_HOURS: Final = 24  # recorded hourly prices from which on prices are followed
MAX_HOURS: Final = 7 * 24
_DEARER: Final = 1.1  # a pause begins at this factor of the price at which it ends: machines boot after each pause


@dataclass(frozen=True)
class PauseSettings:
    """The times and prices at which a job pauses.

    Attributes:
        start_after_s: Unix time before which nothing runs; -inf: none.
        not_between: begin and end of the excluded hours, seconds of the day in UTC. A window whose end is before its
            begin ends on the next day.
        max_spot_usd_per_h: price of a worker on spot above which the job pauses; inf: none.
        follow_prices: whether to pause while spot is more expensive than in the cheapest hours that suffice.
    """

    start_after_s: float = -math.inf
    not_between: tuple[tuple[float, float], ...] = ()
    max_spot_usd_per_h: float = math.inf
    follow_prices: bool = False

    def windows(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return the excluded times between two Unix times, ascending and without overlap."""
        excluded = [(start_s, min(end_s, self.start_after_s))] if self.start_after_s > start_s else []
        for day in range(math.floor(start_s / DAY_S) - 1, math.floor(end_s / DAY_S) + 1) if self.not_between else ():
            for begin, end in self.not_between:
                one = day * DAY_S + begin
                excluded.append((max(start_s, one), min(end_s, one + (end - begin) % DAY_S)))
        joined: list[tuple[float, float]] = []
        for begin, end in sorted(window for window in excluded if window[0] < window[1]):
            if joined and begin <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((begin, end))
        return joined

    def open_s(self, start_s: float, end_s: float) -> float:
        """Return the seconds between two Unix times that are not excluded."""
        return max(0.0, end_s - start_s) - math.fsum(end - begin for begin, end in self.windows(start_s, end_s))


@dataclass(frozen=True)
class _Room:
    """The time that a job has left. `sure_s` and `spot_s`: seconds that the rest takes on-demand and on spot."""

    open_s: float
    excluded_s: float
    sure_s: float
    spot_s: float

    @classmethod
    def compute(cls, state: PlannerState, planner: PlannerSettings, pauses: PauseSettings, now_s: float) -> _Room:
        slack = Slack.compute(state, planner)
        open_s = pauses.open_s(now_s, now_s + slack.time_s)
        # All workers boot after a pause. Then the guard needs its reserve, in case that all of spot is lost.
        reserve_s = planner.replan_s + 2 * planner.boot_s + planner.detection_delay
        sure_s = slack.work / slack.total_per_s
        spot_s = sure_s / max(state.alpha.point, 1e-3)
        return cls(open_s, max(0.0, slack.time_s) - open_s, sure_s + reserve_s, spot_s + reserve_s)


def pause_reason(
    state: PlannerState, planner: PlannerSettings, pauses: PauseSettings, now_s: float,
    *, recent_usd_per_h: Sequence[float] = (), is_paused: bool = False,
) -> str:  # fmt: skip
    """Return the reason why the job has no machines now; "": it runs.

    A pause begins only if it can last for a few boots; otherwise a job at the edge of its deadline would start and end
    machines in turn.

    Args:
        recent_usd_per_h: spot prices of a worker in recent hours.
        is_paused: whether the job pauses already.
    """
    if planner.samples <= state.samples_done:
        return ""
    room = _Room.compute(state, planner, pauses, now_s)
    least_s = 0.0 if is_paused else 2 * planner.boot_s + planner.replan_s
    price = state.prices.spot_usd_per_h
    if pauses.windows(now_s, now_s + 1.0) and room.open_s >= room.sure_s + least_s:
        return "provision.pause excludes this time"
    if room.open_s < room.spot_s + least_s:
        return ""
    if price > pauses.max_spot_usd_per_h:
        return f"spot costs more than provision.pause.max_spot_usd_per_h, and the deadline leaves {room.open_s:.0f} s"
    if pauses.follow_prices and len(recent_usd_per_h) >= MIN_HOURS:
        limit = float(np.quantile(recent_usd_per_h, min(1.0, room.spot_s / room.open_s)))
        if price > limit * (1.0 if is_paused else _DEARER):
            return f"cheaper hours suffice: the cheapest {room.spot_s / room.open_s:.0%} of recent hours cost less"
    return ""


def before_excluded_hours(
    state: PlannerState, planner: PlannerSettings, pauses: PauseSettings, now_s: float
) -> PlannerSettings:  # fmt: skip
    """Return the planner's settings with a deadline that is earlier by the excluded time before it, if the rest can be
    done outside of that time. The planner then has no slack that the hours will take away."""
    room = _Room.compute(state, planner, pauses, now_s)
    if not room.excluded_s or room.open_s < room.sure_s:
        return planner
    return replace(planner, deadline_s=planner.deadline_s - room.excluded_s)


def no_time_left(planner: PlannerSettings, pauses: PauseSettings, rate_per_s: float, start_s: float) -> str:
    """Return why a job that starts now cannot meet its deadline outside of the excluded hours; "": it can."""
    open_s = pauses.open_s(start_s, start_s + planner.deadline_s * (1 - planner.margin))
    needed_s = planner.samples / rate_per_s
    if open_s >= needed_s or open_s >= planner.deadline_s * (1 - planner.margin):
        return ""
    return (
        f"provision.pause: no time is left before the deadline: {open_s:.0f} of its {planner.deadline_s:.0f} s are not "
        f"excluded, and the work takes {needed_s:.0f} s: expected fewer hours or a later plan.deadline_s"
    )
