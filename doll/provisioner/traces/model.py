"""Recorded prices and availability in one normal form: a folder of CSV files that anybody can write (docs/traces.md).

pools.csv         trace_set,pool,num_machines,on_demand_usd_per_hour[,spot_usd_per_hour,machine]
prices.csv        pool,seconds,usd_per_hour      (a row holds until the pool's next row)
availability.csv  pool,seconds,num_up            (likewise; 0 .. num_machines)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from doll.errors import ConfigError
from doll.provisioner.traces.tables import MAX_NUMBER, number, rows

Floats = npt.NDArray[np.float64]

POOLS, PRICES, AVAILABILITY = "pools.csv", "prices.csv", "availability.csv"
# Larger than any real value: a larger number is damage, and would spoil the sums.
MAX_MACHINES, MAX_USD_PER_HOUR = 10_000_000, 1e6
POOL_COLUMNS = ("trace_set", "pool", "num_machines", "on_demand_usd_per_hour")


@dataclass(frozen=True)
class Series:
    """A step function of time: `values[i]` is the value from `times_s[i]` to `times_s[i + 1]`. The last time is the
    end."""

    times_s: Floats
    values: Floats

    def __post_init__(self) -> None:
        if len(self.times_s) < 2 or len(self.times_s) != len(self.values):
            raise ConfigError(
                f"expected two or more times with a value each, got {len(self.times_s)} and {len(self.values)}"
            )
        if not all((np.abs(numbers) <= MAX_NUMBER).all() for numbers in (self.times_s, self.values)):
            raise ConfigError(f"expected times and values up to {MAX_NUMBER:g}, got NaN, infinite or larger ones")
        if (np.diff(self.times_s) < 0).any():
            raise ConfigError("expected times in ascending order")

    def at(self, times_s: Floats) -> Floats:
        """Return the values at these times; before the first time the first value, after the end the last value."""
        index = np.searchsorted(self.times_s, times_s, side="right") - 1
        return np.asarray(self.values[np.clip(index, 0, len(self.values) - 1)], dtype=np.float64)

    def mean(self, start_s: float, end_s: float) -> float:
        """Return the mean over this time."""
        inner = self.times_s[(self.times_s > start_s) & (self.times_s < end_s)]
        edges = np.concatenate([[start_s], inner, [end_s]])
        return float(np.average(self.at(edges[:-1]), weights=np.diff(edges)))


@dataclass(frozen=True)
class Pool:
    """One spot capacity pool (an instance type in a zone) over the time of its recording.

    Attributes:
        name: name of the pool, e.g. "us-east-1a c3.xlarge".
        num_machines: number of machines that were requested while `num_up` was recorded.
        price: spot price, USD per machine and hour.
        num_up: number of machines that were up or available, 0 .. num_machines.
        machine: kind of its machines. A job can use pools of a set with the same kind as its regions.
    """

    name: str
    num_machines: int
    on_demand_usd_per_hour: float
    price: Series
    num_up: Series
    machine: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.num_machines <= MAX_MACHINES or not 0 < self.on_demand_usd_per_hour <= MAX_USD_PER_HOUR:
            raise ConfigError(
                f"pool {self.name}: expected num_machines >= 1 and an on-demand price above 0, at most {MAX_MACHINES} "
                f"and {MAX_USD_PER_HOUR:g}, got {self.num_machines:g} and {self.on_demand_usd_per_hour:g}"
            )
        if not 0 <= self.price.values.min() <= self.price.values.max() <= MAX_USD_PER_HOUR:
            raise ConfigError(
                f"pool {self.name}: expected prices of 0 or more, up to {MAX_USD_PER_HOUR:g}, got "
                f"{self.price.values.min():g} .. {self.price.values.max():g}"
            )
        if self.num_up.values.min() < 0 or self.num_up.values.max() > self.num_machines:
            raise ConfigError(
                f"pool {self.name}: expected num_up of 0 .. {self.num_machines} (num_machines), got "
                f"{self.num_up.values.min():g} .. {self.num_up.values.max():g}"
            )
        if self.length_s <= 0:
            raise ConfigError(f"pool {self.name}: expected prices and availability that overlap in time")

    @property
    def start_s(self) -> float:
        """The time from which on both recordings have values."""
        return float(max(self.price.times_s[0], self.num_up.times_s[0]))

    @property
    def end_s(self) -> float:
        """The time at which the first of the two recordings ends."""
        return float(min(self.price.times_s[-1], self.num_up.times_s[-1]))

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def alpha(self) -> float:
        """The share of the requested machines that were up, over the whole recording."""
        return self.num_up.mean(self.start_s, self.end_s) / self.num_machines

    @property
    def cycle_s(self) -> float:
        """The mean up time plus the mean down time of a machine; each is the recording's length without preemptions."""
        inside = (self.num_up.times_s >= self.start_s) & (self.num_up.times_s <= self.end_s)
        taken = -np.minimum(np.diff(self.num_up.values[inside]), 0.0).sum()
        return self.length_s * self.num_machines / max(float(taken), 1.0)


