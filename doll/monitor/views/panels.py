"""Charts of any series, as plain values that `static/panels.js` draws: lines over an axis. Pure.

`moving_mean` smooths a series.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

Series = npt.NDArray[np.float64]
Panel = dict[str, Any]
Line = dict[str, Any]

# More points than pixels only make the file larger.
_MAX_POINTS: Final = 2_000


def line(
    label: str, x: npt.ArrayLike, y: npt.ArrayLike, style: Literal["line", "step", "bars", "formula", "mark"] = "line"
) -> Line:
    """Return a curve, thinned out, in the units of its panel's labels; values that are not finite are left out."""
    at, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    kept = np.flatnonzero(np.isfinite(values))
    kept = kept[:: max(1, math.ceil(len(kept) / _MAX_POINTS))]
    return {"label": label, "x": _rounded(at[kept]), "y": _rounded(values[kept]), "style": style}


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def panel(title: str, x_label: str, y_label: str, *lines: Line) -> Panel:
    """Return a chart of lines over a common axis."""
    return {"title": title, "x_label": x_label, "y_label": y_label, "lines": list(lines)}


def staleness_panel(counts: Mapping[str, Mapping[int, int]], *, bars: bool = False) -> Panel:
    """Return a chart of the share of reads with each difference.

    Args:
        counts: number of reads by difference, for each label.
        bars: whether to draw bars, for a single label.
    """
    lines = []
    for label, histogram in counts.items():
        reads = sum(histogram.values())
        shares = [100 * histogram[difference] / reads for difference in sorted(histogram)]
        lines.append(line(label, sorted(histogram), shares, "bars" if bars else "line"))
    return panel("Staleness", "newest batch of another worker - own batch", "% of reads", *lines)


def moving_mean(values: Series, weights: Series, window: int) -> Series:
    """Return the weighted mean of the last `window` values at each index; NaN values have no weight."""
    known = np.isfinite(values)
    weight = np.concatenate([[0.0], np.cumsum(np.where(known, weights, 0.0))])
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values * weights, 0.0))])
    upper = np.arange(1, len(values) + 1)
    lower = np.maximum(upper - window, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((total[upper] - total[lower]) / (weight[upper] - weight[lower]), dtype=np.float64)
