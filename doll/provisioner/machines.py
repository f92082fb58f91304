"""The fleet that a job file names, with its prices: the one place that knows all kinds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.provisioner.billing import BillingRule
    from doll.provisioner.controller import Probe
    from doll.provisioner.fleets.ec2.placement import Ec2Placement
    from doll.provisioner.fleets.port import Fleet, Instance
    from doll.provisioner.prices.port import PriceFeed
    from doll.run.folder import RunFolder
    from doll.services import Services


@dataclass(frozen=True)
class Machines:
    """A fleet and what belongs to it.

    Attributes:
        probe: who can tell whether spot is to be had; None on a real market.
        billing: how its owner counts.
        placement: where spot is likely, for people; None where nobody says, or the job does not ask.
    """

    fleet: Fleet
    prices: PriceFeed
    billing: BillingRule
    probe: Probe | None = None
    placement: Ec2Placement | None = None


@contextmanager
def machines_of(config: JobConfig, services: Services, run: RunFolder) -> Iterator[Machines]:
    """The machines of the job.

    Raises:
        ConfigError: the fleet cannot be used as the job file describes it.
    """
    kind: Any = config.fleet.kind
    if kind == "ec2":
        from doll.provisioner.billing import EC2_LINUX
        from doll.provisioner.fleets.ec2 import fleet as ec2_fleet
        from doll.provisioner.fleets.ec2 import placement as ec2_placement
        from doll.provisioner.prices import ec2 as ec2_prices

        fleet = ec2_fleet.connect(config)
        try:
            prices = ec2_prices.connect(config, fleet, run_folder=run.path)
            yield Machines(fleet, prices, EC2_LINUX, placement=ec2_placement.connect(config, fleet))
        finally:
            fleet.close()
    elif kind == "compose":
        yield from _compose(config)
    else:
        with ExitStack() as started:
            yield _processes(config, services, run, started)


def _compose(config: JobConfig) -> Iterator[Machines]:
    from doll.provisioner.billing import LOCAL
    from doll.provisioner.fleets import compose as compose_fleet

    fleet = compose_fleet.connect(config)
    try:
        yield Machines(fleet, stated_prices(config), LOCAL)
    finally:
        fleet.close()


def _processes(config: JobConfig, services: Services, run: RunFolder, started: ExitStack) -> Machines:
    """Worker processes of this machine on a replayed market, which opens now. They end with this process."""
    import time

    from doll.cli.spot import make_market
    from doll.config import ProcessesFleetConfig
    from doll.local.forks import ForkServer
    from doll.local.supervisor import RoleSpec
    from doll.provisioner.billing import LOCAL
    from doll.provisioner.fleets.processes import ProcessFleet
    from doll.provisioner.prices.trace import TracePrices
    from doll.provisioner.traces.market import MarketClock

    assert isinstance(config.fleet, ProcessesFleetConfig)
    market, _ = make_market(config, config.fleet, config.seed)
    run.logs.mkdir(parents=True, exist_ok=True)
    run.write_job(config)
    forks = started.enter_context(ForkServer(run.logs / "forkserver.log"))
    clock = MarketClock()
    clock.open(time.time())

    def spec(one: Instance) -> RoleSpec:
        arguments = [str(run.job), services.kafka, services.redis, str(run.path), one.slot]
        return RoleSpec(one.id, "doll.run.roles:worker_role", run.logs / f"{one.id}.log", arguments)

    fleet = ProcessFleet(
        forks, spec, run.path, market=market, market_clock=clock, boot_s=config.fleet.boot_s,
        drain_s=config.worker.drain_s, job=config.job,
    )  # fmt: skip
    started.callback(fleet.close)

    class MarketProbe:
        def spot_available(self, slot: int) -> bool | None:
            return market.is_up(slot, clock.since(time.time()))

    return Machines(fleet, TracePrices(market, clock), LOCAL, MarketProbe())


def stated_prices(config: JobConfig) -> PriceFeed:
    """The prices of the job file's plan section, which never change.

    Raises:
        ConfigError: it states none.
    """
    from doll.errors import ConfigError
    from doll.provisioner.prices.stated import StatedPrices

    plan = config.plan
    if plan.spot_usd_per_h is None or plan.on_demand_usd_per_h is None:
        raise ConfigError("expected plan.spot_usd_per_h and plan.on_demand_usd_per_h: nobody else knows these prices")
    return StatedPrices(plan.spot_usd_per_h, plan.on_demand_usd_per_h)
