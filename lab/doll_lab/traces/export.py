"""Trace sets written in normal form (docs/traces.md), which `doll.provisioner.traces.model.read_folder` reads."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from doll.provisioner.traces.model import AVAILABILITY, POOL_COLUMNS, POOLS, PRICES, Series, TraceSet


def write_folder(sets: Iterable[TraceSet], folder: Path) -> None:
    """Write trace sets in normal form; `read_folder` reads equal sets. The name of a pool that is not unique gets the
    name of its set appended. Raises OSError if the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    pools = [(trace_set.name, pool) for trace_set in sets for pool in trace_set.pools]
    count = Counter(pool.name for _, pool in pools)  # a file must not contain a name twice
    pools = [
        (name, pool if count[pool.name] == 1 else replace(pool, name=f"{pool.name} ({name})")) for name, pool in pools
    ]
    _write(
        folder / POOLS,
        (*POOL_COLUMNS, "machine"),
        ((name, pool.name, pool.num_machines, repr(pool.on_demand_usd_per_hour), pool.machine) for name, pool in pools),
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
