"""Times on the command line, written the same way in every option."""

from __future__ import annotations

import math
import re
from typing import Final

import typer

_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ms|s|min|m|h|d)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
METAVAR: Final = "TIME"


def seconds(value: str | float) -> float:
    """The seconds of `5400`, `90m`, `1.5h` or `1h30m`.

    Raises:
        BadParameter: it is not in one of these forms.
    """
    text = str(value).replace(" ", "")
    if _NUMBER.fullmatch(text):
        total_s = float(text)
    else:
        parts = _PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise typer.BadParameter(f"expected a time such as 5400, 90m, 1.5h or 1h30m, got {str(value)[:60]!r}")
        total_s = sum(float(number) * _UNIT_S[unit.lower()] for number, unit in parts)
    if not math.isfinite(total_s):
        raise typer.BadParameter(f"expected a time that ends, got {str(value)[:60]!r}")
    return total_s
