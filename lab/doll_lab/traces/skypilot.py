"""SkyPilot's availability traces (NSDI 2024): JSON lines with the number of machines at equal steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from doll.errors import ConfigError
from doll.provisioner.traces.model import Pool, Series, TraceSet
from doll.provisioner.traces.recordings import Parts
from doll.provisioner.traces.tables import text_lines
from doll.records.bounded import MalformedError, json_object, short

from doll_lab.traces.form import TraceFormat, nothing_in, unpriced

_LONGEST_GAP_S = 1e7


def load(path: Path) -> tuple[list[TraceSet], Parts]:
    """Load availability of 1, 4 or 16 machines at equal steps, one JSON object per line; a set per kind and start date.

    Raises:
        ConfigError: the file is damaged, or none of its lines is usable.
    """
    sets: dict[str, list[Pool]] = {}
    skipped: Parts = []
    for line, text in enumerate(text_lines(path), 1):
        if not text.strip():
            continue
        try:
            group, pool = _pool(text)
            sets.setdefault(group, []).append(pool)
        except (ConfigError, ValueError, KeyError, TypeError, OverflowError) as error:
            why = f"expected a trace with data, nodes and gap_seconds: {type(error).__name__}: {short(error)}"
            skipped.append((f"line {line}", why))
    if not sets:
        raise nothing_in(path, skipped)
    return [TraceSet(name, tuple(pools)) for name, pools in sets.items()], skipped


def _pool(text: str) -> tuple[str, Pool]:
    trace = json_object(text)
    data = trace["data"]
    if not isinstance(data, list) or not data or not all(type(count) in (int, float) for count in data):
        raise MalformedError("data: expected numbers")
    counts = np.array(data, np.float64)
    nodes, gap_s = int(trace["nodes"]), float(trace["gap_seconds"])
    if not 0 < gap_s <= _LONGEST_GAP_S:
        raise MalformedError(f"gap_seconds: expected a time above 0, got {gap_s}")
    date = short(trace["start_date"], 40)
    machine = short(trace["resource"], 60)
    name = f"{short(trace['zone'], 60)} {machine} {date}"
    times_s = np.arange(len(counts) + 1, dtype=np.float64) * gap_s
    pool = unpriced(name, nodes, Series(times_s, np.append(counts, counts[-1])), machine)
    return f"skypilot-{short(trace['kind'], 40)}-{date}", pool


def _recognises(first_line: str) -> bool:
    return first_line.startswith("{") and '"data"' in first_line and '"gap_seconds"' in first_line


FORMAT = TraceFormat("SkyPilot availability", "traces.jsonl", _recognises, load)
