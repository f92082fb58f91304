"""The price tables that ship with DOLL. Plans and estimates use them if there is no AWS account or AWS does not answer.

`ec2_on_demand.csv` has on-demand prices of us-east-1. `ec2_regions.csv` has both prices of a few types and regions.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from doll.amounts import usd
from doll.config import Ec2FleetConfig, JobConfig, PlanConfig
from doll.config.provision import Service, ServicesConfig
from doll.errors import ConfigError
from doll.theory.cost import SECONDS_PER_HOUR, Prices

DEFAULT_INSTANCE: Final = "c7g.large"  # 2 vCPUs, of the cheapest in USD per vCPU
DEFAULT_REGION: Final = "us-east-1"
TABLES: Final = ("ec2_on_demand.csv", "ec2_regions.csv")


@dataclass(frozen=True)
class OnDemandPrice:
    """A price in USD per hour, its source and its date."""

    usd_per_h: float
    source: str
    as_of: str


@dataclass(frozen=True)
class ShippedPrice:
    """Both prices of an instance type in a region, USD per hour. `spot_usd_per_h` is the mean of the region's zones."""

    instance: str
    region: str
    spot_usd_per_h: float
    on_demand_usd_per_h: float
    source: str
    as_of: str

    @property
    def text(self) -> str:
        """Return the machine and the date of its price as text."""
        return f"{self.instance} in {self.region}, prices of {self.as_of}"


def shipped_prices(region: str) -> dict[str, OnDemandPrice]:
    """Return the on-demand prices of a region by instance type; empty for most regions."""
    prices: dict[str, OnDemandPrice] = {}
    for table in TABLES:
        facts, rows = price_table(table)
        for row in rows:
            if row["region"] == region:
                price = OnDemandPrice(float(row["usd_per_hour"]), f"shipped table: {facts['source']}", facts["as_of"])
                prices.setdefault(row["instance_type"], price)
    return prices


def shipped_price(instance: str, region: str) -> ShippedPrice:
    """Return both prices of an instance type. Raises ConfigError if the table lacks the type; the message lists its
    types."""
    facts, rows = price_table(TABLES[1])
    for row in rows:
        if (row["instance_type"], row["region"]) == (instance, region):
            spot, on_demand = float(row["spot_usd_per_hour"]), float(row["usd_per_hour"])
            return ShippedPrice(instance, region, spot, on_demand, facts["source"], facts["as_of"])
    instances, regions = (sorted({row[key] for row in rows}) for key in ("instance_type", "region"))
    raise ConfigError(
        f"the price table that ships with DOLL has no spot price of {instance} in {region}: expected one of "
        f"{', '.join(instances)} in {', '.join(regions)}; or state --spot-price and --on-demand-price "
        "(plan.spot_usd_per_h, plan.on_demand_usd_per_h)"
    )


