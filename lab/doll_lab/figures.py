"""Drawing of figures with matplotlib's object interface and its Agg canvas, whatever backend the environment sets.

Import this module in the function that draws: matplotlib takes 1.5 s of processor time to load.
"""

from __future__ import annotations

import os
from typing import Any

# The shell of a notebook sets a backend that may not be installed here; matplotlib then refuses to load.
os.environ["MPLBACKEND"] = "agg"

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

__all__ = ["Patch", "colormaps", "decorate", "new_figure"]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this width and height in inches."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    return figure


def decorate(axes: Any, title: str, x_label: str, y_label: str) -> None:
    """Set the title, the labels and the grid of one of several panels of a figure."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)
