"""EC2 spot price histories (CSV): a machine is available while the price is at or below the on-demand price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from doll.errors import ConfigError
from doll.provisioner.traces.model import Pool, Series, TraceSet, up_at_bid
from doll.provisioner.traces.recordings import Parts
from doll.provisioner.traces.tables import number, rows

from doll_lab.traces.form import TraceFormat, columns_of, moment, nothing_in

# On-demand prices of Linux in us-east-1, USD per hour, as AWS listed them at the time of the recording. Written down
# from memory in November 2026, because AWS keeps no old price list. c3.xlarge of 2015 agrees with the notes of the
# recording, c5.xlarge and m5.xlarge with ec2_on_demand.csv, which has a source. `on_demand.csv` beside a recording
# overrides them (docs/traces.md).
_EC2_ON_DEMAND = {
    2015: {"c3.xlarge": 0.210, "m3.medium": 0.070, "r3.large": 0.175},
    2016: {
        "c1.medium": 0.130, "c1.xlarge": 0.520, "cc2.8xlarge": 2.000, "cg1.4xlarge": 2.100, "cr1.8xlarge": 3.500,
        "d2.2xlarge": 1.380, "d2.4xlarge": 2.760, "m1.small": 0.044, "m1.medium": 0.087, "m1.large": 0.175,
        "m1.xlarge": 0.350, "m2.xlarge": 0.245, "m2.2xlarge": 0.490, "m3.medium": 0.067, "m3.large": 0.133,
        "m4.4xlarge": 0.958,
    },
    2021: {"c5.xlarge": 0.170, "r5.large": 0.126, "m5.xlarge": 0.192},
}  # fmt: skip
# Surcharge of AWS on the Linux price per hour; also from memory.
_SURCHARGE = {"Linux/UNIX": 0.0, "SUSE Linux": 0.10}
ON_DEMAND = "on_demand.csv"
_MACHINES = 64
_COLUMNS = ("timestamp_utc", "availability_zone", "instance_type", "product", "spot_usd_per_hour")


def load(path: Path) -> tuple[list[TraceSet], Parts]:
    """Load a spot price history. A machine is available while the price is at or below the bid, the on-demand price.

    Since late 2017, prices are smooth and do not show when machines are taken away; such a recording shows only costs.
    On-demand prices come from `on_demand.csv` beside the recording, otherwise from the table above: from the year with
    most rows of the pool, otherwise from another year of the pool. Types without a price are left out. Rows may be in
    any order, because EC2 returns the newest rows first.

    Raises:
        ConfigError: the file is damaged, or none of its pools is usable.
    """
    stated = _stated_on_demand(path.parent)
    known = {(kind, product) for table in _EC2_ON_DEMAND.values() for kind in table for product in _SURCHARGE}
    histories: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    years: dict[tuple[str, str, str], Counter[int]] = {}
    for line, row in rows(path, _COLUMNS):
        where = f"{path}: line {line}"
        key = (row["availability_zone"], row["instance_type"], row["product"])
        at = moment(row["timestamp_utc"], where)
        years.setdefault(key, Counter())[at.year] += 1
        if key[1:] in stated or key[1:] in known:
            histories.setdefault(key, []).append((at.timestamp(), number(row, "spot_usd_per_hour", where)))
    if not years:
        raise ConfigError(f"{path}: expected one change of price per line, got none")
    all_years = sum(years.values(), Counter())
    skipped: Parts = []
    unpriced: Counter[str] = Counter()
    priced: dict[tuple[str, str, str], float] = {}
    begins_s: list[float] = []
    for key, of_pool in years.items():
        price = _on_demand_usd(key, of_pool, stated)
        if price is None:
            unpriced[_kind(*key[1:])] += of_pool.total()
            continue
        begins_s.append(min(histories[key])[0])
        if len(histories[key]) < 2:
            skipped.append((f"pool {key[0]} {_kind(*key[1:])}", "expected two or more prices, got one"))
        else:
            priced[key] = price
    if unpriced:
        names = sorted(unpriced)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        what = f"{len(names)} instance type{'s' * (len(names) > 1)} ({shown}), {sum(unpriced.values())} rows"
        of_years = ", ".join(str(year) for year in sorted(all_years))
        why = f"no on-demand price of {of_years} is known: state it in {ON_DEMAND} beside the file, see docs/traces.md"
        skipped.append((what, why))
    start_s = min(begins_s, default=0.0)
    pools = []
    for (zone, kind, product), on_demand in sorted(priced.items()):
        # Stable: of two prices at the same moment, the later line is used.
        history = sorted(histories[zone, kind, product], key=lambda change: change[0])
        at_s = np.array([at - start_s for at, _ in history], dtype=np.float64)
        name = f"{zone} {_kind(kind, product)}"
        try:
            price_of = Series(at_s, np.array([usd for _, usd in history]))
            num_up = up_at_bid(price_of, _MACHINES, on_demand)
            pools.append(Pool(name, _MACHINES, on_demand, price_of, num_up, _kind(kind, product)))
        except ConfigError as error:
            skipped.append((f"pool {name}", str(error)))
    if not pools:
        raise nothing_in(path, skipped)
    # The year with most of its rows, because a history begins with the last change before its first day.
    year = max(sorted(all_years), key=lambda candidate: all_years[candidate])
    return [TraceSet(f"ec2-{year}", tuple(pools))], skipped


def _kind(kind: str, product: str) -> str:
    return kind if product == "Linux/UNIX" else f"{kind} {product}"


def _on_demand_usd(
    key: tuple[str, str, str], years: Counter[int], stated: Mapping[tuple[str, str], float]
) -> float | None:
    _, kind, product = key
    if (kind, product) in stated:
        return stated[kind, product]
    if product not in _SURCHARGE:
        return None
    prices = (_EC2_ON_DEMAND.get(year, {}).get(kind) for year, _ in years.most_common())
    price = next((usd for usd in prices if usd is not None), None)
    return None if price is None else price + _SURCHARGE[product]


def _stated_on_demand(folder: Path) -> dict[tuple[str, str], float]:
    """Return (instance type, product) -> USD per hour from the user's `on_demand.csv`; empty without this file."""
    stated = {}
    for path in sorted(folder.glob(f"{ON_DEMAND}*")):
        for line, row in rows(path, ("instance_type", "usd_per_hour")):
            price = number(row, "usd_per_hour", f"{path}: line {line}")
            if price <= 0:
                raise ConfigError(f"{path}: line {line}: expected a price above 0, got {price}")
            stated[row["instance_type"], row.get("product") or "Linux/UNIX"] = price
    return stated


FORMAT = TraceFormat("EC2 spot prices", "prices.csv", lambda line: columns_of(line).issuperset(_COLUMNS), load)
