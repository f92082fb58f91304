"""The picture of a run: the four questions of its page, each with its answer and what it rests on."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from doll.monitor.state.formats import clock, known
from doll.monitor.state.market_history import MarketHistory
from doll.monitor.state.watched_job import PageState
from doll.monitor.views.page import QUESTIONS, Fact, page
from doll.monitor.views.plots import HELD_OUT, PREQUENTIAL, THEORY, Curve, Panel, draw_panel

_WIDTH: Final = 78  # characters of a line
_MAX_BARS: Final = 60  # with a number under each
_MAX_LINES: Final = 4
_MAX_EVENTS: Final = 12
_MAX_DECISIONS: Final = 8
_MAX_TEXT: Final = 26  # lines that fit a panel
_TONES: Final = {"good": "#1a7f5a", "warn": "#9a6700", "bad": "#b3261e", "none": "#444444"}
_NOT_REPEATED: Final = ("updates per second", "best prequential")


def draw(state: PageState, path: Path) -> None:
    """Write the picture to `path` as a PNG.

    Raises:
        OSError: `path` cannot be written.
    """
    from doll.process.figures import new_figure

    shown = page(state)
    job = shown["job"]
    figure = new_figure(13, 8.2)
    figure.suptitle(
        f"{job['name']}: {job['doing']} in {job['time'] or 'no time'} ({job['state']}); {job['shape']}", fontsize=12
    )
    axes = dict(zip(QUESTIONS, figure.subplots(2, 2).flat, strict=True))
    draw_panel(axes["learning"], error_panel(shown["curves"]))
    draw_panel(axes["progress"], progress_panel(state, shown["curves"]))
    _records(axes["safety"], shown["questions"]["safety"]["facts"], _events(state), _decisions(state))
    _work(axes["work"], state)
    for name, title in QUESTIONS.items():
        _answer(axes[name], title, shown["questions"][name], with_facts=name != "safety")
    figure.savefig(path)


def error_panel(curves: dict[str, Any]) -> Panel:
    """Prequential and held-out error over time: the accuracy where there is one and no loss is to be reached."""
    marks = curves["marks"]
    has_accuracy = any(curves["accuracy"].values())
    name = "accuracy" if has_accuracy and not ("loss" in marks and "accuracy" not in marks) else "loss"
    drawn = [
        _curve("prequential", curves[name]["prequential"], PREQUENTIAL),
        _curve("held out", curves[name]["held_out"], HELD_OUT, style="--"),
    ]
    if name in marks:
        drawn.append(_line(f"target {marks[name]:g}", (0.0, _last_s(drawn)), (marks[name], marks[name]), ":"))
    return Panel("", "seconds since the first update", name, drawn)


def progress_panel(state: PageState, curves: dict[str, Any]) -> Panel:
    """Samples over time, with the pace that the deadline needs, and that which theory predicts."""
    marks, snapshot = curves["marks"], state.snapshot
    learned = _curve("samples learned", curves["samples"], PREQUENTIAL)
    drawn, end_s = [learned], _last_s([learned])
    if "deadline_s" in marks and "samples" in marks:
        pace = (0.0, float(marks["deadline_s"])), (0.0, float(marks["samples"]))
        drawn.append(_line("pace needed for the deadline", *pace))
    if known(snapshot.rate_predicted) and len(learned.y):
        per_s = snapshot.rate_predicted * state.config.group_size * state.config.data.batch_size
        first = float(learned.y[0])
        drawn.append(_line("at the update rate of theory, Nλ/(Kb)", (0.0, end_s), (first, first + per_s * end_s), ":"))
    return Panel("", "seconds since the first update", "samples", drawn)


def _curve(label: str, points: dict[str, list[float]], color: str, *, style: str = "-") -> Curve:
    rows = np.array(sorted(points.values()), dtype=np.float64).reshape(-1, 2)
    return Curve(label, rows[:, 0], rows[:, 1], color, style, marker="o" if 0 < len(rows) < 40 else "")


def _line(label: str, x: Sequence[float], y: Sequence[float], style: str = "--") -> Curve:
    return Curve(label, np.array(x), np.array(y), THEORY, style)


def _last_s(curves: Sequence[Curve]) -> float:
    return max((float(curve.x[-1]) for curve in curves if len(curve.x)), default=1.0)


def _answer(axes: Any, title: str, question: dict[str, Any], *, with_facts: bool) -> None:
    """The title of a panel: the question, its answer, and the facts on few lines."""
    facts = [f"{bar['label']} {bar['text']}" for bar in question.get("bars", ())]
    facts += [f"{name} {text}" for name, text in question["facts"] if name not in _NOT_REPEATED]
    text = "  ·  ".join(fact.replace(" ", "\N{NO-BREAK SPACE}") for fact in facts)
    lines = textwrap.wrap(text, _WIDTH + 24, break_on_hyphens=False)[:_MAX_LINES] if with_facts else []
    axes.set_title("\n".join(lines), fontsize=8, loc="left", color="#555555")
    answer = textwrap.shorten(question["verdict"], _WIDTH, placeholder=" ...")
    axes.annotate(
        f"{title}  {answer}", (0, 1), (0, 11 * len(lines) + 8), xycoords="axes fraction", textcoords="offset points",
        fontsize=11, weight="bold", color=_TONES[question["tone"]], annotation_clip=False,
    )  # fmt: skip


def _events(state: PageState) -> list[Fact]:
    """The newest of them, with seconds since the first update."""
    start_s = state.history.first_time_s
    newest = list(state.events)[-_MAX_EVENTS:]
    return [(clock(at_s - start_s) if known(at_s) and at_s >= start_s else "", text) for at_s, text in newest]


def _decisions(state: PageState) -> list[Fact]:
    """The newest of the provisioner, with the time on the job's clock."""
    newest = list(state.decisions.notable)[-_MAX_DECISIONS:]
    return [(clock(item.get("elapsed_s", math.nan)), "; ".join(item["actions"]) or item["phase"]) for item in newest]


