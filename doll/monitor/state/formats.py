"""Numbers and times as text for people."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def known(value: float) -> bool:
    """Whether there is a number to show."""
    return math.isfinite(value)


def number(value: float) -> str:
    """Three significant digits, or all before the point; `?` if it is not known, `unlimited` if it is infinite."""
    if math.isnan(value):
        return "?"
    return "unlimited" if math.isinf(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def of(count: int, total: int | None) -> str:
    """`45 of 1,300`: with commas between thousands, as in all texts."""
    return f"{count:,}" if total is None else f"{count:,} of {total:,}"


def byte_size(count: float) -> str:
    """`512 B`, `3.1 kB`, `12.0 MB`; a kB is 1000 bytes.

    >>> byte_size(512), byte_size(3_140), byte_size(12_000_000)
    ('512 B', '3.1 kB', '12.0 MB')
    """
    size, units = float(count), ["B", "kB", "MB", "GB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def clock(seconds: float) -> str:
    """`12 s`, `3:05` or `2:03:05`."""
    if not known(seconds):
        return ""
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def clock_range(seconds: float, sd_s: float) -> str:
    """A time and its standard deviation, both in the units of `clock`.

    >>> clock_range(42.1, 3.9), clock_range(262, 4.2), clock_range(2540, 180)
    ('42 ± 4 s', '4:22 ± 0:04', '42:20 ± 3:00')
    """
    text = clock(seconds)
    if not (known(seconds) and known(sd_s)) or sd_s <= 0:
        return text
    if round(seconds) < 60 and sd_s < 60:
        return f"{seconds:.0f} ± {sd_s:.0f} s"
    return f"{text} ± {f'0:{sd_s:02.0f}' if round(sd_s) < 60 else clock(sd_s)}"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """A line of text for each row: columns are as wide as their widest cell, and right-aligned except those in `left`.

    >>> aligned([("policy", "time"), ("bsp", "3:05")])
    ['policy  time', 'bsp     3:05']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def visible(value: Any) -> Any:
    r"""The same texts, lists and mappings, without characters that a reader does not see: control characters, and those
    that turn the direction of a text. Each becomes its escape; an end of line stays.

    >>> visible({"reason": ["abc\u202e", 1]})
    {'reason': ['abc\\u202e', 1]}
    """
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in value)
    if isinstance(value, Mapping):
        return {name: visible(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [visible(item) for item in value]
    return value
