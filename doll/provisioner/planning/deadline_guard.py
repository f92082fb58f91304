"""The deadline guard: it moves slots to on-demand in time, although spot is cheaper. Pure."""

from __future__ import annotations

import numpy as np

from doll.provisioner.planning.market_rules import Slack, boot_left_s
from doll.provisioner.planning.state import Bools, PlannerSettings, PlannerState


def deadline_guard(
    state: PlannerState, settings: PlannerSettings, slack: Slack, wanted: Bools, move_s: float
) -> tuple[Bools, Bools]:
    """Apply the deadline guard: move slots off spot if the deadline cannot afford their loss.

    Worst case: all spot slots go down now, the planner sees this after `detection_delay` seconds, and all of them must
    boot on-demand. Then each slot on spot loses rate * (detection delay + boot) samples. A slot that is down loses rate
    * (planning period + boot) samples, and a slot that moves now loses rate * boot samples. Slots leave spot until the
    remaining slack is enough for these losses: first slots that would return to spot, then slots that are down or boot
    there, then the fastest slots. A slot stays on spot if leaving would not reduce its loss.

    `move_s` is the cost of a move now: the boot time, or 0 if nothing runs yet. Returns the markets (True: spot), and
    the slots whose market the guard changed.
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