def _records(axes: Any, *parts: Sequence[Sequence[str]]) -> None:
    """A panel of text: facts, then events."""
    lines: list[str] = []
    for part in parts:
        for name, text in part:
            indent = f"{name:<14}"
            lines += textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent))[:2]
        lines += [""] * bool(part)
    axes.set_axis_off()
    axes.text(0, 1, "\n".join(lines[:_MAX_TEXT]), va="top", fontsize=8, family="monospace", transform=axes.transAxes)


def _work(axes: Any, state: PageState) -> None:
    """With a provisioner: who ran on which market when. Else: the share of its time in which each worker computed."""
    axes.tick_params(labelsize=8)
    axes.grid(axis="x" if state.decisions.market.points else "y", alpha=0.25)
    if state.decisions.market.points:
        _timeline(axes, state.decisions.market, _elapsed(state))
        return
    shares = {line.worker: 100 * line.computing for line in state.snapshot.workers if known(line.computing)}
    if not shares:
        draw_panel(axes, Panel("", "worker", "% of the time computing", []))
        return
    axes.bar(range(len(shares)), list(shares.values()), color=PREQUENTIAL)
    if len(shares) <= _MAX_BARS:
        axes.set_xticks(range(len(shares)), list(shares))
    axes.set_xlabel("worker", fontsize=9)
    axes.set_ylabel("% of the time computing", fontsize=9)


def _timeline(axes: Any, history: MarketHistory, end_s: float) -> None:
    """A line for each worker: spot thin, on-demand thick."""
    from doll.process.figures import Patch

    for market, color, height in (("spot", PREQUENTIAL, 0.4), ("on_demand", HELD_OUT, 0.8)):
        for slot, spans in enumerate(history.spans):
            bars = [
                (span.begin_s, (end_s if span.end_s is None else span.end_s) - span.begin_s)
                for span in spans
                if span.market == market
            ]
            axes.broken_barh(bars, (slot - height / 2, height), color=color)
    axes.set(xlim=(0, end_s), ylim=(1.08 * len(history.spans), -0.6))
    axes.set_xlabel("seconds on the job's clock", fontsize=9)
    axes.set_ylabel("worker", fontsize=9)
    if len(history.spans) <= _MAX_BARS:
        axes.set_yticks(range(len(history.spans)))
    keys = [Patch(color=PREQUENTIAL, label="spot"), Patch(color=HELD_OUT, label="on-demand")]
    axes.legend(handles=keys, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 0), ncols=2)


def _elapsed(state: PageState) -> float:
    return max(1.0, float(state.decisions.newest.get("elapsed_s", 1.0)))
