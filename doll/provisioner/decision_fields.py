"""Fields of a `Decision` that do not depend on what was decided. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from doll.provisioner.billing import Bill, all_on_demand_usd, usd_per_error_point
from doll.provisioner.launch_state import LaunchState
from doll.provisioner.market_plan import MarketPlan
from doll.provisioner.observation import Observed
from doll.provisioner.settings import ControllerSettings
from doll.theory.checks import Floats
from doll.theory.cost import Prices


def common_fields(
    settings: ControllerSettings, observed: Observed, plan: MarketPlan, launch_state: LaunchState, *, bill: Bill,
    rates_per_s: Floats, prices: Prices | None, turn: int, now_s: float, started_s: float | None, interruptions: int,
    alarms: Sequence[str], dry_run: bool,
) -> dict[str, Any]:  # fmt: skip
    """Where the job stands, what it has cost, and what people must know.

    Args:
        prices: of a worker with all of its machines; None: not known.
        started_s: when the job's clock began; None: it has not.
    """
    planner = plan.planner
    samples_done = plan.samples_done(observed)
    on_demand_usd = math.nan
    if prices is not None:
        on_demand_usd = all_on_demand_usd(samples_done, rates_per_s, prices.on_demand_usd_per_h)
    _, errors = observed.errors(settings.measure)
    return {
        "turn": turn,
        "now_s": now_s,
        "started_s": now_s if started_s is None else started_s,
        "incarnations": tuple(launch_state.incarnation(slot) for slot in range(settings.num_slots)),
        "bill": bill,
        "samples_done": samples_done,
        "target_samples": planner.samples,
        "updates_done": observed.version,
        "target_updates": planner.updates,
        "all_on_demand_usd": on_demand_usd,
        "cycle_s": observed.spot.cycle_s,
        "prices": prices,
        "machines_per_worker": settings.machines_per_worker,
        "rates_per_s": rates_per_s,
        "usd_per_error_point": usd_per_error_point(bill.usd, errors[0], errors[-1]) if errors else math.nan,
        "moves": plan.moves,
        "interruptions": interruptions,
        "alarms": tuple(dict.fromkeys(alarms)),
        "dry_run": dry_run,
    }
