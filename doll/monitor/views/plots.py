"""What pictures of runs are made of: panels with curves, and moving means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Series = npt.NDArray[np.float64]

PREQUENTIAL, HELD_OUT, THEORY = "#4c78a8", "#e45756", "#333333"
# More points than pixels only make the file larger.
_MAX_POINTS = 4000


@dataclass(frozen=True)
class Panel:
    """One pair of axes: named curves, already in the units of the labels."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]


@dataclass(frozen=True)
class Curve:
    label: str
    x: Series
    y: Series
    color: Any
    style: str = "-"
    marker: str = ""
    bars: bool = False


def staleness_panel(counts: Mapping[int, int]) -> Panel:
    """How many of the reads had each difference."""
    differences = np.array(sorted(counts), dtype=np.float64)
    shares = np.array([counts[int(difference)] for difference in differences], dtype=np.float64)
    curve = Curve("reads", differences, 100 * shares / shares.sum(), PREQUENTIAL, bars=True)
    return Panel("Staleness", "newest batch of another worker - own batch", "% of reads", [curve])


def moving_mean(values: Series, weights: Series, window: int) -> Series:
    """Weighted mean of the last `window` values at each place; NaN values have no weight."""
    known = np.isfinite(values)
    weight = np.concatenate([[0.0], np.cumsum(np.where(known, weights, 0.0))])
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values * weights, 0.0))])
    upper = np.arange(1, len(values) + 1)
    lower = np.maximum(upper - window, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((total[upper] - total[lower]) / (weight[upper] - weight[lower]), dtype=np.float64)


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw the curves that have values, thinned out, or say that there are none yet."""
    from doll.process.figures import decorate

    drawn = False
    for curve in panel.curves:
        if not np.isfinite(curve.y).any():
            continue
        if curve.bars:
            axes.bar(curve.x, curve.y, color=curve.color, label=curve.label)
            drawn = True
            continue
        step = max(1, math.ceil(len(curve.x) / _MAX_POINTS))
        axes.plot(
            curve.x[::step], curve.y[::step], curve.style,
            color=curve.color, marker=curve.marker, markersize=3, linewidth=1.4, label=curve.label,
        )  # fmt: skip
        drawn = True
    decorate(axes, panel.title, panel.x_label, panel.y_label)
    if drawn:
        axes.legend(fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "no data yet", ha="center", va="center", transform=axes.transAxes)
