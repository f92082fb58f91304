"""Bamboo's node counts (NSDI 2023): nodes added and removed, or the number of running machines about once a minute."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from doll.errors import ConfigError
from doll.provisioner.traces.model import MAX_MACHINES, TraceSet
from doll.provisioner.traces.recordings import Parts
from doll.provisioner.traces.tables import number, text_lines
from doll.records.bounded import short

from doll_lab.traces.form import MAX_HEADER_CHARS, TraceFormat, moment, steps, unpriced

_EVENT = re.compile(r"\s*[-+.\de]+\s*,\s*(add|remove)\s*,[^,]*", re.IGNORECASE)
_COUNT = re.compile(r"\s*\d{4}-\d\d-\d\d\s*,\s*\d\d:\d\d(:\d\d)?\s*,\s*\d+\s*")


def load_events(path: Path) -> tuple[list[TraceSet], Parts]:
    """Load added and removed nodes: milliseconds, `add` or `remove`, node name; without a header.

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
    return [_trace_set(path, [(at_s, count) for (at_s, _), count in zip(changes, counts, strict=True)])], []


def load_counts(path: Path) -> tuple[list[TraceSet], Parts]:
    """Load the number of running machines about once a minute: date, time, count; lines may be out of order.

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
    samples.sort(key=lambda sample: sample[0])  # stable: of two samples at the same second, the later line is used
    return [_trace_set(path, [(at_s - samples[0][0], count) for at_s, count in samples])], []


def _trace_set(path: Path, samples: Sequence[tuple[float, float]]) -> TraceSet:
    if not samples:
        raise ConfigError(f"{path}: expected counts of machines over time, got an empty file")
    most = max(count for _, count in samples)
    if not most <= MAX_MACHINES:
        raise ConfigError(f"{path}: expected at most {MAX_MACHINES} machines, got {most:g}")
    try:
        num_up = steps([at_s for at_s, _ in samples], [count for _, count in samples])
        return TraceSet(f"bamboo-{_stem(path)}", (unpriced(f"bamboo {_stem(path)}", int(most), num_up),))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _stem(path: Path) -> str:
    return path.name.split(".")[0].replace("_", "-")


EVENTS = TraceFormat(
    "Bamboo events", "p3_trace.csv", lambda line: _EVENT.fullmatch(line[:MAX_HEADER_CHARS]) is not None, load_events
)
COUNTS = TraceFormat(
    "Bamboo counts", "gcloud_*.txt", lambda line: _COUNT.fullmatch(line[:MAX_HEADER_CHARS]) is not None, load_counts
)
