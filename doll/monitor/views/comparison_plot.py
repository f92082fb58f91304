"""The picture of a comparison: loss over time and samples, staleness, blocked time and bytes, of each policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from doll.errors import ConfigError
from doll.monitor.views.comparison import Comparison, PolicyRun
from doll.monitor.views.plots import THEORY, Curve, Panel, draw_panel


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture to `path`, as PNG or SVG by its suffix.

    Raises:
        ConfigError: it cannot be written.
    """
    from doll.process.figures import colormaps, new_figure

    figure = new_figure(13.5, 8.0)
    figure.suptitle(f"{comparison.job}: {', '.join(run.label for run in comparison.runs)}", fontsize=12)
    palette = colormaps["tab10"].colors  # type: ignore[attr-defined]
    colors = [palette[at % len(palette)] for at in range(len(comparison.runs))]
    (over_time, over_samples, staleness), (blocked, sent, last) = figure.subplots(2, 3)
    _losses(over_time, comparison, colors, "seconds", "seconds since the first update")
    _losses(over_samples, comparison, colors, "samples", "samples in the model")
    _staleness(staleness, comparison, colors)
    _bars(blocked, comparison, colors, "Workers blocked", "% of their time", _blocked)
    _bars(sent, comparison, colors, "Gradients sent", "MB", _megabytes)
    if any(np.isfinite(run.usd) for run in comparison.runs):
        _bars(last, comparison, colors, "Cost", "USD", _usd)
    else:
        _bars(last, comparison, colors, "Updates", "per second", _rate)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error


def _losses(axes: Any, comparison: Comparison, colors: Any, name: str, label: str) -> None:
    curves = []
    for run, color in zip(comparison.runs, colors, strict=True):
        curve = run.loss(comparison.kind)
        kept = np.isfinite(curve.loss)
        curves.append(Curve(run.label, getattr(curve, name)[kept], curve.loss[kept], color))
    draw_panel(axes, Panel(f"Loss, {comparison.kind}", label, "loss", curves))
    if np.isfinite(comparison.target_loss):
        axes.axhline(comparison.target_loss, color=THEORY, linestyle="--", linewidth=1)


def _staleness(axes: Any, comparison: Comparison, colors: Any) -> None:
    curves = []
    for run, color in zip(comparison.runs, colors, strict=True):
        if run.summary is not None and run.summary.staleness.reads:
            differences, counts = zip(*sorted(run.summary.staleness.histogram.items()), strict=True)
            shares = 100 * np.array(counts) / run.summary.staleness.reads
            curves.append(Curve(run.label, np.array(differences), shares, color, marker="o"))
    draw_panel(axes, Panel("Staleness", "newest batch of another worker - own batch", "% of reads", curves))
    axes.set_ylim(bottom=0)


def _bars(axes: Any, comparison: Comparison, colors: Any, title: str, unit: str, value: Any) -> None:
    from doll.process.figures import decorate

    values = [value(run) for run in comparison.runs]
    axes.bar(range(len(values)), values, color=colors)
    axes.set_xticks(range(len(values)), [run.label for run in comparison.runs], rotation=20, ha="right")
    decorate(axes, title, "", unit)


def _blocked(run: PolicyRun) -> float:
    share = np.nan if run.summary is None else run.summary.blocked_share
    return float(np.nan_to_num(100 * share))


def _megabytes(run: PolicyRun) -> float:
    return 0.0 if run.summary is None else run.summary.bytes.gradients / 1e6


def _usd(run: PolicyRun) -> float:
    return float(np.nan_to_num(run.usd))


def _rate(run: PolicyRun) -> float:
    return float(np.nan_to_num(run.updates / run.seconds)) if run.seconds else 0.0
