"""The clairvoyant optimum of a job in several regions: the lowest cost of any schedule, with boots and moves.

Slots have equal rates and meet only in the work, so the optimum has two exact steps. A dynamic programme over the ticks
gives the lowest cost for each number of working ticks of a slot. The costs of the slots are then added by a min-plus
convolution. Schedules decide at ticks, as policies do. `boot_s` is a multiple of the tick, so that each tick of a
machine either boots or works.
"""

from __future__ import annotations

import numpy as np
from doll.errors import ConfigError
from doll.provisioner.planning.state import Bools
from doll.theory.checks import Floats


def boot_ticks(boot_s: float, tick_s: float) -> int:
    """Return the ticks of a boot. Raises ConfigError if it is not a multiple of the tick."""
    ticks = round(boot_s / tick_s)
    if abs(ticks * tick_s - boot_s) > 1e-6:
        raise ConfigError(
            f"--boot: expected a multiple of --tick with --regions, because the optimum decides at ticks; got "
            f"{boot_s:g} s and {tick_s:g} s"
        )
    return ticks


def slot_costs(up: Bools, usd: Floats, on_demand_usd: float, start_usd: Floats, boot: int) -> Floats:
    """Return the lowest cost of 0 .. T working ticks of each slot, shape (N, T + 1); infinite if impossible.

    Args:
        up: whether spot is available in region r, shape (R, T, N).
        usd: cost of a tick on spot in region r, shape (R, T).
        on_demand_usd: cost of a tick on-demand.
        start_usd: cost of a start in each region and, last, on-demand; shape (R + 1,).
        boot: ticks of a boot. Machines of the first tick work at once, and their starts are free.
    """
    regions, ticks, slots = up.shape
    machines = regions + 1  # the last one is on-demand
    off = np.full((slots, ticks + 1), np.inf)
    off[:, 0] = 0.0
    # state[m, k]: machine m with k ticks of its boot left.
    state = np.full((machines, max(boot, 1), slots, ticks + 1), np.inf)
    for tick in range(ticks):
        idle = np.minimum(off, state.min(axis=(0, 1)))
        following = np.full_like(state, np.inf)
        for machine in range(machines):
            price = on_demand_usd if machine == regions else usd[machine, tick]
            can = np.ones(slots, dtype=np.bool_) if machine == regions else up[machine, tick]
            here = state[machine]
            fresh = idle + (0.0 if tick == 0 else start_usd[machine])
            ready = fresh if boot == 0 or tick == 0 else None
            works = here[0] if ready is None else np.minimum(here[0], ready)
            after = following[machine]
            after[0, :, 1:] = works[:, :-1] + price
            for left in range(1, boot):
                np.minimum(after[left - 1], here[left] + price, out=after[left - 1])
            if ready is None:
                np.minimum(after[boot - 1], fresh + price, out=after[boot - 1])
            after[:, ~can] = np.inf
        off, state = idle, following
    lowest: Floats = np.minimum(off, state.min(axis=(0, 1)))
    return lowest


def fleet_cost(costs: Floats, work: int) -> float:
    """Return the lowest cost of `work` working ticks of all slots together; infinite if there are not as many.

    `costs` is the result of `slot_costs`. More work than asked for is allowed: the cost of a slot for w ticks is taken
    as the lowest of w or more.
    """
    at_least = np.minimum.accumulate(costs[:, ::-1], axis=1)[:, ::-1]
    total = np.full(work + 1, np.inf)
    total[0] = 0.0
    for slot in at_least:
        combined = total + slot[0]
        for done in range(1, min(len(slot), work + 1)):
            np.minimum(combined[done:], total[:-done] + slot[done], out=combined[done:])
        total = combined
    return float(total[work])
