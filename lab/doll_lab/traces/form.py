"""The interface of a trace format, and common parts of formats: pools without prices, the error for a bad file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from doll.errors import ConfigError
from doll.provisioner.traces.model import Pool, Series, constant
from doll.provisioner.traces.recordings import Loader, Parts
from doll.records.bounded import short

# Prices of the DOLL paper's worker (c5.xlarge, ca-central-1, 2021), for recordings without prices: only the
# ratio matters, and 0.55 is an expensive spot market.
ON_DEMAND_USD_PER_HOUR, SPOT_USD_PER_HOUR = 0.286, 0.158

MAX_HEADER_CHARS = 10_000
"""No header or short line is longer: more of a first line is not looked at."""


@dataclass(frozen=True)
class TraceFormat:
    """One format of recordings.

    Attributes:
        name: name for messages.
        published_as: pattern of the names under which such files were published, without .gz.
        recognises: function that returns whether a file with this first line, stripped, has the format.
    """

    name: str
    published_as: str
    recognises: Callable[[str], bool]
    load: Loader


def columns_of(first_line: str) -> frozenset[str]:
    """Return the column names in the first line of a CSV file."""
    return frozenset(cell.strip().strip('"') for cell in first_line[:MAX_HEADER_CHARS].split(","))


def unpriced(name: str, num_machines: int, num_up: Series, machine: str = "") -> Pool:
    """Return a pool with the paper's prices, for a recording without prices."""
    price = constant(SPOT_USD_PER_HOUR, float(num_up.times_s[0]), float(num_up.times_s[-1]))
    return Pool(name, num_machines, ON_DEMAND_USD_PER_HOUR, price, num_up, machine)


def steps(times: Sequence[float], counts: Sequence[float]) -> Series:
    """Return one value per time: the last value of each time."""
    last = dict(zip(times, counts, strict=True))
    return Series(np.array(list(last)), np.array(list(last.values())))


def nothing_in(path: Path, skipped: Parts) -> ConfigError:
    """Return the error for a file without a usable recording."""
    reasons = [f"{what}: {why}" for what, why in skipped[:3]]
    more = [f"and {len(skipped) - 3} more"] if len(skipped) > 3 else []
    return ConfigError(f"{path}: " + ("; ".join([*reasons, *more]) or "expected a recording, got no line of one"))


def moment(text: str, where: str) -> datetime:
    """Return an ISO 8601 time in UTC; a time without a zone is UTC. Raises ConfigError for any other text."""
    try:
        at = datetime.fromisoformat(text)
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: expected a time like 2015-03-11T10:34:42Z, got {short(text, 60)!r}") from error