@dataclass(frozen=True)
class TraceSet:
    """Pools that belong together. Results are given for each set."""

    name: str
    pools: tuple[Pool, ...]


def constant(value: float, start_s: float, end_s: float) -> Series:
    """Return a series with one value over the whole time."""
    return Series(np.array([start_s, end_s], float), np.array([value, value], float))


def up_at_bid(price: Series, num_machines: int, bid_usd_per_hour: float) -> Series:
    """Return the machines that are up by auction rules (EC2 until 2017): all machines, while the price is at most the
    bid."""
    return Series(price.times_s, np.where(price.values <= bid_usd_per_hour, float(num_machines), 0.0))


def read_folder(folder: Path) -> tuple[list[TraceSet], list[tuple[str, str]]]:
    """Return the trace sets of a folder in normal form, and the sets that were skipped: (set, why). If one pool of a
    set cannot be used, the whole set is skipped, because the set without this pool would be another market.

    Raises:
        ConfigError: a file or column is missing or damaged, or no set can be used.
    """
    pools_path = _named(folder, POOLS)
    if pools_path is None:
        raise ConfigError(f"{folder}: expected {POOLS}, see docs/traces.md")
    prices = _read_series(_named(folder, PRICES), "usd_per_hour")
    ups = _read_series(_named(folder, AVAILABILITY), "num_up")
    sets: dict[str, list[Pool]] = {}
    wrong: dict[str, str] = {}
    names: set[str] = set()
    for line, row in rows(pools_path, POOL_COLUMNS):
        name, group = row["pool"], row["trace_set"] or folder.name
        sets.setdefault(group, [])
        try:
            where = f"{pools_path}: line {line}"
            if name in names:
                raise ConfigError(f"{where}: pool {name!r} is there twice")
            names.add(name)
            sets[group].append(_pool(name, row, prices, ups, where))
        except ConfigError as error:
            wrong.setdefault(group, str(error))
    skipped = [(f"trace set {group!r}", why) for group, why in wrong.items()]
    for path, series in ((PRICES, prices), (AVAILABILITY, ups)):
        skipped += [
            (f"pool {name!r}", f"it has rows in {path}, and is not in {POOLS}") for name in sorted(set(series) - names)
        ]
    if not sets:
        raise ConfigError(f"{pools_path}: expected one pool per line, got none")
    sets_read = [TraceSet(name, tuple(pools)) for name, pools in sets.items() if name not in wrong]
    if not sets_read:
        raise ConfigError("; ".join(wrong.values()))
    return sets_read, skipped


def _pool(
    name: str, row: Mapping[str, str], prices: Mapping[str, Recorded], ups: Mapping[str, Recorded], where: str
) -> Pool:
    num_machines = number(row, "num_machines", where)
    on_demand = number(row, "on_demand_usd_per_hour", where)
    price, num_up = _usable(prices.get(name)), _usable(ups.get(name))
    if price is None and num_up is None:
        raise ConfigError(f"{where}: pool {name!r} has rows neither in {PRICES} nor in {AVAILABILITY}")
    if price is None:
        assert num_up is not None
        if not (row.get("spot_usd_per_hour") or "").strip():
            raise ConfigError(f"{where}: pool {name!r} has no rows in {PRICES}: expected spot_usd_per_hour here")
        spot = number(row, "spot_usd_per_hour", where)
        price = constant(spot, float(num_up.times_s[0]), float(num_up.times_s[-1]))
    if num_machines != int(num_machines):
        raise ConfigError(f"{where}: expected a whole number of machines, got {num_machines}")
    if num_up is None:
        num_up = up_at_bid(price, int(num_machines), on_demand)
    try:
        return Pool(name, int(num_machines), on_demand, price, num_up, row.get("machine") or "")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


Recorded = Series | ConfigError
"""The rows of one pool, or the error in them."""


def _usable(series: Recorded | None) -> Series | None:
    if isinstance(series, ConfigError):
        raise series
    return series


def _named(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_series(path: Path | None, column: str) -> dict[str, Recorded]:
    if path is None:
        return {}
    times: dict[str, list[float]] = {}
    values: dict[str, list[float]] = {}
    series_by_pool: dict[str, Recorded] = {}
    for line, row in rows(path, ("pool", "seconds", column)):
        where, name = f"{path}: line {line}", row["pool"]
        try:
            time_s, value = number(row, "seconds", where), number(row, column, where)
        except ConfigError as error:
            series_by_pool.setdefault(name, error)
            continue
        times.setdefault(name, []).append(time_s)
        values.setdefault(name, []).append(value)
    for name, pool_times in times.items():
        if name not in series_by_pool:
            try:
                series_by_pool[name] = Series(np.array(pool_times), np.array(values[name]))
            except ConfigError as error:
                series_by_pool[name] = ConfigError(f"{path}: pool {name!r}: {error}")
    return series_by_pool
