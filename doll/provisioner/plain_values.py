"""Numbers and arrays to and from plain JSON values, which have no infinity: -inf ("never") is None there. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from doll.theory.checks import Floats


def plain(at_s: float) -> float | None:
    """A time for JSON: None for one that is not finite."""
    return float(at_s) if math.isfinite(at_s) else None


def time_of(value: float | None) -> float:
    """The time that `plain` stored; -inf for None."""
    return -math.inf if value is None else float(value)


def plain_array(times_s: Floats) -> list[float | None]:
    """Times for JSON, one per slot."""
    return [plain(float(at_s)) for at_s in times_s]


def times_of(values: Sequence[float | None], count: int) -> Floats:
    """The times that `plain_array` stored.

    Raises:
        ValueError: another number of slots than `count`.
    """
    times: Floats = sized(np.array([time_of(value) for value in values], dtype=np.float64), count)
    return times


def sized(values: Any, count: int) -> Any:
    """An array of one value per slot, as it is.

    Raises:
        ValueError: another number of slots than `count`.
    """
    if values.shape != (count,):
        raise ValueError(f"expected {count} slots, got {values.shape}")
    return values
