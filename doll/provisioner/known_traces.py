"""Public recordings of spot markets in their own formats, turned into the normal form of `doll.provisioner.traces`.

EC2 price histories, SkyPilot's availability traces (NSDI 2024), Bamboo's node counts (NSDI 2023) and lifetimes of
Google's preemptible machines (2019).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from doll.errors import ConfigError
from doll.provisioner.traces import Floats, Pool, Series, TraceSet, constant, number, open_text, rows, up_at_bid

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
_ON_DEMAND = "on_demand.csv"
_MACHINES = 64
# Assumed, since the data set does not say it: time until a preempted machine of Google's is replaced.
_GOOGLE_GAP_S = 600.0
_GOOGLE_MACHINES = 32
_GOOGLE_DAYS = 10.0


def ec2_prices(path: Path) -> list[TraceSet]:
    """A spot price history: a machine is there while the price is at or below on-demand, which is also the bid.

    Since late 2017 prices are smooth and do not say when machines are taken away: such a recording gives cost only.
    On-demand prices come from `on_demand.csv` beside it, then from the table above; other types are left out.
    """
    stated = _stated_on_demand(path.parent)
    times: dict[tuple[str, str, str], list[float]] = {}
    prices: dict[tuple[str, str, str], list[float]] = {}
    columns = ("timestamp_utc", "availability_zone", "instance_type", "product", "spot_usd_per_hour")
    years: set[int] = set()
    table: Mapping[str, float] = {}
    for line, row in rows(path, columns):
        where = f"{path}: line {line}"
        if not years:
            years.add(_moment(row["timestamp_utc"], where).year)
            table = _EC2_ON_DEMAND.get(min(years), {})
        kind, product = row["instance_type"], row["product"]
        if (kind, product) not in stated and (kind not in table or product not in _SURCHARGE):
            continue
        key = (row["availability_zone"], kind, product)
        times.setdefault(key, []).append(_moment(row["timestamp_utc"], where).timestamp())
        prices.setdefault(key, []).append(number(row, "spot_usd_per_hour", where))
    pools = []
    start_s = min((series[0] for series in times.values()), default=0.0)
    for (zone, kind, product), moments in sorted(times.items()):
        if len(moments) < 2:
            continue
        on_demand = stated.get((kind, product)) or table[kind] + _SURCHARGE[product]
        at_s = np.array([moment - start_s for moment in moments], dtype=np.float64)
        price = Series(at_s, np.array(prices[zone, kind, product]))
        name = f"{zone} {kind}" + ("" if product == "Linux/UNIX" else f" {product}")
        pools.append(Pool(name, _MACHINES, on_demand, price, up_at_bid(price, _MACHINES, on_demand)))
    if not pools:
        raise ConfigError(
            f"{path}: no on-demand price is known for any instance type in {sorted(years)}: state them in {_ON_DEMAND} "
            f"beside it, see docs/traces.md"
        )
    return [TraceSet(f"ec2-{min(years)}", tuple(pools))]


def _stated_on_demand(folder: Path) -> dict[tuple[str, str], float]:
    """(instance type, product) -> USD per hour by the user's own `on_demand.csv`; empty where there is none."""
    found = {}
    for path in sorted(folder.glob(f"{_ON_DEMAND}*")):
        for line, row in rows(path, ("instance_type", "usd_per_hour")):
            price = number(row, "usd_per_hour", f"{path}: line {line}")
            if price <= 0:
                raise ConfigError(f"{path}: line {line}: expected a price above 0, got {price}")
            found[row["instance_type"], row.get("product") or "Linux/UNIX"] = price
    return found


def _moment(text: str, where: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError as error:
        raise ConfigError(f"{where}: expected a time like 2015-03-11T10:34:42Z, got {text!r}") from error


def skypilot(path: Path) -> list[TraceSet]:
    """Availability of 1, 4 or 16 machines at equal steps, one JSON object per line; one set per start date."""
    sets: dict[str, list[Pool]] = {}
    with open_text(path) as file:
        for line, text in enumerate(file, 1):
            try:
                trace = json.loads(text)
                counts = np.array(trace["data"], float)
                nodes, gap_s = int(trace["nodes"]), float(trace["gap_seconds"])
                name = f"{trace['zone']} {trace['resource']}"
                group = f"skypilot-{trace['kind']}-{trace['start_date']}"
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path}: line {line}: expected a trace with data and gap_seconds: {error}"
                ) from error
            times_s = np.arange(len(counts) + 1, dtype=np.float64) * gap_s
            sets.setdefault(group, []).append(
                _unpriced(f"{name} {trace['start_date']}", nodes, Series(times_s, np.append(counts, counts[-1])))
            )
    return [TraceSet(name, tuple(pools)) for name, pools in sets.items()]


