"""The rules that choose markets, in samples and seconds: when to wait for spot.

All rules use the slack S * T - W: the number of samples that may still be lost without missing the deadline. S is the
total rate of all streams, T the remaining time, and W the number of remaining samples. The slack is constant while all
slots work. A slot that is down loses its rate each second. A slot that moves to another market loses its rate times the
boot time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from doll.provisioner.planning.state import Bools, PlannerSettings, PlannerState
from doll.theory.checks import Floats
from doll.theory.planning import best_assignment


@dataclass(frozen=True)
class Slack:
    """The remaining work, time and slack: W samples of work, T seconds to the deadline minus its margin (may be
    negative), and S samples per second of all streams. Booting slots lose `boot_lost` samples until they are ready."""

    work: float
    time_s: float
    total_per_s: float
    boot_lost: float

    @classmethod
    def compute(cls, state: PlannerState, settings: PlannerSettings) -> Slack:
        lost = float(np.dot(state.rates_per_s, boot_left_s(state, settings)))
        return cls(
            work=max(0.0, settings.samples - state.samples_done),
            time_s=settings.deadline_s * (1 - settings.margin) - state.elapsed_s,
            total_per_s=float(state.rates_per_s.sum()),
            boot_lost=lost,
        )

    @property
    def spare_samples(self) -> float:
        """The samples that may still be lost without missing the deadline; negative if the deadline is missed."""
        return self.total_per_s * self.time_s - self.work - self.boot_lost

    @property
    def needed_per_s(self) -> float:
        """The constant rate from now on, samples per second, that just meets the deadline."""
        return self.work / self.time_s if self.time_s > 0 else np.inf


def boot_left_s(state: PlannerState, settings: PlannerSettings) -> Floats:
    """Return the seconds until each booting slot is ready, shape (N,); 0 for a slot that works or has no machine."""
    booting = ~state.up & (~state.on_spot | state.spot_available)
    # On spot, a boot begins when a machine is available.
    since_s = np.where(state.on_spot, np.maximum(state.moved_s, state.spot_changed_s), state.moved_s)
    left_s = np.minimum(since_s + settings.boot_s - state.elapsed_s, settings.boot_s)
    # A boot that takes longer than planned gets one more period at a time.
    return np.where(booting, np.where(left_s > 0, left_s, min(settings.replan_s, settings.boot_s)), 0.0)


def cheaper_on_spot(state: PlannerState) -> Bools:
    """Return the slots that would cost less on spot without a deadline (Theorem 5 with θ = ∞); none if spot costs more.

    If the spot price is close to the on-demand price, an on-demand worker for a fast stream saves money, because the
    job ends sooner.
    """
    rates = state.rates_per_s
    if not state.prices.spot_is_cheaper:
        return np.zeros(len(rates), dtype=np.bool_)
    # The cost has one local minimum (Theorem 5): if it still falls when the fastest stream goes to spot, that is all.
    alpha, prices, count = max(state.alpha.point, 1e-3), state.prices, len(rates)
    everyone = count * prices.spot_usd_per_h / float(rates.sum())
    but_one = alpha * (count - 1) * prices.spot_usd_per_h + prices.on_demand_usd_per_h
    if everyone <= but_one / (alpha * float(rates.sum()) + (1 - alpha) * float(rates.max())):
        return np.ones(count, dtype=np.bool_)
    # Any work and any deadline that does not bind give the same answer.
    return best_assignment(1.0, rates, alpha, 2.0 / (alpha * float(rates.sum())), state.prices).spot


def covering_usd_per_h(state: PlannerState, settings: PlannerSettings) -> float:
    """Return the price of covering a spot worker's outages on-demand, per hour of the job, without its time on spot.

    A covered worker stays on-demand for a dwell and a boot after spot is available again. If this is longer than the
    time until the next outage, the worker never returns, as in the mix of Theorem 4.
    """
    down, prices = 1 - state.alpha.point, state.prices
    on_demand_share = min(1.0, down + (settings.dwell + settings.boot_s) / settings.cycle_s)
    return down * prices.spot_usd_per_h + on_demand_share * (prices.on_demand_usd_per_h - prices.spot_usd_per_h)


def covered_at_once(on_spot: Bools, state: PlannerState, settings: PlannerSettings) -> Bools:
    """Return the workers on spot whose outages are always covered on-demand, because waiting for spot costs more.

    If a job waits for a stream that is much faster than the mean, all other workers are paid for a longer time. A
    stream is covered if covering it costs less per sample than the job costs per sample when only the faster streams
    are covered.
    """
    rates, alpha, prices = state.rates_per_s, state.alpha.point, state.prices
    slots = np.flatnonzero(on_spot)
    chosen = np.zeros(len(rates), dtype=np.bool_)
    if not slots.size or alpha >= 1 or not prices.spot_is_cheaper:
        return chosen
    order = slots[np.argsort(-rates[slots], kind="stable")]
    fastest_first, faster = rates[order], np.arange(len(order))
    usd_per_h = covering_usd_per_h(state, settings)
    spent = alpha * len(order) * prices.spot_usd_per_h + faster * usd_per_h
    spent += (len(rates) - len(order)) * prices.on_demand_usd_per_h
    made = float(rates[~on_spot].sum() + alpha * fastest_first.sum())
    learned = made + (1 - alpha) * (np.cumsum(fastest_first) - fastest_first)
    waits = usd_per_h * learned >= spent * (1 - alpha) * fastest_first
    chosen[order[: int(np.argmax(waits)) if waits.any() else len(order)]] = True
    return chosen


def pace(state: PlannerState, settings: PlannerSettings, slack: Slack, worth: Bools) -> Bools:
    """Choose the markets by the rule "pace": while the slack allows it, wait for spot; otherwise cover slots that are
    down.

    The guard keeps a reserve: the time until an outage of all spot machines is detected, plus a boot. Waiting must not
    use this reserve, so this rule plans for a deadline that is earlier by the reserve. At an even pace, the slack up to
    that deadline would fall evenly over the job. Slots are covered if the slack is below the share `slack_reserve` of
    this even slack. So a part of the slack may be used early: most outages then end by themselves and cost neither
    money nor moves. Slots return if the slack is again above the share `return_reserve`, so that slack is left for
    later outages.
    """
    chosen = state.on_spot.copy()
    down = chosen & ~state.spot_available
    chosen &= ~(down & covered_at_once(chosen, state, settings))
    down &= chosen
    reserve_s = settings.detection_delay + settings.boot_s if settings.guard else 0.0
    sooner = replace(slack, time_s=slack.time_s - reserve_s)
    span_s = settings.deadline_s * (1 - settings.margin) - reserve_s
    even = 0.0
    if span_s > 0:
        even = max(0.0, slack.total_per_s * span_s - settings.samples) * max(0.0, sooner.time_s) / span_s
    if sooner.spare_samples < settings.slack_reserve * even or sooner.spare_samples < 0:
        working = slack.total_per_s - float(state.rates_per_s[down].sum())
        chosen &= ~fastest(down, state.rates_per_s, sooner.needed_per_s - working)
    if sooner.spare_samples >= settings.return_reserve * even:
        chosen |= affordable(returnable(state, settings) & worth, state, settings, slack)
    return chosen


def theorem(state: PlannerState, settings: PlannerSettings, slack: Slack, worth: Bools) -> Bools:
    """Choose the markets by Theorem 4/5 for the remaining work: use spot as far as the deadline allows.

    Condition (23) is used in its own unit, samples per second on spot. The paper moves the slots with the fastest
    streams. This rule first moves slots that are down, because they lose nothing by a move.
    """
    chosen = state.on_spot.copy()
    rates, alpha = state.rates_per_s, state.alpha.point
    if settings.risk is not None:
        allowed = _allowed_at_risk(state, settings, slack)
    else:
        spare = slack.total_per_s - slack.needed_per_s
        allowed = np.inf if alpha >= 1 and spare >= 0 else spare / max(1 - alpha, 1e-9)
    mean_rate = slack.total_per_s / len(rates)
    band = settings.dead_band * mean_rate
    on_spot = float(rates[chosen].sum())
    # A tiny excess is rounding; only a whole slot can move.
    if on_spot > allowed + 1e-9 * slack.total_per_s:
        excess = on_spot - max(0.0, allowed)
        down = chosen & ~state.spot_available
        moved = fastest(down, rates, excess)
        moved |= fastest(chosen & ~down, rates, excess - float(rates[moved].sum()))
        chosen &= ~moved
    elif allowed - on_spot > band:
        order = np.flatnonzero(returnable(state, settings) & worth)
        order = order[np.argsort(rates[order], kind="stable")]
        fits = np.cumsum(rates[order]) <= (allowed - on_spot) * (1 + 1e-9)
        chosen[order[fits]] = True
    return chosen


def returnable(state: PlannerState, settings: PlannerSettings) -> Bools:
    """Return the on-demand slots that may return to spot: they are up, and spot was available for the dwell time."""
    steady = state.elapsed_s - state.spot_changed_s >= settings.dwell
    return (
        ~state.on_spot & state.up & state.spot_available & steady & (state.elapsed_s - state.moved_s >= settings.boot_s)
    )


def affordable(returns: Bools, state: PlannerState, settings: PlannerSettings, slack: Slack) -> Bools:
    """Return the slowest of the slots that may return, as many as leave 1.5 times the slack that the guard will
    require. With less slack, the next outage would undo a return, which costs two moves for little gain."""
    slots = np.flatnonzero(returns)
    if not slots.size:
        return returns
    rates = state.rates_per_s
    order = slots[np.argsort(rates[slots], kind="stable")]
    exposed = (settings.detection_delay + settings.boot_s) * (
        float(rates[state.on_spot].sum()) + np.cumsum(rates[order])
    )
    left = slack.spare_samples - settings.boot_s * np.cumsum(rates[order])
    chosen = np.zeros(len(rates), dtype=np.bool_)
    chosen[order[left >= 1.5 * exposed]] = True
    return chosen


def fastest(among: Bools, rates: Floats, needed_per_s: float) -> Bools:
    """Return the fewest slots, fastest first, whose rates add up to `needed_per_s`; otherwise all."""
    chosen = np.zeros(len(rates), dtype=np.bool_)
    slots = np.flatnonzero(among)
    if needed_per_s <= 0 or not slots.size:
        return chosen
    order = slots[np.argsort(-rates[slots], kind="stable")]
    count = int(np.searchsorted(np.cumsum(rates[order]), needed_per_s * (1 - 1e-9))) + 1
    chosen[order[:count]] = True
    return chosen


def _allowed_at_risk(state: PlannerState, settings: PlannerSettings, slack: Slack) -> float:
    """Return the rate on spot, samples per second, that keeps P(late) at most `risk`; 0 if the deadline is lost."""
    if slack.time_s <= 0 or slack.spare_samples < 0:
        return 0.0
    assignment = best_assignment(
        slack.work,
        state.rates_per_s,
        state.alpha.point,
        slack.time_s,
        state.prices,
        cycle_s=settings.cycle_s,
        risk=settings.risk,
    )
    return float(state.rates_per_s[assignment.spot].sum())
