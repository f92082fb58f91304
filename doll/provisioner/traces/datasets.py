"""Public recordings of spot markets in their own formats, turned into a `TraceSet` of `doll.provisioner.traces.model`.

EC2 price histories, SkyPilot's availability traces (NSDI 2024), Bamboo's node counts (NSDI 2023) and lifetimes of
Google's preemptible machines (2019).
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from doll.bounded import MalformedError, json_object, short
from doll.errors import ConfigError
from doll.provisioner.traces.model import MAX_MACHINES, Floats, Pool, Series, TraceSet, constant, up_at_bid
from doll.provisioner.traces.tables import moment, number, rows, text_lines

# Prices of the DOLL paper's worker (c5.xlarge, ca-central-1, 2021), for recordings of availability that come without
# prices: what counts there is the ratio, and 0.55 is a dear spot market.
ON_DEMAND_USD_PER_HOUR, SPOT_USD_PER_HOUR = 0.286, 0.158

# Linux on demand in us-east-1, USD per hour, as AWS listed them at the time of the recording. Source: written down from
# memory in November 2026, since AWS keeps no old price list; c3.xlarge of 2015 agrees with the recording's own notes,
# c5.xlarge and m5.xlarge with ec2_on_demand.csv, which has a source. `on_demand.csv` beside a recording overrides them
# (docs/traces.md).
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
# What AWS adds to the Linux price per hour; from memory too.
_SURCHARGE = {"Linux/UNIX": 0.0, "SUSE Linux": 0.10}
ON_DEMAND = "on_demand.csv"
_MACHINES = 64
# Assumed, since the data set does not say it: time until a preempted machine of Google's is replaced.
_GOOGLE_GAP_S = 600.0
_GOOGLE_MACHINES = 32
_GOOGLE_DAYS = 10.0
_LONGEST_GAP_S = 1e7
_MOST_SNIFFED = 10_000


Parts = list[tuple[str, str]]
"""What of a file was left out, and why."""
Loader = Callable[[Path], tuple[list[TraceSet], Parts]]
"""Reads one file. It raises `ConfigError` where nothing in it can be used; the message names the file."""


def ec2_prices(path: Path) -> tuple[list[TraceSet], Parts]:
    """A spot price history: a machine is there while the price is at or below on-demand, which is also the bid.

    Since late 2017 prices are smooth and do not say when machines are taken away: such a recording gives cost only.
    On-demand prices come from `on_demand.csv` beside it, then from the table above, of the year in which most rows of
    the pool are, else of another year that it reaches into; other types are left out. Rows may stand in any order, as
    EC2 itself gives the newest first.

    Raises:
        ConfigError: the file is damaged, or no pool of it can be used.
    """
    stated = _stated_on_demand(path.parent)
    known = {(kind, product) for table in _EC2_ON_DEMAND.values() for kind in table for product in _SURCHARGE}
    histories: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    years: dict[tuple[str, str, str], Counter[int]] = {}
    for line, row in rows(path, _EC2_COLUMNS):
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
        # Stable: of two prices at one moment the later line holds.
        history = sorted(histories[zone, kind, product], key=lambda one: one[0])
        at_s = np.array([at - start_s for at, _ in history], dtype=np.float64)
        name = f"{zone} {_kind(kind, product)}"
        try:
            price_of = Series(at_s, np.array([usd for _, usd in history]))
            pools.append(Pool(name, _MACHINES, on_demand, price_of, up_at_bid(price_of, _MACHINES, on_demand)))
        except ConfigError as error:
            skipped.append((f"pool {name}", str(error)))
    if not pools:
        raise _nothing_in(path, skipped)
    # The year of most of its rows: a history begins with the last change before its first day.
    year = max(sorted(all_years), key=lambda one: all_years[one])
    return [TraceSet(f"ec2-{year}", tuple(pools))], skipped


def _nothing_in(path: Path, skipped: Parts) -> ConfigError:
    reasons = [f"{what}: {why}" for what, why in skipped[:3]]
    more = [f"and {len(skipped) - 3} more"] if len(skipped) > 3 else []
    return ConfigError(f"{path}: " + ("; ".join([*reasons, *more]) or "expected a recording, got no line of one"))


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
    found = (_EC2_ON_DEMAND.get(year, {}).get(kind) for year, _ in years.most_common())
    price = next((one for one in found if one is not None), None)
    return None if price is None else price + _SURCHARGE[product]


def _stated_on_demand(folder: Path) -> dict[tuple[str, str], float]:
    """(instance type, product) -> USD per hour by the user's own `on_demand.csv`; empty where there is none."""
    found = {}
    for path in sorted(folder.glob(f"{ON_DEMAND}*")):
        for line, row in rows(path, ("instance_type", "usd_per_hour")):
            price = number(row, "usd_per_hour", f"{path}: line {line}")
            if price <= 0:
                raise ConfigError(f"{path}: line {line}: expected a price above 0, got {price}")
            found[row["instance_type"], row.get("product") or "Linux/UNIX"] = price
    return found


