"""Lifetimes of Google's preemptible machines (2019), one machine per row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from doll.errors import ConfigError
from doll.provisioner.traces.model import Floats, Pool, Series, TraceSet
from doll.provisioner.traces.recordings import Parts
from doll.provisioner.traces.tables import number, rows

from doll_lab.traces.form import TraceFormat, columns_of, nothing_in, steps, unpriced

_COLUMNS = ("zone", "lifetime_s", "end_event")
# Time until a preempted Google machine is replaced. This is an assumption, because the data set does not state it.
_GAP_S = 600.0
_MACHINES = 32
_DAYS = 10.0


def load(path: Path) -> tuple[list[TraceSet], Parts]:
    """Load the lifetimes of single machines: one set, with a pool for each zone.

    The recording states how long machines lived, not how many were available. The machines of a pool live as long as
    recorded machines (Kaplan-Meier estimate, because machines stopped by users are censored), and are replaced ten
    minutes after a preemption.

    Raises:
        ConfigError: the file is damaged, or none of its zones is usable.
    """
    lives: dict[str, list[tuple[float, bool]]] = {}
    for line, row in rows(path, _COLUMNS):
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
            pools.append(unpriced(f"google {zone}", _MACHINES, _renewed(lives[zone], rng)))
        except ConfigError as error:
            skipped.append((f"zone {zone}", str(error)))
    if not pools:
        raise nothing_in(path, skipped)
    return [TraceSet("google-2019", tuple(pools))], skipped


def _renewed(lives: Sequence[tuple[float, bool]], rng: np.random.Generator) -> Series:
    life_s, survival = kaplan_meier(lives)
    end_s = _DAYS * 86400.0
    changes: list[tuple[float, int]] = []
    for _ in range(_MACHINES):
        # Begin a day before the recording, so that machines of all ages are there at its start.
        at_s = -86400.0 - float(rng.uniform(0, 86400.0))
        while at_s < end_s:
            index = int(np.searchsorted(-survival, -rng.random(), side="left"))
            until_s = at_s + float(life_s[min(index, len(life_s) - 1)])
            changes += [(max(at_s, 0.0), 1), (max(until_s, 0.0), -1)]
            at_s = until_s + _GAP_S
    changes.sort()
    times = [time_s for time_s, _ in changes if time_s <= end_s]
    counts = np.cumsum([step for time_s, step in changes if time_s <= end_s]).astype(float).tolist()
    return steps([*times, end_s], [*counts, counts[-1]])


def kaplan_meier(lives: Sequence[tuple[float, bool]]) -> tuple[Floats, Floats]:
    """Return the ages at which machines ended, ascending, and the share of machines that survives each age.

    Args:
        lives: (age in seconds, whether the machine was preempted at this age; False: it was last seen alive).
    """
    ages = sorted({age for age, ended in lives if ended})
    if not ages:
        raise ConfigError("expected at least one machine that was preempted")
    all_ages = np.sort([age for age, _ in lives])
    ended = np.sort([age for age, preempted in lives if preempted])
    at_risk = len(all_ages) - np.searchsorted(all_ages, ages, side="left")
    deaths = np.searchsorted(ended, ages, side="right") - np.searchsorted(ended, ages, side="left")
    return np.array(ages, np.float64), np.cumprod(1.0 - deaths / at_risk, dtype=np.float64)


FORMAT = TraceFormat("Google lifetimes", "vms.csv", lambda line: columns_of(line).issuperset(_COLUMNS), load)
