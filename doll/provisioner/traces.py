"""Recorded prices and availability in one normal form: a folder of CSV files that anybody can write (docs/traces.md).

    pools.csv         trace_set,pool,num_machines,on_demand_usd_per_hour[,spot_usd_per_hour]
    prices.csv        pool,seconds,usd_per_hour      (a row holds until the pool's next row)
    availability.csv  pool,seconds,num_up            (likewise; 0 .. num_machines)

`load` reads such a folder, the public data sets that `doll.provisioner.known_traces` knows, or a folder of either.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from doll.errors import ConfigError

Floats = npt.NDArray[np.float64]

POOLS, PRICES, AVAILABILITY = "pools.csv", "prices.csv", "availability.csv"
_POOL_COLUMNS = ("trace_set", "pool", "num_machines", "on_demand_usd_per_hour")


@dataclass(frozen=True)
class Series:
    """A step function of time: `values[i]` holds from `times_s[i]` to `times_s[i + 1]`; the last time is its end."""

    times_s: Floats
    values: Floats

    def __post_init__(self) -> None:
        if len(self.times_s) < 2 or len(self.times_s) != len(self.values):
            raise ConfigError(
                f"expected two or more times with a value each, got {len(self.times_s)} and {len(self.values)}"
            )
        if not (np.isfinite(self.times_s).all() and np.isfinite(self.values).all()):
            raise ConfigError("expected finite times and values, got NaN or infinite ones")
        if (np.diff(self.times_s) < 0).any():
            raise ConfigError("expected times in ascending order")

    def at(self, times_s: Floats) -> Floats:
        """Values at these times; before the first time the first value, after the end the last."""
        index = np.searchsorted(self.times_s, times_s, side="right") - 1
        return np.asarray(self.values[np.clip(index, 0, len(self.values) - 1)], dtype=np.float64)

    def mean(self, start_s: float, end_s: float) -> float:
        """Mean over time."""
        inner = self.times_s[(self.times_s > start_s) & (self.times_s < end_s)]
        edges = np.concatenate([[start_s], inner, [end_s]])
        return float(np.average(self.at(edges[:-1]), weights=np.diff(edges)))


@dataclass(frozen=True)
class Pool:
    """One spot capacity pool (an instance type in a zone) over its recording.

    Attributes:
        name: of the pool, e.g. "us-east-1a c3.xlarge".
        num_machines: how many were asked for while `num_up` was recorded.
        on_demand_usd_per_hour: price of a machine that stays.
        price: spot price, USD per machine and hour.
        num_up: machines up or obtainable, 0 .. num_machines.
    """

    name: str
    num_machines: int
    on_demand_usd_per_hour: float
    price: Series
    num_up: Series

    def __post_init__(self) -> None:
        if self.num_machines < 1 or not 0 < self.on_demand_usd_per_hour < math.inf:
            raise ConfigError(
                f"pool {self.name}: expected num_machines >= 1 and an on-demand price above 0, got "
                f"{self.num_machines} and {self.on_demand_usd_per_hour}"
            )
        if self.price.values.min() < 0:
            raise ConfigError(f"pool {self.name}: expected prices of 0 or more, got {self.price.values.min()}")
        if self.num_up.values.min() < 0 or self.num_up.values.max() > self.num_machines:
            raise ConfigError(
                f"pool {self.name}: expected num_up of 0 .. {self.num_machines} (num_machines), got "
                f"{self.num_up.values.min():g} .. {self.num_up.values.max():g}"
            )
        if self.length_s <= 0:
            raise ConfigError(f"pool {self.name}: expected prices and availability that overlap in time")

    @property
    def start_s(self) -> float:
        """When both recordings have begun."""
        return float(max(self.price.times_s[0], self.num_up.times_s[0]))

    @property
    def end_s(self) -> float:
        """When the first of them ends."""
        return float(min(self.price.times_s[-1], self.num_up.times_s[-1]))

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def alpha(self) -> float:
        """Share of the machines asked for that were up, over the whole recording."""
        return self.num_up.mean(self.start_s, self.end_s) / self.num_machines

    @property
    def cycle_s(self) -> float:
        """Mean up and down time of a machine together; the recording's length for each where none was taken away."""
        inside = (self.num_up.times_s >= self.start_s) & (self.num_up.times_s <= self.end_s)
        taken = -np.minimum(np.diff(self.num_up.values[inside]), 0.0).sum()
        return self.length_s * self.num_machines / max(float(taken), 1.0)


@dataclass(frozen=True)
class TraceSet:
    """Pools that belong together; results are given per set."""

    name: str
    pools: tuple[Pool, ...]


def constant(value: float, start_s: float, end_s: float) -> Series:
    """One value over the whole time."""
    return Series(np.array([start_s, end_s], float), np.array([value, value], float))


def up_at_bid(price: Series, num_machines: int, bid_usd_per_hour: float) -> Series:
    """Auction rules (EC2 until 2017): machines are there while the price is at or below the bid."""
    return Series(price.times_s, np.where(price.values <= bid_usd_per_hour, float(num_machines), 0.0))


def load(folder: Path) -> list[TraceSet]:
    """All trace sets in `folder`: normal form, a known public data set, or sub-folders of either.

    Raises:
        ConfigError: there is nothing readable, or a file is wrong; the message names the file, line and column.
    """
    from doll.provisioner import known_traces

    if not folder.is_dir():
        raise ConfigError(f"expected a folder of traces, got {folder}, which is not one; see docs/traces.md")
    found = _load_one(folder, known_traces.LOADERS)
    if not found:
        for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
            found += _load_one(inner, known_traces.LOADERS)
    if not found:
        raise ConfigError(
            f"{folder}: expected {POOLS} with {PRICES} or {AVAILABILITY} (docs/traces.md), found neither that nor a "
            f"known data set"
        )
    names = [trace_set.name for trace_set in found]
    if len(set(names)) != len(names):
        raise ConfigError(f"{folder}: expected trace sets of different names, got {names}")
    return found


