"""The fleet that a job file names, with its prices and its billing: where a new kind of fleet is added.

Worker processes of this machine (`fleet.kind: processes`) need a fork server: `doll.run.provisioning` adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.provisioner.billing import EC2_LINUX, LOCAL, BillingRule
from doll.provisioner.fleets import compose
from doll.provisioner.fleets.ec2 import fleet as ec2_fleet
from doll.provisioner.fleets.ec2 import placement as ec2_placement
from doll.provisioner.fleets.kubernetes import fleet as kubernetes_fleet
from doll.provisioner.fleets.port import Fleet, SpotProbe
from doll.provisioner.fleets.ray import fleet as ray_fleet
from doll.provisioner.prices import ec2 as ec2_prices
from doll.provisioner.prices.port import PriceFeed, StatedPrices


@dataclass(frozen=True)
class Machines:
    """A fleet and what belongs to it.

    Attributes:
        probe: can tell whether spot is available; None on a real market.
        billing: how the owner of the machines bills; the controller's bills and budget follow it.
        placement: EC2's scores of where spot is likely; None elsewhere, or where the job does not ask for them.
    """

    fleet: Fleet
    prices: PriceFeed
    billing: BillingRule
    probe: SpotProbe | None = None
    placement: ec2_placement.Ec2Placement | None = None


def check_machines(config: JobConfig) -> None:
    """Whether there is an opener for the job's fleet, and it can launch the job's workers.

    Raises:
        ConfigError: there is none, or it launches machines one by one where a worker has several.
    """
    if config.fleet.kind not in OPENERS:
        raise ConfigError(f"fleet.kind: expected {' or '.join(OPENERS)}, got {config.fleet.kind}")
    if (machines := config.machines_per_worker) > 1:
        raise ConfigError(
            f"plan.machines_per_worker: expected 1 with fleet.kind: {config.fleet.kind}, got {machines}: this fleet "
            "launches machines one by one, and cannot keep those of a worker together; fleet.kind: processes can. "
            "Where all stages of a worker run on one machine of this fleet, set plan.machines_per_worker: 1"
        )


def open_machines(config: JobConfig, run_folder: Path) -> AbstractContextManager[Machines]:
    """The machines of a job whose fleet has an opener.

    Args:
        run_folder: where a fleet may keep files, e.g. a cache of prices.

    Raises:
        ConfigError: the fleet cannot be used as the job file describes it, has no opener, or launches machines one by
            one where a worker has several.
    """
    check_machines(config)
    return OPENERS[config.fleet.kind](config, run_folder)


@contextmanager
def _open_ec2(config: JobConfig, run_folder: Path) -> Iterator[Machines]:
    with closing(ec2_fleet.connect(config)) as fleet:
        prices = ec2_prices.connect(config, fleet, run_folder=run_folder)
        yield Machines(fleet, prices, EC2_LINUX, placement=ec2_placement.connect(config, fleet))


@contextmanager
def _open_compose(config: JobConfig, run_folder: Path) -> Iterator[Machines]:
    with closing(compose.connect(config)) as fleet:
        yield Machines(fleet, stated_prices(config), LOCAL)


@contextmanager
def _open_kubernetes(config: JobConfig, run_folder: Path) -> Iterator[Machines]:
    with closing(kubernetes_fleet.connect(config)) as fleet:
        yield Machines(fleet, stated_prices(config), LOCAL)


@contextmanager
def _open_ray(config: JobConfig, run_folder: Path) -> Iterator[Machines]:
    with closing(ray_fleet.connect(config)) as fleet:
        yield Machines(fleet, stated_prices(config), LOCAL)


def stated_prices(config: JobConfig) -> PriceFeed:
    """The prices of the job file's plan section, which never change.

    Raises:
        ConfigError: it states none.
    """
    plan = config.plan
    if plan.spot_usd_per_h is None or plan.on_demand_usd_per_h is None:
        raise ConfigError("expected plan.spot_usd_per_h and plan.on_demand_usd_per_h: this fleet has no price list")
    return StatedPrices(plan.spot_usd_per_h, plan.on_demand_usd_per_h)


OPENERS: dict[str, Callable[[JobConfig, Path], AbstractContextManager[Machines]]] = {
    "ec2": _open_ec2,
    "compose": _open_compose,
    "kubernetes": _open_kubernetes,
    "ray": _open_ray,
}
"""What opens the machines of each `fleet.kind`, but worker processes. A new fleet adds its opener here."""
