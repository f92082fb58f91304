"""Numbers and times as text for people."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def known(value: float) -> bool:
    """Whether there is a number to show."""
    return math.isfinite(value)


def number(value: float) -> str:
    """Three significant digits; `?` if it is not known, `unlimited` if it is infinite."""
    if math.isnan(value):
        return "?"
    return "unlimited" if math.isinf(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def of(count: int, total: int | None) -> str:
    """`45 of 300`, with thin groups of thousands."""
    text = f"{count:,}".replace(",", " ")
    return text if total is None else f"{text} of {total:,}".replace(",", " ")


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
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
