"""Keep a plan within the budget: more slots on spot, and a reserve for machines that cannot end at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from doll.provisioner.billing import BillingRule
from doll.provisioner.planning.state import Bools, PlannerSettings, PlannerState
from doll.theory.cost import SECONDS_PER_HOUR, Prices, unequal_cost_usd

_RESERVE_TURNS = 3  # a running machine goes on for some turns whatever is decided


@dataclass(frozen=True)
class BudgetFit:
    """A choice of markets that the budget enforces.

    Attributes:
        on_spot: bool, shape (N,): True for spot.
        short: not even the cheapest choice is within the budget.
    """

    on_spot: Bools
    expected_cost_usd: float
    expected_finish_s: float
    short: bool


def fit_to_budget(
    on_spot: Bools, state: PlannerState, planner: PlannerSettings, *, reserve_usd: float
) -> BudgetFit | None:
    """The plan `on_spot` with as many more slots on spot as the budget needs; None where it needs none.

    Where no choice is within the budget, the cheapest one: the work goes on until the budget is spent.

    Args:
        reserve_usd: held back per machine, see `reserve_usd`.
    """
    work = planner.samples - state.samples_done
    if planner.budget_usd is None or work <= 0:
        return None
    rates, alpha, prices = state.rates_per_s, max(state.alpha.point, 1e-3), state.prices
    # While a slot moves, two machines are paid. Without that cost plans alternate at the edge of the budget.
    moves = np.maximum(0, np.count_nonzero(state.on_spot) - np.arange(len(rates) + 1))
    twice_usd = moves * prices.on_demand_usd_per_h * 2 * planner.boot_s / SECONDS_PER_HOUR
    costs = state.spent_usd + unequal_cost_usd(work, rates, alpha, prices) + twice_usd
    enough = np.flatnonzero(costs <= planner.budget_usd - len(rates) * reserve_usd)
    fewest = int(enough[0]) if enough.size else int(np.argmin(costs))
    missing = fewest - int(np.count_nonzero(on_spot))
    if missing <= 0 and enough.size:
        return None
    order = [slot for slot in np.argsort(rates, kind="stable").tolist() if not on_spot[slot]]
    # Slots that are on spot now stay there first.
    order.sort(key=lambda slot: not state.on_spot[slot])
    chosen = on_spot.copy()
    chosen[order[: max(0, missing)]] = True
    rate = float(rates[~chosen].sum() + alpha * rates[chosen].sum())
    return BudgetFit(chosen, float(costs[fewest]), state.elapsed_s + work / rate, short=not enough.size)


def reserve_usd(prices: Prices, replan_s: float, billing: BillingRule) -> float:
    """Held back for each machine, USD at the higher price: it runs on for some turns whatever is decided."""
    seconds = max(_RESERVE_TURNS * replan_s, billing.billed_s(0.0))
    return max(prices.spot_usd_per_h, prices.on_demand_usd_per_h) * seconds / SECONDS_PER_HOUR
