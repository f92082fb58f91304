"""Format figures as text for people: numbers, money, sizes, times and tables, rounded for reading. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

_MOST_DECIMALS: Final = 4  # maximum decimal places of a dollar amount


def usd(value: float, *, up: bool = False) -> str:
    """Format US dollars: to the cent, or below one dollar with two significant digits and at most four decimals.

    Args:
        up: True: round up, for a budget that must suffice.

    >>> usd(26.0943), usd(0.5213), usd(0.005678), usd(26.0943, up=True)
    ('26.09', '0.52', '0.0057', '26.10')
    """
    if not math.isfinite(value):
        return f"{value}"
    decimals = max(2, _decimals_of(value))
    if up:
        value = math.ceil(round(value * 10**decimals, 6)) / 10**decimals
    return f"{value:.{decimals}f}"


def usd_range(value: float, sd: float) -> str:
    """Format a cost and its standard deviation with two significant digits, above one dollar to the cent at most.

    >>> usd_range(26.0943, 0.1633), usd_range(1234.5, 56.7), usd_range(0.5, 0.0)
    ('26.09 +- 0.16', '1234 +- 57', '0.50')
    """
    if not (math.isfinite(value) and math.isfinite(sd)) or sd <= 0:
        return usd(value)
    return _range(value, sd, 2 if value >= 1 else _MOST_DECIMALS)


def duration(seconds: float) -> str:
    """Format a time: as `12.3 s` if it is below ten minutes, otherwise in hours, minutes and seconds.

    >>> duration(12.345), duration(599), duration(6715)
    ('12.3 s', '599 s', '1:51:55 h')
    """
    if not math.isfinite(seconds):
        return "never" if seconds > 0 else "?"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{_hours(seconds)} h"


def duration_range(seconds: float, sd_s: float) -> str:
    """Format a time and its standard deviation, both in the same unit.

    >>> duration_range(182.83, 3.94), duration_range(6715, 135.1)
    ('182.8 +- 3.9 s', '1:51:55 +- 0:02:15 h')
    """
    if not (math.isfinite(seconds) and math.isfinite(sd_s)) or sd_s <= 0:
        return duration(seconds)
    if seconds < 600:
        return f"{_range(seconds, sd_s)} s"
    return f"{_hours(seconds)} +- {_hours(sd_s)} h"


def _hours(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _range(value: float, sd: float, most_decimals: int = _MOST_DECIMALS) -> str:
    decimals = min(most_decimals, _decimals_of(sd))
    shown = max(0, decimals)
    return f"{round(value, decimals):.{shown}f} +- {round(sd, decimals):.{shown}f}"


def _decimals_of(value: float) -> int:
    """Return the number of decimal places with which two significant digits of `value` are shown."""
    return 0 if value == 0 else min(_MOST_DECIMALS, 1 - math.floor(math.log10(abs(value))))


def known(value: float) -> bool:
    """Return whether `value` is a number that can be shown: not NaN and not infinite."""
    return math.isfinite(value)


def or_nan(value: float | None) -> float:
    """Return `value`, or NaN if it is None: JSON stores NaN as null."""
    return math.nan if value is None else float(value)


def number(value: float | None) -> str:
    """Format `value` with three significant digits or all integer digits; None and NaN as `?`, infinity as
    `unlimited`."""
    if value is None or math.isnan(value):
        return "?"
    return "unlimited" if math.isinf(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def out_of(count: int, total: int | None) -> str:
    """Format a count and its total, as in `45 of 1,300`; only `45` if the total is unknown."""
    return f"{count:,}" if total is None else f"{count:,} of {total:,}"


def byte_size(count: float) -> str:
    """Format a number of bytes, as in `512 B`, `3.1 kB` or `12.0 MB`; 1 kB is 1000 bytes.

    >>> byte_size(512), byte_size(3_140), byte_size(12_000_000)
    ('512 B', '3.1 kB', '12.0 MB')
    """
    size, units = float(count), ["B", "kB", "MB", "GB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def clock(seconds: float) -> str:
    """Format a time as `12 s`, `3:05` (minutes) or `2:03:05` (hours)."""
    if not known(seconds):
        return ""
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def clock_range(seconds: float, sd_s: float) -> str:
    """Format a time and its standard deviation, both as `clock` does.

    >>> clock_range(42.1, 3.9), clock_range(262, 4.2), clock_range(2540, 180)
    ('42 ± 4 s', '4:22 ± 0:04', '42:20 ± 3:00')
    """
    text = clock(seconds)
    if not (known(seconds) and known(sd_s)) or sd_s <= 0:
        return text
    if round(seconds) < 60 and sd_s < 60:
        return f"{seconds:.0f} ± {sd_s:.0f} s"
    return f"{text} ± {f'0:{sd_s:02.0f}' if round(sd_s) < 60 else clock(sd_s)}"


def date_time(unix_s: float) -> str:
    """Format a Unix time in seconds as `2026-11-29 07:30:00`, in UTC."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S}"


def aligned(rows: Sequence[Sequence[str]], columns: str = "<>") -> list[str]:
    """Return the rows of a table as aligned lines of text, with two spaces between columns and no trailing spaces.

    Args:
        rows: cells of each row, the same number in every row; the first row may be a header.
        columns: alignment of each column: `<` is left, `>` is right. The last one also holds for further columns.

    >>> aligned([("fault", "count"), ("kill", "7")])
    ['fault  count', 'kill       7']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = columns.ljust(len(widths), columns[-1])
    forms = [f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=False)]
    return ["  ".join(forms).format(*row).rstrip() for row in rows]
