"""What a choice of markets leads to: expected cost and finish with their spread, and the chance of being late."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from doll.provisioner.planning import market_rules
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
    """Of the whole job, what is spent included. Spreads are standard deviations.

    Attributes:
        expected_cost_usd, cost_sd_usd: cost of the workers until the job ends.
        expected_finish_s, finish_sd_s: end of the job on its clock.
        miss_prob: probability of ending after the deadline. With the guard only the noise of arrivals is left in it.
    """

    expected_cost_usd: float
    cost_sd_usd: float
    expected_finish_s: float
    finish_sd_s: float
    miss_prob: float
    over_budget: bool

    def to_dict(self) -> dict[str, float | bool]:
        return asdict(self)


def forecast(on_spot: Bools, state: PlannerState, settings: PlannerSettings, slack: Slack) -> Forecast:
    """Forecast for the markets `on_spot`.

    Rules "theorem" and "mix" keep the mix, so the end moves with spot's luck (Theorem 4, Eq. (15)-(16), (21)-(22)).
    Rule "pace" covers what spot does not deliver in time, so the end is the deadline at the latest and luck moves the
    cost.
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

    # Samples that spot's outages, and not knowing α, add to or take from the expected work by then.
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
    """How many of the workers on spot, in the mean, have their outages covered on-demand, the fastest first.

    Args:
        rates_per_s: rates of the workers on spot.
        needed: samples that these workers have to make by `end_s`.
    """
    fastest_first = np.sort(rates_per_s)[::-1]
    missing = needed / end_s - alpha * np.sum(fastest_first)
    if missing <= 0 or alpha >= 1:
        return 0.0
    others = np.cumsum(fastest_first) - fastest_first
    return float(np.clip((missing / (1 - alpha) - others) / fastest_first, 0.0, 1.0).sum())
