"""`PriceFeed` of EC2: spot prices from DescribeSpotPriceHistory, on-demand prices from the price list.

Each listing of spot prices begins with the last change before its start, so successive listings have no gap between
them. On-demand prices come from the first of these sources that has them: the price list (`pricing:GetProducts`), a
file with its earlier answers, the table that ships with DOLL, the job file. The source is logged. Sources: EC2 API
reference; Price List API reference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from doll import telemetry
from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.process.files import write_json
from doll.provisioner.fleets.ec2.capacity import Ec2Pool
from doll.provisioner.fleets.ec2.client import aws_client, aws_errors
from doll.provisioner.fleets.ec2.fleet import Ec2Fleet, ec2_settings
from doll.provisioner.planning.state import Market
from doll.provisioner.prices.shipped import OnDemandPrice, shipped_prices
from doll.provisioner.traces.model import MAX_USD_PER_HOUR, Series, constant
from doll.records.bounded import json_object, json_value, read_text, short
from doll.theory.cost import Prices

log = telemetry.get_logger(__name__)

PRODUCT: Final = "Linux/UNIX"  # answers may say "Linux/UNIX (Amazon VPC)": matched by its beginning
PRICING_REGION: Final = "us-east-1"  # the price list is served in a few regions only, for all
ASK_AGAIN_S: Final = 300.0
RETRY_S: Final = 60.0
HISTORY_S: Final = 90 * 86_400.0  # EC2 keeps no longer history
KEEP_ON_DEMAND_DAYS: Final = 7
_MOST_CACHE_BYTES: Final = 16_000_000


class SpotHistory:
    """The spot prices of some pools for the times requested so far, in listings of up to 1000 prices per page."""

    def __init__(self, client: Any, *, page_size: int = 1000) -> None:
        self._client = client
        self._page_size = page_size
        self._usd_per_h: dict[Ec2Pool, dict[float, float]] = {}  # each change of price, by its time
        self._known: dict[Ec2Pool, tuple[float, float]] = {}  # start and end of the time that was requested
        self._failed_s = -math.inf

    def refresh(self, pools: Collection[Ec2Pool], start_s: float, now_s: float) -> None:
        """Read the prices of these pools from `start_s` until about `now_s`. Raises ServiceUnavailableError if EC2 does
        not answer and a pool has no known price yet."""
        start_s = max(start_s, now_s - HISTORY_S)
        wanted: dict[tuple[float, float], list[Ec2Pool]] = {}
        for pool in pools:
            first, last = self._known.get(pool, (math.inf, -math.inf))
            if first > last:
                wanted.setdefault((start_s, now_s), []).append(pool)
                continue
            if start_s < first:
                wanted.setdefault((start_s, first), []).append(pool)
            if now_s - last > ASK_AGAIN_S and now_s - self._failed_s > RETRY_S:
                wanted.setdefault((last, now_s), []).append(pool)
        for (since_s, until_s), missing in wanted.items():
            try:
                self._ask(missing, since_s, until_s)
            except aws_errors() as error:
                self._failed_s = now_s
                if any(pool not in self._known for pool in missing):
                    raise ServiceUnavailableError(f"EC2, asking for spot prices: {error}") from error
                log.warning("spot_prices_stale", age_s=round(until_s - since_s), reason=str(error))

    def at(self, pool: Ec2Pool, time_s: float) -> float | None:
        """Return the USD per hour at that time; for a time before the first known price, return this price. None if
        none is known."""
        changes = self._usd_per_h.get(pool)
        if not changes:
            return None
        return changes[max((at_s for at_s in changes if at_s <= time_s), default=min(changes))]

    def series(self, pool: Ec2Pool, start_s: float, end_s: float) -> Series | None:
        """Return the price from `start_s` to `end_s` as steps; None if no price is known."""
        first = self.at(pool, start_s)
        if first is None:
            return None
        inner = sorted((at_s, usd) for at_s, usd in self._usd_per_h[pool].items() if start_s < at_s < end_s)
        times = [start_s, *(at for at, _ in inner), end_s]
        values = [first, *(usd for _, usd in inner)]
        return Series(np.array(times), np.array([*values, values[-1]]))

    def _ask(self, pools: Sequence[Ec2Pool], since_s: float, until_s: float) -> None:
        pages = self._client.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=sorted({pool.instance_type for pool in pools}),
            ProductDescriptions=[PRODUCT],
            Filters=[{"Name": "availability-zone", "Values": sorted({pool.zone for pool in pools})}],
            StartTime=datetime.fromtimestamp(since_s, UTC),
            EndTime=datetime.fromtimestamp(until_s, UTC),
            PaginationConfig={"PageSize": self._page_size},
        )
        asked = set(pools)
        for page in pages:
            for change in page["SpotPriceHistory"]:
                pool = Ec2Pool(change["InstanceType"], change["AvailabilityZone"])
                if pool in asked and change["ProductDescription"].startswith(PRODUCT):
                    usd = _usd(change["SpotPrice"])
                    if usd is None:
                        log.warning("spot_price_refused", pool=str(pool), price=short(change["SpotPrice"], 60))
                        continue
                    self._usd_per_h.setdefault(pool, {})[change["Timestamp"].timestamp()] = usd
        for pool in pools:
            first, last = self._known.get(pool, (since_s, until_s))
            self._known[pool] = (min(first, since_s), max(last, until_s))


@dataclass(eq=False, repr=False)
class OnDemandPrices:
    """The prices of a region's instance types, from a client of the price list (None: only files are used), cached in a
    file (None: no cache)."""

    client: Any
    region: str
    _: KW_ONLY
    cache: Path | None = None
    today: Callable[[], date] = lambda: datetime.now(UTC).date()
    _known_usd: dict[str, OnDemandPrice] = field(default_factory=dict, init=False)

    def lookup(self, instance_type: str) -> OnDemandPrice | None:
        """Return the best known price; None if there is none."""
        if instance_type not in self._known_usd:
            kept = self._kept(instance_type)
            age_days = math.inf if kept is None else (self.today() - date.fromisoformat(kept.as_of)).days
            price = kept if age_days < KEEP_ON_DEMAND_DAYS else self._asked(instance_type) or kept
            price = price or shipped_prices(self.region).get(instance_type)
            if price is None:
                return None
            self._known_usd[instance_type] = price
            log.info("on_demand_price", instance_type=instance_type, usd_per_h=price.usd_per_h, source=price.source,
                     as_of=price.as_of)  # fmt: skip
        return self._known_usd[instance_type]

    def _asked(self, instance_type: str) -> OnDemandPrice | None:
        if self.client is None:
            return None
        terms = {
            "instanceType": instance_type,
            "regionCode": self.region,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
        }
        try:
            answer = self.client.get_products(
                ServiceCode="AmazonEC2",
                Filters=[{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in terms.items()],
            )
            prices = sorted({usd for product in answer["PriceList"] for usd in _dollars(json_object(product))})
        except aws_errors() + (ValueError, KeyError, TypeError, AttributeError) as error:  # noqa: RUF005 - mypy
            log.warning("price_list_not_read", instance_type=instance_type, reason=f"{type(error).__name__}: {error}")
            return None
        if not prices:
            log.warning("price_not_listed", instance_type=instance_type, region=self.region)
            return None
        price = OnDemandPrice(prices[0], "price list", self.today().isoformat())
        self._keep(instance_type, price)
        return price

    def _kept(self, instance_type: str) -> OnDemandPrice | None:
        try:
            row = self._read_cache()[self.region][instance_type]
            price = OnDemandPrice(float(row["usd_per_h"]), "price list, kept", str(row["as_of"]))
            date.fromisoformat(price.as_of)
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return price if 0 < price.usd_per_h < math.inf else None

    def _read_cache(self) -> Any:
        if self.cache is None or not self.cache.is_file():
            return {}
        try:
            return json_value(read_text(self.cache, max_bytes=_MOST_CACHE_BYTES))
        except (OSError, ValueError) as error:
            log.warning("price_file_not_read", file=str(self.cache), reason=str(error))
            return {}

    def _keep(self, instance_type: str, price: OnDemandPrice) -> None:
        if self.cache is None:
            return
        whole = self._read_cache()
        whole = whole if isinstance(whole, dict) else {}
        region = whole.setdefault(self.region, {})
        if not isinstance(region, dict):
            region = whole[self.region] = {}
        region[instance_type] = {"usd_per_h": price.usd_per_h, "as_of": price.as_of}
        try:
            write_json(self.cache, whole)
        except OSError as error:
            log.warning("price_file_not_written", file=str(self.cache), reason=str(error))


@dataclass(eq=False, repr=False)
class Ec2Prices:
    """The prices of the pools that a fleet may use: all pairs of `instance_types` and `zones`.

    Args:
        stated_usd_per_h: on-demand price in the job file, for instance types that no other source has.
        lacks_capacity: function that returns whether a pool is known to have no machines; its price is then not used.
        clock: function that returns Unix seconds; later prices cannot be requested.
    """

    client: Any
    on_demand: OnDemandPrices
    _: KW_ONLY
    instance_types: Sequence[str]
    zones: Sequence[str]
    stated_usd_per_h: float | None = None
    lacks_capacity: Callable[[Ec2Pool, Market, float], bool] = lambda pool, market, now_s: False
    clock: Callable[[], float] = time.time
    page_size: int = 1000

    def __post_init__(self) -> None:
        self._spot = SpotHistory(self.client, page_size=self.page_size)
        self._pools = [Ec2Pool(type_, zone) for zone in self.zones for type_ in self.instance_types]

    def current(self, now_s: float) -> Prices:
        """Return the lowest prices. If no spot pool has capacity, the lowest price of all pools is returned."""
        self._spot.refresh(self._pools, now_s, now_s)
        known = {pool: usd for pool in self._pools if (usd := self._spot.at(pool, now_s)) is not None}
        if not known:
            raise ServiceUnavailableError(
                f"EC2 knows no spot price of {', '.join(self.instance_types)} in {', '.join(self.zones)}: are they "
                "offered?"
            )
        usable = [usd for pool, usd in known.items() if not self.lacks_capacity(pool, "spot", now_s)]
        return Prices(min(usable or known.values()), min(self._on_demand_usd(type_) for type_ in self.instance_types))

    def series(self, pool: str, market: Market, start_s: float, end_s: float) -> Series:
        at = Ec2Pool.parse(pool)
        if market == "on_demand":
            return constant(self._on_demand_usd(at.instance_type), start_s, end_s)
        self._spot.refresh([at], start_s, max(start_s, min(end_s, self.clock())))
        series = self._spot.series(at, start_s, end_s)
        if series is None:
            raise ServiceUnavailableError(f"EC2 knows no spot price of {pool}")
        return series

    def _on_demand_usd(self, instance_type: str) -> float:
        price = self.on_demand.lookup(instance_type)
        if price is not None:
            return price.usd_per_h
        if self.stated_usd_per_h is not None:
            return self.stated_usd_per_h
        raise ServiceUnavailableError(
            f"no on-demand price of {instance_type} is known: allow pricing:GetProducts (docs/aws.md), or state "
            "plan.on_demand_usd_per_h"
        )


def connect(config: JobConfig, fleet: Ec2Fleet, *, run_folder: Path) -> Ec2Prices:
    """Return the prices of the fleet of a job file. Raises ConfigError and LaunchError as the fleet does."""
    settings = ec2_settings(config)
    client = aws_client("ec2", settings.region)
    cache = config.path(settings.price_cache) if settings.price_cache is not None else run_folder / "prices.json"
    on_demand = OnDemandPrices(aws_client("pricing", PRICING_REGION), client.meta.region_name, cache=cache)
    return Ec2Prices(
        client, on_demand, instance_types=settings.instance_types, zones=fleet.offers.zones(),
        stated_usd_per_h=config.plan.on_demand_usd_per_h, lacks_capacity=fleet.cache.lacks_capacity,
    )  # fmt: skip


def _usd(text: str) -> float | None:
    """Return a spot price in USD per hour; None if it is not valid."""
    try:
        usd = float(text)
    except ValueError:
        return None
    return usd if 0 <= usd <= MAX_USD_PER_HOUR else None


def _dollars(product: Mapping[str, Any]) -> Iterator[float]:
    """Return the hourly prices above 0 of one product of the price list."""
    for offer in product["terms"]["OnDemand"].values():
        for dimension in offer["priceDimensions"].values():
            usd = float(dimension["pricePerUnit"].get("USD", "nan"))
            if 0 < usd < math.inf and dimension.get("unit", "Hrs") == "Hrs":
                yield usd