def skypilot(path: Path) -> tuple[list[TraceSet], Parts]:
    """Availability of 1, 4 or 16 machines at equal steps, one JSON object per line; one set per kind and start date.

    Raises:
        ConfigError: the file is damaged, or no line of it can be used.
    """
    sets: dict[str, list[Pool]] = {}
    skipped: Parts = []
    for line, text in enumerate(text_lines(path), 1):
        if not text.strip():
            continue
        try:
            group, pool = _skypilot_pool(text)
            sets.setdefault(group, []).append(pool)
        except (ConfigError, ValueError, KeyError, TypeError, OverflowError) as error:
            why = f"expected a trace with data, nodes and gap_seconds: {type(error).__name__}: {short(error)}"
            skipped.append((f"line {line}", why))
    if not sets:
        raise _nothing_in(path, skipped)
    return [TraceSet(name, tuple(pools)) for name, pools in sets.items()], skipped


def _skypilot_pool(text: str) -> tuple[str, Pool]:
    trace = json_object(text)
    data = trace["data"]
    if not isinstance(data, list) or not data or not all(type(count) in (int, float) for count in data):
        raise MalformedError("data: expected numbers")
    counts = np.array(data, np.float64)
    nodes, gap_s = int(trace["nodes"]), float(trace["gap_seconds"])
    if not 0 < gap_s <= _LONGEST_GAP_S:
        raise MalformedError(f"gap_seconds: expected a time above 0, got {gap_s}")
    date = short(trace["start_date"], 40)
    name = f"{short(trace['zone'], 60)} {short(trace['resource'], 60)} {date}"
    times_s = np.arange(len(counts) + 1, dtype=np.float64) * gap_s
    pool = _unpriced(name, nodes, Series(times_s, np.append(counts, counts[-1])))
    return f"skypilot-{short(trace['kind'], 40)}-{date}", pool


def _unpriced(name: str, num_machines: int, num_up: Series) -> Pool:
    price = constant(SPOT_USD_PER_HOUR, float(num_up.times_s[0]), float(num_up.times_s[-1]))
    return Pool(name, num_machines, ON_DEMAND_USD_PER_HOUR, price, num_up)


def bamboo_events(path: Path) -> tuple[list[TraceSet], Parts]:
    """Nodes added and removed: milliseconds, `add` or `remove`, node name; no header.

    Raises:
        ConfigError: the file is damaged.
    """
    changes: list[tuple[float, int]] = []
    for line, text in enumerate(text_lines(path), 1):
        if not text.strip():
            continue
        where = f"{path}: line {line}"
        cells = [cell.strip() for cell in text.split(",")]
        if len(cells) != 3 or cells[1] not in ("add", "remove"):
            raise ConfigError(f"{where}: expected 'milliseconds,add|remove,node', got {short(text, 60)!r}")
        changes.append((number({"time": cells[0]}, "time", where) / 1000.0, 1 if cells[1] == "add" else -1))
    counts = np.cumsum([change for _, change in changes]).astype(float).tolist()
    return [_bamboo(path, [(at_s, count) for (at_s, _), count in zip(changes, counts, strict=True)])], []


def bamboo_counts(path: Path) -> tuple[list[TraceSet], Parts]:
    """Machines up about once a minute: date, time, count; lines can be out of order.

    Raises:
        ConfigError: the file is damaged.
    """
    samples = []
    for line, text in enumerate(text_lines(path), 1):
        if not text.strip():
            continue
        where = f"{path}: line {line}"
        cells = [cell.strip() for cell in text.split(",")]
        if len(cells) != 3:
            raise ConfigError(f"{where}: expected 'date, time, count', got {short(text, 60)!r}")
        at_s = moment(f"{cells[0]}T{cells[1]}+00:00", where).timestamp()
        samples.append((at_s, number({"count": cells[2]}, "count", where)))
    samples.sort(key=lambda sample: sample[0])  # stable: of two at the same second the later line wins
    return [_bamboo(path, [(at_s - samples[0][0], count) for at_s, count in samples])], []


def _bamboo(path: Path, samples: Sequence[tuple[float, float]]) -> TraceSet:
    if not samples:
        raise ConfigError(f"{path}: expected counts of machines over time, got an empty file")
    most = max(count for _, count in samples)
    if not most <= MAX_MACHINES:
        raise ConfigError(f"{path}: expected at most {MAX_MACHINES} machines, got {most:g}")
    try:
        num_up = _steps([at_s for at_s, _ in samples], [count for _, count in samples])
        return TraceSet(f"bamboo-{_stem(path)}", (_unpriced(f"bamboo {_stem(path)}", int(most), num_up),))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _stem(path: Path) -> str:
    return path.name.split(".")[0].replace("_", "-")


def _steps(times: Sequence[float], counts: Sequence[float]) -> Series:
    """One value per moment: the last of those that share it."""
    last = dict(zip(times, counts, strict=True))
    return Series(np.array(list(last)), np.array(list(last.values())))