def _load_one(folder: Path, loaders: Mapping[str, Callable[[Path], list[TraceSet]]]) -> list[TraceSet]:
    if _named(folder, POOLS) is not None:
        return read_folder(folder)
    found = []
    for pattern, loader in loaders.items():
        for path in sorted(folder.glob(pattern)):
            found += loader(path)
    return found


def read_folder(folder: Path) -> list[TraceSet]:
    """The trace sets of a folder in normal form.

    Raises:
        ConfigError: a file, column or value is missing or wrong.
    """
    pools_path = _named(folder, POOLS)
    if pools_path is None:
        raise ConfigError(f"{folder}: expected {POOLS}, see docs/traces.md")
    prices = _read_series(_named(folder, PRICES), "usd_per_hour")
    ups = _read_series(_named(folder, AVAILABILITY), "num_up")
    sets: dict[str, list[Pool]] = {}
    names: set[str] = set()
    for line, row in rows(pools_path, _POOL_COLUMNS):
        name = row["pool"]
        where = f"{pools_path}: line {line}"
        if name in names:
            raise ConfigError(f"{where}: pool {name!r} is there twice")
        names.add(name)
        sets.setdefault(row["trace_set"] or folder.name, []).append(_pool(name, row, prices, ups, where))
    for path, series in ((PRICES, prices), (AVAILABILITY, ups)):
        if unknown := sorted(set(series) - names):
            raise ConfigError(f"{folder / path}: pool {unknown[0]!r} is not in {POOLS}")
    if not sets:
        raise ConfigError(f"{pools_path}: expected one pool per line, got none")
    return [TraceSet(name, tuple(pools)) for name, pools in sets.items()]


def _pool(name: str, row: Mapping[str, str], prices: dict[str, Series], ups: dict[str, Series], where: str) -> Pool:
    num_machines = number(row, "num_machines", where)
    on_demand = number(row, "on_demand_usd_per_hour", where)
    price, num_up = prices.get(name), ups.get(name)
    if price is None and num_up is None:
        raise ConfigError(f"{where}: pool {name!r} has rows neither in {PRICES} nor in {AVAILABILITY}")
    if price is None:
        assert num_up is not None
        if not (row.get("spot_usd_per_hour") or "").strip():
            raise ConfigError(f"{where}: pool {name!r} has no rows in {PRICES}: expected spot_usd_per_hour here")
        spot = number(row, "spot_usd_per_hour", where)
        price = constant(spot, float(num_up.times_s[0]), float(num_up.times_s[-1]))
    if num_up is None:
        num_up = up_at_bid(price, int(num_machines), on_demand)
    if num_machines != int(num_machines):
        raise ConfigError(f"{where}: expected a whole number of machines, got {num_machines}")
    return Pool(name, int(num_machines), on_demand, price, num_up)


def write_folder(sets: Iterable[TraceSet], folder: Path) -> None:
    """Write trace sets in normal form; `read_folder` gives the same back.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pools = [(trace_set.name, pool) for trace_set in sets for pool in trace_set.pools]
    _write(
        folder / POOLS,
        _POOL_COLUMNS,
        ((name, pool.name, pool.num_machines, repr(pool.on_demand_usd_per_hour)) for name, pool in pools),
    )
    _write(folder / PRICES, ("pool", "seconds", "usd_per_hour"), _steps((pool.name, pool.price) for _, pool in pools))
    _write(folder / AVAILABILITY, ("pool", "seconds", "num_up"), _steps((pool.name, pool.num_up) for _, pool in pools))


def _steps(named: Iterable[tuple[str, Series]]) -> Iterator[tuple[object, ...]]:
    for name, series in named:
        for time_s, value in zip(series.times_s.tolist(), series.values.tolist(), strict=True):
            yield name, f"{time_s:.12g}", f"{value:.12g}"


def _write(path: Path, header: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(lines)


# --- reading tables ---------------------------------------------------------------------------------------------------


def _named(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def open_text(path: Path) -> io.TextIOWrapper:
    """The text of `path`, unpacked where its name ends in .gz."""
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells of each line of a CSV file with a header that has at least `columns`.

    Raises:
        ConfigError: it cannot be read, or a column is missing.
    """
    try:
        with open_text(path) as file:
            reader = csv.DictReader(file, restval="")
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{path}: expected the columns {', '.join(columns)}; {', '.join(missing)} missing")
            for row in reader:
                yield reader.line_num, row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: expected a CSV file in UTF-8, plain or .gz: {error}") from error


def number(row: Mapping[str, str], column: str, where: str) -> float:
    """The finite number in `column`.

    Raises:
        ConfigError: it is none.
    """
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{where}: expected a number in {column}, got {row[column]!r}")
    return value


def _read_series(path: Path | None, column: str) -> dict[str, Series]:
    if path is None:
        return {}
    times: dict[str, list[float]] = {}
    values: dict[str, list[float]] = {}
    for line, row in rows(path, ("pool", "seconds", column)):
        where = f"{path}: line {line}"
        times.setdefault(row["pool"], []).append(number(row, "seconds", where))
        values.setdefault(row["pool"], []).append(number(row, column, where))
    found = {}
    for name, pool_times in times.items():
        try:
            found[name] = Series(np.array(pool_times), np.array(values[name]))
        except ConfigError as error:
            raise ConfigError(f"{path}: pool {name!r}: {error}") from error
    return found