@functools.cache
def price_table(name: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the facts in a table's comments, and its rows."""
    return parsed_table(importlib.resources.files("doll.provisioner.prices").joinpath(name).read_text(encoding="utf-8"))


def parsed_table(text: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the facts in the comments of a table, `# key: value`, and its rows."""
    lines = text.splitlines()
    facts = dict(line[1:].strip().split(": ", 1) for line in lines if line.startswith("#") and ": " in line)
    return facts, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def machine_of(config: JobConfig | None, instance: str | None, region: str | None) -> tuple[str, str]:
    """Return the instance type and the region: the given ones, otherwise those of the job's EC2 fleet, otherwise the
    defaults. If the fleet has several types, which have similar sizes, the first type in the table is used."""
    fleet = None if config is None else config.fleet
    if isinstance(fleet, Ec2FleetConfig):
        region = region or fleet.region or DEFAULT_REGION
        priced = {row["instance_type"] for row in price_table(TABLES[1])[1] if row["region"] == region}
        return instance or next(
            (kind for kind in fleet.instance_types if kind in priced), fleet.instance_types[0]
        ), region
    return instance or DEFAULT_INSTANCE, region or DEFAULT_REGION


def with_prices(
    config: JobConfig | None, section: PlanConfig, instance: str | None, region: str | None, notes: list[str]
) -> PlanConfig:
    """Return the plan section with prices of the table, if an instance or region is given or the section states no
    prices; `notes` gets a line on this. Raises ConfigError if the table lacks the machine."""
    stated = section.spot_usd_per_h is not None and section.on_demand_usd_per_h is not None
    if stated and instance is None and region is None:
        return section
    price = shipped_price(*machine_of(config, instance, region))
    given = {"spot_usd_per_h": price.spot_usd_per_h, "on_demand_usd_per_h": price.on_demand_usd_per_h}
    if instance is None and region is None:  # one price is stated
        given = {name: value for name, value in given.items() if getattr(section, name) is None}
    shown = {"spot_usd_per_h": "spot", "on_demand_usd_per_h": "on-demand"}
    prices = ", ".join(f"{value:g} USD/h {shown[name]}" for name, value in given.items())
    notes.append(
        f"{prices}: {price.text} from the table that ships with DOLL (spot: mean of the zones; it changes by the "
        "hour). --instance and --region choose another machine"
    )
    return section.model_copy(update=given)


def ec2_estimate(config: JobConfig, seconds: float) -> dict[str, Any] | None:
    """Return the cost on EC2 of the workers for a run of `seconds`; None if the table lacks the machine."""
    try:
        price = shipped_price(*machine_of(config, None, None))
    except ConfigError:
        return None
    machines = config.data.workers * config.machines_per_worker
    hours = machines * seconds / SECONDS_PER_HOUR
    services = service_costs("self_managed", config.plan.services, seconds)
    return {
        "instance": price.instance,
        "region": price.region,
        "as_of": price.as_of,
        "source": price.source,
        "machines": machines,
        "seconds": seconds,
        "services_usd": sum_of(services),
        "services": [line._asdict() for line in services],
        "on_demand_usd": hours * price.on_demand_usd_per_h,
        "spot_usd": hours * price.spot_usd_per_h,
    }


StackKind = Literal["self_managed", "msk"]


class StackPart(NamedTuple):
    """A service that runs beside the workers on AWS and costs money from the first hour on, with its price.

    The rows are the same as in the table of deploy/terraform/README.md (us-east-1); a test compares the two tables.
    """

    key: Service
    name: str
    usd_per_h: float


_CONTROL: Final = StackPart("control_host", "control host", 0.20), StackPart("cache", "cache, on the control host", 0.0)
_BESIDE: Final = (
    StackPart("network", "network: one NAT gateway", 0.05),
    StackPart("keys", "keys, secrets, alarms", 0.01),
    StackPart("checkpoints", "checkpoints: requests", 0.02),
)
PARTS: Final[dict[StackKind, tuple[StackPart, ...]]] = {
    "self_managed": (*_CONTROL, StackPart("kafka", "Kafka on three machines", 0.17), *_BESIDE),
    "msk": (*_CONTROL, StackPart("kafka", "Kafka by MSK", 0.65), *_BESIDE),
}
EGRESS_USD_PER_GB: Final = 0.09  # to the internet; the next three rows of the table
STORAGE_USD_PER_GB_MONTH: Final = 0.08  # disks (gp3); a bucket costs less
_HOURS_PER_MONTH: Final = 730.0


def stack_usd_per_h(kind: StackKind) -> float:
    """Return the USD per hour of all parts, at the prices of the table."""
    return sum(part.usd_per_h for part in PARTS[kind])


class CostLine(NamedTuple):
    """A cost beside the workers. `source` states the rate and its origin, or why the line has no amount (None)."""

    key: Service | Literal["cold_starts"]
    name: str
    usd: float | None
    source: str

    def text(self, width: int) -> str:
        """Return the line for people; `width`: that of the names."""
        amount = "-" if self.usd is None else usd(self.usd)
        return f"  {self.name:<{width}}  {amount:>8} USD  {self.source}"


def service_costs(kind: StackKind, services: ServicesConfig, seconds: float) -> list[CostLine]:
    """Return each cost of a job of `seconds` beside its workers, with its source."""
    hours, lines = seconds / SECONDS_PER_HOUR, list[CostLine]()
    for part in PARTS[kind]:
        key = f"{part.key}_usd_per_h"
        stated: float | None = getattr(services, key, None)
        name = part.name if stated is None else part.key.replace("_", " ")
        rate, source = (part.usd_per_h, "table") if stated is None else (stated, f"plan.services.{key}")
        lines.append(CostLine(part.key, name, rate * hours, f"{rate:g} USD/h, {source}"))
    gb_per_h, gb = services.egress_gb_per_h, services.storage_gb
    lines.append(
        CostLine("egress", "egress", None, "not priced: set plan.services.egress_gb_per_h")
        if gb_per_h is None
        else CostLine(
            "egress", "egress", gb_per_h * hours * EGRESS_USD_PER_GB,
            f"{gb_per_h:g} GB/h x {EGRESS_USD_PER_GB:g} USD/GB, table",
        )
    )  # fmt: skip
    lines.append(
        CostLine("storage", "storage", None, "not priced: set plan.services.storage_gb")
        if gb is None
        else CostLine(
            "storage", "storage", gb * hours / _HOURS_PER_MONTH * STORAGE_USD_PER_GB_MONTH,
            f"{gb:g} GB x {STORAGE_USD_PER_GB_MONTH:g} USD/GB-month, table",
        )
    )  # fmt: skip
    anyway = "not counted: runs anyway (plan.services.run_anyway)"
    return [line._replace(usd=None, source=anyway) if line.key in services.run_anyway else line for line in lines]


def cold_starts(
    spot: int, on_demand: int, seconds: float, *, boot_s: float, cycle_s: float, prices: Prices
) -> CostLine:  # fmt: skip
    """Return the cost of the time in which machines boot: each worker once, and a worker on spot once more per cycle of
    spot's availability. `prices` are those of a worker."""
    spot_boots = spot * (1 + seconds / cycle_s)
    cost = boot_s / SECONDS_PER_HOUR * (spot_boots * prices.spot_usd_per_h + on_demand * prices.on_demand_usd_per_h)
    return CostLine(
        "cold_starts", "cold starts", cost, f"{spot_boots + on_demand:.3g} boots of {boot_s:g} s, plan.boot_s"
    )


def sum_of(lines: Iterable[CostLine]) -> float:
    """Return the USD of all lines that have an amount."""
    return math.fsum(line.usd for line in lines if line.usd is not None)


def cost_lines(head: str, workers_usd: float, lines: Sequence[CostLine]) -> list[str]:
    """Return the text of the costs: the workers, each line beside them, and the sum."""
    width = max(len(line.name) for line in lines)
    unpriced = [line.name for line in lines if line.source.startswith("not priced")]
    note = f", without {' and '.join(unpriced)}" if unpriced else ""
    return [
        f"{head} (plan.budget_usd limits the workers only):",
        f"  {'workers':<{width}}  {usd(workers_usd):>8} USD",
        *(line.text(width) for line in lines),
        f"  {'sum':<{width}}  {usd(workers_usd + sum_of(lines)):>8} USD{note}",
    ]
