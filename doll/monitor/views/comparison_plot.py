"""The picture of a comparison: loss over time and samples, staleness, blocked time and bytes, of each policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from doll.errors import ConfigError
from doll.monitor.views.comparison import Comparison, PolicyRun

_MAX_POINTS = 2000
_TARGET = "#333333"


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
    for run, color in zip(comparison.runs, colors, strict=True):
        curve = run.loss(comparison.kind)
        kept = np.isfinite(curve.loss)
        x, y = getattr(curve, name)[kept], curve.loss[kept]
        step = max(1, len(x) // _MAX_POINTS)
        axes.plot(x[::step], y[::step], color=color, linewidth=1.4, label=run.label)
    if np.isfinite(comparison.target_loss):
        axes.axhline(comparison.target_loss, color=_TARGET, linestyle="--", linewidth=1)
    _decorate(axes, f"Loss, {comparison.kind}", label, "loss")
    axes.legend(fontsize=8, frameon=False)


def _staleness(axes: Any, comparison: Comparison, colors: Any) -> None:
    for run, color in zip(comparison.runs, colors, strict=True):
        if run.summary is None or not run.summary.reads:
            continue
        differences = sorted(run.summary.histogram)
        shares = [100 * run.summary.histogram[difference] / run.summary.reads for difference in differences]
        axes.plot(differences, shares, color=color, marker="o", markersize=3, linewidth=1, label=run.label)
    _decorate(axes, "Staleness", "newest batch of another worker - own batch", "% of reads")
    axes.set_ylim(bottom=0)


def _bars(axes: Any, comparison: Comparison, colors: Any, title: str, unit: str, value: Any) -> None:
    values = [value(run) for run in comparison.runs]
    axes.bar(range(len(values)), values, color=colors)
    axes.set_xticks(range(len(values)), [run.label for run in comparison.runs], rotation=20, ha="right")
    _decorate(axes, title, "", unit)


def _decorate(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)


def _blocked(run: PolicyRun) -> float:
    share = np.nan if run.summary is None else run.summary.blocked_share
    return float(np.nan_to_num(100 * share))


def _megabytes(run: PolicyRun) -> float:
    return 0.0 if run.summary is None else run.summary.gradient_bytes / 1e6


def _usd(run: PolicyRun) -> float:
    return float(np.nan_to_num(run.usd))


def _rate(run: PolicyRun) -> float:
    return float(np.nan_to_num(run.updates / run.seconds)) if run.seconds else 0.0
