"""What numbers of the job file can be, by their unit: the end of the key's name says it.

A number beyond these is one that no run can work with: a wait that the system's calls refuse or round to nothing, a
size that no memory has, an integer that JSON and float64 do not hold. Keys with closer bounds have their own.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Limits(NamedTuple):
    """The least number above 0 and the largest one; the same hold for numbers below 0."""

    least: float
    most: float
    unit: str


BY_SUFFIX: Final = {
    "_per_s": Limits(1e-6, 1e9, " per second"),
    "_per_min": Limits(1e-6, 1e9, " per minute"),
    "_ms": Limits(1, 2_000_000_000, " ms"),
    "latency_s": Limits(1e-9, 3600, " seconds"),  # of a link, which no timer waits for
    # Waits of the system are in ms, of 32 bits: 24 days.
    "_s": Limits(0.001, 2_000_000, " seconds"),
    "_hours": Limits(0.01, 1_000_000, " hours"),
    "_bytes": Limits(1, 1e15, " bytes"),
    "_usd": Limits(1e-9, 1e12, " USD"),
    "_usd_per_h": Limits(1e-9, 1e9, " USD per hour"),
}
WHOLE: Final = Limits(1, 2**53, "")  # of JSON, and of float64
OTHER: Final = Limits(0.0, 1e35, "")  # a float32, with room for a factor
LONGEST_S: Final = 1e9
"""For a duration that is only compared with others: 31 years."""


def limits_of(name: str, *, is_whole: bool) -> Limits:
    """Of the key `name`."""
    for suffix, limits in BY_SUFFIX.items():
        if name.endswith(suffix):
            return limits
    return WHOLE if is_whole else OTHER