def google_lifetimes(path: Path) -> tuple[list[TraceSet], Parts]:
    """Lifetimes of single machines, one set; pools by zone.

    The recording says how long machines lived, not how many could be had. A pool is made of machines that live as long
    as recorded ones (Kaplan-Meier, since those that their user stopped are censored), and are replaced ten minutes
    after a preemption.

    Raises:
        ConfigError: the file is damaged, or no zone of it can be used.
    """
    lives: dict[str, list[tuple[float, bool]]] = {}
    for line, row in rows(path, _GOOGLE_COLUMNS):
        where = f"{path}: line {line}"
        life_s = number(row, "lifetime_s", where)
        if life_s < 0:
            raise ConfigError(f"{where}: expected a lifetime of 0 s or more, got {life_s:g}")
        lives.setdefault(row["zone"], []).append((life_s, row["end_event"] == "preempted"))
    rng = np.random.default_rng(2019)
    pools: list[Pool] = []
    skipped: Parts = []
    for zone in sorted(lives):
        try:
            pools.append(_unpriced(f"google {zone}", _GOOGLE_MACHINES, _renewed(lives[zone], rng)))
        except ConfigError as error:
            skipped.append((f"zone {zone}", str(error)))
    if not pools:
        raise _nothing_in(path, skipped)
    return [TraceSet("google-2019", tuple(pools))], skipped


def _renewed(lives: Sequence[tuple[float, bool]], rng: np.random.Generator) -> Series:
    life_s, survival = kaplan_meier(lives)
    end_s = _GOOGLE_DAYS * 86400.0
    changes: list[tuple[float, int]] = []
    for _ in range(_GOOGLE_MACHINES):
        # Begin a day before the recording, so that machines of all ages are there at its start.
        at_s = -86400.0 - float(rng.uniform(0, 86400.0))
        while at_s < end_s:
            index = int(np.searchsorted(-survival, -rng.random(), side="left"))
            until_s = at_s + float(life_s[min(index, len(life_s) - 1)])
            changes += [(max(at_s, 0.0), 1), (max(until_s, 0.0), -1)]
            at_s = until_s + _GOOGLE_GAP_S
    changes.sort()
    times = [time_s for time_s, _ in changes if time_s <= end_s]
    counts = np.cumsum([step for time_s, step in changes if time_s <= end_s]).astype(float).tolist()
    return _steps([*times, end_s], [*counts, counts[-1]])


def kaplan_meier(lives: Sequence[tuple[float, bool]]) -> tuple[Floats, Floats]:
    """Ages at which machines ended, ascending, and the share that survives each.

    Args:
        lives: (age in seconds, whether the machine was preempted at it; otherwise it was last seen alive).
    """
    ages = sorted({age for age, ended in lives if ended})
    if not ages:
        raise ConfigError("expected at least one machine that was preempted")
    all_ages = np.sort([age for age, _ in lives])
    ended = np.sort([age for age, preempted in lives if preempted])
    at_risk = len(all_ages) - np.searchsorted(all_ages, ages, side="left")
    deaths = np.searchsorted(ended, ages, side="right") - np.searchsorted(ended, ages, side="left")
    return np.array(ages, np.float64), np.cumprod(1.0 - deaths / at_risk, dtype=np.float64)


_EC2_COLUMNS = ("timestamp_utc", "availability_zone", "instance_type", "product", "spot_usd_per_hour")
_GOOGLE_COLUMNS = ("zone", "lifetime_s", "end_event")
_BY_NAME: Sequence[tuple[str, Loader]] = (
    ("prices.csv", ec2_prices), ("traces.jsonl", skypilot), ("p3_trace.csv", bamboo_events),
    ("gcloud_*.txt", bamboo_counts), ("vms.csv", google_lifetimes),
)  # fmt: skip
_EVENT = re.compile(r"\s*[-+.\de]+\s*,\s*(add|remove)\s*,[^,]*", re.IGNORECASE)
_COUNT = re.compile(r"\s*\d{4}-\d\d-\d\d\s*,\s*\d\d:\d\d(:\d\d)?\s*,\s*\d+\s*")


def of_form(first_line: str) -> Loader | None:
    """Who reads a file that begins so; None where nobody does."""
    line = first_line[:_MOST_SNIFFED].strip()
    if line.startswith("{") and '"data"' in first_line and '"gap_seconds"' in first_line:
        return skypilot
    columns = {cell.strip().strip('"') for cell in line.split(",")}
    if columns.issuperset(_EC2_COLUMNS):
        return ec2_prices
    if columns.issuperset(_GOOGLE_COLUMNS):
        return google_lifetimes
    if _EVENT.fullmatch(line):
        return bamboo_events
    return bamboo_counts if _COUNT.fullmatch(line) else None


def of_name(name: str) -> Loader | None:
    """Who reads the file that was published under this name (without .gz)."""
    return next((loader for pattern, loader in _BY_NAME if fnmatch.fnmatchcase(name, pattern)), None)
