"""The rules that choose markets: when to wait for spot, and the spot guard (`deadline_rule`). In samples and seconds.

All of them reason about slack, the samples that may still be lost before the deadline is missed: S·T - W, with S the
rate of all streams, T the time that is left and W the samples that are left. While all slots run, slack stays the same.
A slot that is down loses its rate in every second, and a move to another market loses its rate times the boot time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from doll.provisioner.planning.state import Bools, PlannerSettings, PlannerState
from doll.theory.checks import Floats
from doll.theory.planning import best_assignment


@dataclass(frozen=True)
class Slack:
    """The work, time and slack that are left: W samples of work, T seconds to the deadline less its margin (may be
    negative), at S samples per second of all streams. Slots that are booting will still lose `boot_lost` samples."""

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
        """Samples that could still be lost without missing the deadline; negative when it is missed."""
        return self.total_per_s * self.time_s - self.work - self.boot_lost

    @property
    def needed_per_s(self) -> float:
        """Samples per second, from now on, that just meet the deadline."""
        return self.work / self.time_s if self.time_s > 0 else np.inf


def boot_left_s(state: PlannerState, settings: PlannerSettings) -> Floats:
    """Seconds until each slot that boots is ready; 0 for slots that work and slots without a machine, shape (N,)."""
    booting = ~state.up & (~state.on_spot | state.spot_available)
    # On spot a boot begins when a machine is there.
    since_s = np.where(state.on_spot, np.maximum(state.moved_s, state.spot_changed_s), state.moved_s)
    left_s = np.minimum(since_s + settings.boot_s - state.elapsed_s, settings.boot_s)
    # A boot that takes longer than it should is given one more period at a time.
    return np.where(booting, np.where(left_s > 0, left_s, min(settings.replan_s, settings.boot_s)), 0.0)


def cheaper_on_spot(state: PlannerState) -> Bools:
    """Slots that cost less on spot, were there no deadline (Theorem 5 with θ = ∞); none when spot is the dearer one.

    At a spot price close to on-demand's, a fast stream is worth an on-demand worker: the job ends sooner for all.
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
    """Price of covering the outages of a worker on spot, for each hour of the job, beside what its time on spot costs.

    A covered worker stays on-demand for a dwell and a boot after spot is back. Where that is longer than the time until
    the next outage it never returns, as in Theorem 4's mix.
    """
    down, prices = 1 - state.alpha.point, state.prices
    on_demand_share = min(1.0, down + (settings.dwell + settings.boot_s) / settings.cycle_s)
    return down * prices.spot_usd_per_h + on_demand_share * (prices.on_demand_usd_per_h - prices.spot_usd_per_h)


def covered_at_once(on_spot: Bools, state: PlannerState, settings: PlannerSettings) -> Bools:
    """Workers on spot whose outages are covered however late the deadline is: waiting for them costs more.

    While a job waits for a stream that is much faster than the mean, all other workers are paid for longer. A stream is
    covered if that costs less per sample than the job does with the faster streams covered.
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
    """Wait for spot while the slack allows, cover slots that are down when it does not.

    The guard keeps a reserve: the time in which an outage of all spot machines is seen, and a boot. Waiting must not
    spend it, so the pace is for a deadline that is sooner by this reserve. Slack up to that deadline is spent evenly
    over the job, but the share 1 - `slack_reserve` of the slack that an even pace would still have may be used early:
    most outages then end by themselves and cost neither money nor moves. Slots return when there is again more than
    `return_reserve` of it, which pays for the outages to come.
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
        chosen &= ~first_by_rate(down, state.rates_per_s, sooner.needed_per_s - working, fastest=True)
    if sooner.spare_samples >= settings.return_reserve * even:
        chosen |= affordable(returnable(state, settings) & worth, state, settings, slack)
    return chosen


