"""The plot of a run: error over updates and over time, and the update rate compared with theory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from doll.monitor.state.history import History

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
    from_zero: bool = False


@dataclass(frozen=True)
class Curve:
    label: str
    x: Series
    y: Series
    color: Any
    style: str = "-"
    marker: str = ""
    bars: bool = False


def draw(
    history: History,
    path: Path,
    *,
    job: str,
    predicted_rate: float,
    target_accuracy: float | None = None,
    staleness: Mapping[int, int] | None = None,
) -> None:
    """Write the run as a PNG to `path`.

    Args:
        predicted_rate: λ_U = Nλ/(Kb), updates per second; NaN or infinite: no line for it.
        target_accuracy: drawn as a line where given.
        staleness: reads by their difference (`doll.theory.staleness`).

    Raises:
        OSError: `path` cannot be written.
    """
    panels = make_panels(history, predicted_rate=predicted_rate, target_accuracy=target_accuracy)
    if staleness:
        panels.append(staleness_panel(staleness))
    from doll.process.figures import new_figure

    figure = new_figure(5.2 * math.ceil(len(panels) / 2), 7.4)
    figure.suptitle(_headline(history, job), fontsize=12)
    spec = figure.add_gridspec(2, math.ceil(len(panels) / 2))
    for at, panel in enumerate(panels):
        column, row = divmod(at, 2)
        is_alone = row == 0 and at == len(panels) - 1  # in its column, which it fills
        draw_panel(figure.add_subplot(spec[:, column] if is_alone else spec[row, column]), panel)
    figure.savefig(path)


def make_panels(history: History, *, predicted_rate: float, target_accuracy: float | None) -> list[Panel]:
    """The panels of a run: pairs of (over updates, over time), column by column."""
    updates, evaluations = history.updates, history.evaluations
    start_s = history.first_time_s
    at_s, at_version = updates.valid("time_s") - start_s, updates.valid("version")
    held_s, held_version = evaluations.valid("time_s") - start_s, evaluations.valid("version")
    weight = updates.valid("weight")
    window = min(50, max(5, len(weight) // 10))
    panels = []
    for name, title in (("loss", "Loss"), ("accuracy", "Accuracy")):
        before = f"prequential_{name}"
        y = moving_mean(updates.valid(before), weight, window) if before in updates.names else None
        held = evaluations.valid(name)
        if y is None and not np.isfinite(held).any():
            continue
        for x, held_x, x_label in (
            (at_version, held_version, "update"),
            (at_s, held_s, "seconds since the first update"),
        ):
            curves = []
            if y is not None:
                curves.append(Curve(f"prequential, mean of {window} updates", x, y, PREQUENTIAL))
            if np.isfinite(held).any():
                curves.append(Curve("held out", held_x, held, HELD_OUT, marker="o" if len(held) < 60 else ""))
            if name == "accuracy" and target_accuracy is not None and len(x):
                curves.append(_level(f"target {target_accuracy:g}", x, target_accuracy))
            panels.append(Panel(title, x_label, "loss" if name == "loss" else "accuracy (share right)", curves))
    panels.extend(_rate_panels(at_s, at_version, predicted_rate))
    return panels


def _rate_panels(at_s: Series, at_version: Series, predicted_rate: float) -> list[Panel]:
    is_known = math.isfinite(predicted_rate) and predicted_rate > 0
    rate_x, rate_y = moving_rate(at_s)
    rates = [Curve("measured", rate_x, rate_y, PREQUENTIAL)]
    progress = [Curve("updates done", at_s, at_version, PREQUENTIAL)]
    if is_known and len(at_s):
        rates.append(_level(f"Nλ/(Kb) = {predicted_rate:.3g}/s", at_s, predicted_rate))
        theory = at_version[0] + predicted_rate * at_s
        progress.append(Curve("first update + Nλ/(Kb) t", at_s, theory, THEORY, "--"))
    return [
        Panel("Updates against theory", "seconds since the first update", "updates", progress),
        Panel("Update rate", "seconds since the first update", "updates per second", rates, from_zero=True),
    ]


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


def moving_rate(times_s: Series) -> tuple[Series, Series]:
    """Times and updates per second, each over a window of a tenth of the updates, 5 to 50 of them."""
    gaps = int(min(50, max(5, len(times_s) // 10)))
    if len(times_s) <= gaps:
        return np.zeros(0), np.zeros(0)
    spans = times_s[gaps:] - times_s[:-gaps]
    with np.errstate(divide="ignore"):
        rates = np.where(spans > 0, gaps / spans, np.nan)
    return times_s[gaps:], np.asarray(rates, dtype=np.float64)


def _top(curves: Sequence[Curve]) -> float:
    """An upper limit of the axis, so that a burst (a backlog that is processed) does not flatten the rest."""
    usual = max(float(np.nanmedian(curve.y)) for curve in curves if np.isfinite(curve.y).any())
    most = max(float(np.nanmax(curve.y)) for curve in curves if np.isfinite(curve.y).any())
    return 1.05 * min(most, 3 * usual)


def _level(label: str, x: Series, y: float) -> Curve:
    return Curve(label, np.array([x[0], x[-1]]), np.array([y, y]), THEORY, "--")


def _headline(history: History, job: str) -> str:
    samples = f"{history.samples_total:,}".replace(",", " ")
    text = f"{job}: {history.version} updates, {samples} samples"
    seconds = history.last_time_s - history.first_time_s
    if math.isfinite(seconds):
        text += f", {seconds:.0f} s"
    last = history.evaluations.last()
    if last is not None and math.isfinite(last["accuracy"]):
        text += f", held-out accuracy {last['accuracy']:.3f}"
    return text


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
    if drawn and panel.from_zero:
        axes.set_ylim(0, _top(panel.curves))
    if drawn:
        axes.legend(fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "no data yet", ha="center", va="center", transform=axes.transAxes)
