"""The spot market that a job file describes: a recorded pool or a Markov chain, and the controller's probe of it."""

from __future__ import annotations

from collections.abc import Callable

from doll.config import JobConfig, PlanConfig, ProcessesFleetConfig
from doll.errors import ConfigError
from doll.provisioner.traces.gangs import pool_of_workers
from doll.provisioner.traces.market import SpotMarket
from doll.provisioner.traces.recordings import pool_of
from doll.theory.cost import Prices


def make_market(config: JobConfig, fleet: ProcessesFleetConfig, seed: int) -> tuple[SpotMarket, PlanConfig]:
    """The job file's market, and its plan with the market's own availability (of a worker) and prices (of a machine).

    Raises:
        ConfigError: the trace or the pool does not exist, or prices are missing.
    """
    plan, slots, machines = config.plan, config.data.workers, config.machines_per_worker
    if fleet.trace is None:
        if plan.spot_usd_per_h is None or plan.on_demand_usd_per_h is None:
            raise ConfigError("expected plan.spot_usd_per_h and plan.on_demand_usd_per_h, or a trace")
        one_by_one = plan.availability_of == "machine"
        market = SpotMarket.chain(
            slots, Prices(plan.spot_usd_per_h, plan.on_demand_usd_per_h), alpha=plan.alpha, cycle_s=plan.cycle_s,
            speed_up=fleet.speed_up, notice_s=fleet.notice_s, no_notice_share=fleet.no_notice_share, seed=seed,
            machines_per_slot=machines, one_by_one=one_by_one,
        )  # fmt: skip
        return market, plan
    pool = pool_of_workers(pool_of(config.path(fleet.trace), fleet.pool, "fleet.pool"), machines, slots)
    market = SpotMarket.replay(
        pool, slots, length_s=plan.deadline_s or 0.0, speed_up=fleet.speed_up, notice_s=fleet.notice_s,
        no_notice_share=fleet.no_notice_share, seed=seed, machines_per_slot=machines,
    )  # fmt: skip
    section = plan.model_copy(
        update={
            "alpha": pool.alpha, "cycle_s": pool.cycle_s, "availability_of": "worker",
            "spot_usd_per_h": pool.price.mean(pool.start_s, pool.end_s),
            "on_demand_usd_per_h": pool.on_demand_usd_per_hour,
        }
    )  # fmt: skip
    return market, section


class MarketProbe:
    """`SpotProbe` of a replayed market.

    Args:
        since: seconds since the market's opening, now.
    """

    def __init__(self, market: SpotMarket, since: Callable[[], float]) -> None:
        self._market = market
        self._since = since

    def spot_available(self, slot: int) -> bool | None:
        return self._market.is_up(slot, self._since())
