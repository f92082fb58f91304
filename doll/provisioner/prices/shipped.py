"""The price tables that ship with DOLL. Plans and estimates use them if there is no AWS account or AWS does not answer.

`ec2_on_demand.csv` has on-demand prices of us-east-1. `ec2_regions.csv` has both prices of a few types and regions.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import math
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from doll.amounts import duration, usd
from doll.config import Ec2FleetConfig, JobConfig, PlanConfig
from doll.errors import ConfigError
from doll.theory.cost import SECONDS_PER_HOUR

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
    return {
        "instance": price.instance,
        "region": price.region,
        "as_of": price.as_of,
        "source": price.source,
        "machines": machines,
        "seconds": seconds,
        "stack_usd_per_h": stack_usd_per_h("self_managed"),
        "on_demand_usd": hours * price.on_demand_usd_per_h,
        "spot_usd": hours * price.spot_usd_per_h,
    }


StackKind = Literal["self_managed", "msk"]


class StackPart(NamedTuple):
    """A service that runs beside the workers on AWS and costs money from the first hour on, with its price.

    The rows are the same as in the table of deploy/terraform/README.md (us-east-1); a test compares the two tables.
    """

    name: str
    usd_per_h: float


_BESIDE: Final = (
    StackPart("network: one NAT gateway", 0.05),
    StackPart("keys, secrets, alarms", 0.01),
    StackPart("checkpoints: requests", 0.02),
)
PARTS: Final[dict[StackKind, tuple[StackPart, ...]]] = {
    "self_managed": (
        StackPart("control host, with the cache", 0.20), StackPart("Kafka on three machines", 0.17), *_BESIDE,
    ),
    "msk": (StackPart("control host, with the cache", 0.20), StackPart("Kafka by MSK", 0.65), *_BESIDE),
}  # fmt: skip


def stack_usd_per_h(kind: StackKind) -> float:
    """Return the USD per hour of all parts."""
    return sum(part.usd_per_h for part in PARTS[kind])


def stack_lines(kind: StackKind, seconds: float, workers_usd: float) -> list[str]:
    """Return a line for each part, and the cost of the job with its workers; no lines for a job without an end."""
    if math.isinf(seconds):
        return []
    hours = seconds / SECONDS_PER_HOUR
    width = max(len(part.name) for part in PARTS[kind])
    total = stack_usd_per_h(kind)
    return [
        f"Beside the workers for {duration(seconds)}, on AWS in us-east-1 (kafka_mode {kind}; not in the budget):",
        *(
            f"  {part.name:<{width}}  {part.usd_per_h:.2f} USD/h  {usd(part.usd_per_h * hours):>8} USD"
            for part in PARTS[kind]
        ),
        f"  {'together':<{width}}  {total:.2f} USD/h  {usd(total * hours):>8} USD; with the workers "
        f"{usd(total * hours + workers_usd)} USD",
    ]
