"""The fleet of a job file, with its prices and billing rule. A new kind of fleet is added to `OPENERS`; it
implements `fleets.port.Fleet`.

Worker processes on this machine (`fleet.kind: processes`) need a fork server, and are in `doll.run.local.provisioning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.provisioner.billing import AWS_LAMBDA, EC2_LINUX, LOCAL, BillingRule
from doll.provisioner.fleets import compose
from doll.provisioner.fleets.aws_lambda import fleet as lambda_fleet
from doll.provisioner.fleets.ec2 import account as ec2_account
from doll.provisioner.fleets.ec2 import fleet as ec2_fleet
from doll.provisioner.fleets.kubernetes import fleet as kubernetes_fleet
from doll.provisioner.fleets.port import Fleet, SpotProbe
from doll.provisioner.fleets.ray import fleet as ray_fleet
from doll.provisioner.prices import ec2 as ec2_prices
from doll.provisioner.prices.port import PriceFeed, StatedPrices

Opener = Callable[[JobConfig, Path], AbstractContextManager["Machines"]]


@dataclass(frozen=True)
class Machines:
    """A fleet with its prices and billing rule.

    Attributes:
        probe: function that returns whether spot is available; None on a real market.
        billing: billing rule of the owner of the machines. The controller computes bills with it.
        placement: EC2's spot placement scores; None for other fleets, or if the job does not request the scores.
    """

    fleet: Fleet
    prices: PriceFeed
    billing: BillingRule
    probe: SpotProbe | None = None
    placement: ec2_account.Ec2Placement | None = None


def check_machines(config: JobConfig) -> None:
    """Raise ConfigError if the job's fleet has no opener, or cannot launch the machines of a worker together."""
    kind, machines, pipeline = config.fleet.kind, config.machines_per_worker, config.worker.pipeline
    if kind not in OPENERS:
        raise ConfigError(f"fleet.kind: expected {' or '.join(OPENERS)}, got {kind}")
    if machines == 1:
        return
    if pipeline is None or not pipeline.remote:
        raise ConfigError(
            f"plan.machines_per_worker: expected 1 with fleet.kind: {kind}, got {machines}: this fleet "
            "launches machines one by one, and cannot keep those of a worker together; fleet.kind: processes can. "
            "Where all stages of a worker run on one machine of this fleet, set plan.machines_per_worker: 1"
        )
    if kind != "kubernetes":
        raise ConfigError(
            f"fleet.kind: {kind} with worker.pipeline.remote: this fleet launches machines one by one, and cannot keep "
            "a worker and its stages together; fleet.kind: kubernetes can. If you start the stages yourself "
            "(doll stage), set plan.machines_per_worker: 1"
        )
    if machines != pipeline.stages + 1:
        raise ConfigError(
            f"plan.machines_per_worker: expected {pipeline.stages + 1} with worker.pipeline.remote (the stages and "
            f"their worker; 1: you start the stages yourself), got {machines}"
        )


def open_machines(config: JobConfig, run_folder: Path) -> AbstractContextManager[Machines]:
    """Open the machines of a job whose fleet has an opener. A fleet may keep files, such as a cache of prices, in the
    run folder. Raises ConfigError if the fleet cannot be used as the job file describes it, see `check_machines`."""
    check_machines(config)
    return OPENERS[config.fleet.kind](config, run_folder)


@contextmanager
def _open_ec2(config: JobConfig, run_folder: Path) -> Iterator[Machines]:
    with closing(ec2_fleet.connect(config)) as fleet:
        prices = ec2_prices.connect(config, fleet, run_folder=run_folder)
        yield Machines(fleet, prices, EC2_LINUX, placement=ec2_account.connect(config, fleet))


@contextmanager
def _open_lambda(config: JobConfig, run_folder: Path) -> Iterator[Machines]:
    with closing(lambda_fleet.connect(config)) as fleet:
        usd_per_h = fleet.settings.usd_per_h  # functions have one market: with equal prices, spot is never chosen
        yield Machines(fleet, StatedPrices(usd_per_h, usd_per_h), AWS_LAMBDA)


def _at_stated_prices(connect: Callable[[JobConfig], Fleet]) -> Opener:
    """Return the opener of a fleet whose prices the job file states."""

    @contextmanager
    def open_fleet(config: JobConfig, run_folder: Path) -> Iterator[Machines]:
        with closing(connect(config)) as fleet:
            yield Machines(fleet, stated_prices(config), LOCAL)

    return open_fleet


def stated_prices(config: JobConfig) -> PriceFeed:
    """Return the constant prices of the job file's plan section. Raises ConfigError if the section states none."""
    plan = config.plan
    if plan.spot_usd_per_h is None or plan.on_demand_usd_per_h is None:
        raise ConfigError("expected plan.spot_usd_per_h and plan.on_demand_usd_per_h: this fleet has no price list")
    return StatedPrices(plan.spot_usd_per_h, plan.on_demand_usd_per_h)


OPENERS: dict[str, Opener] = {
    "ec2": _open_ec2,
    "compose": _at_stated_prices(compose.connect),
    "kubernetes": _at_stated_prices(kubernetes_fleet.connect),
    "ray": _at_stated_prices(ray_fleet.connect),
    "lambda": _open_lambda,
}
"""The openers of each `fleet.kind`, except worker processes. A new fleet adds its opener here."""
