"""The prices of several regions, from the table that ships with DOLL or from a file in its form (`doll plan`)."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Final

from doll.errors import ConfigError
from doll.provisioner.planning.regions import Region
from doll.provisioner.prices.shipped import TABLES, parsed_table, price_table
from doll.records.bounded import read_text
from doll.theory.cost import Prices

_COLUMNS: Final = ("region", "instance_type", "usd_per_hour", "spot_usd_per_hour")
_FRESH_DAYS: Final = 7
_MOST_TABLE_BYTES: Final = 16_000_000


def region_prices(
    machines: Sequence[tuple[str, str]], egress_usd_per_gb: float, path: Path | None, today: date, notes: list[str]
) -> list[Region]:
    """Return the prices of each (region, instance type), from the table that ships with DOLL or from a file in its
    form. The column `egress_usd_per_gb` of the file replaces the argument. `notes` gets a line if the prices are not of
    the last week. Raises ConfigError if the file is damaged, or lacks a type in a region."""
    facts, rows = price_table(TABLES[1]) if path is None else _read(path)
    named = "the price table that ships with DOLL" if path is None else str(path)
    regions = []
    for region, instance in machines:
        row = next((row for row in rows if (row["region"], row["instance_type"]) == (region, instance)), None)
        if row is None:
            there = sorted({each["instance_type"] for each in rows if each["region"] == region})
            expected = f"one of {', '.join(there)}" if there else "no type at all"
            raise ConfigError(
                f"{named} has no prices of {instance} in {region}: it has {expected} there; leave {region} out, name "
                f"another type (--also-in {region}=TYPE), or state the prices in --price-table"
            )
        spot, on_demand = (_usd(row, column, named) for column in ("spot_usd_per_hour", "usd_per_hour"))
        egress = _usd(row, "egress_usd_per_gb", named) if row.get("egress_usd_per_gb") else egress_usd_per_gb
        regions.append(Region(region, Prices(spot, on_demand), egress))
    as_of = facts.get("as_of", "no stated date")
    try:
        days = (today - date.fromisoformat(as_of)).days
        age = "" if 0 <= days <= _FRESH_DAYS else f", {days} days old" if days > 0 else ", a date to come"
    except ValueError:
        age = f", more than {_FRESH_DAYS} days old" if path is None else ": expected a line '# as_of: YYYY-MM-DD' in it"
    if age:
        notes.append(f"the prices of {named} are of {as_of}{age}: spot prices change by the hour (--price-table)")
    return regions


def _read(path: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the facts and the rows of a price table. Raises ConfigError if it is not one."""
    try:
        facts, rows = parsed_table(read_text(path, max_bytes=_MOST_TABLE_BYTES))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"--price-table: cannot read {path}: {error}") from error
    missing = [name for name in _COLUMNS if not rows or any(row.get(name) is None for row in rows)]
    if missing:
        raise ConfigError(f"--price-table: {path}: expected rows with {', '.join(_COLUMNS)}; {missing[0]} is missing")
    return facts, rows


def _usd(row: Mapping[str, str], column: str, named: str) -> float:
    """Return a price of a row, above 0 unless it is of traffic. Raises ConfigError for anything else."""
    text = row[column]
    try:
        usd_per_unit = float(text)
    except ValueError:
        usd_per_unit = math.nan
    if not (0 < usd_per_unit < math.inf or (usd_per_unit == 0 and column.startswith("egress"))):
        raise ConfigError(
            f"{named}: {column} of {row['instance_type']} in {row['region']}: expected a price, got {text!r}"
        )
    return usd_per_unit