def theorem(state: PlannerState, settings: PlannerSettings, slack: Slack, worth: Bools) -> Bools:
    """Theorem 4/5 on what is left: as much rate on spot as its expected outages leave enough for the deadline.

    The condition (23) is used in its own unit, samples per second on spot, so that slots which are down may be the
    ones that move (they lose nothing by it) instead of strictly the fastest streams.
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
    # A hair more than allowed is rounding; a whole slot must move.
    if on_spot > allowed + 1e-9 * slack.total_per_s:
        excess = on_spot - max(0.0, allowed)
        down = chosen & ~state.spot_available
        moved = first_by_rate(down, rates, excess, fastest=True)
        moved |= first_by_rate(chosen & ~down, rates, excess - float(rates[moved].sum()), fastest=True)
        chosen &= ~moved
    elif allowed - on_spot > band:
        order = np.flatnonzero(returnable(state, settings) & worth)
        order = order[np.argsort(rates[order], kind="stable")]
        fits = np.cumsum(rates[order]) <= (allowed - on_spot) * (1 + 1e-9)
        chosen[order[fits]] = True
    return chosen


def deadline_rule(
    state: PlannerState, settings: PlannerSettings, slack: Slack, wanted: Bools, move_s: float
) -> tuple[Bools, Bools]:
    """The spot guard: take back from spot what the deadline cannot afford to lose.

    Worst case: everything on spot goes down now, the planner sees it `detection_delay` seconds later, and all of it has
    to boot on-demand. Then each slot on spot loses rate x (detection delay + boot), a slot that is down loses rate x
    (planning period + boot), and a slot that moves now loses rate x boot. What is left of the slack must cover that, so
    slots leave spot until it does: returns first, then slots that are down or boot there, then the fastest; but none
    that would lose no less by leaving.

    A move now costs `move_s`: the boot time, or 0 if nothing runs yet. Returns the markets (True: spot), and which of
    them the guard changed.
    """
    rates = state.rates_per_s
    chosen = wanted.copy()
    down = state.on_spot & ~state.spot_available
    stay_s = settings.boot_s + np.where(down, settings.replan_s, settings.detection_delay)
    exposed = float(np.dot(stay_s[chosen], rates[chosen])) + move_s * float(rates[chosen != state.on_spot].sum())
    short = exposed - slack.spare_samples
    none = np.zeros(len(rates), dtype=np.bool_)
    if short <= 0:
        return chosen, none
    # Not returning spares the boot too; leaving costs a boot now instead of later, in place of one under way on spot.
    left_s = boot_left_s(state, settings)
    relief = np.where(state.on_spot, stay_s - move_s + left_s, stay_s + move_s) * rates
    candidates = np.flatnonzero(chosen & (relief > 0))
    if not candidates.size:
        return chosen, none
    rank = np.where(~state.on_spot, 0, np.where(down | (left_s > 0), 1, 2))
    order = candidates[np.lexsort((-rates[candidates], rank[candidates]))]
    count = int(np.searchsorted(np.cumsum(relief[order]), short * (1 - 1e-12))) + 1
    taken = none
    taken[order[:count]] = True
    chosen &= ~taken
    return chosen, taken


def returnable(state: PlannerState, settings: PlannerSettings) -> Bools:
    """On-demand slots that may go back: up, and spot has been available to them for the dwell time."""
    steady = state.elapsed_s - state.spot_changed_s >= settings.dwell
    return (
        ~state.on_spot & state.up & state.spot_available & steady & (state.elapsed_s - state.moved_s >= settings.boot_s)
    )


def affordable(returns: Bools, state: PlannerState, settings: PlannerSettings, slack: Slack) -> Bools:
    """The slowest of the slots that may return for which the slack is half again what the guard will ask for. At the
    edge of the guard a return would be taken back at the next outage: two moves for little."""
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


def first_by_rate(among: Bools, rates: Floats, needed_per_s: float, *, fastest: bool) -> Bools:
    """The fewest slots, fastest (or slowest) first, whose rates add up to `needed_per_s`; all when they do not."""
    chosen = np.zeros(len(rates), dtype=np.bool_)
    slots = np.flatnonzero(among)
    if needed_per_s <= 0 or not slots.size:
        return chosen
    order = slots[np.argsort(-rates[slots] if fastest else rates[slots], kind="stable")]
    count = int(np.searchsorted(np.cumsum(rates[order]), needed_per_s * (1 - 1e-9))) + 1
    chosen[order[:count]] = True
    return chosen


def _allowed_at_risk(state: PlannerState, settings: PlannerSettings, slack: Slack) -> float:
    """Rate on spot, samples per second, that keeps P(late) at most `risk`; 0 when the deadline is lost."""
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
