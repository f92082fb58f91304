"""The planner, which chooses the market of every slot. Pure. `doll plan`, `doll simulate` and live jobs use it.

`plan` is called again and again and keeps no state. `market_rules` choose when to wait for spot. If waiting would
endanger the deadline, `deadline_guard` moves slots to on-demand. If even this is too late, the plan states that the
deadline is missed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from doll.provisioner.planning import market_rules
from doll.provisioner.planning.deadline_guard import deadline_guard
from doll.provisioner.planning.market_rules import Slack
from doll.provisioner.planning.state import Bools, PlannerSettings, PlannerState
from doll.theory.checks import Floats
from doll.theory.cost import SECONDS_PER_HOUR
from doll.theory.planning import quantile, tail
from doll.theory.preemption import shortfall_prob, uptime_variance_s2

# `Alpha.low` and `Alpha.high` bound 90 % (signals.py); half of that width in standard deviations.
_Z_INTERVAL = quantile(0.95)


@dataclass(frozen=True)
class Forecast:
    """The cost and the end of the whole job, including the cost so far. Spreads are standard deviations.

    Attributes:
        expected_cost_usd: cost of the workers until the job ends.
        expected_finish_s: end of the job on its clock.
        miss_prob: probability that the job ends after the deadline. With the guard, only noise of arrivals can cause
            this.
    """

    expected_cost_usd: float
    cost_sd_usd: float
    expected_finish_s: float
    finish_sd_s: float
    miss_prob: float
    over_budget: bool


def forecast(on_spot: Bools, state: PlannerState, settings: PlannerSettings, slack: Slack) -> Forecast:
    """Return the forecast for the markets `on_spot`.

    The rules "theorem" and "mix" keep the mix, so the end depends on spot's outages (Theorem 4, Eq. (15)-(16),
    (21)-(22)). The rule "pace" covers the work that spot does not do in time. So the job ends at the deadline at the
    latest, and outages change the cost.
    """
    if slack.work <= 0:
        return Forecast(state.spent_usd, 0.0, state.elapsed_s, 0.0, 0.0, False)
    rates, alpha, prices = state.rates_per_s, state.alpha.point, state.prices
    num_spot = int(on_spot.sum())
    spot_rate = float(rates[on_spot].sum())
    sure_rate = slack.total_per_s - spot_rate
    moving = on_spot != state.on_spot
    work = slack.work + slack.boot_lost + settings.boot_s * float(rates[moving].sum())
    always = (
        market_rules.covered_at_once(on_spot, state, settings) if settings.rule == "pace" else np.zeros_like(on_spot)
    )
    rate = sure_rate + alpha * spot_rate + (1 - alpha) * float(rates[always].sum())
    left_s = settings.deadline_s - state.elapsed_s
    kept_s = work / rate if rate > 0 else math.inf
    covers = settings.rule == "pace" and kept_s > slack.time_s > 0
    end_s = max(slack.time_s, work / slack.total_per_s) if covers else kept_s
    if math.isinf(end_s):
        return Forecast(math.inf, 0.0, math.inf, 0.0, 1.0, settings.budget_usd is not None)

    # Samples by which spot's outages, and the uncertainty of α, change the expected work by then.
    squares = float((rates[on_spot] ** 2).sum())
    sigma_alpha = (state.alpha.high - state.alpha.low) / (2 * _Z_INTERVAL)
    unsure_alpha = (spot_rate * end_s * sigma_alpha) ** 2
    outages_var = squares * uptime_variance_s2(end_s, alpha, settings.cycle_s) + unsure_alpha
    arrivals_var = slack.total_per_s * end_s
    on_demand_h = (len(rates) - num_spot) * end_s / SECONDS_PER_HOUR
    cost = on_demand_h * prices.on_demand_usd_per_h
    cost_sd = 0.0
    if num_spot:
        covered = _covered(rates[on_spot], work - sure_rate * end_s, alpha, end_s) if covers else float(always.sum())
        cost += alpha * num_spot * end_s / SECONDS_PER_HOUR * prices.spot_usd_per_h
        cost += covered * market_rules.covering_usd_per_h(state, settings) * end_s / SECONDS_PER_HOUR
        if covers:
            dearer = prices.on_demand_usd_per_h - prices.spot_usd_per_h
            cost_sd = abs(dearer) * math.sqrt(outages_var) * num_spot / spot_rate / SECONDS_PER_HOUR
    if covers:
        finish_sd = math.sqrt(arrivals_var) / slack.total_per_s
    else:
        finish_sd = math.sqrt(outages_var + arrivals_var) / rate
        # While the job runs longer, on-demand workers cost more and the work on spot gets less: see docs/theory.md.
        saved = sure_rate / (spot_rate / num_spot) * prices.spot_usd_per_h if num_spot else 0.0
        burn = (len(rates) - num_spot) * prices.on_demand_usd_per_h - saved
        cost_sd = abs(burn) * finish_sd / SECONDS_PER_HOUR

    if left_s <= 0:
        miss = 1.0
    elif settings.guard or settings.rule == "pace":
        # The guard holds (1 - margin) θ against every outage; arrivals can only eat what lies beyond.
        spare = slack.total_per_s * left_s - slack.work - slack.boot_lost
        miss = tail(min(spare, slack.total_per_s * left_s) / math.sqrt(slack.total_per_s * left_s))
        if covers and spare > 0:
            miss = tail(settings.margin * settings.deadline_s * slack.total_per_s / math.sqrt(arrivals_var))
    else:
        noise = slack.total_per_s * left_s + (spot_rate * left_s * sigma_alpha) ** 2
        miss = shortfall_prob(work - sure_rate * left_s, rates[on_spot], alpha, settings.cycle_s, left_s, noise)
    total = state.spent_usd + cost
    return Forecast(
        expected_cost_usd=total,
        cost_sd_usd=cost_sd,
        expected_finish_s=state.elapsed_s + end_s,
        finish_sd_s=finish_sd,
        miss_prob=miss,
        over_budget=settings.budget_usd is not None and total > settings.budget_usd * (1 + 1e-9),
    )


def _covered(rates_per_s: Floats, needed: float, alpha: float, end_s: float) -> float:
    """Return the mean number of spot workers (with these rates) whose outages must be covered on-demand, so that the
    workers learn `needed` samples by `end_s`. The fastest workers are covered first."""
    fastest_first = np.sort(rates_per_s)[::-1]
    missing = needed / end_s - alpha * np.sum(fastest_first)
    if missing <= 0 or alpha >= 1:
        return 0.0
    others = np.cumsum(fastest_first) - fastest_first
    return float(np.clip((missing / (1 - alpha) - others) / fastest_first, 0.0, 1.0).sum())


class Reason(enum.IntEnum):
    """A reason for the market of a slot, with its text for people."""

    text: str
    KEEP_SPOT = 0, "spot is cheaper and the slack can bear its loss"
    WAIT = 1, "spot is down; the slack allows to wait for it"
    RETURN = 2, "spot has been available for {dwell:g} s and the slack pays for the move"
    KEEP_ON_DEMAND = 3, "stays on-demand: spot is down, or not back for long enough, or the slack is needed"
    COVER = 4, "to on-demand: without it the remaining work would not be done in time at the expected pace"
    GUARD = 5, "on-demand by the guard: if all of spot went down now, the deadline would be missed"
    PRICE = 6, "on-demand: not cheaper on spot at the current prices"
    LATE = 7, "on-demand: the deadline cannot be met any more, this is the soonest"
    DONE = 8, "the work is done"
    MIX = 9, "as at the start: the rule is a fixed mix"

    def __new__(cls, code: int, text: str) -> Self:
        """Create a member whose value is its code."""
        member = int.__new__(cls, code)
        member._value_, member.text = code, text
        return member


@dataclass(frozen=True)
class Plan:
    """The markets of all slots, with a forecast.

    Attributes:
        on_spot: bool, shape (N,): True for spot.
        moved: bool, shape (N,): slots whose market changes by this plan.
        reason_codes: int8, shape (N,): values of `Reason`.
        binding: the binding constraint: "none" (all on spot), "deadline", "guard", "price", "late", "mix" or "done".
        slack_s: spare time in seconds of the whole fleet, if all slots were on-demand from now on; negative if late.
    """

    on_spot: Bools
    moved: Bools
    reason_codes: npt.NDArray[np.int8]
    feasible: bool
    binding: str
    slack_s: float
    _state: PlannerState = field(repr=False)
    _settings: PlannerSettings = field(repr=False)
    _slack: Slack = field(repr=False)

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """The reason for the market of each slot, one sentence per slot."""
        every = tuple(Reason)  # in the order of their codes
        return tuple(every[code].text.format(dwell=self._settings.dwell) for code in self.reason_codes)

    @cached_property
    def forecast(self) -> Forecast:
        """The forecast: expected cost and end with their spread, and P(miss). It is computed on access."""
        return forecast(self.on_spot, self._state, self._settings, self._slack)


def plan(state: PlannerState, settings: PlannerSettings) -> Plan:
    """Choose the market of every slot for the next `settings.replan_s` seconds.

    If the deadline can be met at the first call, it is met under these conditions: `settings.guard` is set, on-demand
    workers boot within `boot_s`, streams keep their rates, and the planner is called every `replan_s`.
    """
    if settings.rule == "mix":
        return _keep(state, settings)
    return _decide(state, settings, settings.boot_s)


def start(state: PlannerState, settings: PlannerSettings) -> Plan:
    """Return the first plan of a job. Nothing runs yet, so no slot has a market to keep and no choice is a move.

    `state.on_spot` and `state.up` are ignored: every slot may start in its best market.
    """
    ones = np.ones(state.num_workers, dtype=np.bool_)
    if settings.rule == "mix":
        settings = replace(settings, rule="theorem", guard=False)
    chosen = _decide(replace(state, on_spot=ones, up=ones), settings, 0.0)
    begun = replace(state, on_spot=chosen.on_spot, up=ones)
    return replace(chosen, moved=~ones, _state=begun)


def slot_ranges(slots: Sequence[int], most: int = 12) -> str:
    """Return ascending slot numbers as text for people.

    >>> slot_ranges([0, 1, 2, 3, 7, 9, 10])
    '0-3, 7, 9-10'
    """
    runs: list[list[int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot - 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(shown[:most]) + (f", ... ({len(slots)} in all; --json lists them)" if len(shown) > most else "")


_RULES = {"pace": market_rules.pace, "theorem": market_rules.theorem}


def _keep(state: PlannerState, settings: PlannerSettings) -> Plan:
    """Return a plan in which every slot keeps its market. Deadline and price have no influence."""
    slack = Slack.compute(state, settings)
    reason, binding = (Reason.DONE, "done") if slack.work <= 0 else (Reason.MIX, "mix")
    if slack.work > 0 and slack.total_per_s * (settings.deadline_s - state.elapsed_s) < slack.work:
        binding = "late"
    return _plan(state, settings, slack, state.on_spot, np.full(state.num_workers, reason, np.int8), binding)


def _decide(state: PlannerState, settings: PlannerSettings, move_s: float) -> Plan:
    slack = Slack.compute(state, settings)
    count = state.num_workers
    if slack.work <= 0:
        return _plan(state, settings, slack, state.on_spot, np.full(count, Reason.DONE, np.int8), "done")
    if slack.spare_samples < 0:
        # The margin may be used up; the deadline is lost only after it.
        late = slack.spare_samples + slack.total_per_s * settings.margin * settings.deadline_s < 0
        code, binding = (Reason.LATE, "late") if late else (Reason.GUARD, "guard")
        return _plan(state, settings, slack, np.zeros(count, np.bool_), np.full(count, code, np.int8), binding)
    # Waiting for spot costs nothing at any price: the price only moves slots that run or would run.
    worth = market_rules.cheaper_on_spot(state) | (state.on_spot & ~state.spot_available)
    none = np.zeros(count, dtype=np.bool_)
    wanted = _RULES[settings.rule](state, settings, slack, worth) & worth
    chosen, guarded = deadline_guard(state, settings, slack, wanted, move_s) if settings.guard else (wanted, none)
    codes = np.where(chosen, Reason.KEEP_SPOT, Reason.KEEP_ON_DEMAND).astype(np.int8)
    codes[chosen & ~state.spot_available] = Reason.WAIT
    codes[chosen & ~state.on_spot] = Reason.RETURN
    codes[~chosen & state.on_spot] = Reason.COVER
    codes[~worth] = Reason.PRICE
    # If the guard refused a return, the slot stays; the guard has not moved it.
    codes[guarded & state.on_spot] = Reason.GUARD
    if guarded.any():
        binding = "guard"
    elif chosen.all():
        binding = "none"
    else:
        binding = "deadline" if (~chosen & worth).any() else "price"
    return _plan(state, settings, slack, chosen, codes, binding)


def _plan(
    state: PlannerState,
    settings: PlannerSettings,
    slack: Slack,
    on_spot: Bools,
    codes: npt.NDArray[np.int8],
    binding: str,
) -> Plan:
    return Plan(
        on_spot=on_spot,
        moved=on_spot != state.on_spot,
        reason_codes=codes,
        feasible=binding != "late",
        binding=binding,
        slack_s=slack.spare_samples / slack.total_per_s,
        _state=state,
        _settings=settings,
        _slack=slack,
    )