def _unpriced(name: str, num_machines: int, num_up: Series) -> Pool:
    price = constant(SPOT_USD_PER_HOUR, float(num_up.times_s[0]), float(num_up.times_s[-1]))
    return Pool(name, num_machines, ON_DEMAND_USD_PER_HOUR, price, num_up)


def bamboo_events(path: Path) -> list[TraceSet]:
    """Nodes added and removed: milliseconds, `add` or `remove`, node name; no header."""
    times, counts, up = [], [], 0
    with open_text(path) as file:
        for line, text in enumerate(file, 1):
            cells = [cell.strip() for cell in text.split(",")]
            if len(cells) != 3 or cells[1] not in ("add", "remove"):
                raise ConfigError(f"{path}: line {line}: expected 'milliseconds,add|remove,node', got {text.strip()!r}")
            up += 1 if cells[1] == "add" else -1
            times.append(number({"time": cells[0]}, "time", f"{path}: line {line}") / 1000.0)
            counts.append(float(up))
    return [
        TraceSet(
            f"bamboo-{_stem(path)}", (_unpriced(f"bamboo {_stem(path)}", int(max(counts)), _steps(times, counts)),)
        )
    ]


def bamboo_counts(path: Path) -> list[TraceSet]:
    """Machines up about once a minute: date, time, count; lines can be out of order."""
    samples = []
    with open_text(path) as file:
        for line, text in enumerate(file, 1):
            cells = [cell.strip() for cell in text.split(",")]
            if len(cells) != 3:
                raise ConfigError(f"{path}: line {line}: expected 'date, time, count', got {text.strip()!r}")
            where = f"{path}: line {line}"
            at_s = _moment(f"{cells[0]}T{cells[1]}+00:00", where).timestamp()
            samples.append((at_s, number({"count": cells[2]}, "count", where)))
    samples.sort(key=lambda sample: sample[0])  # stable: of two at the same second the later line wins
    times = [at_s - samples[0][0] for at_s, _ in samples]
    counts = [count for _, count in samples]
    return [
        TraceSet(
            f"bamboo-{_stem(path)}", (_unpriced(f"bamboo {_stem(path)}", int(max(counts)), _steps(times, counts)),)
        )
    ]


def _stem(path: Path) -> str:
    return path.name.split(".")[0].replace("_", "-")


def _steps(times: Sequence[float], counts: Sequence[float]) -> Series:
    """One value per moment: the last of those that share it."""
    last = dict(zip(times, counts, strict=True))
    return Series(np.array(list(last)), np.array(list(last.values())))


def google_lifetimes(path: Path) -> list[TraceSet]:
    """Lifetimes of single machines, one set; pools by zone.

    The recording says how long machines lived, not how many could be had. A pool is made of machines that live as long
    as recorded ones (Kaplan-Meier, since those that their user stopped are censored), and are replaced ten minutes
    after a preemption.
    """
    lives: dict[str, list[tuple[float, bool]]] = {}
    for line, row in rows(path, ("zone", "lifetime_s", "end_event")):
        life_s = number(row, "lifetime_s", f"{path}: line {line}")
        lives.setdefault(row["zone"], []).append((life_s, row["end_event"] == "preempted"))
    rng = np.random.default_rng(2019)
    pools = tuple(_unpriced(f"google {zone}", _GOOGLE_MACHINES, _renewed(lives[zone], rng)) for zone in sorted(lives))
    return [TraceSet("google-2019", pools)]


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


LOADERS: dict[str, Callable[[Path], list[TraceSet]]] = {
    "prices.csv*": ec2_prices,
    "traces.jsonl*": skypilot,
    "p3_trace.csv*": bamboo_events,
    "gcloud_*.txt*": bamboo_counts,
    "vms.csv*": google_lifetimes,
}
